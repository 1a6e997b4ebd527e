"""Answers that follow a schema or a grammar, beside a model that is obviously right."""

from __future__ import annotations

import json
import re
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")
pytest.importorskip("llguidance", reason="needs the extra [structured]")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.json_schemas import SCHEMAS, is_valid
from models.json_tokenizer import END, VOCABULARY, json_tokenizer
from models.tiny_engine import TinyEngine
from models.tiny_models import tiny_model, tiny_tokenizer
from pagedkv.engine import LLM, SamplingParams, StructuredOutput, grammars
from pagedkv.engine.detokenizer import TokenTexts
from pagedkv.engine.grammars import (
    MAX_ANSWERS,
    MAX_GRAMMARS,
    GrammarFailed,
    GrammarPlace,
    Grammars,
)
from pagedkv.engine.model import PagedModel
from pagedkv.engine.outputs import Completion
from pagedkv.engine.request import Request
from pagedkv.engine.structured_output import MAX_STRUCTURE_CHARACTERS
from pagedkv.errors import InvalidInput

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = [5, 90, 17, 60, 201]


@cache
def model() -> Any:
    return tiny_model("llama", vocab_size=VOCABULARY)


@cache
def paged() -> PagedModel:
    return PagedModel(tiny_model("llama", vocab_size=VOCABULARY))


@cache
def texts() -> TokenTexts:
    return TokenTexts(json_tokenizer())


def engine(num_blocks: int = 64, **options: Any) -> TinyEngine:
    options = {"texts": texts(), "end_token_ids": frozenset([END]), **options}
    return TinyEngine(paged(), num_blocks, **options)


def structured(**options: Any) -> StructuredOutput:
    return StructuredOutput(disable_any_whitespace=True, **options)


def completions(made: TinyEngine, params: SamplingParams, prompt: list[int]) -> list[Completion]:
    request = made.add(prompt, params)
    made.finish_all()
    return list(request.generation().completions)


def check(found: Completion, schema: dict[str, Any]) -> None:
    """An answer that has ended by itself is a value of its schema."""
    if found.finish_reason == "stop":
        assert is_valid(json.loads(found.text), schema), (found.text, schema)
    else:
        assert found.finish_reason == "length"


def obvious(prompt: list[int], what: StructuredOutput, max_tokens: int) -> list[int]:
    """The tokens of a greedy answer: at each place all is computed anew, the likeliest token that
    is allowed is said, and the grammar is followed from its beginning."""
    grammars = Grammars(texts(), vocab_size=VOCABULARY, end_token_ids=[END])
    said: list[int] = []
    for _ in range(max_tokens):
        place = grammars.compiled(what).begin()
        for token_id in said:
            place.append(token_id)
        assert place.problem is None
        if place.is_complete or END in said:
            break
        allowed = np.unpackbits(place.allowed, count=VOCABULARY, bitorder="little").astype(bool)
        with torch.no_grad():
            logits = model()(torch.tensor([prompt + said])).logits[0, -1].numpy()
        said.append(int(np.where(allowed, logits, -np.inf).argmax()))
    return said


def all_may_be_left_out(num_properties: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"{i:x}": {"type": "integer"} for i in range(num_properties)},
        "additionalProperties": False,
    }


@settings(max_examples=40, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 99), ahead=st.booleans(), scarce=st.booleans())
def test_what_ends_by_itself_is_a_value_of_its_schema(
    schema: dict[str, Any], seed: int, ahead: bool, scarce: bool
) -> None:
    made = engine(40 if scarce else 200, ahead=ahead)
    what = structured(json=schema)
    drawn = SamplingParams(max_tokens=48, seed=seed, n=3, structured=what)
    filtered = SamplingParams(
        max_tokens=48, seed=seed, temperature=3, top_k=40, top_p=0.9, structured=what
    )
    free = SamplingParams(max_tokens=30, seed=seed, ignore_eos=True)
    requests = [made.add(PROMPT[:-i] or PROMPT, p) for i, p in enumerate((drawn, filtered, free))]
    made.finish_all()
    for request in requests[:2]:
        for found in request.generation().completions:
            check(found, schema)
    # Who follows no grammar says what it says alone.
    alone = engine(200)
    alone.add(PROMPT, SamplingParams(max_tokens=1))  # so that both have the same streams
    assert requests[2].generation().completions[0].token_ids == tuple(
        completions(alone, free, PROMPT[:-2])[0].token_ids
    )


