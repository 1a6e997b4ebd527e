"""OpenAI's own client talks to the server as it talks to OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")

import openai

from models.tiny_engine import greedy
from models.tiny_models import VOCABULARY
from models.tiny_server import MODEL, TinyServer, tiny_server
from pagedkv._version import __version__
from pagedkv.engine import SamplingParams

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    with tiny_server() as made:
        yield made


def says(server: TinyServer, prompt: Any, max_tokens: int, **options: Any) -> str:
    """What the engine itself says, greedily."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **options)
    return server.llm.generate([prompt], params)[0].text


def test_a_chat_says_what_the_engine_says(server: TinyServer) -> None:
    answer = server.client().chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=12, temperature=0
    )
    [choice] = answer.choices
    assert choice.message.content == says(server, HELLO, 12)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


def test_a_streamed_chat_says_the_same_in_pieces(server: TinyServer) -> None:
    whole = says(server, HELLO, 20)
    stream = server.client().chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=20, temperature=0, stream=True
    )
    events = list(stream)
    deltas = [event.choices[0].delta for event in events]
    assert "".join(delta.content or "" for delta in deltas) == whole
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert deltas[0].role == "assistant"
    reasons = [event.choices[0].finish_reason for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]
    assert len({event.id for event in events}) == 1
    assert all(event.usage is None for event in events)


def test_a_completion_says_what_the_engine_says_streamed_or_not(server: TinyServer) -> None:
    client = server.client()
    whole = says(server, "Once", 14)
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 14, "temperature": 0}
    assert client.completions.create(**asked).choices[0].text == whole
    pieces = [event.choices[0].text for event in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole and len(pieces) > 3


def test_a_completion_has_sixteen_tokens_unless_told_otherwise(server: TinyServer) -> None:
    answer = server.client().completions.create(
        model=MODEL, prompt="Hi", extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_prompts_come_as_text_or_token_ids_alone_or_in_lists(server: TinyServer) -> None:
    client = server.client()
    ids = server.llm.tokenizer("Once")["input_ids"]
    expected = says(server, "Once", 6)
    prompts: list[Any] = ["Once", ids, ["Once", "Once"], [ids, ids]]
    for prompt in prompts:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0)
        assert {choice.text for choice in answer.choices} == {expected}
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    assert VOCABULARY not in ids and len(answer.choices) == 2


def test_the_models_the_version_and_the_health_are_told(server: TinyServer) -> None:
    client = server.client()
    [model] = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")
    with server.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/version").json() == {"version": __version__}


def test_greedy_and_sampled_requests_run_together(server: TinyServer) -> None:
    [alone] = server.llm.generate(["Hello"], greedy(10))
    assert says(server, "Hello", 10, ignore_eos=True) == alone.text
