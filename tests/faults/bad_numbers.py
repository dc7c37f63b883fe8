"""Numbers that go wrong: are they skipped by all ranks, rolled back and left out, and told?

Usage: PYTHONPATH=. python tests/faults/bad_numbers.py --forks --output FILE

Gradients of one rank that are NaN at a random step; gradient norms that stay high; batches of
noise; and a rank that raises. Some go away when a run goes back, others never do.
"""

import json
import random
import sys
from collections.abc import Callable
from typing import Any

from tests.faults.trials import (
    SUPERVISED,
    Place,
    Run,
    arguments,
    conclude,
    differing,
    note,
    say,
    somewhere,
)

STEPS = 40
RUN = (f"schedule.total_steps={STEPS}", "evaluation.every_steps=null", "checkpoint.keep_last=100")
LAYOUTS = {
    "one process": (),
    "tp 2": ("parallelism.tp=2",),
    "dp 2": ("parallelism.dp=2",),
    "dp 2, zero 1": ("parallelism.dp=2", "parallelism.zero=1"),
}
STRICT = ("recovery.spike_window=8", "recovery.rollback_after=3", "recovery.spike_margin=1")
DIVERGED = 3


def skipped(place: Place, number: int, lot: random.Random) -> dict[str, Any]:
    """NaN in all gradients of one rank at one step; every step is saved, to compare weights."""
    layout = lot.choice([*LAYOUTS])
    step, rank = lot.randrange(2, STEPS), lot.randrange(1 if layout == "one process" else 2)
    run = place.run(f"nan-{number}", *RUN, *LAYOUTS[layout], "checkpoint.every_steps=1")
    told = place.folder / f"nan-{number}.steps"
    told.write_text(f"{step}\n")
    run.inject(nan=str(told), rank=rank)
    code = run.finish()
    events = [(row["step"], row["count"]) for row in run.events("skip")]
    steps = [row["step"] for row in run.rows("metrics.jsonl")]
    good = {
        "exit code 0": code == 0,
        "told once": events == [(step, 1)],
        "said": f"step {step}: gradients are not finite" in run.printed.read_text(),
        "weights and moments unchanged": same(run, step - 1, step),
        "changed by the next step": step == STEPS or not same(run, step, step + 1),
        "all rows": steps == [*range(1, STEPS + 1)],
    }
    return {"of": layout, "good": good}


def same(run: Run, one: int, other: int) -> bool:
    """Whether all tensors of two checkpoints are equal bit by bit."""
    import numpy as np  # not before `trials` has told it to start no threads
    from safetensors.numpy import load_file

    folders = [run.folder / f"checkpoints/step_{step:08}" for step in (one, other)]
    files = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in folders]
    if not files[0] or files[0] != files[1]:
        return False
    for name in files[0]:
        first, second = (load_file(folder / name) for folder in folders)
        if any(not np.array_equal(first[key], second[key]) for key in first):
            return False
    return True


def passing_spike(place: Place, number: int, lot: random.Random) -> dict[str, Any]:
    """A gradient norm that is high three times in a row and good when the run comes back."""
    return rolled_back(place, f"spike-{number}", "spike", lot, once=True)


def noise(place: Place, number: int, lot: random.Random) -> dict[str, Any]:
    """Three batches of random tokens, which stay what they are."""
    return rolled_back(place, f"noise-{number}", "garbage", lot)


def rolled_back(
    place: Place, name: str, fault: str, lot: random.Random, once: bool = False
) -> dict[str, Any]:
    """Let three steps in a row be bad; the run must go back once, and leave out their batches."""
    layout = lot.choice(["one process", "one process", "tp 2"])
    first = lot.randrange(20, STEPS - 5)
    run = place.run(name, *RUN, *STRICT, *LAYOUTS[layout], "checkpoint.every_steps=5")
    run.inject(**{fault: [first, first + 2], "once": once})
    code = run.finish()
    back = run.events("rollback")
    steps = [row["step"] for row in run.rows("metrics.jsonl")]
    good = {
        "exit code 0": code == 0,
        "went back once": len(back) == 1,
        "left out their batches": [row["left_out"] for row in back] == [[first - 1, first + 2]],
        "to before them": all(row["to"] < first for row in back),
        "all rows": steps == [*range(1, STEPS + 1)],
    }
    return {"of": layout, "good": good, "left_out": [row["left_out"] for row in back]}