@settings(max_examples=15, deadline=None)
@given(schema=SCHEMAS, num_prompt=st.integers(1, 5), ahead=st.booleans())
def test_a_greedy_answer_is_the_likeliest_token_that_is_allowed_each_time(
    schema: dict[str, Any], num_prompt: int, ahead: bool
) -> None:
    what = StructuredOutput(json=schema)
    params = SamplingParams(temperature=0, max_tokens=24, structured=what)
    [found] = completions(engine(ahead=ahead), params, PROMPT[:num_prompt])
    assert list(found.token_ids) == obvious(PROMPT[:num_prompt], what, 24)


def test_preemption_loses_no_place_in_a_grammar() -> None:
    what = structured(json={"type": "array", "items": PERSON, "minItems": 3, "maxItems": 4})
    params = SamplingParams(max_tokens=160, structured=what, seed=3, n=2)

    def answers(num_blocks: int) -> tuple[list[tuple[int, ...]], int]:
        made = engine(num_blocks, seats=6)
        requests = [made.add(PROMPT[:i], params) for i in (2, 3, 4)]
        made.finish_all()
        for request in requests:
            for found in request.generation().completions:
                assert found.finish_reason == "stop" and len(json.loads(found.text)) >= 3
        said = [c.token_ids for r in requests for c in r.generation().completions]
        return said, made.statistics().memory.preemptions

    (plenty, none), (scarce, some) = answers(400), answers(50)
    assert none == 0 and some > 0 and scarce == plenty


def test_it_ends_where_nothing_can_follow_and_may_end_where_something_can() -> None:
    for ends in (frozenset([END]), frozenset[int]()):
        made = engine(end_token_ids=ends)
        params = SamplingParams(max_tokens=30, structured=StructuredOutput(regex="a{3}"))
        [found] = completions(made, params, PROMPT)
        assert (found.text, found.finish_reason, len(found.token_ids)) == ("aaa", "stop", 3)
    likes_to_end = {END: 100.0}
    params = SamplingParams(
        temperature=0,
        max_tokens=30,
        logit_bias=likes_to_end,
        structured=StructuredOutput(regex="a{3,9}"),
    )
    [found] = completions(engine(), params, PROMPT)
    assert (found.text, found.finish_reason, found.token_ids[-1]) == ("aaa", "stop", END)
    for more in ({"min_tokens": 5}, {"ignore_eos": True}):
        params = SamplingParams(
            temperature=0,
            max_tokens=30,
            logit_bias=likes_to_end,
            structured=StructuredOutput(regex="a{3,9}"),
            **more,  # type: ignore[arg-type]
        )
        [found] = completions(engine(), params, PROMPT)
        assert found.finish_reason == "stop"
        assert found.text == "a" * (9 if "ignore_eos" in more else 5)


def test_stop_tokens_that_are_all_that_is_allowed_stop_nobody_before_min_tokens() -> None:
    [a] = json_tokenizer()("a")["input_ids"]
    params = SamplingParams(
        max_tokens=9, min_tokens=2, stop_token_ids=[a], structured=StructuredOutput(regex="a{5}")
    )
    [found] = completions(engine(), params, PROMPT)
    assert (found.finish_reason, found.stop_reason, len(found.token_ids)) == ("stop", a, 3)


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        (StructuredOutput(choice=["yes", 'n"o\n', "é\N{GRINNING FACE}"]), 'yes|n"o\n|é\U0001f600'),
        (StructuredOutput(regex="[a-c]{2}(x|yy)"), "[a-c]{2}(x|yy)"),
        (StructuredOutput(grammar='start: ("a" | "b" start "b")'), "a|b+ab+"),
        (StructuredOutput(grammar='root ::= "a" | "b" root "b"'), "a|b+ab+"),
        (
            StructuredOutput(json=json.dumps({"const": [1, {"k": None}]})),
            r"\[\s*1[^a]+null\s*}\s*]",
        ),
    ],
)
def test_every_kind_of_structure(what: StructuredOutput, pattern: str) -> None:
    for seed in range(6):
        params = SamplingParams(max_tokens=200, seed=seed, structured=what)
        [found] = completions(engine(), params, PROMPT)
        assert re.fullmatch(pattern, found.text) and found.finish_reason == "stop", found.text


