"""OpenAI's own client asks for answers of a form, and gets them parsed."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")
pytest.importorskip("llguidance", reason="needs the extra [structured]")

import openai
from pydantic import BaseModel, Field

from models.tiny_server import MODEL, TinyServer, tiny_server
from pagedkv.engine import SamplingParams, StructuredOutput
from pagedkv.engine.grammars import Grammars

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


class Person(BaseModel):
    """What an answer is parsed into."""

    name: Literal["Ann", "Bo"]
    age: int = Field(ge=0, le=130)
    likes: list[Literal["tea", "jam"]] = Field(max_length=2)
    boss: Person | None


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    with tiny_server(num_tokens=8192) as made:
        yield made


def asked(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 450, "seed": 4, **options}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def test_answers_are_parsed_into_a_model(server: TinyServer) -> None:
    answer = server.client().chat.completions.parse(**asked(n=2, response_format=Person))
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Person) and choice.finish_reason == "stop"


def test_a_stream_is_parsed_too(server: TinyServer) -> None:
    with server.client().chat.completions.stream(**asked(response_format=Person)) as stream:
        kinds = [event.type for event in stream]
        [choice] = stream.get_final_completion().choices
    assert isinstance(choice.message.parsed, Person)
    assert kinds.count("content.delta") > 5 and kinds[-1] == "content.done"


def test_greedy_answers_are_the_engines_own(server: TinyServer) -> None:
    schema = Person.model_json_schema()
    params = SamplingParams(temperature=0, max_tokens=450, structured=StructuredOutput(json=schema))
    expected = server.llm.generate([HELLO], params)[0].text
    format = schema_format(schema)
    create = server.client().chat.completions.create
    for options in ({}, {"n": 2}, {"extra_body": {"structured_outputs": {"json": schema}}}):
        more = {} if "extra_body" in options else {"response_format": format}
        found = create(**asked(temperature=0, **options, **more))
        assert {choice.message.content for choice in found.choices} == {expected}
    told = create(**asked(temperature=0, response_format=format, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in told) == expected


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" start "b" | "c"'}}, "a*cb*"),
        ({"structured_outputs": {"json": '{"const": 7}'}}, "7"),
        (
            {"structured_outputs": {"json": {"const": {"a": []}}, "disable_any_whitespace": True}},
            r'\{"a":\[]}',
        ),
        ({"guided_regex": "x{2,4}"}, "x{2,4}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_grammar": 'root ::= "x" | "y"'}, "x|y"),
        ({"response_format": schema_format({"enum": [1, None]})}, "1|null"),
        ({"response_format": schema_format(True), "logit_bias": {"90": 100}}, r"\{.*"),
    ],
)
def test_every_field_in_chats_and_completions(
    server: TinyServer, body: dict[str, Any], pattern: str
) -> None:
    client = server.client()
    chat = client.chat.completions.create(**asked(max_tokens=20, extra_body=body))
    options: dict[str, Any] = {"model": MODEL, "prompt": ["Once", "Twice"], "max_tokens": 20}
    told = client.completions.create(**options, extra_body=body)
    for text in (chat.choices[0].message.content, *(choice.text for choice in told.choices)):
        assert re.fullmatch(pattern, text or "", re.DOTALL), text


def test_any_object(server: TinyServer) -> None:
    for seed in range(9):
        client = server.client()
        format = {"type": "json_object"}
        try:
            answer = client.chat.completions.create(**asked(response_format=format, seed=seed))
        except openai.BadRequestError as refusal:  # this tokenizer lacks most letters
            assert "cannot go on by its grammar" in refusal.message
            continue
        [choice] = answer.choices
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)
            return
    raise AssertionError("no answer ended")


def test_log_probabilities_tell_no_more_tokens_than_are_allowed(server: TinyServer) -> None:
    found = server.client().chat.completions.create(
        **asked(logprobs=True, top_logprobs=5, extra_body={"guided_regex": "(a|b)c"})
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    first, second = logprobs.content
    assert {top.token for top in first.top_logprobs} == {"a", "b"}
    assert [top.token for top in second.top_logprobs] == ["c"] and second.logprob == 0


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (
            {"response_format": schema_format({"type": "array", "uniqueItems": True})},
            "response_format: json cannot be followed: Unimplemented keys",
            "response_format",
        ),
        ({"response_format": schema_format({"type": "x"})}, "Invalid type: x", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "give json_schema", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "Field required",
            "response_format.json_schema.schema",
        ),
        ({"response_format": schema_format([1])}, "schema", None),
        ({"response_format": {"type": "json_object", "x": 1}}, "no such field", None),
        ({"structured_outputs": {}}, "is given nothing: give one of", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice", None),
        ({"structured_outputs": {"regex": "["}}, "unclosed", "structured_outputs"),
        ({"structured_outputs": {"xml": "["}}, "no such field", "structured_outputs.xml"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json and guided_regex both", None),
        ({"guided_regex": "a" * 70_000}, "at most 65536", "guided_regex"),
        ({"guided_json": "{"}, "guided_json: json is no JSON schema", "guided_json"),
        ({"guided_json": '{"a":' * 9_000}, "guided_json: json is nested too deeply", None),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json: json has 70", "guided_json"),
        ({"guided_choice": []}, "at least 1 item", "guided_choice"),
        ({"guided_grammar": "start: x"}, 'unknown name: "x"', "guided_grammar"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(
    server: TinyServer, body: dict[str, Any], message: str, param: str | None
) -> None:
    for path, prompt in (
        ("chat/completions", {"messages": HELLO}),
        ("completions", {"prompt": "x"}),
    ):
        with server.http() as http:
            told = http.post(f"/v1/{path}", json={**prompt, **body})
        error = told.json()["error"]
        assert told.status_code == 400 and message in error["message"], error
        assert param is None or error["param"] == param
        assert "\n" not in error["message"]


def test_an_answer_that_cannot_go_on_is_told_and_others_go_on(server: TinyServer) -> None:
    """This tokenizer has no space."""
    body = {"guided_regex": "a b"}
    create = server.client().chat.completions.create
    with pytest.raises(openai.BadRequestError, match="no text of the model's tokens"):
        create(**asked(extra_body={"guided_regex": " b"}))
    with pytest.raises(openai.BadRequestError, match="cannot go on by its grammar"):
        create(**asked(extra_body=body))
    with pytest.raises(openai.APIError, match="cannot go on by its grammar"):
        list(create(**asked(extra_body=body, stream=True)))
    assert create(**asked(max_tokens=3)).choices[0].finish_reason == "length"
    server.wait_until(lambda: server.used_blocks == 0)
    server.llm.verify()


def test_grammars_are_compiled_in_the_tokenizers_thread(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    compile = Grammars._compile

    def noted(self: Grammars, structured: StructuredOutput) -> Any:
        threads.append(threading.current_thread().name)
        return compile(self, structured)

    monkeypatch.setattr(Grammars, "_compile", noted)
    for _ in range(2):
        for stream in (False, True):
            found = server.client().chat.completions.create(
                **asked(extra_body={"guided_regex": "compiled once"[:8]}, stream=stream)
            )
            assert found is not None
    assert len(threads) == 1 and threads[0].startswith("pagedkv-tokenizer")


def test_without_the_library_one_line_says_what_to_install(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match=r"install pagedkv\[structured\]") as refusal:
        format = schema_format({"const": "asked for here alone"})
        server.client().chat.completions.create(**asked(response_format=format))
    assert refusal.value.param == "response_format"
