"""`python -m hlat.checkpoint` lists, verifies and prunes checkpoints."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat.checkpoint import __main__ as command
from hlat.checkpoint import checkpoint_directory, checkpoint_store
from hlat.checkpoint.training_state import TrainingState
from hlat.config.model import ModelConfig
from hlat.config.run import RunConfig
from hlat.config.run_identity import flatten_model
from hlat.data import data_fingerprint
from hlat.distributed.state_shard import StateShard
from hlat.model.decoder_spec import list_parameter_specs
from hlat.optim.adamw_spec import AdamWSpec
from hlat.optim.optimizer_spec import list_state_names
from hlat.tracking import run_directory
from tests.support.newest_checkpoint import find_newest_valid
from tests.support.sealed_checkpoint import seal_checkpoint

MODEL = ModelConfig("tiny", 1, 2, 2, 1, 1, 3)
DATA = {
    "version": data_fingerprint.STATE_VERSION,
    "fingerprint": {},
    "step": 0,
    "stage": {"name": "all", "start": 0, "shares": {}},
    "chapters": [],
    "sources": [],
    "streams": {"0": [0, 0]},
}


def save(
    folder: Path,
    step: int,
    weights_only: bool = False,
    without: tuple[str, ...] = (),
    changes: dict[str, Any] | None = None,
) -> Path:
    """Save a checkpoint of a tiny model, without some tensors, and with changes of its state."""
    kinds = ("weights",) if weights_only else ("weights", "updates", *list_state_names(AdamWSpec()))
    shards = []
    for kind in kinds:
        for spec in list_parameter_specs(MODEL):
            shape = () if kind == "updates" else spec.shape
            tensor = torch.full(shape, float(step))
            shards.append(
                StateShard(f"{kind}/{spec.name}", shape, (0,) * len(shape), shape, tensor)
            )
    shards = [shard for shard in shards if not shard.name.startswith(without or ("-",))]
    state = TrainingState(step, step * 1000, DATA, flatten_model(MODEL), weights_only=weights_only)
    document = state.to_json() | (changes or {})
    return checkpoint_store.save_checkpoint(folder, step, shards, document)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a run with checkpoints of steps 5, 10, 15 and 20."""
    monkeypatch.chdir(tmp_path)
    for step in (5, 10, 15, 20):
        save(Path("runs/x/checkpoints"), step)
    return Path("runs/x")


