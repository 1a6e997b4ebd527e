"""Prompts become token ids, long ones outside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from starlette.types import Receive

from pagedkv.engine.chat import chat_token_ids
from pagedkv.errors import InvalidInput
from pagedkv.server.errors import ApiError
from pagedkv.server.event_stream import unless_left
from pagedkv.server.tool_calls import tools_problem

_SHORT = 2_000
"""Characters that are tokenized in less time than it takes to ask another thread."""

_NO_VARIABLES = frozenset(
    {
        *("chat_template", "conversation", "tools", "documents", "tokenize", "padding"),
        *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "add_generation_prompt", "continue_final_message"),
    }
)
"""What else the method that fills in a template takes; a template of a client's own among it."""

Found = TypeVar("Found")

Wanted: TypeAlias = Callable[[], bool]
"""Whether anybody waits for it still: a tokenizer cannot be stopped within a text, but between."""


class PromptReader:
    """A tokenizer for many requests; `max_tokens` is what a prompt may have.

    One thread for all that is long: tokenizers are not safe to use from several. Who waits for it
    holds one of `queue`'s contexts, which refuses where too many wait. Every method takes what
    tells whether its client is still there (`receive`): what nobody wants any more is not begun.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_tokens: int,
        queue: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._queue = queue
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagedkv-tokenizer")
        self._waiting: set[asyncio.Future[Any]] = set()
        self._is_closed = False
        self._has_tried_tools = False
        self._tools_problem: str | None = None
        longest = 0
        if tokenizer is not None:
            longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._max_characters = max_tokens * longest

    async def texts(
        self,
        texts: Sequence[str],
        receive: Receive,
        *,
        param: str,
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """The token ids of each text, however many. Raises `ApiError`, `ClientLeft`."""
        tokenizer = self._needed(param)
        for text in texts:
            self.check_characters(len(text), param)
            _check_unicode(text, param)

        def tokenize(is_wanted: Wanted) -> list[list[int]]:
            return [
                list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
                for text in texts
                if is_wanted()
            ]

        return await self._run(sum(map(len, texts)), tokenize, receive)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        receive: Receive,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The token ids of a chat, however many, that shows the model which functions it may call.

        Raises `ApiError`, `ClientLeft`.
        """
        tokenizer = self._needed("messages")
        for name in template_arguments or ():
            if name in _NO_VARIABLES:
                raise ApiError(
                    400,
                    f"chat_template_kwargs has {name!r}, which is no variable of the template",
                    param="chat_template_kwargs",
                )
        texts = {
            "messages": [_text(value) for message in messages for value in message.values()],
            "tools": [_text(tool) for tool in tools],
            "chat_template_kwargs": [_text(template_arguments)] if template_arguments else [],
        }
        for param, found in texts.items():
            self.check_characters(sum(map(len, found)), param)
            for text in found:
                _check_unicode(text, param)
        has_calls = any("tool_calls" in message for message in messages)

        def tokenize(_: Wanted) -> list[int]:
            if tools or has_calls:
                self._check_tools("tools" if tools else "messages")
            return chat_token_ids(
                tokenizer,
                messages,
                "the prompt",
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_arguments=template_arguments,
                tools=tools,
            )

        length = sum(len(text) for found in texts.values() for text in found)
        try:
            return await self._run(length, tokenize, receive)
        except InvalidInput as problem:
            raise ApiError(400, str(problem), param="messages") from None

    def checked(self, ids: list[int], param: str) -> list[int]:
        """`ids`, if a prompt may be as long as that. Raises `ApiError`."""
        if len(ids) > self._max_tokens:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, at most {self._max_tokens} are taken",
                param=param,
                code="context_length_exceeded",
            )
        return ids

    async def decoded(self, ids: Sequence[int], receive: Receive, *, param: str) -> str:
        """The text of token ids, special tokens included. Raises `ApiError`, `ClientLeft`."""
        tokenizer = self._needed(param)

        def decode(_: Wanted) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=False))

        try:
            return await self._run(len(ids), decode, receive)
        except (OverflowError, TypeError, ValueError, IndexError):
            raise ApiError(400, f"{param} has token ids that cannot be", param=param) from None

    async def aside(self, work: Callable[[], Found], receive: Receive) -> Found:
        """What `work` finds that has to do with the tokenizer and takes long, in its thread.

        Raises what it raises, and `ApiError`, `ClientLeft`.
        """
        return await self._run(_SHORT + 1, lambda _: work(), receive)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them."""
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(list(ids))]

    def close(self) -> None:
        """End the thread after what it is at; whoever waits for it is told with `ApiError` 503.

        To be called in the event loop.
        """
        self._is_closed = True
        for future in list(self._waiting):
            future.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _needed(self, param: str) -> Any:
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: give token ids", param=param)
        return self._tokenizer

    def _check_tools(self, param: str) -> None:
        """Refuse functions, and messages that call some, where the model cannot call any."""
        if not self._has_tried_tools:
            self._tools_problem = tools_problem(self._tokenizer)
            self._has_tried_tools = True
        if self._tools_problem is not None:
            what = "tool_calls of a message" if param == "messages" else param
            raise ApiError(
                400,
                f"{what} is not supported by this model: {self._tools_problem}",
                param=param,
                code="unsupported_parameter",
            )

    def check_characters(self, length: int, param: str) -> None:
        """Refuse what cannot fit before time is spent on it: each token has its longest text.

        Raises `ApiError`.
        """
        if length > self._max_characters:
            raise ApiError(
                400,
                f"the prompt has {length} characters, at most {self._max_characters} are read: a "
                f"prompt may have {self._max_tokens} tokens",
                param=param,
                code="context_length_exceeded",
            )

    async def _run(self, length: int, work: Callable[[Wanted], Found], receive: Receive) -> Found:
        """What `work` finds, which may end early where nobody wants it any more."""
        if length <= _SHORT:
            return work(_always)
        if self._is_closed:
            raise ApiError.shutting_down()
        is_over = False
        with self._queue():
            future = asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: work(lambda: not is_over)
            )
            self._waiting.add(future)
            try:
                return await unless_left(receive, future)
            except asyncio.CancelledError:
                if self._is_closed:
                    raise ApiError.shutting_down() from None
                raise
            finally:
                is_over = True
                self._waiting.discard(future)


def _always() -> bool:
    return True


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, f"{param} has half a character: a lone surrogate", param=param
        ) from None
