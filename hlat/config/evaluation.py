"""When the model is measured, on held-out text and questions."""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class Evaluation:
    """Held-out loss and bits per byte; always measured before the first step and after the last."""

    every_steps: int | None = None
    """Steps between evaluations within a run; null: only at its start and end."""
    sequences_per_source: int = MISSING
    """Held-out sequences of each source."""
    probes: dict[str, str] = field(default_factory=dict)
    """Multiple-choice questions that are asked with them: files, relative to data.root, by the name
    that their accuracy has. A line is {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0};
    the right choice should be the likeliest per byte."""
