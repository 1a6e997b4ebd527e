"""`pagedkv simulate run.jsonl --by-step`: a recorded run again, and what it would be elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.made_engine import MadeEngine
from pagedkv.cli import main
from pagedkv.engine.recording import Recorder
from pagedkv.scheduling.continuous import Scheduler, SchedulerStatistics
from pagedkv.scheduling.limits import SchedulerConfig

SETTINGS: dict[str, Any] = {
    "num-blocks": 22,
    "block-size": 4,
    "max-model-len": 60,
    "prefix-caching": True,
    "max-num-seqs": 6,
    "max-num-batched-tokens": 20,
    "chunked-prefill": True,
    "watermark": 0.0,
}


def record(path: Path, settings: dict[str, Any] = SETTINGS) -> SchedulerStatistics:
    """A run with shared prefixes, samples, preemptions and a cancelled request."""
    scheduler = Scheduler(
        22,
        SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=20, watermark=0.0),
        block_size=4,
        max_model_len=60,
    )
    recorder = Recorder(path, block_size=4, settings=settings)
    engine = MadeEngine(scheduler, recorder)
    for i in range(5):
        engine.add([*range(10), i], 16, num_samples=1 + i % 3, voice=i)
        engine.step()
    engine.cancel(engine.requests[-1])
    while not scheduler.is_idle:
        engine.step()
    recorder.close()
    return scheduler.statistics()


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The status, and what `--json -` prints or the line of the error."""

    def run(*arguments: str) -> tuple[int, Any]:
        capsys.readouterr()
        status = main.run(["simulate", *arguments, "--no-report", "--json", "-"])
        out, err = capsys.readouterr()
        return status, json.loads(out) if status == 0 else err

    return run


def test_a_recorded_run_is_repeated_with_nothing_given_but_its_file(
    tmp_path: Path, simulate: Callable[..., Any]
) -> None:
    had = record(tmp_path / "run.jsonl.zst")
    assert had.preemptions and had.hit_tokens
    status, result = simulate(str(tmp_path / "run.jsonl.zst"), "--by-step")
    assert status == 0
    [scheme] = result["schemes"]
    assert scheme["scheme"] == "paged"
    assert scheme["num_steps"] == had.num_steps
    assert scheme["duration_s"] == had.num_steps
    assert scheme["preemptions"] == had.preemptions
    assert scheme["recomputed_tokens"] == had.recomputed_tokens
    assert scheme["hit_tokens_first"] == had.hit_tokens
    assert scheme["running_peak"] == had.peak_running
    assert result["trace"]["num_requests"] == 5
    assert {k: result["settings"][k] for k in SETTINGS} == SETTINGS
    assert result["settings"]["by-step"] is True
    assert "gpu" not in result["settings"]
    assert result["remarks"] == [
        "what was not given here is as it was in the recorded run",
        "time is counted in steps of the recorded run: 1 s is one step",
    ]


def test_what_is_given_comes_before_what_was_recorded(
    tmp_path: Path, simulate: Callable[..., Any]
) -> None:
    had = record(tmp_path / "run.jsonl")
    status, result = simulate(str(tmp_path / "run.jsonl"), "--by-step", "--num-blocks", "200")
    assert status == 0
    assert result["schemes"][0]["preemptions"] == 0 < had.preemptions
    assert result["settings"]["num-blocks"] == 200 and result["settings"]["block-size"] == 4
    status, result = simulate(
        str(tmp_path / "run.jsonl"), "--by-step", "--memory", "1GiB", "--block-size", "8"
    )
    assert status == 0
    assert result["settings"]["num-blocks"] == 2**30 // (131_072 * 8)


def test_a_recorded_run_is_a_trace_like_any_other(
    tmp_path: Path, simulate: Callable[..., Any]
) -> None:
    record(tmp_path / "run.jsonl")
    status, result = simulate(str(tmp_path / "run.jsonl"))
    assert status == 0
    assert [s["scheme"] for s in result["schemes"]] == [
        "paged",
        "reserve-max",
        "reserve-pow2",
        "reserve-exact",
    ]
    assert result["schemes"][0]["finished"] == 7  # without the 2 that were cancelled


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--by-step"], "--by-step repeats a recorded run: give its file"),
        (["run.jsonl", "--by-step", "--gpu", "H100"], "--gpu changes nothing with --by-step"),
        (["run.jsonl", "--by-step", "--samples", "2"], "--samples changes nothing with --by-step"),
        (["run.jsonl", "--by-step", "--scheme", "reserve-max"], "leave out other schemes"),
        (["plain.jsonl", "--by-step"], "plain.jsonl: is not the recording of a run"),
        (["run.jsonl", "--samples", "2"], "leave num-samples at 1"),
        (["odd.jsonl"], "recorded with num-blocks 2.5, which it cannot be: give --num-blocks"),
        (["none.jsonl"], "--num-blocks is 0: give at least 1"),
    ],
)
def test_what_cannot_be_repeated_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    simulate: Callable[..., Any],
    arguments: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "run.jsonl")
    record(tmp_path / "odd.jsonl", {**SETTINGS, "num-blocks": 2.5})
    record(tmp_path / "none.jsonl", {**SETTINGS, "num-blocks": 0})
    (tmp_path / "plain.jsonl").write_text(
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5}\n'
    )
    status, error = simulate(*arguments)
    assert status == 2
    assert problem in error and error.startswith("pagedkv: ") and error.count("\n") == 1
