"""Errors in the shape that OpenAI's clients understand."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from fastapi import Request, Response

from pagedkv.errors import InvalidInput, NeverFits

UNSUPPORTED = "unsupported"
"""The kind of a schema's error that is to ask for what others can do and this server cannot."""

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told, and with which status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def reason(self) -> str:
        """What it is counted under: its code, or what it comes to."""
        return self.code or ("not_found" if self.status in (404, 405) else "invalid")

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON has it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to it."""
        found = {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body, status=self.status, headers=self.headers)


def shutting_down() -> ApiError:
    """What whoever comes, or waits, is told while the server ends."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)


def json_response(
    content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON in ASCII: text that a client sent and that is no UTF-8 can be told back to it."""
    return Response(
        json.dumps(content, separators=(",", ":")),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def from_invalid_input(error: InvalidInput, fields: Mapping[str, Any]) -> ApiError:
    """The engine's refusal of a request with these fields.

    Its messages begin with the name of the option, where it is one option's fault, and speak of
    the prompt, where it is that.
    """
    message = str(error)
    first = message.partition(" ")[0]
    param = first if first in fields else None
    if isinstance(error, NeverFits) or message.startswith("the prompt "):
        param = "messages" if "messages" in fields else "prompt"
    return ApiError(400, message, param=param)


def from_validation(errors: Sequence[Any], fields: Container[str]) -> ApiError:
    """What the schema refuses in a body, by its first mistake; `fields` are all that it knows.

    Where a field may be one of several types there is a mistake for each. The one that is told is
    of the type that was meant: not another type's, and as deep as it goes.
    """
    places = [_place(error, fields) for error in errors]
    first = places[0]
    same = [i for i, place in enumerate(places) if place[: len(first)] == first]
    chosen = max(same, key=lambda i: (not errors[i]["type"].endswith("_type"), -i))
    if errors[chosen]["type"].endswith("_type"):
        chosen = max(same, key=lambda i: (len(places[i]), -i))
    error, param = errors[chosen], ".".join(places[chosen])
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {error['ctx']['error']}")
    problem = str(error["msg"])
    if error["type"] == "extra_forbidden":
        problem = "there is no such field, and it could change the result: leave it out"
    code = "unsupported_parameter" if error["type"] == UNSUPPORTED else None
    message = f"{param}: {problem}" if param else problem
    return ApiError(400, message[:500], param=param[:200] or None, code=code)


def _place(error: Any, fields: Container[str]) -> tuple[str, ...]:
    """Where a mistake is, without the names of types that pydantic puts in between."""
    *path, last = error["loc"]
    is_unknown = error["type"] == "extra_forbidden"
    kept = [part for part in path if isinstance(part, int) or part in fields]
    if is_unknown or isinstance(last, int) or last in fields:
        kept.append(last)
    return tuple(map(str, kept))


async def answer_api_error(request: Request, error: Exception) -> Response:
    """Exception handler for `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response()
