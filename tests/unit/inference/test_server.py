"""The server with a generator that repeats its prompt: API, errors, queue, page."""

import asyncio
import json
import os
import signal
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
from starlette.requests import Request

from hlat.config.config_errors import ConfigError
from hlat.inference import generation_queue, openai_app, serve
from hlat.inference.chat_format import ChatFormat
from hlat.inference.completion_requests import RequestError
from hlat.inference.decode_batch import DecodeSequence, ScoredToken
from hlat.inference.generation_queue import GenerationQueue
from hlat.inference.openai_app import MAX_BODY_BYTES, build_app
from hlat.inference.openai_responses import ResponseFormat
from hlat.inference.sampling_settings import SamplingSettings
from hlat.inference.text_generator import PromptTooLongError

CONTEXT_LENGTH = 32
END = 0


class FakeTokenizer:
    """Tokenizer with characters as tokens."""

    end_token_ids, file, vocab_size = frozenset({END}), "/secret/tokenizer.json", 128

    def encode(self, text: str, is_prompt_start: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids)).replace("\0", "" if skip_special_tokens else "<end>")

    def find_special_token_ids(self, texts: tuple[str, ...]) -> frozenset[int]:
        return frozenset()


class FakeBatch:
    """Batch that continues each prompt with its capitals."""

    def __init__(self, generator: "FakeGenerator") -> None:
        self.generator, self.sequences = generator, []

    def has_room(self, sequence: DecodeSequence) -> bool:
        return len(self.sequences) < self.generator.batch_size

    def add(self, sequence: DecodeSequence) -> tuple[list[ScoredToken], ScoredToken | None]:
        if sequence.prompt == [ord("?")]:
            raise OSError("a broken engine")
        self.generator.added.append(sequence)
        self.generator.calls.append("add")
        self.sequences.append(sequence)
        scores = [ScoredToken(token, -1.0, {token: -1.0}) for token in sequence.prompt]
        scores[0] = ScoredToken(sequence.prompt[0])
        return scores if sequence.num_top else [], self._extend(sequence)

    def step(self) -> list[tuple[DecodeSequence, ScoredToken]]:
        self.generator.may_continue.wait(0.01)
        if not self.generator.may_continue.is_set():
            return []
        self.generator.calls.append("step")
        return [(sequence, self._extend(sequence)) for sequence in list(self.sequences)]

    def remove(self, sequence: DecodeSequence) -> None:
        if sequence in self.sequences:
            self.sequences.remove(sequence)
            self.generator.num_removed += 1

    def _extend(self, sequence: DecodeSequence) -> ScoredToken | None:
        ids = [*sequence.prompt, END][len(sequence.tokens) :]
        if not sequence.max_tokens:
            return None
        if ids[0] == ord("!"):
            raise OSError("a broken engine")
        token = ord(chr(ids[0]).upper())
        sequence.tokens.append(token)
        if len(sequence.tokens) == sequence.max_tokens:
            self.sequences.remove(sequence)
        top = {token: -0.5, ord("z"): -2.0} if sequence.num_top else {}
        return ScoredToken(token, -0.5, top)


class FakeGenerator:
    """Generator with a fake batch."""

    context_length = CONTEXT_LENGTH

    def __init__(self, batch_size: int = 4) -> None:
        self.chat_format = ChatFormat("template")
        self.tokenizer, self.batch_size = FakeTokenizer(), batch_size
        self.may_continue = threading.Event()
        self.may_continue.set()
        self.added: list[DecodeSequence] = []
        self.calls: list[str] = []
        self.num_removed = 0

    def create_batch(self) -> FakeBatch:
        return FakeBatch(self)

    def encode(self, prompt: str) -> list[int]:
        if len(prompt) >= CONTEXT_LENGTH:
            raise PromptTooLongError("the prompt is too long")
        if prompt == "~":
            raise ConfigError(f"{self.tokenizer.file} cannot encode a text")
        return self.tokenizer.encode(prompt)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"{m['role'][0]}:{m['content']};" for m in messages))


