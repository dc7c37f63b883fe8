"""Compare generated tokens per CPU-second with transformers, with the same weights.

Usage: OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/evaluation/generate.py
       PYTHONPATH=. python benchmarks/evaluation/generate.py --render   (from generate.json)

Both run alternately in this process in fp32, each with its KV cache. Weights are random and all
outputs have the maximum length, so the time does not depend on the tokens. Greedy outputs must be
equal. Seconds are CPU time of the single thread, because it does not depend on other load.
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
from hlat.inference.inference_model import InferenceModel
from hlat.model.families import hugging_face_config

HERE = Path(__file__).resolve().parent
RESULT, DOCUMENT = HERE / "generate.json", HERE / "README.md"
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
SAMPLING = {"temperature": 0.8, "top_p": 0.95}


def build_engine() -> tuple[Config, Engine]:
    """Build a model with random weights."""
    register_configs()
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        config = resolve_config(compose("config", SHAPE))
    engine = create_engine(config)
    engine.build(config, training=False)
    return config, engine


def build_peer(config: Config, engine: Engine) -> Any:
    """Build the model of transformers with the weights of `engine`."""
    settings = hugging_face_config.build_hf_config(config.model, 1024, 0, Dtype.fp32)
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
    weights = {
        shard.name.removeprefix("weights/"): shard.tensor.detach().reshape(shard.shape)
        for shard in engine.state_shards()
        if shard.name.startswith("weights/")
    }
    peer.load_state_dict(weights)
    return peer.eval()


def generate_ours(engine: Engine, prompts: list[list[int]], do_sample: bool) -> list[list[int]]:
    """Generate tokens with hlat."""
    repeated = prompts * (NUM_SAMPLES if do_sample else 1)
    settings: Any = SAMPLING if do_sample else {}
    return InferenceModel(engine).generate(
        repeated, NEW_TOKENS, is_finished=lambda tokens: False, **settings
    )


@torch.inference_mode()
def generate_peer(peer: Any, prompts: list[list[int]], do_sample: bool) -> list[list[int]]:
    """Generate tokens with transformers, with left padding."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    settings: Json = {"do_sample": False}
    if do_sample:
        settings = {"do_sample": True, "top_k": 0, "num_return_sequences": NUM_SAMPLES} | SAMPLING
    output = peer.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    return output[:, width:].tolist()


def timed(generate: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Return tokens per second and the outputs."""
    start = time.process_time()
    outputs = generate()
    return sum(map(len, outputs)) / (time.process_time() - start), outputs


def measure(repetitions: int) -> Json:
    """Measure all cases; the two alternate, and the first round is a warm-up."""
    config, engine = build_engine()
    peer = build_peer(config, engine)
    generator = np.random.default_rng(0)
    result: Json = {"shape": SHAPE, "new_tokens": NEW_TOKENS, "cases": {}}
    for name, lengths in CASES.items():
        do_sample = "samples" in name
        prompts = [generator.integers(0, 4096, length).tolist() for length in lengths]
        speeds: dict[str, list[float]] = {"hlat": [], "transformers": []}
        for repetition in range(repetitions + 1):
            speed, outputs = timed(lambda: generate_ours(engine, prompts, do_sample))  # noqa: B023
            peer_speed, expected = timed(lambda: generate_peer(peer, prompts, do_sample))  # noqa: B023
            if not do_sample and outputs != expected:
                raise SystemExit(f"{name}: the greedy outputs differ")
            if repetition:
                speeds["hlat"].append(speed)
                speeds["transformers"].append(peer_speed)
        pairs = zip(speeds["hlat"], speeds["transformers"], strict=True)
        result["cases"][name] = {
            "tokens_per_cpu_second": {key: spread(values) for key, values in speeds.items()},
            "ratio": spread([ours / theirs for ours, theirs in pairs]),
        }
        print(name, result["cases"][name])
    engine.close()
    return result | {"machine": describe_machine(["torch", "transformers"])}


def render(result: Json) -> None:
    """Write the table into README.md."""
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args()
    if not arguments.render:
        RESULT.write_text(json.dumps(measure(arguments.repetitions), indent=1) + "\n")
    render(json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main()
