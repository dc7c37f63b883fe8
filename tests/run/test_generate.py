"""Text of a trained run on the command line."""

import copy
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hlat import export
from hlat.inference import generate, inference_config
from tests.run.conftest import PYTHONPATH, CommandResult, Runner, call_command

PROMPTS = ("def main(", "The", "été 木")


def call(folder: Path, *arguments: str) -> CommandResult:
    return call_command(generate.main, folder, *arguments)


@pytest.fixture(scope="module", autouse=True)
def _composed_once() -> Iterator[None]:
    """Compose each configuration once: it needs more time than the generation of text."""
    compose = inference_config.compose_config
    cached = functools.cache(lambda arguments: compose(list(arguments)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            inference_config,
            "compose_config",
            lambda arguments: copy.deepcopy(cached(tuple(arguments))),
        )
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Path:
    """Return a folder with a run of one step in runs/x (diverse predictions) and its export."""
    runner = Runner(tmp_path_factory.mktemp("generate"), small)
    done = runner.run("run.name=x", "run.steps=1", "model.init_std=0.2")
    assert done.returncode == 0, done.stderr
    exported = call_command(export.main, runner.folder, "runs/x", "output=exported")
    assert exported.code == 0, exported.err
    return runner.folder


@pytest.mark.slow
def test_greedy_text_equals_transformers(folder: Path, tmp_path: Path) -> None:
    """Compare the run and its export, one prompt at a time and in a batch."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    expected = []
    for prompt in PROMPTS:
        encoded = tokenizer(prompt, return_tensors="pt")
        found = model.generate(**encoded, max_new_tokens=16, do_sample=False)
        tokens = found[0, encoded["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(tokens, skip_special_tokens=True))
    assert len(set(expected)) == len(PROMPTS)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    for source in ("runs/x", "exported"):
        done = call(folder, source, f"prompts={file}", "temperature=0", "max_tokens=16")
        assert done.code == 0, done.err
        assert [json.loads(line)["text"] for line in done.out.splitlines()] == expected
        done = call(folder, source, PROMPTS[0], "temperature=0", "max_tokens=16")
        assert done.out == f"{PROMPTS[0]}{expected[0]}\n"


@pytest.mark.parametrize("setting", ["temperature=1e-39", "temperature=1e-320", "top_p=1e-300"])
@pytest.mark.slow_after(1)
def test_extreme_settings_select_the_most_likely_token(folder: Path, setting: str) -> None:
    greedy = call(folder, "runs/x", "The", "temperature=0", "max_tokens=4")
    done = call(folder, "runs/x", "The", setting, "max_tokens=4")
    assert (done.code, done.out) == (0, greedy.out)
    assert call(folder, "runs/x", "The", "temperature=1e308", "max_tokens=4").code == 0


@pytest.mark.slow  # 3 s
def test_the_seed_determines_the_text(folder: Path) -> None:
    texts = [
        call(folder, "runs/x", "The", "max_tokens=20", f"seed={seed}").out for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert call(folder, "runs/x", "The", "max_tokens=20", "seed=3", "top_p=0.01").out != texts[0]


def test_a_stop_string_and_the_limit_end_the_text(folder: Path) -> None:
    settings = ("temperature=0", "max_tokens=24")
    whole = call(folder, "runs/x", "The", *settings).out.removeprefix("The").removesuffix("\n")
    stop = whole[len(whole) // 2 :][:3]
    stopped = call(folder, "runs/x", "The", *settings, f"stop={json.dumps([stop, 'never'])}").out
    assert stopped == f"The{whole[: whole.index(stop)]}\n"


def test_prompts_of_a_file_are_written_with_completions(folder: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "new/out.jsonl"
    rows = [
        {"id": 7, "prompt": "def main("},
        {"messages": [{"role": "user", "content": "The"}]},
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = ("runs/x", f"prompts={file}", f"output={output}", "max_tokens=5", "seed=2")
    done = call(folder, *arguments)
    assert (done.code, done.out) == (0, "")
    assert "2 of 2 prompts" in done.err
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [
        {key: row[key] for key in given} for row, given in zip(written, rows, strict=True)
    ] == rows
    assert [row["completion_tokens"] for row in written] == [5, 5]
    assert [row["finish_reason"] for row in written] == ["length", "length"]
    first = call(folder, "runs/x", "def main(", "max_tokens=5", "seed=2")
    assert first.out == f"def main({written[0]['text']}\n"
    again = call(folder, *arguments)
    assert again.code == 2
    assert f"output={output} exists" in again.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "x"], "missing does not exist; specify a run directory"),
        (["runs", "x"], "runs contains no checkpoint"),
        (["runs/x", "Once", "upon"], "2 prompts; quote a prompt of several words"),
        (["runs/x", "x", "temprature=1"], "did you mean temperature=?"),
        (["runs/x", "x", "top_p=2"], "top_p: 2 is above 1"),
        (["runs/x", "x", "max_tokens=0"], "max_tokens: 0 is not a whole number of 1 or more"),
        (["runs/x", "x", "step=7"], "step=7: runs/x has no such checkpoint, only "),
        (["runs/x", "a " * 99], "tokens, and the context of the model 64"),
        (["runs/x", "prompts=none.txt"], "prompts=none.txt cannot be read"),
        (["runs/x", "prompts=bad.jsonl"], 'prompts=bad.jsonl, line 2: give an object with either "prompt"'),
        (["bare", "x"], "text needs tokenizer.json and tokenizer_config.json beside the weights"),
    ],
)  # fmt: skip
def test_errors_name_the_problem_and_a_remedy(
    folder: Path, arguments: list[str], message: str
) -> None:
    (folder / "bad.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
    bare = folder / "bare"
    if not bare.exists():
        bare.mkdir()
        for name in ("config.json", "model.safetensors"):
            (bare / name).write_bytes((folder / "exported" / name).read_bytes())
    done = call(folder, *arguments)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_run_without_a_checkpoint_is_reported(folder: Path) -> None:
    run = folder / "runs/new"
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_bytes((folder / "runs/x/config.yaml").read_bytes())
    done = call(folder, "runs/new", "x")
    assert done.code == 2
    assert "runs/new contains no checkpoint; specify a run directory" in done.err


@pytest.mark.slow  # a process
def test_the_prompt_is_read_from_standard_input(folder: Path) -> None:
    arguments = ["generate", "runs/x", "temperature=0", "max_tokens=4"]
    done = subprocess.run(
        [sys.executable, "-m", "hlat", *arguments],
        cwd=folder,
        env={"PYTHONPATH": PYTHONPATH},
        input="def main(\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == call(folder, *arguments[1:], "def main(").out


@pytest.mark.slow  # starts two processes
@pytest.mark.distributed
def test_two_processes_give_the_same_text(folder: Path) -> None:
    arguments = ["generate", "runs/x", "def main(", "temperature=0", "max_tokens=8"]
    done = subprocess.run(
        [sys.executable, "-m", "hlat", *arguments, "parallelism.tp=2"],
        cwd=folder,
        env={"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == call(folder, *arguments[1:]).out
