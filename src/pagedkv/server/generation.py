"""The endpoints that generate."""

from __future__ import annotations

import functools
import time
from typing import Any

from fastapi import FastAPI, Request, Response

from pagedkv.errors import InvalidInput
from pagedkv.server.access_log import Outcome, RequestNote
from pagedkv.server.answers import Ask, Heading, usage
from pagedkv.server.chat import chat_answer, chat_ask, chat_events, chat_heading, chat_prompt
from pagedkv.server.chat_schema import ChatRequest
from pagedkv.server.completion_schema import CompletionRequest
from pagedkv.server.completions import (
    completion_answer,
    completion_ask,
    completion_events,
    completion_heading,
    completion_prompts,
)
from pagedkv.server.errors import ApiError, from_invalid_input, json_response
from pagedkv.server.event_stream import EventStream, watched
from pagedkv.server.exchange import ClientLeft, Exchange
from pagedkv.server.logprob_shapes import TokenNames
from pagedkv.server.prompts import PromptReader
from pagedkv.server.sampling_schema import SamplingFields
from pagedkv.server.serving import Serving


def add_generation(
    app: FastAPI, serving: Serving, reader: PromptReader, names: TokenNames | None
) -> None:
    """The endpoints that generate."""

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        arrived_s = time.perf_counter()
        serving.check_model(body.model)
        heading = chat_heading(body, serving.model_name)
        _name(request, heading)
        ask = chat_ask(body, serving.limits.max_answers)
        with serving.arriving(arrived_s, num_prompts=1, num_samples=ask.params.n):
            prompt = await chat_prompt(body, reader, request.receive)
            await _compile(serving, reader, ask, body, request)
        exchange = _begun(serving, [prompt], ask, body, request, arrived_s)
        if not body.stream:
            async with watched(request.receive, exchange):
                requests = await _ended(exchange, body)
            return json_response(chat_answer(body, requests, ask, heading, names))
        await _accepted(exchange, request, body)
        events = chat_events(body, exchange, ask, heading, names)
        return EventStream(events, exchange)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arrived_s = time.perf_counter()
        serving.check_model(body.model)
        heading = completion_heading(serving.model_name)
        _name(request, heading)
        ask = completion_ask(body, serving.limits.max_answers)
        num_prompts = len(body.prompts)
        with serving.arriving(arrived_s, num_prompts=num_prompts, num_samples=ask.params.n):
            prompts, texts = await completion_prompts(body, reader, request.receive)
            await _compile(serving, reader, ask, body, request)
        exchange = _begun(serving, prompts, ask, body, request, arrived_s)
        if not body.stream:
            async with watched(request.receive, exchange):
                requests = await _ended(exchange, body)
            return json_response(completion_answer(body, requests, texts, ask, heading, names))
        await _accepted(exchange, request, body)
        events = completion_events(body, exchange, texts, ask, heading, names)
        return EventStream(events, exchange)


async def _compile(
    serving: Serving, reader: PromptReader, ask: Ask, body: SamplingFields, request: Request
) -> None:
    """Have the grammar compiled that an answer is to follow: not by whoever asks the engine then,
    which is the event loop. Raises `ApiError`, `ClientLeft`."""
    structured, grammars = ask.params.structured, serving.llm.grammars
    if structured is None or grammars.has(structured):
        return
    try:
        await reader.aside(lambda: grammars.compiled(structured), request.receive)
    except InvalidInput as problem:
        field = body.structured_field
        raise ApiError(400, f"{field}: {problem}", param=field) from None


def _begun(
    serving: Serving,
    prompts: list[list[int]],
    ask: Ask,
    body: SamplingFields,
    request: Request,
    arrived_s: float,
) -> Exchange:
    """The exchange with the engine for a request. Raises `ApiError`."""
    serving.check_vocabulary(ask.params.logit_bias or (), param="logit_bias")
    serving.check_vocabulary(ask.params.stop_token_ids, param="stop_token_ids")
    has_best = getattr(body, "best_of", None) is not None
    serving.check_samples(ask.params.n, param="best_of" if has_best else "n")
    for name in ("max_tokens", "max_completion_tokens"):
        if wanted := getattr(body, name, None):
            serving.check_room(max(map(len, prompts), default=0), wanted, param=name)
    exchange = serving.exchange(
        prompts,
        ask.params,
        namespace=body.namespace,
        is_streamed=bool(body.stream),
        arrived_s=arrived_s,
    )
    if (note := _note(request)) is not None:
        note.outcome = functools.partial(_outcome, exchange, ask)
    return exchange


def _note(request: Request) -> RequestNote | None:
    """What is noted of a request; None where nobody does."""
    note: RequestNote | None = getattr(request.state, "note", None)
    return note


def _name(request: Request, heading: Heading) -> None:
    """Let a request be called what its answer is called."""
    if (note := _note(request)) is not None:
        note.name(heading.id)


def _outcome(exchange: Exchange, ask: Ask) -> Outcome:
    told = [request for request in exchange.requests if request is not None]
    return Outcome(
        prompt_tokens=sum(map(len, exchange.prompts)),
        output_tokens=usage(told, ask)["completion_tokens"],
        has_left=isinstance(exchange.reason, ClientLeft),
    )


async def _ended(exchange: Exchange, body: SamplingFields) -> list[Any]:
    """The finished requests of an exchange that is not streamed. Raises `ApiError`."""
    try:
        return await exchange.finished()
    except InvalidInput as refusal:
        raise from_invalid_input(refusal, type(body).model_fields) from None


async def _accepted(exchange: Exchange, request: Request, body: SamplingFields) -> None:
    """Wait until the engine has taken a stream's prompts, so that a refusal has its status."""
    try:
        await exchange.accepted()
    except BaseException as refusal:
        exchange.close()
        if isinstance(refusal, InvalidInput):
            raise from_invalid_input(refusal, type(body).model_fields) from None
        raise
