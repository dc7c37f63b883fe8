"""Heat maps of the balance of experts over layers and steps, and of their loads."""

import base64
import io
import re

import numpy as np
import pytest
from matplotlib import image

from hlat.report import router_figure
from hlat.report.report_writer import write_report
from hlat.study.run_record import load_run_record
from tests.unit.report.test_report_writer import make_run, metrics_row, write_lines


def write_violations(run_dir, rows: dict[int, object]) -> None:
    write_lines(
        run_dir / "metrics.jsonl",
        [metrics_row(step, router_violations=values) for step, values in rows.items()],
    )


def decode_cells(svg: str) -> np.ndarray:
    """Return the opacity of the pixels of the first image, [rows, columns]."""
    content = re.search(r'href="data:image/png;base64,([^"]*)"', svg)
    assert content is not None
    return image.imread(io.BytesIO(base64.b64decode(content[1])))[..., 3]


def test_opacity_of_a_cell_is_its_share_of_the_largest_value(tmp_path) -> None:
    run_dir = make_run(tmp_path / "run")
    write_violations(run_dir, {10: [0.5, None, 2.0], 20: [1.0, None, 1.0], 30: [0.0, None, 0.5]})
    write_report(run_dir)
    svg = (run_dir / "figures/router_violations.svg").read_text()
    pixels = decode_cells(svg)
    height, width = pixels.shape
    found = pixels[
        np.ix_(
            [height // 6, height // 2, height * 5 // 6], [width // 6, width // 2, width * 5 // 6]
        )
    ]
    expected = [[0.25, 0.5, 0.0], [0, 0, 0], [1.0, 0.5, 0.25]]  # the first row is the lowest one
    assert np.allclose(found, expected, atol=0.01)
    assert (
        "Maximum violation of 3 layers over the steps 10 to 30; highest 2 in layer 2, at the end "
        "from 0 to 0.5."
    ) in (run_dir / "report.html").read_text()


def test_more_rows_than_columns_keep_the_largest_value() -> None:
    steps = np.arange(1.0, 1001.0)
    values = np.zeros((2, 1000))
    values[1, 540] = 3.0
    binned = router_figure._bin_steps(steps, values)
    assert binned.shape == (2, router_figure._MAX_COLUMNS)
    assert not np.isnan(binned).any()
    assert np.argwhere(binned == 3.0).tolist() == [[1, 540 * router_figure._MAX_COLUMNS // 1000]]


@pytest.mark.parametrize("values", [None, "text", [], [None], ["a", {}], [0.0] * 10_001])
def test_runs_without_valid_values_have_no_figure(tmp_path, values: object) -> None:
    run_dir = make_run(tmp_path / "run")
    write_violations(run_dir, {1: values, 2: values})
    assert router_figure.build_router_figures(load_run_record(run_dir)) == []


def test_rows_of_one_step_and_of_another_number_of_layers(tmp_path) -> None:
    run_dir = make_run(tmp_path / "run")
    write_violations(run_dir, {5: [0.0]})
    (figure,) = router_figure.build_router_figures(load_run_record(run_dir))
    assert "highest 0 in layer 0" in figure.render_svg()
    write_violations(run_dir, {5: [0.5], 6: "damaged", 7: [1.0, 2.0]})
    (figure,) = router_figure.build_router_figures(load_run_record(run_dir))
    assert "2 layers over the steps 5 to 7" in figure.alt_text


def test_loads_of_experts_are_those_of_the_newest_row(tmp_path) -> None:
    run_dir = make_run(tmp_path / "run")
    loads = {10: [[3.0, 0.0, 0.0], None], 20: [[0.5, 2.0, 0.5], None]}
    write_lines(
        run_dir / "metrics.jsonl",
        [metrics_row(step, router_loads=values) for step, values in loads.items()],
    )
    write_report(run_dir)
    pixels = decode_cells((run_dir / "figures/router_loads.svg").read_text())
    height, width = pixels.shape
    columns = [width // 6, width // 2, width * 5 // 6]
    found = pixels[np.ix_([height // 4, height * 3 // 4], columns)]
    assert np.allclose(found, [[0.25, 1.0, 0.25], [0, 0, 0]], atol=0.01)  # layer 0 is below
    page = (run_dir / "report.html").read_text()
    assert "Load of 3 experts in 2 layers at step 20; from 0.5 to 2." in page


@pytest.mark.parametrize("loads", ["text", [], [None], [[]], [[1.0], [1.0, 2.0]], [["a"]], [1.0]])
def test_damaged_loads_have_no_figure(tmp_path, loads: object) -> None:
    run_dir = make_run(tmp_path / "run")
    write_lines(run_dir / "metrics.jsonl", [metrics_row(1, router_loads=loads)])
    assert router_figure.build_router_figures(load_run_record(run_dir)) == []
