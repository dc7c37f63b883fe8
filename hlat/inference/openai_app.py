"""ASGI application with OpenAI's API for one model, and a chat page at `/`."""

import asyncio
import base64
import hashlib
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hlat.config.config_errors import ConfigError
from hlat.figures.page_templates import render_page
from hlat.inference.completion_requests import (
    CompletionRequest,
    RequestError,
    parse_json_body,
    parse_request,
)
from hlat.inference.generation_queue import GenerationQueue, UnavailableError
from hlat.inference.openai_responses import ResponseFormat, Usage, format_event
from hlat.inference.sampling_settings import SamplingSettings
from hlat.inference.server_generation import Finish, GenerationRequest, TextPart
from hlat.inference.text_generator import PromptTooLongError, TextGenerator

T = TypeVar("T")
MAX_BODY_BYTES = 8 << 20
_DISCONNECT_POLL_S = 0.5
_CLIENT_CLOSED_REQUEST = 499
"""Status of nginx for a client that disconnects; no client reads it."""
_LOCAL_HOSTS = ("127.0.0.1", "localhost")
_DIRECTORY = Path(__file__).parent
_SCRIPT = (_DIRECTORY / "chat_page.js").read_text(encoding="utf-8")
_SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_SCRIPT_DIGEST}'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The chat page has its style and script in one file, and may connect to its own server only."""


def build_app(
    generator: TextGenerator, generations: GenerationQueue, model: str, is_local: bool = True
) -> Starlette:
    """Return the application for a model of the given name.

    With `is_local`, requests with another Host than this machine are rejected, which shows DNS
    rebinding.
    """
    api = _Api(generator, generations, model)
    hosts = [Middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL_HOSTS)] if is_local else []
    return Starlette(
        routes=[
            Route("/", api.show_page),
            Route("/health", api.show_health),
            Route("/v1/models", api.list_models),
            Route("/v1/models/{name:path}", api.show_model),
            Route("/v1/completions", api.complete, methods=["POST"]),
            Route("/v1/chat/completions", api.complete_chat, methods=["POST"]),
        ],
        middleware=hosts,
        exception_handlers={
            RequestError: _respond_to_request_error,
            HTTPException: _respond_to_http_exception,
            Exception: _respond_to_failure,
        },
    )


