"""Planned costs against figure 5 of the paper."""

import json
from pathlib import Path

import pytest
from matplotlib import image

from hlat.plan import __main__ as plan
from hlat.plan.cost_figure import build_cost_table
from hlat.plan.token_cost import TokenCost


@pytest.mark.slow
def test_costs_are_close_to_figure_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "cost.png"
    assert plan.main(["cost", "json=true", f"figure={file}"]) == 0
    assert image.imread(file).shape[1] > 900
    result = json.loads(capsys.readouterr().out)
    full = result["baseline_usd"]
    costs = {(one["label"], one["nodes"]): one["usd"] for one in result["costs"]}
    assert costs["7B, planned", 4] / full == pytest.approx(0.64, abs=0.01)  # about 60%
    assert costs["70B, planned", 4] is None  # ran out of memory
    assert costs["70B, planned", 32] / costs["7B, planned", 32] == pytest.approx(12, abs=0.2)
    assert costs["HLAT-7B, published", 4] == pytest.approx(0.873, abs=0.001)
    rows = build_cost_table([TokenCost(**one) for one in result["costs"]], full)
    assert [row for row in rows if row[0] == "70B, planned" and "out of memory" in " ".join(row)]