class RunningServer:
    """Running server and its client."""

    def __init__(self, batch_size: int = 4) -> None:
        self.generator = FakeGenerator(batch_size)
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
        self.queue.stop(0)
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    served = RunningServer()
    yield served
    served.close()


@pytest.fixture
def served(shared: RunningServer) -> RunningServer:
    shared.generator.added.clear()
    shared.generator.calls.clear()
    shared.generator.num_removed = 0
    return shared


def test_list_the_model(served: RunningServer) -> None:
    answer = served.client.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [(m["id"], m["max_model_len"]) for m in answer["data"]] == [("m", CONTEXT_LENGTH)]
    assert served.client.get("/v1/models/m").json()["id"] == "m"
    assert served.client.get("/v1/models/x").json()["error"]["code"] == "model_not_found"
    assert served.client.get("/health").status_code == 200


def test_complete_prompts(served: RunningServer) -> None:
    answer = served.post("completions", model="m", prompt=["abc", "d" * 9], max_tokens=5).json()
    assert answer["object"] == "text_completion"
    choices = [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]]
    assert choices == [(0, "ABC", "stop"), (1, "D" * 5, "length")]
    assert answer["usage"] == {"prompt_tokens": 12, "completion_tokens": 9, "total_tokens": 21}


@pytest.mark.parametrize(
    ("prompt", "texts"), [([97, 98], ["AB"]), ([[97], [98, 99]], ["A", "BC"]), (["a", [98]], ["A", "B"])]
)  # fmt: skip
def test_complete_token_ids(served: RunningServer, prompt: list[Any], texts: list[str]) -> None:
    answer = served.post("completions", prompt=prompt).json()
    assert [choice["text"] for choice in answer["choices"]] == texts


def test_complete_a_chat(served: RunningServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]
    answer = served.post("chat/completions", messages=messages).json()
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "S:X;U:AB;"}


def test_several_texts_of_a_prompt(served: RunningServer) -> None:
    answer = served.post("completions", prompt=["ab", "c"], n=2, seed=5).json()
    assert [c["text"] for c in answer["choices"]] == ["AB", "AB", "C", "C"]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    found = [(one.prompt, one.seed, one.sample_id) for one in served.generator.added]
    assert found == [([97, 98], 5, 0), ([97, 98], 5, 1), ([99], 5, 0), ([99], 5, 1)]


