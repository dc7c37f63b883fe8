"""Results and per-item output of harness tasks, in the files of the harness's command line.

`lm_eval --output_path DIR --log_samples` writes `results_TIME.json` and `samples_TASK_TIME.jsonl`
into a directory of the model. The files here have the same names, keys and hashes, so that programs
that read those also read these. A file appears under its name only when it is complete.
"""

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from hlat.config.redaction import redact_text
from hlat.evaluate import answer_bits
from hlat.evaluate.evaluation_results import ANSWER_BITS, ScoreRow, TaskResult
from hlat.inference.model_source import ModelSource
from hlat.model.decoder_spec import count_parameters
from hlat.storage import durable_files
from hlat.tracking.provenance import get_git_revision

_TASK_KEYS = (
    *("results", "groups", "group_subtasks", "configs", "versions", "n-shot"),
    *("higher_is_better", "n-samples", "task_hashes"),
)
"""Keys of the harness's results with a value for each task."""
_BOOTSTRAP_ITERATIONS = 100_000


class HarnessFiles:
    """Files of one evaluation of a model: results of all tasks, and items of each task.

    The directory has the name of the scores file, with `_harness` in place of the suffix. The
    results file is written again after each task, with those of the tasks before.
    """

    def __init__(
        self,
        scores_path: Path,
        source: ModelSource,
        settings: ScoreRow,
        chat_template: str | None,
        max_length: int,
    ) -> None:
        self.directory = scores_path.with_name(f"{scores_path.stem}_harness")
        self._start = datetime.now()
        self._date = self._start.isoformat().replace(":", "-")
        self._content: dict[str, Any] = {key: {} for key in _TASK_KEYS}
        self._content |= _build_evaluation_fields(source, settings)
        self._content |= _build_prompt_fields(settings, chat_template)
        self._content["max_length"] = max_length
        self._content["date"] = self._start.timestamp()

    def save(
        self,
        harness_results: dict[str, Any],
        results: Mapping[str, TaskResult],
        with_samples: bool,
    ) -> dict[str, TaskResult]:
        """Write the files of a task or group; return its results with their paths and hashes."""
        samples: dict[str, list[dict[str, Any]]] = harness_results["samples"]
        hashes = {name: _compute_task_hash(rows) for name, rows in samples.items()}
        self.directory.mkdir(parents=True, exist_ok=True)
        paths = {}
        if with_samples:
            for name, rows in samples.items():
                safe_name = re.sub(r"[^\w.-]", "_", name)
                lines = map(_serialize_sample, rows)
                paths[name] = self._write(f"samples_{safe_name}_{self._date}.jsonl", lines)
        for key in _TASK_KEYS:
            self._content[key].update(harness_results.get(key, {}))
        self._content["task_hashes"].update(hashes)
        seconds = (datetime.now() - self._start).total_seconds()
        self._content["total_evaluation_time_seconds"] = str(seconds)
        results_path = self._write(f"results_{self._date}.json", [_dump(self._content, indent=2)])
        extended = {}
        for name, result in results.items():
            tasks = [name] if name in samples else [*samples]
            is_known = ANSWER_BITS in result["metrics"]
            extended[name] = result | {
                "version": harness_results["versions"].get(name),
                "higher_is_better": harness_results["higher_is_better"].get(name, {})
                | ({answer_bits.METRIC: False} if is_known else {}),
                "task_hashes": {task: hashes[task] for task in tasks},
                "results_file": results_path,
            }
            if with_samples:
                extended[name]["sample_files"] = {task: paths[task] for task in tasks}
        return extended

    def _write(self, name: str, lines: Iterator[str] | list[str]) -> str:
        """Write a complete file; return its path relative to the scores file."""
        temporary = self.directory / f".{name}.tmp"
        temporary.unlink(missing_ok=True)
        durable_files.write_file(temporary, (f"{line}\n".encode() for line in lines))
        durable_files.rename_durably(temporary, self.directory / name)
        return f"{self.directory.name}/{name}"


def _build_evaluation_fields(source: ModelSource, settings: ScoreRow) -> dict[str, Any]:
    """Return model, settings and versions under the harness's keys."""
    location = redact_text(str(source.location))
    model_args = {"pretrained": location, "step": source.step, "tokens": source.tokens}
    tokenizer = source.tokenizer
    bos = tokenizer.added_bos_token
    return {
        "config": {
            "model": "hlat",
            "model_args": model_args,
            "model_num_parameters": count_parameters(source.model),
            "model_dtype": source.dtype.value,
            "model_sha": source.fingerprint,
            "bootstrap_iters": _BOOTSTRAP_ITERATIONS,
            **settings,
        },
        "git_hash": get_git_revision(),
        "lm_eval_version": importlib.metadata.version("lm_eval"),
        "transformers_version": _find_version("transformers"),
        "hlat_version": _find_version("hlat"),
        "tokenizer_eos_token": [tokenizer.eos_token, str(tokenizer.eos_token_id)],
        "tokenizer_bos_token": [bos, str(tokenizer.prefix_token_id if bos else None)],
        "tokenizer_sha256": tokenizer.sha256,
        "eot_token_id": tokenizer.eos_token_id,
        "model_source": "hlat",
        "model_name": redact_text(source.name),
    }


def _build_prompt_fields(settings: ScoreRow, chat_template: str | None) -> dict[str, Any]:
    """Return chat template and system instruction with their hashes, as the harness."""
    texts = {
        "chat_template": chat_template,
        "system_instruction": settings.get("system_instruction"),
    }
    hashes = {
        f"{key}_sha": None if text is None else hashlib.sha256(text.encode()).hexdigest()
        for key, text in texts.items()
    }
    return texts | hashes | {"fewshot_as_multiturn": settings.get("fewshot_as_multiturn")}


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compute_task_hash(samples: list[dict[str, Any]]) -> str:
    """Return the harness's hash of all documents, prompts and targets of a task."""
    hashes = (row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in samples)
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _serialize_sample(sample: Mapping[str, Any]) -> str:
    """Return an item as a line of the harness's file; numbers and targets are strings."""
    from lm_eval.utils import sanitize_list

    arguments = {
        f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(request)}
        for i, request in enumerate(sample["arguments"])
    }
    return _dump(
        {
            **sample,
            "arguments": arguments,
            "resps": sanitize_list(sample["resps"]),
            "filtered_resps": sanitize_list(sample["filtered_resps"]),
            "target": str(sample["target"]),
        }
    )


def _dump(content: Mapping[str, Any], indent: int | None = None) -> str:
    from lm_eval.utils import handle_non_serializable

    return json.dumps(content, indent=indent, default=handle_non_serializable, ensure_ascii=False)