def flip(path: Path) -> None:
    content = bytearray((path / "rank_00000.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "rank_00000.safetensors").write_bytes(content)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def do(capsys: pytest.CaptureFixture[str]):
    """Run the command in this process."""

    def run(*arguments: str) -> Result:
        try:
            code = int(command.main(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        message = capsys.readouterr()
        return Result(code, message.out, message.err)

    return run


def fill_run_directory(run: Path) -> None:
    """Fill a run directory with checkpoints of every state."""
    save(run / "milestones", 10, weights_only=True)
    save(run, 20, weights_only=True).rename(run / "mean")
    (run / "averages").mkdir()
    (run / "mean").rename(run / "averages/step_00000020_of_15_20")
    checkpoints = run / "checkpoints"
    (checkpoints / "step_00000010").rename(checkpoints / "step_00000010_damaged_1")
    save(checkpoints, 12).rename(checkpoints / "step_00000012_diverged_1")
    os.truncate(checkpoints / "step_00000015/rank_00000.safetensors", 9)
    draft = checkpoints / ".tmp-step_00000025-77"
    draft.mkdir()
    (draft / "rank_00000.safetensors").write_bytes(b"12345")
    (checkpoints / "notes").mkdir()
    (checkpoints / "step_00000020/COMMITTED").unlink()


def test_ls_lists_everything_with_its_state(run: Path, do) -> None:
    fill_run_directory(run)
    done = do("ls", "runs/x")
    header, *rows = done.out.splitlines()
    assert header.split() == ["step", "tokens", "written", "age", "size", "kind", "state"]
    message = [(row.split()[0], row.split()[1], row.split()[-1]) for row in rows]
    assert message == [
        ("5", "5,000", "checkpoints/step_00000005"),
        ("10", "10,000", "checkpoints/step_00000010_damaged_1"),
        ("12", "12,000", "checkpoints/step_00000012_diverged_1"),
        ("15", "?", "checkpoints/step_00000015"),
        ("20", "?", "checkpoints/step_00000020"),
        ("25", "?", "checkpoints/.tmp-step_00000025-77"),
        ("10", "10,000", "milestones/step_00000010"),
        ("20", "20,000", "averages/step_00000020_of_15_20"),
    ]
    columns = [row.split("  ") for row in rows]
    states = [[cell.strip() for cell in cells if cell.strip()][-3:-1] for cells in columns]
    assert states == [
        ["full", "committed"],
        ["full", "damaged"],
        ["full", "diverged"],
        ["?", "damaged"],
        ["?", "incomplete"],
        ["?", "incomplete"],
        ["weights only", "committed"],
        ["weights only", "committed"],
    ]


def test_ls_as_json(run: Path, do) -> None:
    fill_run_directory(run)
    found = {entry["path"]: entry for entry in json.loads(do("ls", "runs/x", "--json").out)}
    one = found["runs/x/checkpoints/step_00000005"]
    files = list(Path(one["path"]).iterdir())
    assert one["num_bytes"] == sum(file.stat().st_size for file in files)
    assert one["written"] == max(file.stat().st_mtime for file in files)
    assert (one["step"], one["tokens"], one["kind"]) == (5, 5000, "full")
    short = found["runs/x/checkpoints/step_00000015"]
    assert short["state"] == "damaged"
    assert "has 9 bytes" in short["problem"]


def test_ls_reads_no_tensors(run: Path, do) -> None:
    flip(run / "checkpoints/step_00000015")
    assert do("ls", "runs/x").out.count("committed") == 4


def test_ls_reads_each_manifest_once(run: Path, do, monkeypatch) -> None:
    parsed = []
    parse_manifest = checkpoint_store.parse_manifest
    monkeypatch.setattr(
        checkpoint_store, "parse_manifest", lambda text: parsed.append(1) or parse_manifest(text)
    )
    assert do("ls", "runs/x").out.count("committed") == len(parsed) == 4


def test_ls_reports_a_forged_checkpoint_as_damaged(run: Path, do) -> None:
    for step, content in ((5, "[]"), (10, '{"format": 1, "step": 10, "files": 7, "tensors": {}}')):
        (run / f"checkpoints/step_{step:08}/manifest.json").write_text(content)
    done = do("ls", "runs/x")
    assert done.code == 0
    assert done.out.count("damaged") == 2


def test_verify_reads_every_byte(run: Path, do) -> None:
    assert do("verify", "runs/x").code == 0
    path = run / "checkpoints/step_00000015"
    flip(path)
    save(run / "milestones", 10, weights_only=True)
    done = do("verify", "runs/x")
    assert done.code == 1
    lines = done.out.splitlines()
    assert [line for line in lines if line.endswith(": ok")] == [
        "checkpoints/step_00000005: ok",
        "checkpoints/step_00000010: ok",
        "checkpoints/step_00000020: ok",
        "milestones/step_00000010: ok",
    ]
    (wrong,) = [line for line in lines if not line.endswith(": ok")]
    sha256 = json.loads((path / "manifest.json").read_text())["files"]["rank_00000.safetensors"]
    assert wrong.startswith(f"checkpoints/step_00000015: {path}/rank_00000.safetensors differs")
    assert wrong.endswith(f"manifest.json has {sha256['sha256']}")
    assert do("verify", "runs/x", "--step", "10").code == 0
    assert do("verify", "runs/x", "--step", "15").code == 1
    assert do("verify", str(path)).code == 1
    assert do("verify", "runs/x/checkpoints/step_00000010").code == 0


def test_verify_skips_renamed_and_temporary_directories(run: Path, do) -> None:
    fill_run_directory(run)
    done = do("verify", "runs/x")
    assert done.code == 1
    assert [line.split(":")[0].rpartition("/")[2] for line in done.out.splitlines()] == [
        "step_00000005",
        "step_00000015",
        "step_00000020",
        "step_00000010",
        "step_00000020_of_15_20",
    ]
    aside = do("verify", "runs/x/checkpoints/step_00000010_damaged_1")
    assert aside.out.endswith(": ok\n")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"step": 4}, "state.json has step 4, manifest.json has 25"),
        ({"step": "25"}, "step cannot be understood"),
        ({"data": {}}, "the checkpoint's data state has version None"),
        ({"data": DATA | {"streams": {"0": [1]}}}, "data state was not written by hlat"),
        ({"fixed": {"model.name": "x"}}, "the model was saved by another version of hlat"),
        ({"fixed": flatten_model(replace(MODEL, num_layers=10**9))}, "tensors for 1000000000"),
        ({"fixed": flatten_model(replace(MODEL, vocab_size=4))}, "has shape (3, 2) of weights/"),
        ({"fixed": flatten_model(replace(MODEL, num_attention_heads=0))}, "cannot be resumed"),
        ({"without": ("weights/model.norm",)}, "no tensor of weights/model.norm.weight, the model"),
        ({"without": ("exp_avg/",)}, "no tensor of exp_avg/model.embed_tokens.weight, the"),
        ({"without": ("updates/",)}, "no tensor of updates/model.embed_tokens.weight, the"),
    ],
)
def test_verify_rejects_a_checkpoint_that_no_run_can_resume(
    run: Path, do, fault: dict[str, Any], message: str
) -> None:
    changes = {key: value for key, value in fault.items() if key != "without"}
    path = save(run / "checkpoints", 25, without=fault.get("without", ()), changes=changes)
    done = do("verify", "runs/x")
    *good, wrong = done.out.splitlines()
    assert (done.code, len(good)) == (1, 4)
    assert wrong.startswith(f"checkpoints/step_00000025: {path}")
    assert message in wrong


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"F32", "shape": [3, 2]', b'"F32", "shape": [2, 3]'), (b'"F32"', b'"I32"'), (b".norm.", b".morn.")],
)  # fmt: skip
def test_verify_compares_the_slices_of_a_file_with_the_manifest(
    run: Path, do, old: bytes, new: bytes
) -> None:
    path = run / "checkpoints/step_00000020"
    file = path / "rank_00000.safetensors"
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))
    seal_checkpoint(path)
    done = do("verify", "runs/x")
    assert done.code == 1
    assert f"checkpoints/step_00000020: {file} " in done.out.splitlines()[-1]
    newest, (reason,) = find_newest_valid(path.parent)
    assert newest == run / "checkpoints/step_00000015"
    assert str(file) in reason


