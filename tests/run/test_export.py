"""From a trained run to a Hugging Face folder and back, as a user does it."""

import contextlib
import io
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from hlat import export
from hlat.checkpoint.pretrained_weights import load_pretrained
from hlat.checkpoint.tensor_chunk import TensorChunk
from hlat.config.model import ModelConfig
from hlat.data.tokenizer import EMBEDDED_FILE
from hlat.model.canonical_views import iter_canonical_views
from hlat.model.llama import Llama
from hlat.model.parameter_specs import list_parameter_specs

transformers = pytest.importorskip("transformers")

TEXTS = ["def main():\n    return 1\n", "  The cat  sat on   the mat. été 木", "1234567,89"]


@pytest.fixture
def trained(runner, uninterrupted):
    """A copy of the small run, of which the steps 10, 15 and 20 were kept."""
    shutil.copytree(uninterrupted.folder / "runs/whole", runner.folder / "runs/whole")


class Done:
    """What an entry printed and returned."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def do(runner):
    """Run hlat.export in this process, in the runner's folder."""

    def run(*words: str) -> Done:
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(runner.folder)
            try:
                code = int(export.main(words))
            except SystemExit as end:
                code = int(end.code or 0)
        return Done(code, out.getvalue(), err.getvalue())

    return run


def ours(folder: Path, model: ModelConfig) -> Llama:
    """Our decoder with the weights of a folder."""
    llama = Llama(model)
    shapes = {p.name: p.shape for p in list_parameter_specs(model)}
    views = iter_canonical_views(model, {name: p.detach() for name, p in llama.named_parameters()})
    chunks = [
        TensorChunk(f"weights/{name}", shapes[name], (0,) * len(shapes[name]), shapes[name], view)
        for name, view in views
    ]
    load_pretrained(str(folder), model, chunks)
    return llama


MODELS = {
    "mha": ModelConfig("tiny", 2, 64, 176, 4, 4, 4099, rms_norm_eps=1e-6),
    "one_kv_head_tied": ModelConfig("tiny", 2, 64, 100, 4, 1, 4096, tie_embeddings=True),
    "head_dim_48": ModelConfig("tiny", 1, 192, 176, 4, 2, 4131, rope_theta=5e5),
}


def settings(model: ModelConfig) -> list[str]:
    return [
        f"model.{name}={value}"
        for name, value in vars(model).items()
        if isinstance(value, int | float)
    ]


@pytest.mark.parametrize(
    ("name", "precision"), [("mha", "fp32"), ("one_kv_head_tied", "bf16"), ("head_dim_48", "mixed")]
)
def test_a_trained_run_computes_the_same_under_transformers(runner, do, name, precision):
    model = MODELS[name]
    overrides = (*settings(model), f"precision={precision}", "run.name=x")
    assert runner.run(*overrides, "run.steps=2").returncode == 0
    assert do("runs/x", "--output", "default").code == 0
    config = json.loads((runner.folder / "default/config.json").read_text())
    assert config["dtype"] == ("float32" if precision == "fp32" else "bfloat16")
    done = do("runs/x", "--output", "out", "--dtype", "fp32", "--max-shard-size", "500KB")
    assert done.code == 0, done.err
    out = runner.folder / "out"
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told
    tokens = torch.randint(0, model.vocab_size, (2, 33))
    with torch.no_grad():
        found, expected = theirs(tokens).logits, ours(out, model).compute_logits(tokens)
    assert float((found - expected).norm() / expected.norm()) < 1e-5

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    prompt = tokenizer(TEXTS[0], return_tensors="pt")
    text = tokenizer.decode(theirs.generate(**prompt, max_new_tokens=3)[0])
    assert text.startswith(TEXTS[0])


def test_what_is_written_is_what_was_saved_and_trains_on_to_the_bit(trained, runner, do):
    """A run that begins from its own export has its weights, and a fresh optimizer."""
    done = do("runs/whole", "--output", "out")
    assert done.code == 0, done.err
    command = shlex.split(done.out.splitlines()[-1].partition("train on:")[2])
    begin = [word for word in command[2:] if word.startswith("model.init_from=")]
    first = runner.run(
        *begin, "run.name=y", "run.steps=1", "optimizer.lr=1e-30", "optimizer.weight_decay=0"
    )
    assert first.returncode == 0, first.stderr
    assert "starting from the weights in out" in first.stdout
    saved = load_file(runner.folder / "runs/whole/checkpoints/step_00000020/rank_00000.safetensors")
    again = load_file(runner.folder / "runs/y/checkpoints/step_00000001/rank_00000.safetensors")
    names = [name for name in saved if name.startswith("weights/")]
    assert names
    for name in names:
        assert torch.equal(saved[name], again[name]), name
    assert {float(again[name]) for name in again if name.startswith("updates/")} == {1.0}
    before = runner.rows("whole", "events.jsonl")
    evaluated = [row["loss"] for row in before if row["event"] == "evaluate"][-1]
    events = runner.rows("y", "events.jsonl")
    start, evaluation = (
        next(row for row in events if row["event"] == event) for event in ("start", "evaluate")
    )
    assert evaluation["loss"] == evaluated
    assert start["init_from"] == "out"
    assert len(start["init_from_fingerprint"]) == 64


