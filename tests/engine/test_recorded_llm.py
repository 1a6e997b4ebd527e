"""Real runs of `LLM` under memory pressure, recorded and repeated in the simulator."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from models.decisions import Decided, Keys, engine_decided, replay_decided
from pagedkv.cli.main import run
from pagedkv.simulate.simulator import SimulationConfig, prepare_paged
from pagedkv.simulate.step_time import ONE_STEP
from pagedkv.simulate.trace_formats import read_trace

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models.tiny_models import tiny_model
from pagedkv.engine import LLM, BeamSearchParams, SamplingParams
from pagedkv.engine.request import Request
from pagedkv.errors import InvalidInput
from pagedkv.scheduling.limits import SchedulerConfig


class Watched:
    """An `LLM` whose every step is looked at."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.llm = LLM(tiny_model("llama"), record=path, watermark=0.0, **settings)
        self.engine = self.llm._engine
        self.decided: list[Decided] = []
        self._keys: Keys = {}
        self._rows: dict[int, int] = {}

    def add(self, prompt: list[int], namespace: Any = None, **params: Any) -> Request:
        request = self.engine.add(prompt, SamplingParams(**params), namespace=namespace)
        for sample in request.samples:
            self._rows[sample.sequence] = len(self._rows)
        return request

    def step(self) -> None:
        scheduler = self.engine.scheduler
        kept: list[Any] = []
        schedule = scheduler.schedule

        def watched() -> Any:
            kept.append(schedule())
            return kept[-1]

        scheduler.schedule = watched  # type: ignore[method-assign]
        try:
            self.engine.step()
        finally:
            scheduler.schedule = schedule  # type: ignore[method-assign]
            self.decided.append(engine_decided(scheduler, kept[0], self._rows, self._keys))

    def finish(self) -> None:
        while not self.engine.is_idle:
            self.step()


def repeated(path: Path) -> list[Decided]:
    trace = read_trace(str(path), by_step=True)
    had = trace.recorded_with
    assert had is not None
    config = SimulationConfig(
        num_blocks=int(had["num-blocks"]),
        block_size=int(had["block-size"]),
        step_time=ONE_STEP,
        prefix_caching=bool(had["prefix-caching"]),
        max_model_len=int(had["max-model-len"]),
        scheduler=SchedulerConfig(
            max_num_seqs=int(had["max-num-seqs"]),
            max_num_batched_tokens=int(had["max-num-batched-tokens"]),
            chunked_prefill=bool(had["chunked-prefill"]),
            watermark=float(had["watermark"]),
        ),
    )
    replay, keys = prepare_paged(trace, config), {}
    steps: list[Decided] = []
    while (decided := replay_decided(replay, keys)) is not None:
        steps.append(decided)
    return steps


def busy_run(watched: Watched) -> None:
    """Shared prefixes, samples, early ends, cancellations, a failing step, a memory too small."""
    system = list(range(20, 41))
    cancelled = []
    for i in range(6):
        watched.add([*system, i], max_tokens=14, temperature=1.0, seed=i, stop_token_ids=[7, 9])
        if i % 2:
            watched.step()
        cancelled.append(watched.add([*system, 3, i], n=2, max_tokens=9, temperature=1.5))
    watched.engine.cancel(cancelled[1])
    watched.add(system, max_tokens=5, prompt_logprobs=1)
    watched.add([*system, 1], {"tenant": 1}, n=3, max_tokens=6)  # greedy: they say the same
    for _ in range(9):
        watched.step()
    watched.engine.cancel(cancelled[2])
    watched.engine.cancel(cancelled[0])
    model, watched.engine.model.logits = watched.engine.model.logits, broken  # type: ignore
    with pytest.raises(RuntimeError, match="no power"):
        watched.step()
    watched.engine.model.logits = model  # type: ignore[method-assign]
    for i in range(4):
        watched.add([*system, i], max_tokens=20)
        watched.step()
    watched.finish()


