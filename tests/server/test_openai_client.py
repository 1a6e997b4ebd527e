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

from models.tiny_models import VOCABULARY
from models.tiny_server import MODEL, TinyServer, tiny_server
from pagedkv._version import __version__
from pagedkv.engine import SamplingParams

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
DUMPED: dict[str, Any] = {  # as `model_dump` of OpenAI's client has an answer
    "role": "assistant",
    **dict.fromkeys(("content", "refusal", "annotations", "audio", "function_call", "tool_calls")),
    "reasoning_content": None,
}


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


def test_whether_it_is_there_can_be_asked_without_a_body(server: TinyServer) -> None:
    with server.http() as http:
        for path in ("/health", "/version", "/v1/models", "/memory"):
            told = http.head(path)
            assert told.status_code == 200 and told.content == b""


def test_usage_is_told_with_the_tokens_that_the_cache_had(server: TinyServer) -> None:
    client = server.client()
    prompt = "A prompt that nobody has sent before, of several blocks"
    num_tokens = len(server.llm.tokenizer(prompt)["input_ids"])
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0}
    cached = []
    for _ in range(2):
        usage = client.completions.create(**asked).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (num_tokens, 3)
        assert usage.total_tokens == num_tokens + 3
        cached.append(usage.prompt_tokens_details.cached_tokens)
    # Blocks of 4, and the last token is never served from the cache.
    assert cached == [0, (num_tokens - 1) // 4 * 4]


def test_a_stream_tells_its_usage_at_the_end_if_asked(server: TinyServer) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }
    client = server.client()
    for events in (
        list(client.chat.completions.create(messages=HELLO, **options)),
        list(client.completions.create(prompt=["Hello", "Hi"], **options)),
    ):
        assert all(event.usage is None and event.choices for event in events[:-1])
        usage = events[-1].usage
        assert events[-1].choices == [] and usage is not None
        assert usage.prompt_tokens_details.cached_tokens is not None
        assert usage.completion_tokens == 5 * len({e.choices[0].index for e in events[:-1]})


def test_a_salt_keeps_the_blocks_of_a_tenant_to_itself(server: TinyServer) -> None:
    client = server.client()
    prompt = "What one tenant asks is nothing that another one finds"

    def cached(salt: str | None) -> int:
        usage = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=1,
            temperature=0,
            extra_body={} if salt is None else {"cache_salt": salt},
        ).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    whole = (len(server.llm.tokenizer(prompt)["input_ids"]) - 1) // 4 * 4
    assert [cached(salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0] + [whole] * 3


def test_n_gives_different_samples_each_with_its_index(server: TinyServer) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "n": 3, "max_tokens": 12, "seed": 5}
    answer = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    streamed = ["", "", ""]
    for event in client.chat.completions.create(**asked, stream=True):
        streamed[event.choices[0].index] += event.choices[0].delta.content or ""
    assert streamed == texts


def test_greedy_answers_are_copied_for_n(server: TinyServer) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["Once", "Hi"], "n": 2, "max_tokens": 6}
    answer = client.completions.create(**asked, temperature=0)
    expected = [says(server, prompt, 6) for prompt in ("Once", "Once", "Hi", "Hi")]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None and answer.usage.completion_tokens == 24
    streamed = ["", "", "", ""]
    for event in client.completions.create(**asked, temperature=0, stream=True):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == expected


def test_the_best_of_several_is_the_likeliest(server: TinyServer) -> None:
    client = server.client()
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Once",
        "max_tokens": 6,
        "seed": 3,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }
    all_of_them = client.completions.create(**asked, n=5)
    best = client.completions.create(**asked, best_of=5, n=2)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / 6

    ranked = sorted(all_of_them.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage is not None and best.usage.completion_tokens == 30


def test_logprobs_of_a_chat_have_names_bytes_and_alternatives(server: TinyServer) -> None:
    client = server.client()
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {"ignore_eos": True},
    }
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    [generation] = server.llm.generate([HELLO], params)
    expected = generation.completions[0].logprobs
    assert expected is not None and len(tokens) == 6
    for token, wanted in zip(tokens, expected):
        assert token.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(
            [logprob for _, logprob in wanted.top], abs=1e-4
        )
        assert token.top_logprobs[0].token == token.token  # greedy
    said = b"".join(bytes(token.bytes or []) for token in tokens)
    assert said.decode("utf-8", "replace") == choice.message.content
    streamed: list[Any] = []
    for event in client.chat.completions.create(**asked, stream=True):
        found = event.choices[0].logprobs
        streamed += (found.content or []) if found else []
    assert [token.token for token in streamed] == [token.token for token in tokens]


