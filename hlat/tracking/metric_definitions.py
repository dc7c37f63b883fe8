"""Columns of metrics.jsonl and events of events.jsonl, with their units and meanings.

docs/reference/metrics.md is generated from these tables.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricDefinition:
    """A column of metrics.jsonl; `unit` is empty for counts, names and ratios without a unit."""

    unit: str
    meaning: str


@dataclass(frozen=True)
class EventDefinition:
    """An event of events.jsonl.

    `fields` are those besides `event`, `step`, `attempt` and `time`, with their meanings.
    """

    meaning: str
    fields: dict[str, str]


METRICS = {
    "step": MetricDefinition("", "completed optimizer steps"),
    "tokens": MetricDefinition("tokens", "tokens read by these steps"),
    "learning_rate": MetricDefinition("", "learning rate of the step"),
    "loss": MetricDefinition(
        "nats per token", "mean cross-entropy of the target tokens of the global batch"
    ),
    "grad_norm": MetricDefinition("", "global l2 norm of the gradients before clipping"),
    "param_norm": MetricDefinition("", "global l2 norm of the weights after the step"),
    "memory_bytes": MetricDefinition(
        "bytes", "peak device memory of rank 0; on a CPU, peak memory of the process"
    ),
    "tokens_per_second": MetricDefinition(
        "tokens/s", "of all processes, since the last row; evaluations and saves are excluded"
    ),
    "step_seconds": MetricDefinition("s", "mean duration of the steps since the last row"),
    "data_wait_seconds": MetricDefinition(
        "s", "mean time for which these steps waited for their batch"
    ),
    "mfu": MetricDefinition(
        "fraction",
        "model FLOPs utilization; null if hardware.peak_tflops has no entry for the dtype",
    ),
    "cost_usd": MetricDefinition(
        "USD", "cost of all nodes during all attempts; null without hardware.price_usd_per_hour"
    ),
    "cpt_usd": MetricDefinition("USD", "cost per 4 million tokens (HLAT paper, section V-F)"),
    "neuroncore_utilization": MetricDefinition(
        "percent", "mean over the NeuronCores in use; this and the next four from neuron-monitor"
    ),
    "neuron_device_bytes": MetricDefinition("bytes", "device memory of all processes of the node"),
    "neuron_host_bytes": MetricDefinition("bytes", "host memory of the Neuron runtime on the node"),
    "neuron_execution_errors": MetricDefinition("", "errors during the period of the report"),
    "neuron_ecc_uncorrected": MetricDefinition("", "uncorrected memory errors"),
    "phase": MetricDefinition("", "name of the stage of phase.timeline"),
    "attempt": MetricDefinition("", "number of the attempt, from 1; a restart begins a new one"),
    "time": MetricDefinition("s", "Unix time at which the row was written"),
}
"""Columns of metrics.jsonl in their order."""

_LOST_WORK = {
    "lost_steps": "steps that are repeated",
    "lost_seconds": "duration of the repeated steps, evaluations and saves",
    "lost_by_attempt": "`seconds`, `until` and `last_step` of each attempt that ran them",
}
_SAVE_SECONDS = {
    "stall_seconds": "duration for which training stopped",
    "seconds": "duration until the checkpoint was durable, or the save failed",
}

EVENTS = {
    "start": EventDefinition(
        "an attempt starts at step 0",
        {
            "began": "Unix time at which the process started",
            "init_from": "directory of the initial weights, if set",
            "init_from_fingerprint": "hash of the initial weights",
            **_LOST_WORK,
            "refused": "rejected checkpoints, with the reason",
        },
    ),
    "resume": EventDefinition(
        "an attempt continues from a checkpoint",
        {
            "began": "as in `start`",
            "checkpoint": "path of the checkpoint",
            "changed": "settings that differ from those in the checkpoint",
            "refused": "newer checkpoints that were rejected, with the reason",
            **_LOST_WORK,
        },
    ),
    "preflight": EventDefinition(
        "the pre-flight checks have ended",
        {
            "seconds": "duration",
            "nodes": "device and minimum speeds of each node",
            "failed": "failed checks with their consequence",
        },
    ),
    "ready": EventDefinition("start-up has ended and training starts", {}),
    "phase": EventDefinition("a stage of phase.timeline starts", {"name": "name of the stage"}),
    "evaluate": EventDefinition(
        "held-out evaluation",
        {
            "loss": "nats per token by source, and their unweighted `mean`",
            "bits_per_byte": "bits per byte of text by source, and their unweighted `mean`",
            "accuracy": "fraction of correct answers by probe, with evaluation.probes",
            "seconds": "duration",
        },
    ),
    "score": EventDefinition(
        "scores of a checkpoint, written by `hlat evaluate`; has no `attempt`",
        {
            "tokens": "tokens read by the checkpoint",
            "scores": "score by column of the paper's tables",
            "stderr": "standard error of each score",
            "limit": "number of questions per task, if limited",
        },
    ),
    "ledger": EventDefinition(
        "data read until a save",
        {"stages": "first step, and tokens, documents and epochs by source, of each stage"},
    ),
    "checkpoint": EventDefinition(
        "a checkpoint is complete", {"path": "path of the checkpoint", **_SAVE_SECONDS}
    ),
    "checkpoint_failed": EventDefinition(
        "a save failed; training continues", {"reason": "error", **_SAVE_SECONDS}
    ),
    "skip": EventDefinition(
        "gradients were not finite; the weights are unchanged",
        {"count": "skipped steps since the last logged one", "reason": "cause"},
    ),
    "spike": EventDefinition(
        "the gradient norm exceeds its running average by recovery.spike_margin",
        {"grad_norm": "gradient norm of the step"},
    ),
    "rollback": EventDefinition(
        "loss or gradient norm is too high or not finite; the run returns to a checkpoint",
        {
            "checkpoint": "path of the checkpoint",
            "to": "its step",
            "left_out": "first skipped batch, and the first one after the skipped batches",
            "reason": "metrics and step that caused the rollback",
        },
    ),
    "rewind": EventDefinition(
        "training continues at an earlier step after a rollback",
        {"seconds": "duration since the last row", **_LOST_WORK},
    ),
    "diverge": EventDefinition("the run ends with exit code 3", {"reason": "cause"}),
    "exclude": EventDefinition(
        "a node is unhealthy; the run ends with exit code 4",
        {"host": "name of the node", "ranks": "its faulty ranks", "reasons": "failed checks"},
    ),
    "restart": EventDefinition(
        "a process failed or hung; the supervisor starts another attempt", {"reason": "cause"}
    ),
    "give_up": EventDefinition(
        "the same failure occurred recovery.max_same_failures times; the run ends with exit code 1",
        {"reason": "cause"},
    ),
    "interrupt": EventDefinition(
        "a signal ended the run; the state is saved, exit code 75", {"signal": "name of the signal"}
    ),
    "fail": EventDefinition("the run ends with exit code 1", {"reason": "cause"}),
    "finish": EventDefinition("the last step is complete and saved, exit code 0", {}),
}
"""Events of events.jsonl, roughly in their order in a run."""

SERVICE_EVENTS = {
    "stall": EventDefinition(
        "no row for 300 s and ten times the longest interval so far",
        {"seconds": "time since the last row"},
    ),
}
"""Events that are sent to tracking services only."""