def broken(*_: Any) -> Any:
    raise RuntimeError("no power")


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "budget"), [(2, 42, 64), (4, 26, 16), (16, 7, 10)]
)
def test_the_simulator_repeats_every_decision_of_a_run_of_a_model(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    block_size: int,
    num_blocks: int,
    budget: int,
) -> None:
    path = tmp_path / "run.jsonl.zst"
    watched = Watched(
        path,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
    )
    busy_run(watched)
    watched.llm.verify()
    watched.llm.close()
    had = watched.llm.statistics().memory
    assert had.preemptions > 0 and had.hit_tokens > 0
    assert any(step.copies for step in watched.decided)

    again = repeated(path)
    for number, (one, other) in enumerate(zip(watched.decided, again)):
        assert one == other, f"step {number}"
    assert len(watched.decided) == len(again)

    # And the command line, which is told nothing but the file.
    assert run(["simulate", str(path), "--by-step", "--no-report", "--json", "-"]) == 0
    [scheme] = json.loads(capsys.readouterr().out)["schemes"]
    assert scheme["scheme"] == "paged"
    assert scheme["num_steps"] == had.num_steps == len(again)
    assert scheme["preemptions"] == had.preemptions
    assert scheme["recomputed_tokens"] == had.recomputed_tokens
    assert scheme["hit_tokens_first"] == had.hit_tokens
    assert scheme["running_peak"] == had.peak_running


def test_a_recording_that_was_killed_repeats_the_run_of_a_model_as_far_as_it_goes(
    tmp_path: Path,
) -> None:
    path, killed = tmp_path / "run.jsonl", tmp_path / "killed.jsonl"
    watched = Watched(path, num_blocks=42, block_size=2, max_num_seqs=8, max_num_batched_tokens=64)
    ticks = itertools.count()
    watched.engine._clock = lambda: next(ticks) * 0.1
    busy_run(watched)
    watched.llm.close()
    whole = path.read_bytes()
    marks = [at.end() for at in re.finditer(rb'"under_way":.*\n', whole)]
    assert len(marks) > 10
    lengths = []
    for stop in marks[:-1:3]:
        killed.write_bytes(whole[: stop + 40])
        again = repeated(killed)
        assert again == watched.decided[: len(again)]
        lengths.append(len(again))
    assert lengths == sorted(set(lengths)) and lengths[-1] > len(watched.decided) - 10
    half, progress = read_trace(str(killed), by_step=True).remarks[:2]
    assert half.startswith("the last piece of the recording was cut off")
    assert progress.startswith(f"the run was cut off: its last progress is of step {lengths[-1]}")


def test_generate_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with LLM(tiny_model("llama"), record=path, num_blocks=64, block_size=4) as llm:
        answers = llm.generate([[1, 2, 3], [1, 2, 3, 4]], SamplingParams(max_tokens=5, n=2))
    trace = read_trace(str(path))
    assert trace.prompt_tokens.tolist() == [3, 3, 4, 4]
    said = [len(c.token_ids) for answer in answers for c in answer.completions]
    assert trace.output_tokens.tolist() == said
    assert trace.recorded_with == {
        "num-blocks": 64,
        "block-size": 4,
        "max-model-len": llm.max_model_len,
        "prefix-caching": True,
        "max-num-seqs": 256,
        "max-num-batched-tokens": 2048,
        "chunked-prefill": True,
        "watermark": 0.01,
    }


def test_a_recorded_run_refuses_beam_search_which_could_not_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with LLM(tiny_model("llama"), record=path, num_blocks=64, block_size=4) as llm:
        with pytest.raises(InvalidInput, match="prompt 1: beam search cannot be recorded") as told:
            llm.beam_search([[1, 2, 3]], BeamSearchParams(num_beams=2))
        assert "\n" not in str(told.value)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5))
        assert llm.statistics().requests == 1
    assert read_trace(str(path)).prompt_tokens.tolist() == [3]


