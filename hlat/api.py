"""Python API: `hlat.runs(root)` and `hlat.load_run(path)`, for notebooks and scripts.

Tables are those of pyarrow; `.to_pandas()` converts them. docs/studies.md has examples.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hlat.config import recorded_config
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.inference.sampling_settings import SamplingSettings
from hlat.study.run_record import RunRecord, load_run_record
from hlat.tracking.summary_metrics import compute_summary_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from hlat.inference.model_source import ModelSource

_SAMPLING = SamplingSettings()

__all__ = ["Run", "TextModel", "load_run", "runs"]


def runs(root: str | PathLike[str] = "runs", where: str | None = None) -> pa.Table:
    """Return the runs below a root, one per row.

    Columns are the state, results, code and data of each run, and its settings as `config.KEY`.
    Missing values are null.

    Args:
        root: Directory of runs.
        where: Filter such as `config.optimizer.beta2=0.99 and step>=500`.

    Raises:
        ConfigError: The root does not exist, or the filter is invalid.

    Examples:
        >>> table = hlat.runs("runs", where="config.optimizer.name=adamw and step>=2")
        >>> table["run"].to_pylist()
        ['x']
    """
    from hlat.study.index_file import load_run_list
    from hlat.study.run_filter import filter_runs
    from hlat.study.run_table import build_run_table

    run_list = load_run_list(Path(root))
    return build_run_table(run_list if where is None else filter_runs(run_list, where))


def load_run(path: str | PathLike[str]) -> "Run":
    """Return a run by its directory.

    Raises:
        ConfigError: The directory contains no run.

    Examples:
        >>> run = hlat.load_run("runs/x")
        >>> run.settings["optimizer.name"]
        'adamw'
        >>> run.metrics["step"].to_pylist()
        [1, 2]
        >>> run.summary["final_loss"] == run.metrics["loss"][-1].as_py()
        True
    """
    return Run(Path(path), load_run_record(Path(path)))


@dataclass(frozen=True)
class Run:
    """A run directory; `record` is the content of its files."""

    path: Path
    record: RunRecord

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.record.name

    @cached_property
    def config(self) -> Config:
        """Configuration of the run.

        Raises ConfigError if it is not valid in this version of hlat; `settings` always works.
        """
        return self.record.valid_config

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings by full key, such as `optimizer.lr`."""
        return recorded_config.load_flat_settings(self.record.config)

    @cached_property
    def metrics(self) -> pa.Table:
        """Rows of metrics.jsonl: one per logged step."""
        return pa.Table.from_pylist(_unify_keys(self.record.metrics))

    @cached_property
    def heldout(self) -> pa.Table:
        """Bits per byte of each held-out source, and their mean, at each evaluation."""
        rows = [
            {"step": step, **(row.get("bits_per_byte") or {})}
            for step, row in self.record.evaluations.items()
        ]
        return pa.Table.from_pylist(_unify_keys(rows))

    @property
    def events(self) -> list[dict[str, Any]]:
        """Rows of events.jsonl."""
        return self.record.events

    @cached_property
    def summary(self) -> dict[str, float]:
        """Last step, losses, throughput, cost and counts of events."""
        return compute_summary_metrics(self.record.metrics, self.record.events)

    @property
    def checkpoint_steps(self) -> list[int]:
        """Steps of the checkpoints and milestones."""
        from hlat.checkpoint import checkpoint_directory, checkpoint_lookup

        root = checkpoint_lookup.find_checkpoint_root(self.path)
        directories = (root / "milestones", root / "checkpoints")
        return sorted(
            {step for each in directories for step in checkpoint_directory.list_steps(each)}
        )

    def load_tensors(
        self, step: int | None = None, names: Sequence[str] | None = None
    ) -> "dict[str, Tensor]":
        """Return tensors of a verified checkpoint by name, such as `weights/embedding.weight`.

        Args:
            step: Step of the checkpoint; None: the newest.
            names: Names of the tensors; None: all weights.

        Raises:
            ConfigError: The run has no such checkpoint or tensor, or it is damaged.

        Examples:
            >>> run = hlat.load_run("runs/x")
            >>> run.checkpoint_steps
            [2]
            >>> tensors = run.load_tensors(2)
            >>> tensors["weights/model.norm.weight"].shape
            torch.Size([64])
        """
        from hlat.checkpoint import checkpoint_lookup, checkpoint_store
        from hlat.checkpoint.safetensors_file import SafetensorsReader
        from hlat.distributed.tensor_slice import build_full_slice

        path, _ = checkpoint_lookup.find_checkpoint(self.path, step)
        records = checkpoint_store.load_manifest(path).tensors
        chosen = [n for n in records if n.startswith("weights/")] if names is None else names
        if missing := [name for name in chosen if name not in records]:
            raise ConfigError(f"{path} has no tensor {missing[0]}")
        with SafetensorsReader(path, records) as reader:
            return {
                name: reader.read(name, build_full_slice(records[name].shape)) for name in chosen
            }

    def load_model(self, step: int | None = None, overrides: Sequence[str] = ()) -> "TextModel":
        """Return the model of a verified checkpoint for inference in this process.

        Args:
            step: Step of the checkpoint; None: the newest.
            overrides: Settings of the groups hardware, engine, compiler and precision.

        Raises:
            ConfigError: The run has no such checkpoint, it is damaged, or an override is invalid.

        Examples:
            >>> with hlat.load_run("runs/x").load_model() as model:
            ...     text = model.generate("def main", max_tokens=8, temperature=0)
            ...     text == model.generate("def main", max_tokens=8, temperature=0)
            ...     model.score("def ", "main") < 0
            True
            True
        """
        from hlat.inference.inference_config import build_inference_config
        from hlat.inference.model_source import find_model

        source = find_model(str(self.path), step)
        return TextModel(source, build_inference_config(source, overrides))


class TextModel:
    """A model with its tokenizer; close it, or use it in a `with` statement."""

    def __init__(self, source: "ModelSource", config: Config) -> None:
        from hlat.inference.text_generator import open_text_generator

        self._stack = ExitStack()
        self._generator = self._stack.enter_context(open_text_generator(source, config))
        self.tokenizer = self._generator.tokenizer
        """Tokenizer of the run."""
        self.model = self._generator.model
        """Log-probabilities and generation for token ids."""

    def generate(
        self,
        prompt: str,
        max_tokens: int = _SAMPLING.max_tokens,
        *,
        temperature: float = _SAMPLING.temperature,
        top_p: float = _SAMPLING.top_p,
        seed: int = _SAMPLING.seed,
        stop: str | Sequence[str] = _SAMPLING.stop,
    ) -> str:
        """Return the continuation of a text, up to a stop string or the end of the document.

        The settings are those of `hlat generate`.

        Raises:
            ConfigError: A setting is out of range, or the prompt fills the context.
        """
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        settings = SamplingSettings(max_tokens, temperature, top_p, seed, stop)
        (completion,) = self._generator.generate([self._generator.encode(prompt)], settings)
        return completion.text

    def score(self, context: str, continuation: str) -> float:
        """Return the log-probability of a continuation in nats."""
        ids = self.tokenizer.encode(continuation, is_prompt_start=False)
        ((log_prob, _),) = self.model.score([(self._generator.encode(context), ids)])
        return log_prob

    def close(self) -> None:
        """Release the memory of the model."""
        self._stack.close()

    def __enter__(self) -> "TextModel":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _unify_keys(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows that all have the keys of every row, with None for missing values."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]
