"""How long a connection may be idle, or not be read from, and how long a head may be."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")

import uvicorn
from uvicorn.server import ServerState

from pagedkv.server import connections
from pagedkv.server.connections import bounded_protocol
from pagedkv.server.limits import ServerLimits

LIMITS = ServerLimits(idle_s=11.0, stuck_s=22.0, max_connections=2)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Timer:
    def __init__(self, delay_s: float, action: Callable[[], object]) -> None:
        self.delay_s = delay_s
        self.action = action
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """The running loop, but timers are noted and never come."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, delay_s: float, action: Callable[[], object]) -> Timer:
        self.timers.append(Timer(delay_s, action))
        return self.timers[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)


class Transport:
    """A connection's other side."""

    def __init__(self) -> None:
        self.written = b""
        self.calls: list[str] = []

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return bool(self.calls)

    def get_extra_info(self, name: str) -> Any:
        return None

    def pause_reading(self) -> None:
        self.calls += ()

    resume_reading = pause_reading

    def set_protocol(self, protocol: Any) -> None:
        raise AssertionError("nobody upgrades")


class Connection:
    """One connection of a server whose requests are answered when `may_answer` is set."""

    def __init__(self, state: ServerState | None = None) -> None:
        self.loop = Loop()
        self.transport = Transport()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.state = state or ServerState()
        options: Any = {"log_config": None, "access_log": False, "lifespan": "off"}
        config = uvicorn.Config(self._answer, interface="asgi3", **options)
        config.load()
        made: Any = bounded_protocol(LIMITS)
        self.protocol = made(config=config, server_state=self.state, app_state={}, _loop=self.loop)
        self.protocol.connection_made(self.transport)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await self.may_answer.wait()
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def waiting(self, delay_s: float) -> list[Timer]:
        """Timers of this length that will come."""
        return [t for t in self.loop.timers if t.delay_s == delay_s and not t.is_cancelled]

    async def asks(self, data: bytes) -> None:
        self.protocol.data_received(data)
        for _ in range(5):
            await asyncio.sleep(0)


def test_a_connection_may_be_idle_for_a_while_before_between_and_not_within_requests() -> None:
    async def run() -> None:
        connection = Connection()
        [timer] = connection.waiting(11.0)
        timer.action()
        assert connection.transport.calls == ["close"]

        connection = Connection()
        await connection.asks(GET[:9])
        assert len(connection.waiting(11.0)) == 1  # a head that has no end is idle
        connection.may_answer.clear()
        await connection.asks(GET[9:])
        assert connection.waiting(11.0) == []
        connection.may_answer.set()
        await connection.asks(b"")
        assert b" 200 " in connection.transport.written
        for _ in range(3):
            assert len(connection.waiting(11.0)) == 1
            await connection.asks(GET)
        assert connection.transport.written.count(b" 200 ") == 4
        connection.protocol.connection_lost(None)
        assert connection.waiting(11.0) == []

    asyncio.run(run())