def test_logprobs_of_a_completion_stand_beside_its_text(server: TinyServer) -> None:
    client = server.client()
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Once",
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    choice = client.completions.create(**asked).choices[0]
    found = choice.logprobs
    assert found is not None and found.tokens is not None and found.token_logprobs is not None
    assert found.top_logprobs is not None and found.text_offset is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 6
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs):
        assert top[token] == max(top.values()) == pytest.approx(logprob)
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(6)]
    streamed: list[str] = []
    offsets: list[int] = []
    for event in client.completions.create(**asked, stream=True):
        piece = event.choices[0].logprobs
        streamed += (piece.tokens or []) if piece else []
        offsets += (piece.text_offset or []) if piece else []
    assert (streamed, offsets) == (found.tokens, found.text_offset)


def test_echo_tells_the_prompt_back_and_how_likely_it_was(server: TinyServer) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once", "temperature": 0, "echo": True}
    whole = client.completions.create(**asked, max_tokens=5)
    assert whole.choices[0].text == "Once" + says(server, "Once", 5)
    streamed = client.completions.create(**asked, max_tokens=5, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == whole.choices[0].text
    judged = client.completions.create(**asked, max_tokens=0, logprobs=1)
    found = judged.choices[0].logprobs
    assert judged.choices[0].text == "Once" and found is not None
    assert found.tokens == list("Once") and found.token_logprobs is not None
    assert found.token_logprobs[0] is None and all(p < 0 for p in found.token_logprobs[1:])
    assert judged.usage is not None and judged.usage.completion_tokens == 0


def test_where_nothing_was_to_be_said_no_token_is_counted(server: TinyServer) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 0, "echo": True}
    whole = server.client().completions.create(**asked).usage
    *_, last = server.client().completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert whole is not None and last.usage is not None
    for told in (whole, last.usage):
        assert (told.prompt_tokens, told.completion_tokens, told.total_tokens) == (5, 0, 5)


@pytest.mark.parametrize("prompt", [[], [[]], [199], [5] * 600, 5])
def test_a_prompt_that_cannot_be_is_named(server: TinyServer, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        server.client().completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert refusal.value.param == "prompt"


def test_a_stop_string_ends_an_answer_and_is_not_shown(server: TinyServer) -> None:
    client = server.client()
    whole = says(server, "Hello", 24)
    stop = whole[5:7]
    at = whole.index(stop)
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 24, "temperature": 0}
    for stops in (stop, ["no such text", stop]):
        [choice] = client.completions.create(**asked, stop=stops).choices
        assert (choice.text, choice.finish_reason) == (whole[:at], "stop")
        assert choice.stop_reason == stop  # type: ignore[attr-defined]
        pieces = list(client.completions.create(**asked, stop=stops, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == whole[:at]
        assert pieces[-1].choices[0].finish_reason == "stop"
        assert pieces[-1].choices[0].stop_reason == stop  # type: ignore[attr-defined]
        assert not any(hasattr(piece.choices[0], "stop_reason") for piece in pieces[:-1])
    chat: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 9, "stream": True}
    [*_, last] = client.chat.completions.create(**chat, logit_bias={"70": 100}, stop=["gg"])
    assert last.choices[0].stop_reason == "gg"


def test_a_seed_repeats_an_answer_and_penalties_change_it(server: TinyServer) -> None:
    client = server.client()

    def said(**options: Any) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=16, **options
        )
        return answer.choices[0].message.content

    assert said(seed=1) == said(seed=1) != said(seed=2)
    assert said(seed=-7) == said(seed=-7)
    plain = said(temperature=0)
    biased: dict[str, Any] = {"temperature": 0, "logit_bias": {"70": 20}}
    assert said(**biased) == "g" * 16
    assert said(**biased, frequency_penalty=2, presence_penalty=2) != "g" * 16
    assert said(temperature=0, logit_bias={"70": 100}) == "g" * 16
    assert said(temperature=0, extra_body={"repetition_penalty": 3.0}) != plain
    assert said(temperature=1, extra_body={"top_k": 1}) == plain


