"""A few fault trials of each kind have the results of the committed figures."""

import random

import pytest

from tests.faults import bad_numbers, disk, kills, layouts, round_trips, signals, soak
from tests.faults.trials import Place

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.xdist_group("trials")]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "trials")


@pytest.mark.parametrize("arm", kills.ARMS)
def test_kills_lose_no_checkpoint_and_no_step(place, arm):
    *_, found = kills.run_arm(place, arm, 3, seed=1)
    assert found["kills"] == 3
    assert not found["problems"]
    assert found["most_steps_run_again"] <= 2 * kills.EVERY_STEPS


def test_layout_change_at_every_kill_keeps_the_data_order(place):
    found = layouts.Found()
    whole, seconds = layouts.uninterrupted(place, found)
    run = place.run("changing", *layouts.RUN)
    layouts.kill_and_change(run, seconds, 3, random.Random(1), found)
    layouts.compare(run, whole, found)
    assert not found.problems


@pytest.mark.parametrize("kind", signals.KINDS)
def test_signals_repeat_no_step(place, kind):
    found = signals.terminations(place, kind, 3, random.Random(2))
    assert not found.problems
    assert found.steps_run_again == 0
    assert all(steps <= 2 for steps in found.steps_until_saved)


@pytest.mark.parametrize(("kind", "way"), signals.HANGS)
def test_hanging_process_is_detected(place, kind, way):
    found = signals.hangs(place, kind, way, 1, random.Random(3))
    assert found["hung"] == 1
    assert not found["problems"]
    assert found["over_timeout_dump_and_1_s"] == 0


def test_slow_step_save_or_evaluation_is_not_a_hang(place):
    for title, found in signals.patience(place).items():
        assert found == {"exit_code": 0, "restarts": 0}, title


@pytest.mark.parametrize(("error", "failed"), [("EIO", 8), ("ENOSPC", 1)])
def test_failed_disk_call_costs_one_save(place, error, failed):
    """On a full disk only the first save fails; later ones remove the oldest checkpoint."""
    found = disk.each_call(place, error, disk.ERRORS[error], 0.0, calls=8)
    assert found["exit_codes"] == [0, 0]
    assert found["failed"] == found["told_on_the_console"] == failed
    assert not found["failed_and_the_next_one_too"]
    assert not found["losses"]
    assert not found["lost_or_damaged"]
    assert not found["left"]
    assert not found["traceback"]


@pytest.mark.parametrize("recipe", round_trips.RECIPES)
def test_restored_state_equals_saved_state(place, recipe):
    config = round_trips.configuration(place.folder / "corpus", recipe)
    found = round_trips.go(config, place.folder / recipe, 5)
    assert not found["other_bytes"]
    assert not found["another_next_loss"]


@pytest.mark.parametrize("kind", bad_numbers.KINDS)
def test_invalid_values_are_handled(place, kind):
    whole = place.run("whole", *bad_numbers.RUN, "parallelism.tp=2", "checkpoint.every_steps=3")
    assert whole.finish() == 0
    lot = random.Random(4)
    for number in range(2):
        found = bad_numbers.KINDS[kind](place, number, lot)
        assert all(found["good"].values()), found


def test_goodput_accounts_for_a_minute_of_faults(place):
    soaked = soak.Soak(place, mean_s=12, seed=5)
    try:
        soaked.go(60)
        found = soak.tell(soaked, compared_steps=50)
    finally:
        soaked.run.kill_all()
    assert found["ledger"]["is_closed"]
    assert found["steps_without_gaps_or_duplicates"]
    assert not found["checkpoints_lost_or_damaged"]
    assert not found["losses_differ"]
    assert not found["orphans"]
    assert not found["leftovers_at_end"]
