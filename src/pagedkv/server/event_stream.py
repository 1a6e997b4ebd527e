"""Server-sent events, and noticing that nobody reads any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from pagedkv.server.exchange import ClientLeft, Exchange

Found = TypeVar("Found")

DONE = b"data: [DONE]\n\n"

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip: what says nothing for long is cut by proxies."""


class EventStream(Response):
    """Sends each piece of `events` as it comes; ends the exchange when the client has left.

    Starlette's own streaming response takes a task group and two more layers for each stream.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], exchange: Exchange) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        async with watched(receive, self._exchange):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            with contextlib.suppress(ClientLeft):
                async for piece in self._events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def watched(receive: Receive, exchange: Exchange) -> AsyncIterator[None]:
    """Within, the exchange ends when its client leaves; afterwards it is closed."""
    watcher = asyncio.create_task(_end_when_left(receive, exchange))
    try:
        yield
    finally:
        watcher.cancel()
        exchange.close()


async def unless_left(receive: Receive, future: asyncio.Future[Found]) -> Found:
    """Wait for `future`, and cancel it if the client leaves. Raises `ClientLeft`.

    What is done for a client that has left meanwhile is given to nobody, or its prompt would be
    admitted.
    """
    leaving = asyncio.create_task(_until_left(receive))
    try:
        await asyncio.wait((future, leaving), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # it may have left in this very turn of the loop
        if leaving.done():
            raise ClientLeft
        return future.result()
    finally:
        leaving.cancel()
        future.cancel()


async def _end_when_left(receive: Receive, exchange: Exchange) -> None:
    await _until_left(receive)
    exchange.break_off(ClientLeft())


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
