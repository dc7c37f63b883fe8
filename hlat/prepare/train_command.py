"""Command that trains on a prepared directory, with its held-out documents and a tokenizer."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hlat.config.data import DataConfig
from hlat.config.data_domains import DOMAINS_KEY
from hlat.config.model_overrides import format_override
from hlat.data.tokenizer_probe import MAX_TOKENIZER_BYTES
from hlat.prepare import corpus_layouts, corpus_manifest
from hlat.prepare.document_settings import HELDOUT, TRAIN
from hlat.storage.bounded_files import load_json

_SOURCE = "files"
"""Name of the source in conf/data/files.yaml."""


def format_layout_command(output_dir: Path, layout: str) -> str:
    """Return the command that trains on the sources of a layout."""
    config = corpus_layouts.LAYOUTS[layout].config
    return _join(["hlat", "train", f"data={config}", format_override("data.root", str(output_dir))])


def format_train_command(
    directories: Mapping[str, Path],
    num_documents: Mapping[str, int],
    tokenizer: Path | None,
) -> str:
    """Return the command that trains on prepared directories.

    Args:
        directories: Prepared directories by name. Of two, `heldout` contains the held-out
            documents of the source.
        num_documents: Documents of each directory.
        tokenizer: A tokenizer.json; None: the embedded tokenizer.
    """
    words = ["hlat", "train", f"data={_SOURCE}"]
    for name, directory in directories.items():
        path = json.dumps(str(directory)) if " " in str(directory) else str(directory)
        key = "heldout_paths" if name == HELDOUT and len(directories) > 1 else "paths"
        words.append(f"data.sources.{_SOURCE}.{key}=[{path}]")
    if len(directories) == 1:
        words += _list_reserved_overrides(min(num_documents.values()))
    if tokenizer is not None:
        words += list_tokenizer_overrides(tokenizer)
    return _join(words)


def format_domains_command(
    output_dir: Path, num_documents: int | None, tokenizer: Path | None
) -> str:
    """Return the command that trains on each directory of a directory as a source.

    Args:
        output_dir: Directory of the prepared sources.
        num_documents: Documents of the smallest source; None if they have held-out documents.
        tokenizer: A tokenizer.json; None: the embedded tokenizer.
    """
    words = ["hlat", "train", format_override(DOMAINS_KEY, str(output_dir))]
    if num_documents is not None:
        words += _list_reserved_overrides(num_documents)
    if tokenizer is not None:
        words += list_tokenizer_overrides(tokenizer)
    return _join(words)


def format_tokenizer_command(inputs: Sequence[str], tokenizer: Path) -> str:
    """Return the command that trains with a tokenizer, on `inputs` if they are prepared."""
    directories = {_SOURCE: Path(inputs[0]).absolute()}
    if directories[_SOURCE].name == TRAIN:
        directories[HELDOUT] = directories[_SOURCE].with_name(HELDOUT)
    manifests = {
        name: manifest
        for name, directory in directories.items()
        if (manifest := corpus_manifest.load_corpus_manifest(directory)) is not None
    }
    if len(inputs) == 1 and _SOURCE in manifests:
        counts = {name: manifest.totals["documents"] for name, manifest in manifests.items()}
        return format_train_command({n: directories[n] for n in counts}, counts, tokenizer)
    return _join(["hlat", "train", *list_tokenizer_overrides(tokenizer)])


def list_tokenizer_overrides(tokenizer: Path) -> Iterator[str]:
    """Yield the overrides that train with a tokenizer.json and the tokens of its configuration."""
    yield format_override("data.tokenizer", str(tokenizer.absolute()))
    config: Any = None
    with suppress(OSError, ValueError):
        config = load_json(tokenizer.with_name("tokenizer_config.json"))
    for key in ("eos_token", "bos_token"):
        token = config.get(key) if isinstance(config, dict) else None
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            yield format_override(f"data.{key}", token)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = load_json(tokenizer, MAX_TOKENIZER_BYTES)
        ids = [*content["model"]["vocab"].values(), *(one["id"] for one in content["added_tokens"])]
        yield f"model.vocab_size={max(ids) + 1}"


def _list_reserved_overrides(num_documents: int) -> list[str]:
    """Return the override of the held-out documents for a source with few documents."""
    most = (num_documents - 1) // 2
    return [f"data.heldout_documents={max(1, most)}"] * (most < DataConfig.heldout_documents)


def _join(words: list[str]) -> str:
    """Return a command line, with quotes where a shell needs them."""
    return " ".join(word if _is_plain(word) else shlex.quote(word) for word in words)


def _is_plain(word: str) -> bool:
    return not set(word) & set(" \t\n\"'\\$`{}()*?<>|&;#!~")
