"""How much may be in a body, and that nobody waits for the mistakes in it to be counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")

from pydantic import ValidationError

from models.tiny_server import TinyServer, tiny_server
from pagedkv.server.body_schema import Body, ListOf, WholeBody
from pagedkv.server.chat_schema import ChatRequest
from pagedkv.server.completion_schema import CompletionRequest
from pagedkv.server.limits import MAX_VALUES
from pagedkv.server.tokenize_schema import DetokenizeRequest, TokenizeRequest


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    with tiny_server() as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [{}] * 40_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 40_000}]}),
        (TokenizeRequest, {"messages": [{}] * 40_000}),
        (DetokenizeRequest, {"tokens": [-1] * 1_000_000}),
        (ChatRequest, {"messages": [], "modalities": [1] * 40_000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 40_000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 40_000}),
        (CompletionRequest, {"prompt": "a", "guided_choice": [1] * 40_000}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else next(iter(value)),
)
def test_a_list_has_one_mistake(kind: type[Body], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(body)
    assert refusal.value.error_count() < 10


TOO_MANY = "the body has more than 50,000 values, the token ids of prompts not counted"

LARGE = {
    "messages": {"messages": [{}] * (MAX_VALUES + 1)},
    "valid messages": {"messages": [{"role": "user", "content": "a"}] * (MAX_VALUES // 2)},
    "fields of a message": {"messages": [{str(i): 1 for i in range(MAX_VALUES)}]},
    "fields": {str(i): 1 for i in range(MAX_VALUES + 1)},
    "prompts of ids": {"prompt": [[1]] * MAX_VALUES, "n": 1},
    "prompts of text": {"prompt": ["a"] * MAX_VALUES, "n": 1},
    "integers that are no token ids": {"guided_json": {"enum": [1] * MAX_VALUES}},
    "integers in a message": {"messages": [[1] * MAX_VALUES]},
    "deep": {"metadata": {"a": [[["b"] * 10] * 100] * 100}},
}


@pytest.mark.parametrize("what", LARGE)
def test_a_body_of_too_many_values_has_one_mistake_and_is_not_looked_into(what: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        WholeBody.model_validate(LARGE[what])
    [error] = refusal.value.errors()
    assert error["msg"] == TOO_MANY


def test_as_many_values_as_there_may_be_are_read_and_token_ids_are_not_counted() -> None:
    class Listed(WholeBody):
        items: ListOf[int | str]
        prompt: list[Any] = []
        tokens: list[Any] = []

    items = [*range(MAX_VALUES - 6), "a"]
    ids = [1] * 200_000
    Listed.model_validate({"items": items, "prompt": [ids, ids], "tokens": ids})
    with pytest.raises(ValidationError):
        Listed.model_validate({"items": [*items, 1], "prompt": [ids, ids], "tokens": ids})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_who_sends_too_much_is_told_in_one_line(server: TinyServer, path: str) -> None:
    with server.http() as http:
        told = http.post(
            path,
            content=json.dumps({"messages": [{}] * 100_000, "prompt": "a"}),
            headers={"Content-Type": "application/json"},
        )
    error = told.json()["error"]
    assert told.status_code == 400
    assert error["message"] == TOO_MANY
