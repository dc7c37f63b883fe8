"""Trains a model: the entry, and the story of a run from composition to report.

    compose -> resolve -> feasible? -> engine, pre-flight -> data -> restore
            -> loop(step, log, evaluate, save) -> final save -> report

Everything heavy is imported only after the configuration has been accepted, so that composing one
or being told of a typo takes a fraction of a second and works where there is no torch.
"""

import sys
from dataclasses import replace
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
    from hlat.recovery.safety import Safety
    from hlat.state import TrainingState
    from hlat.tracking.tracker import Tracker


def main(composed: DictConfig) -> Exit:
    """Train the composed configuration; return the exit code."""
    from hlat.planning.feasibility import refuse_infeasible

    config, overrides = resolve(composed), entry.overrides()
    if config.data.preview:
        from hlat.data.preview import preview

        print(preview(config.data, config.phase, config.batch, config.run.seed))
        return Exit.FINISHED
    refuse_infeasible(config)
    composed.run.name = config.run.name
    if processes.must_start(config):
        from hlat.recovery import supervisor

        return supervisor.start(config, entry.command(sys.executable, overrides))
    return processes.recorded(lambda: run(config, OmegaConf.to_yaml(composed), overrides))


def run(config: Config, config_yaml: str, overrides: list[str]) -> Exit:
    """Set up engine and data in the run's folder, restore, train, report; return the exit code."""
    from hlat.data.loader import open_loader
    from hlat.engine.create import create_engine
    from hlat.planning.feasibility import check_vocabulary
    from hlat.recovery import destination, preflight
    from hlat.recovery.resume import resume
    from hlat.recovery.safety import Safety
    from hlat.reporting.report import try_report
    from hlat.state import total_steps
    from hlat.tracking import provenance, run_folder
    from hlat.tracking.farewell import farewell
    from hlat.tracking.tracker import Tracker

    leads = processes.place().rank == 0
    with run_folder.claimed(config.run, leads) as folder:
        if leads:
            destination.settle(config.checkpoint, folder)
        engine = create_engine(config)
        if not preflight.passed(config, folder, engine):
            return Exit.UNHEALTHY_NODE
        engine.build(config)
        world = engine.world
        loader = open_loader(config.data, config.phase, config.batch, config.run.seed, *world.share)
        check_vocabulary(config.model, loader.vocab_size)
        tracker = Tracker(folder, config, world.chief, config_yaml)
        try:
            state = resume(config, folder, engine, loader, tracker)
            revision = provenance.revision() if world.chief else None
            state = replace(state, config=config_yaml, code_revision=revision or "")
            if world.chief and state.step < total_steps(config):
                origin = provenance.collect(engine.device, loader.fingerprint)
                run_folder.describe(folder, config_yaml, overrides, origin)
            with Safety(config, folder, engine, loader, tracker) as safety:
                exit_code, step = train(config, state, engine, loader, tracker, safety)
                tracker.close()
                uptime = try_report(folder) if world.chief else ""
        finally:
            tracker.close()
            loader.close()
        if world.chief:
            command = entry.resume_command(exit_code, overrides)
            farewell(folder, exit_code, step, command, uptime)
        engine.close()
    return exit_code


def train(
    config: Config,
    state: "TrainingState",
    engine: "Engine",
    loader: "Loader",
    tracker: "Tracker",
    safety: "Safety",
) -> tuple[Exit, int]:
    """Train from `state` to the run's end, a signal, or its divergence; return why and the step."""
    from hlat.evaluation.heldout import evaluate, material
    from hlat.schedule import rate_at
    from hlat.state import total_steps

    total, every = total_steps(config), config.evaluation.every_steps
    measured_on, stage = material(config, loader), loader.stage
    tracker.ready(state.step)
    if not engine.world.everyone.any(bool(tracker.events("evaluate"))):
        evaluate(engine, measured_on, tracker, state.step)
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
        stop = safety.step() and not last
        saving = stop or last or safety.save_is_due(state.step)
        if saving or state.step % config.run.log_every == 0:
            numbers = engine.read(pending)
            row = {"learning_rate": rate, **numbers.measured, "memory_bytes": engine.peak_memory()}
            tracker.log(state.step, stage, **row)
            checked = safety.check(state, numbers)
            if checked is None:
                return Exit.DIVERGED, state.step
            if checked != state:
                state = checked
                continue
        if last or (not stop and every is not None and state.step % every == 0):
            with safety.patience():
                evaluate(engine, measured_on, tracker, state.step)
        if trouble := safety.inspect(state.step) or (saving and safety.save(state, stop or last)):
            return trouble, state.step
        if stop:
            safety.interrupt(state.step)
            return Exit.PREEMPTED, state.step
    tracker.event("finish", state.step)
    return Exit.FINISHED, state.step


if __name__ == "__main__":
    entry.run(main)
