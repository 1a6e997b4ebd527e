"""What comes in, and what does not: keys, bodies, connections, hostile input."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")

import openai

from models.tiny_server import MODEL, TinyServer, tiny_server
from pagedkv.errors import InvalidInput
from pagedkv.server.guard import Guard
from pagedkv.server.limits import ServerLimits

LIMITS = ServerLimits(
    max_body_bytes=20_000, body_s=0.5, idle_s=1.0, max_connections=24, stuck_s=0.5
)
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    with tiny_server(limits=LIMITS) as made:
        yield made
        made.llm.verify()
        assert made.used_blocks == 0


def connect(server: TinyServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def read(connection: socket.socket) -> bytes:
    """All that comes until the other side has closed."""
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def test_without_a_key_nobody_gets_in_and_the_health_is_told() -> None:
    with tiny_server(serving={"api_keys": ("one", "two")}) as server:
        for key in ("one", "two"):
            assert server.client(api_key=key).models.list().data
        for key in ("three", "on", "onee"):
            with pytest.raises(openai.AuthenticationError) as refusal:
                server.client(api_key=key).models.list()
            assert refusal.value.code == "invalid_api_key"
        with server.http() as http:
            assert http.get("/health").status_code == 200
            for path in ("/metrics", "/debug/verify", "/openapi.json", "/v1/models", "/"):
                assert http.get(path).status_code == 401
            assert http.post("/v1/completions", content=b"x" * 10).status_code == 401


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"prompt": "a"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "max_tokens": 1e400}',
        b'{"prompt": "a", "max_tokens": 1.5}',
        b'{"prompt": "a", "max_tokens": "5"}',
        b'{"prompt": "a", "n": ' + b"9" * 5_000 + b"}",
        b'{"prompt": "a", "n": true}',
        b'{"prompt": [], "n": 1}',
        b'{"prompt": [[]]}',
        b'{"prompt": [""]}',
        b'{"prompt": [-1]}',
        b'{"prompt": [199]}',
        b'{"prompt": [99999999999999999999]}',
        b'{"prompt": ["a", 5]}',
        b'{"prompt": "a", "stop": ["' + b"x" * 5_000 + b'"]}',
        b'{"prompt": "a", "logit_bias": {"-5": 1}}',
        b'{"prompt": "a", "logit_bias": {"1e3": 1}}',
        b'{"prompt": ' + b"[" * 9_000 + b"]" * 9_000 + b"}",
        b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_malformed_body_is_refused_and_nothing_runs(server: TinyServer, body: bytes) -> None:
    with server.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            told = http.post(path, content=body, headers=JSON)
            if path == "/tokenize" and told.status_code == 200:
                continue
            assert told.status_code == 400, (path, told.text)
            assert told.json()["error"]["message"] and len(told.text) < 2_000
    assert server.used_blocks == 0


def test_an_empty_key_is_refused() -> None:
    for keys in (("",), ("one", "")):
        with pytest.raises(InvalidInput, match="api_key is empty"):
            Guard(lambda *_: None, keys=keys, limits=LIMITS)


def test_limits_out_of_range_are_one_line() -> None:
    for name, value, problem in (
        ("body_s", 0.0, "body_s is 0.0: give more than 0 seconds"),
        ("max_streams", 0, "max_streams is 0: give at least 1"),
        ("max_waiting", -1, "max_waiting is -1: give at least 0"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            ServerLimits(**{name: value})
    assert ServerLimits(max_waiting=0, max_prompt_tokens=None).max_waiting == 0


def test_huge_numbers_are_bounded(server: TinyServer) -> None:
    with server.http() as http:
        asked: dict[str, Any] = {"prompt": "a", "max_tokens": 10**18, "temperature": 0}
        told = http.post("/v1/completions", json=asked)
        assert told.status_code == 400 and "give at most 511" in told.text
        for options in ({"n": 10**18}, {"best_of": 10**18}, {"seed": -(10**30)}, {"top_k": 10**30}):
            told = http.post("/v1/completions", json={**asked, "max_tokens": 2, **options})
            assert told.status_code in (200, 400)


def test_a_body_past_the_limit_is_413_whether_announced_or_not(server: TinyServer) -> None:
    with server.http() as http:
        body = json.dumps({"prompt": "x" * 30_000}).encode()
        told = http.post("/v1/completions", content=body, headers=JSON)
        assert told.status_code == 413 and told.json()["error"]["code"] == "body_too_large"
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(20):
            connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert b" 413 " in read(connection)


class Guarded:
    """A guard alone, before an application that waits until it may answer."""

    def __init__(self, **limits: Any) -> None:
        self.guard = Guard(self._answer, keys=("sesame",), limits=ServerLimits(**limits))
        self.bodies: list[bytes] = []
        self.may_answer = asyncio.Event()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.bodies.append(message["body"])
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.after = await receive()

    async def ask(self, *pieces: dict[str, Any], **headers: str) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers for a request that arrives in these pieces."""
        coming = iter([*pieces, {"type": "http.disconnect"}])

        async def receive() -> Any:
            return next(coming)

        return await self.ask_of(receive, **headers)

    async def ask_of(self, receive: Any, **headers: str) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers for a request whose body `receive` has."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        given = {"authorization": "Bearer sesame", **headers}
        scope = {
            "type": "http",
            "path": "/v1/completions",
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in given.items()],
        }
        await self.guard(scope, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"])


def piece(body: bytes, *, is_last: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": not is_last}


def test_a_body_comes_in_one_piece_and_then_the_client_leaves() -> None:
    async def run() -> None:
        guarded = Guarded(max_body_bytes=10)
        guarded.may_answer.set()
        pieces = piece(b"abc", is_last=False), piece(b"de")
        assert (await guarded.ask(*pieces, content_length="5"))[0] == 200
        assert guarded.bodies == [b"abcde"] and guarded.after == {"type": "http.disconnect"}

    asyncio.run(run())


def test_what_is_refused_before_its_body_was_read_closes_the_connection() -> None:
    async def run() -> None:
        guarded = Guarded(max_body_bytes=10)
        guarded.may_answer.set()
        for status, pieces, headers in (
            (413, [], {"content_length": "11"}),  # not a byte of it is read
            (413, [piece(b"x" * 6, is_last=False)] * 2, {"transfer_encoding": "chunked"}),
            (400, [piece(b"x", is_last=False)], {"content_length": "5"}),
            (401, [], {"authorization": "Basic sesame"}),
            (401, [], {"authorization": "Bearer"}),
        ):
            told, found = await guarded.ask(*pieces, **headers)
            assert told == status and found[b"connection"] == b"close"
        assert guarded.bodies == [] and guarded.guard._held_bytes == 0

    asyncio.run(run())


class Slowly:
    """A client whose body comes as far as `pieces` go, and goes on when it may."""

    def __init__(self, *pieces: bytes) -> None:
        self._coming = [piece(body, is_last=False) for body in pieces]
        self.may_go_on = asyncio.Event()
        self.num_given = 0

    async def __call__(self) -> dict[str, Any]:
        if self._coming:
            self.num_given += 1
            return self._coming.pop(0)
        await self.may_go_on.wait()
        return piece(b"")


def test_bodies_that_arrive_together_are_bounded_and_what_is_announced_takes_nothing() -> None:
    async def run() -> None:
        guarded = Guarded(max_body_bytes=10)
        silent = [Slowly() for _ in range(100)]
        slow = [Slowly(b"x" * 10) for _ in range(64)]
        asked = [
            asyncio.create_task(guarded.ask_of(client, content_length="10"))
            for client in (*silent, *slow)
        ]
        await asyncio.sleep(0)
        refused = Slowly(b"x", b"y", b"z")
        refused.may_go_on.set()
        status, headers = await guarded.ask_of(refused, transfer_encoding="chunked")
        assert status == 503 and headers[b"retry-after"] == b"1"
        assert refused.num_given == 3  # or it would never see what it is told
        for client in (*silent, *slow):
            client.may_go_on.set()
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert guarded.guard.num_asking == 164
        # They wait for their answers, and hold up nobody.
        assert guarded.guard._held_bytes == 0
        more = asyncio.create_task(guarded.ask(piece(b"x"), content_length="1"))
        guarded.may_answer.set()
        assert {status for status, _ in await asyncio.gather(*asked, more)} == {200}
        assert guarded.guard.num_asking == 0

    asyncio.run(run())


def test_a_client_that_asks_before_it_sends_is_told_that_it_need_not() -> None:
    async def run() -> None:
        guarded = Guarded(max_body_bytes=10)
        client = Slowly(b"x")
        told = await guarded.ask_of(client, content_length="11", expect="100-continue")
        assert told[0] == 413 and client.num_given == 0

    asyncio.run(run())


def test_a_body_that_never_ends_is_answered_and_closed(server: TinyServer) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        )
        told = read(connection)
        assert b" 408 " in told and b"did not arrive within 0.5 seconds" in told


def test_a_head_that_never_ends_is_closed(server: TinyServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        for _ in range(200):
            try:
                connection.sendall(b"X-More: " + b"y" * 1000 + b"\r\n")
            except (BrokenPipeError, ConnectionResetError):
                break
        assert b" 431 " in read(connection)
    with connect(server) as connection:
        connection.sendall(b"GET /health HT")
        assert read(connection) == b""  # after idle_s


def test_a_second_head_that_never_ends_is_closed_too(server: TinyServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        told = b""
        while not told.endswith(b"}"):
            told += connection.recv(65536)
        assert told.startswith(b"HTTP/1.1 200")
        connection.sendall(b"G")
        assert read(connection) == b""  # after idle_s


def test_one_connection_too_many_is_told_so_as_clients_understand_it() -> None:
    with tiny_server(limits=ServerLimits(max_connections=1)) as server:
        with connect(server) as only:
            server.wait_until(lambda: server.server.server_state.connections)
            for _ in range(3):
                with pytest.raises(openai.InternalServerError) as refusal:
                    server.client().models.list()
                assert refusal.value.code == "too_many_connections"
                assert refusal.value.request_id is not None
                assert refusal.value.response.headers["retry-after"] == "1"
            only.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            told = read(only)
        assert b'\npagedkv_requests_refused_total{reason="too_many_connections"} 3.0\n' in told
        server.wait_until(lambda: not server.server.server_state.connections)
        assert server.client().models.list().data


def test_between_requests_a_connection_may_be_as_idle_as_before_the_first() -> None:
    with tiny_server(limits=ServerLimits(idle_s=33.5)) as server:
        assert server.server.config.timeout_keep_alive == 34  # uvicorn's own: 5 seconds


def test_idle_connections_are_bounded_closed_and_logged_once(
    server: TinyServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.wait_until(lambda: not server.server.server_state.connections)
    connections = [connect(server) for _ in range(60)]
    told = [read(connection) for connection in connections]  # ends when all are closed
    assert sum(b" 503 " in answer for answer in told) == 60 - LIMITS.max_connections
    for connection in connections:
        connection.close()
    assert sum("connections" in record.message for record in caplog.records) == 1
    server.client().completions.create(model=MODEL, prompt="Hi", max_tokens=2)


def test_a_client_that_never_reads_is_hung_up_on_and_its_blocks_come_back(
    server: TinyServer,
) -> None:
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(
            {
                "prompt": [[5 + i, 6] for i in range(16)],
                "max_tokens": 500,
                "logprobs": 20,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        server.wait_until(lambda: server.used_blocks > 0)
        server.wait_until(lambda: not server.server.server_state.connections)
    server.wait_until(lambda: not server.serving.exchanges and server.used_blocks == 0)


def test_what_is_no_http_is_answered_and_logged_once(
    server: TinyServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        with connect(server) as connection:
            connection.sendall(b"\x16\x03\x01 no http at all\r\n\r\n")
            assert b" 400 " in read(connection)
    assert sum("Invalid HTTP" in record.getMessage() for record in caplog.records) <= 1


def test_unknown_paths_and_methods_have_openais_shape(server: TinyServer) -> None:
    with server.http() as http:
        for told, status in (
            (http.get("/nowhere"), 404),
            (http.get("/v1/completions"), 405),
            (http.delete("/v1/models"), 405),
        ):
            assert told.status_code == status and told.json()["error"]["message"]
