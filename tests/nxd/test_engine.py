"""hlat's engine on neuronx-distributed, beside the native engine on one process."""

import numpy as np
import pytest

from hlat.config.resolve import resolve
from tests.distributed import checks
from tests.nxd.support.ranks import require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()

STEPS = 4
LAYOUTS = {
    "alone": "",
    "dp2": "dp=2",
    "dp2+zero1": "dp=2 zero=1",
    "tp2": "tp=2",
    "tp2+sp": "tp=2 sequence_parallel=true",
    "tp4": "tp=4",
    "tp4+sp": "tp=4 sequence_parallel=true",
    "pp2": "pp=2",
    "tp2+pp2+sp": "tp=2 pp=2 sequence_parallel=true",
    "tp2+dp2+zero1": "tp=2 dp=2 zero=1",
}
"""Four ranks share two key/value heads where tp=4."""
IN_XLA = ["tp2+sp", "pp2", "dp2+zero1", "tp2+pp2+sp"]


@pytest.fixture
def configure(compose):
    """A small model in a layout; the vocabulary is a multiple of what it is cut into."""

    def make(layout: str, *overrides: str):
        dp = 2 if "dp=2" in layout else 1
        words = [f"parallelism.{setting}" for setting in layout.split()]
        small = (*checks.MODEL, "model.vocab_size=132", "model.num_layers=4", "precision=fp32")
        return resolve(compose(*small, f"batch.micro_batch_size={4 // dp}", *words, *overrides))

    return make


def on_ranks(config, function: str, *arguments, mode: str = "gloo", **variables: str) -> list:
    return run(
        config.num_processes, f"engine.{function}", config, *arguments, mode=mode, **variables
    )


CASES = [("gloo", name) for name in LAYOUTS] + [("xla", name) for name in IN_XLA]


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_numbers_are_those_of_the_native_engine(configure, mode: str, name: str) -> None:
    expected = checks.train(configure(""), STEPS)
    for found in on_ranks(configure(LAYOUTS[name]), "train", STEPS, mode=mode):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("hardware", ["trn1", "trn2"])
def test_ranks_share_heads_as_the_hardware_wants(configure, hardware: str) -> None:
    """The copies of a head are on ranks far apart on trn1, and on neighbours on trn2."""
    expected = checks.train(configure(""), STEPS)
    config = configure("tp=4")
    found = on_ranks(config, "train", STEPS, NEURON_PLATFORM_TARGET_OVERRIDE=hardware)
    for rows in found:
        for one, other in zip(rows, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("name", ["tp2+sp", "tp4", "tp2+pp2+sp", "tp2+dp2+zero1"])
def test_every_gradient_and_update_is_that_of_the_native_engine(configure, name: str) -> None:
    """After one step the first moment is the clipped gradient, but for a factor."""
    expected = {}
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        expected |= checks.slices(configure(""), kind)[0]
    whole = {key[0]: value for key, value in expected.items()}
    seen = dict.fromkeys(whole, 0)
    for found in on_ranks(configure(LAYOUTS[name]), "slices"):
        for (tensor, offset), values in found.items():
            if tensor.startswith("updates/"):
                assert values == 1
                continue
            box = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
            scale = np.abs(whole[tensor]).max()
            np.testing.assert_allclose(values, whole[tensor][box], rtol=1e-4, atol=1e-4 * scale)
            seen[tensor] += values.size
    assert seen == {tensor: values.size for tensor, values in whole.items()}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("tp2+pp2+sp", ""), ("", "tp2+pp2+sp"), ("tp2+dp2+zero1", "tp4"), ("tp4", "dp2+zero1")],
)
def test_checkpoints_go_from_engine_to_engine(configure, tmp_path, saved: str, loaded: str) -> None:
    """A name of LAYOUTS is the nxd engine; an empty one is the native engine on one process."""
    expected = checks.save_and_go_on(configure(""), tmp_path / "expected", 3)

    def do(name: str, function: str, *arguments):
        if name in LAYOUTS:
            return on_ranks(configure(LAYOUTS[name]), function, *arguments)[0]
        return getattr(checks, function)(configure(""), *arguments)

    first = do(saved, "save_and_go_on", tmp_path, 3)
    second = do(loaded, "go_on", tmp_path / "step_00000003", 3)
    for one, other, native in zip(first, second, expected, strict=True):
        np.testing.assert_allclose(one, native, rtol=1e-6)
        np.testing.assert_allclose(other, native, rtol=1e-6)


@pytest.mark.parametrize("name", ["dp2", "tp4+sp"])
def test_copies_stay_alike(configure, name: str) -> None:
    assert (
        on_ranks(configure(LAYOUTS[name]), "copies", 3)
        == [[]] * configure(LAYOUTS[name]).num_processes
    )


@pytest.mark.parametrize("name", ["alone", "tp2+sp", "dp2+zero1"])
def test_graphs_are_compiled_in_the_first_two_steps(configure, name: str) -> None:
    for counts in on_ranks(configure(LAYOUTS[name]), "compilations", 20, mode="xla"):
        assert counts[1] > 0
        assert counts[-1] == counts[1]
