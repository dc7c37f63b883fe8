"""Test the output, errors and exit codes of `python -m hlat.prepare`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.data.data_source import open_data_sources
from hlat.prepare import __main__ as prepare
from hlat.prepare import preparation
from hlat.storage.progress_bar import format_bytes


@pytest.fixture
def run(capsys) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command and returns exit code, stdout and stderr."""

    def run_command(*arguments: object) -> tuple[int, str, str]:
        try:
            code = prepare.main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        return (code, *capsys.readouterr())

    return run_command


@pytest.fixture
def input_dir(tmp_path: Path, make_documents) -> Path:
    """Write a directory with a file of documents."""
    (tmp_path / "in").mkdir()
    rows = [json.dumps({"text": text}) for text in make_documents("prepare", 20)]
    (tmp_path / "in/a.jsonl").write_text("\n".join(rows))
    return tmp_path / "in"


@pytest.mark.xdist_group("embedded")
def test_sources_rows_sizes_and_directory_are_printed(embedded_folder: Path, run) -> None:
    code, first, _ = run()
    assert (code, first) == (0, run()[1])
    lines = first.splitlines()
    assert str(embedded_folder) in lines[0]
    assert [line.split()[0] for line in lines[1:]] == [
        "embedded:code",
        "embedded:data",
        "embedded:prose",
    ]
    assert all("rows" in line and line.endswith("MB") for line in lines[1:])


def test_unwritable_cache_is_exit_code_2(monkeypatch, tmp_path, run) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "file"))
    code, _, printed = run()
    assert code == 2
    assert "HLAT_CACHE" in printed


def test_help_contains_the_directory_and_examples(run) -> None:
    code, printed, _ = run("--help")
    assert code == 0
    assert "HLAT_CACHE" in printed
    assert "layout=redpajama output=data" in printed


def test_prepare_twice_and_inspect(input_dir: Path, tmp_path: Path, run) -> None:
    out = tmp_path / "out"
    code, printed, progress = run(input_dir, "--output", out)
    assert code == 0
    manifest = json.loads((out / "manifest.json").read_text())
    size = f"20 documents, {format_bytes(manifest['text_bytes'])}"
    command = f"hlat train data=files data.sources.files.paths=[{out}]"
    assert printed.splitlines()[0] == f"{out}: {size}"
    assert printed.splitlines()[-2:] == [
        f"report: {out}/prepare_report.md",
        f"train on it: {command} data.heldout_documents=9",
    ]
    assert progress.splitlines() == [
        f"preparing {out}: {format_bytes((input_dir / 'a.jsonl').stat().st_size)}",
        f"counting {out}: {format_bytes(manifest['text_bytes'])}",
    ]
    code, printed, progress = run(input_dir, "--output", out)
    assert (code, progress) == (0, "")
    assert printed.splitlines()[0] == f"{out}: is complete already; {size}"
    code, printed, _ = run("--inspect", out)
    assert code == 0
    assert printed.splitlines()[1].split()[:2] == ["out", "20"]


def test_skipped_files_are_counted(input_dir: Path, tmp_path: Path, run) -> None:
    for name in ("a.png", "b.png", "c.zip", "d.\x1b[2J"):
        (input_dir / name).write_bytes(b"PK\3\4\0")
    arguments = (input_dir, "--output", tmp_path / "data")
    code, _, errors = run(*arguments)
    assert code == 2
    lines = [
        "skipped: 4 of 5 files, 20.0B",
        "  a zip archive: 20.0B (2 .png, 1 '.\\x1b[2j', 1 .zip)",
    ]
    assert errors.splitlines()[1:] == lines
    assert "add skip_unsupported=true to convert the others" in errors
    code, out, _ = run(*arguments, "--skip-unsupported")
    assert code == 0
    assert out.splitlines()[:2] == lines
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    assert [(one["suffix"], one["files"]) for one in manifest["skipped_files"]] == [
        (".png", 2),
        (".\x1b[2j", 1),
        (".zip", 1),
    ]
    assert "is complete already" in run(*arguments, "--skip-unsupported")[1]


def test_verify_lists_missing_files(input_dir: Path, tmp_path: Path, run) -> None:
    out = tmp_path / "out"
    run(input_dir, "--output", out)
    size = format_bytes(sum(path.stat().st_size for path in out.glob("part-*")))
    assert run("--verify", out)[:2] == (0, f"{out}: {size}; all files are intact\n")
    (out / "part-00000.arrow").unlink()
    code, printed, problems = run("--verify", out)
    assert code == 1
    assert printed == f"{out}: {size}; 1 files are damaged\n"
    assert f"{out}/part-00000.arrow: is missing" in problems