def test_settings_reach_the_batch(served: RunningServer) -> None:
    body = {"temperature": 0, "top_p": 0.5, "seed": 3, "stop": "B", "max_tokens": 9}
    [choice] = served.post("completions", prompt="abc", **body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("A", "stop")
    neutral = {"n": 1, "logprobs": None, "top_k": -1, "best_of": 1, "min_p": 0, "unknown": None}
    served.post("completions", prompt="a", user="me", max_completion_tokens=7, **neutral)
    served.post("completions", prompt="a")
    first, second, third = served.generator.added
    assert (first.max_tokens, first.temperature, first.top_p, first.seed) == (9, 0.0, 0.5, 3)
    default = SamplingSettings()
    assert (second.max_tokens, second.top_p, second.num_top) == (7, default.top_p, None)
    assert third.temperature == default.temperature
    assert third.max_tokens == CONTEXT_LENGTH - 1 < default.max_tokens
    assert second.seed != third.seed


def test_scores_of_prompt_and_text(served: RunningServer) -> None:
    settings = {"max_tokens": 2, "echo": True, "logprobs": 1}
    [choice] = served.post("completions", prompt="abc", **settings).json()["choices"]
    assert choice["text"] == "abcAB"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["a", "b", "c", "A", "B"]
    assert scores["text_offset"] == [0, 1, 2, 3, 4]
    assert scores["token_logprobs"] == [None, -1, -1, -0.5, -0.5]
    top = [None, {"b": -1}, {"c": -1}, {"A": -0.5, "z": -2}, {"B": -0.5, "z": -2}]
    assert scores["top_logprobs"] == top
    chunks = served.read_stream("completions", prompt="abc", **settings)
    streamed = [chunk["choices"][0]["logprobs"] or {} for chunk in chunks]
    for key, values in scores.items():
        assert [value for part in streamed for value in part.get(key, [])] == values
    [choice] = served.post("completions", prompt="ab", max_tokens=0, echo=True).json()["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("ab", None, "length")


def test_scores_of_a_chat(served: RunningServer) -> None:
    settings = {"max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    messages = [{"role": "user", "content": "a"}]
    answer = served.post("chat/completions", messages=messages, **settings).json()
    [score] = answer["choices"][0]["logprobs"]["content"]
    first = {"token": "U", "logprob": -0.5, "bytes": [85]}
    assert score == first | {
        "top_logprobs": [first, {"token": "z", "logprob": -2.0, "bytes": [122]}]
    }


def test_stream_a_completion(served: RunningServer) -> None:
    options = {"include_usage": True}
    chunks = served.read_stream("completions", prompt="ab", stream_options=options)
    *texts, usage = chunks
    found = [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in texts]
    assert found == [(0, "A"), (0, "B"), (0, "")]
    assert [c["choices"][0]["finish_reason"] for c in texts] == [None, None, "stop"]
    assert usage["usage"]["total_tokens"] == 5
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_texts_of_a_stream_appear_at_the_same_time(served: RunningServer) -> None:
    chunks = served.read_stream("completions", prompt=["abcd", "efgh"])
    found = [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks]
    assert found.index((1, "E")) < found.index((0, "C"))
    for index, text in enumerate(("ABCD", "EFGH")):
        assert "".join(part for i, part in found if i == index) == text


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
        ("completions", {"prompt": "a", "n": 0}, 400, "n=0 is not 1 to 128"),
        ("completions", {"prompt": ["a"] * 65, "n": 2}, 400, "65 prompts with n=2 are 130 completions"),
        ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs=21 is not a whole number from 0 to 20"),
        ("completions", {"prompt": "a", "logprobs": True}, 400, "logprobs=True is not a whole number"),
        ("completions", {"prompt": "a", "best_of": 2}, 400, "best_of=2 is not supported"),
        ("completions", {"prompt": "a", "top_k": 5}, 400, "top_k=5 is not supported"),
        ("completions", {"prompt": "a", "min_p": 0.1}, 400, "min_p=0.1 is not supported"),
        ("completions", {"prompt": "a", "repetition_penalty": 1.1}, 400, "repetition_penalty=1.1 is not supported"),
        ("completions", {"prompt": "a", "mx_tokens": 5}, 400, "mx_tokens=5 is not supported"),
        ("completions", {"prompt": "a", "messages": []}, 400, "messages=[] is not supported"),
        ("completions", {"prompt": "a", "stream_options": {"x": 1}}, 400, "stream_options.'x' is not supported"),
        ("completions", {"prompt": "a", "max_completion_tokens": 0}, 400, "max_completion_tokens=0 is not"),
        ("completions", {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}, 400, "differ; give one"),
        ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p=0 is not a number above 0"),
        ("completions", {"prompt": "a", "stop": "x" * 1001}, 400, "stop has a text of 1001 characters; use at most 1000"),
        ("completions", {"prompt": "a", "n": "x" * 1000}, 400, "xxx... is not 1 to 128"),
        ("completions", {"prompt": "~"}, 400, "the tokenizer cannot encode a text"),
        ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature=3 is not a number from 0 to 2"),
        ("completions", {"prompt": "a", "temperature": True}, 400, "temperature=True is not a number"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0 is not a whole number of 1 or more"),
        ("completions", {"prompt": "a", "stop": [1]}, 400, "stop is not a text"),
        ("completions", {"prompt": {}}, 400, "prompt is no text, list of token ids, or list of these"),
        ("completions", {"prompt": [1, 128]}, 400, "prompt has 128, which is no token id; use 0 to 127"),
        ("completions", {"prompt": [[1], [True]]}, 400, "prompt has True, which is no token id"),
        ("completions", {"prompt": [1] * 32}, 400, "the prompt has 32 tokens, and the context of the model 32"),
        ("completions", {"prompt": [[]]}, 400, "prompt is an empty list of token ids"),
        ("completions", {"prompt": []}, 400, "0 prompts with n=1"),
        ("completions", {"prompt": "a" * 99}, 400, "the prompt is too long"),
        ("completions", {"prompt": "a" * 99, "stream": True}, 400, "the prompt is too long"),
        ("chat/completions", {}, 400, "messages is not a list"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0] has no texts"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]"),
        ("chat/completions", {"messages": [{"role": "u", "content": "a"}], "tools": [{}]}, 400, "tools=[{}] is not"),
        ("chat/completions", {"messages": [{"role": "u", "content": "a"}], "top_logprobs": 1}, 400, "needs logprobs=true"),
        ("completions", {"prompt": "?"}, 500, "the generation failed (OSError)"),
        ("completions", {"prompt": "!"}, 500, "the generation failed (OSError)"),
        ("nothing", {}, 404, "POST /v1/nothing: Not Found"),
        ("models", {}, 405, "Method Not Allowed"),
    ],
)  # fmt: skip
def test_errors_have_the_format_of_openai(
    served: RunningServer, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = served.post(path, **body)
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
    for content in (b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}'):
        assert served.client.post(url, content=content, headers=kind).status_code == 400
    for content in (b'{"prompt": "\\ud800"}', b'{"model": "\\udfff", "prompt": "a"}'):
        answer = served.client.post(url, content=content, headers=kind)
        assert answer.status_code == 400
        assert "an unpaired surrogate" in answer.json()["error"]["message"]
    other_case = {"content-type": "Application/JSON; charset=utf-8"}
    assert served.client.post(url, content=b'{"prompt": "a"}', headers=other_case).is_success
    plain = {"content-type": "text/plain"}
    assert served.client.post(url, content=b'{"prompt": "a"}', headers=plain).status_code == 415


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", ""])
def test_other_host_names_are_rejected(served: RunningServer, host: str) -> None:
    answer = served.client.get("/v1/models", headers={"host": host})
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


def test_error_within_a_stream_is_its_last_event(served: RunningServer) -> None:
    text = served.post("completions", prompt="a!", stream=True).text
    events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-1]]
    assert events[0]["choices"][0]["text"] == "A"
    assert events[1]["error"]["message"] == "the generation failed (OSError)"


