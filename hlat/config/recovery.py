"""What a run asks of its nodes first, and does when its numbers go wrong or a process dies."""

from dataclasses import dataclass


@dataclass
class Recovery:
    """Rules on the loss and the gradient norm, applied at every logged step; and on processes.

    A step whose gradients are not finite never changes the weights, whatever is set here.
    """

    spike_window: int = 20
    """Logged steps in the running averages of loss and gradient norm (HLAT paper, section IV-A)."""
    spike_margin: float = 0.1
    """A gradient norm above the running average by this much is a spike (HLAT paper, section
    IV-A)."""
    rollback_after: int = 16
    """Logged steps in a row with loss or gradient norm above its average by the margin, or not
    finite, after which the run goes back to the checkpoint before them and leaves out their
    batches. Below spike_window, or a jump that lasts becomes the average first; the longest such
    row of 24 desk runs that went well was 13."""
    max_restarts: int = 0
    """Times that processes are started again after one has died or hung; above 0, even a single
    process is watched by another one."""
    max_same_failures: int = 2
    """Times that a run may fail alike at the same step, or go back to the same checkpoint, before
    it ends."""
    step_timeout_s: float | None = None
    """Seconds without a step after which processes hang: their stacks are written to logs/, and
    they are ended. null: they may take their time."""
    start_timeout_s: float = 3600
    """The same where more than a step is done: start-up and compilation up to the second step, an
    evaluation, the last save."""
    preflight: bool = True
    """Examine every node before the first step, and end with exit code 4 when one is unhealthy."""
    min_speed_share: float = 0.05
    """Share of hardware.peak_tflops in matrix products, and of its links' bandwidth in sums over
    ranks, below which a node is unhealthy. It is for what is broken, not for what is slow: the sums
    of AWS's nccom-test user guide reach 0.11 to 0.15 of trn1's links."""
    check_replicas_every_steps: int | None = None
    """Steps between comparisons of the ranks' copies of the state beside those before each save,
    each with a look whether later tokens move earlier losses; null: none."""
    max_clock_skew_s: float = 1.0
    """Seconds by which a node's clock may differ from the first node's before a warning; no number
    of a run depends on it, but logs do, and signed requests to storage fail at 15 minutes."""
