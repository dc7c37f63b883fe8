"""Code for sitecustomize.py: replace the figures of reports by empty ones.

Plotting is slower than training a small run. matplotlib is not imported before the report.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder


class _FiguresFinder(MetaPathFinder):
    """Finder that patches hlat.figures.report_figure after its import."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "hlat.figures.report_figure":
            return None
        spec = PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.ReportFigure.render_svg = lambda _: "<svg></svg>"
            module.ReportFigure.render_png = lambda _: b""

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _FiguresFinder())
