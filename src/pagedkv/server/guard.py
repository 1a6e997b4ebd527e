"""Who and what gets in: keys, and bodies that are whole before anybody looks at them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedkv.errors import InvalidInput
from pagedkv.server.errors import ApiError
from pagedkv.server.limits import ServerLimits
from pagedkv.server.memory_page.endpoints import OPEN_PATHS as memory_page_paths

OPEN_PATHS = frozenset({"/health", "/version"}) | memory_page_paths
"""What may be asked without a key: whether the server lives, which it is, and the memory page
without what it shows."""

_BODIES_AT_ONCE = 64
"""Bodies of the greatest size that may be on their way together, as far as they have arrived."""

_LEFT_OVER_S = 1.0
"""How long the rest of a refused body is taken in, for the refusal to arrive: a connection that is
closed with something unread is reset, and its client may never see what it was told."""


class Guard:
    """An application around another one, which sees only requests that may come in.

    With `keys`, a request must bear one of them. A body arrives whole, in time and within its
    limit, or the request is answered here and its connection closed. Only what has arrived of
    bodies that are not whole counts against what may be held: announcing takes nothing.

    `on_refusal` is told what is answered here. Raises `InvalidInput` for an empty key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        limits: ServerLimits,
        on_refusal: Callable[[ApiError], object] | None = None,
    ) -> None:
        if not all(keys):
            raise InvalidInput("api_key is empty, which everybody has: give a key, or none at all")
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._limits = limits
        self._on_refusal = on_refusal
        self._held_bytes = 0
        self.num_asking = 0
        """Requests with a body that are inside and not answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it in."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        length = _announced_length(scope)
        arriving = _Arriving(receive, is_empty=length == 0)
        body = None
        try:
            self._check_key(scope)
            if length is not None and length > self._limits.max_body_bytes:
                raise self._too_large(f"{length:,} bytes")
            if length != 0:
                body = await self._body(arriving)
        except ApiError as error:
            if error.status != 408 and not _waits_to_send(scope):
                await self._take_the_rest(arriving)
            if self._on_refusal is not None:
                self._on_refusal(error)
            response = error.response()
            response.headers["Connection"] = "close"  # no more of the body is read
            await response(scope, receive, send)
            return
        if body is None:
            await self._app(scope, receive, send)
            return
        self.num_asking += 1
        try:
            await self._app(scope, _replayed(body, receive), send)
        finally:
            self.num_asking -= 1

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

    async def _body(self, arriving: _Arriving) -> bytes:
        """The whole body. What of it has arrived counts among what is held until it is whole."""
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while not arriving.has_ended:
                    piece = await arriving.piece()
                    pieces.append(piece)
                    size += len(piece)
                    self._held_bytes += len(piece)
                    if size > self._limits.max_body_bytes:
                        raise self._too_large("more")
                    if self._held_bytes > _BODIES_AT_ONCE * self._limits.max_body_bytes:
                        raise ApiError(
                            503,
                            "too many large requests at once",
                            code="overloaded",
                            retry_after_s=1,
                        )
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._limits.body_s:g} seconds",
                code="body_timeout",
            ) from None
        finally:
            self._held_bytes -= size
        if arriving.was_cut:
            raise ApiError(400, "the connection was closed within the body")
        return b"".join(pieces)

    async def _take_the_rest(self, arriving: _Arriving) -> None:
        """Take in what else comes of a refused body, and keep nothing of it; not for ever."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEFT_OVER_S):
                while not arriving.has_ended and size <= self._limits.max_body_bytes:
                    size += len(await arriving.piece())

    def _too_large(self, what: str) -> ApiError:
        return ApiError(
            413,
            f"the body is {what}, at most {self._limits.max_body_bytes:,} bytes are taken",
            code="body_too_large",
        )


class _Arriving:
    """A body on its way."""

    def __init__(self, receive: Receive, *, is_empty: bool) -> None:
        self._receive = receive
        self.has_ended = is_empty
        self.was_cut = False
        """Whether its client left within it."""

    async def piece(self) -> bytes:
        """What comes next of it."""
        message = await self._receive()
        self.was_cut = message["type"] == "http.disconnect"
        self.has_ended = self.was_cut or not message.get("more_body")
        return bytes(message.get("body", b""))


def _announced_length(scope: Scope) -> int | None:
    """Bytes of the body: 0 for none, None where only its end tells."""
    length: int | None = 0
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            length = None
        elif name == b"content-length" and length is not None:
            length = int(value) if value.isdigit() else 0
    return length


def _waits_to_send(scope: Scope) -> bool:
    """Whether the client sends its body only when it is asked to: reading would be to ask."""
    return any(
        name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
    )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body in one piece, and then what `receive` has: that the client has left."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given, body
        if is_given:
            return await receive()
        is_given = True
        whole, body = body, b""
        return {"type": "http.request", "body": whole, "more_body": False}

    return replay
