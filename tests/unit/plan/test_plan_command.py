"""Tests of `hlat plan`: tables, JSON, figures, errors."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hlat.plan import __main__ as plan

REPOSITORY = Path(__file__).resolve().parent.parent.parent.parent
FEW = ("trials=20",)


def test_commands_are_listed_without_arguments(capsys):
    with pytest.raises(SystemExit) as end:
        plan.main([])
    assert end.value.code == 0
    assert "failures        uptime, goodput" in capsys.readouterr().out


def test_help_contains_every_key(capsys):
    with pytest.raises(SystemExit) as end:
        plan.main(["failures", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for key in ("scenario", "nodes", "mtbf_h", "save_write_s", "every_steps", "steps"):
        assert re.search(rf"^  {key}=", out, re.MULTILINE)


def test_table_has_formula_simulation_and_sources(capsys):
    assert plan.main(["failures", "nodes=128", *FEW]) == 0
    out = capsys.readouterr().out
    assert out.startswith("128 nodes, together a failure every 23 h 2 min; 429,153 steps of 3.303")
    assert re.search(r"^uptime +97\.86% +9\d\.\d\d% +9\d\.\d\d% to 9\d\.\d\d%$", out, re.MULTILINE)
    assert re.search(r"^nodes=128 +given$", out, re.MULTILINE)
    assert re.search(r"^restart_s=420 +assumed: ", out, re.MULTILINE)
    assert "this interval   1,000 steps, 55 min 3 s: loses" in out


def test_optimal_interval_is_reported(capsys):
    assert plan.main(["failures", "every_steps=1350", "nodes=1", *FEW]) == 0
    assert "this interval   1,350 steps, 1 h 14 min: loses 1.01 points" in capsys.readouterr().out
    assert plan.main(["failures", "every_steps=1350", *FEW]) == 0
    assert "this interval   1,350 steps, 1 h 14 min: as good\n" in capsys.readouterr().out


def test_json_has_all_results_and_is_deterministic(capsys):
    arguments = ["failures", "scenario=manual", "--json", "trials=200", "seed=3"]
    assert plan.main(arguments) == 0
    out = capsys.readouterr().out
    result = json.loads(out)
    assert result["scenario"]["mtbf_h"] == {
        "value": 2950,
        "source": "fitted to 77.83% of scenario=manual",
    }
    assert result["formula"]["uptime"] == pytest.approx(0.7783, abs=1e-4)
    simulation = result["simulation"]
    assert simulation["trials"] == 200
    off = simulation["mean"]["uptime"] - result["formula"]["uptime"]
    assert abs(off) < 4 * simulation["standard_error"]["uptime"]
    parts = set(result["formula"]) - {"uptime", "wall_s", "failures"}
    for shares in (result["formula"], simulation["mean"]):
        assert sum(shares[part] for part in parts) == pytest.approx(1)
    interval = result["interval"]
    assert interval["loses_goodput"] == pytest.approx(
        interval["best_goodput"] - interval["current_goodput"]
    )
    assert plan.main(arguments) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_figure_of_failures_is_saved(tmp_path, capsys, suffix):
    file = tmp_path / f"goodput.{suffix}"
    assert plan.main(["failures", "--figure", str(file), *FEW]) == 0
    assert capsys.readouterr().err == f"drew {file}\n"
    content = file.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        text = content.decode()
        assert "best: 1 h 13 min" in text
        assert "current: 55 min 3 s" in text
        drawing = text.partition("</style>")[2]
        assert "var(--" in drawing
        assert not re.search(r"#[0-9a-f]{6}[;\"]", drawing), "a colour is not one of the theme"


@pytest.mark.parametrize(
    "arguments",
    [
        ("save_stall_s=0",),
        ("mtbf_h=1e9",),
        ("nodes=2000", "every_steps=1"),
        ("save_write_s=3303",),
        ("steps=1000",),
        ("step_s=1e-4", "save_stall_s=0"),
    ],
)
def test_figure_of_extreme_scenarios_is_saved(tmp_path, capsys, arguments):
    file = tmp_path / "goodput.svg"
    assert plan.main(["failures", "--figure", str(file), *FEW, *arguments]) == 0
    assert file.is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fialures", "fialures is not an action of hlat plan; did you mean failures?"),
        (
            "throughput",
            "throughput is not an action of hlat plan; actions: calibrate, failures, cost, from_nxdt",
        ),
        ("from_nxtd=x.yaml", "from_nxtd is not an action of hlat plan; did you mean from_nxdt?"),
        ("from_nxdt=no.yaml", "no.yaml cannot be read: it does not exist, or is not a file"),
        ("failures scenario=manul", "scenario=manul does not exist; did you mean manual?"),
        (
            "failures save_write_s=5000",
            "save_write_s=5000 is longer than the 3303 s from a save to the next; use every_steps=1514 or more",
        ),
    ],
)
def test_errors_are_one_line_with_exit_code_2(capsys, arguments, message):
    assert plan.main(arguments.split()) == 2
    result = capsys.readouterr()
    assert result.err == f"hlat: {message}\n"
    assert result.out == ""


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ("nods=3", ["nods= is not a setting of this command; did you mean nodes=?"]),
        ("nodes", ["unrecognized arguments: nodes"]),
        ("nodes=1.5", ["nodes: 1.5 is not a whole number above 0, such as 2"]),
        ("nodes=-1.5", ["nodes: -1.5 is not a whole number above 0"]),
        ("nodes=1 nodes=2", ["nodes is set 2 times: nodes=1 and nodes=2; keep one of them"]),
        ("mtbf_h=inf", ["mtbf_h: inf is not a number above 0"]),
        ("load_s=-1", ["load_s: -1 is not a number of 0 or more"]),
        ("load_s=1min", ["load_s: 1min is not a number of 0 or more"]),
        ("figure=x.pdf", ["figure: x.pdf must end in .png or .svg"]),
        (
            "trials=0 every_steps=x",
            [
                "trials: 0 is not a whole number above 0",
                "every_steps: x is not a whole number above 0",
            ],
        ),
    ],
)
def test_all_invalid_settings_are_reported(capsys, arguments, messages):
    with pytest.raises(SystemExit) as end:
        plan.main(["failures", *arguments.split()])
    assert end.value.code == 2
    result = capsys.readouterr().err
    assert result == "".join(f"hlat plan failures: {message}\n" for message in messages)


def test_error_of_a_misspelled_flag_suggests_the_nearest(capsys):
    with pytest.raises(SystemExit) as end:
        plan.main(["failures", "--fgure", "x.svg"])
    assert end.value.code == 2
    assert "did you mean figure=?" in capsys.readouterr().err


def test_missing_directory_is_an_error(tmp_path, capsys):
    file = tmp_path / "no" / "goodput.svg"
    assert plan.main(["failures", "--figure", str(file), *FEW]) == 2
    expected = (
        f"hlat: {file}: No such file or directory; specify a path that you can read and write\n"
    )
    assert capsys.readouterr().err == expected


@pytest.mark.slow
def test_torch_is_not_imported_nor_heavy_libraries_for_help():
    program = (
        "import contextlib, sys\n"
        "from hlat.plan import __main__ as plan\n"
        "with contextlib.suppress(SystemExit):\n"
        "    plan.main([])\n"
        "assert not {'numpy', 'matplotlib', 'hydra'} & set(sys.modules)\n"
        "plan.main(['failures', 'trials=5'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "page"),
    [("manual", "benchmarks/planning/uptimes.md"), ("automatic", "docs/failures.md")],
)
def test_documentation_contains_the_output_of_failures(capsys, name, page):
    assert plan.main(["failures", f"scenario={name}"]) == 0
    shown = (REPOSITORY / page).read_text()
    for line in capsys.readouterr().out.splitlines():
        result = re.sub(r"%? +\S+ +\S+ to \S+$", "", line)  # without sampled values
        assert result in shown


RUN = """\
model_source: hf
trainer: {devices: 32, num_nodes: 1, max_steps: 100}
distributed_strategy: {tensor_model_parallel_size: 8}
data: {micro_batch_size: 1, global_batch_size: 64, train_dir: /tokens}
model:
  model_config: /away/sizes.json
  encoder_seq_length: 2048
  optim: {name: adamw, lr: 3e-4, sched: {name: CosineAnnealing, warmup_steps: 10, min_lr: 3e-5}}
