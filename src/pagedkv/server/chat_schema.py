"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pagedkv.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from pagedkv.engine.structured_output import StructuredOutput
from pagedkv.errors import InvalidInput
from pagedkv.server.body_schema import Body, ListOf, Typed
from pagedkv.server.errors import ApiError
from pagedkv.server.sampling_schema import SamplingFields
from pagedkv.server.tool_schema import ToolCall, ToolFields


class TextPart(Typed):
    """A piece of a message's content."""

    of_another = "content of type {kind} is not supported: text alone is, no images and no sound"

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a chat: what a client wrote, or an answer as its library dumps it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    parsed: Any = None  # of OpenAI's client, which made it of the content

    # Accepted where there is nothing in them.
    audio: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None

    def check(self, place: int) -> None:
        """Raise `ApiError` for what the prompt would lack; `place` is the message's own."""
        for name in ("audio", "function_call", "reasoning", "reasoning_content"):
            if getattr(self, name):
                raise ApiError(
                    400,
                    f"{name} of a message is not supported: leave it out",
                    param=f"messages.{place}.{name}",
                    code="unsupported_parameter",
                )
        if self.tool_calls and self.role != "assistant":
            raise ApiError(
                400,
                f"messages.{place}.tool_calls: a message of {self.role} calls nothing",
                param=f"messages.{place}.tool_calls",
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


class ChatRequest(ToolFields, SamplingFields):
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
    modalities: ListOf[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None

    def check(self) -> None:
        """Raise `ApiError` for what is asked and would not be done."""
        self.check_stream_options()
        self.check_tools()
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
    def structured_field(self) -> str | None:
        """The name of the field that says what form the answer has; None where none does.

        Raises `ApiError` where several do.
        """
        field = super().structured_field
        if not self.is_call_forced:
            return field
        if field is not None:
            raise ApiError(
                400,
                f"{field} and tool_choice both say what form the answer has: give one",
                param=field,
            )
        return "tools"

    @property
    def structured(self) -> StructuredOutput | None:
        """What the text must be; None where any will do. Raises `ApiError`.

        A `response_format` is that of answers that call nothing; vLLM's fields are for all text.
        """
        field = self.structured_field
        form = None if field == "tools" else super().structured
        if field != "tools" and not (self.offered and field == "response_format"):
            return form
        try:
            return self.structured_calls(otherwise=form)
        except InvalidInput as problem:
            raise ApiError(400, f"tools: {problem}", param="tools") from None

    def sampling_params(self, **others: Any) -> SamplingParams:
        """The engine's parameters. Raises `InvalidInput`, `ApiError`.

        Where there may be calls special tokens are text, since with some models their tags are.
        """
        if self.offered and self.skip_special_tokens is None:
            others["skip_special_tokens"] = False
        return super().sampling_params(**others)

    @property
    def token_limit(self) -> int | None:
        """Tokens of an answer at most; None: as far as the model and the memory go."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them; few of them know developers. Raises `ApiError`.

    What a function gave bears its name, which the call has and clients leave out.
    """
    made = []
    called: dict[str | None, str] = {}
    for place, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        shown: dict[str, Any] = {"role": role, "content": message.text}
        for name in ("name", "tool_call_id"):
            if getattr(message, name) is not None:
                shown[name] = getattr(message, name)
        if message.role == "tool" and message.tool_call_id in called:
            shown.setdefault("name", called[message.tool_call_id])
        if message.tool_calls:
            shown["tool_calls"] = _template_calls(message.tool_calls, place)
            called |= {call.id: call.function.name for call in message.tool_calls}
        made.append(shown)
    return made


def _template_calls(calls: Sequence[ToolCall], place: int) -> list[dict[str, Any]]:
    made = []
    for call_place, call in enumerate(calls):
        try:
            made.append(call.template_call())
        except InvalidInput as problem:
            param = f"messages.{place}.tool_calls.{call_place}.function.arguments"
            raise ApiError(400, f"{param}: {problem}", param=param) from None
    return made


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