def test_a_recording_tells_how_long_steps_took_and_when_first_tokens_came(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    watched = Watched(path, num_blocks=42, block_size=2, max_num_seqs=8, max_num_batched_tokens=64)
    ticks = itertools.count()
    watched.engine._clock = lambda: next(ticks) * 0.01
    busy_run(watched)
    had = watched.llm.statistics().memory
    watched.llm.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line["steps"] for line in lines if "steps" in line]
    columns = {name: [n for told in steps for n in told[name]] for name in steps[0]}
    [failed] = {line["failed_step"] for line in lines if "failed_step" in line}
    computed = [step.computes for step in watched.decided]
    del computed[failed]
    assert len(computed) == had.num_steps - 1
    for name, numbers in {
        "prefill_tokens": [[n for _, old, n in c if n > 1 or old == 0] for c in computed],
        "decode_tokens": [[n for _, old, n in c if n == 1 and old > 0] for c in computed],
        "context_tokens": [[old + n for _, old, n in c] for c in computed],
        "pairs": [[i + 1 for _, old, n in c for i in range(old, old + n)] for c in computed],
    }.items():
        assert columns[name] == [sum(step) for step in numbers], name
    # The clock ticks a few times a step.
    assert all(20_000 <= took_us <= 1_000_000 for took_us in columns["took_us"])
    assert sum(columns["took_us"]) < 1e6 * watched.engine._clock()
    for line in lines:
        if line.get("output_tokens"):
            assert line["arrival_s"] < line["first_token_s"] < watched.engine._clock()
        else:
            assert "first_token_s" not in line


def test_a_request_came_when_it_was_handed_over_and_not_when_the_step_before_it_ended(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.jsonl"
    with LLM(tiny_model("llama"), record=path, num_blocks=64, block_size=4) as llm:
        engine = llm._engine
        engine.seconds = lambda: 0.25  # type: ignore[method-assign]
        take_orders = llm._driving._take_orders

        def late() -> None:
            engine.seconds = lambda: 7.0  # type: ignore[method-assign]
            take_orders()

        llm._driving._take_orders = late  # type: ignore[method-assign]

        async def streamed() -> None:
            async for _ in llm.stream([1, 2, 3], SamplingParams(max_tokens=2)):
                pass

        asyncio.run(streamed())
    [line] = [ln for ln in map(json.loads, path.read_text().splitlines()) if "under_way" not in ln]
    assert line["arrival_s"] == 0.25 and line["first_token_s"] == 7.0


def test_a_what_if_of_a_recorded_run_is_timed_by_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl.zst"
    settings = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with LLM(tiny_model("llama"), record=path, num_blocks=64, block_size=4) as llm:
        engine, now_s = llm._engine, 0.0
        engine._clock = lambda: now_s
        logits = engine.model.logits

        def timed(storage: Any, batch: Any, *rest: Any) -> Any:
            nonlocal now_s
            now_s += 0.25 + 0.125 * len(batch.token_ids)
            return logits(storage, batch, *rest)

        engine.model.logits = timed  # type: ignore[method-assign]
        engine._start_s = 0.0
        for prompts in ([[1, 2, 3], [4, 5, 6, 7, 8]], [[9, 8, 7]]):
            llm.generate(prompts, settings)
    command = ["simulate", str(path), "--no-report", "--json", "-", "--what-if", "num-blocks=1x,2x"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["time of a step"] == (
        "fitted to this recording: 250 ms + 125 ms a prompt token + 125 ms an answer token"
    )
    # Two prompts together compute 8 tokens, the third one 3: measured and simulated alike.
    measured, base = found["measured"]["ttft_s"], found["choices"][0]["ttft_s"]
    assert measured["p50"] == pytest.approx(0.25 + 8 * 0.125)
    for name in ("p50", "p90", "p99"):
        assert base[name] == pytest.approx(measured[name], rel=1e-3)
    assert found["choices"][0]["duration_s"] == pytest.approx(now_s, rel=1e-3)
