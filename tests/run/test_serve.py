"""The server of a trained run, as a process and in a browser."""

import json
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

import hlat
from hlat import export
from hlat.inference import generate, serve
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


def test_waiting_texts_end_with_an_error_at_sigterm(server) -> None:
    body = {"prompt": ["a"] * 64, "n": 2, "max_tokens": 60, "stream": True}
    with (
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        server.send_signal(signal.SIGTERM)
        events = [line for line in lines if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "server_stopped"
    assert server.wait(20) == 0


SCORED = [("def main(", "x)"), ("été 木", "木😀"), ("a", " b\n\n")]


def test_log_likelihoods_equal_those_of_the_run(server, uninterrupted: Runner) -> None:
    """Send the requests of lm-evaluation-harness, as token ids."""
    run = hlat.load_run(uninterrupted.folder / "runs/whole")
    with (
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
        run.load_model() as model,
    ):
        ids = [[model.tokenizer.encode(text) for text in pair] for pair in SCORED]
        body = {"prompt": [a + b for a, b in ids], "echo": True, "logprobs": 1, "max_tokens": 1}
        answer = client.post("/v1/completions", json=body | {"temperature": 0, "seed": 1234})
        for choice, (context, continuation) in zip(answer.json()["choices"], ids, strict=True):
            scores = choice["logprobs"]
            found = scores["token_logprobs"][len(context) : -1]
            [(expected, is_greedy)] = model.model.score([(context, continuation)])
            assert len(found) == len(continuation)
            assert sum(found) == pytest.approx(expected, abs=1e-5)
            most = [max(top.values()) for top in scores["top_logprobs"][len(context) : -1]]
            assert (found == most) == is_greedy
            assert "".join(scores["tokens"]) == choice["text"]


def test_the_harness_evaluates_through_the_server(server, uninterrupted: Runner) -> None:
    pytest.importorskip("tenacity", reason="tenacity is not installed: pip install 'lm_eval[api]'")
    openai_completions = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    exported = call_command(export.main, uninterrupted.folder, "runs/whole", "output=served")
    assert exported.code == 0, exported.err
    settings = {"tokenizer": str(uninterrupted.folder / "served"), "max_length": 64}
    url = f"{server.url}/v1/completions"
    harness = openai_completions.LocalCompletionsAPI(url, model="whole", **settings)
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in SCORED]
    found = harness.loglikelihood(requests)
    until = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    [text] = harness.generate_until([Instance("generate_until", {}, ("def main(", until), 0)])
    with hlat.load_run(uninterrupted.folder / "runs/whole").load_model() as model:
        expected = model.model.score([harness._encode_pair(*pair) for pair in SCORED])
        assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], abs=1e-5)
        assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
        assert text == model.generate("def main(", 8, temperature=0, stop="\n\n")


def test_the_client_of_openai(server) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        settings = {"model": "whole", "max_tokens": 6, "seed": 3, "n": 2}
        texts = client.completions.create(prompt="é木", logprobs=2, echo=True, **settings).choices
        assert [choice.text[:2] for choice in texts] == ["é木", "é木"]
        assert all("".join(choice.logprobs.tokens) == choice.text for choice in texts)
        messages = [{"role": "user", "content": "a"}]
        settings |= {"logprobs": True, "top_logprobs": 3}
        chat = client.chat.completions.create(messages=messages, **settings)
        assert [len(choice.logprobs.content) for choice in chat.choices] == [6, 6]
        parts = ["", ""]
        for chunk in client.chat.completions.create(messages=messages, stream=True, **settings):
            for choice in chunk.choices:
                parts[choice.index] += choice.delta.content or ""
        assert parts == [choice.message.content for choice in chat.choices]
        with pytest.raises(
            openai.BadRequestError, match=r"frequency_penalty=1[.]5 is not supported"
        ):
            client.completions.create(model="whole", prompt="a", frequency_penalty=1.5)


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
        assert "max_tokens=0 is not a whole number of 1 or more" in tab.evaluate(
            f"{error}.innerText"
        )
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
