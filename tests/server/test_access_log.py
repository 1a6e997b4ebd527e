"""Each answer bears the id of its request; a line says how it went, and nothing that was said."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")

import openai

from models.tiny_server import MODEL, TinyServer, tiny_server
from pagedkv.server.access_log import AccessLog, Noted
from pagedkv.server.limits import ServerLimits

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SECRET = "sesame"


class Log:
    """Lines of a server's, by the names of their fields."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    def fields(self) -> list[dict[str, str]]:
        return [dict(part.split("=", 1) for part in line.split(" ")) for line in self.lines]

    def last(self, server: TinyServer, count: int) -> dict[str, str]:
        """The fields of the line that makes it `count`: it comes after the answer."""
        server.wait_until(lambda: len(self.lines) >= count)
        assert len(self.lines) == count
        return self.fields()[-1]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def server(log: Log) -> Iterator[TinyServer]:
    serving = {"access_log": log, "api_keys": [SECRET]}
    with tiny_server(limits=ServerLimits(max_body_bytes=5_000), serving=serving) as made:
        yield made


def test_an_answer_is_called_what_its_request_is_called(server: TinyServer, log: Log) -> None:
    client = server.client(api_key=SECRET)
    answers: list[Any] = [
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2),
        client.completions.create(model=MODEL, prompt="Hi", max_tokens=2),
    ]
    for answer in answers:
        assert answer._request_id == answer.id
    assert len({answer.id for answer in answers}) == 2
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt="Hi", max_tokens=2, stream=True
    ) as told:
        events = list(told.parse())
        assert told.headers["x-request-id"] == events[0].id == events[-1].id
    server.wait_until(lambda: len(log.lines) == 3)
    assert [found["id"] for found in log.fields()] == [*(a.id for a in answers), events[0].id]


@pytest.mark.parametrize("sent", ["a", "x" * 128, "trace-1/span:2.3_4@host+5=", "cmpl-7"])
def test_what_the_client_calls_its_request_is_told_back(
    server: TinyServer, log: Log, sent: str
) -> None:
    client = server.client(api_key=SECRET, default_headers={"X-Request-Id": sent})
    answer = client.completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    assert answer._request_id == sent != answer.id
    assert log.last(server, 1)["id"] == sent
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=MODEL, prompt="Hi", max_tokens=-1)
    assert refusal.value.request_id == sent


@pytest.mark.parametrize("sent", ["", "x" * 129, "a b", "a\tb", "<b>", "a;b", "\xe9", 'a"b'])
def test_what_is_not_well_formed_is_not_told_back(server: TinyServer, log: Log, sent: str) -> None:
    with server.http() as http:
        told = http.get(
            "/health", headers=[(b"x-request-id", sent.encode("latin-1")), (b"x-request-id", b"b")]
        )
    assert re.fullmatch("req-[0-9a-f]{32}", told.headers["x-request-id"])
    assert log.last(server, 1)["id"] == told.headers["x-request-id"]


def test_every_answer_bears_an_id_whoever_gives_it(server: TinyServer, log: Log) -> None:
    key = {"Authorization": f"Bearer {SECRET}"}
    model = "/v1/models/{model:path}"
    seen = set()
    with server.http() as http:
        for method, asked, options, status, path in (
            ("GET", "/health", {}, 200, "/health"),
            ("HEAD", "/version", {}, 200, "/version"),
            ("GET", "/v1/models", {}, 401, "/v1/models"),
            ("POST", "/tokenize", {"content": b"x" * 9_000, "headers": key}, 413, "/tokenize"),
            ("POST", "/tokenize", {"content": b"{", "headers": key}, 400, "/tokenize"),
            ("GET", "/v1/completions", {"headers": key}, 405, "/v1/completions"),
            ("GET", "/v1/models/my%20name", {"headers": key}, 404, model),
            ("GET", "/a%20secret%0Aid=1?of=mine", {"headers": key}, 404, "-"),
            ("GET", "/memory/base.css", {}, 200, "/memory/base.css"),
            ("GET", "/metrics", {"headers": key}, 200, "/metrics"),
        ):
            made: Any = options
            told = http.request(method, asked, **made)
            found = log.last(server, len(seen) + 1)
            [name] = told.headers.get_list("x-request-id")
            assert name.startswith("req-")
            assert told.status_code == status
            assert [found[field] for field in ("id", "method", "path", "status")] == [
                *(name, method, path, str(status))
            ]
            assert "tokens_in" not in found
            seen.add(name)
    assert len(seen) == 10
    assert not any("secret" in line or "mine" in line or "name" in line for line in log.lines)


