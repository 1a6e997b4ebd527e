"""Traces of recorded runs: answers that belong together, and requests that were cut short."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from models.made_trace import made_trace
from pagedkv.errors import InvalidInput, TraceError
from pagedkv.scheduling.limits import SchedulerConfig
from pagedkv.simulate.simulator import SimulationConfig, simulate_scheme
from pagedkv.simulate.step_time import ONE_STEP, measured_step_time
from pagedkv.simulate.trace import Trace
from pagedkv.simulate.trace_formats import read_trace, write_trace

CONFIG = SimulationConfig(
    num_blocks=12,
    block_size=4,
    step_time=measured_step_time(prefill_rate_tokens_per_s=100.0, base_s=0.5),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, watermark=0.0),
)


def line(**changes: Any) -> dict[str, Any]:
    whole = {
        "arrival_s": 0.0,
        "arrival_step": 0,
        "request": 0,
        "sample": 0,
        "prompt_tokens": 4,
        "output_tokens": 4,
    } | changes
    return {name: value for name, value in whole.items() if value is not None}


def written(folder: Path, *lines: dict[str, Any]) -> str:
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(path)


def with_samples(trace: Trace, samples: int) -> Trace:
    """The trace with each request `samples` times, as answers to one prompt."""
    rows = np.repeat(np.arange(len(trace)), samples)
    return replace(
        trace,
        arrival_s=trace.arrival_s[rows],
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        session=trace.session[rows],
        prefix_offsets=np.zeros(len(rows) + 1, dtype=np.int64),
        sample=np.tile(np.arange(samples), len(trace)),
    )


def test_recorded_samples_run_like_samples_that_are_asked_for() -> None:
    trace = made_trace([(0.0, 9, 12), (0.0, 3, 7), (2.0, 14, 2), (2.5, 5, 6)])
    small = replace(CONFIG, num_blocks=8)
    asked = simulate_scheme(trace, replace(small, num_samples=3), "paged")
    recorded = simulate_scheme(with_samples(trace, 3), small, "paged")
    for name in ("preemptions", "num_steps", "duration_s", "finished", "ttft_s", "share"):
        assert getattr(asked, name) == getattr(recorded, name), name
    assert asked.preemptions > 0


def test_samples_can_be_asked_for_of_a_recorded_run_in_which_nobody_had_several() -> None:
    trace = made_trace([(0.0, 9, 5), (1.0, 3, 7)])
    asked = simulate_scheme(trace, replace(CONFIG, num_samples=2), "paged")
    recorded = simulate_scheme(with_samples(trace, 1), replace(CONFIG, num_samples=2), "paged")
    assert recorded.finished == 4 and recorded.ttft_s == asked.ttft_s


def test_a_request_is_refused_with_all_of_its_samples() -> None:
    trace = with_samples(made_trace([(0.0, 9, 5), (0.0, 3, 7)]), 2)
    trace.output_tokens[3] = 90
    result = simulate_scheme(trace, CONFIG, "paged")
    assert result.refused == (
        "request 2 (93 tokens, at 0.0 s) needs 23 blocks, the whole memory has 12",
    )
    assert result.finished == 2
    result = simulate_scheme(with_samples(made_trace([(0.0, 2, 2)]), 5), CONFIG, "paged")
    assert result.refused == (
        "request 1 (4 tokens, at 0.0 s) has 5 answers, which run at once, and max_num_seqs is 4",
    )
    assert result.num_steps == 0


def test_samples_of_samples_and_steps_on_other_schemes_are_refused(tmp_path: Path) -> None:
    trace = with_samples(made_trace([(0.0, 9, 5)]), 2)
    with pytest.raises(InvalidInput, match="leave num-samples at 1"):
        simulate_scheme(trace, replace(CONFIG, num_samples=2), "paged")
    by_step = read_trace(written(tmp_path, line()), by_step=True)
    with pytest.raises(InvalidInput, match="leave out scheme reserve-max"):
        simulate_scheme(by_step, CONFIG, "reserve-max")


def test_lines_are_put_in_the_order_in_which_requests_came(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        line(request=2, arrival_s=3.0, arrival_step=5, prompt_tokens=2),
        line(request=1, sample=0, prompt_tokens=7),
        line(request=1, sample=1, prompt_tokens=7),
        line(request=0, prompt_tokens=9),
    )
    for by_step in (False, True):
        trace = read_trace(path, by_step=by_step)
        assert trace.prompt_tokens.tolist() == [9, 7, 7, 2]
        assert trace.sample is not None and trace.sample.tolist() == [0, 0, 1, 0]
        assert trace.arrival_s.tolist() == [0, 0, 0, 5 if by_step else 3]
        assert trace.remarks == ()
        assert trace.num_requests == 3
    assert trace.first(2).prompt_tokens.tolist() == [9, 7, 7]


def test_who_leaves_at_the_same_step_leaves_in_the_order_of_the_lines(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        line(request=2, cancelled_step=4),
        line(request=0, cancelled_step=4, output_tokens=0),
        line(request=3, failed_step=3),
        line(request=1, cancelled_step=1),
    )
    cut = read_trace(path, by_step=True).interruptions
    assert cut is not None
    assert cut.cancelled.tolist() == [1, 2, 0] and cut.cancelled_s.tolist() == [1, 4, 4]
    assert cut.failed.tolist() == [3] and cut.failed_s.tolist() == [3]
    cut = read_trace(path, by_step=True).first(2).interruptions
    assert cut is not None
    assert cut.cancelled.tolist() == [1, 0] and len(cut.failed) == 0


def test_whoever_is_cancelled_before_anything_was_computed_takes_nothing(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        line(request=0, cancelled_step=0, output_tokens=0),
        line(request=1, output_tokens=2),
    )
    trace = read_trace(path, by_step=True)
    result = simulate_scheme(trace, replace(CONFIG, step_time=ONE_STEP), "paged")
    assert result.num_steps == 2 and result.finished == 1 and result.running_peak == 1


def test_a_recorded_trace_is_written_and_read_back(tmp_path: Path) -> None:
    ids = {"prefix_granularity": 4, "covers_output": True}
    trace = read_trace(
        written(
            tmp_path,
            line(**ids, prefix_ids=["a", "b"], engine={"num-blocks": 7, "watermark": 0.5}),
            line(**ids, prefix_ids=["a", "c"], sample=1),
            line(**ids, prefix_ids=[], unshared=True, request=1, arrival_s=2.0),
        )
    )
    write_trace(trace, str(tmp_path / "again.jsonl"))
    again = read_trace(str(tmp_path / "again.jsonl"))
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "sample", "prefix_ids"):
        assert getattr(again, name).tolist() == getattr(trace, name).tolist(), name
    assert again.prefix_offsets.tolist() == trace.prefix_offsets.tolist() == [0, 2, 4, 4]
    assert again.recorded_with == {"num-blocks": 7, "watermark": 0.5}
    by_step = read_trace(str(tmp_path / "run.jsonl"), by_step=True)
    with pytest.raises(TraceError, match="read by its steps is not written"):
        write_trace(by_step, str(tmp_path / "steps.jsonl"))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([line(), line(sample=2)], "line 2, field 'sample': 2 of request 0 does not follow"),
        ([line(), line(sample=1, prompt_tokens=9)], "line 2, field 'sample': 1 of request 0"),
        ([line(), line(request=1, sample=1)], "line 2, field 'sample': 1 of request 1"),
        ([line(sample=1)], "line 1, field 'sample': 1 of request 0 does not follow"),
        ([line(), line()], "line 2, field 'request': 0 has two first answers"),
        ([line(), line(request=None)], "line 2, field 'request': is missing"),
        ([line(engine=3)], "line 1, field 'engine': 3 is not an object of settings"),
        ([line(engine={"a": "b"})], "line 1, field 'engine': a is 'b', not a number or true"),
        ([line(output_tokens=0)], "line 1, field 'output_tokens': must be at least 1"),
        (
            [line(prefix_ids=[], prefix_granularity=4, covers_output=True)],
            "line 1, field 'prefix_ids': has 0 ids, 8 tokens need 2",
        ),
    ],
)
def test_lines_that_do_not_fit_together_are_refused(
    tmp_path: Path, lines: list[dict[str, Any]], problem: str
) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert f"run.jsonl, {problem}" in str(refused.value)


def test_without_steps_nothing_goes_by_steps(tmp_path: Path) -> None:
    path = written(tmp_path, line(), line(request=1, arrival_step=None))
    assert len(read_trace(path)) == 2
    with pytest.raises(TraceError, match="line 2, field 'arrival_step': is missing"):
        read_trace(path, by_step=True)
    path = written(tmp_path, line(request=None))
    with pytest.raises(TraceError, match="is not the recording of a run"):
        read_trace(path, by_step=True)


def packed(ending: str, *pieces: list[dict[str, Any]]) -> bytes:
    """Lines in pieces, each compressed by itself, as a recorder writes them."""
    texts = ["".join(json.dumps(one) + "\n" for one in piece).encode() for piece in pieces]
    if ending == ".gz":
        return b"".join(gzip.compress(text) for text in texts)
    return b"".join(zstandard.ZstdCompressor().compress(text) for text in texts)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_of_a_recording_that_is_cut_within_a_piece_the_pieces_before_are_read(
    tmp_path: Path, ending: str
) -> None:
    pieces = [[line(request=i, engine={} if i == 0 else None)] for i in range(3)]
    path, whole = tmp_path / f"run{ending}", packed(ending, *pieces)
    two = len(packed(ending, *pieces[:2]))
    for stop in (two + 1, two + 3, two + 20, len(whole) - 1):
        path.write_bytes(whole[:stop])
        trace = read_trace(str(path))
        assert len(trace) == 2 + (stop == len(whole) - 1 and ending == ".gz")  # no byte of a line
        assert trace.remarks in (
            (f"the last piece of the recording was cut off: {stop - two} bytes of it left out",),
            ("the last piece of the recording was cut off: it is read as far as it goes",),
        )
    for stop, content in ((20, whole), (two + 20, packed(ending, *([line()] for _ in range(3))))):
        path.write_bytes(content[:stop])  # not one whole piece, or not a recording
        with pytest.raises(TraceError, match="data is cut off: fetch or copy the file again"):
            read_trace(str(path))


def test_half_a_line_at_the_end_is_left_out_of_a_recording_alone(tmp_path: Path) -> None:
    path = Path(written(tmp_path, line(engine={}), line(request=1)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    trace = read_trace(str(path))
    assert len(trace) == 1
    left_out = len(whole.splitlines()[1]) - 8
    assert trace.remarks == (
        f"the last piece of the recording was cut off: {left_out} bytes of it left out",
    )
    path.write_bytes(whole[:-1])  # a line's end that an editor left out
    assert len(read_trace(str(path))) == 2 and read_trace(str(path)).remarks == ()
    path.write_bytes(Path(written(tmp_path, line(), line(request=1))).read_bytes()[:-9])
    with pytest.raises(TraceError, match="line 2: is not JSON"):
        read_trace(str(path))
    path.write_bytes(whole[:20])
    with pytest.raises(TraceError, match="line 1: is not JSON"):
        read_trace(str(path))


def progress(*entries: Any, **changes: Any) -> dict[str, Any]:
    return {"step": 3, "s": 1.5, "prefix_granularity": 4, "under_way": list(entries)} | changes


def test_settings_on_a_line_of_progress_are_those_of_the_run(tmp_path: Path) -> None:
    ids = {"prefix_ids": ["a", "b"]}
    path = written(tmp_path, progress(line(**ids), engine={"num-blocks": 7}))
    assert read_trace(path).recorded_with == {"num-blocks": 7}
    path = written(
        tmp_path,
        progress(line(**ids), engine={"num-blocks": 7}),
        line(**ids, prefix_granularity=4, covers_output=True),
    )
    for by_step in (False, True):
        trace = read_trace(path, by_step=by_step)
        assert trace.recorded_with == {"num-blocks": 7} and len(trace) == 1


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([progress() | {"under_way": 3}], "line 1, field 'under_way': is not a list of answers"),
        ([progress(7)], "line 1, field 'under_way': is not a list of answers"),
        ([progress({"request": 1})], "line 1, field 'under_way': has an answer without the num"),
        (
            [progress(line(prefix_ids=[])), progress(line())],
            "line 2, field 'under_way': has no list of ids of request 0",
        ),
        (
            [progress(line(prefix_ids=[])), progress(line(), prefix_granularity=None)],
            "line 2, field 'under_way': has no numbers of tokens of request 0",
        ),
        ([progress(line(), step=None)], "line 1, field 'step': is not the number of a step"),
        ([progress(line(), s="x")], "line 1, field 's': is not a number of seconds"),
        (
            [progress(line(prefix_ids=["a"]))],
            "line 1, field 'prefix_ids': has 1 ids, 8 tokens need 2",
        ),
        ([progress(line(arrival_s=None))], "line 1, field 'arrival_s': is missing"),
    ],
)
def test_progress_that_cannot_be_is_refused(
    tmp_path: Path, lines: list[dict[str, Any]], problem: str
) -> None:
    with pytest.raises(TraceError) as refused:
        read_trace(written(tmp_path, *lines))
    assert f"run.jsonl, {problem}" in str(refused.value)


STEPS = {
    "took_us": [250_000, 1_000],
    "prefill_tokens": [9, 0],
    "decode_tokens": [0, 2],
    "context_tokens": [9, 22],
    "pairs": [45, 22],
}


def test_steps_and_first_tokens_that_were_measured_are_read_and_written_back(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path,
        progress(line(first_token_s=0.25, prefix_ids=["a", "b"]), steps=STEPS),
        progress(steps=STEPS | {"took_us": [3, 4]}),
        line(first_token_s=0.25, output_tokens=4),
        line(request=1, arrival_s=0.5, first_token_s=2.5),
        line(request=2, arrival_s=0.75, output_tokens=2),
        {"under_way": []},
    )
    trace = read_trace(path)
    steps = trace.measured_steps
    assert trace.remarks == () and steps is not None and len(steps) == 4
    assert steps.took_s.tolist() == [0.25, 0.001, 3e-6, 4e-6]
    assert steps.prefill_tokens.tolist() == [9, 0, 9, 0]
    assert steps.decode_tokens.tolist() == [0, 2, 0, 2]
    assert steps.context_tokens.tolist() == [9, 22, 9, 22]
    assert steps.pairs.tolist() == [45, 22, 45, 22]
    assert trace.measured_ttft_s is not None
    assert np.array_equal(trace.measured_ttft_s, [0.25, 2.0, np.nan], equal_nan=True)
    assert np.array_equal(trace.first(2).measured_ttft_s, [0.25, 2.0])  # type: ignore[arg-type]
    assert trace.at_load(2.0).measured_ttft_s is None  # another load than the one that was
    by_step = read_trace(path, by_step=True)
    assert by_step.measured_ttft_s is None

    write_trace(trace, str(tmp_path / "again.jsonl"))
    again = read_trace(str(tmp_path / "again.jsonl"))
    assert again.remarks == () and again.measured_steps is not None
    assert np.array_equal(again.measured_ttft_s, trace.measured_ttft_s, equal_nan=True)  # type: ignore[arg-type]
    for name in ("took_s", "prefill_tokens", "decode_tokens", "context_tokens", "pairs"):
        assert getattr(again.measured_steps, name).tolist() == getattr(steps, name).tolist()


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([progress(steps=3)], "line 1, field 'steps': 3 is not an object of lists"),
        ([progress(steps={"took_us": [3]})], "line 1, field 'steps': has no list prefill_tokens"),
        ([progress(steps=STEPS | {"pairs": 4})], "line 1, field 'steps': has no list pairs"),
        (
            [progress(steps=STEPS | {"pairs": [4]})],
            "line 1, field 'steps': has lists of different lengths",
        ),
        *(
            (
                [progress(), progress(steps=STEPS | {name: [bad, 1]})],
                f"line 2, field 'steps': {name} has {bad!r}, not a whole number from",
            )
            for name, bad in (
                ("took_us", 0),
                ("took_us", 10**12 + 1),
                ("prefill_tokens", -1),
                ("prefill_tokens", 2**31),
                ("decode_tokens", 1.5),
                ("context_tokens", True),
                ("context_tokens", 2**53 + 1),
                ("pairs", 2**62 + 1),
                ("pairs", None),
                ("pairs", "4"),
            )
        ),
        (
            [line(arrival_s=3.0), line(request=1, arrival_s=3.0, first_token_s=2.5)],
            "line 2, field 'first_token_s': is before arrival_s, when the request came",
        ),
        ([line(first_token_s="soon")], "line 1, field 'first_token_s': 'soon' is not a number"),
    ],
)
def test_measured_times_that_cannot_be_are_refused(
    tmp_path: Path, lines: list[dict[str, Any]], problem: str
) -> None:
    with pytest.raises(TraceError) as refused:
        read_trace(written(tmp_path, *lines))
    assert f"run.jsonl, {problem}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_run_that_was_cut_off_says_that_later_requests_are_missing(tmp_path: Path) -> None:
    ids = {"prefix_ids": ["a", "b"], "prefix_granularity": 4, "covers_output": True}
    told, ended, rest = progress(line(**ids)), line(**ids), progress(step=9, s=2.0)
    later = line(**ids, request=1, arrival_s=1.75, arrival_step=5)
    missing = "requests that came later and had not ended are missing"
    beginning = "the run was cut off: its last progress is of step 3, 1.5 s after it began"

    def remarks(*lines: dict[str, Any], by_step: bool = False) -> tuple[str, ...]:
        return read_trace(written(tmp_path, *lines), by_step=by_step).remarks

    under_way = "when 1 request was under way, told as far as they had come"
    assert remarks(told) == (f"{beginning}, {under_way}; {missing}",)
    assert remarks(told, ended) == (f"{beginning}; {missing}",)  # nobody is left that was told
    assert remarks(told, ended, later) == (f"{beginning}; {missing}",)
    left_out = "2 answers that ended in the second after that left out, to go by steps"
    assert remarks(told, ended, later, by_step=True) == (
        f"{beginning}, {under_way}; {left_out}; {missing}",
    )
    for by_step in (False, True):  # it had come to rest
        assert remarks(told, ended, later, rest, by_step=by_step) == ()
    # Nor had a run that was killed before its first progress, if it is one that tells times.
    assert remarks(line(first_token_s=0.5)) == (
        "the run was cut off before its first progress; requests that had not ended are missing",
    )
    assert remarks(line(first_token_s=0.5), rest) == ()
    assert remarks(line()) == ()


def test_of_a_recording_that_is_one_piece_as_much_is_read_as_comes_out(tmp_path: Path) -> None:
    """As when somebody has unpacked and packed it again, and a copy of that broke off."""
    lines = [line(request=i, engine={} if i == 0 else None) for i in range(9_000)]
    for ending in (".gz", ".zst"):
        path, whole = tmp_path / f"run{ending}", packed(ending, lines)
        path.write_bytes(whole[: len(whole) * 9 // 10])
        trace = read_trace(str(path))
        assert 5_000 < len(trace) < 9_000
        assert trace.remarks == (
            "the last piece of the recording was cut off: it is read as far as it goes",
        )
