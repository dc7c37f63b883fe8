"""Prepared directories are identical to the byte after any interruption, or incomplete."""

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
def texts(make_texts) -> dict[str, list[str]]:
    return {f"{n}.jsonl": make_texts(f"file {n}", 30 + 10 * n) for n in range(6)}


@pytest.fixture
def root(tmp_path: Path, texts: dict[str, list[str]], monkeypatch) -> Path:
    """A folder with inputs; jobs of two files, parts of a few documents."""
    _write(tmp_path / "in", texts)
    monkeypatch.setattr(conversion_job, "TARGET_JOB_BYTES", 20_000)
    monkeypatch.setattr(arrow_shards, "BATCH_BYTES", 2_000)
    monkeypatch.setattr(arrow_shards, "SHARD_BYTES", 5_000)
    return tmp_path


def _write(folder: Path, texts: dict[str, list[str]]) -> None:
    folder.mkdir(exist_ok=True)
    for name, some in texts.items():
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


def _content(folder: Path) -> dict[str, str]:
    """Every file and its hash; the folder's own name is the source's."""
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


def test_documents_come_out_in_the_order_of_their_files(root: Path, texts) -> None:
    (manifest,) = _prepare(root).values()
    everything = [text for name in sorted(texts) for text in texts[name]]
    assert _read(root / "out") == everything
    assert manifest.totals["documents"] == len(everything)
    assert manifest.totals["text_bytes"] == sum(len(text.encode()) for text in everything)
    assert len(manifest.files) > 5
    written = json.loads((root / "out/manifest.json").read_text())
    assert (written["format"], written["source"], written["column"]) == (1, "out", "text")
    assert written["documents"] == len(everything)
    assert [Path(one["path"]).name for one in written["inputs"]] == sorted(texts)
    assert [one["documents"] for one in written["inputs"]] == [len(texts[n]) for n in sorted(texts)]
    names = {path.name for path in (root / "out").iterdir()}
    assert names == {"manifest.json", *(one.name for one in manifest.records)}


def test_any_number_of_workers_gives_the_same_bytes(root: Path, monkeypatch) -> None:
    monkeypatch.undo()  # what is patched here is not in another process
    monkeypatch.setattr(conversion_job, "TARGET_JOB_BYTES", 20_000)
    _prepare(root, "one")
    _prepare(root, "two", workers=2)
    assert len(_content(root / "one")) > 3
    assert _content(root / "one") == _content(root / "two")


def test_an_interrupted_one_goes_on_without_what_is_finished(root: Path, monkeypatch) -> None:
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
    assert _content(root / "out") == _content(root / "whole")


def test_a_complete_one_reads_nothing(root: Path, monkeypatch) -> None:
    _prepare(root)
    before = _content(root / "out")
    monkeypatch.setattr(
        document_reader, "parse_documents", lambda *_: pytest.fail("read_documents")
    )
    lines: list[str] = []
    sources, _ = preparation_source.plan_sources(
        root / "out", input_files.find_input_files([str(root / "in")]), "text", None
    )
    preparation.prepare_sources(sources, 1, False, lines.append)
    assert lines == [f"{root}/out: is complete already; 330 documents, 46.3kB"]
    assert _content(root / "out") == before


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