def test_a_connection_that_is_closed_after_an_answer_waits_for_nothing() -> None:
    async def run() -> None:
        connection = Connection()
        await connection.asks(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert connection.transport.calls == ["close"] and connection.waiting(11.0) == []

    asyncio.run(run())


def test_who_does_not_read_is_hung_up_on_unless_it_reads_again_or_is_gone() -> None:
    async def run() -> None:
        connection = Connection()
        connection.protocol.pause_writing()
        [timer] = connection.waiting(22.0)
        connection.protocol.resume_writing()
        assert connection.waiting(22.0) == []
        connection.protocol.pause_writing()
        [timer] = connection.waiting(22.0)
        timer.action()
        assert connection.transport.calls == ["abort"]  # to close would be to wait for it to read
        connection.protocol.connection_lost(None)
        assert connection.waiting(22.0) == []

    asyncio.run(run())


def test_one_connection_too_many_is_told_so_and_closed() -> None:
    async def run() -> None:
        state = ServerState()
        first, second, third = (Connection(state) for _ in range(3))
        assert first.transport.calls == second.transport.calls == []
        assert b" 503 " in third.transport.written and b"Retry-After" in third.transport.written
        assert third.transport.calls == ["close"] and third.waiting(11.0) == []
        await third.asks(GET)
        assert third.transport.written.count(b"HTTP/1.1") == 1

    asyncio.run(run())


def test_a_head_has_an_end_and_bodies_and_many_heads_may_be_longer() -> None:
    async def run() -> None:
        connection = Connection()
        line = b"X-More: " + b"y" * 990 + b"\r\n"
        await connection.asks(GET[:-2] + line * 30)
        assert connection.transport.calls == []
        await connection.asks(line * 40)
        assert b" 431 " in connection.transport.written
        assert connection.transport.calls == ["close"]

        connection = Connection()
        head = GET.replace(b"\r\n\r\n", b"\r\n" + line * 30 + b"\r\n")
        for i in range(4):
            await connection.asks(head)
            assert connection.transport.written.count(b" 200 ") == i + 1
        await connection.asks(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"x" * 100_000
        )
        await connection.asks(b"x" * 100_000)
        await connection.asks(head)
        assert connection.transport.written.count(b" 200 ") == 6
        assert b" 431 " not in connection.transport.written

    asyncio.run(run())


def test_what_came_before_a_head_is_no_part_of_it_and_every_head_is_bounded() -> None:
    async def run() -> None:
        connection = Connection()
        post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
        for i in range(3):
            for piece in (post[:30], post[30:], b"x" * 50_000, b"x" * 50_000):
                await connection.asks(piece)
            assert connection.transport.written.count(b" 200 ") == i + 1
        assert b" 431 " not in connection.transport.written
        begun = GET[:-2] + b"X-More: "
        await connection.asks(begun + b"y" * (65_536 - len(begun)))
        assert connection.transport.calls == []
        await connection.asks(b"y")
        assert b" 431 " in connection.transport.written
        assert connection.transport.calls == ["close"]

    asyncio.run(run())


def test_a_connection_whose_next_request_is_there_already_is_not_idle() -> None:
    async def run() -> None:
        connection = Connection()
        connection.may_answer.clear()
        await connection.asks(GET + GET)
        connection.may_answer.set()
        await asyncio.sleep(0)  # the first is answered
        connection.may_answer.clear()
        await connection.asks(b"")
        assert connection.transport.written.count(b" 200 ") == 1
        assert connection.waiting(11.0) == []
        connection.may_answer.set()
        await connection.asks(b"")
        assert connection.transport.written.count(b" 200 ") == 2
        assert len(connection.waiting(11.0)) == 1

    asyncio.run(run())


def test_there_are_not_more_connections_than_the_system_has_files_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlimited = -1

    def allowed(soft: int, hard: int, wanted: int) -> tuple[int, list[tuple[int, int]]]:
        asked: list[tuple[int, int]] = []
        made = SimpleNamespace(
            RLIMIT_NOFILE=7,
            RLIM_INFINITY=unlimited,
            getrlimit=lambda _: (soft, hard),
            setrlimit=lambda _, limits: asked.append(limits),
        )
        monkeypatch.setitem(sys.modules, "resource", made)
        return connections._allowed_connections(wanted), asked

    assert allowed(10_000, 20_000, 4_096) == (4_096, [])
    assert allowed(4_224, 20_000, 4_096) == (4_096, [])  # to the file
    assert allowed(4_223, 20_000, 4_096) == (4_096, [(4_224, 20_000)])
    assert allowed(1_024, unlimited, 4_096) == (4_096, [(4_224, unlimited)])
    assert allowed(1_024, 2_048, 4_096) == (1_920, [(2_048, 2_048)])
    assert allowed(64, 100, 4_096) == (1, [(100, 100)])
    monkeypatch.setitem(sys.modules, "resource", None)
    assert connections._allowed_connections(4_096) == 4_096
