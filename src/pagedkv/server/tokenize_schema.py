"""The bodies of `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from pagedkv.server.body_schema import ListOf, WholeBody
from pagedkv.server.chat_schema import Message
from pagedkv.server.errors import ApiError
from pagedkv.server.limits import MAX_TOOLS
from pagedkv.server.tool_schema import Tool, check_tools


class TokenizeRequest(WholeBody):
    """The body of `/tokenize`: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    tools: Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)] | None = None

    def check(self) -> None:
        """Raise `ApiError` for bodies that have not one of both, or contradict themselves."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give prompt or messages, one of both", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise ApiError(
                400,
                "the chat template brings its own special tokens: leave add_special_tokens out",
                param="add_special_tokens",
            )
        if self.tools and self.messages is None:
            raise ApiError(400, "tools is for the messages of a chat: leave it out", param="tools")
        check_tools(self.tools or ())
        for place, message in enumerate(self.messages or ()):
            message.check(place)
        if self.messages and self.add_generation_prompt and self.continue_final_message:
            raise ApiError(
                400,
                "continue_final_message needs add_generation_prompt: false",
                param="continue_final_message",
            )


class DetokenizeRequest(WholeBody):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: ListOf[Annotated[int, Field(ge=0, lt=1 << 31)]]