def test_both_names_of_the_token_limit_count(server: TinyServer) -> None:
    client = server.client()
    for options in ({"max_tokens": 4}, {"max_completion_tokens": 4}):
        made: Any = {**options, "extra_body": {"ignore_eos": True}}
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, **made)
        assert answer.usage is not None and answer.usage.completion_tokens == 4
    # As far as the memory goes, where neither is given.
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.total_tokens == server.llm.max_model_len


def test_what_openais_clients_send_besides_is_accepted(server: TinyServer) -> None:
    answer = server.client().chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "me"},
        ],
        max_tokens=2,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        parallel_tool_calls=True,
        modalities=["text"],
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"logprobs": False, "top_logprobs": 0},
        {"messages": [*HELLO, {**DUMPED, "content": "Hi"}, *HELLO]},
        {"messages": [*HELLO, {**DUMPED, "annotations": []}, *HELLO]},
        {"tool_choice": "auto", "tools": []},
        {"extra_body": {"tools": None, "tool_choice": None, "response_format": None}},
    ],
)
def test_what_asks_for_plain_text_is_accepted(server: TinyServer, options: dict[str, Any]) -> None:
    answer = server.client().chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "max_tokens": 2, **options}
    )
    assert answer.usage is not None and answer.usage.completion_tokens <= 2


@pytest.mark.parametrize(
    ("options", "message", "param"),
    [
        ({"temperature": -1}, "temperature is -1", "temperature"),
        ({"top_p": 2}, "top_p is 2", "top_p"),
        ({"n": 0}, "n is 0", "n"),
        ({"n": 1_000_000}, "more than 128 answers", "n"),
        ({"n": 100}, "n is 100: give at most 16", "n"),
        ({"max_tokens": -3}, "max_tokens is -3", "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21", "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs", "top_logprobs"),
        ({"stop": ""}, "at least 1 character", "stop"),
        ({"stop": ["x"] * 17}, "at most 16 items", "stop"),
        ({"stop": "x" * 1_000_000}, "at most 1024 characters", "stop"),
        ({"stop": ["x", "y" * 2_000]}, "at most 1024 characters", "stop.1"),
        ({"messages": [{"role": "user", "content": 5}]}, "valid string", "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "needs a content",
            "messages.0.content",
        ),
        ({"messages": [{"role": "usr", "content": "x"}]}, "'assistant'", "messages.0.role"),
        ({"max_tokens": 508}, "after a prompt of 22 tokens give at most 490", "max_tokens"),
        ({"max_completion_tokens": 10**18}, "the model takes 512", "max_completion_tokens"),
        ({"logit_bias": {"199": 1}}, "not 0 to 198", "logit_bias"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "False", None),
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "at most 512", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "'image_url' is not supported",
            "messages.0.content.0",
        ),
        ({"functions": [{"name": "f"}]}, "functions is not supported", "functions"),
        ({"response_format": {"type": "xml"}}, "'xml' is not supported", "response_format"),
        ({"reasoning_effort": "high"}, "reasoning_effort is not supported", "reasoning_effort"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "two names of the same", "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "for streams", "stream_options"),
        ({"extra_body": {"tempertaure": 1}}, "no such field", "tempertaure"),
        ({"extra_body": {"continue_final_message": True}}, "add_generation_prompt", None),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}},
            "no variable of the template",
            "chat_template_kwargs",
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
        ({"extra_body": {"cache_salt": ""}}, "cache_salt", "cache_salt"),
        ({"seed": "x"}, "seed", "seed"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    server: TinyServer, options: dict[str, Any], message: str, param: str | None
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 1, **options}
    for stream in (False, True):
        if "stream_options" in options and stream is not options.get("stream", False):
            continue
        with pytest.raises(openai.BadRequestError) as refusal:
            server.client().chat.completions.create(**{**asked, "stream": stream})
        assert message in refusal.value.message
        assert refusal.value.type == "invalid_request_error"
        assert (refusal.value.code == "unsupported_parameter") is ("not supported" in str(refusal))
        if param is not None:
            assert refusal.value.param == param