class _Api:
    """Handlers of the requests."""

    def __init__(self, generator: TextGenerator, generations: GenerationQueue, model: str) -> None:
        self._generator, self._generations, self._model = generator, generations, model
        self._created = int(time.time())
        self._parser_thread = ThreadPoolExecutor(1, "parser")
        """One thread, because a tokenizer has a state while it encodes special tokens."""
        self._render_page = cache(
            lambda: render_chat_page(model, generator.chat_format.template is not None)
        )

    async def show_page(self, request: Request) -> Response:
        headers = {
            "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
            "Cache-Control": "no-store",
        }
        return HTMLResponse(self._render_page(), headers=headers)

    async def show_health(self, request: Request) -> Response:
        return Response()

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def show_model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self._model:
            raise RequestError(
                f"the model {name!r} does not exist", "model", 404, "model_not_found"
            )
        return JSONResponse(self._describe_model())

    async def complete(self, request: Request) -> Response:
        return await self._respond(request, is_chat=False)

    async def complete_chat(self, request: Request) -> Response:
        return await self._respond(request, is_chat=True)

    def _describe_model(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "hlat",
            "max_model_len": self._generator.context_length,
        }

    async def _respond(self, request: Request, is_chat: bool) -> Response:
        body = await _read_body(request)
        parsed, prompts = await self._run_in_thread(self._parse, body, is_chat)
        generations = [
            GenerationRequest(prompt, parsed.settings, index, parsed.num_top, parsed.echo)
            for prompt in prompts
            for index in range(parsed.num_samples)
        ]
        answer = ResponseFormat(self._model, is_chat, parsed.num_top is not None)
        num_prompt_tokens = sum(map(len, prompts))
        if parsed.stream:
            events = self._stream(answer, generations, num_prompt_tokens, parsed.include_usage)
            # An error before the first text is an HTTP error
            first = await _run_while_connected(request, anext(events))
            return StreamingResponse(_chain(first, events), media_type="text/event-stream")
        work = self._collect(answer, generations, num_prompt_tokens)
        content = await _run_while_connected(request, work)
        return Response(content, media_type="application/json")

    async def _run_in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that would block the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._parser_thread, function, *arguments)

    def _parse(self, body: bytes, is_chat: bool) -> tuple[CompletionRequest, list[list[int]]]:
        """Return the request of a body, and the token ids of its prompts."""
        generator = self._generator
        limits = generator.context_length, generator.tokenizer.vocab_size
        parsed = parse_request(parse_json_body(body), self._model, is_chat, *limits)
        try:
            if is_chat:
                return parsed, [generator.encode_chat(parsed.messages)]
            return parsed, [
                generator.encode(prompt) if isinstance(prompt, str) else prompt
                for prompt in parsed.prompts
            ]
        except PromptTooLongError as error:
            param = "messages" if is_chat else "prompt"
            raise RequestError(str(error), param, code="context_length_exceeded") from error
        except ConfigError as error:  # without the path of the server
            message = str(error).replace(str(generator.tokenizer.file), "the tokenizer")
            raise RequestError(message, "messages" if is_chat else "prompt") from error

    async def _collect(
        self, answer: ResponseFormat, generations: list[GenerationRequest], num_prompt_tokens: int
    ) -> bytes:
        """Return the response with all completions."""
        parts: list[list[TextPart]] = [[] for _ in generations]
        reasons = ["" for _ in generations]
        num_tokens = 0
        async for index, item in self._generate(generations):
            if isinstance(item, TextPart):
                parts[index].append(item)
            else:
                reasons[index] = item.reason
                num_tokens += item.num_tokens
        completions = list(zip(parts, reasons, strict=True))
        usage = Usage(num_prompt_tokens, num_tokens)
        # In a thread, because log-probabilities of long prompts are megabytes of JSON
        return await asyncio.to_thread(answer.encode_response, completions, usage)

    async def _stream(
        self,
        answer: ResponseFormat,
        generations: list[GenerationRequest],
        num_prompt_tokens: int,
        include_usage: bool,
    ) -> AsyncIterator[str]:
        """Yield server-sent events."""
        started, num_tokens = set(), 0
        async for index, item in self._generate(generations):
            if answer.is_chat and index not in started:
                started.add(index)
                yield format_event(answer.build_role_chunk(index))
            if isinstance(item, TextPart):
                yield format_event(answer.build_chunk(index, item))
            else:
                num_tokens += item.num_tokens
                yield format_event(answer.build_finish_chunk(index, item.reason))
        if include_usage:
            yield format_event(answer.build_usage_chunk(Usage(num_prompt_tokens, num_tokens)))
        yield "data: [DONE]\n\n"

    async def _generate(
        self, generations: list[GenerationRequest]
    ) -> AsyncIterator[tuple[int, TextPart | Finish]]:
        try:
            async for item in self._generations.generate(generations):
                yield item
        except UnavailableError as error:
            raise RequestError(str(error), status=503, code=error.code) from error


async def _read_body(request: Request) -> bytes:
    """Return the body of a request.

    Another content type is rejected, since pages of other origins may send it without the consent
    of this server (CORS).
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type.lower() != "application/json":
        raise RequestError("Content-Type is not application/json", status=415)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise RequestError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    except ClientDisconnect as error:
        raise _build_disconnect_error() from error
    return bytes(body)


async def _run_while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                raise _build_disconnect_error()
        return task.result()
    finally:
        task.cancel()


async def _chain(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the events of a stream; an error becomes the last one."""
    yield first
    try:
        async for event in rest:
            yield event
    except RequestError as error:
        yield format_event(error.to_json())
    except Exception as error:
        traceback.print_exc()
        yield format_event(_build_failure(error).to_json())


def _build_disconnect_error() -> RequestError:
    return RequestError("the client has disconnected", status=_CLIENT_CLOSED_REQUEST)


def _build_failure(error: Exception) -> RequestError:
    return RequestError(f"the generation failed ({type(error).__name__})", status=500)


async def _respond_to_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.to_json(), error.status)


async def _respond_to_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(
        RequestError(message, status=error.status_code).to_json(), error.status_code
    )


async def _respond_to_failure(request: Request, error: Exception) -> Response:
    return JSONResponse(_build_failure(error).to_json(), 500)


def render_chat_page(model: str, has_chat_template: bool) -> str:
    """Return the chat page for a model that answers messages, or only continues text."""
    return render_page(
        _DIRECTORY / "templates/chat_page.html.j2",
        model=model,
        has_chat_template=has_chat_template,
        settings=SamplingSettings(),
        script=_SCRIPT,
    )