precision: {type: bf16SR}
"""
SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def nxdt_file(tmp_path):
    """Write a configuration of NxDT and the config.json of its model."""
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    (tmp_path / "sizes.json").write_text(json.dumps(SIZES))
    return file


@pytest.mark.slow
def test_printed_command_composes(nxdt_file, capsys, compose):
    assert plan.main([f"from_nxdt={nxdt_file}"]) == 0
    command, *rest = capsys.readouterr().out.split("\n\n")
    arguments = shlex.split(command.replace("\\\n", " "))
    assert arguments[:2] == ["hlat", "train"]
    config = compose(*arguments[2:])
    assert config.model.name == "1b"
    assert config.precision.rounding.value == "stochastic"
    assert sorted(word.split("=")[0] for word in arguments if word.endswith("=???")) == [
        "data.eos_token",
        "data.sources.files.paths",
        "data.tokenizer",
    ]
    titles = [part.splitlines()[0] for part in rest]
    assert titles == [
        "to be set by you, where it says ???:",
        "to know:",
        "no equivalent:",
        "no override needed:",
    ]
    assert "  data.train_dir=/tokens  hlat reads text" in rest[2]


@pytest.mark.slow
def test_file_as_separate_argument(nxdt_file, capsys):
    assert plan.main(["from_nxdt", str(nxdt_file)]) == 0
    assert "model=1b" in capsys.readouterr().out


@pytest.mark.slow
def test_config_json_is_not_read_for_megatron_models(nxdt_file, capsys):
    nxdt_file.write_text(RUN.replace("source: hf", "source: megatron"))
    assert plan.main([f"from_nxdt={nxdt_file}"]) == 2
    assert "config.json" not in capsys.readouterr().out


def test_configuration_files_of_the_user_are_searched(tmp_path, monkeypatch, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/nano.yaml").write_text("defaults: [tiny, _self_]\nname: nano\n")
    arguments = ["model=nano", f"config_dir={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["plan", *arguments])
    assert plan.main(arguments) == 0
    assert capsys.readouterr().out.startswith("nano in fp32 on 1 node of cpu")

    arguments += ["hardware=h100", "parallelism.dp=1", "search=true"]
    monkeypatch.setattr("sys.argv", ["plan", *arguments])
    assert plan.main(arguments) == 0
    command = f"to train the first: hlat train --config-dir={tmp_path} model=nano hardware=h100 "
    assert command in capsys.readouterr().out

    arguments = ["model=nano", "run.seed=2", f"config_dir={tmp_path}/none"]
    monkeypatch.setattr("sys.argv", ["plan", *arguments])
    assert plan.main(arguments) == 2
    assert f"--config-dir: {tmp_path}/none is not a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_errors_of_training_are_printed(nxdt_file, capsys):
    nxdt_file.write_text(
        RUN.replace("tensor_model_parallel_size: 8", "tensor_model_parallel_size: 3")
    )
    assert plan.main([f"from_nxdt={nxdt_file}"]) == 2
    refused = capsys.readouterr().out.split("hlat train would reject this:\n")[1]
    assert "  parallelism.tp=3 does not divide model.num_attention_heads=32; use 1, 2" in refused


@pytest.mark.slow
def test_value_of_another_type_is_rejected(nxdt_file, capsys):
    nxdt_file.write_text(RUN.replace("max_steps: 100", "max_steps: soon"))
    assert plan.main([f"from_nxdt={nxdt_file}"]) == 2
    assert "  schedule.total_steps=soon: Value 'soon'" in capsys.readouterr().out


@pytest.mark.slow
def test_missing_sizes_are_errors(nxdt_file, capsys):
    (nxdt_file.parent / "sizes.json").unlink()
    assert plan.main([f"from_nxdt={nxdt_file}"]) == 2
    out = capsys.readouterr().out
    assert "'model.hidden_size=???'" in out
    assert "model.hidden_size is not set; give it a value" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "is not a configuration of NxDT: it has no model_source that is hf or megatron"),
        ("a: [1\n", "cannot be read: line 2: "),
        ("a: !!python/object/apply:os.system [ls]\n", "cannot be read: line 1: could not deter"),
        ("a: &x [1]\nb: [*x, *x]\n", "cannot be read: it contains aliases"),
        ("a: ${\n", "cannot be read: "),
        ("[" * 5000, "cannot be read: "),
        ("a: !!int ''\n", "cannot be read: "),
        ("a: !!timestamp 2001-99-99\n", "cannot be read: "),
        ("a: \x00\n", "cannot be read: "),
        ("a: 1\na: 2\n", "cannot be read: line 2: found duplicate key a"),
        ("#" * 2**18 + "\n", "cannot be read: it is too large for a configuration"),
    ],
    ids=lambda text: ascii(text[:25]),
)
def test_error_of_an_invalid_file_is_one_line(nxdt_file, capsys, text, message):
    nxdt_file.write_text(text)
    assert plan.main([f"from_nxdt={nxdt_file}"]) == 2
    result = capsys.readouterr()
    assert result.out == ""
    assert result.err.startswith(f"hlat: {nxdt_file} {message}")
    assert result.err.count("\n") == 1
    assert result.err[:-1].isprintable()


@pytest.mark.parametrize("text", ["[]", "{", "[" * 5000, "1"])
def test_error_of_an_invalid_config_json_is_one_line(nxdt_file, capsys, text):
    (nxdt_file.parent / "sizes.json").write_text(text)
    assert plan.main([f"from_nxdt={nxdt_file}"]) == 2
    assert capsys.readouterr().err.startswith(
        f"hlat: {nxdt_file.parent / 'sizes.json'} cannot be read: "
    )


@pytest.mark.slow
def test_content_of_a_file_is_escaped(nxdt_file, capsys, monkeypatch):
    monkeypatch.setenv("PLANTED", "a-secret")
    secret = "${oc.env:PLANTED}"
    hostile = f'"\\e[2J": "\\a{"x" * 500}"\nseed: "{secret}"\nown: "{secret}"\n'
    nxdt_file.write_text(RUN + hostile + f"number: 0x{'f' * 10_000}\n")
    assert plan.main([f"from_nxdt={nxdt_file}"]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "a-secret" not in out
    assert re.search(r"number=a number that is too long +no equivalent", out)
    assert re.search(rf"seed={re.escape(secret)} +the value is unknown", out)


HLAT_7B = ("experiment=hlat_7b",)
ON_FOUR = ("model=70b", "precision=mixed", "hardware=trn1_32xl", "hardware.nodes=4")


def test_run_is_planned_from_overrides_of_training(capsys):
    assert plan.main(HLAT_7B) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "7b in bf16_sr on 64 nodes of trn1.32xlarge, 2,048 NeuronCores; 1,024 seq"
    )
    rows = {
        "activations": "2.26",
        "total": "12.05",
        "data-parallel collectives": "0.864",
        "tokens per second": "1,239,734, 605 a NeuronCore",
        "MFU": "27.3% of 194,560 TFLOP/s",
        "days to 1.8T tokens": "16.80 (14.28 to 19.83), 429,154 steps without failures",
        "cost per 4 M tokens": "$1.23",
        "cores of a node to tokenise": "0.033 of 128",
        "checkpoint": "40.43 GB",
    }
    for label, value in rows.items():
        assert re.search(rf"^{label} +{re.escape(value)}", out, re.MULTILINE), label


def test_documentation_contains_the_output_of_a_plan(capsys):
    plan.main(HLAT_7B)
    page = (REPOSITORY / "docs/planning.md").read_text()
    for line in capsys.readouterr().out.splitlines():
        assert f"    {line}".rstrip() in [row.rstrip() for row in page.splitlines()] or not line


@pytest.mark.slow
def test_plan_that_does_not_fit_lists_layouts_that_fit(capsys):
    assert plan.main(ON_FOUR) == 2
    out = capsys.readouterr().out
    assert out.startswith("infeasible: parallelism.tp=32 x pp=8 needs a multiple of 256 processes")
    assert (
        "infeasible: tp=32 pp=4 zero=1 micro_batch_size=1 activation_checkpointing=selective "
        "needs 17.17 GiB of each NeuronCore, trn1.32xlarge has 16.00; the largest term is "
        "optimizer state (4.28 GiB)" in out
    )
    assert re.search(r"^ +8 +32 +8 +1 +1 +selective +1 ", out, re.MULTILINE)
    assert plan.main([*ON_FOUR, "--json"]) == 2
    result = json.loads(capsys.readouterr().out)
    assert result["fits"] is False
    assert result["nearest_valid"][0]["layout"]["pp"] == 4
    assert all(one["fits"] for one in result["nearest"])


@pytest.mark.slow
def test_the_nearest_layouts_are_plans_that_fit(capsys):
    arguments = ["experiment=hlat_7b", "parallelism.tp=2", "--json"]
    assert plan.main(arguments) == 2
    result = json.loads(capsys.readouterr().out)
    assert result["memory"]["total"] > result["memory"]["device"]
    best = result["nearest"][0]
    assert plan.main(["experiment=hlat_7b", *best["overrides"], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["memory"]["total"] == best["memory"]
    assert again["throughput"]["step"]["total"] == best["step_seconds"]


@pytest.mark.slow
def test_a_search_ranks_layouts_that_fit_by_speed(capsys):
    arguments = ["model=70b", "hardware=trn1_32xl", "hardware.nodes=32", "search=true"]
    assert plan.main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["layouts"]
    fitting = [one for one in result if one["fits"]]
    assert result[: len(fitting)] == fitting
    speeds = [one["tokens_per_second"] for one in fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert {one["zero"] for one in result} == {1}  # NxD supports mixed only with ZeRO-1
    assert any(one["tp"] == 32 and one["pp"] == 8 for one in fitting)
    assert plan.main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^{len(result)} valid layouts, {len(fitting)} fit$", out, re.MULTILINE)
    assert "\nfastest of each tp, pp, ep, ZeRO stage and number of replicas; memory of a " in out
    table = [line for line in out.splitlines() if re.match(r"nodes| +32 ", line)]
    assert {len(line.removesuffix("  configured")) for line in table} == {82}
    assert len(table) == 1 + 3 + 1
    assert "to train the first: hlat train model=70b hardware=trn1_32xl hardware.nodes=32 " in out


def test_a_search_without_constants_ranks_by_memory(capsys):
    assert plan.main(["parallelism.tp=2", "parallelism.dp=2", "search=true", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["layouts"]
    sizes = [one["memory"] for one in result]
    assert sizes == sorted(sizes)
    assert {one["tp"] * one["pp"] * one["dp"] for one in result} == {4}
    assert plan.main(["parallelism.tp=2", "parallelism.dp=2", "search=true"]) == 0
    out = capsys.readouterr().out
    assert "\nnot ranked by speed, since step times on cpu are unknown; least memory first" in out
    assert "the first:" not in out


def test_time_and_price_of_an_assumed_mfu(capsys):
    """Compare with 6 FLOPs per parameter and token, plus attention, on 8 H100."""
    overrides = ["model=llama3_8b", "hardware=h100_p5", "run.steps=100"]
    assert plan.main([*overrides, "mfu=0.5"]) == 0
    assert "time and price are assumed: mfu=0.5 of the data sheet's peak" in capsys.readouterr().out
    assert plan.main([*overrides, "mfu=0.5", "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    throughput = found["throughput"]
    assert found["assumed_mfu"] == 0.5
    assert throughput["mfu"] == pytest.approx(0.5)
    without_attention = 8 * 989e12 * 0.5 / (6 * 7.5e9)  # without the embedding
    assert 0.85 < throughput["tokens_per_second"] / without_attention < 1
    hours = 100 * throughput["step"]["total"] / 3600
    assert throughput["cost_usd"] == pytest.approx(55.04 * hours)
    with pytest.raises(SystemExit):
        plan.main([*overrides, "mfu=40"])
    assert plan.main(["hardware=cpu", "mfu=0.5"]) == 0
    assert "peak_tflops.fp32 is unknown, so is the step time at mfu=0.5" in capsys.readouterr().out
    assert plan.main([*overrides, "mfu=0.5", "search=true"]) == 2


def test_unknown_time_is_not_printed(capsys):
    assert plan.main(["run.steps=5"]) == 0
    out = capsys.readouterr().out
    assert "total" in out
    assert "hardware=cpu has no constants in hlat/plan/device_efficiency.yaml" in out
    assert "tokens per second" not in out


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_figure_of_a_plan_is_saved(tmp_path, capsys, suffix):
    file = tmp_path / f"plan.{suffix}"
    assert plan.main([*HLAT_7B, "--figure", str(file)]) == 0
    assert capsys.readouterr().err == f"drew {file}\n"
    if suffix == "svg":
        text = file.read_text()
        assert "data-parallel collectives" in text
        assert "7b on 64 of trn1.32xlarge: 12.05 GiB of 16.00, which fits" in text
        drawing = text.partition("</style>")[2]
        assert "var(--" in drawing
        assert not re.search(r"#[0-9a-f]{6}[;\"]", drawing), "a colour is not one of the theme"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("modle=7b", "modle is not a key of the configuration; did you mean model?"),
        (
            "model=7b search=true --figure x.svg",
            "figure=x.svg shows one layout; remove search=true",
        ),
        ("optimizer.beta1=2", "optimizer.beta1=2.0 is outside [0, 1)"),
    ],
)
def test_error_of_invalid_overrides_is_one_line(capsys, arguments, message):
    assert plan.main(arguments.split()) == 2
    assert capsys.readouterr().err == f"hlat: {message}\n"


def test_search_is_true_or_false(capsys):
    with pytest.raises(SystemExit) as end:
        plan.main(["model=7b", "search=yes"])
    assert end.value.code == 2
    assert "search=yes: use search=true or search=false" in capsys.readouterr().err


def test_plan_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys; from hlat.plan import __main__ as plan; plan.main(sys.argv[1:])\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *HLAT_7B], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_plan_of_a_gpu_has_an_interval(capsys):
    overrides = ["model=llama3_8b", "hardware=h100_p5", "hardware.nodes=8"]
    assert plan.main(overrides) == 0
    out = capsys.readouterr().out
    assert re.search(r"^80% interval +\d+\.\d+ to \d+\.\d+$", out, re.MULTILINE)
    assert "\nother operators" in out
    assert "constants of h100: fitted to 24 published rows of NeMo and llm-foundry" in out
    assert plan.main([*overrides, "hardware=b200_hgx"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^range, not calibrated +\d+\.\d+ to \d+\.\d+$", out, re.MULTILINE)
    assert "constants of b200: not calibrated, measured matmuls" in out


def test_hardware_of_an_unknown_class_lists_the_known_ones(capsys):
    overrides = ["model=llama3_8b", "hardware=h100_p5", "hardware.device=h1000"]
    assert plan.main(overrides) == 0
    assert "(hardware.device=h1000), so its step time is unknown" in capsys.readouterr().out
