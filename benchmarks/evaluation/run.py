"""How fast a model answers the harness: our adapter beside the harness's own for transformers.

Usage: OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/evaluation/run.py [--repetitions N]
       PYTHONPATH=. python benchmarks/evaluation/run.py --render   (from result.json)

Both hold the same weights in fp32 in this process, on as many threads, and are asked the same
requests of the harness's own tasks by turns; that their answers are the same is checked each time.
The harness's adapter gets batches of 8 texts, and of 1, and the better of both counts. Questions
are made of words drawn by lot, in the schema of the real data sets. Seconds are the process's own,
so that other work on the machine does not count.
"""

import argparse
import contextlib
import io
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import describe_machine, machine, spread, table, write_between
from hlat.data import hugging_face_tokenizer
from hlat.data.tokenizer import EMBEDDED_EOS_TOKEN, EMBEDDED_FILE
from hlat.engine.engine_factory import create_engine
from hlat.evaluate import model_source
from hlat.evaluate.inference_config import build_inference_config
from hlat.evaluate.inference_model import InferenceModel
from hlat.evaluate.lm_eval_adapter import LMEvalAdapter
from hlat.evaluate.lm_eval_tasks import TaskLoader
from hlat.evaluate.rank0_scheduler import Rank0Scheduler
from tests.run.questions import WORDS, write

HERE = Path(__file__).resolve().parent
POSITIONS, QUESTIONS = 1024, 16
KINDS = {
    "mmlu, 5 shots": ("mmlu_anatomy", 5, "one-token answers to one question, behind one prompt"),
    "arc_easy, 0 shots": ("arc_easy", 0, "answers of some words to one question"),
    "rolling": ("", 0, "a text of two windows of 1,024 tokens"),
    "gsm8k, 8 shots": ("gsm8k", 8, "32 tokens are written"),
}
Json = dict[str, Any]


def make_model(folder: Path) -> Path:
    """A Llama of 11 million parameters with random weights, as a Hugging Face folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=320,
        intermediate_size=880,
        num_hidden_layers=6,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name, content in hugging_face_tokenizer.build_tokenizer_files(
        EMBEDDED_FILE, EMBEDDED_EOS_TOKEN, POSITIONS
    ).items():
        (folder / name).write_bytes(content)
    return folder


def requests(data: Path, task: str, shots: int) -> tuple[str, list[Any]]:
    """What the harness asks in a task, and by which method."""
    from lm_eval.api.instance import Instance

    if not task:
        draw = random.Random(0)
        texts = [" ".join(draw.choices(WORDS, k=1500)) for _ in range(QUESTIONS // 4)]
        kind = "loglikelihood_rolling"
        return kind, [Instance(kind, {}, (text,), i) for i, text in enumerate(texts)]
    library = TaskLoader(data)
    [item] = library.resolve_tasks([task], shots)
    [loaded] = library.load_task(item)["tasks"].values()
    if loaded.get_config("generation_kwargs"):
        loaded.set_config("generation_kwargs", {"max_gen_toks": 32}, update=True)
    with contextlib.redirect_stderr(io.StringIO()):
        loaded.build_all_requests(limit=QUESTIONS, rank=0, world_size=1)
    return loaded.instances[0].request_type, loaded.instances


def timed(ask: Callable[[list[Any]], Any], asked: list[Any]) -> tuple[float, Any]:
    """CPU seconds, and what was answered."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        since = time.process_time()
        found = ask(asked)
        return time.process_time() - since, found


def differ(one: list[Any], other: list[Any]) -> float:
    """The largest difference of two logarithms, relative; texts must be equal."""
    if isinstance(one[0], str):
        assert one == other
        return 0.0
    pairs = [
        (a[0], b[0]) if isinstance(a, tuple) else (a, b) for a, b in zip(one, other, strict=True)
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def measure(repetitions: int) -> Iterator[Json]:
    """Ask both, by turns; what is known so far after each kind of request."""
    from lm_eval.models.huggingface import HFLM

    with TemporaryDirectory() as place:
        folder, data = make_model(Path(place) / "model"), write(Path(place) / "data", QUESTIONS)
        one = model_source.find_model(str(folder))
        engine = create_engine(config := build_inference_config(one, []))
        engine.build(config, training=False)
        one.load_weights(engine.chunks())
        asking = Rank0Scheduler(InferenceModel(engine), one.tokenizer, engine.world.world_group)
        contestants = {"hlat": LMEvalAdapter(asking, one.sequence_length)} | {
            f"hf, batches of {size}": HFLM(
                pretrained=str(folder), dtype="float32", device="cpu", batch_size=size
            )
            for size in (8, 1)
        }
        result: Json = {"kinds": {}}
        for label, (task, shots, what) in KINDS.items():
            kind, asked = requests(data, task, shots)
            seconds: dict[str, list[float]] = {name: [] for name in contestants}
            difference = 0.0
            for repetition in range(repetitions + 1):  # the first warms up
                answers = {}
                for name, adapter in contestants.items():
                    spent, answers[name] = timed(getattr(adapter, kind), asked)
                    if repetition:
                        seconds[name].append(spent)
                for name in contestants:
                    difference = max(difference, differ(answers["hlat"], answers[name]))
            best = min(
                (n for n in seconds if n != "hlat"), key=lambda n: spread(seconds[n])["median"]
            )
            ratios = [b / a for a, b in zip(seconds["hlat"], seconds[best], strict=True)]
            result["kinds"][label] = {
                "what": what,
                "requests": len(asked),
                "seconds": seconds,
                "peer": best,
                "times_as_fast": spread(ratios),
                "largest_relative_difference": difference,
            }
            print(label, result["kinds"][label]["times_as_fast"], difference, flush=True)
            libraries = describe_machine(["torch", "transformers", "lm_eval"])
            yield result | {"threads": torch.get_num_threads(), "machine": libraries}
        engine.close()


def render(result: Json) -> None:
    """Write the table into the README."""
    rows = []
    for label, kind in result["kinds"].items():
        ours, peer = (spread(kind["seconds"][name])["median"] for name in ("hlat", kind["peer"]))
        fast = kind["times_as_fast"]
        rows.append(
            [
                label,
                kind["what"],
                str(kind["requests"]),
                f"{ours:.3g}",
                f"{peer:.3g} ({kind['peer']})",
                f"**{fast['median']:.2f}** ({fast['min']:.2f} to {fast['max']:.2f})",
                f"{kind['largest_relative_difference']:.0e}",
            ]
        )
    head = [
        "task",
        "what it asks",
        "requests",
        "hlat, CPU s",
        "peer, CPU s",
        "times as fast",
        "largest difference",
    ]
    text = f"{table(head, rows)}\n\n{machine(result)}"
    write_between(HERE / "README.md", "result", text)


def main() -> None:
    """Measure and render."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--render", action="store_true")
    given = parser.parse_args()
    file = HERE / "result.json"
    if not given.render:
        for result in measure(given.repetitions):
            file.write_text(json.dumps(result, indent=2) + "\n")
    render(json.loads(file.read_text()))


if __name__ == "__main__":
    main()
