"""Draw docs/diagrams/*.svg: the package layers, and the numbered paths of docs/architecture.md.

Usage: python docs/draw_diagrams.py
"""

import re
from html import escape
from itertools import pairwise
from pathlib import Path

PAGE = Path(__file__).with_name("architecture.md")
DIAGRAMS = Path(__file__).with_name("diagrams")
CALL = re.compile(r"^\d+\. \[`([\w.]+)`\]\(\.\./([\w/]+)\.py\)", re.MULTILINE)
LAYERS = [
    ("commands", ["train", "plan", "doctor", "evaluate", "report", "average", "export", "..."]),
    (
        "runs",
        [
            "study",
            "plan",
            "recovery",
            "inference",
            "evaluate",
            "report",
            "doctor",
            "prepare",
            "jobs",
        ],
    ),
    ("studies", ["study", "figures", "plan", "checkpoint"]),
    ("engines", ["engine/interface", "engine/native", "engine/nxd", "engine/neuron"]),
    ("parts", ["model", "precision", "optim", "data", "tracking"]),
    ("basis", ["storage", "distributed"]),
    ("configuration", ["config"]),
]
INK, LINE, FILL, LANE = "#1f2933", "#7b8794", "#e8f0fb", "#f5f7fa"
FONT = 'font-family="ui-sans-serif, Helvetica, Arial, sans-serif"'
ROW, LANE_WIDTH, BOX_HEIGHT = 46, 178, 30


def parse_paths(page: str) -> dict[str, list[tuple[str, str]]]:
    """Return for each section with numbered calls its (function, module) pairs in order."""
    sections = {text.splitlines()[0]: CALL.findall(text) for text in page.split("\n## ")[1:]}
    return {title: calls for title, calls in sections.items() if calls}


def draw_path(title: str, calls: list[tuple[str, str]]) -> str:
    """Return an SVG with one lane per package and one box per call, in order from the top."""
    packages = [module.split("/")[module.startswith("hlat/")] for _, module in calls]
    lanes = list(dict.fromkeys(packages))
    width, height = LANE_WIDTH * len(lanes) + 8, ROW * len(calls) + 52
    parts = [
        f'<rect x="{LANE_WIDTH * i + 8}" y="8" width="{LANE_WIDTH - 8}" height="{height - 16}" '
        f'rx="6" fill="{LANE}"/>'
        f'<text x="{LANE_WIDTH * i + LANE_WIDTH / 2 + 4}" y="28" text-anchor="middle" '
        f'font-size="13" font-weight="600" fill="{INK}">{escape(lane)}</text>'
        for i, lane in enumerate(lanes)
    ]
    centers = [
        (LANE_WIDTH * lanes.index(package) + LANE_WIDTH / 2 + 4, ROW * i + 60)
        for i, package in enumerate(packages)
    ]
    parts += [
        f'<path d="M{x0} {y0 + BOX_HEIGHT / 2} L{x1} {y1 - BOX_HEIGHT / 2 - 1}" stroke="{LINE}" '
        'fill="none" marker-end="url(#arrow)"/>'
        for (x0, y0), (x1, y1) in pairwise(centers)
    ]
    for number, ((function, _), (x, y)) in enumerate(zip(calls, centers, strict=True), 1):
        parts.append(
            f'<rect x="{x - LANE_WIDTH / 2 + 8}" y="{y - BOX_HEIGHT / 2}" '
            f'width="{LANE_WIDTH - 16}" height="{BOX_HEIGHT}" rx="5" fill="{FILL}" '
            f'stroke="{LINE}"/><text x="{x}" y="{y + 4}" text-anchor="middle" font-size="11" '
            f'fill="{INK}">{number}. {escape(_shorten(function))}</text>'
        )
    return _wrap(title, width, height, parts)


def draw_packages() -> str:
    """Return an SVG of the package layers; a package imports from its layer and those below."""
    width, parts = 900, []
    for row, (layer, packages) in enumerate(LAYERS):
        y, box = 12 + 58 * row, 752 / len(packages)
        parts.append(
            f'<rect x="8" y="{y}" width="{width - 16}" height="50" rx="6" fill="{LANE}"/>'
            f'<text x="20" y="{y + 30}" font-size="13" font-weight="600" fill="{INK}">{layer}'
            "</text>"
        )
        for i, package in enumerate(packages):
            x = 124 + box * i
            parts.append(
                f'<rect x="{x}" y="{y + 9}" width="{box - 8}" height="32" rx="5" fill="{FILL}" '
                f'stroke="{LINE}"/><text x="{x + box / 2 - 4}" y="{y + 29}" text-anchor="middle" '
                f'font-size="12" fill="{INK}">{package}</text>'
            )
    return _wrap("Packages of hlat", width, 20 + 58 * len(LAYERS), parts)


def _shorten(function: str) -> str:
    """Return a qualified name without its class if it is too long for a box."""
    return function if len(function) <= 25 else function.rpartition(".")[2]


def _wrap(title: str, width: float, height: float, parts: list[str]) -> str:
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" {FONT}><title>{escape(title)}</title>'
        f'{arrow}<rect width="100%" height="100%" rx="8" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def draw_all() -> dict[str, str]:
    """Return the content of every diagram by file name."""
    drawn = {"packages.svg": draw_packages()}
    for title, calls in parse_paths(PAGE.read_text()).items():
        drawn[f"{title.lower().replace(' ', '-')}.svg"] = draw_path(title, calls)
    return drawn


if __name__ == "__main__":
    for name, content in draw_all().items():
        (DIAGRAMS / name).write_text(content)
