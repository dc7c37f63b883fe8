"""Training: entry point, setup of a run, and the training loop.

    compose -> validate -> engine, pre-flight -> data -> resume -> train (step, log, evaluate, save)

Heavy modules are imported after validation, so a configuration error is reported at once.
"""

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from hlat.recovery.garbage_collection import pause_garbage_collection

with pause_garbage_collection():
    from omegaconf import DictConfig

    from hlat.config import entry_point
    from hlat.config.config_errors import ExitCode
    from hlat.config.frozen_config import format_run_config
    from hlat.config.run import Config
    from hlat.config.run_steps import compute_total_steps, is_diagnosed
    from hlat.distributed import exit_record, rank_environment
    from hlat.recovery import signal_handler

if TYPE_CHECKING:
    from hlat.checkpoint.training_state import TrainingState
    from hlat.data.data_loader import DataLoader
    from hlat.engine.interface import Engine
    from hlat.recovery.fault_tolerance import FaultTolerance
    from hlat.tracking.tracker import Tracker


def main(composed: DictConfig) -> ExitCode:
    """Train with the composed configuration; return the exit code."""
    from hlat.config.resolve import resolve_config

    config, overrides = resolve_config(composed), entry_point.get_task_overrides()
    if config.data.preview:
        from hlat.data.data_preview import print_preview

        print_preview(config.data, config.phase, config.batch, config.run.resolved_data_seed)
        return ExitCode.FINISHED
    from hlat.engine.neuron import neuron_packages
    from hlat.plan.feasibility import validate_feasibility

    validate_feasibility(config)
    neuron_packages.validate_torch_release()
    with pause_garbage_collection():
        from hlat.recovery import run_copy

    yaml = format_run_config(composed, str(config.run.name))
    if run_copy.use_finished_run(config, yaml, overrides):
        return exit_record.run_with_exit_record(lambda: ExitCode.FINISHED)
    if rank_environment.must_launch_workers(config):
        from hlat.recovery.supervisor import launch_workers

        return launch_workers(config, entry_point.build_command(overrides))
    return exit_record.run_with_exit_record(lambda: run_worker(config, yaml, overrides))


def run_worker(config: Config, config_yaml: str, overrides: list[str]) -> ExitCode:
    """Set up engine, data and tracking, resume, train, and write the report."""
    with pause_garbage_collection():
        from hlat.checkpoint import checkpoint_directory, checkpoint_signature
        from hlat.checkpoint.resume import resume
        from hlat.data.data_loader import build_data_loader
        from hlat.engine.engine_factory import create_engine
        from hlat.plan.feasibility import validate_vocab_size
        from hlat.recovery import preflight
        from hlat.recovery.fault_tolerance import FaultTolerance
        from hlat.report.end_report import try_write_report
        from hlat.tracking import finished_runs, provenance, run_directory, run_summary
        from hlat.tracking.tracker import Tracker

    is_rank0 = rank_environment.read_rank_info().is_rank0
    with run_directory.acquire_run_dir(config.run, is_rank0) as run_dir:
        if is_rank0:
            checkpoint_directory.validate_destination(run_dir, config.checkpoint.destination)
            checkpoint_signature.validate_keys(config.checkpoint)
        engine = create_engine(config)
        if not preflight.run_preflight(config, run_dir, engine):
            return ExitCode.UNHEALTHY_NODE
        engine.build(config, initialize=False)  # resume initializes or loads the weights
        shard, seed = engine.parallel_state.data_shard, config.run.resolved_data_seed
        loader = build_data_loader(config.data, config.phase, config.batch, seed, *shard)
        validate_vocab_size(config.model, loader.vocab_size)
        tracker = Tracker(run_dir, config, is_rank0, config_yaml, overrides)
        with closing(loader), closing(tracker):
            state = resume(config, run_dir, engine, loader, tracker)
            revision = provenance.get_git_revision() if is_rank0 else None
            state = replace(state, config=config_yaml, code_revision=revision or "")
            if is_rank0 and state.step < compute_total_steps(config):
                fingerprint = loader.fingerprint
                metadata = provenance.collect_provenance(engine.device, fingerprint, run_dir)
                identity = finished_runs.build_identity(run_dir, config, fingerprint)
                tracker.write_metadata(overrides, metadata | identity)
            with FaultTolerance(config, run_dir, engine, loader, tracker) as fault_tolerance:
                exit_code, step = train(config, state, engine, loader, tracker, fault_tolerance)
                tracker.close()
                if is_rank0 and exit_code is ExitCode.FINISHED:
                    finished_runs.record_finished_run(config)
                uptime = try_write_report(config, run_dir) if is_rank0 else ""
        if is_rank0:
            run_summary.print_summary(run_dir, config, overrides, exit_code, step, uptime)
        engine.close()
    return exit_code


def train(
    config: Config,
    state: "TrainingState",
    engine: "Engine",
    loader: "DataLoader",
    tracker: "Tracker",
    fault_tolerance: "FaultTolerance",
) -> tuple[ExitCode, int]:
    """Train from `state` to the last step, a signal, or a failure; return exit code and step."""
    from hlat.evaluate.extension_metrics import compute_due_metrics
    from hlat.evaluate.heldout_evaluation import evaluate_heldout, load_evaluation_data
    from hlat.optim.lr_schedule import compute_lr
    from hlat.recovery.rollback_policy import NextAction

    total_steps = compute_total_steps(config)
    evaluation_data, stage = load_evaluation_data(config, loader), loader.stage_name
    tracker.log_ready(state.step)
    if not engine.parallel_state.world_group.any(bool(tracker.get_events("evaluate"))):
        evaluate_heldout(engine, evaluation_data, tracker, state.step)
    while state.step < total_steps:
        sequences = loader.next_batch(state.step)
        tracker.add_data_wait(loader.wait_seconds)
        if loader.stage_name != stage:
            stage = loader.stage_name
            tracker.log_event("phase", state.step, name=stage)
        lr, diagnose = compute_lr(state.step, config), is_diagnosed(state.step + 1, config)
        with fault_tolerance.profile(state.step + 1):
            device_metrics = engine.train_step(sequences, lr, diagnose)
        state = state.after_step(config.batch)
        is_last = state.step == total_steps
        stop_requested = fault_tolerance.step() and not is_last
        save_due = stop_requested or is_last or fault_tolerance.is_save_due(state.step)
        if save_due or state.step % config.run.log_every == 0:
            metrics = engine.read_metrics(device_metrics)
            row = {"learning_rate": lr, **metrics.columns, "memory_bytes": engine.peak_memory()}
            row |= compute_due_metrics(config, state.step, engine, sequences, tracker)
            tracker.log_metrics(state.step, stage, **row)
            action, state = fault_tolerance.check_metrics(state, metrics)
            if action is NextAction.STOP:
                return ExitCode.DIVERGED, state.step
            if action is NextAction.RESTART_FROM_CHECKPOINT:
                continue
        if is_last or (config.evaluation.is_due(state.step) and not stop_requested):
            with fault_tolerance.watchdog_paused():
                evaluate_heldout(engine, evaluation_data, tracker, state.step, is_last)
        failure = fault_tolerance.run_periodic_checks(state.step)
        if failure is None and save_due:
            failure = fault_tolerance.save(state, wait=stop_requested or is_last)
        if failure is not None:
            return failure, state.step
        if stop_requested:
            fault_tolerance.record_interruption(state.step)
            return ExitCode.PREEMPTED, state.step
    tracker.log_event("finish", state.step)
    return ExitCode.FINISHED, state.step


if __name__ == "__main__":
    with signal_handler.handle_process_signals():
        entry_point.run_entry_point(main)
