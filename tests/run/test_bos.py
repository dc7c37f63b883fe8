"""Whole runs with a BOS token before each document: training, resume, export and import."""

import functools
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from hlat import export
from hlat.data.tokenizer import EMBEDDED_EOS_TOKEN, Tokenizer
from hlat.inference import model_source
from tests.run.conftest import BOS, BOS_ID, Runner, call_command

MASKS = ("data.document_mask=true", "data.loss_mask=true")
PROMPT = "def main():\n"
STEPS = 10


@pytest.fixture(scope="session")
def overrides(bos_overrides) -> tuple[str, ...]:
    return (*bos_overrides, *MASKS)


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory, small, overrides) -> Runner:
    runner = Runner(tmp_path_factory.mktemp("bos"), small)
    done = runner.run("run.name=whole", *overrides, f"run.steps={STEPS}")
    assert done.returncode == 0, done.stderr
    return runner


@pytest.fixture
def trained(runner, trained_once) -> Runner:
    """Return a runner with a copy of the run with BOS, under the name `whole`."""
    shutil.copytree(trained_once.folder / "runs", runner.folder / "runs")
    return runner


@pytest.fixture
def do(runner):
    """Run hlat.export in this process, in the runner's folder."""
    return functools.partial(call_command, export.main, runner.folder)


@pytest.mark.slow  # 4 s; test_data_loader.py compares batches
def test_train_and_resume_with_other_workers_bit_identically(runner, overrides, trained_once):
    losses = trained_once.losses("whole")
    assert losses[-1][1] < losses[0][1] - 0.4
    for steps, workers, prefetch in ((4, 2, 3), (STEPS, 0, 0)):
        settings = (f"run.steps={steps}", f"data.workers={workers}", f"data.prefetch={prefetch}")
        done = runner.run("run.name=parts", *overrides, *settings)
        assert done.returncode == 0, done.stderr
    assert runner.losses("parts") == losses
    assert runner.weights("parts", STEPS) == trained_once.weights("whole", STEPS)
    ledgers = [
        [row["stages"] for row in one.rows(name, "events.jsonl") if row["event"] == "ledger"][-1]
        for one, name in ((runner, "parts"), (trained_once, "whole"))
    ]
    assert ledgers[0] == ledgers[1]
    (stage,) = ledgers[0]
    assert sum(entry["tokens"] for entry in stage["sources"].values()) == STEPS * 8 * 64


@pytest.mark.slow  # one or more whole processes
def test_refuse_to_resume_with_another_bos(trained, runner, overrides, refused):
    settings = [argument for argument in overrides if not argument.startswith("data.bos_token")]
    for arguments, found in (
        (settings, "none"),
        ([*settings, f'data.bos_token="{EMBEDDED_EOS_TOKEN}"'], EMBEDDED_EOS_TOKEN),
    ):
        done = runner.run("run.name=whole", *arguments)
        refused(
            done, f"data.bos_token: the checkpoint was written with {BOS}, this run has {found}; "
        )


def test_refuse_a_bos_that_the_tokenizer_lacks(runner, refused):
    done = runner.run("run.name=x", 'data.bos_token="<s>"')
    refused(done, "data.bos_token=<s> is not a token of ")


@pytest.mark.slow  # imports transformers
def test_prompts_of_a_run_and_of_its_export_start_with_bos(trained, runner, do, bos_tokenizer_file):
    transformers = pytest.importorskip("transformers")
    done = do("runs/whole", "--output", "out")
    assert done.code == 0, done.err
    out = runner.folder / "out"
    expected = _encode_document(bos_tokenizer_file, PROMPT)[:-1]
    assert expected[0] == BOS_ID
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer(PROMPT)["input_ids"] == expected
    assert tokenizer.bos_token_id == BOS_ID
    for location in (runner.folder / "runs/whole", out):
        prompts = model_source.find_model(str(location)).tokenizer
        assert prompts.encode(PROMPT) == expected
        assert prompts.encode(PROMPT, is_prompt_start=False) == expected[1:]
        assert prompts.prefix_token_id == BOS_ID
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.bos_token_id == model.generation_config.bos_token_id == BOS_ID
    assert model.config.eos_token_id == prompts.eos_token_id


@pytest.mark.slow
def test_train_with_the_printed_command_and_warn_without_its_bos(trained, runner, do):
    done = do("runs/whole", "--output", "out")
    command = shlex.split(done.out.splitlines()[-1].partition("train on:")[2])
    bos = f'data.bos_token="{BOS}"'
    without_model = [argument for argument in runner.small if not argument.startswith("model.")]
    settings = (*MASKS, "run.steps=1")
    first = runner.run(*without_model, *command[2:], *settings, "run.name=y", small=False)
    assert first.returncode == 0, first.stderr
    ended = [r["loss"] for r in runner.rows("whole", "events.jsonl") if r["event"] == "evaluate"]
    began = [r["loss"] for r in runner.rows("y", "events.jsonl") if r["event"] == "evaluate"]
    assert began[0] == ended[-1]
    assert "WARNING" not in first.stdout

    command.remove(bos)
    second = runner.run(*without_model, *command[2:], *settings, "run.name=z", small=False)
    assert second.returncode == 0, second.stderr
    assert (
        f"WARNING: the tokenizer of model.init_from=out adds {BOS} before each text, but "
        "data.bos_token=null; to start documents with this token, start a new run with "
        f"'{bos}'"
    ) in second.stdout


@pytest.mark.slow  # the unit tests of the data loader cover the batches
def test_bos_may_be_the_eos_token(runner):
    done = runner.run("run.name=x", f'data.bos_token="{EMBEDDED_EOS_TOKEN}"', *MASKS, "run.steps=4")
    assert done.returncode == 0, done.stderr
    assert runner.losses("x")[-1][1] < runner.losses("x")[0][1]


def _encode_document(tokenizer_file: Path, text: str) -> list[int]:
    tokenizer = Tokenizer(str(tokenizer_file), ".", EMBEDDED_EOS_TOKEN, bos_token=BOS)
    (ids,) = tokenizer.encode([text])
    return np.asarray(ids).tolist()