def test_layout_reports_missing_sources(input_dir: Path, tmp_path: Path, run) -> None:
    (input_dir / "c4").mkdir()
    (input_dir / "a.jsonl").rename(input_dir / "c4/a.jsonl")
    (input_dir / "x.jsonl").write_text("")
    code, printed, _ = run(input_dir, "--layout", "redpajama", "--output", tmp_path / "data")
    assert code == 0
    assert "books: there is no file book/*.jsonl*" in printed
    assert f"1 files are of no source of redpajama, such as {input_dir}/x.jsonl" in printed
    assert f"data=redpajama data.root={tmp_path}/data" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--outptu", "x"], "unrecognized arguments: --outptu; did you mean output=?"),
        (["in", "in2"], "several INPUTs need output="),
        (["in", "--layout", "c4"], "invalid choice: 'c4'"),
        (["in", "--layout", "redpajama"], "layout= needs output="),
        (["--output", "x"], "output= needs INPUT"),
        (["in", "--inspect", "x"], "INPUT and inspect= cannot be combined"),
        (["--verify", "x", "--skip-damaged"], "skip_damaged= needs INPUT"),
        (["in", "a", "--output", "x", "--domains"], "domains= needs one INPUT and no layout="),
        (["--domains"], "domains= needs INPUT"),
        (["--verify", "x", "--tokenizer", "t"], "tokenizer= cannot be combined with verify="),
        (["in", "--output", "x", "--tokenizer", "t"], "tokenizer=t: cannot be read (No such"),
        (
            ["in", "--output", "x", "--workers", "0"],
            "workers: 0 is not a whole number of 1 or more",
        ),
        (["in", "--output", "x", "--layout", "pile"], "invalid choice: 'pile'"),
        (["nowhere", "--output", "x"], "nowhere: there is no such file or directory"),
        (["--inspect", "nowhere"], "nowhere: there is no such file or directory"),
        (["--verify", "nowhere"], "nowhere: it and its directories have no manifest.json"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    arguments, message, run, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = run(*arguments)
    assert code == 2
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def corpus_dir(tmp_path: Path, make_documents) -> Path:
    """Write a corpus with one directory per domain, in other scripts and formats."""
    for name, texts in (
        ("wiki", ["維基百科", "статья", "a", "b", "c"]),
        ("my-code", ["def f(): 1"]),
    ):
        (tmp_path / "corpus" / name / "inner").mkdir(parents=True)
        for index, text in enumerate(texts):
            (tmp_path / "corpus" / name / f"{index}.txt").write_text(text)
    rows = [json.dumps({"text": text}) for text in make_documents("prepare", 9)]
    (tmp_path / "corpus/my-code/inner/a.jsonl").write_text("\n".join(rows))
    (tmp_path / "corpus/.DS_Store").write_text("")
    return tmp_path / "corpus"


def test_each_directory_becomes_a_source(corpus_dir: Path, tmp_path: Path, run) -> None:
    out = tmp_path / "out"
    code, printed, _ = run(corpus_dir, "--domains", "--output", out, "--workers", 1)
    assert code == 0
    command = f"hlat train data.domains={out} data.heldout_documents=2"
    assert printed.splitlines()[-1] == f"train on it: {command}"
    assert {path.name for path in out.iterdir()} == {"wiki", "my-code"}
    counts = [
        json.loads((out / name / "manifest.json").read_text())["documents"]
        for name in ("wiki", "my-code")
    ]
    assert counts == [5, 10]
    again = run(corpus_dir, "--domains", "--output", out, "--workers", 1)
    assert again[0] == 0
    assert again[1].splitlines()[-1] == printed.splitlines()[-1]


def test_prepared_directories_train_with_their_heldout_sets(
    corpus_dir: Path, tmp_path: Path, run
) -> None:
    """The data of the printed command are those that the loader opens, by source."""
    out = tmp_path / "out"
    words = (corpus_dir, "--domains", "--output", out, "--heldout", 0.3, "--workers", 1)
    code, printed, _ = run(*words)
    assert code == 0
    (override,) = printed.splitlines()[-1].removeprefix("train on it: hlat train ").split()
    config = resolve_config(compose_config([override]))
    sources = open_data_sources(config.data, seed=0)
    totals = {
        name: (source.num_training_documents, source.num_heldout_documents)
        for name, source in sources.items()
    }
    assert [*totals] == ["my-code", "wiki"]
    assert [sum(each) for each in totals.values()] == [10, 5]
    assert all(heldout > 0 for _, heldout in totals.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("维基/a.txt", "corpus/维基 has a name that no source can have"),
        ("README.md", "corpus has 1 files beside its directories, such as README.md; move them"),
    ],
)
def test_other_entries_beside_domains_stop_before_the_conversion(
    name, message, corpus_dir: Path, tmp_path: Path, run
) -> None:
    (corpus_dir / name).parent.mkdir(exist_ok=True)
    (corpus_dir / name).write_text("text")
    code, _, errors = run(corpus_dir, "--domains", "--output", tmp_path / "out")
    assert code == 2
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (
            KeyboardInterrupt(),
            75,
            "interrupted; finished parts are kept; the same command continues",
        ),
        (
            OSError(28, "No space left on device", "x"),
            1,
            "out: cannot be written (No space left on",
        ),
        (
            ChildProcessError("a worker process was killed"),
            1,
            "a worker process was killed; finished parts",
        ),
    ],
)
def test_failures_print_how_to_continue(
    raised: BaseException,
    code: int,
    message: str,
    input_dir: Path,
    tmp_path: Path,
    run,
    monkeypatch,
) -> None:
    def stop(*_: object) -> None:
        raise raised

    monkeypatch.setattr(preparation, "complete_source", stop)
    found, _, errors = run(input_dir, "--output", tmp_path / "out")
    assert found == code
    assert message in errors.splitlines()[-1]
    assert errors.endswith("the same command continues\n")
