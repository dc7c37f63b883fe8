"""Composition of points, and their overrides in messages."""

import gc
from collections.abc import Iterator

import pytest
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from hlat import train
from hlat.config import compose as composition
from hlat.config.config_loader import SafeConfigLoader
from hlat.config.package_dirs import find_package_dir

composition.register_configs()
from hydra_plugins.hlat_launchers._sweep_points import (  # noqa: E402 (registered above)
    build_job_return,
    find_shared_overrides,
    format_swept,
    validate_points,
)

POINTS = [["model=tiny", "lr=1", "seed=1"], ["model=tiny", "lr=2", "seed=1"]]


def test_only_overrides_that_differ_are_shown() -> None:
    shared = find_shared_overrides(POINTS)
    assert shared == {"model=tiny", "seed=1"}
    assert [format_swept(point, shared) for point in POINTS] == ["lr=1", "lr=2"]


def test_all_overrides_of_a_single_point_are_shown() -> None:
    shared = find_shared_overrides(POINTS[:1])
    assert format_swept(POINTS[0], shared) == "model=tiny lr=1 seed=1"


def test_overrides_are_counted_once_for_all_points() -> None:
    """Points are read once, and not again for each of them."""

    class Point(list):
        num_reads = 0

        def __iter__(self):
            Point.num_reads += 1
            return super().__iter__()

        def __contains__(self, word):
            raise AssertionError("a point is searched")

    points = [Point([f"seed={number}", "model=tiny"]) for number in range(50)]
    shared = find_shared_overrides(points)
    assert Point.num_reads == 50
    assert [format_swept(point, shared) for point in points[:2]] == ["seed=0", "seed=1"]


@pytest.fixture
def hydra(tmp_path, monkeypatch) -> Iterator[Hydra]:
    monkeypatch.chdir(tmp_path)
    path = create_automatic_config_search_path(None, "hlat.train", str(find_package_dir("conf")))
    yield Hydra.create_main_hydra2("train", path)
    GlobalHydra.instance().clear()


def count_configs() -> int:
    gc.collect()
    return sum(isinstance(each, DictConfig) for each in gc.get_objects())


def test_points_keep_no_composed_configuration(hydra: Hydra) -> None:
    """The memory of a point is that of the sections that differ from other points."""
    config = hydra.compose_config("config", ["run.steps=7"], RunMode.MULTIRUN)
    context = HydraContext(hydra.config_loader, Callbacks())
    overrides = [["run.steps=7", f"run.seed={seed}"] for seed in range(8)]
    validate_points(context, config, overrides[:1], prune=False)
    before = count_configs()
    points = validate_points(context, config, overrides, prune=False)
    returns = [build_job_return(point, 0, "0") for point in points]
    assert count_configs() <= before  # caches may release others
    assert len({id(point.config.run) for point in points}) == 8
    for name in ("model", "batch", "optimizer", "data"):
        assert len({id(getattr(point.config, name)) for point in points}) == 1
    for point, job_return in zip(points, returns, strict=True):
        assert job_return.cfg.run.seed == point.config.run.seed
        assert OmegaConf.to_yaml(job_return.cfg) == point.yaml


@pytest.mark.parametrize("launcher", ["slurm", "basic"])
def test_points_are_composed_once(hydra: Hydra, monkeypatch, launcher) -> None:
    """Hydra's sweeper composes all points before the launcher, unless the launcher does so."""
    composed = []
    load = SafeConfigLoader.load_sweep_config

    def load_sweep_config(loader, master_config, sweep_overrides):
        composed.append(sweep_overrides[-1])
        return load(loader, master_config, sweep_overrides)

    monkeypatch.setattr(SafeConfigLoader, "load_sweep_config", load_sweep_config)
    words = [f"hydra/launcher={launcher}", "hydra.job.chdir=false", "run.seed=1,2,3"]
    if launcher == "slurm":
        hydra.multirun("config", train.main, [*words, "hydra.launcher.dry_run=true"], False)
        assert composed == ["run.seed=1", "run.seed=2", "run.seed=3"]
    else:
        hydra.multirun("config", lambda config: None, words, False)
        assert len(composed) == 6