def _run(root: Path, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_kills_at_every_rename_leave_nothing_wrong(root: Path) -> None:
    """Each attempt is killed one rename later than the one before, and goes on from its remains."""
    _prepare(root, "whole")
    done = _run(root, KILLED, "in", "--output", "out")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 15
    for name in ("prepare_report.json", "prepare_report.md"):
        (root / "out" / name).unlink()
    assert _content(root / "out") == _content(root / "whole")


@pytest.mark.parametrize("moves", [{"../victim": "theirs"}, {"x": "../victim"}, {"/victim": "x"}])
def test_names_to_take_back_stay_in_the_folder(root: Path, moves: dict[str, str]) -> None:
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


def test_a_changed_input_is_converted_again(root: Path, texts, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "complete_source", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            _prepare(root)
    texts["3.jsonl"] = ["changed", *texts["3.jsonl"][1:]]
    _write(root / "in", {"3.jsonl": texts["3.jsonl"]})
    _prepare(root)
    assert _read(root / "out") == [text for name in sorted(texts) for text in texts[name]]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_other_settings_are_refused_with_both(root: Path, monkeypatch) -> None:
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


def test_a_complete_one_whose_input_has_grown_is_refused(root: Path) -> None:
    _prepare(root)
    with (root / "in/1.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(ConfigError, match=r"1.jsonl when it had [\d,]+ bytes; it was modified"):
        _prepare(root)


def test_a_first_attempt_that_finished_nothing_binds_nobody(root: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: has no field 'body'"):
        _prepare(root, column="body")
    assert list((root / "out").iterdir()) == []
    _prepare(root)


def test_empty_and_damaged_documents_are_counted_per_input(root: Path, texts) -> None:
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
    texts["2.jsonl"].append("last")
    assert _read(root / "out") == [text for name in sorted(texts) for text in texts[name]]


def test_damage_that_was_allowed_once_is_not_for_good(root: Path, monkeypatch) -> None:
    with (root / "in/2.jsonl").open("ab") as file:
        file.write(b"{}\n")
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "complete_source", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            _prepare(root, skip=True)
    with pytest.raises(ConfigError, match="line 51: has no field 'text'"):
        _prepare(root)


def test_inputs_without_a_document_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"no document \(0 empty, 330 damaged\); check text_col"):
        _prepare(root, skip=True, column="body")


def test_a_full_disk_keeps_what_is_finished(root: Path, monkeypatch) -> None:
    _prepare(root, "whole")
    write, count = arrow_shards._HashingFile.write, [0]

    def full(sink: object, block: object) -> int:
        count[0] += 1
        if count[0] > 120:
            raise OSError(errno.ENOSPC, "No space left on device", "x")
        return write(sink, block)

    with monkeypatch.context() as patch:
        patch.setattr(arrow_shards._HashingFile, "write", full)
        with pytest.raises(OSError, match="No space left"):
            _prepare(root)
    left = list((root / "out/.preparing").iterdir())
    assert any((one / conversion_job.RECEIPT_FILE).exists() for one in left)
    assert not any(one.name.startswith(conversion_job.TEMPORARY_PREFIX) for one in left)
    _prepare(root)
    assert _content(root / "out") == _content(root / "whole")


def test_folders_of_somebody_else_are_left_alone(root: Path, write_arrow, monkeypatch) -> None:
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


def test_two_at_once_do_not_meet(root: Path, monkeypatch) -> None:
    def second(*_: object) -> None:
        with pytest.raises(ConfigError, match="is being prepared by another process"):
            _prepare(root)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "complete_source", second)
        with pytest.raises(KeyboardInterrupt):
            _prepare(root)
    _prepare(root)


def test_row_indices_go_with_their_parts(root: Path) -> None:
    (manifest,) = _prepare(root).values()
    for part, index in zip(manifest.files, manifest.indices, strict=True):
        path = root / "out" / part.name
        assert index.name == row_index.get_sidecar_path(path).name
        entries = row_index.load_row_index(row_index.get_sidecar_path(path), path, "text")
        assert entries is not None
        assert int(entries["rows"].sum()) == part.rows
        assert np.array_equal(entries, row_index.build_row_index(path, "text"))
    assert corpus_manifest.verify_corpus(root / "out")[1] == []


def test_a_miniature_of_redpajama_is_what_its_configuration_reads(
    tmp_path: Path, compose, make_texts
) -> None:
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
                for text in make_texts(f"{name} {path.name}", 15)
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


def test_a_complete_one_whose_input_was_replaced_by_one_of_its_size_is_refused(root: Path) -> None:
    _prepare(root)
    file = root / "in" / "1.jsonl"
    content = file.read_bytes()
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    with pytest.raises(ConfigError, match=r"1.jsonl when it had .* it was modified since"):
        _prepare(root)
