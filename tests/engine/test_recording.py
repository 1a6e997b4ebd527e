"""A recorded run, repeated in the simulator: the same decisions on the same blocks, step by step.

The scheduler is driven by made-up tokens here; `test_recorded_llm.py` runs real models.
"""

from __future__ import annotations

import errno
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.decisions import Decided, Keys, replay_decided
from models.made_engine import MadeEngine
from pagedkv.engine.recording import Answer, Cut, Recorder, UnderWay
from pagedkv.errors import InvalidInput
from pagedkv.memory.laws import broken_laws
from pagedkv.scheduling.continuous import Scheduler
from pagedkv.scheduling.limits import SchedulerConfig
from pagedkv.simulate.simulator import SimulationConfig, prepare_paged
from pagedkv.simulate.step_time import StepTime
from pagedkv.simulate.trace_formats import read_trace

ONE_STEP = StepTime("one step", base_s=1.0)


def repeated(path: Path, config: SchedulerConfig, settings: dict[str, Any]) -> list[Decided]:
    trace = read_trace(str(path), by_step=True)
    replay = prepare_paged(
        trace, SimulationConfig(step_time=ONE_STEP, scheduler=config, **settings)
    )
    assert replay.refused == ()
    keys: Keys = {}
    steps: list[Decided] = []
    while (decided := replay_decided(replay, keys)) is not None:
        assert broken_laws(replay.memory, settings["block_size"]) == []
        steps.append(decided)
    return steps


def assert_same(run: list[Decided], again: list[Decided]) -> None:
    for step, (one, other) in enumerate(zip(run, again)):
        assert asdict(one) == asdict(other), f"step {step}"
    assert len(run) == len(again)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    seats = draw(st.integers(1, 5))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 12]))
    return {
        "config": SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=seats + draw(st.integers(0, 12)),
            chunked_prefill=draw(st.booleans()),
            watermark=draw(st.sampled_from([0.0, 0.2])),
        ),
        "num_blocks": draw(st.integers(36, 90)) // block_size,
        "block_size": block_size,
        "prefix_caching": draw(st.sampled_from([True, True, True, False])),
        "acts": [act for _ in range(draw(st.integers(1, 5))) for act in draw(stretches(seats))],
    }


@st.composite
def stretches(draw: st.DrawFn, seats: int) -> list[tuple[Any, ...]]:
    """Some requests come, some steps go by, and maybe something goes wrong."""
    acts: list[tuple[Any, ...]] = draw(
        st.lists(
            st.tuples(
                st.just("add"),
                st.integers(8, 24),  # prompt tokens
                st.integers(1, 12),  # new tokens
                st.integers(1, min(seats, 3)),  # samples
                st.integers(0, 1),  # voice
                st.sampled_from([None, None, {"salt": "a"}]),
                st.sampled_from([True, True, True, False]),  # reuse
            ),
            min_size=1,
            max_size=4,
        )
    )
    acts += draw(st.lists(st.tuples(st.just("cancel"), st.integers(0, 9)), max_size=2))
    acts.append(("step", draw(st.integers(0, 12))))
    if draw(st.booleans()):
        acts.append(("fail",))
    return acts


def recorded_run(run: dict[str, Any], path: Path) -> MadeEngine:
    scheduler = Scheduler(
        run["num_blocks"],
        run["config"],
        block_size=run["block_size"],
        max_model_len=64,
        prefix_caching=run["prefix_caching"],
    )
    recorder = Recorder(path, block_size=run["block_size"], settings={})
    engine = MadeEngine(scheduler, recorder, step_s=run.get("step_s", 0.3))
    for act, *rest in run["acts"]:
        if act == "add":
            prompt, num_new, samples, voice, namespace, reuse = rest
            ids = [i % 3 for i in range(prompt)]
            try:
                engine.add(
                    ids,
                    num_new,
                    num_samples=samples,
                    voice=voice,
                    namespace=namespace,
                    reuse=reuse,
                )
            except InvalidInput:
                continue  # larger than the whole memory
        elif act == "step":
            for _ in range(rest[0]):
                if not scheduler.is_idle:
                    engine.step()
        elif act == "cancel" and engine.requests:
            engine.cancel(engine.requests[rest[0] % len(engine.requests)])
        elif act == "fail" and not scheduler.is_idle:
            engine.step(fails=True)
    while not scheduler.is_idle:
        assert len(engine.decided) < 5_000
        engine.step()
    recorder.close()
    return engine


