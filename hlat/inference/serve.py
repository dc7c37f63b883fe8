"""Serve a model over HTTP: `hlat serve`.

    run, checkpoint, average or Hugging Face directory -> engine -> OpenAI's API and a chat page

On a machine with a GPU and vLLM, vLLM serves an export of the model. Otherwise one process of hlat
decodes the requests in a batch. See docs/generate.md.
"""

import argparse
import contextlib
import errno
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.argument_parser import CommandLineParser, parse_number, run_and_exit, run_command
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.distributed import rank_environment

if TYPE_CHECKING:
    from types import FrameType

    from hlat.inference.text_generator import TextGenerator

_EXAMPLES = """\
examples:
  hlat serve runs/x                      the newest checkpoint, at http://127.0.0.1:8000
  hlat serve runs/x step=200 port=8001
  hlat serve exported                    a Hugging Face directory
  hlat serve exported backend=hlat       without vLLM, also on a machine that has it

Open the address in a browser for the chat page. A program uses it like OpenAI's API:
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "def main(", "max_tokens": 64}'
Ctrl-C stops the server after the running requests. See docs/generate.md."""

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of Nvidia's and AMD's drivers."""
_FINISH_LIMIT_S = 20
"""Time for generations to finish after a signal; a second signal ends them."""
_STOP_TIMEOUT_S = 2
"""Further time for requests to end with an error, and for the engine."""
_STOP_MESSAGE = f"finishing generations, at most {_FINISH_LIMIT_S} s; Ctrl-C ends them now\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; return the exit code."""
    parser = _build_parser()
    arguments = parser.parse(argv)
    _validate_overrides(parser, arguments.overrides)
    return run_command(lambda: _serve(arguments), None, "stopped")


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        "serve",
        "Serve a model with OpenAI's HTTP API and a chat page, on this machine only.",
        _EXAMPLES,
        takes_overrides=True,
    )
    add = parser.add_argument
    parser.add_model()
    overrides = "hardware, parallelism, engine, compiler, precision"
    add("overrides", nargs="*", metavar="OVERRIDE", help=overrides)
    add(
        "--port",
        type=_parse_port,
        default=8000,
        metavar="N",
        help="0: any free port; default: 8000",
    )
    host = "address to listen at; others than 127.0.0.1 are reachable without a password"
    add("--host", default="127.0.0.1", metavar="HOST", help=host)
    backend = "vllm if it is installed and the machine has a GPU (default: auto)"
    add("--backend", choices=["auto", "vllm", "hlat"], default="auto", help=backend)
    add("--name", metavar="NAME", help="name of the model in the API (default: of the directory)")
    return parser


def _validate_overrides(parser: CommandLineParser, overrides: list[str]) -> None:
    from hlat.inference.inference_config import OVERRIDABLE_GROUPS, parse_config_group

    for word in overrides:
        if "=" not in word or parse_config_group(word) not in OVERRIDABLE_GROUPS:
            parser.error_unknown(word)


def _serve(arguments: argparse.Namespace) -> ExitCode | int:
    name = arguments.name or Path(arguments.source).resolve().name
    if arguments.host not in _LOOPBACK_HOSTS:
        print(
            f"WARNING: host={arguments.host} lets other machines use the model without a password",
            file=sys.stderr,
        )
    if _should_use_vllm(arguments.backend):
        return _serve_with_vllm(arguments, name)
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"hlat serve needs {' and '.join(missing)}: pip install 'hlat[serve]'")
    from hlat.inference import model_source
    from hlat.inference.inference_config import build_inference_config
    from hlat.inference.text_generator import open_text_generator

    source = model_source.find_model(
        arguments.source, arguments.step, arguments.tokenizer, arguments.ema
    )
    config = build_inference_config(source, arguments.overrides)
    if rank_environment.must_launch_workers(config):
        raise ConfigError(
            f"hlat serve uses one process, and the layout needs {config.num_processes}; remove the "
            "overrides of hardware and parallelism, or serve an export with vLLM"
        )
    print(f"loading {source.location}", file=sys.stderr, flush=True)
    with open_text_generator(source, config) as generator:
        return _run_server(generator, name, arguments.host, arguments.port)


