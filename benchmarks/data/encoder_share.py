"""Measure the rate of hlat's loader relative to that of its encoder, alternately in one process.

Usage: PYTHONPATH=. python benchmarks/data/encoder_share.py SCRATCH LABEL [--rounds 15]

SCRATCH is the output of corpus.py. Each round reads the same number of tokens with the encoder
(raw.py) and with the loader, first one, then the other, after as many tokens of warm-up. The loader
does not prefetch, so that none of its work is counted as that of the encoder. Writes the rows of
LABEL, such as before or after, to encoder_share.json.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from contestants import Loader, load_module, make_settings

from benchmarks.common import describe_machine, spread

HERE = Path(__file__).resolve().parent
LIBRARIES = ["tokenizers", "gigatoken", "pyarrow", "numpy"]
LOADERS = {"fast": "ours, fast encoder", "reference": "ours"}
MILLION_TOKENS = {"fast": 3.0, "reference": 0.4}
"""Tokens of a round; a round needs about a tenth of a second or more."""
WARM_UP_ROUNDS = 5


def measure_cost(loader: Loader, tokens: float) -> float:
    """Return the CPU time per token in nanoseconds, of all threads of this process."""
    read, start = 0, time.process_time()
    while read < tokens:
        read += loader.next().size
    return (time.process_time() - start) / read * 1e9


def open_pair(encoder: str, scratch: Path, tokenizer: str, corpus: str) -> list[Loader]:
    """Return the encoder and the loader."""
    pair = []
    for name in (f"{encoder} encoder alone", LOADERS[encoder]):
        settings = make_settings(name, scratch, tokenizer=tokenizer, corpus=corpus)
        settings = replace(settings, options={**settings.options, "prefetch": 0})
        pair.append(load_module(settings).open_loader(settings))
    return pair


def measure(
    encoder: str, scratch: Path, tokenizer: str, corpus: str, rounds: int
) -> dict[str, Any]:
    """Return the cost per token of the encoder and the loader, and their ratio by round."""
    pair = open_pair(encoder, scratch, tokenizer, corpus)
    tokens = MILLION_TOKENS[encoder] * 1e6
    for loader in pair:
        measure_cost(loader, WARM_UP_ROUNDS * tokens)
    costs = [[measure_cost(loader, tokens) for loader in pair] for _ in range(rounds)]
    pair[1].close()
    alone, loaded = zip(*costs, strict=True)
    ratios = [a / b for a, b in costs]
    return {
        "encoder": encoder,
        "tokenizer": tokenizer,
        "corpus": corpus,
        "encoder_ns_per_token": spread(list(alone)),
        "loader_ns_per_token": spread(list(loaded)),
        "ratio": spread(ratios),
        "quartiles": [float(f"{q:.4g}") for q in statistics.quantiles(ratios, n=4)[::2]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("label")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=HERE / "encoder_share.json")
    arguments = parser.parse_args()
    rows = []
    for encoder in LOADERS:
        for tokenizer in ("bytes", "pieces"):
            for corpus in ("short", "long"):
                rows.append(
                    measure(encoder, arguments.scratch, tokenizer, corpus, arguments.rounds)
                )
                print(rows[-1], flush=True)
    output: Path = arguments.output
    result = json.loads(output.read_text()) if output.exists() else {}
    result[arguments.label] = {
        "machine": describe_machine(LIBRARIES),
        "corpora": json.loads((arguments.scratch / "corpus.json").read_text()),
        "rounds": arguments.rounds,
        "rows": rows,
    }
    output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