def lasting_spike(place: Place, number: int, lot: random.Random) -> dict[str, Any]:
    """A gradient norm that is high at the same steps whenever they come: the run must end."""
    first = lot.randrange(20, STEPS - 5)
    run = place.run(f"lasting-{number}", *RUN, *STRICT, *SUPERVISED, "checkpoint.every_steps=5")
    run.words.append("recovery.max_same_failures=3")
    run.inject(spike=[first, STEPS])
    code = run.finish()
    good = {
        "exit code 3": code == DIVERGED,
        "went back twice": len(run.events("rollback")) == 2,
        "told": len(run.events("diverge")) == 1,
        "not started again": not run.events("restart"),
    }
    return {"of": "one process, supervised", "good": good}


def raising(place: Place, number: int, lot: random.Random) -> dict[str, Any]:
    """A rank that raises: once, or whenever the step comes."""
    rank, step, once = lot.randrange(2), lot.randrange(1, STEPS), number % 2 == 0
    run = place.run(f"raise-{number}", *RUN, *LAYOUTS["tp 2"], "checkpoint.every_steps=3")
    run.words += ["recovery.max_restarts=9", "recovery.max_same_failures=3"]
    file = [str(place.folder / f"raised-{number}")] if once else []
    run.inject(**{"raise": [rank, step, *file]})
    code = run.finish()
    expected = place.folder / "runs/whole"
    restarts = [row["reason"] for row in run.events("restart")]
    good = {
        "exit code": code == (0 if once else 1),
        "restarts": len(restarts) == (1 if once else 2),
        "reason": set(restarts) == {f"rank {rank} raised RuntimeError: injected"},
        "given up": len(run.events("give_up")) == (0 if once else 1),
    }
    if once:
        whole = place.run(expected.name)
        good["losses"] = not differing(run.losses(), whole.losses())
    return {"of": "once" if once else "always", "good": good}


KINDS: dict[str, Callable[[Place, int, random.Random], dict[str, Any]]] = {
    "NaN": skipped,
    "spike that passes": passing_spike,
    "spike that stays": lasting_spike,
    "batches of noise": noise,
    "a rank raises": raising,
}


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What came of the trials of a kind."""
    bad = [one for one in found if not all(one["good"].values())]
    layouts = [one["of"] for one in found]
    return {
        "trials": len(found),
        "of": {name: layouts.count(name) for name in sorted(set(layouts))},
        "as_it_should_be": len(found) - len(bad),
        "bad": bad,
    }


def main() -> None:
    parser = arguments("Numbers that go wrong; --trials of each kind.", 30)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=[*KINDS], metavar="KIND")
    asked = parser.parse_args()
    earlier = json.loads(asked.output.read_text()) if asked.output and asked.output.exists() else {}
    told = {**earlier, "forked": asked.forks, "steps": STEPS}
    with somewhere(asked.folder, asked.forks) as place:
        whole = place.run("whole", *RUN, *LAYOUTS["tp 2"], "checkpoint.every_steps=3")
        whole.finish()
        for kind in asked.kinds:
            lot, found = random.Random(f"{asked.seed} {kind}"), []
            for number in range(asked.trials):
                found.append(KINDS[kind](place, number, lot))
                told[kind] = summary(found)
                note(told, asked.output)
            say(f"{kind}: {told[kind]['as_it_should_be']} of {asked.trials} as it should be")
    conclude(told, asked.output)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
