"""Measure `hlat serve` with 1, 20 and 200 clients at the same time.

Usage: PYTHONPATH=. python benchmarks/serving/run.py [--peer CHECKOUT]
       PYTHONPATH=. python benchmarks/serving/run.py --render   (from result.json)

Each client requests one streamed text. The server is a process on the same machine, with a model of
4 layers of width 256 after one training step. With --peer, the server of another checkout answers
the same requests alternately. Times are seconds of wall clock at the client.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, spread, table, write_between

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
RESULT, DOCUMENT = HERE / "result.json", HERE / "README.md"
Json = dict[str, Any]
SHAPE = [
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.intermediate_size=704",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
]
TRAINING = [
    *("run.root=runs", "run.name=x", "run.steps=1", "batch.global_batch_size=2"),
    *("batch.sequence_length=256", "evaluation.sequences_per_source=2"),
]
CLIENTS = (1, 20, 200)
NUM_TOKENS = 64


@dataclass
class Answer:
    """Status of a response, and the times of its events after the request."""

    status: int = 0
    times: list[float] = field(default_factory=list)


async def request_text(port: int, client: int) -> Answer:
    """Request a text of NUM_TOKENS tokens as a stream."""
    prompt = f"def function_{client}("
    body = json.dumps(
        {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    )
    head = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    start, answer = time.perf_counter(), Answer()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
    answer.status = int((await reader.readline()).split()[1])
    while answer.status == 200:
        line = await reader.readline()
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: "):
            answer.times.append(time.perf_counter() - start)
    writer.close()
    return answer


async def request_texts(port: int, num_clients: int) -> Json:
    """Return the results of clients that all start now."""
    start = time.perf_counter()
    answers = await asyncio.gather(*(request_text(port, i) for i in range(num_clients)))
    seconds = time.perf_counter() - start
    served = [answer for answer in answers if answer.status == 200]
    # A part can have several tokens, and the last event has no text
    per_token = [(a.times[-1] - a.times[0]) / (NUM_TOKENS - 1) for a in served]
    return {
        "served": len(served),
        "refused": sum(answer.status == 503 for answer in answers),
        "tokens_per_second": len(served) * NUM_TOKENS / seconds,
        "seconds_per_token": sum(per_token) / len(per_token),
        "seconds_to_first_token": sum(a.times[0] for a in served) / len(served),
        "seconds_until_last": seconds,
    }


@contextmanager
def run_server(checkout: Path, directory: Path) -> Iterator[int]:
    """Serve the run from a checkout, in its environment if it has one, and return the port."""
    own = checkout / ".venv/bin/python"
    process = subprocess.Popen(
        [own if own.exists() else sys.executable, "-m", "hlat", "serve", "runs/x", "port=0"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        match = re.search(r"http://127.0.0.1:(\d+)", process.stdout.readline())
        assert match is not None, "the server did not start"
        yield int(match[1])
    finally:
        process.terminate()
        process.wait()


def measure(repetitions: int, peer: Path | None) -> Json:
    """Measure the servers alternately; the first round is a warm-up."""
    servers = {"hlat": CHECKOUT} | ({"peer": peer} if peer else {})
    found: dict[str, dict[int, list[Json]]] = {name: {n: [] for n in CLIENTS} for name in servers}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        command = [sys.executable, "-m", "hlat", "train", *SHAPE, *TRAINING]
        subprocess.run(
            command, cwd=directory, env=os.environ | {"PYTHONPATH": str(CHECKOUT)}, check=True
        )
        ports = {
            name: stack.enter_context(run_server(checkout, Path(directory)))
            for name, checkout in servers.items()
        }
        for repetition in range(repetitions + 1):
            for num_clients in CLIENTS:
                for name, port in ports.items():
                    result = asyncio.run(request_texts(port, num_clients))
                    if repetition:
                        found[name][num_clients].append(result)
    results = {
        name: {
            str(num_clients): {key: spread([row[key] for row in rows]) for key in rows[0]}
            for num_clients, rows in by_clients.items()
        }
        for name, by_clients in found.items()
    }
    settings = {"shape": SHAPE, "tokens": NUM_TOKENS, "repetitions": repetitions}
    libraries = ["torch", "starlette", "uvicorn"]
    return settings | {"results": results, "machine": describe_machine(libraries)}


def render(result: Json) -> None:
    """Write the table into README.md."""
    header = ["clients", "server", "served", "refused (503)", "ms per token", "s to first token"]
    names = {"hlat": "a batch", "peer": "one text at a time"}
    rows = []
    for num_clients in map(str, CLIENTS):
        for name, by_clients in result["results"].items():
            medians = {key: value["median"] for key, value in by_clients[num_clients].items()}
            rows.append(
                [
                    num_clients,
                    names[name],
                    f"{medians['served']:.0f}",
                    f"{medians['refused']:.0f}",
                    f"{1e3 * medians['seconds_per_token']:.1f}",
                    f"{medians['seconds_to_first_token']:.2f}",
                    f"{medians['tokens_per_second']:.0f}",
                ]
            )
    text = (
        f"{table([*header, 'tokens/s of all'], rows)}\n\n"
        f"Medians of {result['repetitions']} repetitions "
        f"([script](run.py)), streams of {result['tokens']} tokens, 4 layers "
        f"of width 256. {machine(result)}"
    )
    write_between(DOCUMENT, "serving", text)


def main() -> None:
    """Measure, and write result.json and the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args()
    if not arguments.render:
        result = measure(arguments.repetitions, arguments.peer)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    render(json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main()