def test_concurrent_requests_share_a_batch(served: RunningServer) -> None:
    def request_text(prompt: str) -> str:
        return served.post("completions", prompt=prompt).json()["choices"][0]["text"]

    prompts = [f"p{i}" for i in range(12)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert [*pool.map(request_text, prompts)] == [prompt.upper() for prompt in prompts]


def test_texts_continue_between_two_prompts(served: RunningServer) -> None:
    body = {"prompt": ["a" * 20, *["b"] * 9], "max_tokens": 1}
    assert served.post("completions", **body).is_success
    assert served.generator.calls.count("add") == 10
    assert "add add" not in " ".join(served.generator.calls)


def test_the_server_answers_while_a_response_is_encoded(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_end = threading.Event(), threading.Event()
    encode = ResponseFormat.encode_response

    def wait(*arguments: Any) -> bytes:
        started.set()
        assert may_end.wait(10)
        return encode(*arguments)

    monkeypatch.setattr(ResponseFormat, "encode_response", wait)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.post, "completions", prompt="a")
        assert started.wait(10)
        assert served.client.get("/health", timeout=5).is_success
        may_end.set()
        assert answer.result().json()["choices"][0]["text"] == "A"


def test_client_that_disconnects_within_the_body_is_no_failure() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(RequestError) as error:
        asyncio.run(openai_app._read_body(Request(scope, receive)))
    assert error.value.status == 499


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_generations_of_clients_that_disconnect_leave_queue_and_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_app, "_DISCONNECT_POLL_S", 0.05)
    served = RunningServer(batch_size=1)
    generator = served.generator
    generator.may_continue.clear()
    with served.client.stream(
        "POST", "/v1/completions", json={"prompt": "abc", "stream": True}
    ) as one:
        lines = one.iter_lines()
        assert next(lines).startswith("data: ")
        for stream in (False, True):
            body = {"prompt": "waits", "n": 2, "stream": stream}
            with pytest.raises(httpx.ReadTimeout):
                served.client.post("/v1/completions", json=body, timeout=0.2)
        _wait_for(lambda: not served.queue._waiting)
        assert (len(generator.added), generator.num_removed) == (1, 0)
    _wait_for(lambda: generator.num_removed == 1)
    generator.may_continue.set()
    assert served.post("completions", prompt="d").json()["choices"][0]["text"] == "D"
    served.close()


