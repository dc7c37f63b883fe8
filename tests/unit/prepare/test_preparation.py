"""Prepared directories are byte-identical after any interruption, or incomplete."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.data import row_index
from hlat.data.arrow_dataset import ArrowDataset
from hlat.data.data_source import open_data_sources
from hlat.prepare import (
    arrow_shards,
    conversion_job,
    corpus_manifest,
    document_reader,
    input_files,
    preparation,
    preparation_source,
)
from hlat.prepare.corpus_manifest import CorpusManifest

REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.fixture
def documents(make_documents) -> dict[str, list[str]]:
    return {f"{n}.jsonl": make_documents(f"file {n}", 30 + 10 * n) for n in range(6)}


@pytest.fixture
def root(tmp_path: Path, documents: dict[str, list[str]], monkeypatch) -> Path:
    """Write inputs, and limit jobs to two files and shards to a few documents."""
    _write(tmp_path / "in", documents)
    monkeypatch.setattr(conversion_job, "TARGET_JOB_BYTES", 20_000)
    monkeypatch.setattr(arrow_shards, "BATCH_BYTES", 2_000)
    monkeypatch.setattr(arrow_shards, "SHARD_BYTES", 5_000)
    return tmp_path


def _write(folder: Path, documents: dict[str, list[str]]) -> None:
    folder.mkdir(exist_ok=True)
    for name, some in documents.items():
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in some))


def _prepare(
    root: Path,
    output: str = "out",
    workers: int = 1,
    skip: bool = False,
    column: str = "text",
    layout: str | None = None,
) -> dict[str, CorpusManifest]:
    found = input_files.find_input_files([str(root / "in")])
    sources, _ = preparation_source.plan_sources(root / output, found, column, layout)
    return preparation.prepare_sources(sources, workers, skip, lambda _: None)


def _hash_files(folder: Path) -> dict[str, str]:
    """Return the hash of every file without the name of the source, which is that of the directory."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(
            path.read_bytes().replace(f'"{folder.name}"'.encode(), b'"_"')
        ).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _read(folder: Path) -> list[str]:
    corpus = ArrowDataset(sorted(folder.glob("*.arrow")), "text")
    return [corpus.read_text(row) for row in range(len(corpus))]


def test_documents_are_in_the_order_of_their_files(root: Path, documents) -> None:
    (manifest,) = _prepare(root).values()
    everything = [text for name in sorted(documents) for text in documents[name]]
    assert _read(root / "out") == everything
    assert manifest.totals["documents"] == len(everything)
    assert manifest.totals["text_bytes"] == sum(len(text.encode()) for text in everything)
    assert len(manifest.files) > 5
    written = json.loads((root / "out/manifest.json").read_text())
    assert (written["format"], written["source"], written["column"]) == (1, "out", "text")
    assert written["documents"] == len(everything)
    assert [Path(one["path"]).name for one in written["inputs"]] == sorted(documents)
    assert [one["documents"] for one in written["inputs"]] == [
        len(documents[n]) for n in sorted(documents)
    ]
    names = {path.name for path in (root / "out").iterdir()}
    assert names == {"manifest.json", *(one.name for one in manifest.records)}


@pytest.mark.slow
def test_output_is_independent_of_the_number_of_workers(root: Path, monkeypatch) -> None:
    monkeypatch.undo()  # other processes are not patched
    monkeypatch.setattr(conversion_job, "TARGET_JOB_BYTES", 20_000)
    _prepare(root, "one")
    _prepare(root, "two", workers=2)
    assert len(_hash_files(root / "one")) > 3
    assert _hash_files(root / "one") == _hash_files(root / "two")


