"""What all bodies have in common: how strictly they are read, and how much may be in one.

A schema looks at each value in Python objects, in the thread that serves everybody, and has a
mistake of its own for each that is wrong. So what is far more than any request needs is refused
before it looks, and lists are read as far as their first mistake.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pagedkv.server.body_errors import TOO_MANY_VALUES, UNSUPPORTED
from pagedkv.server.limits import MAX_VALUES

Item = TypeVar("Item")

ListOf: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is read as far as its first mistake."""


class Body(BaseModel):
    """A body, or a part of one. Fields that nobody knows are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Typed(Body):
    """A part of a body that says its type. One of another type is something that others can do."""

    of_another: ClassVar[str]
    """What is said of that, with `{kind}` for it."""

    type: Any
    """A literal, in whatever is made of this."""

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind not in get_args(cls.model_fields["type"].annotation):
            raise PydanticCustomError(UNSUPPORTED, cls.of_another, {"kind": repr(kind[:64])})
        return given


class WholeBody(Body):
    """A whole body, of bounded size."""

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, body: Any) -> Any:
        if isinstance(body, dict) and _has_more_values(body, MAX_VALUES):
            raise PydanticCustomError(
                TOO_MANY_VALUES,
                "the body has more than {most} values, the token ids of prompts not counted",
                {"most": f"{MAX_VALUES:,}"},
            )
        return body


_OF_TOKEN_IDS = ("prompt", "tokens")
"""Fields in which lists of integers are token ids, whose number has a limit of its own."""


def _has_more_values(body: dict[str, Any], most: int) -> bool:
    """Whether there are more values than `most` in `body`; a list of token ids is one."""
    count = len(body)
    unread = [(value, name in _OF_TOKEN_IDS) for name, value in body.items()]
    while unread and count <= most:
        value, may_be_ids = unread.pop()
        if isinstance(value, list):
            if may_be_ids and set(map(type, value)) == {int}:
                continue
            inner = value
        elif isinstance(value, dict):
            inner = list(value.values())
        else:
            continue
        count += len(inner)
        if count <= most:
            unread += [(item, may_be_ids) for item in inner]
    return count > most
