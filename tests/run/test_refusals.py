"""Configuration errors end a run with one message and exit code 2 before training."""

import os

import pyarrow as pa
import pytest

MISTAKES = [
    ("modle=7b", "hlat: modle is not a key of the configuration; did you mean model?"),
    ("model=7bb", "hlat: model=7bb does not exist; did you mean 7b?"),
    ("model=null", "a group cannot be null; name one of its choices, such as model=tiny"),
    (
        "optimizer.beta3=1",
        "optimizer.beta3 is not a key of the configuration; did you mean optimizer.beta2?",
    ),
    ("+optimizer.beta3=1", "did you mean optimizer.beta2?"),
    (
        "hydra.launcher.job=2",
        "hydra.launcher.job is not a key of the configuration; did you mean hydra.launcher.jobs?",
    ),
    ("hydra/launcher=slrm", "hydra/launcher=slrm does not exist; did you mean slurm?"),
    ("optimizer.lr=fast", "optimizer.lr=fast"),
    ("run.steps=[1", "run.steps=[1"),
    ("optimizer.lr=1,2", "optimizer.lr=1,2"),
    ("data.sources.code.paths=[nowhere.arrow]", "data.sources.code"),
    ("data.sources.code.paths=nowhere.arrow", "data.sources.code.paths: no file matches"),
    ("data.sources.code.paths=~/foo", "write data.sources.code.paths=$HOME/foo"),
    ("data.eos_token=</s>", """write 'data.eos_token="</s>"'"""),
    ("my.yaml", "move it to DIR/GROUP/NAME.yaml and write --config-dir DIR GROUP=NAME"),
    ("hardware=h100_p6", "hardware=h100_p6 does not exist; did you mean h100_p5?"),
    ("data.sources.code.path=x", "did you mean data.sources.code.paths?"),
    ("data.text_column=body", "data.text_column"),
    ("data.tokenizer=nowhere.json", "data.tokenizer"),
    ("data.eos_token=<nowhere>", "data.eos_token"),
    ("data.heldout_documents=1000", "data.heldout_documents"),
    ("model.vocab_size=100", "model.vocab_size=100 is smaller than the 4096 ids of data.tokenizer"),
    ("engine.device=tpu", "engine.device=tpu is not on this machine"),
    ("checkpoint.start_from=/nowhere", "checkpoint.start_from=/nowhere"),
    ("hardware.memory_gib=0.001", "use a smaller model, a narrower precision"),
    ("batch.sequence_length=10000000", "use a smaller batch.sequence_length than 10000000,"),
]


FILES = [
    (
        "model/mine.yaml",
        "model:\n  name: mine\n",
        "my/model/mine.yaml: its keys are those of model, as the file lacks the first line "
        "`# @package _global_`",
    ),
    (
        "experiment/mine.yaml",
        "optimizer:\n  lr: 1e-3\n",
        "my/experiment/mine.yaml: its keys are those of experiment, as the file lacks",
    ),
    (
        "model/mine.yaml",
        "# @package _global_\nmodel:\n  name: mine\n   num_layers: 2\n",
        "my/model/mine.yaml, line 4: mapping values are not allowed here",
    ),
    (
        "model/mine.yaml",
        "# @package _global_\nmodel:\n  name: mine\n  num_layer: 2\n",
        "my/model/mine.yaml, line 4: model.num_layer is not a key of the configuration; did you "
        "mean model.num_layers?",
    ),
    (
        "data/mine.yaml",
        "defaults: [python, _self_]\nsources:\n  code:\n    path: [a.arrow]\n",
        "my/data/mine.yaml, line 4: data.sources.code.path is not a key of the configuration; did "
        "you mean data.sources.code.paths?",
    ),
    (
        "optimizer/mine.yaml",
        "lr: fast\n",
        "my/optimizer/mine.yaml, line 1: optimizer.lr: Value 'fast' of type 'str' could not be",
    ),
]


@pytest.mark.parametrize(("name", "content", "sentence"), FILES)
def test_refuse_a_mistake_in_a_file(runner, refused, name, content, sentence):
    path = runner.folder / "my" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    override = f"{path.parent.name}=mine"
    refused(runner.run("--config-dir=my", override, small=False), sentence)


def test_choices_include_those_of_the_config_dir(runner, refused):
    path = runner.folder / "my/experiment/first.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\n")
    done = runner.run("--config-dir=my", "experiment=frist", small=False)
    refused(done, "experiment=frist does not exist; did you mean first? choices: first, hlat_70b,")


def test_refuse_a_file_with_the_name_of_a_choice(runner, refused):
    path = runner.folder / "my/model/tiny.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("name: tiny\n")
    done = runner.run("--config-dir=my", "model=tiny", small=False)
    refused(done, "tiny.yaml is not read, since conf/model/tiny.yaml has the same name; rename it")


def test_a_refused_run_leaves_no_directory(runner, refused):
    refused(runner.run("run.name=x", "checkpoint.start_from=/nowhere"), "checkpoint.start_from=")
    refused(runner.run("run.name=x", "data.heldout_documents=1000"), "data.heldout_documents")
    assert not any((runner.folder / "runs").iterdir())


@pytest.mark.parametrize(("mistake", "sentence"), MISTAKES)
@pytest.mark.slow_after(8)
def test_refuse_a_mistake(runner, refused, mistake, sentence):
    refused(runner.run(mistake), sentence)


@pytest.mark.slow
def test_refuse_a_70b_model_on_one_machine(runner, refused):
    done = runner.run("model=70b", small=False)
    refused(done, "model=70b needs ")
    single = ("parallelism=single", "precision=fp32")
    refused(runner.run("model=70b", *single, small=False), "model=70b needs 1,")


@pytest.mark.parametrize("root", ["/proc/nowhere", "/dev/null/runs", "file"])
def test_refuse_a_run_directory_that_is_not_writable(runner, refused, root):
    (runner.folder / "file").write_text("")
    refused(runner.run(f"run.root={root}"), f"run.root={root}: cannot write to {root}/")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_refuse_a_run_directory_without_permission(runner, refused):
    runner.folder.joinpath("locked").mkdir(mode=0o500)
    refused(runner.run("run.root=locked"), "Permission denied")


def test_refuse_a_file_without_a_text_column(runner, refused):
    path = runner.folder / "odd.arrow"
    table = pa.table({"body": ["x"] * 100})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    done = runner.run(f"data.sources.code.paths=[{path}]")
    refused(done, "data.text_column")
    assert "odd.arrow" in done.stderr
    assert "body" in done.stderr


def test_refuse_a_truncated_file(runner, refused, corpus):
    path = runner.folder / "short.arrow"
    content = (corpus / "code.arrow").read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(runner.run(f"data.sources.code.paths=[{path}]"), "short.arrow")


@pytest.mark.slow
def test_create_no_run_directory_for_a_refused_run(runner):
    runner.run("run.name=x", "model=70b", small=False)
    assert not (runner.folder / "runs").exists()
