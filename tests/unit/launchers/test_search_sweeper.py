"""An interrupted search resumes with the same trials, and runs no trial twice.

Trials are functions of a rate, recorded in the files of hlat.train.
"""

import json
import math
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hlat.config import compose as composition
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.tracking import sweep_log

composition.register_configs()
from hydra_plugins.hlat_launchers.search._search_sweeper import SearchSweeper, build_distribution  # noqa: E402 (known from now)

RATE = {"optimizer.lr": "tag(log,interval(1e-4,1e-1))"}


class Trials:
    """Fake launcher: 2 bits per byte at a rate of 3e-3, and more at other rates."""

    def __init__(self, folder: Path, ends: dict[int, ExitCode] | None = None) -> None:
        self.folder, self.ends = folder, ends or {}
        self.launched: list[list[tuple[str, ...]]] = []

    def launch(self, points, initial_job_idx):
        self.launched.append([*points])
        code = self.ends.pop(initial_job_idx, ExitCode.FINISHED)
        for number, point in enumerate(points, initial_job_idx):
            run = self.folder / f"run_{number}"
            sweep_log.log_point(self.folder, number, run, point, {})
            rate = next(float(word.partition("=")[2]) for word in point if "lr=" in word)
            bits = {"mean": 2 + abs(math.log(rate / 3e-3))}
            events = [{"event": "evaluate", "bits_per_byte": bits}]
            last = {ExitCode.FINISHED: "finish", ExitCode.DIVERGED: "diverge"}.get(
                code, "interrupt"
            )
            run.mkdir(exist_ok=True)
            (run / "events.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in [*events, {"event": last}])
            )
        if code:
            raise SystemExit(code)


def search(folder, trials, ends=None, at_once=1, params=RATE):
    made = SearchSweeper(params, trials, seed=1)
    made.launcher, made.sweep_dir, made.num_parallel_trials = Trials(folder, ends), folder, at_once
    made.parser = OverridesParser.create()
    return made


def rates(*searches):
    return [
        word.partition("=")[2]
        for one in searches
        for points in one.launcher.launched
        for point in points
        for word in point
        if "lr=" in word
    ]


def test_trials_approach_the_optimum(tmp_path, capsys):
    made = search(tmp_path, 20)
    made.sweep(["run.steps=5"])
    assert all(points[0][0] == "run.steps=5" for points in made.launcher.launched)
    found = [abs(math.log(float(rate) / 3e-3)) for rate in rates(made)]
    assert len(found) == 20
    assert sum(found[10:]) < 0.5 * sum(found[:10])
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 21
    best = min(range(20), key=found.__getitem__)
    assert output[-1].startswith("search: 20 trials finished, 0 diverged; best trial")
    assert f"trial {best} [optimizer.lr={rates(made)[best]}]: {2 + found[best]:.4f}" in output[-1]


def test_an_interrupted_search_resumes_with_the_same_trial(tmp_path):
    uninterrupted = search(tmp_path / "whole", 14)
    uninterrupted.sweep([])
    first = search(tmp_path / "parts", 14, ends={12: ExitCode.PREEMPTED})
    with pytest.raises(SystemExit) as end:
        first.sweep([])
    assert end.value.code == ExitCode.PREEMPTED
    second = search(tmp_path / "parts", 14)
    second.sweep([])
    assert rates(first)[-1] == rates(second)[0]
    assert rates(first)[:-1] + rates(second) == rates(uninterrupted)
    third = search(tmp_path / "parts", 14)
    third.sweep([])
    assert not third.launcher.launched


def test_a_diverged_trial_does_not_end_the_search(tmp_path, capsys):
    made = search(tmp_path, 3, ends={1: ExitCode.DIVERGED})
    made.sweep([])
    assert len(made.launcher.launched) == 3
    output = capsys.readouterr().out
    assert "search: trial 1 diverged" in output
    assert "2 trials finished, 1 diverged" in output


@pytest.mark.parametrize(
    "code", [ExitCode.CONFIGURATION, ExitCode.FAILED, ExitCode.UNHEALTHY_NODE, 130]
)
def test_other_exit_codes_end_the_search(tmp_path, code):
    made = search(tmp_path, 3, ends={1: code})
    with pytest.raises(SystemExit) as end:
        made.sweep([])
    assert end.value.code == code
    assert len(made.launcher.launched) == 2


def test_concurrent_trials_are_unique(tmp_path, capsys):
    made = search(tmp_path, 6, at_once=3, params={"optimizer.lr": "1e-3,2e-3"})
    made.sweep([])
    assert [len(points) == len({*points}) for points in made.launcher.launched] == [True, True]
    assert "6 trials finished" in capsys.readouterr().out


def test_a_directory_contains_one_search(tmp_path):
    search(tmp_path, 1).sweep(["run.steps=5"])
    with pytest.raises(
        ConfigError, match=r"contains the search .*run\.steps=5\], .*hydra\.sweep\.dir"
    ):
        search(tmp_path, 1).sweep(["run.steps=6"])


def test_a_point_without_evaluations_ends_the_search(tmp_path):
    made = search(tmp_path, 3)
    made.launcher.launch = lambda points, initial_job_idx: None
    with pytest.raises(ConfigError, match=r"run\.steps=5 optimizer\.lr=.* has no finished run"):
        made.sweep(["run.steps=5"])


def test_a_search_needs_an_axis(tmp_path):
    with pytest.raises(ConfigError, match="needs an axis"):
        search(tmp_path, 1, params={}).sweep(["run.steps=5"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a=interval(1e-4,1e-2)", FloatDistribution(1e-4, 1e-2)),
        ("a=tag(log,interval(1e-4,1e-2))", FloatDistribution(1e-4, 1e-2, log=True)),
        ("a=int(interval(1,8))", IntDistribution(1, 8)),
        ("a=interval(1,8)", FloatDistribution(1.0, 8.0)),
        ("a=range(1,4)", CategoricalDistribution(["1", "2", "3"])),
        ("a=fp32,bf16", CategoricalDistribution(["fp32", "bf16"])),
    ],
)
def test_axes_are_in_hydras_grammar(word, expected):
    assert build_distribution(OverridesParser.create().parse_override(word)) == expected
