"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pagedkv.server.body_schema import ListOf
from pagedkv.server.errors import ApiError
from pagedkv.server.sampling_schema import SamplingFields

DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion where nobody says: OpenAI's number."""


class CompletionRequest(SamplingFields):
    """The body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[ListOf[int], Field(min_length=1)]
        | Annotated[ListOf[str], Field(min_length=1)]
        | Annotated[ListOf[ListOf[int]], Field(min_length=1)]
    )
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _of_one_kind(cls, prompt: Any) -> Any:
        """Refuse lists of this and that by the element that does not belong: a union's own mistakes
        are of the type that was not meant."""
        if isinstance(prompt, list):
            _check_elements(prompt)
        return prompt

    def check(self) -> None:
        """Raise `ApiError` for what is asked and would not be done."""
        self.check_stream_options()
        if self.suffix:
            raise ApiError(
                400,
                "suffix is not supported: leave it out",
                param="suffix",
                code="unsupported_parameter",
            )
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise ApiError(
                    400,
                    f"best_of is {self.best_of} and n {self.n or 1}: give best_of at least n",
                    param="best_of",
                )
            if self.stream and self.best_of > (self.n or 1):
                raise ApiError(
                    400,
                    "the best are known only at the end: no stream with best_of above n",
                    param="best_of",
                )

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts, each text or token ids."""
        prompt: Any = self.prompt
        is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_single else list(prompt)

    @property
    def is_prompt_alone(self) -> bool:
        """Whether nothing is to be generated: the prompt is to be told back, or judged."""
        return self.echo and self.max_tokens == 0

    @property
    def token_limit(self) -> int:
        """Tokens of an answer at most; 1 where none is wanted, since a step makes one."""
        if self.is_prompt_alone:
            return 1
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


_KINDS = {str: "a text", int: "a number", list: "a list"}
"""What a list of prompts may have in it, all of one kind."""


def _check_elements(prompt: list[Any]) -> None:
    """Raise for the first element of a prompt that is of no kind, or of another than the first."""
    kinds = list(map(type, prompt))
    if len(set(kinds)) > 1 or not set(kinds) <= _KINDS.keys():
        place = next(i for i, kind in enumerate(kinds) if kind not in _KINDS or kind != kinds[0])
        problem = f"element {place} is {_said(kinds[place])}"
        raise _no_element(f"{problem}, element 0 is {_said(kinds[0])}" if place else problem)
    if kinds and kinds[0] is list:
        for outer, ids in enumerate(prompt):
            inner = list(map(type, ids))
            if not set(inner) <= {int}:
                place = next(i for i, kind in enumerate(inner) if kind is not int)
                raise _no_element(f"element {outer} has {_said(inner[place])} in it, at {place}")


def _no_element(problem: str) -> PydanticCustomError:
    return PydanticCustomError(
        "mixed", f"{problem}: give all texts, all token ids, or all lists of token ids"
    )


def _said(kind: type) -> str:
    others = {bool: "true or false", float: "a number with a point", dict: "an object"}
    return {**_KINDS, **others}.get(kind, "null")
