"""Concurrent points stay within the budget, and no sweep starts if a point exceeds it."""

import pytest

from hlat.config import compose as composition
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.plan.memory_estimate import estimate_memory

composition.register_configs()
from hydra_plugins.hlat_launchers.local._core_budget import (  # noqa: E402 (registered above)
    LocalDevices,
    ResourceBudget,
    ResourceRequest,
    build_budget,
    compute_request,
    find_budget_violations,
    list_devices,
)
from hydra_plugins.hlat_launchers.local._local_launcher import (  # noqa: E402 (registered above)
    LocalLauncherConfig,
    validate_local_settings,
)

NONE = LocalDevices("cpu", ())
FOUR = LocalDevices("cuda", ("4", "5", "6", "7"))


@pytest.fixture
def config(compose, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return lambda *overrides: resolve_config(compose("run.name=x", *overrides))


def make_budget(jobs=4, cores=8, memory=2.0**40, devices=NONE) -> ResourceBudget:
    return ResourceBudget(jobs, cores, memory, devices)


def make_request(processes=1, threads=1, memory=0.0, devices=0) -> ResourceRequest:
    return ResourceRequest(processes, threads, memory, devices)


@pytest.mark.parametrize(
    ("least", "each"),
    [
        (make_budget(jobs=2), make_request()),
        (make_budget(cores=8), make_request(processes=2, threads=2)),
        (make_budget(memory=10.0), make_request(memory=5.0)),
        (make_budget(devices=FOUR), make_request(devices=2)),
    ],
    ids=["jobs", "cores", "memory", "devices"],
)
def test_two_points_fit_and_a_third_does_not(least, each):
    assert least.can_start(each, [])
    assert least.can_start(each, [each])
    assert not least.can_start(each, [each, each])


def test_default_budget_is_sequential_and_sets_no_threads():
    assert ResourceBudget().can_start(ResourceRequest(), [])
    assert not ResourceBudget().can_start(ResourceRequest(), [ResourceRequest()])
    assert ResourceBudget().build_environment(ResourceRequest(), []) == {}


def test_concurrent_points_divide_the_cores(config):
    assert compute_request(config(), make_budget(jobs=2, cores=8)).threads_per_process == 4
    two = compute_request(config("parallelism.tp=2"), make_budget(jobs=2, cores=8))
    assert (two.num_processes, two.threads_per_process, two.num_cores) == (2, 2, 4)
    assert compute_request(config(), make_budget(jobs=9, cores=2)).threads_per_process == 1


@pytest.mark.parametrize(("text", "threads"), [("3", 3), ("3,1", 3), ("", 2), ("many", 2)])
def test_threads_of_the_user_are_used(config, monkeypatch, text, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert compute_request(config(), make_budget(jobs=4, cores=8)).threads_per_process == threads


def test_memory_is_the_estimate_for_all_processes_on_this_machine(config):
    tp2 = config("parallelism.tp=2")
    assert compute_request(tp2, make_budget()).memory_bytes == 2 * estimate_memory(tp2).total
    assert compute_request(config("hardware.memory_gib=16"), make_budget()).memory_bytes == 0


def test_devices_are_requested_if_available_and_configured(config):
    tp2 = config("parallelism.tp=2")
    assert compute_request(tp2, make_budget(devices=FOUR)).num_devices == 2
    assert compute_request(tp2, make_budget()).num_devices == 0
    on_cpu = config("parallelism.tp=2", "engine.device=cpu")
    assert compute_request(on_cpu, make_budget(devices=FOUR)).num_devices == 0


@pytest.mark.parametrize(
    ("device_type", "count", "environment", "names"),
    [
        ("cuda", 2, {}, ("0", "1")),
        ("cuda", 2, {"CUDA_VISIBLE_DEVICES": "6, 3"}, ("6", "3")),
        ("cuda", 2, {"CUDA_VISIBLE_DEVICES": "GPU-3f-a1,GPU-3f-a2"}, ("GPU-3f-a1", "GPU-3f-a2")),
        ("cuda", 1, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ("0",)),
        ("neuron", 4, {"NEURON_RT_VISIBLE_CORES": "8-10,15"}, ("8", "9", "10", "15")),
        ("neuron", 2, {"CUDA_VISIBLE_DEVICES": "5"}, ("0", "1")),
        ("mps", 1, {}, ("0",)),
        ("cpu", 0, {}, ()),
    ],
)
def test_device_ids_are_values_of_the_visibility_variable(device_type, count, environment, names):
    assert list_devices(device_type, count, environment) == LocalDevices(device_type, names)


@pytest.mark.parametrize(
    ("device_type", "variable"),
    [("cuda", "CUDA_VISIBLE_DEVICES"), ("neuron", "NEURON_RT_VISIBLE_CORES")],
)
def test_a_point_sees_only_its_devices(device_type, variable):
    shared = make_budget(devices=LocalDevices(device_type, ("0", "1", "2")))
    assert shared.build_environment(make_request(threads=3, devices=2), ["1", "2"]) == {
        "OMP_NUM_THREADS": "3",
        variable: "1,2",
    }


@pytest.mark.slow
def test_devices_are_counted_by_torch():
    found = build_budget(2, None, 1.5, accelerators=True)
    assert found.memory_bytes == 1.5 * 2**30
    assert found.num_cores >= 1
    assert found.devices.device_type == "cpu" or found.devices.device_ids


@pytest.mark.parametrize(
    ("overrides", "shared", "sentence"),
    [
        (
            ["parallelism.tp=4"],
            make_budget(jobs=2, cores=3),
            "4 processes of 1 threads need 4 cores, and hydra.launcher.cores=3; use more, or "
            "hydra.launcher.jobs=1",
        ),
        (
            ["model=160m"],
            make_budget(memory=2.0**30),
            "GiB, and hydra.launcher.memory_gib=1; use more",
        ),
        (
            ["parallelism.tp=4", "parallelism.pp=2"],
            make_budget(devices=FOUR),
            "8 processes need as many devices, and this machine has 4 of type cuda",
        ),
        (
            ["engine.device=cuda:1"],
            make_budget(devices=FOUR),
            "engine.device=cuda:1 names one device, and the launcher assigns devices to concurrent runs; "
            "use engine.device=cuda",
        ),
        (
            [],
            make_budget(devices=LocalDevices("mps", ("0",))),
            "cannot share devices of type mps; use",
        ),
        (
            ["hardware.nodes=2", "hardware.processes_per_node=1"],
            make_budget(),
            "hardware.nodes=2 exceeds this machine",
        ),
        (
            ["engine=nxd", "compiler=neuron_2_28"],
            make_budget(),
            "engine.name=nxd uses every accelerator",
        ),
    ],
)
def test_a_point_that_never_fits_is_rejected_with_both_values(config, overrides, shared, sentence):
    point = config(*overrides)
    (text,) = find_budget_violations(point, compute_request(point, shared), shared)
    assert sentence in text


def test_a_point_that_fits_has_no_problem(config):
    for overrides in ([], ["parallelism.tp=2"], ["engine.device=cpu"]):
        point = config(*overrides)
        assert not [
            *find_budget_violations(point, compute_request(point, make_budget()), make_budget())
        ]


@pytest.mark.parametrize(
    ("settings", "entry", "sentence"),
    [
        ({"jobs": 0}, "train", "hydra.launcher.jobs=0 is too small"),
        ({"jobs": 2, "cores": 0}, "train", "hydra.launcher.cores=0 is too small"),
        (
            {"jobs": 2, "memory_gib": -1.0},
            "train",
            "hydra.launcher.memory_gib=-1.0 is outside (0, inf)",
        ),
        ({"cores": 4}, "train", "hydra.launcher.cores=4 applies to concurrent runs, and"),
        ({"memory_gib": 4.0}, "train", "hydra.launcher.memory_gib=4.0 applies to concurrent runs"),
        ({"jobs": 2}, "precompile", "hydra.launcher.jobs=2 is for hlat.train; hlat.precompile"),
    ],
)
def test_invalid_settings_are_rejected(settings, entry, sentence):
    with pytest.raises(ConfigError) as refused:
        validate_local_settings(LocalLauncherConfig(**settings), entry)
    assert sentence in str(refused.value)


def test_valid_settings_are_accepted():
    validate_local_settings(LocalLauncherConfig(), "precompile")
    validate_local_settings(LocalLauncherConfig(jobs=2, cores=4, memory_gib=0.5), "train")
