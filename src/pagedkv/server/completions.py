"""`/v1/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from starlette.types import Receive

from pagedkv.engine.outputs import Chunk, Completion
from pagedkv.engine.request import Request
from pagedkv.server.answers import Ask, Heading, answer_events, usage, written_end
from pagedkv.server.completion_schema import CompletionRequest
from pagedkv.server.exchange import Exchange
from pagedkv.server.logprob_shapes import TokenNames, completion_logprobs
from pagedkv.server.prompts import PromptReader


async def completion_prompts(
    body: CompletionRequest, reader: PromptReader, receive: Receive
) -> tuple[list[list[int]], list[str]]:
    """The token ids of all prompts, and, where they are to be told back, their texts.

    Raises `ApiError`, `ClientLeft`.
    """
    prompts = body.prompts
    found = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if not found:
        found = await reader.texts(
            [prompt for prompt in prompts if isinstance(prompt, str)],
            receive,
            param="prompt",
            add_special_tokens=body.add_special_tokens,
        )
    for ids in found:
        reader.checked(ids, "prompt")
    texts = []
    if body.echo:
        texts = [
            prompt
            if isinstance(prompt, str)
            else await reader.decoded(prompt, receive, param="prompt")
            for prompt in prompts
        ]
    return found, texts


def completion_ask(body: CompletionRequest, max_answers: int) -> Ask:
    """What the engine is asked for. Raises `ApiError`."""
    body.check()
    num_choices = 1 if body.n is None else body.n
    num_samples = num_choices if body.best_of is None else body.best_of
    needs_logprobs = num_samples > num_choices and body.logprobs is None
    return Ask.of(
        body,
        num_samples=num_samples,
        num_choices=num_choices,
        num_prompts=len(body.prompts),
        max_answers=max_answers,
        is_prompt_alone=body.is_prompt_alone,
        max_tokens=body.token_limit,
        logprobs=0 if needs_logprobs else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def completion_heading(model: str) -> Heading:
    """What the answer, or each of its events, begins with."""
    return Heading.new("cmpl", "text_completion", model)


def completion_answer(
    body: CompletionRequest,
    requests: list[Request],
    texts: Sequence[str],
    ask: Ask,
    heading: Heading,
    names: TokenNames | None,
) -> dict[str, Any]:
    """The whole answer."""
    choices = []
    for place, request in enumerate(requests):
        told = texts[place] if body.echo else ""
        best = _best(request, ask)
        for rank, completion in enumerate(best):
            for index in ask.places(place, rank):
                choices.append(_choice(body, request, completion, index, told, names))
    return {**heading.fields, "choices": choices, "usage": usage(requests, ask)}


def completion_events(
    body: CompletionRequest,
    exchange: Exchange,
    texts: Sequence[str],
    ask: Ask,
    heading: Heading,
    names: TokenNames | None,
) -> AsyncIterator[bytes]:
    """The answer as events."""
    shown: dict[int, int] = {}  # characters before the next token of a choice

    def choices(place: int, chunk: Chunk) -> Iterator[str]:
        for index in ask.places(place, chunk.sample):
            if index not in shown and body.echo:
                request = exchange.requests[place]
                assert request is not None
                yield _echoed(request, index, texts[place], names)
            offset = shown.get(index, len(texts[place]) if body.echo else 0)
            choice, shown[index] = _piece(body, chunk, index, offset, names)
            yield choice

    has_usage = body.stream_options is not None and body.stream_options.include_usage
    return answer_events(exchange, ask, heading, choices, has_usage=has_usage)


def _best(request: Request, ask: Ask) -> list[Completion]:
    """The completions to give, those whose tokens the model found likeliest first."""
    completions = list(request.generation().completions)
    if len(completions) > ask.num_choices:
        completions.sort(key=_mean_logprob, reverse=True)
    return completions[: ask.num_choices]


def _mean_logprob(completion: Completion) -> float:
    found = completion.logprobs or ()
    return sum(token.logprob for token in found) / max(len(found), 1)


def _choice(
    body: CompletionRequest,
    request: Request,
    completion: Completion,
    index: int,
    told: str,
    names: TokenNames | None,
) -> dict[str, Any]:
    text, token_ids = completion.text, completion.token_ids
    logprobs = list(completion.logprobs or ())
    if body.is_prompt_alone:
        text, token_ids, logprobs = "", (), []
    shape = None
    if body.logprobs is not None and names is not None:
        before = request.prompt_logprobs or [] if body.echo else []
        ids = (*request.prompt_ids, *token_ids) if body.echo else token_ids
        shape = completion_logprobs([*before, *logprobs], ids, names, offset=0)
    return {
        "index": index,
        "text": told + text,
        "logprobs": shape,
        "finish_reason": "length" if body.is_prompt_alone else completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def _echoed(request: Request, index: int, text: str, names: TokenNames | None) -> str:
    """The choice of the event that tells the prompt back."""
    shape = None
    if request.prompt_logprobs is not None and names is not None:
        shape = completion_logprobs(request.prompt_logprobs, request.prompt_ids, names, offset=0)
    return json.dumps({"index": index, "text": text, "logprobs": shape, "finish_reason": None})


def _piece(
    body: CompletionRequest, chunk: Chunk, index: int, offset: int, names: TokenNames | None
) -> tuple[str, int]:
    """A choice of an event, and the characters up to its end."""
    logprobs = "null"
    text = "" if body.is_prompt_alone else chunk.text
    if chunk.logprobs is not None and names is not None and not body.is_prompt_alone:
        shape = completion_logprobs(chunk.logprobs, chunk.token_ids, names, offset=offset)
        offset += sum(map(len, shape["tokens"]))
        logprobs = json.dumps(shape, separators=(",", ":"))
    return (
        f'{{"index":{index},"text":{json.dumps(text)},"logprobs":{logprobs},{written_end(chunk)}}}'
    ), offset