def test_prune_lists_before_it_removes(run: Path, do) -> None:
    (run / "checkpoints/.tmp-step_00000025-77").mkdir()
    arguments = ("prune", "runs/x", "keep_last=2", "keep_every_steps=10")
    before = names(run)
    dry = do(*arguments)
    assert dry.code == 0
    assert dry.out.splitlines()[0].startswith("would remove checkpoints/.tmp-step_00000025-77")
    assert dry.out.splitlines()[1].startswith("would remove checkpoints/step_00000005  ")
    assert "would remove 2 of 5 in runs/x, " in dry.out
    assert dry.out.endswith("; this was a dry run: yes=true removes them\n")
    assert names(run) == before
    done = do(*arguments, "--yes")
    assert done.code == 0
    assert done.out == dry.out.replace("would remove", "removed").replace(
        "; this was a dry run: yes=true removes them", ""
    )
    assert names(run) == ["step_00000010", "step_00000015", "step_00000020"]
    assert do(*arguments, "--yes").out == "removed 0 of 3 in runs/x, 0.00B\n"


def test_prune_retains_the_newest_valid_checkpoint_and_reports_damaged_ones(run: Path, do) -> None:
    flip(run / "checkpoints/step_00000020")
    done = do("prune", "runs/x", "keep_last=1", "--yes")
    assert "WARNING: checkpoint step_00000020 is rejected: " in done.err
    assert names(run) == ["step_00000015", "step_00000020"]


def test_prune_removes_nothing_without_a_valid_checkpoint(run: Path, do) -> None:
    for path in (run / "checkpoints").iterdir():
        flip(path)
    done = do("prune", "runs/x", "keep_last=1", "--yes")
    assert done.code == 1
    assert done.err.endswith("runs/x has no valid checkpoint; nothing is removed\n")
    assert len(names(run)) == 4


def test_prune_rejects_a_run_that_trains(run: Path, do) -> None:
    with run_directory.acquire_run_dir(RunConfig(root="runs", name="x")):
        done = do("prune", "runs/x", "keep_last=1", "--yes")
        assert do("prune", "runs/x", "keep_last=1").code == 0
    assert (done.code, done.err) == (
        2,
        "hlat: runs/x: a run is training there and prunes by itself; wait until it ends\n",
    )
    assert len(names(run)) == 4