def test_excess_requests_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_queue, "MAX_WAITING", 1)
    served = RunningServer(batch_size=1)
    served.generator.may_continue.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(served.post, "completions", prompt="abc")
        _wait_for(lambda: len(served.generator.added) == 1)
        second = pool.submit(served.post, "completions", prompt="d")
        _wait_for(lambda: len(served.queue._waiting) == 1)
        answer = served.post("completions", prompt="abc")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        served.generator.may_continue.set()
        texts = [one.result(timeout=20).json()["choices"][0]["text"] for one in (first, second)]
    assert texts == ["ABC", "D"]
    served.close()


@pytest.mark.parametrize("limit_s", [20, 0])
def test_generations_finish_after_a_stop_or_are_errors_after_its_limit(limit_s: float) -> None:
    served = RunningServer(batch_size=2)
    served.generator.may_continue.clear()
    with ThreadPoolExecutor(3) as pool:
        responses = []
        for number, stream in enumerate((False, True), 1):
            responses.append(pool.submit(served.post, "completions", prompt="abc", stream=stream))
            _wait_for(lambda: len(served.generator.added) == number)  # noqa: B023
        responses.append(pool.submit(served.post, "completions", prompt="waits"))
        _wait_for(lambda: len(served.queue._waiting) == 1)
        served.queue.stop(limit_s)
        waiting = responses.pop().result(timeout=20)
        late = served.post("completions", prompt="late")
        served.generator.may_continue.set()
        plain, stream = (one.result(timeout=20) for one in responses)
    for rejected in (waiting, late):
        assert rejected.status_code == 503
        assert (
            rejected.json()["error"]["message"] == "the server was stopped before this completion"
        )
        assert rejected.json()["error"]["code"] == "server_stopped"
    if limit_s:
        assert plain.json()["choices"][0]["text"] == "ABC"
        assert stream.text.endswith("data: [DONE]\n\n")
    else:
        message = "the server was stopped after 1 tokens of this completion"
        assert (plain.status_code, plain.json()["error"]["message"]) == (503, message)
        assert json.loads(stream.text.split("data: ")[-1])["error"]["message"] == message
    assert served.queue.join(20)
    served.close()
    assert not served.thread.is_alive()


def test_texts_finish_after_a_signal_if_standard_error_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C also ends the program that reads the output, such as `tee`."""
    generator = FakeGenerator()
    generator.may_continue.clear()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
    monkeypatch.setattr(serve, "_open_socket", lambda *_: listener)

    def write(descriptor: int, content: bytes) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(serve.os, "write", write)

    def stop() -> None:
        _wait_for(lambda: len(generator.added) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        generator.may_continue.set()

    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(httpx.post, url, json={"prompt": "abc"}, trust_env=False)
        pool.submit(stop)
        assert serve._run_server(generator, "m", "127.0.0.1", 0) == 0
        assert answer.result().json()["choices"][0]["text"] == "ABC"
