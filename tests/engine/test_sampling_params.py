"""What `SamplingParams` takes, and what it says to what it does not take."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.errors import InvalidInput


def test_defaults_are_those_of_the_field() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature) == (1, 16, 1.0)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert not params.has_penalties and not params.is_greedy
    assert params.skip_special_tokens and params.logprobs is None


@pytest.mark.parametrize(
    "options, said",
    [
        ({"temperature": -0.1}, "temperature is -0.1: give at least 0"),
        ({"temperature": float("nan")}, "temperature is nan: give a finite number"),
        ({"temperature": "hot"}, "temperature is 'hot': give a finite number"),
        ({"temperature": True}, "temperature is True: give a finite number"),
        ({"top_p": 0}, "top_p is 0.0: give above 0 to 1; 1 keeps all tokens"),
        ({"top_p": 1.01}, "top_p is 1.01: give above 0 to 1; 1 keeps all tokens"),
        ({"top_k": -2}, "top_k is -2: give at least 1, or 0 to keep all tokens"),
        ({"top_k": 2.5}, "top_k is 2.5: give a whole number"),
        ({"min_p": 1.5}, "min_p is 1.5: give 0 to 1"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1: give -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3.0: give -2 to 2"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty is 0.0: give 0.001 to 1000; 1 is no penalty",
        ),
        (
            {"repetition_penalty": 1e300},
            "repetition_penalty is 1e+300: give 0.001 to 1000; 1 is no penalty",
        ),
        ({"n": 0}, "n is 0: give at least 1"),
        ({"n": None}, "n is None: give a whole number"),
        ({"max_tokens": 0}, "max_tokens is 0: give at least 1, or None for no limit"),
        ({"min_tokens": -1}, "min_tokens is -1: give at least 0"),
        ({"seed": -1}, "seed is -1: give 0 to 18446744073709551615"),
        ({"logprobs": 21}, "logprobs is 21: give 0 to 20"),
        ({"logprobs": True}, "logprobs is True: give a whole number"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1: give 0 to 20"),
        ({"stop": ["a", 5]}, "stop is ['a', 5]: give a string or a list of strings"),
        ({"stop": ""}, "stop has an empty string, which is everywhere: leave it out"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5: give a list of token ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids has -1: token ids are 0 or more"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is 'a': give a whole number"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 is 101.0: give -100 to 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias is 'x': give a whole number"),
        ({"logit_bias": [5]}, "logit_bias is [5]: give biases by token id"),
        ({"ignore_eos": 1}, "ignore_eos is 1: give True or False"),
        (
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens is 9 and max_tokens 8: give min_tokens at most max_tokens",
        ),
        (
            {"n": 2, "temperature": 0},
            "n is 2 and temperature 0: greedy samples of one prompt are all the same, "
            "give n=1 or a temperature above 0",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        SamplingParams(**options)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"max_tokens": None, "min_tokens": 10**6},
        {"max_tokens": 8, "min_tokens": 8},
        {"seed": 2**64 - 1},
        {"logprobs": 0},
        {"n": 128},
    ],
)
def test_the_ends_of_ranges_are_taken(options: dict[str, Any]) -> None:
    SamplingParams(**options)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")


def test_token_ids_of_a_bias_may_be_strings_as_in_json() -> None:
    assert SamplingParams(logit_bias={"17": -100, 3: 1}).logit_bias == {17: -100.0, 3: 1.0}


def test_the_documentation_lists_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", page, re.MULTILINE))
    wanted = {field.name: repr(field.default) for field in dataclasses.fields(SamplingParams)}
    assert {name: listed.get(name) for name in wanted} == wanted