def test_any_object_is_an_object() -> None:
    what = StructuredOutput(json_object=True)
    made = engine(400)
    requests = [
        made.add(PROMPT, SamplingParams(max_tokens=120, seed=seed, structured=what))
        for seed in range(8)
    ]
    made.finish_all()
    ended = [r.generation() for r in requests]
    ended = [g for g in ended if g.completions[0].finish_reason == "stop"]
    assert ended and all(isinstance(json.loads(g.text), dict) for g in ended)


@pytest.mark.parametrize("ahead", [False, True])
def test_log_probabilities_are_those_among_what_is_allowed(ahead: bool) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=9, logprobs=5, structured=StructuredOutput(regex="[ab]c")
    )
    [found] = completions(engine(ahead=ahead), params, PROMPT)
    assert found.logprobs is not None
    first, second = found.logprobs
    assert first.rank == 1 and {texts().token_bytes(i) for i, _ in first.top} <= {
        b"a",
        b"b",
        b"abc",
    }
    assert sum(np.exp(p) for _, p in first.top) == pytest.approx(1, abs=1e-5)
    assert second.top == ((second.token_id, pytest.approx(0, abs=1e-6)),)


def test_all_prompt_log_probabilities_are_as_without() -> None:
    found = []
    for what in (None, StructuredOutput(regex="abc")):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3, structured=what)
        made = engine()
        request = made.add(PROMPT, params)
        made.finish_all()
        found.append(request.generation().prompt_logprobs)
    assert found[0] == found[1]


def test_a_canceled_answer_and_others_beside_it_leave_no_trace() -> None:
    made = engine()
    params = SamplingParams(max_tokens=40, n=2, seed=1, structured=structured(json=PERSON))
    left = made.add(PROMPT, params)
    stays = made.add(PROMPT, params)
    for _ in range(4):
        made.step()
    made.cancel(left)
    made.finish_all()
    assert made._structured == set() and made.statistics().memory.used_blocks == 0
    for found in stays.generation().completions:
        check(found, {**PERSON, "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": AGE}})


AGE = {"type": "integer", "minimum": -(10**9), "maximum": 99}


def test_an_answer_that_comes_computes_nothing_in_the_thread_that_runs_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = engine(200)
    params = SamplingParams(max_tokens=40, n=5, seed=1, structured=structured(json=PERSON))
    grammar = made.grammars.compiled(params.structured)  # type: ignore[arg-type]
    looks = []
    look = GrammarPlace.look
    monkeypatch.setattr(GrammarPlace, "look", lambda self: (looks.append(1), look(self))[1])
    request = made.add(PROMPT, params, grammar=grammar)
    assert looks == []
    made.finish_all()
    assert len(looks) == sum(len(c.token_ids) for c in request.generation().completions)


def test_samples_go_their_own_ways_from_one_place() -> None:
    grammar = Grammars(texts(), vocab_size=VOCABULARY, end_token_ids=[END]).compiled(
        StructuredOutput(regex="ab|ba")
    )
    first, second = grammar.begin(), grammar.begin()
    a, b = json_tokenizer()("a")["input_ids"][0], json_tokenizer()("b")["input_ids"][0]
    first.append(a)
    second.append(b)
    assert grammar.start.problem is first.problem is second.problem is None
    third = first.copy()
    third.append(b)
    assert third.is_complete and not first.is_complete and not second.is_complete
    second.append(a)
    assert second.is_complete


# What cannot be -----------------------------------------------------------------------------------


