"""Bodies made to break the server, out of its own OpenAPI document."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")
pytest.importorskip("schemathesis", reason="needs schemathesis")

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.json_schemas import SCHEMAS
from models.tiny_server import tiny_server

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")

SAYS_NO = frozenset(
    {
        *("model", "tools", "functions", "function_call", "tool_choice", "audio", "suffix"),
        *("web_search_options", "reasoning_effort", "verbosity", "modalities"),
    }
)

FORMS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")

_schemas = st.one_of(SCHEMAS, st.booleans(), st.dictionaries(st.text(), st.none(), max_size=2))
_regexes = st.one_of(
    st.from_regex(r"([a-c]|[a-c]{1,3}|\(a\|b\)\*?)+", fullmatch=True), st.text(max_size=9)
)
_grammars = st.one_of(
    st.sampled_from(['start: "a" start | "b"', 'root ::= "a" | "b" root', "start: start start"]),
    st.text(max_size=20),
)
_choices = st.lists(st.text(max_size=5), min_size=1, max_size=4)
_structures = {"json": _schemas, "regex": _regexes, "choice": _choices, "grammar": _grammars}
STRUCTURES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    *(values.map(lambda v, n=name: {f"guided_{n}": v}) for name, values in _structures.items()),
    *(
        values.map(lambda v, n=name: {"structured_outputs": {n: v}})
        for name, values in _structures.items()
    ),
    _schemas.map(
        lambda v: {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": v}}
        }
    ),
    st.just({"response_format": {"type": "json_object"}}),
)
"""Bodies' parts that say what form the answer has, most of which can be followed."""


def break_it(cases: int) -> None:
    """Ask `cases` times, half of them within the schema and half outside."""
    seen: Counter[int] = Counter()
    followed: Counter[int] = Counter()
    with tiny_server(max_model_len=40, num_tokens=640) as server:
        schema: Any = schemathesis.openapi.from_url(server.url + "/openapi.json")
        for path in POSTS:
            for mode in schemathesis.GenerationMode:
                strategy = schema[path]["POST"].as_strategy(generation_mode=mode)
                form = st.just({})
                if mode.is_positive and "completions" in path:
                    form = st.one_of(st.none(), st.just({}), STRUCTURES)
                limits = settings(
                    max_examples=max(cases // len(POSTS) // 2, 1),
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                )
                ask = asking(server.url, mode.is_positive, seen, followed)
                limits(given(case=strategy, form=form)(ask))()
        server.wait_until(lambda: not server.serving.exchanges and server.used_blocks == 0)
        assert server.http().get("/debug/verify").json()["verified"]
    print(f"statuses: {dict(seen)}, of answers of a form: {dict(followed)}")
    assert seen[400] and seen[200] and seen.total() >= cases * 0.7
    assert followed[200] or cases < 1_000 or find_spec("llguidance") is None


def asking(
    url: str, is_positive: bool, seen: Counter[int], followed: Counter[int]
) -> Callable[..., None]:
    """A test of one case. Statuses are counted in `seen`; in `followed`, those where `form` was
    given, which is what the answer is to be in place of what the schema makes of that, or None to
    leave it."""

    def ask(case: Any, form: dict[str, Any] | None) -> None:
        if is_positive and isinstance(case.body, dict):
            # Some of what the schema allows is refused for what it says: leave it out.
            left_out = SAYS_NO if form is None else SAYS_NO.union(FORMS, {"response_format"})
            for name in left_out.intersection(case.body):
                del case.body[name]
            case.body.update(form or {})
        told = case.call(base_url=url, timeout=60)
        seen[told.status_code] += 1
        followed[told.status_code] += bool(form)
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
