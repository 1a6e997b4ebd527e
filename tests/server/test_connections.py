"""How long a connection may be idle, or not be read from, and how long a head may be."""

from __future__ import annotations

import asyncio
import json
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
from pagedkv.server.access_log import AccessLog, Noted
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

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.calls.append("write_eof")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.calls or "abort" in self.calls

    def get_extra_info(self, name: str) -> Any:
        return None

    def pause_reading(self) -> None:
        self.calls += ()

    resume_reading = pause_reading

    def set_protocol(self, protocol: Any) -> None:
        raise AssertionError("nobody upgrades")


class Connection:
    """One connection of a server whose requests are answered when `may_answer` is set."""

    def __init__(self, state: ServerState | None = None, app: Any = None) -> None:
        self.loop = Loop()
        self.transport = Transport()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.state = state or ServerState()
        options: Any = {"log_config": None, "access_log": False, "lifespan": "off"}
        config = uvicorn.Config(app or self._answer, interface="asgi3", **options)
        config.load()
        self.lines: list[str] = []
        self.refusals: list[str] = []
        made: Any = bounded_protocol(
            LIMITS,
            log=AccessLog(self.lines.append, paths={"/", "/health"}),
            on_refusal=lambda error: self.refusals.append(error.reason),
        )
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

    def answers(self) -> list[tuple[int, dict[str, str], bytes]]:
        """Status, headers and body of each answer; bodies have lengths."""
        found, rest = [], self.transport.written
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            line, *lines = head.decode().split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
            length = int(headers["content-length"])
            found.append((int(line.split(" ")[1]), headers, rest[:length]))
            rest = rest[length:]
        return found

    def is_refused(self, reason: str) -> dict[str, str]:
        """The fields of the line of what was answered last, an error and the end of all."""
        status, headers, body = self.answers()[-1]
        assert headers["content-type"] == "application/json"
        assert headers["connection"] == "close"
        error = json.loads(body)["error"]
        assert error["message"] and (error["code"] or "invalid") == reason
        assert self.refusals == [reason]
        [line] = self.lines
        fields = dict(part.split("=", 1) for part in line.split(" "))
        assert list(fields) == ["time", "id", "method", "path", "status", "duration_s"]
        assert fields["id"] == headers["x-request-id"] and fields["status"] == str(status)
        # Closed for writing: all the way when the client has read that, or soon.
        assert self.transport.calls == ["write_eof"] and self.waiting(11.0) == []
        [timer] = self.waiting(1.0)
        timer.action()
        assert self.transport.calls == ["write_eof", "close"]
        return fields


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
        await third.asks(GET)
        [(status, headers, _)] = third.answers()
        assert status == 503 and headers["retry-after"] == "1"
        fields = third.is_refused("too_many_connections")
        assert (fields["method"], fields["path"]) == ("-", "-")
        assert fields["id"].startswith("req-")

    asyncio.run(run())


def test_who_is_refused_and_still_reads_takes_nobodys_place() -> None:
    async def run() -> None:
        state = ServerState()
        first, _, third = (Connection(state) for _ in range(3))
        assert third.transport.calls == ["write_eof"]
        first.protocol.connection_lost(None)
        assert Connection(state).transport.calls == []
        assert Connection(state).transport.calls == ["write_eof"]

    asyncio.run(run())


def test_of_those_who_are_refused_not_many_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        kind: Any = bounded_protocol(LIMITS)
        monkeypatch.setattr(f"{__name__}.bounded_protocol", lambda *_, **__: kind)
        monkeypatch.setattr(connections, "_MOST_REFUSED", 2)
        state = ServerState()
        many = [Connection(state) for _ in range(6)]
        calls = [connection.transport.calls for connection in many]
        assert calls == [[], [], ["write_eof"], ["write_eof"], ["close"], ["close"]]
        many[2].protocol.connection_lost(None)
        assert Connection(state).transport.calls == ["write_eof"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "method", "path", "name"),
    [
        (b"\x16\x03\x01\x02\x00\x01", "-", "-", "req-"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "PRI", "-", "req-"),
        (
            b"GET /health HTTP/1.1\r\nX-Request-Id: me\r\nA: b\r\nHost\x00: x\r\n\r\n",
            "GET",
            "/health",
            "me",
        ),
        (
            b"GET /health?a=secret HTTP/1.1\r\nA: b\r\nB: c\r\nC\x00: x\r\n\r\n",
            "GET",
            "/health",
            "req-",
        ),
        (b"GET /secret HTTP/1.1\r\nA: b\r\nB\x00: x\r\n\r\n", "GET", "-", "req-"),
        (GET[:-2] + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "GET", "/", "req-"),
        (GET[:-2] + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "GET", "/", "req-"),
    ],
)
def test_what_is_no_http_is_told_so_like_any_other_error(
    data: bytes, method: str, path: str, name: str
) -> None:
    async def run() -> None:
        connection = Connection()
        await connection.asks(data)
        assert connection.answers()[0][0] == 400
        fields = connection.is_refused("invalid")
        assert (fields["method"], fields["path"]) == (method, path)
        assert fields["id"].startswith(name) and "secret" not in connection.lines[0]
        await connection.asks(GET)
        assert len(connection.answers()) == 1

    asyncio.run(run())


def test_what_is_no_http_behind_a_request_waits_for_its_answer() -> None:
    async def run() -> None:
        connection = Connection()
        connection.may_answer.clear()
        await connection.asks(GET + GET + b"\x16\x03\x01")
        await connection.asks(GET)
        assert connection.transport.written == b"" and connection.transport.calls == []
        connection.may_answer.set()
        await connection.asks(b"")
        await connection.asks(b"")
        assert [status for status, _, _ in connection.answers()] == [200, 200, 400]
        connection.is_refused("invalid")

    asyncio.run(run())


