"""Who and what gets in: keys, and bodies that are whole before anybody looks at them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedkv.server.errors import ApiError
from pagedkv.server.limits import ServerLimits
from pagedkv.server.memory_page.endpoints import OPEN_PATHS as memory_page_paths

OPEN_PATHS = frozenset({"/health", "/version"}) | memory_page_paths
"""What may be asked without a key: whether the server lives, which it is, and the memory page
without what it shows."""

_BODIES_AT_ONCE = 64
"""Bodies of the greatest size that may be held in memory together."""


class Guard:
    """An application around another one, which sees only requests that may come in.

    With `keys`, a request must bear one of them. A body arrives whole, in time and within its
    limit, or the request is answered here and its connection closed.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], limits: ServerLimits) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._limits = limits
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it in."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        held = 0
        try:
            try:
                self._check_key(scope)
                length = self._announced_length(scope)
                if length == 0:
                    inner = receive
                else:
                    held = length or self._limits.max_body_bytes
                    self._hold(held)
                    inner = _replayed(await self._body(receive), receive)
            except ApiError as error:
                response = error.response()
                response.headers["Connection"] = "close"  # the rest of a body is not read
                await response(scope, receive, send)
                return
            await self._app(scope, inner, send)
        finally:
            self._held_bytes -= held

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return
        shown = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, shown = value.partition(b" ")
                shown = shown.strip() if scheme.lower() == b"bearer" else b""
        # All are compared, and each in constant time: how long it takes tells nothing.
        if not sum(hmac.compare_digest(shown, key) for key in self._keys):
            raise ApiError(401, "give the server's key as a bearer token", code="invalid_api_key")

    def _announced_length(self, scope: Scope) -> int | None:
        """Bytes of the body: 0 for none, None where only its end tells."""
        length: int | None = 0
        for name, value in scope["headers"]:
            if name == b"transfer-encoding":
                length = None
            elif name == b"content-length" and length is not None:
                length = int(value) if value.isdigit() else 0
        if length is not None and length > self._limits.max_body_bytes:
            raise self._too_large(f"{length:,} bytes")
        return length

    def _hold(self, size: int) -> None:
        self._held_bytes += size
        if self._held_bytes > _BODIES_AT_ONCE * self._limits.max_body_bytes:
            raise ApiError(
                503, "too many large requests at once", code="overloaded", retry_after_s=1
            )

    async def _body(self, receive: Receive) -> bytes:
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the connection was closed within the body")
                    piece = message.get("body", b"")
                    pieces.append(piece)
                    size += len(piece)
                    if size > self._limits.max_body_bytes:
                        raise self._too_large("more")
                    if not message.get("more_body"):
                        return b"".join(pieces)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self._limits.body_s:g} seconds"
            ) from None

    def _too_large(self, what: str) -> ApiError:
        return ApiError(
            413,
            f"the body is {what}, at most {self._limits.max_body_bytes:,} bytes are taken",
            code="body_too_large",
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body in one piece, and then what `receive` has: that the client has left."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
