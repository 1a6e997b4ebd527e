"""What is wrong with a body: it is no JSON, or not what the schema says."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from pagedkv.server.errors import ApiError

UNSUPPORTED = "unsupported"
"""The kind of a schema's error that is to ask for what others can do and this server cannot."""

TOO_MANY_VALUES = "too_many_values"
"""The kind of a schema's error that is to have more in it than any request needs."""

_MOST_CHARACTERS = 500


def from_validation(errors: Sequence[Any], fields: Container[str], body: Any) -> ApiError:
    """What the schema refuses in a body, by its first mistake; `fields` are all that it knows.

    `body` is the text where it is no JSON. Where a field may be one of several types there is a
    mistake for each. The one that is told is of the type that was meant: not another type's, and
    as deep as it goes.
    """
    places = [_place(error, fields) for error in errors]
    first = places[0]
    same = [i for i, place in enumerate(places) if place[: len(first)] == first]
    chosen = max(same, key=lambda i: (not errors[i]["type"].endswith("_type"), -i))
    if errors[chosen]["type"].endswith("_type"):
        chosen = max(same, key=lambda i: (len(places[i]), -i))
    error, param = errors[chosen], ".".join(places[chosen])
    if error["type"] == "json_invalid":
        return ApiError(400, _no_json(error["ctx"]["error"], str(body), error["loc"][-1]))
    if tuple(error["loc"]) == ("body",) and error["type"] != TOO_MANY_VALUES:
        return ApiError(400, _no_object(error))
    problem = str(error["msg"])
    if error["type"] == "extra_forbidden":
        problem = "there is no such field, and it could change the result: leave it out"
    code = "unsupported_parameter" if error["type"] == UNSUPPORTED else None
    message = f"{param}: {problem}" if param else problem
    return ApiError(400, message[:_MOST_CHARACTERS], param=param[:200] or None, code=code)


def from_unread(cause: BaseException) -> ApiError:
    """Why a body could not be read at all, before anybody looked for JSON's grammar in it."""
    why = "it cannot be read"
    if isinstance(cause, UnicodeDecodeError):
        why = f"byte {cause.start + 1} is no {cause.encoding.upper()}"
    elif isinstance(cause, RecursionError):
        why = "it is nested too deeply"
    elif isinstance(cause, ValueError):
        why = "a number in it has too many digits"
    return ApiError(400, f"the body is no JSON: {why}")


def _no_json(problem: str, body: str, position: int) -> str:
    """In one line, where a text stops being JSON; lines and characters are counted from 1."""
    line = body.count("\n", 0, position) + 1
    character = position - body.rfind("\n", 0, position)
    problem = problem.removesuffix(" at")
    return f"the body is no JSON: line {line}, character {character}: {problem}"


def _no_object(error: Any) -> str:
    """What is wrong with a body as a whole."""
    if error["type"] == "missing":
        return "there is no body: send a JSON object"
    if isinstance(error["input"], bytes):
        return "the body is not said to be JSON: send Content-Type: application/json"
    return f"the body is {_KINDS.get(type(error['input']), 'JSON')}: send a JSON object"


_KINDS = {
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def _place(error: Any, fields: Container[str]) -> tuple[str, ...]:
    """Where a mistake is, without the names of types that pydantic puts in between."""
    *path, last = error["loc"]
    is_unknown = error["type"] == "extra_forbidden"
    kept = [part for part in path if isinstance(part, int) or part in fields]
    if is_unknown or isinstance(last, int) or last in fields:
        kept.append(last)
    return tuple(map(str, kept))
