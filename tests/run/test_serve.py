"""The server of a trained run, as a process and in a browser."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'hlat[serve]'")
import httpx

from hlat.generate import __main__ as generate
from hlat.serve import __main__ as serve
from tests.run.conftest import PYTHONPATH, Runner, call_command
from tests.unit.report.test_browser import CHROMIUM, Tab

pytestmark = pytest.mark.slow  # starts a server and loads a model


@pytest.fixture
def server(uninterrupted: Runner) -> Iterator["subprocess.Popen[str]"]:
    """Start a server of the small run; its address is the attribute `url`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hlat", "serve", "runs/whole", "port=0"],
        cwd=uninterrupted.folder,
        env={"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(r"serving whole at (http://127.0.0.1:\d+)  \(Ctrl-C stops\)\n", line)
    if match is None:
        process.kill()
        pytest.fail(f"{line}{process.communicate()[1]}")
    process.url = match[1]  # type: ignore[attr-defined]
    yield process
    process.kill()
    process.communicate()


def test_serve_a_run_until_ctrl_c(server, uninterrupted: Runner) -> None:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        [model] = client.get("/v1/models").json()["data"]
        assert model["id"] == "whole"
        body = {"prompt": "def main(", "temperature": 0, "max_tokens": 8}
        [choice] = client.post("/v1/completions", json=body).json()["choices"]
        arguments = ("runs/whole", "def main(", "temperature=0", "max_tokens=8")
        done = call_command(generate.main, uninterrupted.folder, *arguments)
        assert done.out == f"def main({choice['text']}\n"
        body = {"prompt": "a", "max_tokens": 60, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
            since = time.monotonic()
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 0
            assert time.monotonic() - since < 10
    assert "Traceback" not in server.stderr.read()


def test_the_port_in_use_is_reported(server, uninterrupted: Runner) -> None:
    port = server.url.rpartition(":")[2]
    done = call_command(serve.main, uninterrupted.folder, "runs/whole", f"port={port}")
    assert done.code == 2
    assert f"port={port} cannot be used" in done.err
    assert "port=0 uses a free port" in done.err


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt install chromium)")
def test_the_page_continues_text_in_a_browser(server, tmp_path: Path) -> None:
    tab = Tab(tmp_path)
    try:
        for width, dark in ((1000, False), (390, True)):
            tab.open(server.url, width=width, dark=dark)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert "has no chat template" in tab.evaluate("document.body.innerText")
        tab.evaluate("document.getElementById('max-tokens').value = 12")
        tab.evaluate("document.getElementById('input').focus()")
        tab("Input.insertText", text="def main(<b>")
        tab("Input.dispatchKeyEvent", type="keyDown", key="Enter")
        tab.wait("document.querySelector('#messages article > span:last-child')?.textContent")
        tab.wait("!document.getElementById('send').disabled")
        shown = tab.evaluate("document.querySelector('#messages article .prompt').textContent")
        assert shown == "def main(<b>"
        assert tab.evaluate("document.querySelectorAll('#messages b').length") == 0
        tab.evaluate("document.getElementById('max-tokens').value = 0")
        tab("Input.insertText", text="x")
        tab("Input.dispatchKeyEvent", type="keyDown", key="Enter")
        error = "document.querySelector('#messages article.error')"
        tab.wait(f"!!{error}")
        assert "max_tokens=0 is not a whole number above 0" in tab.evaluate(f"{error}.innerText")
        tab.evaluate("document.getElementById('reset').click()")
        assert tab.evaluate("document.getElementById('messages').childElementCount") == 0
    finally:
        tab.close()


def test_vllm_serves_an_export_on_a_machine_with_a_gpu(
    uninterrupted: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Replace vLLM by a program that prints its arguments and the exported files."""
    command = tmp_path / "vllm"
    command.write_text('#!/bin/sh\necho "$@"\nls "$2"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(serve, "_GPU_DEVICES", (str(tmp_path / "gpu"),))
    monkeypatch.chdir(uninterrupted.folder)
    assert serve.main(["runs/whole", "port=8001", "step=20"]) == 0
    shown = capfd.readouterr().out
    assert re.search(
        r"^serve \S+ --served-model-name whole --host 127.0.0.1 --port 8001$", shown, re.M
    )
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {*shown.split()}
    monkeypatch.setattr(serve, "_GPU_DEVICES", ())
    assert serve.main(["runs/whole", "backend=vllm"]) == 2
    assert "backend=vllm: the machine has no GPU; use backend=hlat" in capfd.readouterr().err
