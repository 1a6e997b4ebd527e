"""What chats and completions have in common in how they answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pagedkv.engine.outputs import Chunk
from pagedkv.engine.request import Request
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.errors import InvalidInput
from pagedkv.server.errors import ApiError, from_invalid_input
from pagedkv.server.event_stream import DONE, KEEP_ALIVE
from pagedkv.server.exchange import ClientLeft, Exchange
from pagedkv.server.sampling_schema import SamplingFields


@dataclass(frozen=True)
class Ask:
    """What the engine is asked for, and what the client is given of it."""

    params: SamplingParams
    num_choices: int
    """Choices for each prompt."""
    is_copied: bool
    """Whether all choices are copies of one sample: greedy answers to one prompt are equal."""
    is_prompt_alone: bool
    """Whether nothing was to be said; a step makes a token all the same, which nobody is told."""

    @classmethod
    def of(
        cls,
        body: SamplingFields,
        *,
        num_samples: int,
        num_choices: int,
        num_prompts: int,
        max_answers: int,
        is_prompt_alone: bool = False,
        **params: Any,
    ) -> Ask:
        """The request of a body. Raises `ApiError` for one that is out of range."""
        if num_samples * num_prompts > max_answers:
            raise ApiError(
                400,
                f"{num_prompts} prompts with {num_samples} answers each are more than "
                f"{max_answers} answers, which is the most that a request may ask for",
                param="n",
            )
        is_copied = body.temperature == 0 and num_samples > 1
        try:
            made = body.sampling_params(n=1 if is_copied else num_samples, **params)
        except InvalidInput as error:
            raise from_invalid_input(error, type(body).model_fields) from None
        return cls(made, num_choices, is_copied, is_prompt_alone)

    def places(self, prompt: int, sample: int) -> Iterator[int]:
        """The indices of the choices that a sample is."""
        if self.is_copied:
            yield from range(prompt * self.num_choices, (prompt + 1) * self.num_choices)
        else:
            yield prompt * self.num_choices + sample


@dataclass(frozen=True)
class Heading:
    """What every piece of an answer begins with."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> Heading:
        """A heading for a new answer."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model)

    @property
    def fields(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
        }

    def event_before_choices(self) -> str:
        """The beginning of an event up to its choices, the same in all of a stream's events."""
        return "data: " + json.dumps(self.fields, separators=(",", ":"))[:-1] + ',"choices":['


def usage(requests: Sequence[Request], ask: Ask) -> dict[str, Any]:
    """Tokens of an answer, with those of the prompts that the cache had."""
    prompt = sum(len(request.prompt_ids) for request in requests)
    said = sum(len(sample.token_ids) for request in requests for sample in request.samples)
    said *= ask.num_choices if ask.is_copied else 1
    said *= not ask.is_prompt_alone
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {
            "cached_tokens": sum(request.num_cached_tokens or 0 for request in requests)
        },
    }


async def answer_events(
    exchange: Exchange,
    ask: Ask,
    heading: Heading,
    choices: Callable[[int, Chunk], Iterable[str]],
    *,
    has_usage: bool,
) -> AsyncIterator[bytes]:
    """An answer as events, a piece for all that came at once.

    `choices` says which choices, as JSON, a chunk of a prompt (by its place) gives.
    """
    before = heading.event_before_choices()
    after = ',"usage":null}\n\n' if has_usage else "}\n\n"
    try:
        while (came := await exchange.chunks()) is not None:
            if not came:
                yield KEEP_ALIVE
                continue
            events = [
                f"{before}{choice}]{after}"
                for place, chunk in came
                if chunk.text or chunk.finish_reason or chunk.logprobs
                for choice in choices(place, chunk)
            ]
            # What is held back for long, as a call until it is whole, is no silence either.
            yield "".join(events).encode() if events else KEEP_ALIVE
        if has_usage:
            told = [request for request in exchange.requests if request is not None]
            yield f'{before}],"usage":{json.dumps(usage(told, ask))}}}\n\n'.encode()
    except ClientLeft:
        raise
    except Exception as error:
        yield error_event(error)
    yield DONE


def written_end(chunk: Chunk) -> str:
    """Why a sample ended with this chunk, if it did, as the fields of an event's choice."""
    reason = "null" if chunk.finish_reason is None else f'"{chunk.finish_reason}"'
    stop = "" if chunk.stop_reason is None else f',"stop_reason":{json.dumps(chunk.stop_reason)}'
    return f'"finish_reason":{reason}{stop}'


def error_event(error: Exception) -> bytes:
    """The event that tells a stream's client what broke it off."""
    if isinstance(error, InvalidInput):
        error = ApiError(400, str(error))
    if not isinstance(error, ApiError):
        error = ApiError(500, "the server failed")
    return b"data: " + json.dumps(error.body).encode() + b"\n\n"
