"""Readers of command lines, foreign YAML, HTTP requests, and answers of Slurm."""

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from omegaconf import DictConfig

from hlat.config import compose, entry_point
from hlat.config.config_errors import ExitCode
from hlat.config.resolve import resolve_config
from hlat.jobs import job_table, slurm_commands
from hlat.jobs.campaign_file import load_campaign
from hlat.jobs.submission import Submission, create_submission_dir
from hlat.plan import __main__ as plan
from hlat.plan.feasibility import validate_feasibility
from hlat.report import report_server
from tests.fuzz.data_targets import serialize_rows
from tests.fuzz.fuzzer import Target
from tests.fuzz.mutations import either, mutate_bytes, mutate_text
from tests.fuzz.run_targets import ROW

NXDT_CONFIG = """\
model_source: megatron
name: llama_7b
trainer: {devices: 32, num_nodes: 4, max_steps: 1000, gradient_clip_val: 1.0}
distributed_strategy: {tensor_model_parallel_size: 8, sequence_parallel: true, zero1: true}
data:
  micro_batch_size: 1
  global_batch_size: 256
  seq_length: ${model.encoder_seq_length}
  data_prefix: [1.0, /text/book]
model:
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 11008
  num_attention_heads: 32
  normalization: rmsnorm
  activation: swiglu
  position_embedding_type: rope
  has_bias: false
  optim:
    name: adamw
    lr: 3e-4
    betas: [0.9, 0.95]
    sched: {name: CosineAnnealing, warmup_steps: 100, min_lr: 3e-5}
precision: {type: mixed_precision}
"""
EXPERIMENT = """\
# @package _global_
defaults:
  - override /precision: bf16
run: {name: x, steps: 10}
optimizer:
  lr: 1e-3
data:
  sources: {a: {paths: [a.arrow], weight: 0.5}}
model: {num_layers: 2, hidden_size: 64}
"""
CAMPAIGN = """\
name: desk
root: runs
train: [checkpoint.milestone_tokens=20480]
launcher: {slurm: {partition: trn1}}
stages:
  pretrain: {train: [run.steps=40]}
  upsample: {train: [], start_from: pretrain}
  average: {average: upsample, tokens: [102_400, 122_880]}
  scores: {evaluate: pretrain, every_tokens: 40_960, tasks: [piqa], data: questions}
  report: {report: all}
"""
OVERRIDES = [
    ["model=tiny", "optimizer.lr=1e-3", "run.name=x", "batch.global_batch_size=16"],
    ["model=7b", "precision=mixed", "parallelism.tp=8", "hardware=h100_p5", "compiler=inductor"],
    ["+data.sources={x: {paths: [a.arrow], weight: 0.5}}", "data.tokenizer=t.json"],
    ["schedule.total_steps=100", "checkpoint.every_steps=7", "run.seed=3", "phase=base"],
    ["optimizer={lr: 1e-3}", "model.attention.qk_norm=true", "recovery.max_restarts=1"],
]
SLOW = 4.0
"""Weight of readers that take 100 ms."""
JOBS = ("7", "7_2", "8")


def _read_overrides(_: Path, content: bytes) -> object:
    overrides = content.decode(errors="surrogateescape").split("\n")
    composed = compose.compose_config(overrides)
    config = resolve_config(composed)
    validate_feasibility(config)
    return config


def _read_experiment(directory: Path, content: bytes) -> object:
    """Compose a YAML file of a foreign directory, as the entry point does."""
    (directory / "experiment").mkdir(exist_ok=True)
    (directory / "experiment/foreign.yaml").write_bytes(content)
    arguments = ["hlat.train", "--config-dir", str(directory), "experiment=foreign"]

    def task(composed: DictConfig) -> ExitCode:
        validate_feasibility(resolve_config(composed))
        return ExitCode.FINISHED

    with mock.patch.object(sys, "argv", arguments):
        try:
            entry_point.run_entry_point(task)
        except SystemExit as error:
            code = error.code or 0
        else:
            code = 0
    assert code in (ExitCode.FINISHED, ExitCode.CONFIGURATION), f"exit code {code}"
    return code


def _read_nxdt(directory: Path, content: bytes) -> object:
    (directory / "nxdt.yaml").write_bytes(content)
    return plan._run_from_nxdt([str(directory / "nxdt.yaml")])


def _read_campaign(directory: Path, content: bytes) -> object:
    (directory / "campaign.yaml").write_bytes(content)
    return load_campaign(directory / "campaign.yaml")


_SERVERS: dict[Path, tuple[report_server.ReportServer, list[BaseException]]] = {}


