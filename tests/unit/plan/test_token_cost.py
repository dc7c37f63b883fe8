"""The paper's figure 5, as far as it can be planned."""

import json
from pathlib import Path

import pytest
from matplotlib import image

from hlat.plan import __main__ as plan
from hlat.plan import token_cost


def test_shares_of_the_baseline_are_near_what_figure_5_shows():
    full = token_cost.compute_baseline_cost()
    planned = {(one.label, one.nodes): one.usd for one in token_cost.compute_planned_costs()}
    assert planned["7B, planned", 4] / full == pytest.approx(0.64, abs=0.01)  # about 60%
    assert planned["70B, planned", 4] is None  # ran out of memory
    assert planned["70B, planned", 32] / planned["7B, planned", 32] == pytest.approx(12, abs=0.2)
    (four,) = [
        one.usd
        for one in token_cost.compute_published_costs()
        if (one.label, one.nodes) == ("HLAT-7B, published", 4)
    ]
    assert four == pytest.approx(0.873, abs=0.001)


def test_the_command_tells_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "cost.png"
    assert plan.main(["cost", "--figure", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "Run"
    assert [line for line in lines if line.startswith("70B, planned") and "out of memory" in line]
    assert image.imread(file).shape[1] > 900
    assert plan.main(["cost", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["baseline_usd"] == token_cost.compute_baseline_cost()
    assert plan.main(["cost", "--figure", "x.pdf"]) == 2
