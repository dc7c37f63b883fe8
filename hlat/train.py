"""Trains a model: the entry, and the story of a run from composition to report.

    compose -> resolve -> feasible? -> engine -> data -> restore -> loop(step, log, evaluate, save)
    -> final save -> report

Everything heavy is imported only after the configuration has been accepted, so that composing one,
asking for help or being told of a typo takes a fraction of a second and works where there is no
torch.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from hlat.config import entry
from hlat.config.errors import Exit
from hlat.config.resolve import resolve
from hlat.config.run import Config

if TYPE_CHECKING:
    from hlat.data.loader import Loader
    from hlat.engine.interface import Engine
    from hlat.tracking.tracker import Tracker


def main(composed: DictConfig) -> None:
    """Train the composed configuration, and exit with the run's code."""
    from hlat.planning.feasibility import refuse_infeasible

    config = resolve(composed)
    refuse_infeasible(config)
    sys.exit(run(config, OmegaConf.to_yaml(composed), entry.overrides()))


def run(config: Config, config_yaml: str, overrides: list[str]) -> Exit:
    """Set up engine and data in the run's folder, train, report; return the exit code."""
    from hlat.data.loader import open_loader
    from hlat.engine.create import create_engine
    from hlat.planning.feasibility import check_vocabulary
    from hlat.reporting.report import write_report
    from hlat.tracking import provenance, run_folder
    from hlat.tracking.farewell import farewell
    from hlat.tracking.tracker import Tracker

    folder = run_folder.make(config.run)
    engine = create_engine(config.engine)
    engine.build(config)
    world = engine.world
    loader = open_loader(
        config.data, config.phase, config.batch, config.run.seed, world.dp_rank, world.dp_size
    )
    check_vocabulary(config.model, loader.vocab_size)
    run_folder.describe(folder, config_yaml, overrides, provenance.collect(loader.fingerprint))
    tracker = Tracker(folder, config)
    try:
        exit_code = train(config, folder, engine, loader, tracker)
    finally:
        tracker.close()
        loader.close()
        engine.close()
    write_report(folder)
    farewell(folder, exit_code, overrides)
    return exit_code


def train(
    config: Config, folder: Path, engine: "Engine", loader: "Loader", tracker: "Tracker"
) -> Exit:
    """Train from the newest checkpoint to the run's end, a signal, or a non-finite number."""
    from hlat.evaluation.heldout import evaluate
    from hlat.recovery.divergence import SpikeWatch, finite
    from hlat.recovery.interruption import Interruption
    from hlat.recovery.resume import resume, save
    from hlat.schedule import learning_rate
    from hlat.state import total_steps

    total = total_steps(config)
    state = resume(config, folder, engine, loader, tracker)
    heldout = loader.heldout(config.evaluation.sequences_per_source)
    spikes = SpikeWatch(config.recovery.spike_window, config.recovery.spike_margin)
    with Interruption() as interruption:
        if state.step == 0:
            evaluate(engine, heldout, tracker, 0)
        while state.step < total:
            tokens = loader.next()
            tracker.wait(loader.wait_seconds)
            rate = learning_rate(state.step, config.schedule, config.optimizer.lr)
            pending = engine.train_step(tokens, rate)
            state = state.after_step(config.batch.tokens_per_step)

            stop = interruption.signal_name is not None
            saving = stop or state.step == total or state.step % config.checkpoint.every_steps == 0
            if saving or state.step % config.run.log_every == 0:
                numbers = engine.read(pending)
                tracker.log(state.step, loader.stage, learning_rate=rate, **asdict(numbers))
                if config.recovery.stop_on_nonfinite and not finite(numbers):
                    tracker.event(
                        "diverge",
                        state.step,
                        loss=str(numbers.loss),
                        grad_norm=str(numbers.grad_norm),
                    )
                    return Exit.DIVERGED
                if spikes.is_spike(numbers.grad_norm or 0.0):
                    tracker.event("spike", state.step, grad_norm=numbers.grad_norm)
            every = config.evaluation.every_steps
            if state.step == total or (every is not None and state.step % every == 0):
                evaluate(engine, heldout, tracker, state.step)
            if saving:
                save(config, folder, engine, loader, tracker, state)
            if stop:
                tracker.event("interrupt", state.step, signal=interruption.signal_name)
                return Exit.PREEMPTED
    tracker.event("finish", state.step)
    return Exit.FINISHED


if __name__ == "__main__":
    entry.run(main)