def test_a_prompt_that_never_fits_is_refused_with_the_numbers() -> None:
    with tiny_server(num_tokens=None, num_blocks=10) as small:
        for stream in (False, True):
            with pytest.raises(
                openai.BadRequestError, match="12 blocks, the whole memory has 10"
            ) as refusal:
                small.client().completions.create(
                    model=MODEL, prompt=[5] * 46, max_tokens=1, stream=stream
                )
            assert refusal.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="give at most 21, since the memory"):
                small.client().completions.create(
                    model=MODEL, prompt=[5] * 20, max_tokens=29, stream=stream
                )
            told = small.client().completions.create(
                model=MODEL, prompt=[5] * 20, max_tokens=21, extra_body={"ignore_eos": True}
            )
            assert told.usage is not None and told.usage.completion_tokens == 21
        answer = small.client().completions.create(
            model=MODEL, prompt=[[5] * 20, [6] * 5], max_tokens=3
        )
        assert len(answer.choices) == 2
        small.wait_until(lambda: small.used_blocks == 0)
        # Of two prompts one never fits: neither is served.
        with pytest.raises(openai.BadRequestError, match="the whole memory has 10"):
            small.client().completions.create(model=MODEL, prompt=[[6] * 5, [5] * 45], max_tokens=9)
        small.wait_until(lambda: small.used_blocks == 0)
        small.llm.verify()


def test_a_last_message_can_be_continued_and_a_template_has_variables(server: TinyServer) -> None:
    begun: list[Any] = [*HELLO, {"role": "assistant", "content": "Hi, I"}]
    answer = server.client().chat.completions.create(
        model=MODEL,
        messages=begun,
        max_tokens=6,
        temperature=0,
        extra_body={
            "continue_final_message": True,
            "add_generation_prompt": False,
            "chat_template_kwargs": {"anything": 1},
        },
    )
    said = says(server, "<user>Hello<assistant>Hi, I", 6)
    assert answer.choices[0].message.content == said


def test_another_model_is_not_found(server: TinyServer) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        server.client().chat.completions.create(model="gpt-9", messages=HELLO)
    assert refusal.value.code == "model_not_found"


def test_an_abandoned_stream_is_cancelled_and_its_blocks_come_back(server: TinyServer) -> None:
    stream = server.client().chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_until(lambda: server.used_blocks == 0)
    server.wait_until(lambda: not server.serving.exchanges)
    assert server.llm.statistics().memory.num_running == 0
    server.llm.verify()


def test_an_abandoned_answer_that_is_not_streamed_is_cancelled_too(server: TinyServer) -> None:
    before = server.llm.statistics().output_tokens
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=0.2).completions.create(
            model=MODEL,
            prompt=[[5 + i] * 20 for i in range(40)],
            max_tokens=480,
            extra_body={"ignore_eos": True},
        )
    server.wait_until(lambda: not server.serving.exchanges and server.used_blocks == 0)
    assert server.llm.statistics().output_tokens - before < 40 * 480
    server.llm.verify()


def test_tokens_and_text_become_each_other_as_vllm_has_it(server: TinyServer) -> None:
    with server.http() as http:
        ids = server.llm.tokenizer("Hello")["input_ids"]
        told = http.post("/tokenize", json={"model": MODEL, "prompt": "Hello"}).json()
        assert told == {"count": 5, "max_model_len": 512, "tokens": ids, "token_strs": None}
        told = http.post("/tokenize", json={"prompt": "Hello", "return_token_strs": True}).json()
        assert told["token_strs"] == list("Hello")
        assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello"}
        chat = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
        assert chat == server.llm.tokenizer("<user>Hello<assistant>")["input_ids"]
        chat = http.post(
            "/tokenize", json={"messages": HELLO, "add_generation_prompt": False}
        ).json()["tokens"]
        assert chat == server.llm.tokenizer("<user>Hello")["input_ids"]
        for body in ({}, {"prompt": "a", "messages": HELLO}, {"prompt": 5}):
            assert http.post("/tokenize", json=body).status_code == 400
        for body in ({"messages": HELLO, "tools": None}, {"messages": HELLO, "tools": []}):
            assert http.post("/tokenize", json=body).status_code == 200
        for body in ({"messages": HELLO, "tools": [{}]}, {"messages": [{"role": "user"}]}):
            assert http.post("/tokenize", json=body).status_code == 400
        assert http.post("/detokenize", json={"tokens": [-1]}).status_code == 400
        told = http.post("/detokenize", json={"tokens": [5, VOCABULARY]})
        assert told.status_code == 400 and told.json()["error"]["param"] == "tokens"
