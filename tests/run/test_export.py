"""Export of a trained run to a Hugging Face folder, and training from it."""

import functools
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from hlat import export
from hlat.checkpoint.hugging_face.pretrained_weights import load_pretrained
from hlat.config.model import ModelConfig
from hlat.data.tokenizer import EMBEDDED_FILE
from hlat.distributed.state_shard import StateShard
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_parameter_specs
from tests.run.conftest import Runner, call_command
from tests.support.canonical_parameters import iter_canonical_views

transformers = pytest.importorskip("transformers")

TEXTS = ["def main():\n    return 1\n", "  The cat  sat on   the mat. été 木", "1234567,89"]


@pytest.fixture
def trained(runner, uninterrupted):
    """Copy the small run with checkpoints of steps 10, 15 and 20."""
    shutil.copytree(uninterrupted.folder / "runs/whole", runner.folder / "runs/whole")


@pytest.fixture(scope="session")
def _run_from_export(tmp_path_factory, small, uninterrupted) -> Path:
    """Return a folder with the small run, its export `out`, and the run `y` of 2 steps from it."""
    runner = Runner(tmp_path_factory.mktemp("from_export"), small)
    shutil.copytree(uninterrupted.folder / "runs/whole", runner.folder / "runs/whole")
    done = call_command(export.main, runner.folder, "runs/whole", "--output", "out")
    assert done.code == 0, done.err
    first = runner.run("run.name=y", "model.init_from=out", "run.steps=2")
    assert first.returncode == 0, first.stderr
    return runner.folder


@pytest.fixture
def runner_from_export(runner, _run_from_export) -> Runner:
    """Return a runner with a copy of the small run, its export `out`, and the run `y` from it."""
    shutil.copytree(_run_from_export, runner.folder, dirs_exist_ok=True)
    return runner


@pytest.fixture
def do(runner):
    """Run hlat.export in this process, in the runner's folder."""
    return functools.partial(call_command, export.main, runner.folder)


def ours(folder: Path, model: ModelConfig) -> Decoder:
    """Return our decoder with the weights of a folder."""
    llama = Decoder(model)
    shapes = {p.name: p.shape for p in list_parameter_specs(model)}
    views = iter_canonical_views(model, {name: p.detach() for name, p in llama.named_parameters()})
    shards = [
        StateShard(f"weights/{name}", shapes[name], (0,) * len(shapes[name]), shapes[name], view)
        for name, view in views
    ]
    load_pretrained(str(folder), model, shards)
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
    ("name", "precision"),
    [
        pytest.param("mha", "fp32", marks=pytest.mark.slow),
        pytest.param("one_kv_head_tied", "bf16", marks=pytest.mark.slow),
        ("head_dim_48", "mixed"),
    ],
)
@pytest.mark.slow
def test_transformers_compute_the_same_logits(runner, do, name, precision):
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


def test_export_is_bit_identical_and_starts_a_new_run(trained, runner, do):
    """Start a run from its export: the weights are equal, the optimizer state is new."""
    done = do("runs/whole", "--output", "out")
    assert done.code == 0, done.err
    command = shlex.split(done.out.splitlines()[-1].partition("train on:")[2])
    begin = [argument for argument in command[2:] if argument.startswith("model.init_from=")]
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


@pytest.mark.slow  # one or more whole processes
def test_start_from_checkpoint_files_of_nxd(runner_from_export):
    runner = runner_from_export
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
    done = runner.run("run.name=z", "model.init_from=nxd", "run.steps=2")
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


@pytest.mark.slow
def test_export_and_import_master_weights(runner, do):
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


@pytest.mark.slow
def test_train_with_the_printed_command(trained, runner, do):
    done = do("runs/whole/checkpoints/step_00000015", "--output", "my out/a=b")
    assert done.code == 0, done.err
    train_with_printed_command(runner, done.out)
    config = OmegaConf.load(runner.folder / "runs/y/config.yaml")
    assert config.data.tokenizer == str(runner.folder / "my out/a=b/tokenizer.json")


@pytest.mark.slow  # one or more whole processes
@pytest.mark.parametrize("name", [None, "mine"])
def test_the_printed_command_selects_the_model(runner, do, name):
    """Export a preset with another value, also under a name without a preset."""
    model = ["model=gemma3_tiny", "model.rope.sliding_theta=5000"]
    model += [] if name is None else [f"model.name={name}"]
    done = runner.run(*model, "run.name=x", "run.steps=1")
    assert done.returncode == 0, done.stderr
    done = do("runs/x", "--output", "out")
    assert done.code == 0, done.err
    command = train_with_printed_command(runner, done.out)
    assert ("model=gemma3_tiny" in command) == (name is None)
    ended, began = (
        [row["loss"] for row in runner.rows(run, "events.jsonl") if row["event"] == "evaluate"]
        for run in ("x", "y")
    )
    assert began[0] == ended[-1]
    first, second = (OmegaConf.load(runner.folder / f"runs/{run}/config.yaml") for run in "xy")
    assert dict(second.model) == {**first.model, "init_from": "out"}