def _run_server(generator: "TextGenerator", name: str, host: str, port: int) -> ExitCode:
    """Serve until SIGINT or SIGTERM."""
    import uvicorn

    from hlat.inference.generation_queue import GenerationQueue
    from hlat.inference.openai_app import build_app

    generations = GenerationQueue(generator)

    class Server(uvicorn.Server):
        """Server that ends the generations after a signal, so that their responses end."""

        def handle_exit(self, sig: int, frame: "FrameType | None") -> None:
            is_first = not self.should_exit
            generations.stop(_FINISH_LIMIT_S if is_first else 0)
            self.should_exit = True  # uvicorn's method would drop responses or raise the signal
            if is_first:
                with contextlib.suppress(OSError):  # Ctrl-C also ends `tee`, which reads stderr
                    os.write(sys.stderr.fileno(), _STOP_MESSAGE.encode())

    app = build_app(generator, generations, name, is_local=host in _LOOPBACK_HOSTS)
    server = Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_FINISH_LIMIT_S + _STOP_TIMEOUT_S,
        )
    )
    with _open_socket(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        print(
            f"serving {name} at http://{shown}:{listener.getsockname()[1]}  (Ctrl-C stops)",
            flush=True,
        )
        server.run(sockets=[listener])
    if not generations.join(_STOP_TIMEOUT_S):
        sys.stdout.flush()
        os._exit(ExitCode.FINISHED)  # the engine computes a long prompt
    return ExitCode.FINISHED


def _open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise ConfigError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        remedy = (
            "; port=0 uses a free port" if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        )
        raise ConfigError(f"host={host} port={port} cannot be used ({error}){remedy}") from error


def _should_use_vllm(backend: str) -> bool:
    """Return True if vLLM serves the model; raise ConfigError if backend=vllm is not possible."""
    if backend == "hlat":
        return False
    problems = []
    if shutil.which("vllm") is None:
        problems.append("the command vllm is not installed")
    if not any(Path(device).exists() for device in _GPU_DEVICES):
        problems.append("the machine has no GPU")
    if backend == "vllm" and problems:
        raise ConfigError(f"backend=vllm: {' and '.join(problems)}; use backend=hlat")
    return not problems


def _serve_with_vllm(arguments: argparse.Namespace, name: str) -> ExitCode | int:
    """Run vLLM on the model, which is exported first unless it is a Hugging Face directory."""
    from hlat.inference import model_metadata

    if arguments.overrides:
        raise ConfigError(
            f"vLLM has its own layout; remove {' '.join(arguments.overrides)}, or use backend=hlat"
        )
    with tempfile.TemporaryDirectory(prefix="hlat-serve-") as directory:
        path = Path(arguments.source).expanduser()
        if not model_metadata.is_hugging_face_dir(path):
            path = Path(directory, "model")
            code = subprocess.call(_build_export_command(arguments, path))
            if code:
                return code
        command = ["vllm", "serve", str(path), "--served-model-name", name]
        print(f"serving {name} with vLLM", flush=True)
        with subprocess.Popen(
            [*command, "--host", arguments.host, "--port", str(arguments.port)]
        ) as server:
            # The terminal sends Ctrl-C to vLLM as well, which then stops
            previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda *_: server.terminate())
            code = server.wait()
            signal.signal(signal.SIGINT, previous)
        return ExitCode.FINISHED if code in (0, -signal.SIGINT, -signal.SIGTERM) else code


def _build_export_command(arguments: argparse.Namespace, output: Path) -> list[str]:
    settings = {"step": arguments.step, "tokenizer": arguments.tokenizer, "output": output}
    words = [f"{key}={value}" for key, value in settings.items() if value is not None]
    words += ["ema=true"] if arguments.ema else []
    return [sys.executable, "-m", "hlat.export", arguments.source, *words]


def _parse_port(text: str) -> int:
    port = int(parse_number(text, integer=True, positive=False))
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535")
    return port


if __name__ == "__main__":
    run_and_exit(main)
