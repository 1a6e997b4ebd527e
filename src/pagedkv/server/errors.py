"""Errors in the shape that OpenAI's clients understand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from fastapi import Request, Response

from pagedkv.errors import InvalidInput, NeverFits

_TYPES = {429: "rate_limit_error"}
"""Of errors that are not the request's own fault. OpenAI has a key that is missing and a model that
is not there among the others: its clients go by the status and the code."""


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

    @classmethod
    def shutting_down(cls) -> Self:
        """What whoever comes, or waits, is told while the server ends."""
        return cls(503, "the server is shutting down", code="shutting_down", retry_after_s=5)

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body, status=self.status, headers=self.headers)


class BrokenOff(ApiError):
    """What whoever had been let in is told of an answer that the server could not end.

    It is counted among the answers that ended, and among the refusals not again.
    """


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
    code = "context_length_exceeded" if isinstance(error, NeverFits) else None
    return ApiError(400, message, param=param, code=code)


async def answer_api_error(request: Request, error: Exception) -> Response:
    """Exception handler for `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response()
