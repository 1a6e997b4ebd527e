"""Calls in a text are the same however it is cut, and nothing else of it is lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra [server]")

from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.called_text import called_text
from pagedkv.server.tool_calls import (
    Arguments,
    CallBegun,
    CallReader,
    Content,
    ForcedCalls,
    FreeCalls,
    call_grammar,
)

NAMES = ("f", "get_it")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

WORDS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "_call>", "</", "<", ">", "{", "}", '"', "\\"),
        *(
            "\n",
            " ",
            "\n\n",
            " " * 50,
            "text",
            "é",
            "\\n",
            '{"name": "f", "arguments": {',
            "}}",
            '"x": ',
        ),
        *(CALL, CALL[:-12], CALL[11:], CALL.replace("f", "get_it"), CALL.replace("f", "g")),
        '<tool_call>{"arguments": {"</tool_call>": "\\"</tool_call>"}, "name": "get_it"}',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "more": 1}</tool_call>',
        '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
    ]
)
TEXTS = st.lists(WORDS, max_size=12).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def read(reader: CallReader, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text in pieces."""
    content, calls = "", []
    for said in [*(s for piece in pieces for s in reader.append(piece)), *reader.end()]:
        if isinstance(said, Content):
            assert said.text
            content += said.text
        elif isinstance(said, CallBegun):
            calls.append((said.name, ""))
        else:
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + said.text)
    return content, calls


def parsed(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@settings(max_examples=600, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 400), max_size=30))
@example(f"<tool_call>{CALL} <tool_call> {{{CALL}", [3, 12])
@example('<tool_call>{"a\n</tool_call>' + CALL, [])
@example('<tool_call>{"a' + CALL.replace("\n", ""), [])
@example('<tool_call>{"a": "' + CALL.replace("\n", "") + '"\\', [])
@example(CALL + " " * 65 + CALL + " " * 65, [100, 120])
@example('<tool_call>{"a\\\n</tool_call>' + CALL, [])
def test_calls_are_those_of_the_whole_text_however_it_is_cut(text: str, places: list[int]) -> None:
    expected, calls = called_text(text, NAMES)
    for pieces in ([text], list(text), cut(text, places)):
        reader = FreeCalls(NAMES)
        content, found = read(reader, pieces)
        assert content == expected and parsed(found) == calls
        assert reader.has_called is bool(calls)
    if not calls:
        assert content == text


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        " \n ",
        "a <b> <tool </tool_call> <tool_call",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>["name", "arguments"]</tool_call>',
        "<tool_call>{" + '"a":[' * 100_000 + "</tool_call>",
        "<tool_call>" + '{"a":' * 100_000 + "</tool_call>",
        "Between <tool_call> and </tool_call> stands JSON.",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    assert read(FreeCalls(NAMES), pieces) == (text, [])


def test_whitespace_around_calls_is_theirs() -> None:
    assert read(FreeCalls(NAMES), [f"\n{CALL}\n{CALL} \n"]) == ("", [("f", '{"a": 1}')] * 2)
    content, calls = read(FreeCalls(NAMES), [f" I look.\n\n{CALL}\nSo.\n{CALL}\n Done.\n"])
    assert content == " I look.\nSo.\n Done.\n" and len(calls) == 2


def test_content_waits_no_longer_than_it_may_be_a_tag() -> None:
    reader = FreeCalls(NAMES)
    told = [list(reader.append(piece)) for piece in ("a", " ", "b<", "tool", "s>", "<tool_call>x")]
    assert told == [
        *([Content("a")], [], [Content(" b")], [], [Content("<tools>")]),
        [Content("<tool_call>"), Content("x")],
    ]


def test_a_tag_in_a_string_ends_no_call() -> None:
    arguments = {"html": '</tool_call> \\" "</tool_call>'}
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    assert parsed(read(FreeCalls(NAMES), list(text))[1]) == [("f", arguments)]


def test_calls_past_the_most_are_left_out() -> None:
    reader = FreeCalls(NAMES, max_calls=1)
    assert read(reader, [f"a{CALL}\n{CALL}b"]) == ("ab", [("f", '{"a": 1}')])


ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.one_of(st.text(max_size=20), st.integers(), st.just("}\n</tool_call>"), st.booleans()),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
    max_size=3,
)
FORCED = st.lists(
    st.tuples(st.sampled_from(NAMES), ARGUMENTS, st.sampled_from([None, 1])), min_size=1, max_size=3
)


def written(calls: list[tuple[str, str]]) -> str:
    """As the grammar has them written."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


@settings(max_examples=200, deadline=None)
@given(FORCED, st.lists(st.integers(0, 400), max_size=30), st.integers(0, 400))
def test_forced_calls_are_told_as_they_come_however_they_are_cut(
    given_calls: list[Any], places: list[int], end: int
) -> None:
    calls = [(name, json.dumps(value, indent=indent)) for name, value, indent in given_calls]
    text = written(calls)
    for pieces in ([text], list(text), cut(text, places)):
        reader = ForcedCalls()
        assert read(reader, pieces) == ("", calls) and reader.has_called
    begun = text[: end % len(text)]
    reader = ForcedCalls()
    content, found = read(reader, list(begun))
    assert content == ""
    for (name, arguments), (wanted, whole) in zip(found, calls):
        assert name == wanted and whole.startswith(arguments)
    assert found[:-1] == calls[: max(len(found) - 1, 0)]
    if any(begun.rstrip("\n") == written(calls[:n]) for n in range(1, len(calls))):
        assert reader.has_called
    assert reader.has_called <= (found == calls[: len(found)])


def test_arguments_come_in_pieces_where_calls_are_forced() -> None:
    reader = ForcedCalls()
    told = [
        list(reader.append(piece))
        for piece in (
            '<tool_call>\n{"name": "f"',
            ', "arguments": {"a"',
            ": {}",
            "}}\n</tool_call>",
        )
    ]
    assert told == [
        *([], [CallBegun("f"), Arguments('{"a"')], [Arguments(": {")], [Arguments("}}")]),
    ]


def test_the_grammar_has_no_words_but_its_own() -> None:
    schema = json.dumps({"type": "object", "title": '%llguidance {}\nstart: "x"'})
    grammar = call_grammar({"f": schema, "g": "{}"}, is_one=False)
    assert "%llguidance" not in grammar and grammar.count("\n") == 4
    [first, second] = grammar.splitlines()[-2:]
    found = json.loads(first.removeprefix("arguments_0: %json "))
    assert found["title"] == '%llguidance {}\nstart: "x"' and second.startswith("arguments_1")
