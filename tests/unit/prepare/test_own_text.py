"""Preparation of a directory of user files: filters, duplicates, held-out documents and report."""

import gzip
import hashlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from hlat.data.tokenizer import EMBEDDED_FILE
from hlat.prepare import __main__ as prepare
from hlat.prepare import (
    arrow_shards,
    conversion_job,
    document_signatures,
    job_pool,
    train_command,
)
from tests.fakes.dataset_hub import serve_dataset
from tests.support.document_commands import REPOSITORY, find_config_problems

FILTERS = """
import re
def drop_private(text):
    return None if text.startswith("PRIVATE") else text
def mask_email(text):
    return re.sub(r"[\\w.]+@[\\w.]+", "<email>", text)
def fails(text):
    return text.missing
def returns_number(text):
    return 7
"""
WORDS = [f"word{i}" for i in range(400)]


def _make_document(name: str, num_words: int = 200) -> str:
    return f"{name} " + " ".join(random.Random(name).choices(WORDS, k=num_words))


@pytest.fixture
def run(tmp_path: Path, monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        try:
            code = prepare.main(arguments)
        except SystemExit as exited:
            code = int(exited.code or 0)
        return (code, *capsys.readouterr())

    return run_command


@pytest.fixture
def input_dir(tmp_path: Path) -> Path:
    """Write files of several formats: 60 documents, 4 exact and 3 near duplicates."""
    root = tmp_path / "texts"
    (root / "src").mkdir(parents=True)
    documents = [_make_document(f"document{i}") for i in range(60)]
    for i in range(20):
        suffix = (".txt", ".md", ".py", ".rs")[i % 4]
        (root / "src" / f"{i:02}{suffix}").write_text(documents[i])
    (root / "a.txt.gz").write_bytes(gzip.compress(documents[20].encode()))
    rows = [*documents[21:40], documents[0], documents[1]]
    (root / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    near = [text.replace(" word1 ", " other ", 1) + " end" for text in documents[2:5]]
    table = pa.table({"text": [*documents[40:], documents[2], documents[30], *near]})
    pq.write_table(table, root / "z.parquet")
    (root / "d.png").write_bytes(b"\x89PNG\0")
    return root


def _read(directory: Path) -> list[str]:
    files = sorted(directory.glob("*.arrow"))
    return [b.decode() for file in files for some in arrow_shards.read_shard(file) for b in some]


def _hash_files(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _find_train_command(out: str) -> str:
    return out.splitlines()[-1].removeprefix("train on it: ")


def test_mixed_directory_requires_no_settings(run, input_dir: Path, compose) -> None:
    code, out, _ = run("texts")
    assert code == 0
    assert len(_read(Path("data/texts"))) == 60 + 4 + 3
    assert "skipped: 1 of 24 files, 5.00B\n  not text: 5.00B (1 .png)\n" in out
    assert "4 documents are exact copies of others; remove them with dedup=exact" in out
    report = json.loads(Path("data/texts/prepare_report.json").read_text())
    assert report["inputs"]["by_suffix"][".txt.gz"]["documents"] == 1
    assert report["inputs"]["by_suffix"][".py"]["files"] == 5
    command = _find_train_command(out)
    assert command.startswith(f"hlat train data=files data.sources.files.paths=[{Path.cwd()}/data/")
    assert not find_config_problems(command, compose)
    assert "is complete already; 67 documents" in run("texts")[1]


def test_text_is_split_at_a_separator(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("hlat.prepare.text_blocks.BLOCK_BYTES", 5)
    (tmp_path / "book.txt").write_text("one\n<|end|>\ntwo\n\n<|end|>\n\n<|end|>three<|end", "utf-8")
    assert run("book.txt", "separator=<|end|>")[0] == 0
    assert _read(tmp_path / "data/book") == ["one", "two", "three<|end"]
    code, _, errors = run("book.txt")
    assert code == 2
    assert "was started with separator <|end|>, not with not given" in errors
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n\n\n\nthree\n")
    assert run("lines.txt", r"separator=\n\n")[0] == 0
    assert _read(tmp_path / "data/lines") == ["one", "two", "three"]


@pytest.fixture
def damaged_dir(tmp_path: Path) -> Path:
    """Write 40 documents, of which one cannot be read, and a file in Latin-1."""
    root = tmp_path / "texts"
    root.mkdir()
    rows = [json.dumps({"text": _make_document(f"document{i}")}) for i in range(40)]
    rows[7] = rows[7][:60]
    (root / "a.jsonl").write_text("\n".join(rows))
    (root / "latin.txt").write_bytes(b"caf\xe9 " * 9)
    return root


def test_lost_text_is_counted_and_named(run, damaged_dir: Path) -> None:
    code, _, errors = run("texts")
    assert code == 2
    assert f"{damaged_dir}/a.jsonl, line 8: is not JSON (" in errors
    code, _, errors = run("texts", "skip_damaged=true")
    assert code == 2
    assert "1 file without a readable document; repair or remove the files, or acc" in errors
    assert f"    {damaged_dir}/latin.txt\n      document 1 (byte 0xe9 at position 3)" in errors
    code, out, _ = run("texts", "skip_damaged=true", "max_lost=0.05")
    assert code == 0
    lines = out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("lost: "))
    share = 105 / (105 + sum(map(len, _read(Path("data/texts")))))
    assert lines[start : start + 4] == [
        f"lost: {share:.2%} of the text, 105B in 2 documents of 2 files",
        "  60.0B in 1 document of 1 file: is not JSON",
        f"    {damaged_dir}/a.jsonl",
        "      line 8 (Unterminated string starting at: line 1 column 10 (char 9))",
    ]
    manifest = json.loads(Path("data/texts/manifest.json").read_text())
    assert [(Path(one["path"]).name, one["documents"], one["bytes"], one["is_whole_file"])
            for one in manifest["lost"]] == [("a.jsonl", 1, 60, False), ("latin.txt", 1, 45, True)]  # fmt: skip
    assert "latin.txt" in Path("data/texts/prepare_report.md").read_text()
    assert "is complete already" in run("texts", "skip_damaged=true")[1]


def test_loss_above_the_limit_is_an_error(run, damaged_dir: Path) -> None:
    (damaged_dir / "b.jsonl").write_text('{"body": 1}\n' * 300 + '{"text": "x"}\n')
    code, _, errors = run("texts", "skip_damaged=true", "max_lost=0.025", "encoding=latin-1")
    assert code == 2
    assert "of the text is lost, and 2.5% is accepted; repair" in errors
    share = float(re.search(r"max_lost=([\d.]+)", errors)[1])
    code, out, _ = run("texts", "skip_damaged=true", f"max_lost={share}", "encoding=cp1252")
    assert code == 0
    assert "documents converted to UTF-8: 1 from cp1252" in out
    assert len(_read(Path("data/texts"))) == 39 + 1 + 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("encoding=none", "encoding: none is not an encoding of Python"),
        ("encoding=hex", "encoding: hex is not an encoding of Python"),
        ("max_lost=0.1", "max_lost= needs skip_damaged=true"),
        ("max_lost=2", "max_lost: 2 is not a fraction of 1 or less"),
    ],
)
def test_invalid_settings_of_damaged_text(run, damaged_dir: Path, setting: str, message) -> None:
    code, _, errors = run("texts", setting)
    assert code == 2
    assert message in errors


def test_names_that_are_not_utf8_are_recorded(run, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    name = os.fsdecode(b"a::\xff.txt")
    (tmp_path / "texts" / name).write_bytes(b"text|\xff")
    code, out, _ = run("texts", "separator=|", "skip_damaged=true", "max_lost=0.5")
    assert code == 0, out
    assert r"a::\udcff.txt" in Path("data/texts/prepare_report.md").read_text()
    manifest = json.loads(Path("data/texts/manifest.json").read_text())
    assert [Path(one["path"]).name for one in manifest["inputs"]] == [name]
    assert "is complete already" in run("texts", "separator=|")[1]


def test_directory_of_a_store_is_read(run) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/own-text/notes/a.md", b"# first")
    memory.pipe("/own-text/notes/b.txt.gz", gzip.compress(b"second"))
    assert run("memory://own-text/notes")[0] == 0
    assert _read(Path("data/notes")) == ["# first", "second"]


def test_duplicates_and_heldout_documents_are_separated(run, input_dir: Path, compose) -> None:
    code, out, _ = run("texts", "dedup=minhash", "heldout=0.1", f"tokenizer={EMBEDDED_FILE}")
    assert code == 0, out
    train, heldout = _read(Path("data/texts/train")), _read(Path("data/texts/heldout"))
    assert len(train) + len(heldout) == len({*train, *heldout}) == 60
    assert 1 <= len(heldout) <= 15
    assert not any(text.endswith(" end") for text in train + heldout)
    report = json.loads(Path("data/texts/prepare_report.json").read_text())
    assert report["inputs"]["removed"] == {"exact duplicates": 4, "near duplicates": 3}
    assert len(report["removed_samples"]["duplicates"]) == 3
    assert report["sources"]["heldout"]["documents"] == len(heldout)
    encoder = tokenizers.Tokenizer.from_file(str(EMBEDDED_FILE))
    num_tokens = sum(len(encoder.encode(text).ids) + 1 for text in train)
    assert report["sources"]["train"]["tokens"] == num_tokens
    assert f"{EMBEDDED_FILE} loses 0.00% (0 of " in out
    histogram = report["sources"]["train"]["histogram"]
    assert sum(entry["documents"] for entry in histogram) == len(train)
    assert sum(entry["text_bytes"] for entry in histogram) == len("".join(train).encode())
    page = Path("data/texts/prepare_report.md").read_text()
    assert "removed documents: 4 exact duplicates, 3 near duplicates" in page
    assert "## Near duplicates 3" in page
    command = _find_train_command(out)
    assert f"data.sources.files.heldout_paths=[{Path.cwd()}/data/texts/heldout]" in command
    assert "data.heldout_documents" not in command
    assert not find_config_problems(command, compose)


def test_heldout_documents_depend_on_their_content_and_the_seed(run, input_dir: Path) -> None:
    for name, *settings in (("a",), ("b", "dedup=exact"), ("c", "seed=1")):
        assert run("texts", "heldout=0.2", f"output={name}", *settings)[0] == 0
    (input_dir / "z.parquet").unlink()
    assert run("texts", "heldout=0.2", "output=d")[0] == 0
    a, b, c, d = ({*_read(Path(name, "heldout"))} for name in "abcd")
    assert a == b
    assert d == a & {_make_document(f"document{i}") for i in range(40)}
    assert a != c
    assert not a & {*_read(Path("a/train"))}
    code, _, errors = run("texts", "heldout=0.2", "output=a", "seed=1")
    assert code == 2
    assert "was started with seed not given, not with 1" in errors
    code, _, errors = run("texts/src/01.md", "heldout=0.2", "output=e")
    assert code == 2
    assert re.search("heldout=0.2 leaves no (train|heldout) document of 1", errors)


def test_filters_of_a_file_change_and_remove_documents(run, tmp_path: Path) -> None:
    (tmp_path / "my_filters.py").write_text(FILTERS)
    (tmp_path / "texts").mkdir()
    for name, text in (
        ("a", "PRIVATE x"),
        ("b", "Write to a.b@c.org, please."),
        ("c", "no"),
        ("d", "x" * 99),
    ):
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    settings = "filters=my_filters.py:drop_private,my_filters.py:mask_email"
    code, out, _ = run("texts", "min_chars=3", "max_chars=50", settings)
    assert code == 0
    assert _read(tmp_path / "data/texts") == ["Write to <email>, please."]
    removed = "1 min_chars=3, 1 max_chars=50, 1 my_filters.py:drop_private"
    assert all(part in out for part in removed.split(", "))
    report = json.loads(Path("data/texts/prepare_report.json").read_text())
    assert report["removed_samples"]["filters"]["my_filters.py:drop_private"] == ["PRIVATE x"]
    (tmp_path / "my_filters.py").write_text(FILTERS + "# changed")
    assert "was started with filters" in run("texts", "min_chars=3", "max_chars=50", settings)[2]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("filters=my_filters.py:fails", "my_filters.py:fails failed at "),
        ("filters=my_filters.py:returns_number", "my_filters.py:returns_number returned int at "),
        ("filters=my_filters.py:no", "no such function; it has drop_private, mask_email, fails"),
        ("filters=none.py:x", "none.py cannot be read (No such file or directory)"),
        ("filters=my_filters.py", "is not FILE:FUNCTION"),
        ("heldout=0.9", "heldout: 0.9 is not a fraction of 0.5 or less"),
        ("seed=1", "seed= needs heldout="),
        ("min_chars=1000", "no document (0 empty, 0 damaged, 1 removed by min_chars=1000); check"),
    ],
)
def test_invalid_settings_are_one_message(run, tmp_path: Path, setting: str, message: str) -> None:
    (tmp_path / "my_filters.py").write_text(FILTERS)
    (tmp_path / "a.txt").write_text("text")
    code, _, errors = run("a.txt", setting)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_documents_in_other_languages_are_removed(run, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    english = "The committee will meet on Thursday to discuss the results of the experiment."
    german = (
        "Der Ausschuss trifft sich am Donnerstag, um die Ergebnisse des Versuchs zu besprechen."
    )
    (tmp_path / "texts/en.txt").write_text(english)
    (tmp_path / "texts/de.txt").write_text(german)
    assert run("texts", "language=de")[0] == 0
    assert _read(tmp_path / "data/texts") == [german]


def test_printed_command_has_one_heldout_set() -> None:
    directories = {"train": Path("/x/train"), "heldout": Path("/x y/heldout")}
    tokenizer = Path("/x/tokenizer.json")
    many = train_command.format_train_command(directories, {"train": 900, "heldout": 80}, tokenizer)
    assert many == (
        "hlat train data=files data.sources.files.paths=[/x/train] "
        """'data.sources.files.heldout_paths=["/x y/heldout"]' """
        "data.tokenizer=/x/tokenizer.json"
    )
    few = train_command.format_train_command({"mine": Path("/x")}, {"mine": 9}, None)
    assert few == "hlat train data=files data.sources.files.paths=[/x] data.heldout_documents=4"
    one = train_command.format_train_command({"heldout": Path("/heldout")}, {"heldout": 2}, None)
    assert "data.sources.files.paths=[/heldout]" in one


@pytest.mark.parametrize(
    ("module", "setting"), [("py3langid", "language=en"), ("datasketch", "dedup=minhash")]
)
def test_missing_library_is_an_error_with_its_name(
    run, tmp_path, monkeypatch, module, setting
) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setitem(sys.modules, module, None)
    code, _, errors = run("a.txt", setting)
    assert code == 2
    assert f"needs the package {module}; pip install 'hlat[prepare]'" in errors


def test_estimated_similarity_of_word_sequences() -> None:
    first = _make_document("x", 2000)
    arguments = first.split()
    second = " ".join([*arguments[:-300], *_make_document("y", 300).split()])
    sets = [
        {tuple(arguments[i : i + 5]) for i in range(len(arguments) - 4)}
        for arguments in (first.split(), second.split())
    ]
    expected = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    values = [document_signatures.compute_minhash(text) for text in (first, second)]
    assert (values[0] == values[1]).mean() == pytest.approx(expected, abs=0.12)


SETTINGS = ("dedup=minhash", "heldout=0.2", "min_chars=5", f"tokenizer={EMBEDDED_FILE}")


@pytest.fixture
def small_jobs(monkeypatch) -> None:
    """Divide the documents among several jobs and shards."""
    monkeypatch.setattr(conversion_job, "TARGET_JOB_BYTES", 10_000)
    monkeypatch.setattr(arrow_shards, "BATCH_BYTES", 4_000)
    monkeypatch.setattr(arrow_shards, "SHARD_BYTES", 8_000)


def test_earlier_output_within_the_input_is_no_unsupported_file(run, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a text")
    assert run("texts", "output=texts/first", "workers=1")[0] == 0
    code, out, _ = run("texts", "output=second", "workers=1")
    assert code == 0
    assert "output of hlat prepare" in out


@pytest.mark.usefixtures("small_jobs")
@pytest.mark.slow
def test_output_is_independent_of_interruptions(run, input_dir: Path, monkeypatch) -> None:
    """Interrupt each attempt at one of the durable renames."""
    assert run("texts", *SETTINGS, "output=data/whole", "workers=1")[0] == 0
    replace, num_calls = os.replace, 0

    def interrupt(*arguments: object) -> None:
        nonlocal num_calls
        num_calls -= 1
        if num_calls < 0:
            raise KeyboardInterrupt
        replace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        for attempt in range(1, 200, 7):
            num_calls = attempt
            code, _, _ = run("texts", *SETTINGS, "output=data/parts", "workers=1")
            if code == 0:
                break
            assert code == 75
        assert attempt > 20
    whole, parts = (_hash_files(Path("data", name)) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    different = {name for name in whole if whole[name] != parts[name]}
    assert different <= {"prepare_report.json", "prepare_report.md"}  # they contain the path
    assert len([name for name in whole if name.endswith(".arrow")]) > 4


@pytest.mark.slow  # starts workers
def test_output_is_independent_of_the_number_of_workers(run, input_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(conversion_job, "TARGET_JOB_BYTES", 10_000)
    monkeypatch.setattr(job_pool, "MIN_WORKER_BYTES", 1)
    for workers in ("1", "3"):
        assert run("texts", *SETTINGS, f"output=w{workers}/x", f"workers={workers}")[0] == 0
    one, three = _hash_files(Path("w1/x")), _hash_files(Path("w3/x"))
    assert {n: h for n, h in one.items() if "report" not in n} == {
        n: h for n, h in three.items() if "report" not in n
    }


@pytest.mark.slow  # starts processes
def test_training_split_of_a_hub_dataset_is_prepared(tmp_path: Path) -> None:
    """HF_ENDPOINT is read when huggingface_hub is imported, so the command is a process."""
    table = pa.table({"text": [_make_document(f"hub{i}", 50) for i in range(30)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    parquet = sink.getvalue().to_pybytes()
    lines = b'{"text": "first"}\n{"text": "second"}\n'
    converted = {
        "default/train/0000.parquet": parquet,
        "default/validation/0000.parquet": parquet,
    }
    original = {"README.md": b"card", "data/train.jsonl": lines, "data/test.jsonl": lines}
    cases = [
        ({"main": original, "refs/convert/parquet": converted}, ["own/set"], 30),
        ({"main": original}, ["hf://datasets/own/set"], 2),
    ]
    for number, (revisions, arguments, num_documents) in enumerate(cases):
        with serve_dataset("own/set", revisions) as endpoint:
            done = subprocess.run(
                [sys.executable, "-m", "hlat.prepare", *arguments, f"output={number}"],
                cwd=tmp_path,
                env=os.environ
                | {
                    "HF_ENDPOINT": endpoint,
                    "PYTHONPATH": str(REPOSITORY),
                    "HF_HUB_DISABLE_XET": "1",
                },
                capture_output=True,
                text=True,
            )
        assert done.returncode == 0, done.stderr
        assert len(_read(tmp_path / str(number))) == num_documents


@pytest.mark.slow  # trains
def test_the_printed_command_trains(run, input_dir: Path, tmp_path: Path) -> None:
    code, out, _ = run("texts", "heldout=0.2", "dedup=exact")
    assert code == 0
    small = ["model.num_layers=1", "model.hidden_size=32", "model.intermediate_size=64"]
    arguments = [*shlex.split(_find_train_command(out)), *small, "run.steps=2", "run.name=x"]
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    events = map(json.loads, (tmp_path / "runs/x/events.jsonl").read_text().splitlines())
    evaluated = [event["bits_per_byte"] for event in events if event["event"] == "evaluate"]
    assert evaluated
    assert all(bits.keys() == {"files", "mean"} for bits in evaluated)
    assert all(bits["mean"] == bits["files"] for bits in evaluated)
