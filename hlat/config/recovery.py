"""What a run does when its numbers go wrong."""

from dataclasses import dataclass


@dataclass
class Recovery:
    """Rules on the loss and the gradient norm, applied at every logged step."""

    stop_on_nonfinite: bool = True
    """End the run with exit code 3 when the loss or gradient norm is not finite."""
    spike_window: int = 20
    """Logged steps in the running average of the gradient norm (HLAT paper, section IV-A)."""
    spike_margin: float = 0.1
    """A gradient norm above the running average by this much is a spike (HLAT paper, section
    IV-A)."""
