"""Figures of panels with many curves."""

import numpy as np
import pytest

from hlat.figures.report_figure import FIGURE_SIZE, Panel, build_panel_figure
from hlat.study.metric_curves import Curve


def build_panel(num_curves: int, suffix: str = "") -> Panel:
    steps = np.arange(5, dtype=np.float64)
    curves = [
        Curve(f"lr={number}e-4, seed=1{suffix}", steps, steps + number, steps, steps)
        for number in range(num_curves)
    ]
    return Panel("loss", "Training loss", "nats per token", curves)


@pytest.mark.parametrize(("num_curves", "num_labels"), [(2, 2), (40, 40), (41, 12), (300, 12)])
def test_the_legend_of_many_curves_has_a_bounded_size(num_curves: int, num_labels: int) -> None:
    figure = build_panel_figure(build_panel(num_curves)).draw()
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(texts) == num_labels
    assert texts[0] == "lr=0e-4, seed=1"
    if num_labels < num_curves:
        assert texts[-1] == f"and {num_curves - num_labels + 1} more"
        assert legend.get_window_extent().height / figure.dpi < FIGURE_SIZE[1] / 2
    assert len(figure.axes[0].get_lines()) == num_curves


@pytest.mark.filterwarnings("error")  # that of matplotlib if a legend covers the axes
@pytest.mark.parametrize("num_curves", [2, 12, 40])
def test_long_labels_do_not_reduce_the_axes(num_curves: int) -> None:
    figure = build_panel_figure(build_panel(num_curves, ", precision=bf16_sr_master (8 seeds)"))
    drawn = figure.draw()
    drawn.draw_without_rendering()
    assert drawn.axes[0].get_window_extent().height / drawn.dpi > FIGURE_SIZE[1] / 3
