"""The API in OpenAPI's words, with the errors that it really answers with."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_ERROR = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    },
}

_OF_ALL = {"401": "The key is missing or wrong.", "503": "Nobody is admitted now."}
_OF_BODIES = {
    "400": "What is asked cannot be; the message says why.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Too much is asked at once; Retry-After says when to come again.",
    "500": "The server failed.",
}


def describe_errors(app: FastAPI) -> None:
    """Let the application's document tell its own errors instead of FastAPI's."""

    found: dict[str, Any] = {}

    def described() -> dict[str, Any]:
        if not found:
            found.update(_described(app))
        return found

    app.openapi = described


def _described(app: FastAPI) -> dict[str, Any]:
    document: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Error"] = _ERROR
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for path in document["paths"].values():
        for operation in path.values():
            responses = operation["responses"]
            responses.pop("422", None)
            errors = {**_OF_ALL, **(_OF_BODIES if "requestBody" in operation else {})}
            for status, text in errors.items():
                responses.setdefault(status, {"description": text, "content": content})
    return document