def test_a_run_begins_as_well_from_what_ranks_of_nxd_saved(trained, runner, do):
    assert do("runs/whole", "--output", "out").code == 0
    whole = load_file(runner.folder / "out/model.safetensors")
    tag = runner.folder / "nxd/step_7"
    (tag / "model").mkdir(parents=True)
    for rank in range(2):
        share = {
            name: value if value.dim() == 1 else value.chunk(2, by_columns(name))[rank].clone()
            for name, value in whole.items()
        }
        torch.save(share, tag / f"model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    (tag / "done").touch()
    for name, folder in (("y", "out"), ("z", "nxd")):
        done = runner.run(f"run.name={name}", f"model.init_from={folder}", "run.steps=2")
        assert done.returncode == 0, done.stderr
    assert "starting from the weights in nxd/step_7/model" in done.stdout
    assert runner.losses("y") == runner.losses("z")
    first, second = (
        next(row for row in runner.rows(name, "events.jsonl") if row["event"] == "start")
        for name in "yz"
    )
    assert first["init_from_fingerprint"] == second["init_from_fingerprint"]
    assert second["init_from"] == "nxd/step_7/model"


def by_columns(name: str) -> int:
    return int("o_proj" in name or "down_proj" in name)


def test_master_weights_leave_and_come_in(runner, do):
    tiny = ("precision=mixed", "run.steps=1")
    assert runner.run(*tiny, "run.name=x").returncode == 0
    done = do("runs/x", "--output", "out", "--dtype", "fp32")
    assert done.code == 0, done.err
    saved = load_file(runner.folder / "runs/x/checkpoints/step_00000001/rank_00000.safetensors")
    written = load_file(runner.folder / "out/model.safetensors")
    for name, values in written.items():
        assert values.dtype == torch.float32
        assert torch.equal(values, saved[f"weights/{name}"]), name
    first = runner.run(*tiny, "run.name=y", "model.init_from=out")
    assert first.returncode == 0, first.stderr
    ended = [row["loss"] for row in runner.rows("x", "events.jsonl") if row["event"] == "evaluate"]
    began = [row["loss"] for row in runner.rows("y", "events.jsonl") if row["event"] == "evaluate"]
    assert began[0] == ended[-1]


def test_the_printed_command_composes_and_reads_the_exported_tokenizer(trained, runner, do):
    done = do("runs/whole/checkpoints/step_00000015", "--output", "my out/a=b")
    assert done.code == 0, done.err
    command = shlex.split(done.out.splitlines()[-1].partition("train on:")[2])
    assert command[:2] == ["hlat", "train"]
    first = runner.run(*command[2:], "run.name=y", "run.steps=1")
    assert first.returncode == 0, first.stderr
    config = OmegaConf.load(runner.folder / "runs/y/config.yaml")
    assert config.data.tokenizer == str(runner.folder / "my out/a=b/tokenizer.json")


def test_own_checkpoints_come_first_and_the_folder_may_be_gone(trained, runner, do, uninterrupted):
    do("runs/whole", "--output", "out")
    begin = ("run.name=y", "model.init_from=out")
    assert runner.run(*begin, "run.steps=8").returncode == 0
    whole = runner.run("run.name=z", "model.init_from=out")
    assert whole.returncode == 0, whole.stderr
    shutil.rmtree(runner.folder / "out")
    again = runner.run(*begin)
    assert again.returncode == 0, again.stderr
    assert "starting from the weights" not in again.stdout
    assert runner.losses("y") == runner.losses("z") != uninterrupted.losses("whole")


def test_another_origin_under_the_same_name_is_refused(trained, runner, do, refused):
    do("runs/whole", "--output", "out")
    runner.run("run.name=y", "model.init_from=out", "run.steps=2")
    for name, step, words, change in (
        ("y", 2, (), "model.init_from was out, is None"),
        ("whole", 20, ("model.init_from=out",), "model.init_from was None, is out"),
    ):
        path = f"runs/{name}/checkpoints/step_{step:08}"
        sentence = f"cannot resume from {path}: {change}; set it back or choose another run.name"
        refused(runner.run(f"run.name={name}", *words), sentence)


def test_a_branch_of_a_run_that_began_from_a_folder(trained, runner, do, refused):
    do("runs/whole", "--output", "out")
    runner.run("run.name=y", "model.init_from=out", "run.steps=2")
    start = "checkpoint.start_from=runs/y/checkpoints/step_00000002"
    for steps in (3, 4):  # the second goes on from the branch's own
        done = runner.run("run.name=branch", start, f"run.steps={steps}")
        assert done.returncode == 0, done.stderr
    assert [step for step, _ in runner.losses("branch")] == [3, 4]
    refused(
        runner.run("run.name=other", start, "model.init_from=out"),
        "checkpoint.start_from=runs/y/checkpoints/step_00000002 and model.init_from=out are both "
        "the initial state of the run; set one of them to null",
    )


def test_a_folder_that_does_not_fit_is_refused_before_anything_is_built(
    trained, runner, do, refused
):
    do("runs/whole", "--output", "out")
    done = runner.run("run.name=y", "model.init_from=out", "model.num_layers=3")
    refused(
        done,
        "hlat: model.init_from=out: config.json has num_hidden_layers=2, this run has "
        "model.num_layers=3; set model.num_layers=2\n",
    )
    assert not (runner.folder / "runs/y").exists()


def test_an_export_from_elsewhere_finds_a_tokenizer_beside_the_runs(runner, do, monkeypatch):
    text = EMBEDDED_FILE.read_text().replace("{", "{ ", 1)  # another file to its hash
    (runner.folder / "mine.json").write_text(text)
    relative = ("data.tokenizer=mine.json", "data.root=.")
    paths = [f"data.sources.{n}.paths=[{p}]" for n, p in _paths(runner).items()]
    assert runner.run("run.name=x", "run.steps=1", *relative, *paths).returncode == 0
    (runner.folder / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "hlat.export", "../runs/x", "--output", "out"],
        cwd=runner.folder / "elsewhere",
        env=runner.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (runner.folder / "elsewhere/out/tokenizer.json").read_text() == text

    (runner.folder / "mine.json").rename(runner.folder / "moved.json")
    sentence = (
        "hlat: runs/x/checkpoints/step_00000001 was trained with the tokenizer.json of sha256 {}; {} "
        "differs or does not exist; specify the file with tokenizer=FILE\n"
    )
    data = _state(runner.folder / "runs/x")["data"]["fingerprint"]["data.tokenizer"]
    lost = do("runs/x", "--output", "lost")
    assert (lost.code, lost.err) == (2, sentence.format(data, "data.tokenizer=mine.json"))
    wrong = do("runs/x", "--output", "lost", "--tokenizer", str(EMBEDDED_FILE))
    assert (wrong.code, wrong.err) == (2, sentence.format(data, f"tokenizer={EMBEDDED_FILE}"))
    assert do("runs/x", "--output", "found", "--tokenizer", "moved.json").code == 0


def _paths(runner) -> dict[str, str]:
    root = next(word.partition("=")[2] for word in runner.small if word.startswith("data.root="))
    return {name: f"{root}/{name}.arrow" for name in ("code", "prose", "data")}


def _state(run: Path) -> dict:
    return json.loads(next((run / "checkpoints").glob("*/state.json")).read_text())


MISTAKES = [
    (
        ("rnus", "--output", "o"),
        "hlat: rnus does not exist; specify a run directory, such as runs\n",
    ),
    (
        ("runs/whole",),
        "hlat export: output=DIR is missing: the directory to write\n",
    ),
    (
        ("runs/whole", "--outptu", "o"),
        "hlat export: unrecognized arguments: --outptu o; did you mean output=?\n",
    ),
    (
        ("runs/whole", "--output", "runs"),
        "hlat: output=runs exists already; specify a new directory, or remove it\n",
    ),
    (
        ("runs/whole", "--output", "o", "--step", "7"),
        "hlat: step=7: runs/whole has no such checkpoint, only 10, 15, 20\n",
    ),
    (
        ("runs/whole", "--output", "o", "--max-shard-size", "5"),
        "hlat export: max_shard_size: 5 is not a size such as 5GB or 500MB\n",
    ),
    (
        ("runs", "--output", "o"),
        "hlat: runs contains no checkpoint; specify a run directory, such as runs/<run.name>, that has saved, "
        "or one of its checkpoints\n",
    ),
]


def test_mistakes_are_told_in_one_sentence_and_leave_nothing(trained, runner, do):
    for words, sentence in MISTAKES:
        done = do(*words)
        assert (done.code, done.err) == (2, sentence), words
    assert {path.name for path in runner.folder.iterdir()} == {"runs"}


def test_an_interrupt_leaves_nothing(trained, runner, do, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "_print_shard", interrupt)
    done = do("runs/whole", "--output", "out")
    assert (done.code, done.err) == (130, "\nhlat: interrupted; no part of out was written\n")
    assert {path.name for path in runner.folder.iterdir()} == {"runs"}


def test_a_disk_that_refuses_is_told(trained, runner, do):
    done = do("runs/whole", "--output", "/proc/nowhere/out")
    sentence = "hlat: output=/proc/nowhere/out cannot be written: No such file or directory\n"
    assert (done.code, done.err) == (1, sentence)