ERRORS = [
    (("ls", "rums"), "hlat: rums does not exist; specify a run directory, such as runs\n"),
    (
        ("ls", "."),
        "hlat: . contains no checkpoint; specify a run directory, such as runs/<run.name>, that has saved, or "
        "one of its checkpoints\n",
    ),
    (
        ("verify", "runs/x", "--step", "7"),
        "hlat: step=7: runs/x has checkpoints of steps 5, 10, 15, 20 only\n",
    ),
    (
        ("prune", "runs/x"),
        "hlat checkpoint: prune needs keep_last=N\n",
    ),
    (
        ("prune", "runs/x", "keep_lst=2"),
        "hlat checkpoint: keep_lst= is not a setting of this command; did you mean keep_last=?\n",
    ),
    (
        ("prune", "runs/x", "keep_last=0"),
        "hlat checkpoint: keep_last: 0 is not a whole number of 1 or more\n",
    ),
    (
        ("prune", "runs/x", "keep_last=2", "keep_last=3"),
        "hlat checkpoint: keep_last is set 2 times: keep_last=2 and keep_last=3; keep one of them\n",
    ),
    (
        ("prune", "runs/x", "keep_last=2", "--yse"),
        "hlat checkpoint: unrecognized arguments: --yse; did you mean yes=?\n",
    ),
    (
        ("prune", "runs", "keep_last=2"),
        "hlat: runs contains no checkpoint; specify a run directory, such as runs/<run.name>, that has saved, "
        "or one of its checkpoints\n",
    ),
    (
        ("ls", "runs/x", "--yes"),
        "hlat checkpoint: yes= is a setting of prune, not of ls\n",
    ),
    (
        ("verify", "runs/x", "keep_last=2"),
        "hlat checkpoint: keep_last= is a setting of prune, not of verify\n",
    ),
]


@pytest.mark.parametrize(("arguments", "sentence"), ERRORS)
def test_errors_are_one_sentence(run: Path, do, arguments: tuple[str, ...], sentence: str) -> None:
    done = do(*arguments)
    assert (done.code, done.err) == (2, sentence)
    assert len(names(run)) == 4


@pytest.mark.parametrize("root", ["runs/x", "file://{}/runs/x"])
def test_prune_does_not_remove_checkpoints_of_another_run(run: Path, do, root: str) -> None:
    foreign = Path("foreign/x")
    foreign.mkdir(parents=True)
    location = root.format(Path.cwd())
    (foreign / "checkpoints_are_in.txt").write_text(location)
    before = names(run)
    done = do("prune", "foreign/x", "--keep-last", "1", "--yes")
    assert (done.code, done.out) == (2, "")
    assert f"the checkpoints in {location} belong to another run" in done.err
    (foreign / "checkpoints_are_in.txt").unlink()
    (foreign / "checkpoints").symlink_to((run / "checkpoints").absolute())
    done = do("prune", "foreign/x", "--keep-last", "1", "--yes")
    assert done.code == 2
    assert "checkpoints is a symbolic link to" in done.err
    assert names(run) == before


def test_prune_a_destination_of_the_run(tmp_path: Path, monkeypatch, do) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs/x")
    run.mkdir(parents=True)
    checkpoint_directory.validate_destination(run, f"file://{tmp_path}/store")
    for step in (5, 10):
        save(Path("store/x/checkpoints"), step)
    done = do("prune", "runs/x", "--keep-last", "1", "--yes")
    assert done.code == 0, done.err
    assert f"removed 1 of 2 in file://{tmp_path}/store/x, " in done.out
    assert names(Path("store/x")) == ["step_00000010"]
    run.rename("moved")
    done = do("prune", "moved", "--keep-last", "1", "--yes")
    assert done.code == 2
    assert f"belong to {tmp_path}/runs/x; specify the directory" in done.err


def test_create_keys_sign_and_verify_signatures(run: Path, do) -> None:
    assert do("keygen", "key.pem").code == 0
    assert Path("key.pem").stat().st_mode & 0o777 == 0o600
    private, trusted = Path("key.pem").read_text(), "trusted_keys=key.pem.pub"
    assert do("keygen", "key.pem").code == 2
    assert Path("key.pem").read_text() == private
    flip(run / "checkpoints/step_00000015")
    signed = do("sign", "runs/x", "signing_key=key.pem")
    assert signed.code == 1
    assert signed.out.count(": signed") == 3
    assert private.splitlines()[1] not in signed.out + signed.err
    assert not (run / "checkpoints/step_00000015/COMMITTED.sig").exists()
    assert do("verify", "runs/x", "step=20", trusted).code == 0
    (run / "checkpoints/step_00000020/COMMITTED.sig").write_bytes(bytes(64))
    refused = do("verify", "runs/x", "step=20", trusted)
    assert refused.code == 1
    assert "step_00000020/COMMITTED.sig is not a signature" in refused.out
    assert do("verify", "runs/x", "step=20").code == 0
    assert do("verify", "runs/x", "trusted_keys=missing").code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sign", "runs/x"], "sign needs signing_key=FILE"),
        (["ls", "runs/x", "trusted_keys=a"], "trusted_keys= is a setting of verify, not of ls"),
    ],
)
def test_keys_belong_to_their_actions(run: Path, do, arguments: list[str], message: str) -> None:
    done = do(*arguments)
    assert done.code == 2
    assert message in done.err
