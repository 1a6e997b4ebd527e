"""The page, its files, and its stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources

from fastapi import FastAPI, Response
from starlette.types import Receive, Scope, Send

from pagedkv.server.memory_page.watch import MemoryWatch
from pagedkv.server.serving import Serving
from pagedkv.simulate.palette import base_stylesheet

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _files() -> dict[str, tuple[bytes, str]]:
    """Content and type of each file of the page, by its path on the server."""
    found = {"/memory/base.css": (base_stylesheet().encode(), _TYPES[".css"])}
    for asset in resources.files("pagedkv.server.memory_page").joinpath("assets").iterdir():
        ending = asset.name[asset.name.rfind(".") :]
        if ending in _TYPES:
            path = "/memory" if asset.name == "index.html" else f"/memory/{asset.name}"
            found[path] = (asset.read_bytes(), _TYPES[ending])
    return found


FILES = _files()

OPEN_PATHS = frozenset(FILES)
"""What may be read without a key: it is the same for everybody, and knows nothing of the memory.
The page asks for the key, keeps it while it is open, and shows it when it asks for the stream."""


def add_memory_page(app: FastAPI, serving: Serving) -> MemoryWatch:
    """`/memory`, and `/memory/stream`, which tells it what the memory is doing.

    What is returned tells it, and is to keep its history.
    """
    watch = MemoryWatch(serving)

    for path, (content, media_type) in FILES.items():
        app.add_api_route(
            path, _file(content, media_type), methods=["GET", "HEAD"], include_in_schema=False
        )

    @app.get("/memory/stream", include_in_schema=False)
    async def stream() -> Response:
        watch.check_open()
        return _MemoryStream(watch.messages())

    return watch


def _file(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    """An endpoint that answers with a file. It takes nothing: a parameter would be the query's."""

    async def answer() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return answer


class _MemoryStream(Response):
    """Sends messages as they come, until either side has enough."""

    media_type = "application/octet-stream"

    def __init__(self, messages: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with contextlib.aclosing(self._messages) as messages:  # type: ignore[type-var]
            async for piece in messages:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
