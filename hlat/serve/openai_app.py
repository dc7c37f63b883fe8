"""ASGI application with OpenAI's API for one model, and a chat page at `/`."""

import asyncio
import json
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hlat.config.config_errors import ConfigError
from hlat.generate.text_generator import Completion, TextGenerator
from hlat.serve import chat_page
from hlat.serve.completion_requests import CompletionRequest, RequestError, parse_request
from hlat.serve.generation_queue import GenerationQueue, UnavailableError

MAX_BODY_BYTES = 8 << 20
_DISCONNECT_POLL_S = 0.5
_LOCAL_HOSTS = ("127.0.0.1", "localhost")


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
        self._render_page = cache(
            lambda: chat_page.render_chat_page(model, generator.chat_format.template is not None)
        )

    async def show_page(self, request: Request) -> Response:
        headers = {
            "Content-Security-Policy": chat_page.CONTENT_SECURITY_POLICY,
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
        body = await _read_json(request)
        parsed = parse_request(body, self._model, is_chat, self._generator.context_length)
        prompts = self._encode(parsed, is_chat)
        answer = _Answer(self._model, is_chat)
        if parsed.stream:
            chunks = self._stream(answer, parsed, prompts)
            first = await anext(chunks)  # an error before the first text is an HTTP error
            return StreamingResponse(_chain(first, chunks), media_type="text/event-stream")
        completions = [
            await _run_while_connected(request, self._collect(prompt, parsed)) for prompt in prompts
        ]
        return JSONResponse(answer.build_response(completions))

    def _encode(self, parsed: CompletionRequest, is_chat: bool) -> list[list[int]]:
        try:
            if is_chat:
                return [self._generator.encode_chat(parsed.messages)]
            return [self._generator.encode(prompt) for prompt in parsed.prompts]
        except ConfigError as error:
            param = "messages" if is_chat else "prompt"
            raise RequestError(str(error), param, code="context_length_exceeded") from error

    async def _collect(self, prompt: list[int], parsed: CompletionRequest) -> Completion:
        async for item in self._generate(prompt, parsed):
            if isinstance(item, Completion):
                return item
        raise AssertionError("a generation ends with its completion")

    async def _stream(
        self, answer: "_Answer", parsed: CompletionRequest, prompts: list[list[int]]
    ) -> AsyncIterator[str]:
        """Yield server-sent events."""
        completions = []
        for index, prompt in enumerate(prompts):
            generation = self._generate(prompt, parsed)
            item = await anext(generation)
            if answer.is_chat:
                yield _format_event(answer.build_chunk(index, role="assistant"))
            while not isinstance(item, Completion):
                yield _format_event(answer.build_chunk(index, text=item))
                item = await anext(generation)
            yield _format_event(answer.build_chunk(index, finish_reason=item.finish_reason))
            completions.append(item)
        if parsed.include_usage:
            yield _format_event(answer.build_usage_chunk(completions))
        yield "data: [DONE]\n\n"

    async def _generate(
        self, prompt: list[int], parsed: CompletionRequest
    ) -> AsyncIterator[str | Completion]:
        try:
            async for item in self._generations.generate(prompt, parsed.settings):
                yield item
        except UnavailableError as error:
            raise RequestError(str(error), status=503, code="overloaded") from error


class _Answer:
    """JSON of the answers to one request."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self.is_chat = is_chat
        prefix, kind = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def build_response(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the response to a request without `stream`."""
        choices = [
            {
                "index": index,
                **(
                    {"message": {"role": "assistant", "content": completion.text}}
                    if self.is_chat
                    else {"text": completion.text}
                ),
                "logprobs": None,
                "finish_reason": completion.finish_reason,
            }
            for index, completion in enumerate(completions)
        ]
        return self._head | {"choices": choices, "usage": _build_usage(completions)}

    def build_chunk(
        self,
        index: int,
        text: str | None = None,
        finish_reason: str | None = None,
        role: str | None = None,
    ) -> dict[str, Any]:
        """Return a part of a streamed response."""
        if self.is_chat:
            delta = {"role": role, "content": ""} if role else {}
            content: dict[str, Any] = {"delta": delta if text is None else {"content": text}}
        else:
            content = {"text": text or ""}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
        return self._build_chunk_head() | {"choices": [choice]}

    def build_usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the last part of a streamed response, with the number of tokens."""
        return self._build_chunk_head() | {"choices": [], "usage": _build_usage(completions)}

    def _build_chunk_head(self) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self.is_chat else {})


def _build_usage(completions: Sequence[Completion]) -> dict[str, int]:
    prompt_tokens = sum(completion.num_prompt_tokens for completion in completions)
    completion_tokens = sum(completion.num_tokens for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


async def _read_json(request: Request) -> Any:
    """Return the JSON body of a request.

    Another content type is rejected, since pages of other origins may send it without the consent
    of this server (CORS).
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RequestError("Content-Type is not application/json", status=415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON ({error})") from error


async def _run_while_connected(
    request: Request, work: Coroutine[Any, Any, Completion]
) -> Completion:
    """Return the result of `work`, which is cancelled if the client disconnects."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                raise ClientDisconnect
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
        yield _format_event(error.to_json())
    except Exception as error:
        traceback.print_exc()
        yield _format_event(_build_failure(error).to_json())


def _format_event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


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
