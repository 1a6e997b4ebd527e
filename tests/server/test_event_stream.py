"""A stream is sent to its end, and whatever ends it, nothing of it stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")

from pagedkv.server.event_stream import EventStream, unless_left, watched
from pagedkv.server.exchange import ClientLeft


class Ends:
    """An exchange that only knows what ended it, in the order in which it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.left = asyncio.Event()

    def break_off(self, reason: Exception) -> None:
        self.told.append(type(reason).__name__)
        self.left.set()

    def close(self) -> None:
        self.told.append("closed")


class Client:
    """A client that sends something, and leaves when it is told to."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.sent: list[Any] = []
        self._has_said = False

    async def receive(self) -> Any:
        if not self._has_said:
            self._has_said = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


async def settle() -> None:
    """Let all go on that can; nobody but the test may be left afterwards."""
    for _ in range(5):
        await asyncio.sleep(0)


def nothing_is_left() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def pieces(*given: bytes, then: Exception | None = None) -> AsyncIterator[bytes]:
    for piece in given:
        yield piece
        await asyncio.sleep(0)
    if then is not None:
        raise then


def stream(events: AsyncIterator[bytes], exchange: Ends) -> EventStream:
    made: Any = exchange
    return EventStream(events, made)


def test_a_stream_has_a_beginning_its_pieces_and_an_end() -> None:
    async def run() -> None:
        client, exchange = Client(), Ends()

        async def send(message: Any) -> None:
            assert exchange.told == []  # it counts as open until its end was taken
            await client.send(message)

        await stream(pieces(b"a", b"b"), exchange)({}, client.receive, send)
        start, *bodies = client.sent
        assert start["type"] == "http.response.start" and start["status"] == 200
        headers = dict(start["headers"])
        assert b"content-length" not in headers and headers[b"cache-control"] == b"no-cache"
        assert [(body["body"], body["more_body"]) for body in bodies] == [
            *((b"a", True), (b"b", True), (b"", False))
        ]
        assert exchange.told == ["closed"]
        await settle()
        assert nothing_is_left()

    asyncio.run(run())


def test_a_stream_whose_client_has_left_ends_quietly() -> None:
    async def run() -> None:
        client, exchange = Client(), Ends()

        async def until_left() -> AsyncIterator[bytes]:
            yield b"a"
            await exchange.left.wait()
            raise ClientLeft

        client.leaves.set()
        await stream(until_left(), exchange)({}, client.receive, client.send)
        assert exchange.told == ["ClientLeft", "closed"]
        assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
        await settle()
        assert nothing_is_left()

    asyncio.run(run())


def test_a_stream_that_fails_is_closed_and_the_failure_goes_on() -> None:
    async def run() -> None:
        for by_sending in (False, True):
            client, exchange = Client(), Ends()

            async def send(message: Any) -> None:
                raise RuntimeError("broken")

            events = pieces(b"a", then=None if by_sending else RuntimeError("broken"))
            with pytest.raises(RuntimeError, match="broken"):
                await stream(events, exchange)(
                    {}, client.receive, send if by_sending else client.send
                )
            assert exchange.told == ["closed"]
            await settle()
            assert nothing_is_left()

    asyncio.run(run())


def test_what_is_watched_is_broken_off_only_by_leaving() -> None:
    async def run() -> None:
        client, exchange = Client(), Ends()
        made: Any = exchange
        async with watched(client.receive, made):
            await settle()
            assert exchange.told == []  # what a client sends is no leaving
            client.leaves.set()
            await settle()
            assert exchange.told == ["ClientLeft"]
        assert exchange.told == ["ClientLeft", "closed"]

    asyncio.run(run())


def test_whoever_waits_for_a_future_leaves_nothing_behind() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        client = Client()
        done: asyncio.Future[int] = loop.create_future()
        loop.call_soon(done.set_result, 5)
        assert await unless_left(client.receive, done) == 5
        await settle()
        assert nothing_is_left()
        waiting: asyncio.Future[int] = loop.create_future()
        client.leaves.set()
        with pytest.raises(ClientLeft):
            await unless_left(client.receive, waiting)
        assert waiting.cancelled()
        await settle()
        assert nothing_is_left()

    asyncio.run(run())


def test_what_is_found_as_its_client_leaves_is_given_to_nobody() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        client = Client()
        found: asyncio.Future[int] = loop.create_future()
        loop.call_soon(found.set_result, 5)
        # In the turn in which whoever waits for it is woken, and after that.
        loop.call_soon(loop.call_soon, client.leaves.set)
        with pytest.raises(ClientLeft):
            await unless_left(client.receive, found)
        assert found.result() == 5
        await settle()
        assert nothing_is_left()

    asyncio.run(run())