def assert_repeated(run: dict[str, Any]) -> MadeEngine:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        engine = recorded_run(run, path)
        if engine.requests:
            settings = {k: run[k] for k in ("num_blocks", "block_size", "prefix_caching")}
            assert_same(engine.decided, repeated(path, run["config"], settings))
        return engine


@given(runs())
def test_the_simulator_repeats_every_decision_of_a_recorded_run(run: dict[str, Any]) -> None:
    assert_repeated(run)


@given(
    runs(), st.sampled_from([0.03, 0.2, 0.5, 1.5]), st.floats(0, 1), st.sampled_from(["", ".zst"])
)
def test_wherever_a_recording_is_cut_off_it_repeats_the_run_up_to_a_second_before(
    run: dict[str, Any], step_s: float, share: float, ending: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"run.jsonl{ending}"
        engine = recorded_run({**run, "step_s": step_s}, path)
        if not engine.decided:
            return
        whole = path.read_bytes()
        settings = {k: run[k] for k in ("num_blocks", "block_size", "prefix_caching")}
        # Between two steps, as if it had been killed there; and anywhere, as a kill may tear it.
        killed = int(share * (len(engine.written) - 1))
        path.write_bytes(whole[: engine.written[killed]])
        steps = repeated(path, run["config"], settings)
        assert len(steps) * step_s >= min((killed + 1) * step_s - 1.0, killed * step_s) - 1e-9
        assert_same(engine.decided[: len(steps)], steps)
        first = engine.written[0]
        torn = first + int(share * (len(whole) - first))
        path.write_bytes(whole[:torn])
        steps = repeated(path, run["config"], settings)
        assert_same(engine.decided[: len(steps)], steps)


def add(
    prompt: int, new: int, *, samples: int = 1, voice: int = 0, salt: str = "", reuse: bool = True
) -> tuple[Any, ...]:
    return ("add", prompt, new, samples, voice, {"salt": salt} if salt else None, reuse)


def repeated_run(
    *acts: tuple[Any, ...],
    num_blocks: int = 30,
    block_size: int = 4,
    seats: int = 6,
    budget: int = 64,
) -> MadeEngine:
    config = SchedulerConfig(
        max_num_seqs=seats, max_num_batched_tokens=budget, chunked_prefill=True, watermark=0.0
    )
    return assert_repeated(
        {
            "config": config,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "prefix_caching": True,
            "acts": acts,
        }
    )


def hits(engine: MadeEngine) -> int:
    return engine.scheduler.statistics().hit_tokens


def test_what_a_failed_step_wrote_is_not_found_in_the_repeated_run_either() -> None:
    engine = repeated_run(add(17, 3), ("fail",), add(17, 3))
    assert hits(engine) == 0
    engine = repeated_run(add(17, 3), add(9, 9), ("step", 2), ("fail",), add(17, 3), ("fail",))
    assert hits(engine) > 0


def test_who_is_cancelled_first_gives_back_its_blocks_first() -> None:
    a, b = (add(n, 9, salt=str(n)) for n in (5, 10))
    for first, second in ((0, 1), (1, 0)):
        engine = repeated_run(
            a, b, ("step", 2), ("cancel", first), ("cancel", second), add(24, 4, salt="c")
        )
        [c] = engine.decided[2].tables
        if first == 0:
            in_order = c
    assert c != in_order


def test_whoever_ends_in_a_step_gives_back_its_blocks_before_whoever_is_cancelled_after_it() -> (
    None
):
    engine = repeated_run(add(5, 9), add(9, 2), add(7, 3), ("step", 2), ("cancel", 0), add(24, 9))
    assert engine.decided[1].running == [0, 2]


def test_who_ends_in_one_step_gives_back_its_blocks_in_the_order_in_which_it_runs() -> None:
    # The last request is admitted before the fork begins, and computes behind it.
    acts = add(8, 1), add(8, 1), add(8, 4, samples=2), ("cancel", 0), add(14, 1)
    engine = repeated_run(*acts, budget=6, seats=4, block_size=1, num_blocks=36)
    before, last = engine.decided[2:4]
    assert before.running == [2, 4, 3] and [s for s, *_ in last.computes] == [2, 3, 4]
    assert last.running == [2]


def test_cancelled_wherever_it_is() -> None:
    long, other, short = add(24, 9, salt="long"), add(24, 9, salt="other"), add(6, 9)
    waiting = repeated_run(long, other, short, ("step", 2), ("cancel", 1), num_blocks=10)
    assert waiting.requests[1].samples[0].token_ids == []
    in_prompt = repeated_run(long, short, ("step", 2), ("cancel", 0), budget=8)
    assert in_prompt.requests[0].samples[0].token_ids == []
    assert in_prompt.decided[1].running == [0]
    at_once = repeated_run(long, ("cancel", 0), short, ("step", 1))
    assert len(at_once.decided[0].running) == 1
    before_forks = repeated_run(add(24, 5, samples=3), short, ("step", 1), ("cancel", 0), budget=8)
    assert all(not s.token_ids for s in before_forks.requests[0].samples)


def test_cancelled_after_a_preemption_when_others_wait_behind_it() -> None:
    engine = repeated_run(
        add(9, 12), add(10, 12, salt="b"), add(8, 12), ("step", 9), ("cancel", 1), num_blocks=8
    )
    preempted = [s for step in engine.decided for s in step.preempted]
    assert 1 in preempted and engine.requests[1].samples[0].token_ids
    assert engine.requests[1].samples[0].cut is not None


def test_samples_that_say_the_same_and_samples_that_do_not() -> None:
    same = repeated_run(add(10, 9, samples=3), add(17, 4))
    other = repeated_run(add(10, 9, samples=3, voice=1), ("step", 12), add(17, 4))
    for engine in (same, other):
        assert any(step.copies for step in engine.decided)
    tight = repeated_run(add(10, 9, samples=3, voice=1), add(9, 5, samples=2), num_blocks=9)
    assert tight.scheduler.statistics().preemptions > 0


def test_tenants_and_prompts_that_are_not_cached() -> None:
    for other, found in ((add(16, 2), 12), (add(16, 2, salt="t"), 0), (add(16, 2, reuse=False), 0)):
        assert hits(repeated_run(add(16, 3), ("step", 4), other)) == found


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of requests that ended."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "under_way" not in line]


def made_recorder(path: Path, **changes: Any) -> Recorder:
    return Recorder(path, **{"block_size": 4, "settings": {}, "secret": bytes(16), **changes})


def record_one(recorder: Recorder, prompt: list[int], *answers: list[int], **came: Any) -> None:
    arrival = recorder.arrived(**{"s": 0.0, "step": 0, "namespace": None, **came})
    recorder.ended(arrival, prompt, [Answer(i, ids) for i, ids in enumerate(answers)])
    recorder.flush(s=arrival.s, step=arrival.step)


def test_a_recording_holds_lengths_and_keys_and_no_token(tmp_path: Path) -> None:
    recorder = made_recorder(tmp_path / "run.jsonl", settings={"num-blocks": 9})
    record_one(recorder, [71234, 71235, 71236], [71237, 71238], s=1.5, step=7)
    recorder.close()
    [line] = lines_of(tmp_path / "run.jsonl")
    keys = line.pop("prefix_ids")
    assert line == {
        "arrival_s": 1.5,
        "arrival_step": 7,
        "request": 0,
        "sample": 0,
        "prompt_tokens": 3,
        "output_tokens": 2,
        "engine": {"num-blocks": 9},
        "prefix_granularity": 4,
        "covers_output": True,
    }
    assert [len(key) for key in keys] == [32, 32]
    assert not any("7123" in text for text in keys)


def test_another_recording_of_the_same_run_has_other_keys(tmp_path: Path) -> None:
    found = []
    for name in ("a.jsonl", "b.jsonl"):
        recorder = made_recorder(tmp_path / name, secret=None)
        record_one(recorder, [1, 2, 3, 4, 5], [6])
        recorder.close()
        found.append(lines_of(tmp_path / name)[0]["prefix_ids"])
    assert len(found[0]) == 2 and not set(found[0]) & set(found[1])


def test_keys_are_equal_as_far_as_tokens_and_namespace_are(tmp_path: Path) -> None:
    recorder = made_recorder(tmp_path / "run.jsonl")
    record_one(recorder, [1, 2, 3, 4, 5, 6, 7], [8, 9])
    record_one(recorder, [1, 2, 3, 4, 5], [6, 7, 8], [6, 7, 7])
    record_one(recorder, [1, 2, 3, 4, 5], [6], namespace={"salt": "other"})
    recorder.close()
    a, b, c, other = (line["prefix_ids"] for line in lines_of(tmp_path / "run.jsonl"))
    assert a[:2] == b and b[0] == c[0] and b[1] != c[1]
    assert not set(other) & {*a, *b, *c}


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz", "run.jsonl.zst"])
def test_what_ended_can_be_read_while_the_run_goes_on(tmp_path: Path, name: str) -> None:
    recorder = made_recorder(tmp_path / name)
    going_on = recorder.arrived(s=0.0, step=0, namespace=None)
    record_one(recorder, [1, 2, 3], [4, 5], s=0.5, step=1)
    record_one(recorder, [1, 2, 3, 4], [5], [6], s=0.5, step=1)
    trace = read_trace(str(tmp_path / name))
    assert trace.prompt_tokens.tolist() == [3, 4, 4]
    assert trace.sample is not None and trace.sample.tolist() == [0, 0, 1]
    assert trace.num_requests == 2
    assert trace.remarks == (
        "1 request is missing that had not ended when the recording did: what they took from "
        "the others is not repeated",
    )
    recorder.ended(going_on, [7], [Answer(0, [8])])
    recorder.flush(s=1.0, step=3)
    recorder.close()
    trace = read_trace(str(tmp_path / name))
    assert trace.prompt_tokens.tolist() == [1, 3, 4, 4] and trace.remarks == ()


def test_a_recording_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("mine")
    with pytest.raises(InvalidInput, match=r"run\.jsonl: the file exists; name another"):
        made_recorder(tmp_path / "run.jsonl")
    assert (tmp_path / "run.jsonl").read_text() == "mine"
    with pytest.raises(InvalidInput, match="cannot be written: No such file or directory"):
        made_recorder(tmp_path / "none" / "run.jsonl")
    with pytest.raises(InvalidInput, match="secret is 3 bytes"):
        made_recorder(tmp_path / "other.jsonl", secret=b"abc")


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path: Path) -> None:
    recorder = made_recorder(tmp_path / "run.jsonl")
    record_one(recorder, [1, 2, 3], [4])
    whole = (tmp_path / "run.jsonl").read_bytes()
    recorder._file = _FullDisk(recorder._file)  # type: ignore[assignment]
    record_one(recorder, [1, 2, 3, 4], [5])
    record_one(recorder, [1, 2, 3, 4], [5])
    assert (tmp_path / "run.jsonl").read_bytes() == whole
    with pytest.raises(InvalidInput, match="No space left on device; it ends here"):
        recorder.close()