def test_what_fails_inside_a_grammar_fails_one_request() -> None:
    made = engine(200)
    params = SamplingParams(max_tokens=60, n=2, seed=1, structured=structured(json=PERSON))
    broken, well = made.add(PROMPT, params), made.add(PROMPT, params)
    place = broken.samples[1].grammar
    assert place is not None
    place._matcher = None
    made.finish_all()
    assert isinstance(broken.failure, GrammarFailed) and "consume_token" in str(broken.failure)
    assert {c.finish_reason for c in broken.generation().completions} == {"abort"}
    assert well.failure is None and made.statistics().memory.used_blocks == 0
    for found in well.generation().completions:
        check(found, {**PERSON, "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": AGE}})


def test_a_sample_that_stops_where_nothing_follows_takes_no_other_with_it() -> None:
    """Behind an x there must be a space, and this tokenizer has none."""
    tokenizer = tiny_tokenizer()
    [x] = tokenizer("x")["input_ids"]
    made = TinyEngine(tiny_model("llama"), 100, texts=TokenTexts(tokenizer), seats=16)
    params = SamplingParams(
        max_tokens=9,
        n=12,
        seed=1,
        stop_token_ids=[x],
        structured=StructuredOutput(regex="x |[a-c]{3}"),
    )
    request = made.add(PROMPT[:3], params)
    made.finish_all()
    found = request.generation().completions
    assert request.failure is None and {c.finish_reason for c in found} == {"stop"}
    assert {len(c.token_ids) for c in found} == {1, 3}
    # Without the stop token there is nothing more to say for some, and so for none.
    request = made.add(PROMPT[:3], replace(params, stop_token_ids=()))
    made.finish_all()
    assert isinstance(request.failure, GrammarFailed)
    assert "abort" in {c.finish_reason for c in request.generation().completions}


