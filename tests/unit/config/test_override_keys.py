import sys

import pytest

from hlat.config import override_keys
from hlat.config.config_errors import ConfigError
from hlat.config.entry_point import run_entry_point
from hlat.config.sweep_axes import load_sweep_axes


def test_find_repeated_keys() -> None:
    words = ["optimizer.lr=1e-3,2e-3", "--config-dir=a", "--config-dir=b", "~data.sources.a"]
    words += ["+data.sources.a={paths: [x]}", "run.name='a=b'", "+optimizer.lr=1e-4"]
    with pytest.raises(ConfigError) as raised:
        override_keys.validate_distinct_keys(words)
    assert raised.value.problems == (
        "optimizer.lr is set 2 times: optimizer.lr=1e-3,2e-3 and +optimizer.lr=1e-4; "
        "keep one of them",
    )


def test_merge_overrides() -> None:
    defaults = ["--flag", "run.steps=4", "+sweep=beta2", "model=7b"]
    overrides = ["model=13b", "--flag", "run.steps=6"]
    assert override_keys.merge_overrides(defaults, overrides) == [
        *("--flag", "+sweep=beta2"),
        *overrides,
    ]


def test_a_sweep_refuses_a_repeated_key(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["hlat.train", "-m", "optimizer.lr=1,3", "optimizer.lr=2"])
    with pytest.raises(SystemExit) as ended:
        run_entry_point(lambda config: pytest.fail("the task has started"))
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "hlat: optimizer.lr is set 2 times: optimizer.lr=1,3 and optimizer.lr=2; keep one of them\n"
    )


def test_the_plan_of_a_sweep_refuses_a_repeated_key() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr is set 2 times"):
        load_sweep_axes(["optimizer.lr=1,3", "optimizer.lr=2"])


def test_override_of_an_axis_of_a_study_replaces_it_with_a_message(capsys) -> None:
    sweep = load_sweep_axes(["+sweep=beta2_normuon", "optimizer.normuon.beta2=0.9"])
    assert "optimizer.normuon.beta2" not in sweep.axes
    assert {"optimizer.normuon.beta2=0.9", "+sweep=beta2_normuon"} == {*sweep.overrides}
    assert capsys.readouterr().err == (
        "hlat: optimizer.normuon.beta2=0.9 replaces the axis optimizer.normuon.beta2=0.95,0.99 of the "
        "study\n"
    )