def test_interrupted_preparation_skips_finished_jobs(root: Path, monkeypatch) -> None:
    _prepare(root, "whole")
    read, seen = document_reader.parse_documents, []

    def interrupted(file, path: str, *settings: object):
        seen.append(Path(path).name)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return read(file, path, *settings)

    monkeypatch.setattr(document_reader, "parse_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _prepare(root)
    assert not (root / "out/manifest.json").exists()
    assert list((root / "out").glob("*.arrow")) == []
    receipts = [json.loads(p.read_text()) for p in root.glob("out/.preparing/*/receipt.json")]
    finished = {Path(one["path"]).name for receipt in receipts for one in receipt["inputs"]}
    assert finished == set(seen[:2])
    seen[:] = [""] * 4
    _prepare(root)
    assert set(seen[4:]) == {f"{n}.jsonl" for n in range(6)} - finished
    assert _hash_files(root / "out") == _hash_files(root / "whole")


def test_complete_preparation_reads_no_documents(root: Path, monkeypatch) -> None:
    _prepare(root)
    before = _hash_files(root / "out")
    monkeypatch.setattr(
        document_reader, "parse_documents", lambda *_: pytest.fail("read_documents")
    )
    lines: list[str] = []
    sources, _ = preparation_source.plan_sources(
        root / "out", input_files.find_input_files([str(root / "in")]), "text", None
    )
    preparation.prepare_sources(sources, 1, False, lines.append)
    assert lines == [f"{root}/out: is complete already; 330 documents, 46.3kB"]
    assert _hash_files(root / "out") == before


KILLED = """
import itertools, os, sys
from hlat.prepare import __main__ as prepare, arrow_shards, conversion_job
conversion_job.TARGET_JOB_BYTES = 20_000
arrow_shards.BATCH_BYTES, arrow_shards.SHARD_BYTES = 2_000, 5_000
replace = os.replace
def attempt(last):
    calls = itertools.count()
    def dying(*arguments):
        if next(calls) == last:
            os.kill(os.getpid(), 9)
        replace(*arguments)
    os.replace = dying
    os._exit(prepare.main([*sys.argv[1:], "--workers", "1"]))
for last in itertools.count():
    pid = os.fork()
    if pid == 0:
        attempt(last)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != -9:
        print(last)
        sys.exit(status)
    is_complete = os.path.exists(sys.argv[3] + "/manifest.json")
    assert not is_complete or os.path.exists(sys.argv[3] + "/.report")
"""


def _run_program(root: Path, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_output_is_identical_after_kills_at_every_rename(root: Path) -> None:
    """Kill each attempt one rename later than the previous one, which it continues."""
    _prepare(root, "whole")
    done = _run_program(root, KILLED, "in", "--output", "out")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 15
    for name in ("prepare_report.json", "prepare_report.md"):
        (root / "out" / name).unlink()
    assert _hash_files(root / "out") == _hash_files(root / "whole")


@pytest.mark.parametrize("moves", [{"../victim": "theirs"}, {"x": "../victim"}, {"/victim": "x"}])
def test_recorded_moves_outside_of_the_directory_are_rejected(
    root: Path, moves: dict[str, str]
) -> None:
    _prepare(root)
    (root / "victim").write_text("precious")
    (root / "out" / "theirs").write_text("hostile")
    work = root / "out" / corpus_manifest.WORK_DIR
    work.mkdir(exist_ok=True)
    (work / "moves.json").write_text(json.dumps(moves))
    (root / "out" / corpus_manifest.MANIFEST_FILE).unlink()
    with pytest.raises(ConfigError, match="which is outside of"):
        _prepare(root)
    assert (root / "victim").read_text() == "precious"


def test_changed_input_is_converted_again(root: Path, documents, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "complete_source", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            _prepare(root)
    documents["3.jsonl"] = ["changed", *documents["3.jsonl"][1:]]
    _write(root / "in", {"3.jsonl": documents["3.jsonl"]})
    _prepare(root)
    assert _read(root / "out") == [text for name in sorted(documents) for text in documents[name]]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_other_settings_are_rejected_with_both_values(root: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "complete_source", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            _prepare(root, "begun")
    _prepare(root, "complete")
    (root / "in/9.jsonl").write_text('{"text": "new"}\n')
    for output in ("begun", "complete"):
        with pytest.raises(ConfigError) as error:
            _prepare(root, output, column="body")
        column, files = error.value.problems
        assert f"{output}: was started with text_column text, not with body; choose" in column
        assert "with INPUT of 6 files, not with of 7 files (among them" in files


def test_complete_preparation_with_a_larger_input_is_rejected(root: Path) -> None:
    _prepare(root)
    with (root / "in/1.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(ConfigError, match=r"1.jsonl when it had [\d,]+ bytes; it was modified"):
        _prepare(root)


def test_settings_can_change_if_no_job_finished(root: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: has no field 'body'"):
        _prepare(root, column="body")
    assert list((root / "out").iterdir()) == []
    _prepare(root)


def test_empty_and_damaged_documents_are_counted_per_input(root: Path, documents) -> None:
    with (root / "in/2.jsonl").open("ab") as file:
        file.write(b'{"text": ""}\n{"text": null}\n{"text": 1}\n{"text": "last"}\n')
    with pytest.raises(ConfigError) as error:
        _prepare(root)
    with (root / "in/4.jsonl").open("ab") as file:
        file.write(b"cut o")
    assert "2.jsonl, line 53: has a number in 'text'" in str(error.value)
    assert "skip_damaged=true" in str(error.value)
    (manifest,) = _prepare(root, skip=True).values()
    assert [(one.empty, one.damaged) for one in manifest.inputs] == [
        (0, 0), (0, 0), (2, 1), (0, 0), (0, 1), (0, 0),
    ]  # fmt: skip
    assert (manifest.totals["empty"], manifest.totals["damaged"]) == (2, 2)
    documents["2.jsonl"].append("last")
    assert _read(root / "out") == [text for name in sorted(documents) for text in documents[name]]


def test_skipping_damaged_documents_applies_to_one_attempt(root: Path, monkeypatch) -> None:
    with (root / "in/2.jsonl").open("ab") as file:
        file.write(b"{}\n")
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "complete_source", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            _prepare(root, skip=True)
    with pytest.raises(ConfigError, match="line 51: has no field 'text'"):
        _prepare(root)


def test_inputs_without_documents_are_rejected(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"no document \(0 empty, 330 damaged\); check text_col"):
        _prepare(root, skip=True, column="body")


def test_finished_jobs_remain_after_a_full_disk(root: Path, monkeypatch) -> None:
    _prepare(root, "whole")
    write, count = arrow_shards._HashingFile.write, [0]

    def raise_no_space(sink: object, block: object) -> int:
        count[0] += 1
        if count[0] > 120:
            raise OSError(errno.ENOSPC, "No space left on device", "x")
        return write(sink, block)

    with monkeypatch.context() as patch:
        patch.setattr(arrow_shards._HashingFile, "write", raise_no_space)
        with pytest.raises(OSError, match="No space left"):
            _prepare(root)
    left = list((root / "out/.preparing").iterdir())
    assert any((one / conversion_job.RECEIPT_FILE).exists() for one in left)
    assert not any(one.name.startswith(conversion_job.TEMPORARY_PREFIX) for one in left)
    _prepare(root)
    assert _hash_files(root / "out") == _hash_files(root / "whole")


def test_unrelated_output_directories_are_rejected(root: Path, write_arrow, monkeypatch) -> None:
    write_arrow(root / "foreign" / "a.arrow", ["x"])
    with pytest.raises(ConfigError, match="contains Arrow files that"):
        _prepare(root, "foreign")
    (root / "file").write_text("")
    with pytest.raises(ConfigError, match="file: cannot be created"):
        _prepare(root, "file")
    _prepare(root, "single")
    with pytest.raises(ConfigError, match="is a prepared source itself"):
        _prepare(root, "single", layout="redpajama")
    with pytest.raises(ConfigError, match="contains prepared sources, such as single"):
        _prepare(root, ".")


def test_concurrent_preparation_is_rejected(root: Path, monkeypatch) -> None:
    def prepare_again(*_: object) -> None:
        with pytest.raises(ConfigError, match="is being prepared by another process"):
            _prepare(root)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "complete_source", prepare_again)
        with pytest.raises(KeyboardInterrupt):
            _prepare(root)
    _prepare(root)


def test_row_indices_match_their_shards(root: Path) -> None:
    (manifest,) = _prepare(root).values()
    for part, index in zip(manifest.files, manifest.indices, strict=True):
        path = root / "out" / part.name
        assert index.name == row_index.get_sidecar_path(path).name
        entries = row_index.load_row_index(row_index.get_sidecar_path(path), path, "text")
        assert entries is not None
        assert int(entries["rows"].sum()) == part.rows
        assert np.array_equal(entries, row_index.build_row_index(path, "text"))
    assert corpus_manifest.verify_corpus(root / "out")[1] == []


def test_configuration_reads_a_small_redpajama(tmp_path: Path, compose, make_documents) -> None:
    files = {
        "common_crawl": ["common_crawl/2019-30/en_head_0000.json.gz.dedup.classifier.jsonl.zst"],
        "c4": ["c4/c4-train.00000-of-01024.jsonl", "c4/c4-train.00001-of-01024.jsonl"],
        "github": ["github/filtered_1.sampled.jsonl"],
        "arxiv": ["arxiv/arxiv_1.jsonl"],
        "books": ["book/book.jsonl"],
        "wikipedia": ["wikipedia/wiki.jsonl"],
        "stackexchange": ["stackexchange/stackexchange.jsonl"],
    }
    for name, paths in files.items():
        for path in (tmp_path / "raw" / one for one in paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                json.dumps({"text": text, "meta": {"source": name}, "red_pajama_subset": name})
                for text in make_documents(f"{name} {path.name}", 15)
            ]
            stream = pa.output_stream(
                str(path), compression="zstd" if path.suffix == ".zst" else None
            )
            with stream as file:
                file.write("\n".join(rows).encode())
    (tmp_path / "raw/urls.txt").write_text("https://...")
    found = input_files.find_input_files([str(tmp_path / "raw")])
    sources, notes = preparation_source.plan_sources(tmp_path / "data", found, "text", "redpajama")
    preparation.prepare_sources(sources, 1, False, lambda _: None)
    assert notes == []
    config = compose("data=redpajama", f"data.root={tmp_path}/data", "data.heldout_documents=3")
    opened = open_data_sources(OmegaConf.to_object(config).data, seed=0)
    assert {name: len(source.dataset) for name, source in opened.items()} == {
        name: 15 * len(paths) for name, paths in files.items()
    }
    assert all(source.dataset.read_text(0).startswith(name) for name, source in opened.items())


def test_complete_preparation_with_a_replaced_input_of_equal_size_is_rejected(root: Path) -> None:
    _prepare(root)
    file = root / "in" / "1.jsonl"
    content = file.read_bytes()
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    with pytest.raises(ConfigError, match=r"1.jsonl when it had .* it was modified since"):
        _prepare(root)
