"""`LLM` as its users see it: forms of prompts, streams, limits, and one line for bad input."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")


from models.tiny_engine import greedy
from models.tiny_models import (
    MAX_LENGTH,
    VOCABULARY,
    generated,
    tiny_model,
    tiny_tokenizer,
)
from pagedkv.engine import LLM, BeamSearchParams, SamplingParams
from pagedkv.engine.outputs import Chunk
from pagedkv.errors import InvalidInput, NeverFits


def llm(**options: Any) -> LLM:
    options = {"num_tokens": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8, **options}
    return LLM(tiny_model("llama"), **options)


@cache
def says(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(generated(tiny_model("llama"), list(prompt), count))


def test_prompts_come_alone_or_in_lists_as_text_or_token_ids() -> None:
    made = llm(tokenizer=tiny_tokenizer())
    ids = tuple(made.tokenizer("Hello")["input_ids"])
    for prompts in ("Hello", ["Hello"], list(ids), [list(ids)]):
        [answer] = made.generate(prompts, greedy(6))
        assert answer.prompt_token_ids == ids
        assert answer.token_ids == says(ids, 6)
        assert answer.text == made.tokenizer.decode(answer.token_ids)
    both = made.generate(["Hello", "Helga"], [greedy(3), greedy(5)])
    assert [len(answer.token_ids) for answer in both] == [3, 5]
    assert made.generate([], greedy(3)) == []


def test_a_chat_goes_through_the_models_template() -> None:
    made = llm(tokenizer=tiny_tokenizer())
    message = {"role": "user", "content": "Hi"}
    with pytest.raises(InvalidInput, match="no chat template"):
        made.generate([message], greedy(2))
    made.tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}A:"
    [answer] = made.generate([message], greedy(2))
    assert answer.prompt_token_ids == tuple(made.tokenizer("<Hi>A:")["input_ids"])
    [many] = made.generate([[message, message]], greedy(2))
    assert len(many.prompt_token_ids) > len(answer.prompt_token_ids)
    with pytest.raises(InvalidInput, match="needs a role and a content"):
        made.generate([[{"role": "user"}]], greedy(2))
    made.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidInput, match="roles must alternate"):
        made.generate([message], greedy(2))


def test_without_a_tokenizer_text_is_refused_and_answers_have_none() -> None:
    made = llm()
    [answer] = made.generate([[5, 6, 7]], greedy(3))
    assert answer.text == "" and len(answer.token_ids) == 3
    for prompt in ("text", [{"role": "user", "content": "text"}]):
        with pytest.raises(InvalidInput, match="no tokenizer"):
            made.generate(prompt, greedy(1))
    with pytest.raises(InvalidInput, match="neither text nor token ids"):
        made.generate([[5, "a"]], greedy(1))  # type: ignore[list-item]


def test_a_stop_string_over_two_tokens_ends_the_answer_and_is_not_shown() -> None:
    made = llm(tokenizer=tiny_tokenizer())
    whole = made.generate("Hello", greedy(24))[0]
    assert len(whole.text) > 8
    stop = whole.text[4:6]
    assert stop not in whole.text[:5]
    chunks: list[str] = []
    params = SamplingParams(temperature=0, max_tokens=24, stop=stop)
    [answer] = made.generate("Hello", params, on_chunk=lambda _, chunk: chunks.append(chunk.text))
    assert answer.text == whole.text[:4] == "".join(chunks)
    assert (answer.completions[0].finish_reason, answer.completions[0].stop_reason) == (
        "stop",
        stop,
    )


def test_one_bad_prompt_is_refused_by_its_place_and_nothing_runs() -> None:
    made = llm()
    for bad, message in (([], "prompt 2 has no tokens"), ([VOCABULARY], "prompt 2 has a token")):
        with pytest.raises(InvalidInput, match=message):
            made.generate([[1, 2], bad], greedy(2))
    with pytest.raises(NeverFits, match="prompt 2 needs 6 blocks, the whole memory has 4"):
        llm(num_blocks=4, num_tokens=None).generate([[1, 2], [3] * 70], greedy(20))
    made.verify()
    assert made.statistics().memory.used_blocks == 0
    assert made.statistics().memory.num_running == made.statistics().memory.num_waiting == 0


def test_an_interrupt_cancels_what_was_asked_for() -> None:
    made = llm()

    def interrupt(place: int, chunk: Chunk) -> None:
        if place == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.generate([[1, 2], [3, 4]], greedy(50), on_chunk=interrupt)
    assert made.statistics().memory.used_blocks == 0
    assert made.generate([[5, 6, 7]], greedy(4))[0].token_ids == says((5, 6, 7), 4)


def test_whoever_cannot_be_told_spoils_nothing_for_those_in_the_same_steps() -> None:
    made = llm(tokenizer=tiny_tokenizer())
    other = made._engine.add([5, 6, 7], greedy(12))

    def fail(place: int, chunk: Chunk) -> None:
        raise OSError("the pipe is broken")

    with pytest.raises(OSError, match="pipe"):
        made.generate([[1, 2], [3, 4]], greedy(50), on_chunk=fail)
    assert made.statistics().memory.num_running == 1
    assert made.generate([[1, 2]], greedy(20))[0].token_ids == says((1, 2), 20)
    assert other.generation().token_ids == says((5, 6, 7), 12)


def test_beams_are_searched_for_beside_other_requests_and_come_with_their_text() -> None:
    made = llm(tokenizer=tiny_tokenizer())
    other = made._engine.add([5, 6, 7], greedy(12))
    params = BeamSearchParams(num_beams=3, num_return_sequences=2, max_tokens=6)
    one, two = made.beam_search(["Hello", [5, 6, 7]], params)
    assert one.prompt == "Hello" and two.prompt is None
    assert [len(answer.beams) for answer in (one, two)] == [2, 2]
    for beam in one.beams:
        assert beam.text == made.tokenizer.decode(beam.token_ids)
        assert beam.finish_reason == "length"
        assert beam.score == pytest.approx(beam.logprob / 6)
    assert one.beams[0].score >= one.beams[1].score
    assert other.generation().token_ids[:6] == says((5, 6, 7), 12)[:6]
    narrow = BeamSearchParams(num_beams=1, max_tokens=6)
    assert made.beam_search("Hello", narrow)[0].beams[0].token_ids == says(one.prompt_token_ids, 6)
    with pytest.raises(InvalidInput, match="are SamplingParams: give BeamSearchParams, or one"):
        made.beam_search("Hello", greedy(3))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="2 prompts, but 1 parameters"):
        made.beam_search(["a", "b"], [params])
    with pytest.raises(InvalidInput, match="prompt 2 has no tokens"):
        made.beam_search([[1], []], params)
    made._engine.cancel(other)
    assert made.statistics().memory.used_blocks == 0


def test_the_token_that_ends_a_beam_is_no_part_of_its_text() -> None:
    model = tiny_model("llama")
    likeliest = says((5, 6, 7), 1)[0]
    model.generation_config.eos_token_id = likeliest
    made = LLM(model, tokenizer=tiny_tokenizer(), num_tokens=512)
    params = BeamSearchParams(num_beams=2, max_tokens=4, length_penalty=-5.0)
    [found] = made.beam_search([5, 6, 7], params)[0].beams
    assert (found.token_ids, found.text, found.finish_reason) == ((likeliest,), "", "stop")


async def _read(made: LLM, prompt: list[int], count: int) -> tuple[int, ...]:
    told: list[int] = []
    async for chunk in made.stream(prompt, greedy(count)):
        told += chunk.token_ids
    return tuple(told)


def test_many_streams_share_the_steps_and_each_says_what_it_says_alone() -> None:
    async def together(made: LLM) -> list[tuple[int, ...]]:
        return await asyncio.gather(*(_read(made, [i, 6, 7], 20) for i in range(1, 6)))

    with llm() as made:
        told = asyncio.run(together(made))
        assert told == [says((i, 6, 7), 20) for i in range(1, 6)]
        assert made.statistics().memory.peak_running > 1


def test_generate_goes_on_beside_a_stream() -> None:
    async def both(made: LLM) -> tuple[tuple[int, ...], Any]:
        generated = asyncio.to_thread(made.generate, [[8, 9]], greedy(10))
        streamed, answers = await asyncio.gather(_read(made, [5, 6, 7], 20), generated)
        return streamed, answers

    with llm() as made:
        streamed, [answer] = asyncio.run(both(made))
        assert streamed == says((5, 6, 7), 20) and answer.token_ids == says((8, 9), 10)


def test_leaving_a_stream_gives_its_blocks_back() -> None:
    async def leave(made: LLM) -> None:
        stream = made.stream([5, 6, 7], greedy(400))
        async for _ in stream:
            break
        await stream.aclose()
        await _read(made, [1, 2], 2)

    async def cancelled(made: LLM) -> None:
        task = asyncio.create_task(_read(made, [5, 6, 7], 400))
        while not made.statistics().memory.used_blocks:
            await asyncio.sleep(0.001)
        assert not task.done()  # to look at the statistics took no whole answer
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with llm() as made:
        for scene in (leave, cancelled):
            asyncio.run(scene(made))
            for _ in range(2000):
                if not made.statistics().memory.used_blocks:
                    break
                time.sleep(0.005)
            assert made.statistics().memory.used_blocks == 0
            made.verify()


def test_a_stream_raises_what_its_request_is_refused_for_and_what_its_step_failed_with() -> None:
    async def read(made: LLM, prompt: list[int]) -> None:
        await _read(made, prompt, 4)

    with llm() as made:
        with pytest.raises(InvalidInput, match="no tokens"):
            asyncio.run(read(made, []))

        def broken(*_: Any) -> Any:
            raise OSError("the machine caught fire")

        made._engine.model.logits = broken  # type: ignore[method-assign]
        with pytest.raises(OSError, match="fire"):
            asyncio.run(read(made, [1, 2]))
        del made._engine.model.logits
        assert asyncio.run(_read(made, [5, 6, 7], 4)) == says((5, 6, 7), 4)
    with pytest.raises(InvalidInput, match="closed"):
        asyncio.run(read(made, [1]))


def test_who_generates_raises_what_a_step_failed_of_that_another_thread_ran() -> None:
    with llm() as made:
        logits, here = made._engine.model.logits, threading.current_thread()
        began = threading.Event()

        def broken(*arguments: Any) -> Any:
            if began.is_set() and threading.current_thread() is not here:
                raise OSError("the machine caught fire")
            return logits(*arguments)

        made._engine.model.logits = broken  # type: ignore[method-assign]
        told: list[Any] = []
        made.submit([5, 6, 7], greedy(400), told.append)
        with pytest.raises(OSError, match="fire"):
            made.generate([[8, 9]], greedy(400), on_chunk=lambda *_: began.set())
        with pytest.raises(OSError, match="fire"):
            made.submit([5, 6, 7], greedy(400), told.append)
            made.beam_search([[8, 9]], BeamSearchParams(num_beams=2, max_tokens=300))
        assert isinstance(told[-1], OSError)
        del made._engine.model.logits


def test_a_stream_that_waits_has_no_part_in_a_step_that_fails() -> None:
    with llm(max_num_seqs=1) as made:
        logits, calls = made._engine.model.logits, itertools.count()
        told: list[Any] = []

        def broken(*arguments: Any) -> Any:
            call = next(calls)
            if call == 1:
                made.submit([5, 6, 7], greedy(4), told.append)
            if call == 3:
                raise OSError("the machine caught fire")
            return logits(*arguments)

        made._engine.model.logits = broken  # type: ignore[method-assign]
        with pytest.raises(OSError, match="fire"):
            made.generate([[8, 9]], greedy(9))
        while not (told and isinstance(told[-1], Chunk) and told[-1].finish_reason):
            assert not any(isinstance(news, BaseException) for news in told)
            time.sleep(0.01)
        chunks = [news for news in told if isinstance(news, Chunk)]
        assert tuple(i for chunk in chunks for i in chunk.token_ids) == says((5, 6, 7), 4)
        del made._engine.model.logits


def test_closing_tells_streams_that_go_on() -> None:
    async def read(made: LLM) -> None:
        async for _ in made.stream([5, 6, 7], greedy(400)):
            await asyncio.to_thread(made.close)

    made = llm()
    with pytest.raises(InvalidInput, match="was closed"):
        asyncio.run(read(made))
    assert made.statistics().memory.used_blocks == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_memory": "1MiB"}, "kv_memory and num_tokens both"),
        ({"num_tokens": None, "kv_memory": "lots"}, "write it like 2GiB"),
        ({"num_tokens": None, "kv_memory": 100}, "less than a block"),
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_tokens": None, "kv_memory": "900TiB"}, "the machine has"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": MAX_LENGTH + 1}, "right only up to 512"),
        ({"dtype": "float32"}, "loaded here"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as refusal:
        llm(**options)
    assert "\n" not in str(refusal.value)


def test_the_memory_is_announced_by_what_it_is_worth() -> None:
    lines: list[str] = []
    llm(num_tokens=1030, announce=lines.append)
    assert lines == [
        "KV memory 1.0 MiB: 65 blocks of 16 tokens, 1,040 tokens, 2.0 sequences of the full "
        "512 tokens"
    ]


def test_who_asks_for_no_memory_is_told_how_to() -> None:
    lines: list[str] = []
    llm(num_tokens=None, announce=lines.append)
    assert lines[0].startswith("KV memory 1,024.0 MiB:") or lines[0].startswith(
        "KV memory 1.0 GiB:"
    )
    assert "give kv_memory a size, or auto" in lines[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nothing", "is not there"),
        (lambda folder: folder, "holds no model"),
        (lambda folder: _file(folder, "notes.txt", "x"), "no GGUF file"),
        (lambda folder: _file(folder, "config.json", "{").parent, "cannot be|can be read"),
        (
            lambda folder: _file(folder, "config.json", '{"model_type": "mamba"}').parent,
            "mamba.*state",
        ),
    ],
)
def test_what_holds_no_model_is_named_in_one_line(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refusal:
        LLM(make(tmp_path))
    assert "\n" not in str(refusal.value)


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_model_folder_is_loaded_in_the_dtype_asked_for(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="unknown dtype 'int3'"):
        LLM(tmp_path, dtype="int3")
    with pytest.raises(InvalidInput, match="has no tokenizer"):
        LLM(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    made = LLM(os.fspath(tmp_path), num_blocks=8)
    ids = tuple(made.tokenizer("Hello")["input_ids"])
    assert made.generate("Hello", greedy(8))[0].token_ids == says(ids, 8)
    half = LLM(tmp_path, dtype="bfloat16", num_blocks=8)
    assert half.budget.block_bytes * 2 == made.budget.block_bytes
    assert len(half.generate("Hello", greedy(8))[0].token_ids) == 8


def test_a_folder_that_holds_half_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    whole, stored = config.read_text(), weights.read_bytes()

    def refusal() -> str:
        with pytest.raises(InvalidInput) as refused:
            LLM(tmp_path, tokenizer=tiny_tokenizer())
        assert "\n" not in str(refused.value)
        return str(refused.value)

    # Layers that it does not have would be filled with random numbers.
    config.write_text(whole.replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    assert re.search(r"lacks weights .* model\.layers\.4\..* and 8 others", refusal())
    config.write_text(whole.replace('"hidden_size": 64', '"hidden_size": "many"'))
    assert "no model that can be read" in refusal()
    config.write_text(whole)
    weights.write_bytes(stored[:1000])
    assert "cannot be loaded" in refusal()
    weights.unlink()
    assert "cannot be loaded" in refusal()


def test_sizes_that_make_no_sense_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for sizes, message in (
        ({"kv_memory": "2 bananas"}, "is no size"),
        ({"kv_memory": "1GiB", "num_tokens": 5}, "both say how much memory"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"record": _file(tmp_path, "there.jsonl", "x")}, "the file exists"),
        ({"record": tmp_path / "no" / "run.jsonl"}, "there is no folder .*no"),
    ):
        with pytest.raises(InvalidInput, match=message):
            LLM("/nowhere", **sizes)  # type: ignore[arg-type]


def test_weights_larger_than_the_machine_are_refused_before_they_are_loaded(
    tmp_path: Path,
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(InvalidInput, match=r"weights of .* need 1\.0 TiB, the machine has"):
        LLM(tmp_path)
