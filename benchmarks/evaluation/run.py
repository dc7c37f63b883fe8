"""Compare the speed of lm-evaluation-harness with our adapter and with its `hf` adapter.

Usage: OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/evaluation/run.py [--repetitions N]
       PYTHONPATH=. python benchmarks/evaluation/run.py --render   (from result.json)

Both have the same fp32 weights in this process and the same number of threads. They process the
same requests of the harness's tasks alternately, and each round verifies that the results agree.
The `hf` adapter runs with batches of 8 and of 1, and the faster one counts. Documents are random
words in the schema of the real data sets. Seconds are CPU time of the process, because it does not
depend on other load.
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
from hlat.checkpoint.hugging_face import tokenizer_files
from hlat.data.tokenizer import EMBEDDED_EOS_TOKEN, EMBEDDED_FILE
from hlat.engine.engine_factory import create_engine
from hlat.evaluate.command_broadcast import CommandBroadcaster
from hlat.evaluate.lm_eval_adapter import LMEvalAdapter
from hlat.evaluate.lm_eval_tasks import TaskLoader
from hlat.inference import model_source
from hlat.inference.inference_config import build_inference_config
from hlat.inference.inference_model import InferenceModel
from tests.run.questions import WORDS, write

HERE = Path(__file__).resolve().parent
POSITIONS, DOCUMENTS = 1024, 16
TASKS = {
    "mmlu, 5 shots": ("mmlu_anatomy", 5, "one-token answers to one question, behind one prompt"),
    "arc_easy, 0 shots": ("arc_easy", 0, "answers of some words to one question"),
    "rolling": ("", 0, "a text of two windows of 1,024 tokens"),
    "gsm8k, 8 shots": ("gsm8k", 8, "32 tokens are written"),
}
Json = dict[str, Any]


def make_model(folder: Path) -> Path:
    """Save a Llama with 11 million random parameters in the Hugging Face format."""
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
    for name, content in tokenizer_files.build_tokenizer_files(
        EMBEDDED_FILE, EMBEDDED_EOS_TOKEN, POSITIONS
    ).items():
        (folder / name).write_bytes(content)
    return folder


def build_requests(data: Path, task: str, shots: int) -> tuple[str, list[Any]]:
    """Return the request type and the requests of a task."""
    from lm_eval.api.instance import Instance

    if not task:
        rng = random.Random(0)
        texts = [" ".join(rng.choices(WORDS, k=1500)) for _ in range(DOCUMENTS // 4)]
        request_type = "loglikelihood_rolling"
        return request_type, [
            Instance(request_type, {}, (text,), i) for i, text in enumerate(texts)
        ]
    library = TaskLoader(data)
    [item] = library.resolve_tasks([task], shots)
    [loaded] = library.load_task(item)["tasks"].values()
    if loaded.get_config("generation_kwargs"):
        loaded.set_config("generation_kwargs", {"max_gen_toks": 32}, update=True)
    with contextlib.redirect_stderr(io.StringIO()):
        loaded.build_all_requests(limit=DOCUMENTS, rank=0, world_size=1)
    return loaded.instances[0].request_type, loaded.instances


def timed(process: Callable[[list[Any]], Any], requests: list[Any]) -> tuple[float, Any]:
    """Return CPU seconds and responses."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        start = time.process_time()
        responses = process(requests)
        return time.process_time() - start, responses


def compare(actual: list[Any], expected: list[Any]) -> float:
    """Return the largest relative difference of log-likelihoods; assert that texts are equal."""
    if isinstance(actual[0], str):
        assert actual == expected
        return 0.0
    pairs = [
        (a[0], b[0]) if isinstance(a, tuple) else (a, b)
        for a, b in zip(actual, expected, strict=True)
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def measure(repetitions: int) -> Iterator[Json]:
    """Alternate the adapters, and yield the result after each task."""
    from lm_eval.models.huggingface import HFLM

    with TemporaryDirectory() as temporary:
        root = Path(temporary)
        folder, data = make_model(root / "model"), write(root / "data", DOCUMENTS)
        source = model_source.find_model(str(folder))
        engine = create_engine(config := build_inference_config(source, []))
        engine.build(config, training=False)
        source.load_weights(engine.state_shards())
        model = InferenceModel(engine)
        scheduler = CommandBroadcaster(model, source.tokenizer, engine.parallel_state.world_group)
        contestants = {"hlat": LMEvalAdapter(scheduler, source.sequence_length)} | {
            f"hf, batches of {size}": HFLM(
                pretrained=str(folder), dtype="float32", device="cpu", batch_size=size
            )
            for size in (8, 1)
        }
        result: Json = {"kinds": {}}
        for label, (task, shots, content) in TASKS.items():
            request_type, requests = build_requests(data, task, shots)
            seconds: dict[str, list[float]] = {name: [] for name in contestants}
            difference = 0.0
            for repetition in range(repetitions + 1):  # the first is a warm-up
                responses = {}
                for name, adapter in contestants.items():
                    elapsed, responses[name] = timed(getattr(adapter, request_type), requests)
                    if repetition:
                        seconds[name].append(elapsed)
                for name in contestants:
                    difference = max(difference, compare(responses["hlat"], responses[name]))
            best = min(
                (n for n in seconds if n != "hlat"), key=lambda n: spread(seconds[n])["median"]
            )
            ratios = [b / a for a, b in zip(seconds["hlat"], seconds[best], strict=True)]
            result["kinds"][label] = {
                "what": content,
                "requests": len(requests),
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
    for label, task in result["kinds"].items():
        ours, peer = (spread(task["seconds"][name])["median"] for name in ("hlat", task["peer"]))
        ratio = task["times_as_fast"]
        rows.append(
            [
                label,
                task["what"],
                str(task["requests"]),
                f"{ours:.3g}",
                f"{peer:.3g} ({task['peer']})",
                f"**{ratio['median']:.2f}** ({ratio['min']:.2f} to {ratio['max']:.2f})",
                f"{task['largest_relative_difference']:.0e}",
            ]
        )
    head = [
        "task",
        "content",
        "requests",
        "hlat, CPU s",
        "peer, CPU s",
        "times as fast",
        "largest difference",
    ]
    text = f"{table(head, rows)}\n\n{machine(result)}"
    write_between(HERE / "README.md", "result", text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args()
    file = HERE / "result.json"
    if not arguments.render:
        for result in measure(arguments.repetitions):
            file.write_text(json.dumps(result, indent=2) + "\n")
    render(json.loads(file.read_text()))


if __name__ == "__main__":
    main()
