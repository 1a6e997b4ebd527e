"""Bodies made to break the server, out of its own OpenAPI document."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")
pytest.importorskip("schemathesis", reason="needs schemathesis")

import schemathesis
from hypothesis import HealthCheck, given, settings

from models.tiny_server import tiny_server

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")

SAYS_NO = frozenset(
    {
        *("model", "tools", "functions", "function_call", "tool_choice", "audio", "suffix"),
        *("web_search_options", "response_format", "reasoning_effort", "verbosity", "modalities"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)


def break_it(cases: int) -> None:
    """Ask `cases` times, half of them within the schema and half outside."""
    seen: Counter[int] = Counter()
    with tiny_server(max_model_len=40, num_tokens=640) as server:
        schema: Any = schemathesis.openapi.from_url(server.url + "/openapi.json")
        for path in POSTS:
            for mode in schemathesis.GenerationMode:
                strategy = schema[path]["POST"].as_strategy(generation_mode=mode)
                limits = settings(
                    max_examples=max(cases // len(POSTS) // 2, 1),
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                )
                limits(given(case=strategy)(asking(server.url, mode.is_positive, seen)))()
        server.wait_until(lambda: not server.serving.exchanges and server.used_blocks == 0)
        assert server.http().get("/debug/verify").json()["verified"]
    print(f"statuses: {dict(seen)}")
    assert seen[400] and seen[200] and seen.total() >= cases * 0.7


def asking(url: str, is_positive: bool, seen: Counter[int]) -> Callable[[Any], None]:
    """A test of one case; statuses are counted in `seen`."""

    def ask(case: Any) -> None:
        if is_positive and isinstance(case.body, dict):
            # Some of what the schema allows is refused for what it says: leave it out.
            for name in SAYS_NO.intersection(case.body):
                del case.body[name]
        told = case.call(base_url=url, timeout=60)
        seen[told.status_code] += 1
        assert told.status_code < 500, told.text
        if told.status_code >= 400:
            assert set(told.json()["error"]) == {"message", "type", "param", "code"}

    return ask


def test_bodies_out_of_the_document_and_beside_it_break_nothing() -> None:
    break_it(48)


@pytest.mark.exhaustive
def test_two_thousand_bodies_break_nothing() -> None:
    break_it(2_400)


def test_the_document_tells_the_errors_that_are_answered() -> None:
    with tiny_server() as server:
        document = server.http().get("/openapi.json").json()
    for path in POSTS:
        responses = document["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "413", "429", "503"} <= set(responses)
        assert "422" not in responses


def test_cut_and_mangled_bodies_break_nothing() -> None:
    """Bytes, where a schema has only JSON."""
    rng = random.Random(0)
    body = b'{"prompt": ["Once", "upon"], "n": 2, "max_tokens": 3, "stop": ["a"], "seed": 7}'
    with tiny_server() as server:
        http = server.http()
        for _ in range(150):
            mangled = bytearray(body[: rng.randrange(len(body) // 2, len(body) + 1)])
            for _ in range(rng.randrange(3)):
                mangled[rng.randrange(len(mangled))] = rng.randrange(256)
            told = http.post(
                "/v1/completions",
                content=bytes(mangled),
                headers={"Content-Type": "application/json"},
            )
            assert told.status_code in (200, 400), (bytes(mangled), told.text)
        server.wait_until(lambda: server.used_blocks == 0)
        server.llm.verify()