class Reads:
    """An application that answers when it has the whole body; what it was told is kept."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.bodies: list[bytes] = []
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        self.bodies.append(body + message.get("body", b""))
        self.told.append(message["type"])
        await self.may_answer.wait()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
        )
        await send({"type": "http.response.body", "body": b""})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.told.append(scope["path"])


CHUNKED = b"POST /health HTTP/1.1\r\nX-Request-Id: me\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [b"xyz", b"-1", b"0x5", b"fffffffffffffffff", b"5 5"])
def test_a_body_of_wrong_sizes_is_refused_and_its_application_goes_on_to_nobody(
    size: bytes,
) -> None:
    async def run() -> None:
        reads = Reads()
        lines: list[str] = []
        connection = Connection(app=Noted(reads, log=AccessLog(lines.append, paths={"/health"})))
        reads.may_answer.set()
        await connection.asks(CHUNKED)
        await connection.asks(size + b"\r\nhello\r\n")
        await connection.asks(GET)
        [(status, headers, body)] = connection.answers()
        assert status == 400 and json.loads(body)["error"]["message"]
        assert headers["x-request-id"] == "me"
        assert connection.transport.calls == ["write_eof"]
        assert reads.told == ["http.disconnect", "/health"]
        assert len(lines) == 1 and " id=me " in lines[0] and connection.lines == []

    asyncio.run(run())


def test_a_body_of_wrong_sizes_that_waits_for_its_turn_reaches_no_application() -> None:
    async def run() -> None:
        reads = Reads()
        connection = Connection(app=reads)
        await connection.asks(GET + CHUNKED + b"xyz\r\n")
        assert connection.transport.written == b"" and reads.told == ["http.request"]
        reads.may_answer.set()
        await connection.asks(b"")
        assert [status for status, _, _ in connection.answers()] == [200, 400]
        assert connection.is_refused("invalid")["id"] == "me"
        assert reads.told == ["http.request", "/"]

    asyncio.run(run())


def test_who_leaves_has_left_all_requests_that_it_sent_ahead() -> None:
    async def run() -> None:
        reads = Reads()
        connection = Connection(app=reads)
        await connection.asks(GET + GET)
        assert reads.told == ["http.request"]
        connection.protocol.connection_lost(None)
        reads.may_answer.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert reads.told == ["http.request", "/"]  # of two, the one that had begun
        assert connection.transport.written == b""

    asyncio.run(run())


def test_http_1_0_is_answered_without_chunks_and_the_connection_closed() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"9")] if scope["path"] == "/health" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in (b"some ", b"", b"text"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    async def run() -> None:
        for path, has_length in ((b"/", False), (b"/health", True)):
            connection = Connection(app=answer)
            await connection.asks(b"GET %s HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" % path)
            head, _, body = connection.transport.written.partition(b"\r\n\r\n")
            assert body == b"some text" and b"chunked" not in head
            assert (b"content-length" in head) is has_length
            assert b"connection: close" in head and connection.transport.calls == ["close"]

    asyncio.run(run())


def test_who_would_rather_speak_another_protocol_is_answered_in_this_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        reads = Reads()
        reads.may_answer.set()
        connection = Connection(app=reads)
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"
        post = b"POST / HTTP/1.1\r\nContent-Length: 5\r\n" + offer
        whole = [
            GET[:-2] + offer,
            post + b"hello",
            CHUNKED[:-2] + offer + b"5\r\nhello\r\n0\r\n\r\n",
        ]
        for data in (*whole, GET):
            await connection.asks(data)
        for data in whole:
            for i in range(len(data)):
                await connection.asks(data[i : i + 1])
        await connection.asks(b"".join(whole))
        for _ in range(5):
            await connection.asks(b"")
        assert [status for status, _, _ in connection.answers()] == [200] * 10
        assert connection.transport.calls == []
        assert reads.bodies == [*(b"", b"hello", b"hello", b""), *(b"", b"hello", b"hello") * 2]

    asyncio.run(run())
    assert caplog.text == ""


def test_a_head_has_an_end_and_bodies_and_many_heads_may_be_longer() -> None:
    async def run() -> None:
        connection = Connection()
        line = b"X-More: " + b"y" * 990 + b"\r\n"
        await connection.asks(GET[:-2] + line * 30)
        assert connection.transport.calls == []
        await connection.asks(line * 40)
        assert connection.answers()[-1][0] == 431
        connection.is_refused("head_too_large")

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
        assert connection.answers()[-1][0] == 431
        connection.is_refused("head_too_large")

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


BODY = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"


def test_what_comes_behind_a_body_is_no_header() -> None:
    told: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        told.append([name for name, _ in scope["headers"]])
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        connection = Connection(app=app)
        for _ in range(2):
            await connection.asks(BODY + b"Authorization: Bearer k\r\n")
            await connection.asks(b"X-More: 1\r\n\r\n")
        assert [status for status, _, _ in connection.answers()] == [200, 200]

    asyncio.run(run())
    assert told == [[b"host", b"transfer-encoding"]] * 2


@pytest.mark.parametrize("line", [b"X-More: " + b"y" * 990 + b"\r\n", b"y" * 1_000])
def test_what_comes_behind_a_body_is_bounded_as_a_head_is(line: bytes) -> None:
    async def run() -> None:
        connection = Connection()
        connection.may_answer.clear()
        await connection.asks(BODY + b"X-More: ")
        for _ in range(60):
            await connection.asks(line)
        assert connection.transport.calls == []
        for _ in range(10):
            await connection.asks(line)
        assert [status for status, _, _ in connection.answers()] == [431]
        assert connection.transport.calls == ["write_eof"]

    asyncio.run(run())