class _FullDisk:
    """A file on which half a piece finds room."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._is_full = False

    def write(self, piece: memoryview) -> int:
        if self._is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._is_full = True
        return int(self._file.write(piece[: len(piece) // 2]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_requests_cut_short_before_their_first_token_are_left_out_of_time_and_not_of_steps(
    tmp_path: Path,
) -> None:
    recorder = made_recorder(tmp_path / "run.jsonl")
    record_one(recorder, [1, 2, 3], [4, 5])
    for step, by_failure in ((4, False), (6, True)):
        arrival = recorder.arrived(s=1.0, step=2, namespace=None)
        recorder.ended(arrival, [5, 6], [Answer(0, [], Cut(step, by_failure=by_failure))])
    recorder.flush(s=2.0, step=7)
    recorder.close()
    trace = read_trace(str(tmp_path / "run.jsonl"))
    assert len(trace) == 1
    assert trace.remarks == (
        "2 cancelled or failed requests (0 output tokens) left out, first on line 3",
    )
    by_step = read_trace(str(tmp_path / "run.jsonl"), by_step=True)
    assert by_step.arrival_s.tolist() == [0, 2, 2]
    assert by_step.output_tokens.tolist() == [2, 0, 0]
    cut = by_step.interruptions
    assert cut is not None
    assert cut.cancelled.tolist() == [1] and cut.cancelled_s.tolist() == [4]
    assert cut.failed.tolist() == [2] and cut.failed_s.tolist() == [6]


LATER = "requests that came later and had not ended are missing"


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz", "run.jsonl.zst"])
def test_who_is_under_way_is_told_as_far_as_they_have_come(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    recorder = made_recorder(tmp_path / name)
    long, other = [
        recorder.arrived(s=s, step=step, namespace=None) for s, step in ((0.0, 0), (3.5, 7))
    ]
    said = [[4, 5, 6], [9]]

    def progress(s: float, step: int, *, has_ended: bool = False) -> None:
        answers = [
            Answer(0, list(said[0]), has_ended=False),
            Answer(1, said[1], has_ended=has_ended),
        ]
        waiting = UnderWay(other, [1, 2, 3, 4, 5], [Answer(0, [], has_ended=False)])
        recorder.progress([UnderWay(long, [1, 2, 3], answers), waiting], s=s, step=step)

    progress(4.0, 8)
    said[0] += [7, 8, 9]
    progress(5.0, 9, has_ended=True)
    progress(6.0, 10, has_ended=True)
    trace = read_trace(path)
    assert trace.prompt_tokens.tolist() == [3, 3] and trace.output_tokens.tolist() == [6, 1]
    assert trace.remarks == (
        "the run was cut off: its last progress is of step 10, 6.0 s after it began, when 2 "
        f"requests were under way, told as far as they had come; {LATER}",
        "1 cancelled or failed request (0 output tokens) left out, first on line 1",
    )
    by_step = read_trace(path, by_step=True)
    assert by_step.arrival_s.tolist() == [0, 0, 7]
    assert by_step.output_tokens.tolist() == [6, 1, 0]
    cut = by_step.interruptions
    assert cut is not None
    assert cut.cancelled.tolist() == [0, 2] and cut.cancelled_s.tolist() == [10, 10]

    # The keys are those of the whole line that comes when it has ended.
    keys = trace.prefix_ids.tolist()
    recorder.ended(long, [1, 2, 3], [Answer(0, said[0]), Answer(1, said[1])])
    recorder.flush(s=6.5, step=11)
    ended = read_trace(path)
    assert ended.prefix_ids.tolist() == keys
    under_way = "when 1 request was under way, told as far as they had come"
    assert ended.remarks[0].endswith(f"{under_way}; {LATER}")
    # By steps it counts as under way still, since what else came about since then is not known.
    again = read_trace(path, by_step=True)
    assert again.output_tokens.tolist() == [6, 1, 0]
    assert again.remarks[0].endswith(
        "2 requests were under way, told as far as they had come; 2 answers that ended in the "
        f"second after that left out, to go by steps; {LATER}"
    )
    recorder.ended(other, [1, 2, 3, 4, 5], [Answer(0, [6])])
    recorder.flush(s=6.6, step=12)
    recorder.close()
    for steps in (False, True):
        whole = read_trace(path, by_step=steps)
        assert whole.output_tokens.tolist() == [6, 1, 1] and whole.remarks == ()


def test_progress_is_due_a_second_after_the_last_one_while_anybody_is_under_way(
    tmp_path: Path,
) -> None:
    recorder = made_recorder(tmp_path / "run.jsonl")
    assert not recorder.is_progress_due(5.0)
    arrival = recorder.arrived(s=5.0, step=0, namespace=None)
    request = UnderWay(arrival, [1, 2, 3], [Answer(0, [], has_ended=False)])
    assert recorder.is_progress_due(5.1)  # nothing was ever written
    recorder.progress([request], s=5.1, step=0)
    # Steps of 0.25 s: the one from 6.0 would end too late.
    assert [s for s in (5.35, 5.6, 5.85, 6.1) if recorder.is_progress_due(s)] == [5.85, 6.1]
    recorder.progress([request], s=6.1, step=4)
    assert recorder.is_progress_due(8.0)
    recorder.progress([request], s=8.0, step=5)
    assert recorder.is_progress_due(9.9)  # each step takes longer than a second
    recorder.ended(arrival, [1, 2, 3], [Answer(0, [4])])
    recorder.flush(s=10.0, step=6)
    assert not recorder.is_progress_due(30.0)
    size = (tmp_path / "run.jsonl").stat().st_size
    recorder.flush(s=30.0, step=6)
    recorder.close()
    assert (tmp_path / "run.jsonl").stat().st_size == size


def test_what_did_not_grow_is_not_told_again(tmp_path: Path) -> None:
    recorder = made_recorder(tmp_path / "run.jsonl")
    arrival = recorder.arrived(s=0.0, step=0, namespace=None, is_shared=False)
    for step, said in enumerate(([], [], [4], [4], [4, 5])):
        request = UnderWay(arrival, [1, 2, 3], [Answer(0, said, has_ended=False)])
        recorder.progress([request], s=float(step), step=step)
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    told = [[entry["output_tokens"] for entry in line["under_way"]] for line in lines]
    assert told == [[0], [], [1], [], [2]]
    assert ["arrival_s" in entry for line in lines for entry in line["under_way"]] == [
        *(True, False, False)
    ]
    trace = read_trace(str(tmp_path / "run.jsonl"))
    assert len(trace.prefix_ids) == 0 and trace.output_tokens.tolist() == [2]


def test_steps_are_told_with_the_next_progress_and_last_until_the_next_one_begins(
    tmp_path: Path,
) -> None:
    recorder = made_recorder(tmp_path / "run.jsonl")

    def stepped(start_s: float, end_s: float, *sequences: tuple[int, int]) -> None:
        """Each sequence has some tokens, and computes some more."""
        num_new = np.array([new for _, new in sequences])
        lengths = np.array([before for before, _ in sequences]) + num_new
        query_starts = np.append(0, np.cumsum(num_new))
        recorder.stepped(lengths, query_starts, start_s=start_s, end_s=end_s)

    arrival = recorder.arrived(s=0.0, step=0, namespace=None)
    request = UnderWay(arrival, [1, 2, 3], [Answer(0, [4], has_ended=False, first_token_s=0.2)])
    recorder.is_progress_due(0.0)
    stepped(0.0, 0.25, (0, 3))
    recorder.is_progress_due(0.5)  # a quarter of a second went by behind the first step
    recorder.is_progress_due(0.625)  # the one that began then failed, and is none of these
    stepped(0.625, 0.75, (3, 1), (0, 1), (4, 2))
    assert recorder.is_progress_due(1.125)
    recorder.progress([request], s=1.125, step=3)
    recorder.is_progress_due(3.0)
    stepped(3.0, 3.125, (4, 1))
    recorder.ended(arrival, [1, 2, 3], [Answer(0, [4, 5], first_token_s=0.2)])
    recorder.flush(s=3.25, step=4)
    recorder.is_progress_due(9.0)
    arrival = recorder.arrived(s=9.0, step=4, namespace=None)
    recorder.progress([UnderWay(arrival, [1], [Answer(0, [], has_ended=False)])], s=9.0, step=4)
    recorder.close()
    told, ended, rest, later = map(
        json.loads, (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()
    )
    assert told["steps"] == {
        "took_us": [500_000, 500_000],
        "prefill_tokens": [3, 3],
        "decode_tokens": [0, 1],
        "context_tokens": [3, 4 + 1 + 6],
        "pairs": [6, 4 + 1 + 11],
    }
    assert rest["steps"] == {  # nobody was under way behind it
        "took_us": [125_000],
        "prefill_tokens": [0],
        "decode_tokens": [1],
        "context_tokens": [5],
        "pairs": [5],
    }
    assert "steps" not in later and "first_token_s" not in later["under_way"][0]
    assert told["under_way"][0]["first_token_s"] == ended["first_token_s"] == 0.2