def test_an_answer_that_another_threads_step_ends_is_told_its_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who asks whether it has ended hears of the reason too, whoever ran the step."""
    made = LLM(tiny_model("llama"), tokenizer=tiny_tokenizer(), num_tokens=512)
    ended = Request.is_finished.fget  # type: ignore[attr-defined]

    def ended_a_step_later(self: Request) -> bool:
        if made._engine.scheduler.num_steps == 1 and not made._driving._lock._is_taken:
            made._driving.turn()
        return ended(self)  # type: ignore[no-any-return]

    monkeypatch.setattr(Request, "is_finished", property(ended_a_step_later))
    params = SamplingParams(max_tokens=9, structured=StructuredOutput(regex="ax "))
    with pytest.raises(GrammarFailed):
        made.generate("Hello", params)


def test_an_answer_that_cannot_go_on_fails_alone() -> None:
    """The tokenizer of all others lacks letters, so that a grammar can lead where none goes on."""
    made = LLM(
        tiny_model("llama"),
        tokenizer=tiny_tokenizer(),
        num_tokens=512,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    what = StructuredOutput(regex="(\N{MULTIPLICATION SIGN}|a) b")  # it has no space
    params = SamplingParams(temperature=0, max_tokens=9, structured=what)
    with pytest.raises(GrammarFailed, match="cannot go on by its grammar: no text of the model's"):
        made.generate("Hello", params)
    assert made.statistics().memory.used_blocks == 0
    made.verify()
    [answer] = made.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(answer.token_ids) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json": {"type": "foo"}}, "json cannot be followed: Invalid type: foo"),
        ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: .*"uniqueItems"'),
        ({"json": {"$ref": "#"}}, "json cannot be followed: no text of the model's tokens"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "is not present in a registry"),
        ({"regex": "[a"}, "regex cannot be followed: unclosed character class"),
        ({"regex": "(?=a)b"}, "regex cannot be followed: look-around"),
        ({"regex": "[a&&b]"}, "regex cannot be followed: no text"),
        ({"regex": ""}, "regex cannot be followed: it allows no text but the empty one"),
        ({"choice": [""]}, "choice cannot be followed: it allows no text but the empty one"),
        ({"grammar": "start: foo"}, 'grammar cannot be followed: at .* unknown name: "foo"'),
        ({"grammar": "no grammar"}, "grammar cannot be followed"),
        ({"grammar": 'start: "a"\n%llguidance {"no_forcing": false}'}, "%llguidance sets what"),
        ({"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, "too deeply nested"),
        ({"grammar": "root ::= " + "( " * 9_000 + '"a"' + ")" * 9_000}, "recursion"),
        ({"regex": "(" * 9_000 + "a" + ")" * 9_000}, "regex cannot be followed"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refusal:
        engine().add(PROMPT, SamplingParams(structured=StructuredOutput(**options)))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


PATTERNS = {"anyOf": [{"allOf": [{"pattern": f"[a-{c}]"}]} for c in "bcdefghijklmn"]}
PATTERN_DEFS = {c: {"pattern": f"[a-{c}]"} for c in "bcdefghijklmn"}
REFS = [{"$ref": f"#/$defs/{c}"} for c in PATTERN_DEFS]


def test_as_many_patterns_as_one_likes_may_stand_beside_each_other() -> None:
    each = {c: {"type": "string", "pattern": f"[a-{c}]", "multipleOf": 10_000} for c in "bcdefghij"}
    many = {f"{c}{i}": schema for c, schema in each.items() for i in range(3)}
    StructuredOutput(json={"properties": many, "anyOf": [{"required": ["b0"]}, {}]})
    StructuredOutput(json={"allOf": REFS[:12], "$defs": PATTERN_DEFS, "multipleOf": 0.0001})
    StructuredOutput(json={"allOf": REFS * 3, "multipleOf": 5e9})
    StructuredOutput(grammar="start: x\n" * 500)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a & b" /x&~y/  // c & d',
        'root ::= [^&~] "~" # x & y',
        *("start: " + part * 20_000 for part in ("[", "/", '"', "/\\", '"\\', "[\\")),
        "root ::= " + "[\\" * 20_000,
    ],
    ids=lambda grammar: repr(grammar[:24]),
)
def test_what_a_grammar_quotes_is_no_operator_and_is_read_once(grammar: str) -> None:
    assert StructuredOutput(grammar=grammar).grammar == grammar


def test_what_a_schema_in_a_grammar_says_is_no_other_schema() -> None:
    grammar = 'start: %json {"const": "%json {1}"} | %json {"multipleOf": 3}'
    assert StructuredOutput(grammar=grammar).grammar == grammar
    with pytest.raises(InvalidInput, match="json has multipleOf 10003"):
        StructuredOutput(grammar=grammar.replace("3}", "10003}"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "structured output is given nothing: give one of json, regex, choice"),
        ({"regex": "a", "choice": ["b"]}, "is given regex and choice: give one"),
        ({"json": 5}, "json is int: a schema is an object"),
        ({"json": "{"}, "json is no JSON schema"),
        ({"json": False}, "the schema that nothing has"),
        ({"json": {"const": float("nan")}}, "json is no JSON schema"),
        ({"json": {"const": object()}}, "json is no JSON schema"),
        ({"json": '{"a":' * 10_000}, "json is nested too deeply"),
        (
            {"json": json.dumps({"a": [[[[]]]]}).replace("[[", "[" * 70).replace("]]", "]" * 70)},
            "json is nested more than 64 levels deep",
        ),
        ({"regex": "a" * (MAX_STRUCTURE_CHARACTERS + 1)}, "regex has 65537 characters, at most"),
        ({"regex": "\ud800"}, "regex has half a character"),
        ({"choice": ["a", "\ud800"]}, "choice has half a character"),
        ({"grammar": "start: x\n" * 501}, "grammar has 501 lines, at most 500 are taken"),
        ({"grammar": "start: %json {1}"}, "grammar: no JSON follows %json"),
        ({"grammar": 'start: %json {"multipleOf": 10001}'}, "grammar: json has multipleOf 10001"),
        ({"json": {"anyOf": [{"multipleOf": 97}, {"multipleOf": 131}]}}, "json has multipleOf 97"),
        ({"grammar": "start: A\nA: /a/ & /b/"}, "grammar has & or ~, which may take for ever"),
        ({"grammar": 'start: ["a" ~ /b/]'}, "grammar has & or ~"),
        ({"json": "[" * 70_000}, "json has 70000 characters"),
        ({"json": {"items": {"multipleOf": 1.00001}}}, "json has multipleOf 1.00001: at most"),
        ({"json": all_may_be_left_out(1_601)}, "json has 1601 properties, at most 1600 can be"),
        ({"json": PATTERNS}, "json has 13 patterns that may have to match together, at most 12"),
        ({"json": {"$defs": PATTERN_DEFS, "allOf": REFS}}, "json has 13 patterns that may have"),
        ({"choice": "yes"}, "choice is no list of texts"),
        ({"choice": []}, "choice is no list of texts"),
        ({"choice": ["a", 5]}, "choice is no list of texts"),
        ({"grammar": b"start"}, "grammar is bytes: give text"),
        ({"json_object": 1}, "json_object is 1: give True or False"),
    ],
)
def test_what_is_no_structure_is_refused_where_it_is_made(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        StructuredOutput(**options)
    with pytest.raises(InvalidInput, match="structured is dict: give a StructuredOutput"):
        SamplingParams(structured=options)  # type: ignore[arg-type]


def test_hostile_structures_end_in_the_time_of_a_step_or_fail_alone() -> None:
    """What asks for as many states as a text is long is cut off, and others go on."""
    made = engine(400)
    hostile = [
        StructuredOutput(regex="[ab]*a[ab]{40}"),
        StructuredOutput(regex="(" + "|".join(f"[a-z]*{c}[a-z]{{30}}" for c in "abcdefgh") + ")*"),
        StructuredOutput(regex="((a{1,100}){1,100}){1,100}"),
        StructuredOutput(grammar='start: start start | "a" | start "b" start'),
    ]
    requests = []
    for what in hostile:
        try:
            requests.append(made.add(PROMPT, SamplingParams(max_tokens=50, structured=what)))
        except InvalidInput as refusal:
            assert "cannot be followed" in str(refusal)
    well = made.add(PROMPT, SamplingParams(max_tokens=50, structured=structured(json=PERSON)))
    made.finish_all()
    assert well.generation().completions[0].finish_reason in ("stop", "length")
    assert all(request.is_finished for request in requests) and requests


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (StructuredOutput(grammar="start: x+\nx: /[a-z]/ | /[a-z]/ /[a-z]/ | x x"), "too much can"),
        (StructuredOutput(grammar='start: start start | "a" | "b"'), "too much can come next"),
        (StructuredOutput(json=all_may_be_left_out(600)), "too much can come next"),
        (StructuredOutput(regex=".*a.{60}b.{60}.*c.{40}"), "too many texts"),
    ],
)
def test_one_that_takes_too_long_fails_alone_and_soon(
    monkeypatch: pytest.MonkeyPatch, what: StructuredOutput, message: str
) -> None:
    monkeypatch.setattr(grammars, "MAX_LEXER_STATES", 500)  # so few tokens have not much to come
    monkeypatch.setattr(grammars, "_GRAMMAR_MASK_ITEMS", 400)
    made = engine(800)
    goes_on = SamplingParams(max_tokens=300, seed=1, ignore_eos=True, structured=what)
    hostile = made.add(PROMPT, goes_on)
    well = made.add(PROMPT, SamplingParams(max_tokens=60, structured=structured(json=PERSON)))
    made.finish_all()
    assert isinstance(hostile.failure, GrammarFailed) and message in str(hostile.failure)
    assert len(hostile.samples[0].token_ids) < 250
    assert well.failure is None and well.generation().completions[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("limit", "what", "message"),
    [
        ("_MASK_ITEMS", StructuredOutput(json=all_may_be_left_out(90)), "too much can come next"),
        ("_GRAMMAR_MASK_ITEMS", StructuredOutput(grammar="start: start start | /a|b/"), "too much"),
        ("_MASK_FUEL", StructuredOutput(regex="([a-z]{1,20}[0-9]{1,20}){9}"), "too many texts"),
    ],
)
def test_each_kind_has_its_limits(
    monkeypatch: pytest.MonkeyPatch, limit: str, what: StructuredOutput, message: str
) -> None:
    def failure() -> str:
        made = engine(400)
        params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True, structured=what)
        try:
            request = made.add(PROMPT, params)
        except InvalidInput as refusal:
            return str(refusal)
        made.finish_all()
        return str(request.failure or "")

    others = {"_MASK_ITEMS", "_ROW_ITEMS", "_GRAMMAR_MASK_ITEMS", "_GRAMMAR_ROW_ITEMS"} - {limit}
    if limit != "_MASK_FUEL":
        for name in others:
            if ("GRAMMAR" in name) != ("GRAMMAR" in limit):
                monkeypatch.setattr(grammars, name, 10)
    assert failure() == ""
    monkeypatch.setattr(grammars, limit, 60)
    assert message in failure()


def test_a_deep_stack_is_the_compilers_alone() -> None:
    usual = threading.stack_size()
    assert grammars._with_deep_stack(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        grammars._with_deep_stack(lambda: 1 // 0)
    assert threading.stack_size() == usual


def test_what_would_take_too_long_to_compile_is_refused() -> None:
    what = StructuredOutput(json=all_may_be_left_out(1_600))
    with pytest.raises(InvalidInput, match="json cannot be followed: it is too large, as with a"):
        engine().add(PROMPT, SamplingParams(structured=what))


def test_long_chains_do_not_end_the_process() -> None:
    """Each link is some kilobytes of stack, and what overruns a stack takes everybody with it."""
    names = [f"{i:x}" for i in range(1_580)]
    for link in (lambda ref: {"items": ref}, lambda ref: {"anyOf": [ref]}):
        links = {a: link({"$ref": f"#/$defs/{b}"}) for a, b in pairwise(names)}
        what = StructuredOutput(
            json={"$ref": "#/$defs/0", "$defs": {**links, names[-1]: {"type": "null"}}}
        )
        with suppress(InvalidInput):
            engine().grammars.compiled(what)


def test_what_schemas_usually_have_is_not_too_much() -> None:
    properties = {f"property {i}": {"type": "string", "maxLength": 3} for i in range(500)}
    whole = {**all_may_be_left_out(0), "properties": properties, "required": list(properties)}
    for schema in (all_may_be_left_out(200), whole):
        made = engine(400)
        request = made.add(
            PROMPT, SamplingParams(max_tokens=200, seed=2, structured=StructuredOutput(json=schema))
        )
        made.finish_all()
        assert request.failure is None


def test_thousands_of_choices_and_any_characters() -> None:
    many = [f"value number {i}" for i in range(2_500)]
    odd = ["%llguidance {", "a\0b", "\x7f", '"', "\\", "</s>", "/", "\u2028"]
    for choices in (many, odd):
        for seed in range(4):
            what = StructuredOutput(choice=choices)
            [found] = completions(
                engine(), SamplingParams(max_tokens=40, seed=seed, structured=what), PROMPT
            )
            assert found.text in choices and found.finish_reason == "stop"
    what = StructuredOutput(regex="%llguidance")
    [found] = completions(engine(), SamplingParams(max_tokens=40, structured=what), PROMPT)
    assert found.text == "%llguidance"


def test_a_text_that_is_certain_without_an_end_is_not_looked_at_to_its_end() -> None:
    """Its first word could always be longer: there is no other token than `a`, and no end."""
    params = SamplingParams(max_tokens=9, structured=StructuredOutput(grammar="start: /a+/ /a+/"))
    [found] = completions(engine(), params, PROMPT)
    assert set(found.text) == {"a"} and found.finish_reason == "length"


def test_what_is_certain_may_be_cut_into_any_tokens() -> None:
    grammars = Grammars(texts(), vocab_size=VOCABULARY, end_token_ids=[END])
    place = grammars.compiled(StructuredOutput(regex="true")).begin()
    bits = np.unpackbits(place.allowed, count=VOCABULARY, bitorder="little")
    assert {texts().token_bytes(int(i)) for i in np.flatnonzero(bits)} == {
        *(b"t", b"tr", b"tru", b"true")
    }


def test_grammars_are_compiled_once_and_few_are_kept() -> None:
    grammars = Grammars(texts(), vocab_size=VOCABULARY, end_token_ids=[END])
    first = grammars.compiled(StructuredOutput(json={"type": "null"}))
    assert grammars.compiled(StructuredOutput(json='{"type": "null"}')) is first
    assert grammars.has(StructuredOutput(json={"type": "null"}))
    for i in range(MAX_GRAMMARS):
        grammars.compiled(StructuredOutput(regex=f"a{i}"))
    assert not grammars.has(StructuredOutput(json={"type": "null"}))
    assert grammars.has(StructuredOutput(regex="a0"))


def test_what_one_answer_used_up_is_not_missed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers by one grammar share what is remembered of words: each would find it full."""
    monkeypatch.setattr(grammars, "MAX_LEXER_STATES", 500)
    what = StructuredOutput(regex=".*a.{60}b.{60}.*c.{40}")
    made = engine(400)
    lengths = []
    for _ in range(2):
        request = made.add(PROMPT, SamplingParams(max_tokens=300, seed=1, structured=what))
        assert made.grammars.has(what)
        made.finish_all()
        assert isinstance(request.failure, GrammarFailed) and not made.grammars.has(what)
        lengths.append(len(request.samples[0].token_ids))
    assert lengths[0] == lengths[1] > 2


