"""Trains a model: the entry, and the story of a run from composition to report.

    compose -> resolve -> feasible? -> engine -> data -> restore
            -> loop(step, log, evaluate, save) -> final save -> report

Everything heavy is imported only after the configuration has been accepted, so that composing one
or being told of a typo takes a fraction of a second and works where there is no torch.
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
from hlat.engine import processes

if TYPE_CHECKING:
    from hlat.data.loader import Loader
    from hlat.engine.interface import Engine
    from hlat.recovery.interruption import Interruption
    from hlat.state import TrainingState
    from hlat.tracking.tracker import Tracker


def main(composed: DictConfig) -> Exit:
    """Train the composed configuration; return the exit code."""
    from hlat.planning.feasibility import refuse_infeasible

    config, overrides = resolve(composed), entry.overrides()
    if config.data.preview:
        return preview(config)
    refuse_infeasible(config)
    composed.run.name = config.run.name
    if processes.must_start(config):
        return processes.start(config, entry.command(sys.executable, overrides))
    return processes.recorded(lambda: run(config, OmegaConf.to_yaml(composed), overrides))


def preview(config: Config) -> Exit:
    """Print the first sequences that training would read."""
    from hlat.data.preview import preview

    print(preview(config.data, config.phase, config.batch, config.run.seed))
    return Exit.FINISHED


def run(config: Config, config_yaml: str, overrides: list[str]) -> Exit:
    """Set up engine and data in the run's folder, restore, train, report; return the exit code."""
    from hlat.data.loader import open_loader
    from hlat.engine.create import create_engine
    from hlat.planning.feasibility import check_vocabulary
    from hlat.recovery.interruption import Interruption
    from hlat.recovery.resume import resume
    from hlat.reporting.report import try_report
    from hlat.state import total_steps
    from hlat.tracking import provenance, run_folder
    from hlat.tracking.farewell import farewell
    from hlat.tracking.tracker import Tracker

    with run_folder.claimed(config.run, leads=processes.place().rank == 0) as folder:
        engine = create_engine(config.engine)
        engine.build(config)
        world = engine.world
        share = (world.dp_rank, world.dp_size, world.peers)
        loader = open_loader(config.data, config.phase, config.batch, config.run.seed, *share)
        check_vocabulary(config.model, loader.vocab_size)
        tracker = Tracker(folder, config, world.chief)
        try:
            state = resume(config, folder, engine, loader, tracker)
            if world.chief and state.step < total_steps(config):
                origin = provenance.collect(engine.device, loader.fingerprint)
                run_folder.describe(folder, config_yaml, overrides, origin)
            with Interruption(tell=world.chief) as signals:
                exit_code, step = train(config, folder, engine, loader, tracker, state, signals)
                tracker.close()
                if world.chief:
                    try_report(folder)
        finally:
            tracker.close()
            loader.close()
        if world.chief:
            farewell(folder, exit_code, step, entry.resume_command(exit_code, overrides))
        engine.close()
    return exit_code


def train(
    config: Config,
    folder: Path,
    engine: "Engine",
    loader: "Loader",
    tracker: "Tracker",
    state: "TrainingState",
    signals: "Interruption",
) -> tuple[Exit, int]:
    """Train from `state` to the run's end, a signal, or a bad number; return why and the step."""
    from hlat.evaluation.heldout import evaluate
    from hlat.recovery.divergence import SpikeWatch, finite
    from hlat.recovery.resume import save
    from hlat.schedule import rate_at
    from hlat.state import total_steps

    total, every = total_steps(config), config.evaluation.every_steps
    heldout = loader.heldout(config.evaluation.sequences_per_source)
    spikes = SpikeWatch(config.recovery, tracker.recent("grad_norm", config.recovery.spike_window))
    stage, everyone = loader.stage, engine.world.everyone
    if not everyone.any(tracker.happened("evaluate")):
        evaluate(engine, heldout, tracker, state.step)
    while state.step < total:
        sequences = loader.next()
        tracker.wait(loader.wait_seconds)
        if loader.stage != stage:
            stage = loader.stage
            tracker.event("phase", state.step, name=stage)
        rate = rate_at(state.step, config)
        pending = engine.train_step(sequences, rate)
        state = state.after_step(config.batch.tokens_per_step)

        last = state.step == total
        stop = everyone.any(signals.signal_name is not None) and not last
        saving = stop or last or state.step % config.checkpoint.every_steps == 0
        if saving or state.step % config.run.log_every == 0:
            numbers = engine.read(pending)
            tracker.log(state.step, stage, learning_rate=rate, **asdict(numbers))
            if config.recovery.stop_on_nonfinite and not finite(numbers):
                tracker.event("diverge", state.step, numbers=repr(numbers))
                return Exit.DIVERGED, state.step
            if spikes.is_spike(numbers.grad_norm):
                tracker.event("spike", state.step, grad_norm=numbers.grad_norm)
        if last or (not stop and every is not None and state.step % every == 0):
            evaluate(engine, heldout, tracker, state.step)
        if saving and not save(config, folder, engine, loader, tracker, state) and (stop or last):
            tracker.event("fail", state.step, reason="the last state could not be saved")
            return Exit.FAILED, state.step
        if stop:
            tracker.event("interrupt", state.step, signal=signals.signal_name)
            signals.ignore()
            return Exit.PREEMPTED, state.step
    tracker.event("finish", state.step)
    return Exit.FINISHED, state.step


if __name__ == "__main__":
    entry.run(main)
