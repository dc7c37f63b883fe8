"""Evaluation during training, on held-out text and multiple-choice questions."""

from dataclasses import dataclass, field

from hlat.config.bounds import bounded


@dataclass
class EvaluationConfig:
    """Held-out loss and bits per byte, computed at least at the start and the end of a run."""

    every_steps: int | None = bounded(None, min=1)
    """Steps between evaluations within a run; null: only at its start and end."""
    sequences_per_source: int = bounded(min=1)
    """Held-out sequences of each source."""
    probes: dict[str, str] = field(default_factory=dict)
    """Multiple-choice questions, scored at each evaluation: files, relative to data.root, by the
    name of their accuracy metric. A line is {"context": "2 + 2 =", "choices": [" 4", " 5"],
    "answer": 0}; the answer should have the highest likelihood per byte."""