def test_a_grammar_is_compiled_anew_after_some_answers() -> None:
    grammars = Grammars(texts(), vocab_size=VOCABULARY, end_token_ids=[END])
    what = StructuredOutput(regex="a")
    first = grammars.compiled(what)
    for _ in range(MAX_ANSWERS):
        assert grammars.has(what) and grammars.compiled(what) is first
        first.begin()
    assert not grammars.has(what)
    second = grammars.compiled(what)
    assert second is not first and grammars.has(what) and grammars.compiled(what) is second


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_plain_grammar_may_be_followed_as_far_as_a_schema(is_plain: bool) -> None:
    grammar = f"start: %json {json.dumps(all_may_be_left_out(150))}"
    grammars = Grammars(texts(), vocab_size=VOCABULARY, end_token_ids=[END])
    place = grammars.compiled(StructuredOutput(grammar=grammar, is_plain=is_plain)).begin()
    for token_id in json_tokenizer().encode('{"0":1,"12":2}', add_special_tokens=False):
        place.append(token_id)
    assert (place.problem is None) == is_plain


def test_the_grammar_that_was_asked_for_last_is_kept() -> None:
    grammars = Grammars(texts(), vocab_size=VOCABULARY, end_token_ids=[END])
    asked, looked_at, left = (StructuredOutput(regex=f"b{i}") for i in range(3))
    for what in (left, asked, looked_at):
        grammars.compiled(what)
    for i in range(MAX_GRAMMARS - 1):
        grammars.compiled(asked)
        assert grammars.has(looked_at)
        grammars.compiled(StructuredOutput(regex=f"a{i}"))
    assert grammars.has(asked) and grammars.has(looked_at) and not grammars.has(left)


def test_properties_come_in_the_order_in_which_they_are_given() -> None:
    schema = {**PERSON, "properties": dict(reversed(PERSON["properties"].items()))}  # type: ignore
    assert structured(json=schema) != structured(json=PERSON)
    params = SamplingParams(temperature=0, max_tokens=60, structured=structured(json=schema))
    [found] = completions(engine(), params, PROMPT)
    assert found.text.startswith('{"age":')


def test_without_the_library_or_a_tokenizer_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(structured=StructuredOutput(regex="a"))
    with pytest.raises(InvalidInput, match="needs a tokenizer, and this model has none"):
        engine(texts=None).add(PROMPT, params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidInput, match=r"needs llguidance: install pagedkv\[structured\]"):
        engine().add(PROMPT, params)
