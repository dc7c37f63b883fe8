"""Tokens that a model writes in a second of a core, beside transformers with the same weights.

Usage: OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/evaluation/generate.py
       PYTHONPATH=. python benchmarks/evaluation/generate.py --render   (the table again)

Both run in this process and take turns, with their own attention over a cache of keys and values,
in fp32. Weights are random and every text is as long as it may be, so what is timed does not depend
on what is written; greedy texts are compared, and must be the same. Seconds are the process's own,
of its single thread, so that other work on the machine does not count.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hydra import compose, initialize_config_dir

from benchmarks.common import describe_machine, machine, spread, table, write_between
from hlat.config.compose import register_configs
from hlat.config.package_dirs import find_package_dir
from hlat.config.precision import Dtype
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.engine.engine_factory import create_engine
from hlat.engine.interface import Engine
from hlat.evaluate.inference_model import InferenceModel
from hlat.model import hugging_face_config

HERE = Path(__file__).resolve().parent
RESULT, DOCUMENT = HERE / "generate.json", HERE.parent.parent / "docs/humaneval.md"
Json = dict[str, Any]
SHAPE = [
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.intermediate_size=704",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.vocab_size=4096",
    "model.init_std=0.05",
]
NEW_TOKENS = 24
CASES = {
    "one prompt of 128 tokens": [128],
    "8 prompts of 16 to 256 tokens": np.linspace(16, 256, 8).astype(int).tolist(),
    "8 samples of a prompt of 256 tokens": [256],
}
NUM_SAMPLES = 8
DRAWN = {"temperature": 0.8, "top_p": 0.95}


def build() -> tuple[Config, Engine]:
    """A model of random weights."""
    register_configs()
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        config = resolve_config(compose("config", SHAPE))
    engine = create_engine(config)
    engine.build(config, training=False)
    return config, engine


def peer_of(config: Config, engine: Engine) -> Any:
    """The same weights in transformers."""
    settings = hugging_face_config.build_hf_config(config.model, 1024, 0, Dtype.fp32)
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
    weights = {
        chunk.name.removeprefix("weights/"): chunk.tensor.detach().reshape(chunk.shape)
        for chunk in engine.chunks()
        if chunk.name.startswith("weights/")
    }
    peer.load_state_dict(weights)
    return peer.eval()


def ours(engine: Engine, prompts: list[list[int]], drawn: bool) -> list[list[int]]:
    """What we write."""
    repeated = prompts * (NUM_SAMPLES if drawn else 1)
    settings = DRAWN if drawn else {}
    return InferenceModel(engine).generate(
        repeated, NEW_TOKENS, is_finished=lambda tokens: False, **settings
    )


@torch.inference_mode()
def theirs(peer: Any, prompts: list[list[int]], drawn: bool) -> list[list[int]]:
    """What transformers writes; prompts are filled up on the left."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    settings: Json = {"do_sample": False}
    if drawn:
        settings = {"do_sample": True, "top_k": 0, "num_return_sequences": NUM_SAMPLES} | DRAWN
    found = peer.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    return found[:, width:].tolist()


def timed(write: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Tokens per second, and the texts."""
    since = time.process_time()
    texts = write()
    return sum(map(len, texts)) / (time.process_time() - since), texts


def measure(repetitions: int) -> Json:
    """Let both write every case in turn."""
    config, engine = build()
    peer = peer_of(config, engine)
    generator = np.random.default_rng(0)
    result: Json = {"shape": SHAPE, "new_tokens": NEW_TOKENS, "cases": {}}
    for name, lengths in CASES.items():
        drawn = "samples" in name
        prompts = [generator.integers(0, 4096, length).tolist() for length in lengths]
        speeds: dict[str, list[float]] = {"hlat": [], "transformers": []}
        for repetition in range(repetitions + 1):
            mine, texts = timed(lambda: ours(engine, prompts, drawn))  # noqa: B023
            other, peers = timed(lambda: theirs(peer, prompts, drawn))  # noqa: B023
            if not drawn and texts != peers:
                raise SystemExit(f"{name}: the two have not written the same")
            if repetition:
                speeds["hlat"].append(mine)
                speeds["transformers"].append(other)
        pairs = zip(speeds["hlat"], speeds["transformers"], strict=True)
        result["cases"][name] = {
            "tokens_per_cpu_second": {who: spread(values) for who, values in speeds.items()},
            "ratio": spread([mine / other for mine, other in pairs]),
        }
        print(name, result["cases"][name])
    engine.close()
    return result | {"machine": describe_machine(["torch", "transformers"])}


def render(result: Json) -> None:
    """Write the table."""
    rows = []
    for name, case in result["cases"].items():
        speeds, ratio = case["tokens_per_cpu_second"], case["ratio"]
        rows.append(
            [
                name,
                f"{speeds['hlat']['median']:.0f}",
                f"{speeds['transformers']['median']:.0f}",
                f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
            ]
        )
    head = ["tokens per CPU second", "hlat", "transformers", "ratio"]
    text = f"{table(head, rows)}\n\n{machine(result)}"
    write_between(DOCUMENT, "generate", text)


def main() -> None:
    """Measure, and render."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args()
    if not arguments.render:
        RESULT.write_text(json.dumps(measure(arguments.repetitions), indent=1) + "\n")
    render(json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main()