def test_a_line_has_the_tokens_and_nothing_of_the_text(server: TinyServer, log: Log) -> None:
    client = server.client(api_key=SECRET)
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": ["Hello", "Good morning"],
        "max_tokens": 7,
        "extra_body": {"ignore_eos": True, "cache_salt": "salt"},
        "user": "me",
    }
    count = sum(len(server.llm.tokenizer(text)["input_ids"]) for text in asked["prompt"])
    client.completions.create(**asked, n=2)
    found = log.last(server, 1)
    assert list(found) == [
        *("time", "id", "method", "path", "status", "tokens_in", "tokens_out", "duration_s")
    ]
    assert (found["method"], found["status"]) == ("POST", "200")
    assert (found["tokens_in"], found["tokens_out"]) == (str(count), "28")
    list(client.completions.create(**asked, stream=True))
    found = log.last(server, 2)
    assert (found["tokens_in"], found["tokens_out"]) == (str(count), "14")
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(**{**asked, "prompt": [199]})
    found = log.last(server, 3)
    assert (found["status"], found["tokens_in"], found["tokens_out"]) == ("400", "1", "0")
    for line in log.lines:
        assert not re.search("Hello|morning|salt|me |sesame|ignore", line), line


@pytest.mark.parametrize("stream", [False, True])
def test_who_left_is_told_apart_with_what_was_said_till_then(
    server: TinyServer, log: Log, stream: bool
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": [[5 + i] * 20 for i in range(40)],
        "max_tokens": 480,
        "extra_body": {"ignore_eos": True},
    }
    if stream:
        events = server.client(api_key=SECRET).completions.create(**asked, stream=True)
        next(iter(events))
        events.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            server.client(api_key=SECRET, timeout=0.2).completions.create(**asked)
    found = log.last(server, 1)
    assert (found["status"], found["tokens_in"]) == ("499", "800")
    assert int(stream) <= int(found["tokens_out"]) < 40 * 480


def test_a_log_that_cannot_be_written_ends_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = threading.Event()

    def full(line: str) -> None:
        tried.set()
        raise OSError(28, "No space left on device")

    with tiny_server(serving={"access_log": full}) as server, server.http() as http:
        for _ in range(3):
            assert http.get("/health").status_code == 200
            assert tried.wait(60)
    [record] = [found for found in caplog.records if "access log" in found.getMessage()]
    assert "No space left" in record.getMessage()


def test_without_a_log_answers_bear_their_ids_all_the_same() -> None:
    with tiny_server() as server, server.http() as http:
        assert http.get("/health").headers["x-request-id"].startswith("req-")


def test_the_duration_is_that_of_the_whole_answer_and_a_failure_has_its_line() -> None:
    async def run() -> None:
        now_s = 10.0
        log = Log()

        async def application(scope: Any, receive: Any, send: Any) -> None:
            nonlocal now_s
            now_s += 0.25
            if scope["path"] == "/begun":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                now_s += 1.0
            raise RuntimeError("broken")

        noted = Noted(
            application,
            log=AccessLog(log, paths={"/begun"}, wall_clock=lambda: 1_700_000_000.25),
            clock=lambda: now_s,
        )

        async def send(message: Any) -> None:
            assert dict(message["headers"])[b"x-request-id"] == b"me"

        for path in ("/begun", "/other"):
            scope = {"type": "http", "method": "GET", "path": path}
            with pytest.raises(RuntimeError, match="broken"):
                await noted({**scope, "headers": [(b"x-request-id", b"me")]}, None, send)
        before = "time=2023-11-14T22:13:20.250Z id=me method=GET"
        assert log.lines == [
            f"{before} path=/begun status=200 duration_s=1.250",
            f"{before} path=- status=- duration_s=0.250",
        ]

    asyncio.run(run())