def train_with_printed_command(runner: Runner, out: str) -> list[str]:
    """Run the command that the export printed for one step; return the command."""
    command = shlex.split(out.splitlines()[-1].partition("train on:")[2])
    assert command[:2] == ["hlat", "train"]
    without_model = [argument for argument in runner.small if not argument.startswith("model.")]
    settings = ("run.name=y", "run.steps=1")
    done = runner.run(*without_model, *command[2:], *settings, small=False)
    assert done.returncode == 0, done.stderr
    return command


@pytest.mark.slow
def test_resume_without_the_exported_folder(runner_from_export, uninterrupted):
    runner = runner_from_export
    whole = runner.run("run.name=z", "model.init_from=out", "run.steps=4")
    assert whole.returncode == 0, whole.stderr
    shutil.rmtree(runner.folder / "out")
    again = runner.run("run.name=y", "model.init_from=out", "run.steps=4")
    assert again.returncode == 0, again.stderr
    assert "starting from the weights" not in again.stdout
    assert runner.losses("y") == runner.losses("z") != uninterrupted.losses("whole")[:4]


@pytest.mark.slow  # one or more whole processes
def test_refuse_another_init_from_under_the_same_name(runner_from_export, refused):
    runner = runner_from_export
    for name, step, arguments, change in (
        ("y", 2, (), "model.init_from was out, is None"),
        ("whole", 20, ("model.init_from=out",), "model.init_from was None, is out"),
    ):
        path = f"runs/{name}/checkpoints/step_{step:08}"
        sentence = f"cannot resume from {path}: {change}; set it back or choose another run.name"
        refused(runner.run(f"run.name={name}", *arguments), sentence)


@pytest.mark.slow  # 5 s: two runs and an export
def test_branch_from_a_run_with_init_from(runner_from_export, refused):
    runner = runner_from_export
    start = "checkpoint.start_from=runs/y/checkpoints/step_00000002"
    for steps in (3, 4):  # the second resumes from the checkpoint of the branch
        done = runner.run("run.name=branch", start, f"run.steps={steps}")
        assert done.returncode == 0, done.stderr
    assert [step for step, _ in runner.losses("branch")] == [3, 4]
    refused(
        runner.run("run.name=other", start, "model.init_from=out"),
        "checkpoint.start_from=runs/y/checkpoints/step_00000002 and model.init_from=out are both "
        "the initial state of the run; set one of them to null",
    )


@pytest.mark.slow
def test_refuse_a_folder_with_another_model(runner_from_export, refused):
    runner = runner_from_export
    done = runner.run("run.name=z", "model.init_from=out", "model.num_layers=3")
    refused(
        done,
        "hlat: model.init_from=out: config.json has num_hidden_layers=2, this run has "
        "model.num_layers=3; set model.num_layers=2\n",
    )
    assert not (runner.folder / "runs/z").exists()


@pytest.mark.slow
def test_find_the_tokenizer_of_a_run_from_another_directory(runner, do):
    text = EMBEDDED_FILE.read_text().replace("{", "{ ", 1)  # another file to its hash
    (runner.folder / "mine.json").write_text(text)
    relative = ("data.tokenizer=mine.json", "data.root=.")
    paths = [f"data.sources.{n}.paths=[{p}]" for n, p in _paths(runner).items()]
    assert runner.run("run.name=x", "run.steps=1", *relative, *paths).returncode == 0
    (runner.folder / "elsewhere").mkdir()
    arguments = ("../runs/x", "--output", "out")
    done = call_command(export.main, runner.folder / "elsewhere", *arguments)
    assert done.code == 0, done.err
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
    root = next(
        argument.partition("=")[2] for argument in runner.small if argument.startswith("data.root=")
    )
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


def test_refuse_mistakes_in_one_sentence(trained, runner, do):
    for arguments, sentence in MISTAKES:
        done = do(*arguments)
        assert (done.code, done.err) == (2, sentence), arguments
    assert {path.name for path in runner.folder.iterdir()} == {"runs"}


def test_no_files_remain_after_an_interrupt(trained, runner, do, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "_print_shard", interrupt)
    done = do("runs/whole", "--output", "out")
    assert (done.code, done.err) == (130, "\nhlat: interrupted; no part of out was written\n")
    assert {path.name for path in runner.folder.iterdir()} == {"runs"}


def test_fail_when_the_output_is_not_writable(trained, runner, do):
    done = do("runs/whole", "--output", "/proc/nowhere/out")
    sentence = (
        "hlat: output=/proc/nowhere/out cannot be written: /proc/nowhere: No such file or "
        "directory; specify a path that you can read and write\n"
    )
    assert (done.code, done.err) == (2, sentence)
