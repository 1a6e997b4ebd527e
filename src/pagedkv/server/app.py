"""The server's endpoints."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pagedkv._version import __version__
from pagedkv.engine.detokenizer import TokenTexts
from pagedkv.errors import BrokenLaw, InvalidInput
from pagedkv.server.answers import Ask
from pagedkv.server.chat import chat_answer, chat_ask, chat_events, chat_prompt
from pagedkv.server.chat_schema import ChatRequest
from pagedkv.server.completion_schema import CompletionRequest
from pagedkv.server.completions import (
    completion_answer,
    completion_ask,
    completion_events,
    completion_prompts,
)
from pagedkv.server.errors import ApiError, answer_api_error, from_invalid_input, json_response
from pagedkv.server.event_stream import EventStream, watched
from pagedkv.server.exchange import ClientLeft, Exchange
from pagedkv.server.logprob_shapes import TokenNames
from pagedkv.server.prompts import PromptReader
from pagedkv.server.sampling_schema import SamplingFields
from pagedkv.server.serving import Serving


def create_app(serving: Serving) -> FastAPI:
    """The application of a server that answers with `serving`; `app.state.serving` is it."""
    app = FastAPI(title="pagedkv", version=__version__, docs_url=None, redoc_url=None)
    app.state.serving = serving
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_failure)
    reader = PromptReader(
        serving.llm.tokenizer,
        max_tokens=serving.limits.max_prompt_tokens or serving.llm.max_model_len,
    )
    names = None
    if serving.llm.tokenizer is not None:
        names = TokenNames(TokenTexts(serving.llm.tokenizer))
    add_generation(app, serving, reader, names)
    add_looks(app, serving)
    return app


def add_generation(
    app: FastAPI, serving: Serving, reader: PromptReader, names: TokenNames | None
) -> None:
    """The endpoints that generate."""

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        arrived_s = time.perf_counter()
        check_model(body, serving)
        ask = chat_ask(body, serving.limits.max_answers)
        prompt = await chat_prompt(body, reader)
        exchange = begun(serving, [prompt], ask, body, arrived_s)
        if not body.stream:
            async with watched(request.receive, exchange):
                requests = await ended(exchange, body)
            return json_response(chat_answer(requests, ask, serving.model_name, names))
        await accepted(exchange, request, body)
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        events = chat_events(exchange, ask, serving.model_name, names, has_usage=has_usage)
        return EventStream(events, exchange)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arrived_s = time.perf_counter()
        check_model(body, serving)
        ask = completion_ask(body, serving.limits.max_answers)
        prompts, texts = await completion_prompts(body, reader)
        exchange = begun(serving, prompts, ask, body, arrived_s)
        if not body.stream:
            async with watched(request.receive, exchange):
                requests = await ended(exchange, body)
            return json_response(
                completion_answer(body, requests, texts, ask, serving.model_name, names)
            )
        await accepted(exchange, request, body)
        events = completion_events(body, exchange, texts, ask, serving.model_name, names)
        return EventStream(events, exchange)


def add_looks(app: FastAPI, serving: Serving) -> None:
    """The endpoints that look at the server."""

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(serving)]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if model != serving.model_name:
            raise _no_such_model(model, serving)
        return json_response(_model(serving))

    @app.get("/health")
    async def health() -> Response:
        serving.check_open()
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/debug/verify")
    async def verify() -> Response:
        try:
            await serving.verify()
        except BrokenLaw as broken:
            return json_response({"verified": False, "laws": broken.laws}, status=500)
        return json_response({"verified": True, "laws": []})


def check_model(body: SamplingFields, serving: Serving) -> None:
    """Raise `ApiError` 404 for another model than the one that is served."""
    if body.model is not None and body.model != serving.model_name:
        raise _no_such_model(body.model, serving)


def begun(
    serving: Serving, prompts: list[list[int]], ask: Ask, body: SamplingFields, arrived_s: float
) -> Exchange:
    """The exchange with the engine for a request. Raises `ApiError`."""
    return serving.exchange(
        prompts,
        ask.params,
        namespace=body.namespace,
        is_streamed=bool(body.stream),
        arrived_s=arrived_s,
    )


async def ended(exchange: Exchange, body: SamplingFields) -> list[Any]:
    """The finished requests of an exchange that is not streamed. Raises `ApiError`."""
    try:
        return await exchange.finished()
    except InvalidInput as refusal:
        raise from_invalid_input(refusal, type(body).model_fields) from None


async def accepted(exchange: Exchange, request: Request, body: SamplingFields) -> None:
    """Wait until the engine has taken a stream's prompts, so that a refusal has its status."""
    try:
        await exchange.accepted()
    except InvalidInput as refusal:
        raise from_invalid_input(refusal, type(body).model_fields) from None


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.created_s,
        "owned_by": "pagedkv",
        "max_model_len": serving.llm.max_model_len,
    }


def _no_such_model(model: str, serving: Serving) -> ApiError:
    return ApiError(
        404,
        f"there is no model {model!r}: {serving.model_name!r} is served",
        param="model",
        code="model_not_found",
    )


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    """A body that the schema refuses, by its first mistake."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place) or None
    problem = str(first["msg"])
    if first["type"] == "extra_forbidden":
        problem = "there is no such field, and it could change the result: leave it out"
    message = f"{param}: {problem}" if param else problem
    return ApiError(400, message[:500], param=None if param is None else param[:200]).response()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    made = ApiError(error.status_code, message).response()
    made.headers.update(error.headers or {})
    return made


async def _answer_failure(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientLeft):
        return Response(status_code=499)
    return ApiError(500, "the server failed").response()