def _start_server(directory: Path) -> list[bytes]:
    (directory / "metrics.jsonl").write_bytes(serialize_rows([ROW]))
    errors: list[BaseException] = []
    server = report_server.build_server(directory, 0)

    def handle_error(request: object, address: object) -> None:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            errors.append(error)

    server.handle_error = handle_error  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _SERVERS[directory] = server, errors
    host = f"Host: 127.0.0.1:{server.server_address[1]}\r\n".encode()
    return [
        b"GET / HTTP/1.1\r\n" + host + b"Accept: */*\r\nConnection: close\r\n\r\n",
        b"HEAD / HTTP/1.0\r\n" + host + b"\r\n",
        b"GET /x?y=1 HTTP/1.1\r\n" + host + b"Content-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\n" + host + b"Expect: 100-continue\r\n\r\n",
    ]


def _send_request(directory: Path, content: bytes) -> object:
    server, errors = _SERVERS[directory]
    address = server.server_address[:2]
    with socket.create_connection(("127.0.0.1", int(address[1])), timeout=5) as connection:
        answer = b""
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while block := connection.recv(1 << 16):
                answer += block
        except ConnectionError:
            pass
    if errors:
        raise errors.pop()
    is_page = answer.lower().startswith((b"http/1.", b"<!doctype"))  # HTTP/0.9 has no headers
    assert is_page or not answer, f"no answer of HTTP: {answer[:100]!r}"
    return answer


def _install_slurm(directory: Path) -> None:
    """Put programs on the PATH that print the file `answer` as Slurm's answer."""
    (directory / "bin").mkdir()
    for name in ("squeue", "sbatch", "scontrol", "scancel"):
        path = directory / "bin" / name
        path.write_text(f"#!/bin/sh\nexec cat {directory}/answer\n")
        path.chmod(0o755)
    os.environ["PATH"] = f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"


def _build_squeue(directory: Path) -> list[bytes]:
    _install_slurm(directory)
    for job in JOBS:
        submission_dir = create_submission_dir(directory / "runs" / job)
        submission_dir.save(Submission(1, [["x"]], True, {}, [], 9, 1))
        submission_dir.receipts.append({"job": job, "time": 1.0})
    return [
        b"7|RUNNING|node[1-2]|None\n7_2|PENDING||Priority\n8|COMPLETED|n1|None\n",
        b"",
        b"slurm_load_jobs error: Unable to contact slurm controller\n",
    ]


def _answer(read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def read_answer(directory: Path, content: bytes) -> object:
        (directory / "answer").write_bytes(content)
        return read(directory)

    return read_answer


def _read_squeue(directory: Path) -> object:
    rows = job_table.load_job_rows([directory / "runs" / job for job in JOBS])
    return job_table.format_job_table(rows)


def _read_sbatch(directory: Path) -> object:
    job_id = slurm_commands.submit_script(directory / "script.sh")
    assert job_id.isascii() and job_id.isdigit(), f"no job id: {job_id}"  # noqa: PT018
    return job_id


def _read_scontrol(_: Path) -> object:
    return slurm_commands.is_preempted("7")


def _build_answer(*answers: bytes) -> Callable[[Path], list[bytes]]:
    def set_up(directory: Path) -> list[bytes]:
        _install_slurm(directory)
        return [*answers]

    return set_up


_TEXT = either(mutate_text, mutate_bytes)
TARGETS = [
    Target(
        "overrides",
        lambda _: ["\n".join(words).encode() for words in OVERRIDES],
        _read_overrides,
        mutate_text,
        "",
        weight=SLOW,
    ),
    Target(
        "foreign_config", lambda _: [EXPERIMENT.encode()], _read_experiment, _TEXT, "", weight=SLOW
    ),
    Target("nxdt", lambda _: [NXDT_CONFIG.encode()], _read_nxdt, _TEXT, "nxdt.yaml", weight=SLOW),
    Target("campaign", lambda _: [CAMPAIGN.encode()], _read_campaign, _TEXT, "campaign.yaml"),
    Target("http", _start_server, _send_request, mutate_bytes, "", ()),
    Target("slurm_squeue", _build_squeue, _answer(_read_squeue), _TEXT, "squeue"),
    Target(
        "slurm_sbatch",
        _build_answer(b"123\n", b"123;cluster\n"),
        _answer(_read_sbatch),
        _TEXT,
        "sbatch",
    ),
    Target(
        "slurm_scontrol",
        _build_answer(b"JobId=7 PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=None\n"),
        _answer(_read_scontrol),
        _TEXT,
        "scontrol",
    ),
]
