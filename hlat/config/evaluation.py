"""Evaluation during training, on held-out text and multiple-choice questions."""

from dataclasses import dataclass, field

from hlat.config.bounds import bounded


@dataclass
class SamplesConfig:
    """Texts that the model writes at each evaluation, for reading its progress."""

    prompts: list[str] = field(default_factory=list)
    """Texts to continue; empty: no samples."""
    max_tokens: int = bounded(64, min=1)
    """Maximum number of generated tokens of each prompt."""
    temperature: float = bounded(0.8, min=0)
    """Divisor of the logits; 0: the most likely token."""


@dataclass
class EvaluationConfig:
    """Held-out loss and bits per byte, computed at least at the start and the end of a run."""

    every_steps: int | None = bounded(None, min=1)
    """Steps between evaluations within a run; null: only at its start and end."""
    tokens_per_source: int = bounded(65536, min=1)
    """Held-out tokens of each source in the last evaluation, at most. Those before it use fewer, if
    they would take more than 5% of the run's computation, but at least 4,096."""
    sequences_per_source: int | None = bounded(None, min=1)
    """Held-out sequences of each source in all evaluations; null: as many as tokens_per_source
    allows."""
    probes: dict[str, str] = field(default_factory=dict)
    """Multiple-choice questions, scored at each evaluation: files, relative to data.root, by the
    name of their accuracy metric. A line is {"context": "2 + 2 =", "choices": [" 4", " 5"],
    "answer": 0}; the answer should have the highest likelihood per character."""
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    """Texts that the model writes at each evaluation."""

    def count_sequences(self, sequence_length: int) -> int:
        """Return the number of held-out sequences of each source in the last evaluation."""
        return self.sequences_per_source or max(1, self.tokens_per_source // sequence_length)

    def is_due(self, step: int) -> bool:
        """Return True if an evaluation within the run follows a step."""
        return self.every_steps is not None and step % self.every_steps == 0
