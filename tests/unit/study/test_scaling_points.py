"""Points of CSV files, and the messages for files that do not determine a law."""

from pathlib import Path

import numpy as np
import pytest

from hlat.config.config_errors import ConfigError
from hlat.study.scaling_points import PointColumns, load_csv_points, validate_points
from tests.unit.study.scaling_data import build_inputs, compute_losses

COLUMNS = PointColumns("parameters", None, None, "loss")


def write_points(file: Path, header: str, rows: list[str]) -> Path:
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


def build_rows(flops_unit: float = 1.0) -> list[str]:
    inputs = build_inputs(3, 3)
    flops = 6 * inputs.prod(0) / flops_unit
    columns = (*inputs.tolist(), flops.tolist(), compute_losses(inputs).tolist())
    return [",".join(map(repr, row)) for row in zip(*columns, strict=True)]


def test_points_are_read_with_tokens_from_flops(tmp_path: Path) -> None:
    header = "parameters,seen,flops,loss"
    file = write_points(tmp_path / "points.csv", header, build_rows())
    points = load_csv_points(file, COLUMNS)
    np.testing.assert_allclose(points.inputs, build_inputs(3, 3), rtol=1e-12)
    assert points.names[0] == "line 2"
    assert points.flops_factor == pytest.approx(6)
    validate_points(points)
    named = load_csv_points(file, PointColumns("parameters", "seen", None, "loss", "seen"))
    np.testing.assert_allclose(named.tokens, points.tokens)
    assert len(set(named.groups)) == 3


def test_highest_losses_are_dropped(tmp_path: Path) -> None:
    file = write_points(tmp_path / "points.csv", "parameters,tokens,flops,loss", build_rows())
    points = load_csv_points(file, COLUMNS)
    kept = points.drop_highest(2)
    assert len(kept) == 7
    assert sorted(kept.losses) == sorted(points.losses)[:7]
    with pytest.raises(ConfigError, match=r"drop_highest=9, but .* has 9 points"):
        points.drop_highest(9)


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("n,tokens,loss", ["1,2,3"], "no column parameters; name it with parameters=COLUMN"),
        ("parameters,loss", ["1,2"], "no column tokens or flops; name one with tokens=COLUMN"),
        ("parameters,tokens,loss", ["1,2,nan"], "line 2: loss=nan is not a number above 0"),
        ("parameters,tokens,loss", ["1,2,3", "1,x,3"], "line 3: tokens=x is not a number"),
        ("parameters,tokens,loss", ["1,2"], "line 2: loss=nothing is not a number"),
        ("parameters,tokens,loss", [], "has no rows; give a CSV file with a header and points"),
    ],
)
def test_wrong_cells_are_errors(tmp_path: Path, header: str, rows: list[str], message: str) -> None:
    file = write_points(tmp_path / "points.csv", header, rows)
    with pytest.raises(ConfigError) as caught:
        load_csv_points(file, COLUMNS)
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_all_wrong_cells_are_reported(tmp_path: Path) -> None:
    rows = ["1,2,nan", "-1,2,3"]
    file = write_points(tmp_path / "points.csv", "parameters,tokens,loss", rows)
    with pytest.raises(ConfigError) as caught:
        load_csv_points(file, COLUMNS)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"\xff\xfe\x00,", "not a CSV file in UTF-8")],
)
def test_unreadable_files_are_errors(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "points.csv"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_csv_points(file, COLUMNS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (build_rows()[:2], "has 2 points, and the law of parameters and tokens has 5 constants"),
        (
            [f"1e7,{d}e9,{6e16 * d},{3 - d / 10}" for d in range(1, 8)],
            "have 1e+07 parameters, so that their exponent is unknown; give points with at least 3",
        ),
        (build_rows(1000.0), "6e+13 FLOPs are 0.001 times 6 x 1e+07 parameters x 1e+09 tokens"),
        ([*build_rows(), "1e7,1e9,6e13,3.0"], "line 11: 6e+13 FLOPs are 0.001 times"),
    ],
)
def test_points_without_a_law_are_errors(tmp_path: Path, rows: list[str], message: str) -> None:
    file = write_points(tmp_path / "points.csv", "parameters,tokens,flops,loss", rows)
    with pytest.raises(ConfigError) as caught:
        validate_points(load_csv_points(file, COLUMNS))
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1
