"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from pagedkv.engine.sampling_params import MAX_LOGPROBS
from pagedkv.server.body_errors import UNSUPPORTED
from pagedkv.server.body_schema import Body, ListOf
from pagedkv.server.errors import ApiError
from pagedkv.server.sampling_schema import SamplingFields


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                UNSUPPORTED,
                "content of type {kind} is not supported: text alone is, no images and no sound",
                {"kind": repr(kind[:64])},
            )
        return part


class Message(Body):
    """A message of a chat: what a client wrote, or an answer as its library dumps it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    # Accepted where there is nothing in them.
    audio: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: list[Any] | None = None

    def check(self, place: int) -> None:
        """Raise `ApiError` for what the prompt would lack; `place` is the message's own."""
        for name in ("audio", "function_call", "reasoning", "reasoning_content", "tool_calls"):
            if getattr(self, name):
                raise ApiError(
                    400,
                    f"{name} of a message is not supported: leave it out",
                    param=f"messages.{place}.{name}",
                    code="unsupported_parameter",
                )
        if self.content is None and self.role != "assistant":
            raise ApiError(
                400,
                f"messages.{place}.content: a message of {self.role} needs a content",
                param=f"messages.{place}.content",
            )

    @property
    def text(self) -> str:
        """The content in one piece."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(SamplingFields):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    # Accepted, and without meaning here.
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None

    # Accepted where they ask for what is done anyway.
    audio: Any = None
    function_call: Any = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    tool_choice: Any = None
    tools: list[Any] | None = None
    verbosity: str | None = None
    web_search_options: Any = None

    def check(self) -> None:
        """Raise `ApiError` for what is asked and would not be done."""
        self.check_stream_options()
        for name, harmless in _HARMLESS.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise ApiError(
                    400,
                    f"{name} is not supported: leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        for place, message in enumerate(self.messages):
            message.check(place)
        if (
            self.max_tokens is not None
            and self.max_completion_tokens is not None
            and self.max_tokens != self.max_completion_tokens
        ):
            raise ApiError(
                400,
                "max_tokens and max_completion_tokens are two names of the same: give one",
                param="max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set it to true", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise ApiError(
                400,
                f"top_logprobs is {self.top_logprobs}: give 0 to {MAX_LOGPROBS}",
                param="top_logprobs",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise ApiError(
                400,
                "continue_final_message needs add_generation_prompt: false",
                param="continue_final_message",
            )

    @property
    def token_limit(self) -> int | None:
        """Tokens of an answer at most; None: as far as the model and the memory go."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them; few of them know developers."""
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text,
            **({} if message.name is None else {"name": message.name}),
        }
        for message in messages
    ]


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
