"""Command lines and files with mistakes give one message and exit code 2, without a traceback."""

from pathlib import Path

import pytest

REGION = ["hardware=trn1_32xl", "compiler=neuron_2_28", "subnet=subnet-1", "head_subnet=subnet-2"]
CLUSTER = ["jobs.cluster", *REGION, "key=k", "scripts=s3://bucket/x", "output=c"]
CASES = {
    "list in place of a group": (
        ["train", "optimizer=[1,2]"],
        "optimizer=[1,2]: optimizer selects one of adamw_1b, adamw_hlat_70b",
    ),
    "empty mapping of a group": (["train", "model={}"], "model={} has no effect"),
    "empty mapping": (["train", "data.sources={}"], "data.sources={} has no effect"),
    "new entry without +": (
        ["train", "data.sources={a: {paths: [x]}}"],
        "data.sources has no such entry; add one with '+data.sources={a: {paths: [x]}}'",
    ),
    "eps of zero": (["train", "optimizer.eps=0"], "optimizer.eps=0.0 is outside (0, inf)"),
    "tag": (["train", "--config-dir=foreign", "experiment=tag"], "tag.yaml, line 1: "),
    "broken YAML": (
        ["train", "--config-dir=foreign", "experiment=broken"],
        "broken.yaml, line 1: ",
    ),
    "deep YAML": (
        ["train", "--config-dir=foreign", "experiment=deep"],
        "the configuration cannot be composed (RecursionError",
    ),
    "missing cache": (["precompile", "verify", "nope"], "nope is not a directory"),
    "no tasks": (["evaluate", "x", "tasks="], "no tasks; give tasks="),
    "junk": (["report", "foreign"], "foreign is not a run directory"),
    "junk with names of a run": (["report", "junk"], "junk contains no readable row"),
    "port": (["report", "junk", "serve=99999"], "99999 is not a port; use 0 to 65535"),
    "region": ([*CLUSTER, "region=us west"], "'us west' is not an AWS region"),
    "size of FSx": (
        [*CLUSTER, "region=us-west-2", "fsx_gib=7"],
        "7 is neither 1200 nor a multiple of 2400",
    ),
    "figure below a file": (
        ["plan", "model=7b", "hardware=trn1_32xl", "figure=file/x.svg"],
        "file/x.svg: Not a directory; specify a path that you can read and write",
    ),
    "report below a file": (
        ["report", "run", "run", "output=file/x"],
        "the report cannot be written: file/x",
    ),
    "output of one run": (
        ["report", "run", "output=elsewhere"],
        "output=elsewhere is for comparisons; the report of one run is written to run",
    ),
    "page as output": (
        ["report", "run", "run", "output=page.html"],
        "output=page.html is a directory, to which comparison.html and its figures are written",
    ),
    "figure as first word": (
        ["plan", "figure=file/x.svg"],
        "file/x.svg: Not a directory; specify a path that you can read and write",
    ),
    "working directory below a file": (
        ["train", "hydra.run.dir=file/x"],
        "file/x cannot be used (Not a directory); set hydra.run.dir",
    ),
    "log is a directory": (
        ["train", "run.name=logs"],
        "runs/logs/metrics.jsonl: cannot be read and written (it is not a regular file)",
    ),
    "binary location of checkpoints": (
        ["checkpoint", "ls", "binary"],
        "binary/checkpoints_are_in.txt cannot be read (it is not text); write the directory",
    ),
}


SLOW_CASES = {
    *("empty mapping of a group", "tag", "deep YAML", "junk", "port", "size of FSx"),
    *("figure below a file", "report below a file", "binary location of checkpoints"),
}
"""Cases of which the default suite has one with the same reader."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW_CASES else []) for case in CASES],
)
@pytest.mark.slow_after(5)
def test_print_one_message(tmp_path: Path, hlat, case: str) -> None:
    foreign = tmp_path / "foreign" / "experiment"
    foreign.mkdir(parents=True)
    (foreign / "tag.yaml").write_text("!!python/object:os.system x")
    (foreign / "broken.yaml").write_text("a: {")
    (foreign / "deep.yaml").write_text("# @package _global_\n" + "[" * 3000)
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk/metrics.jsonl").write_text("\0\0\n")
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "runs/logs/metrics.jsonl").mkdir(parents=True)
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary/checkpoints_are_in.txt").write_bytes(b"\xff\xfe\0")
    (command, *arguments), message = CASES[case]
    done = hlat(command, *arguments)
    assert message in done.stderr, done.stderr
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("junk/report.html"))
