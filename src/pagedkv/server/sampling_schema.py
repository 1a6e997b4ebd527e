"""The fields that chats and completions have in common: how tokens are chosen, and when it ends.

Fields that nobody knows are refused, since a misspelt one changes the result. Those that OpenAI's
clients send and that change nothing here are accepted and named below.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.server.body_schema import Body, ListOf
from pagedkv.server.errors import ApiError
from pagedkv.server.limits import (
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from pagedkv.server.structured_schema import StructuredFields

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[ListOf[StopString], Field(max_length=MAX_STOP_STRINGS)]


def _told(**limits: float) -> Any:
    """Limits for the document alone. `SamplingParams` checks them, in words of its own."""
    return Field(json_schema_extra=limits)


class StreamOptions(Body):
    """What a stream says besides the text."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class SamplingFields(StructuredFields):
    """How tokens are chosen, by the names of OpenAI and, below, of vLLM."""

    model: str | None = None
    n: Annotated[int | None, _told(minimum=1)] = None
    max_tokens: Annotated[int | None, _told(minimum=1)] = None
    temperature: Annotated[float | None, _told(minimum=0)] = None
    top_p: Annotated[float | None, _told(exclusiveMinimum=0, maximum=1)] = None
    presence_penalty: Annotated[float | None, _told(minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, _told(minimum=-2, maximum=2)] = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Annotated[int | None, _told(minimum=-1)] = None
    min_p: Annotated[float | None, _told(minimum=0, maximum=1)] = None
    repetition_penalty: Annotated[float | None, _told(exclusiveMinimum=0)] = None
    min_tokens: Annotated[int | None, _told(minimum=0)] = None
    stop_token_ids: Annotated[ListOf[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1_024)] | None = None

    # Accepted, and without meaning here.
    user: str | None = None

    def sampling_params(self, **others: Any) -> SamplingParams:
        """The engine's parameters; fields that are absent or null have its defaults.

        Raises `InvalidInput`, one line that begins with the name of the field, or `ApiError`.
        """
        names = (
            *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"),
            *("seed", "stop", "top_k", "min_p", "repetition_penalty", "min_tokens"),
            *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
        )
        given = {name: getattr(self, name) for name in names}
        if given["seed"] is not None:
            given["seed"] %= 1 << 64  # OpenAI's seeds may be negative
        kept = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**kept, structured=self.structured, **others)

    @property
    def namespace(self) -> dict[str, str] | None:
        """What separates this request's blocks from those of others."""
        return None if self.cache_salt is None else {"cache_salt": self.cache_salt}

    def check_stream_options(self) -> None:
        """Raise `ApiError` for options of a stream where there is none."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams: set stream", param="stream_options")
