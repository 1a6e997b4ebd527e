"""`/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.types import Receive

from pagedkv.engine.outputs import Chunk, Completion
from pagedkv.engine.request import Request
from pagedkv.server.answers import Ask, Heading, answer_events, usage, written_end
from pagedkv.server.chat_schema import ChatRequest, template_messages
from pagedkv.server.exchange import Exchange
from pagedkv.server.logprob_shapes import TokenNames, chat_logprobs
from pagedkv.server.prompts import PromptReader
from pagedkv.server.tool_calls import CallReader
from pagedkv.server.tool_shapes import CallDeltas, called_message, reason_to_end


async def chat_prompt(body: ChatRequest, reader: PromptReader, receive: Receive) -> list[int]:
    """The token ids of a chat. Raises `ApiError`, `ClientLeft`."""
    calls = [call for message in body.messages for call in message.tool_calls or ()]
    reader.check_characters(sum(len(call.function.arguments) for call in calls), "messages")
    ids = await reader.chat(
        template_messages(body.messages),
        receive,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_arguments=body.chat_template_kwargs,
        tools=[tool.template_tool for tool in body.offered],
    )
    return reader.checked(ids, "messages")


def chat_ask(body: ChatRequest, max_answers: int) -> Ask:
    """What the engine is asked for. Raises `ApiError`."""
    body.check()
    num_choices = 1 if body.n is None else body.n
    return Ask.of(
        body,
        num_samples=num_choices,
        num_choices=num_choices,
        num_prompts=1,
        max_answers=max_answers,
        max_tokens=body.token_limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def chat_heading(body: ChatRequest, model: str) -> Heading:
    """What the answer, or each of its events, begins with."""
    return Heading.new("chatcmpl", f"chat.completion{'.chunk' if body.stream else ''}", model)


def chat_answer(
    body: ChatRequest, requests: list[Request], ask: Ask, heading: Heading, names: TokenNames | None
) -> dict[str, Any]:
    """The whole answer."""
    [request] = requests
    choices = [
        _choice(completion, place, names, body.call_reader())
        for completion in request.generation().completions
        for place in ask.places(0, completion.sample)
    ]
    return {**heading.fields, "choices": choices, "usage": usage(requests, ask)}


def chat_events(
    body: ChatRequest, exchange: Exchange, ask: Ask, heading: Heading, names: TokenNames | None
) -> AsyncIterator[bytes]:
    """The answer as events."""
    begun: set[int] = set()
    calls: dict[int, CallDeltas] = {}

    def choices(_: int, chunk: Chunk) -> Iterator[str]:
        for place in ask.places(0, chunk.sample):
            is_first = place not in begun
            begun.add(place)
            if is_first and (reader := body.call_reader()) is not None:
                calls[place] = CallDeltas(reader)
            if place in calls:
                yield from _pieces(chunk, place, names, calls[place])
            else:
                yield _piece(chunk, place, is_first, names)

    has_usage = body.stream_options is not None and body.stream_options.include_usage
    return answer_events(exchange, ask, heading, choices, has_usage=has_usage)


def _choice(
    completion: Completion, place: int, names: TokenNames | None, reader: CallReader | None
) -> dict[str, Any]:
    said: dict[str, Any] = {"content": completion.text}
    reason: str = completion.finish_reason
    if reader is not None:
        said = called_message(reader, completion.text)
        reason = reason_to_end(reason, reader)
    logprobs = None
    if completion.logprobs is not None and names is not None:
        logprobs = chat_logprobs(completion.logprobs, names)
    return {
        "index": place,
        "message": {"role": "assistant", **said, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": completion.stop_reason,
    }


def _piece(chunk: Chunk, place: int, is_first: bool, names: TokenNames | None) -> str:
    """A choice of an event. Written by hand: a stream has thousands, and most are this plain."""
    logprobs = "null"
    if chunk.logprobs is not None and names is not None:
        logprobs = json.dumps(chat_logprobs(chunk.logprobs, names), separators=(",", ":"))
    role = '"role":"assistant",' if is_first else ""
    return (
        f'{{"index":{place},"delta":{{{role}"content":{json.dumps(chunk.text)}}},'
        f'"logprobs":{logprobs},{written_end(chunk)}}}'
    )


def _pieces(chunk: Chunk, place: int, names: TokenNames | None, calls: CallDeltas) -> Iterator[str]:
    """The choices of events where functions may be called: none for text that may be a tag yet.

    Log probabilities go with the chunk that brought their tokens, a tag's among them.
    """
    logprobs = None
    if chunk.logprobs is not None and names is not None:
        logprobs = chat_logprobs(chunk.logprobs, names)
    deltas, reason = calls.after(chunk.text, chunk.finish_reason)
    if not deltas and (logprobs or reason):
        deltas = [{}]
    for nth, delta in enumerate(deltas, start=1):
        choice = {
            "index": place,
            "delta": calls.with_role(delta),
            "logprobs": logprobs if nth == 1 else None,
            "finish_reason": reason if nth == len(deltas) else None,
        }
        if nth == len(deltas) and chunk.stop_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        yield json.dumps(choice, separators=(",", ":"))
