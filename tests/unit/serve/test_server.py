"""The server with a generator that repeats its prompt: API, errors, queue, page."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'hlat[serve]'")
import httpx
import uvicorn

from hlat.config.config_errors import ConfigError
from hlat.evaluate.chat_format import ChatFormat
from hlat.generate.text_generator import Completion, SamplingSettings
from hlat.serve import generation_queue
from hlat.serve.generation_queue import GenerationQueue
from hlat.serve.openai_app import MAX_BODY_BYTES, build_app

CONTEXT_LENGTH = 32


class FakeGenerator:
    """Generator of the prompt in capitals, with characters as tokens."""

    context_length = CONTEXT_LENGTH

    def __init__(self) -> None:
        self.chat_format = ChatFormat("template")
        self.may_continue = threading.Event()
        self.may_continue.set()
        self.settings: list[SamplingSettings] = []
        self.num_active = self.num_cancelled = 0

    def encode(self, prompt: str) -> list[str]:
        if len(prompt) >= CONTEXT_LENGTH:
            raise ConfigError("the prompt is too long")
        return list(prompt)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[str]:
        return self.encode("".join(f"{m['role'][0]}:{m['content']};" for m in messages))

    def stream(
        self,
        prompt: list[str],
        settings: SamplingSettings,
        on_text: Callable[[str], None],
        is_cancelled: Callable[[], bool],
    ) -> Completion:
        assert self.num_active == 0, "one text at a time"
        self.num_active += 1
        self.settings.append(settings)
        parts = [character.upper() for character in prompt][: settings.max_tokens]
        for number, part in enumerate(parts):
            if part == "!":
                raise OSError("a broken engine")
            on_text(part)
            while not self.may_continue.wait(0.01):
                if is_cancelled():
                    break
            if is_cancelled():
                self.num_cancelled += 1
                parts = parts[: number + 1]
                break
        self.num_active -= 1
        reason = "length" if len(parts) == settings.max_tokens else "stop"
        return Completion("".join(parts), reason, len(prompt), len(parts))


class RunningServer:
    """Running server and its client."""

    def __init__(self) -> None:
        self.generator = FakeGenerator()
        self.queue = GenerationQueue(self.generator)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = build_app(self.generator, self.queue, "m")
        self.server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        )
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(f"/v1/{path}", json=body)

    def read_stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        events = self.post(path, stream=True, **body).text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def close(self) -> None:
        self.client.close()
        self.queue.stop()
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    served = RunningServer()
    yield served
    served.close()


@pytest.fixture
def served(shared: RunningServer) -> RunningServer:
    shared.generator.settings.clear()
    shared.generator.num_cancelled = 0
    return shared


def test_list_the_model(served: RunningServer) -> None:
    answer = served.client.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [(m["id"], m["max_model_len"]) for m in answer["data"]] == [("m", CONTEXT_LENGTH)]
    assert served.client.get("/v1/models/m").json()["id"] == "m"
    assert served.client.get("/v1/models/x").json()["error"]["code"] == "model_not_found"
    assert served.client.get("/health").status_code == 200


def test_complete_prompts(served: RunningServer) -> None:
    answer = served.post("completions", model="m", prompt=["abc", "d" * 20]).json()
    assert answer["object"] == "text_completion"
    choices = [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]]
    assert choices == [(0, "ABC", "stop"), (1, "D" * 16, "length")]
    assert answer["usage"] == {"prompt_tokens": 23, "completion_tokens": 19, "total_tokens": 42}


def test_complete_a_chat(served: RunningServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]
    answer = served.post("chat/completions", messages=messages).json()
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "S:X;U:AB;"}


def test_settings_reach_the_generator(served: RunningServer) -> None:
    body = {"temperature": 0, "top_p": 0.5, "seed": 3, "stop": "x", "max_tokens": 9}
    served.post("completions", prompt="a", **body)
    served.post("completions", prompt="a", stop=["y", "z"], user="me", n=1, logprobs=None)
    first, second = served.generator.settings
    assert first == SamplingSettings(9, 0.0, 0.5, 3, ("x",))
    assert second == SamplingSettings(16, 1.0, 1.0, second.seed, ("y", "z"))
    assert second.seed != 0


def test_stream_a_completion(served: RunningServer) -> None:
    options = {"include_usage": True}
    chunks = served.read_stream("completions", prompt=["ab", "c"], stream_options=options)
    *texts, usage = chunks
    found = [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in texts]
    assert found == [(0, "A"), (0, "B"), (0, ""), (1, "C"), (1, "")]
    assert [c["choices"][0]["finish_reason"] for c in texts] == [None, None, "stop", None, "stop"]
    assert usage["usage"]["total_tokens"] == 6
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_stream_a_chat(served: RunningServer) -> None:
    messages = [{"role": "user", "content": "a"}]
    chunks = served.read_stream("chat/completions", messages=messages)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:] == [{"content": c} for c in "U:A;"] + [{}]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", {"prompt": "a", "model": "x"}, 404, "the model 'x' does not exist; this server has 'm'"),
        ("completions", {"prompt": "a", "n": 2}, 400, "n=2 is not supported"),
        ("completions", {"prompt": "a", "logprobs": 1}, 400, "logprobs=1 is not supported"),
        ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature=3 is not a number from 0 to 2"),
        ("completions", {"prompt": "a", "temperature": True}, 400, "temperature=True is not a number"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0 is not a whole number above 0"),
        ("completions", {"prompt": "a", "stop": [1]}, 400, "stop is not a text"),
        ("completions", {"prompt": [1, 2]}, 400, "prompt is not a text or a list of texts"),
        ("completions", {"prompt": []}, 400, "prompt has 0 texts"),
        ("completions", {"prompt": "a" * 99}, 400, "the prompt is too long"),
        ("completions", {"prompt": "a" * 99, "stream": True}, 400, "the prompt is too long"),
        ("chat/completions", {}, 400, "messages is not a list"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0] has no texts"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]"),
        ("chat/completions", {"messages": [{"role": "u", "content": "a"}], "tools": [{}]}, 400, "tools=[{}] is not"),
        ("completions", {"prompt": "!"}, 500, "the generation failed (OSError)"),
        ("nothing", {}, 404, "POST /v1/nothing: Not Found"),
        ("models", {}, 405, "Method Not Allowed"),
    ],
)  # fmt: skip
def test_errors_have_the_format_of_openai(
    served: RunningServer, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = served.post(path, **body)
    served.generator.num_active = 0
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["type"] == ("server_error" if status == 500 else "invalid_request_error")
    assert error.keys() == {"message", "type", "param", "code"}


def test_other_bodies_are_rejected(served: RunningServer) -> None:
    url, kind = "/v1/completions", {"content-type": "application/json"}
    assert served.client.post(url, content=b"{", headers=kind).status_code == 400
    assert served.client.post(url, content=b"[]", headers=kind).status_code == 400
    assert served.client.post(url, content=b"[" * 100_000, headers=kind).status_code == 400
    large = b" " * (MAX_BODY_BYTES + 1)
    assert served.client.post(url, content=large, headers=kind).status_code == 413
    plain = {"content-type": "text/plain"}
    assert served.client.post(url, content=b'{"prompt": "a"}', headers=plain).status_code == 415


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", ""])
def test_other_host_names_are_rejected(served: RunningServer, host: str) -> None:
    answer = served.client.get("/v1/models", headers={"host": host})
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


def test_error_within_a_stream_is_its_last_event(served: RunningServer) -> None:
    text = served.post("completions", prompt="a!", stream=True).text
    served.generator.num_active = 0
    events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-1]]
    assert events[0]["choices"][0]["text"] == "A"
    assert events[1]["error"]["message"] == "the generation failed (OSError)"


def test_concurrent_requests_are_serialized(served: RunningServer) -> None:
    def request_text(prompt: str) -> str:
        return served.post("completions", prompt=prompt).json()["choices"][0]["text"]

    prompts = [f"p{i}" for i in range(12)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert [*pool.map(request_text, prompts)] == [prompt.upper() for prompt in prompts]


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_requests_are_cancelled_if_the_client_disconnects(served: RunningServer) -> None:
    generator = served.generator
    generator.may_continue.clear()
    try:
        with served.client.stream(
            "POST", "/v1/completions", json={"prompt": "abc", "stream": True}
        ) as one:
            assert next(one.iter_lines()).startswith("data: ")
        _wait_for(lambda: generator.num_cancelled == 1)
        with pytest.raises(httpx.ReadTimeout):
            served.client.post("/v1/completions", json={"prompt": "abc"}, timeout=0.2)
        _wait_for(lambda: generator.num_cancelled == 2)
    finally:
        generator.may_continue.set()
    assert served.post("completions", prompt="d").json()["choices"][0]["text"] == "D"


def test_excess_requests_are_rejected_and_a_stop_cancels_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation_queue, "MAX_WAITING", 1)
    served = RunningServer()
    served.generator.may_continue.clear()
    with ThreadPoolExecutor(2) as pool:
        responses = []
        for number in (1, 2):
            responses.append(pool.submit(served.post, "completions", prompt="abc"))
            _wait_for(lambda: len(served.generator.settings) + served.queue._jobs.qsize() == number)  # noqa: B023
        answer = served.post("completions", prompt="abc")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        served.queue.stop()
        first, second = (one.result(timeout=20) for one in responses)
    assert first.json()["choices"][0]["text"] == "A"
    assert served.queue.join(20)
    served.close()
    assert not served.thread.is_alive()
    assert second.json()["error"]["message"] == "the server stops"
