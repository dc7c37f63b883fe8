"""Preflight checks, divergence rules, and restarts of failed processes."""

from dataclasses import dataclass

from hlat.config.bounds import bounded


@dataclass
class RecoveryConfig:
    """Rules on loss and gradient norm, applied at every logged step, and on processes.

    A step with non-finite gradients never updates the weights.
    """

    spike_window: int = bounded(20, min=2)
    """Logged steps in the running averages of loss and gradient norm (HLAT paper, section IV-A)."""
    spike_margin: float = bounded(0.1, above=0, below=float("inf"))
    """A gradient norm that exceeds the running average by this is a spike (HLAT paper, section
    IV-A)."""
    rollback_after: int = 16
    """Consecutive logged steps with loss or gradient norm above the average by the margin, or not
    finite, after which the run returns to the checkpoint before them and skips their batches. Must
    be below spike_window, or a persistent jump becomes the average first; the longest such sequence
    in 24 successful runs of experiment=small_study was 13."""
    max_restarts: int = bounded(0, min=0)
    """Restarts after a process has failed or hung; above 0, a supervisor monitors even a single
    process."""
    max_same_failures: int = bounded(2, min=1)
    """Identical failures at one step, or rollbacks to one checkpoint, after which the run ends."""
    step_timeout_s: float | None = bounded(None, above=0)
    """Seconds without a step after which the stacks of all processes are written to logs/ and the
    processes are terminated. null: no timeout."""
    start_timeout_s: float = 3600
    """The same for start-up and compilation up to the second step, an evaluation, and the final
    checkpoint."""
    preflight: bool = True
    """Check every node before the first step, and exit with code 4 if one is unhealthy."""
    min_speed_share: float = bounded(0.05, min=0, max=1)
    """Minimum speed of a healthy node: fraction of hardware.peak_tflops in matmuls, and of link
    bandwidth in all-reduces. Detects faulty nodes, not slow ones: the all-reduces in AWS's
    nccom-test user guide reach 0.11 to 0.15 of trn1's link bandwidth."""
    check_replicas_every_steps: int | None = bounded(None, min=1)
    """Steps between comparisons of replicated state across ranks, each with a causality check, in
    addition to those before each checkpoint; null: none."""
    max_clock_skew_s: float = bounded(1.0, above=0, below=float("inf"))
    """Clock difference in seconds between a node and the first node that triggers a warning;
    training does not depend on clocks, but logs do, and signed storage requests fail at 15
    minutes."""
