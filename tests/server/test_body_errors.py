"""What is wrong with a body is told in one line that says where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")

import openai

from models.tiny_server import MODEL, TinyServer, tiny_server

KINDS = "give all texts, all token ids, or all lists of token ids"


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    with tiny_server() as made:
        yield made


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "there is no body: send a JSON object"),
        (b"[1]", "the body is a list: send a JSON object"),
        (b"null", "the body is null: send a JSON object"),
        (b"true", "the body is true or false: send a JSON object"),
        (b"1.5", "the body is a number: send a JSON object"),
        (b'"text"', "the body is a text: send a JSON object"),
        (b"{", "the body is no JSON: line 1, character 2: Expecting property name"),
        (b"hello", "the body is no JSON: line 1, character 1: Expecting value"),
        (b'{"prompt": "a",\n "n" 5}', "no JSON: line 2, character 6: Expecting ':' delimiter"),
        (b'{"prompt":\n\n"a\nb"}', "no JSON: line 3, character 3: Invalid control character"),
        (b'{"prompt": "\xff"}', "the body is no JSON: byte 13 is no UTF-8"),
        (b'{"prompt": ' + b"[" * 9_000, "the body is no JSON: it is nested too deeply"),
        (b'{"n": ' + b"9" * 5_000 + b"}", "the body is no JSON: a number in it has too many"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_a_body_that_is_no_json_object_is_told_where_it_is_not(
    server: TinyServer, body: bytes, message: str
) -> None:
    with server.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions"):
            told = http.post(path, content=body, headers={"Content-Type": "application/json"})
            error = told.json()["error"]
            assert told.status_code == 400 and message in error["message"], error
            assert "\n" not in error["message"]
            assert (error["type"], error["param"]) == ("invalid_request_error", None)


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}])
def test_a_body_that_is_not_said_to_be_json_is_told_how(
    server: TinyServer, headers: dict[str, str]
) -> None:
    with server.http() as http:
        told = http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert told.status_code == 400
    assert "send Content-Type: application/json" in told.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a", 5], "element 1 is a number, element 0 is a text"),
        (["a", "b", [5]], "element 2 is a list, element 0 is a text"),
        ([5, 6, "a"], "element 2 is a text, element 0 is a number"),
        ([[5], [6], 7], "element 2 is a number, element 0 is a list"),
        ([5, None, "a"], "element 1 is null, element 0 is a number"),
        ([None], "element 0 is null"),
        ([True], "element 0 is true or false"),
        ([5.5, 5], "element 0 is a number with a point"),
        ([{}], "element 0 is an object"),
        ([[5], [6, 7, "a"]], "element 1 has a text in it, at 2"),
        ([[5, [6]]], "element 0 has a list in it, at 1"),
    ],
)
def test_of_a_prompt_of_several_kinds_the_element_is_told_that_does_not_belong(
    server: TinyServer, prompt: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        server.client().completions.create(model=MODEL, prompt=prompt)
    assert refusal.value.param == "prompt"
    assert refusal.value.body["message"] == f"prompt: {message}: {KINDS}"  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra_body": {"stop_token_ids": [198, 199]}}, "stop_token_ids has 199: not 0 to 198"),
        (
            {"extra_body": {"stop_token_ids": [7_000, 5, 200, 7_000]}},
            "stop_token_ids has 7000, 200: not 0 to 198, the model's vocabulary",
        ),
        (
            {"extra_body": {"stop_token_ids": list(range(195, 210))}},
            "stop_token_ids has 199, 200, 201, 202, 203 and 6 more: not",
        ),
        ({"logit_bias": {"5": 1, "300": 1}}, "logit_bias has 300: not 0 to 198"),
    ],
)
def test_token_ids_that_the_model_has_not_are_told(
    server: TinyServer, options: dict[str, Any], message: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            server.client().completions.create(model=MODEL, prompt="a", stream=stream, **options)
        assert message in refusal.value.message
        assert refusal.value.param == message.partition(" ")[0]


def test_token_ids_at_the_ends_of_the_vocabulary_are_taken(server: TinyServer) -> None:
    server.client().completions.create(
        model=MODEL,
        prompt=[0, 198],
        max_tokens=1,
        logit_bias={"0": 1, "198": 1},
        extra_body={"stop_token_ids": [0, 198]},
    )
    with server.http() as http:
        assert http.post("/detokenize", json={"tokens": [0, 198]}).status_code == 200
        told = http.post("/detokenize", json={"tokens": [0, 199, 5]})
        assert "tokens has 199: not 0 to 198" in told.json()["error"]["message"]


def test_errors_are_those_that_openais_client_knows() -> None:
    with tiny_server(serving={"api_keys": ["sesame"]}) as server:
        with pytest.raises(openai.AuthenticationError) as missing:
            server.client(api_key="other").completions.create(model=MODEL, prompt="a")
        assert (missing.value.type, missing.value.code) == (
            "invalid_request_error",
            "invalid_api_key",
        )
        client = server.client(api_key="sesame")
        for ask in (
            lambda: client.completions.create(model="gpt-9", prompt="a"),
            lambda: client.models.retrieve("gpt-9"),
        ):
            with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9'") as unknown:
                ask()
            assert (unknown.value.type, unknown.value.code, unknown.value.param) == (
                "invalid_request_error",
                "model_not_found",
                "model",
            )
