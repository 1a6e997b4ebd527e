"""Pages of other origins use the server where they are let, and only then."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")

import httpx

from models.tiny_server import TinyServer, tiny_server
from pagedkv.errors import InvalidInput
from pagedkv.server.cross_origin import check_origin
from pagedkv.server.limits import ServerLimits

PAGE = "https://page.example"
KEY = {"Authorization": "Bearer sesame"}
ALLOWED = "access-control-allow-origin"
LIMITS = ServerLimits(max_body_bytes=5_000, body_s=0.5)


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    serving = {"allow_origins": [PAGE, "http://localhost:3000"], "api_keys": ["sesame"]}
    with tiny_server(limits=LIMITS, serving=serving) as made:
        yield made


def preflight(server: TinyServer, origin: str, method: str = "POST") -> httpx.Response:
    """What a browser asks before a page's own request; it shows no key."""
    with server.http() as http:
        return http.options(
            "/v1/chat/completions",
            headers={
                "Origin": origin,
                "Access-Control-Request-Method": method,
                "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
            },
        )


def test_a_browser_is_told_beforehand_and_without_a_key(server: TinyServer) -> None:
    for origin in (PAGE, "http://localhost:3000"):
        told = preflight(server, origin)
        assert told.status_code == 200 and told.headers[ALLOWED] == origin
        assert "x-stainless-os" in told.headers["access-control-allow-headers"]
        assert "POST" in told.headers["access-control-allow-methods"]
        assert told.headers["x-request-id"].startswith("req-")
        assert "access-control-allow-credentials" not in told.headers
    for origin in ("https://other.example", PAGE + ".evil.example", "null", PAGE + ":444"):
        told = preflight(server, origin)
        assert told.status_code == 400 and ALLOWED not in told.headers
    assert preflight(server, PAGE, "DELETE").status_code == 400


def test_without_an_origin_to_allow_there_is_nothing_for_browsers() -> None:
    with tiny_server(serving={"api_keys": ["sesame"]}) as server:
        assert preflight(server, PAGE).status_code == 401
        with server.http() as http:
            told = http.get("/v1/models", headers={**KEY, "Origin": PAGE})
            assert told.status_code == 200 and ALLOWED not in told.headers
            assert "vary" not in told.headers


def test_a_page_can_read_every_answer_refusals_too(server: TinyServer) -> None:
    http = server.http()
    page = {"Origin": PAGE}
    for told, status in (
        (http.get("/v1/models", headers={**KEY, **page}), 200),
        (http.get("/v1/models", headers=page), 401),
        (http.get("/nowhere", headers={**KEY, **page}), 404),
        (http.post("/v1/completions", content=b"{", headers={**KEY, **page}), 400),
        (http.post("/v1/completions", content=b"x" * 9_000, headers={**KEY, **page}), 413),
        (http.post("/v1/completions", json={"prompt": "a"}, headers={**KEY, **page}), 200),
    ):
        assert told.status_code == status and told.headers[ALLOWED] == PAGE
        exposed = told.headers["access-control-expose-headers"].lower()
        assert "x-request-id" in exposed and "retry-after" in exposed
        assert "Origin" in told.headers["vary"] and "x-request-id" in told.headers
    assert told.json()["object"] == "text_completion"


def test_who_comes_from_elsewhere_is_answered_and_its_browser_shows_nothing(
    server: TinyServer,
) -> None:
    http = server.http()
    told = http.get("/v1/models", headers={**KEY, "Origin": "https://other.example"})
    assert told.status_code == 200 and ALLOWED not in told.headers
    assert ALLOWED not in http.get("/v1/models", headers=KEY).headers  # no browser at all


def test_a_page_reads_a_stream_as_it_comes_and_may_leave_it(server: TinyServer) -> None:
    body: dict[str, Any] = {"prompt": "Hi", "max_tokens": 9, "stream": True, "ignore_eos": True}
    http = server.http()
    with http.stream("POST", "/v1/completions", json=body, headers={**KEY, "Origin": PAGE}) as told:
        assert told.headers[ALLOWED] == PAGE and told.headers["cache-control"] == "no-cache"
        lines = [line for line in told.iter_lines() if line]
    assert len(lines) > 3 and lines[-1] == "data: [DONE]"
    body |= {"max_tokens": 400}
    with http.stream("POST", "/v1/completions", json=body, headers={**KEY, "Origin": PAGE}) as told:
        next(told.iter_lines())
    server.wait_until(lambda: not server.serving.is_busy and server.used_blocks == 0)


def test_the_memory_can_be_watched_from_there(server: TinyServer) -> None:
    headers = {**KEY, "Origin": PAGE}
    with server.http().stream("GET", "/memory/stream", headers=headers) as told:
        assert told.headers[ALLOWED] == PAGE
        assert next(told.iter_raw())


def test_the_guard_holds_before_what_comes_from_pages(server: TinyServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: https://page.example\r\n"
            b"Authorization: Bearer sesame\r\nContent-Length: 100\r\n\r\n{"
        )
        told = b""
        while piece := connection.recv(65536):
            told += piece
    assert b" 408 " in told and b"https://page.example" in told and b"onnection: close" in told


def test_all_may_be_let_in() -> None:
    with tiny_server(serving={"allow_origins": ["*"]}) as server, server.http() as http:
        for origin in (PAGE, "null"):
            assert preflight(server, origin).headers[ALLOWED] == "*"
            assert http.get("/health", headers={"Origin": origin}).headers[ALLOWED] == "*"
        assert "access-control-allow-credentials" not in http.get("/health").headers


@pytest.mark.parametrize(
    "origin",
    [
        *("", "example.org", "https://", "https://example.org/", "https://Example.org", "null"),
        *("https://example.org:443", "http://localhost:80", "https://*.example.org", "https://a b"),
        *("https://me@example.org", "https://example.org?x", "https://example.org\n"),
    ],
)
def test_what_no_browser_sends_is_refused_in_one_line(origin: str) -> None:
    with pytest.raises(InvalidInput, match="give it as browsers send it") as refusal:
        check_origin(origin)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "origin",
    [
        *("*", "https://example.org", "http://localhost:3000", "http://[::1]:8080"),
        *("https://example.org:80", "http://a.b-c.example:443", "chrome-extension://abcdef"),
    ],
)
def test_what_browsers_send_is_taken(origin: str) -> None:
    check_origin(origin)
