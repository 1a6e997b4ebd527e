"""`pagedkv simulate --what-if`: each choice is the simulation with those options."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pagedkv.cli import main
from pagedkv.cli.simulate_request import Given
from pagedkv.cli.what_if import NAMES, base_values, choices, parse_variations
from pagedkv.errors import InvalidInput
from pagedkv.simulate.what_if_json import KEYS

TRAFFIC = ["--requests", "60", "--rate", "30", "--num-blocks", "700", "--no-report"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def numbers(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(*arguments: str) -> dict[str, Any]:
        assert main.run(["simulate", *arguments, "--json", "-"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def given(**changes: Any) -> Given:
    values = {field.name: None for field in fields(Given)} | {
        "block_size": 16,
        "num_blocks": 100,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "prefix_caching": True,
        "chunked_prefill": True,
        "watermark": 0.01,
    }
    return Given(**{**values, **changes})


def chosen(*texts: str) -> list[tuple[int, int, int, float]]:
    return [
        (c.num_blocks, c.given.block_size, c.given.max_num_seqs, c.load)
        for c in choices(parse_variations(texts), given(), 100)
    ]


def test_every_combination_is_a_choice_in_the_order_in_which_they_are_listed() -> None:
    found = chosen("num-blocks=50,200", "block_size=8,16", "load=2x")
    assert found == [(50, 8, 64, 2.0), (50, 16, 64, 2.0), (200, 8, 64, 2.0), (200, 16, 64, 2.0)]


def test_a_factor_is_of_the_memory_and_another_block_size_leaves_it_as_large() -> None:
    assert chosen("num-blocks=0.5x,1x,2x") == [(n, 16, 64, 1.0) for n in (50, 100, 200)]
    assert chosen("block-size=8,16,32,64") == [
        (1600 // size, size, 64, 1.0) for size in (8, 16, 32, 64)
    ]
    assert chosen("num-blocks=2x", "block-size=64") == [(50, 64, 64, 1.0)]
    assert chosen("num-blocks=100", "block-size=64") == [(100, 64, 64, 1.0)]


def test_other_counts_take_numbers_and_factors() -> None:
    assert [seats for _, _, seats, _ in chosen("max-num-seqs=8,0.5x,1x,.02x")] == [8, 32, 64, 1]


def test_a_factor_is_taken_exactly() -> None:
    assert [blocks for blocks, *_ in chosen("num-blocks=0.29x,0.57x,1.13x")] == [29, 57, 113]


def test_switches_and_shares_are_set() -> None:
    variations = parse_variations(["prefix_caching=on,off", "watermark=0,0.5"])
    found = [(c.given.prefix_caching, c.given.watermark) for c in choices(variations, given(), 100)]
    assert found == [(True, 0.0), (True, 0.5), (False, 0.0), (False, 0.5)]


def test_the_values_without_any_variation_choose_what_was_given() -> None:
    variations = parse_variations([f"{name}=1x" for name in NAMES if name[-3:] in ("cks", "ize")])
    variations += parse_variations(["prefix-caching=off", "watermark=0.5", "load=3x"])
    values = base_values(variations, given(), 100)
    again = parse_variations([f"{v.name}={value}" for v, value in zip(variations, values)])
    [choice] = choices(again, given(), 100)
    assert choice.given == given() and choice.num_blocks == 100 and choice.load == 1.0


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["num-blocks"], "give NAME=VALUE,VALUE, such as num-blocks=0.5x,1x,2x"),
        (["num-blocks="], "give NAME=VALUE,VALUE"),
        (["num-blocks=1x,,2x"], "give NAME=VALUE,VALUE"),
        (["colour=red"], "'colour' cannot be varied: use one of num-blocks, block-size"),
        (["load=2x", "load=3x"], "--what-if load is given twice"),
        (["load=2x,2x"], "a value is listed twice"),
        (["load=2"], "'2' is no factor: give one such as 2x"),
        (["load=0x"], "--what-if load=0x: give a factor from 0.000001x to 1000000x"),
        (["load=1000001x"], "give a factor from 0.000001x to 1000000x"),
        ([f"load={'9' * 400}x"], "is no factor: give one such as 2x"),
        (["block-size=0"], "--what-if block-size=0: that is 0: give at least 1"),
        (["max-num-seqs=0.001x"], "that is 0: give at least 1"),
        (["num-blocks=2147483648"], "that is 2,147,483,648: give at most 2,147,483,647"),
        ([f"block-size={'9' * 5000}"], "is no count"),
        (["block-size=-8"], "'-8' is no count"),
        (["num-blocks=many"], "'many' is no count: give a number such as 64, or a factor"),
        (["num-blocks=0.001x"], "1,600 slots have no room for a block of 16 tokens"),
        (["prefix-caching=maybe"], "'maybe' is neither on nor off"),
        (["watermark=low"], "'low' is no number"),
        (
            [f"{name}={','.join(map(str, range(1, 12)))}" for name in NAMES[:3]],
            "asks for 1,331 combinations: give at most 1,000",
        ),
    ],
)
def test_what_cannot_be_varied_is_refused_by_name(texts: list[str], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        list(choices(parse_variations(texts), given(), 100))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_factor_of_the_memory_beyond_what_block_ids_count_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1x: that is 3,000,000,000 blocks of 1 tokens"):
        list(choices(parse_variations(["num-blocks=1x", "block-size=1"]), given(), 187_500_000))


def test_each_choice_is_the_simulation_with_those_options(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    found = numbers(*TRAFFIC, "--what-if", "num-blocks=0.5x,1x", "--what-if", "block-size=8,16")
    rows = found["choices"]
    assert [tuple(row["values"].values()) for row in rows] == [
        ("0.5x", "8"),
        ("0.5x", "16"),
        ("1x", "8"),
        ("1x", "16"),
    ]
    assert [row["is_base"] for row in rows] == [False, False, False, True]
    for row in rows:
        sizes = ["--num-blocks", str(row["num_blocks"]), "--block-size", str(row["block_size"])]
        alone = numbers("--scheme", "paged", *TRAFFIC[:4], "--no-report", *sizes)
        [paged] = alone["schemes"]
        assert {key: row[key] for key in paged if key in row} == {
            key: paged[key] for key in paged if key in row
        }
        assert row["waste"] == pytest.approx(1 - paged["filled_share"])
    assert rows[0]["preemptions"] != rows[2]["preemptions"]


@pytest.mark.parametrize(
    ("varied", "option"),
    [
        ("watermark=0.5", ["--watermark", "0.5"]),
        ("chunked-prefill=off", ["--no-chunked-prefill"]),
        ("prefix-caching=off", ["--no-prefix-caching"]),
        ("max-num-seqs=5", ["--max-num-seqs", "5"]),
        ("max-num-batched-tokens=900", ["--max-num-batched-tokens", "900"]),
    ],
)
def test_each_setting_is_the_option_of_its_name(
    numbers: Callable[..., dict[str, Any]], varied: str, option: list[str]
) -> None:
    traffic = [*TRAFFIC, "--max-num-batched-tokens", "300"]
    base, row = numbers(*traffic, "--what-if", varied)["choices"]
    [alone] = numbers("--scheme", "paged", *traffic, *option)["schemes"]
    metrics = row.keys() & alone.keys()
    assert {key: row[key] for key in metrics} == {key: alone[key] for key in metrics}
    assert {key: row[key] for key in metrics} != {key: base[key] for key in metrics}


def test_the_settings_name_the_one_scheme_that_is_asked_about(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    assert numbers(*TRAFFIC, "--what-if", "load=2x")["settings"]["scheme"] == "paged"


def test_a_trace_without_prefix_ids_says_so(numbers: Callable[..., dict[str, Any]]) -> None:
    trace = Path("trace.jsonl")
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 40, "output_tokens": 9}\n')
    found = numbers(str(trace), "--no-report", "--what-if", "prefix-caching=on,off")
    assert [row["hit_rate_first"] for row in found["choices"]] == [None, None]
    assert any("no prefix ids" in remark for remark in found["remarks"])


def test_settings_as_they_were_come_first_where_no_choice_is_just_these(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    found = numbers(*TRAFFIC, "--what-if", "load=2x")
    assert [row["values"] for row in found["choices"]] == [{"load": "1x"}, {"load": "2x"}]
    assert [row["is_base"] for row in found["choices"]] == [True, False]
    assert found["choices"][0]["num_blocks"] == 700


def test_choices_that_come_to_the_same_are_listed_once(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    found = numbers(*TRAFFIC, "--what-if", "num-blocks=2x,1x,1.0x,700,1400,2.00x,1.000x")
    assert [row["values"]["num-blocks"] for row in found["choices"]] == ["2x", "1x"]
    assert [row["is_base"] for row in found["choices"]] == [False, True]
    assert found["remarks"][-1] == (
        "asked for twice in other words, and listed once: num-blocks 1.0x; num-blocks 700; "
        "num-blocks 1400 and 2 more"
    )


def test_a_placement_is_no_setting_of_paged_memory(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    for arguments in (["--what-if", "load=2x"], ["--scheme", "paged"]):
        assert "placement" not in numbers(*TRAFFIC, *arguments)["settings"]
    both = numbers(*TRAFFIC, "--scheme", "paged", "--scheme", "reserve-max")
    assert both["settings"]["placement"] == "first-fit"


def test_requests_that_come_faster_wait_longer(numbers: Callable[..., dict[str, Any]]) -> None:
    slow, fast = numbers(*TRAFFIC, "--what-if", "load=1x,100x")["choices"]
    assert fast["ttft_s"]["p99"] > slow["ttft_s"]["p99"]


def test_every_key_is_documented_and_every_documented_key_is_written(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    found = numbers(*TRAFFIC, "--what-if", "num-blocks=5,1x")
    assert found["choices"][0]["refused"]  # with so few that requests are refused

    def paths(value: Any, path: str) -> set[str]:
        if isinstance(value, dict) and path not in ("settings", "choices[].values"):
            inner = [paths(item, f"{path}.{key}" if path else key) for key, item in value.items()]
            return set().union(*inner)
        if isinstance(value, dict):
            return {f"{path}.*"}
        if isinstance(value, list):
            return set().union(*[paths(item, f"{path}[]") for item in value])
        return {path}

    written = paths(found, "")
    assert written | {"remarks[]"} == set(KEYS)


def test_a_recorded_run_at_its_own_settings_is_the_base(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    keys = [f"{i:032x}" for i in range(8)]
    line = {
        "prompt_tokens": 60,
        "output_tokens": 4,
        "prefix_granularity": 8,
        "covers_output": True,
        "prefix_ids": keys,
    }
    settings = {"num-blocks": 9, "block-size": 8, "max-num-seqs": 3}
    lines = [
        line | {"arrival_s": float(i), "arrival_step": i, "request": i, "sample": 0}
        for i in range(4)
    ]
    lines[0] |= {"engine": settings}
    Path("run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for by_step in ((), ("--by-step",)):
        found = numbers("run.jsonl", *by_step, "--no-report", "--what-if", "num_blocks=1x,4x")
        alone = numbers("run.jsonl", *by_step, "--no-report", "--scheme", "paged")
        base, more = found["choices"]
        assert base["is_base"] and base["num_blocks"] == 9 and base["block_size"] == 8
        assert base["preemptions"] == alone["schemes"][0]["preemptions"]
        assert base["ttft_s"] == alone["schemes"][0]["ttft_s"]
        assert more["num_blocks"] == 36
        assert (more["running_peak"] > base["running_peak"]) == bool(by_step)
        named = [text for text in found["remarks"] if "A100" in text and "llama" in text]
        assert bool(named) != bool(by_step)  # the recording does not say what it ran on


def test_steps_are_told_in_steps(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"prompt_tokens": 60, "output_tokens": 4, "arrival_s": 0.0, "arrival_step": 0}
    line |= {"prefix_granularity": 8, "covers_output": True, "request": 0, "sample": 0}
    line |= {"prefix_ids": [f"{i:032x}" for i in range(8)]}
    line |= {"engine": {"num-blocks": 9, "block-size": 8, "max-num-seqs": 3}}
    Path("run.jsonl").write_text(json.dumps(line) + "\n")
    command = ["simulate", "run.jsonl", "--by-step", "--no-report", "--what-if", "num_blocks=1x,4x"]
    assert main.run(command) == 0
    out = capsys.readouterr().out
    assert "(steps)" in out and "(s)" not in out and "As it was" in out and " ms" not in out


def measured_run(path: str, *, num_steps: int = 60, **changes: Any) -> None:
    """A recording of requests that come alone; a step takes 0.5 s, and 0.01 s a prompt token."""
    line = {"prompt_tokens": 50, "output_tokens": 2, "sample": 0}
    line |= {"prefix_granularity": 8, "covers_output": True}
    lines: list[dict[str, Any]] = [
        line
        | {"arrival_s": 9.0 * i, "arrival_step": 2 * i, "request": i, "first_token_s": 9.0 * i + 1}
        | {"prefix_ids": [f"{10 * i + j:032x}" for j in range(7)]}
        for i in range(4)
    ]
    lines[0] |= {"engine": {"num-blocks": 64, "block-size": 8, "max-num-seqs": 4}}
    prefill = [50 if i % 3 == 0 else 0 for i in range(num_steps)]
    decode = [0 if i % 3 == 0 else i % 3 for i in range(num_steps)]
    took_us = [500_000 + 10_000 * new for new in prefill]
    context = [i % 7 for i in range(num_steps)]
    names = ("took_us", "prefill_tokens", "decode_tokens", "context_tokens", "pairs")
    numbers = (took_us, prefill, decode, context, [0] * num_steps)
    lines.append({"step": 8, "s": 30.0, "under_way": [], "steps": dict(zip(names, numbers))})
    lines[-1] |= changes
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_recorded_run_is_timed_by_its_own_steps(
    numbers: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    measured_run("run.jsonl")
    line = (
        "steps timed by this recording: 500 ms + 10.0 ms a prompt token; half of the 60 steps "
        "within 0 %, all together as measured; seen with up to 50 prompt and 2 answer tokens a step"
    )
    found = numbers("run.jsonl", "--no-report", "--what-if", "num-blocks=1x,2x")
    base = found["choices"][0]
    assert base["is_base"] and base["ttft_s"]["p50"] == pytest.approx(1.0)
    assert base["tpot_s"]["p50"] == pytest.approx(0.5)
    assert found["remarks"][0] == line
    assert found["measured"] == {"ttft_s": {"p50": 1.0, "p90": 1.0, "p99": 1.0}}
    said = [str(text) for text in (*found["remarks"], *found["settings"].values())]
    assert not any("A100" in text or "llama" in text for text in said)
    assert found["settings"]["time of a step"] == (
        "fitted to this recording: 500 ms + 10.0 ms a prompt token"
    )
    alone = numbers("run.jsonl", "--no-report")
    assert alone["schemes"][0]["ttft_s"]["p50"] == pytest.approx(1.0)
    assert alone["remarks"][:2] == [
        "measured in the recorded run: first tokens after 1.00 s (p50) and 1.00 s (p99); simulated "
        "on paged memory: first tokens after 1.00 s (p50) and 1.00 s (p99)",
        line,
    ]
    assert alone["measured"] == found["measured"]

    assert main.run(["simulate", "run.jsonl", "--no-report", "--what-if", "num-blocks=1x,2x"]) == 0
    out = capsys.readouterr().out
    assert "\nMeasured in that run: first tokens after 1.00 s (p50) and 1.00 s (p99).\n" in out
    [row] = [text.split() for text in out.splitlines() if text.startswith("= ") and "." in text]
    assert row == ["=", "1.00", "1.00"] and "\n= measured in that run\n" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpu", "H100"], "roofline of H100 with llama-3-8b"),
        (["--num-gpus", "2"], "roofline of 2 x A100-40GB with llama-3-8b"),
        (["--model", "opt-13b"], "roofline of A100-40GB with opt-13b"),
        (["--prefill-rate", "100", "--step-time", "2s"], "measured: 100 prompt tokens/s, 2 s a s"),
    ],
)
def test_rates_or_a_machine_that_are_named_come_before_those_of_the_recording(
    numbers: Callable[..., dict[str, Any]], arguments: list[str], named: str
) -> None:
    measured_run("run.jsonl")
    for what_if in ([], ["--what-if", "num-blocks=1x,2x"]):
        found = numbers("run.jsonl", "--no-report", *arguments, *what_if)
        assert found["settings"]["time of a step"].startswith(named)
        assert not any("timed by this recording" in text for text in found["remarks"])
        assert found["measured"]["ttft_s"]["p50"] == 1.0  # to be held against these, too


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--num-blocks", "50"], ["--block-size", "4"], ["--requests", "3"], ["--memory", "1GiB"]),
        *(["--duration", "20s"], ["--max-num-seqs", "3"], ["--samples", "2"], ["--by-step"]),
    ],
)
def test_nothing_is_measured_of_a_run_that_is_simulated_in_another_way(
    numbers: Callable[..., dict[str, Any]], arguments: list[str]
) -> None:
    measured_run("run.jsonl")
    found = numbers("run.jsonl", "--no-report", *arguments, "--what-if", "num-blocks=1x,2x")
    assert found["measured"] == {"ttft_s": {"p50": None, "p90": None, "p99": None}}
    alone = numbers("run.jsonl", "--no-report", *arguments)
    assert not any("measured in the recorded run" in text for text in alone["remarks"])
    timed = any("timed by this recording" in text for text in alone["remarks"])
    assert timed == ("--by-step" not in arguments)


def test_too_few_steps_time_nothing_and_say_so(numbers: Callable[..., dict[str, Any]]) -> None:
    measured_run("run.jsonl", num_steps=12)
    why = (
        "steps are not timed by this recording: 12 steps were recorded, and it takes 50 to tell "
        "what one costs"
    )
    for what_if in ([], ["--what-if", "num-blocks=1x,2x"]):
        found = numbers("run.jsonl", "--no-report", *what_if)
        assert found["remarks"].count(why) == 1
        assert found["settings"]["time of a step"].startswith("roofline of A100-40GB")
    assert any(text.startswith("times are simulated for A100") for text in found["remarks"])


def test_steps_that_cannot_be_are_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    measured_run("run.jsonl", steps={"took_us": [1e300]})
    assert main.run(["simulate", "run.jsonl", "--no-report"]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and "line 5, field 'steps': took_us has 1e+300" in told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "reserve-max"], "--what-if asks about paged memory"),
        (["--placement", "buddy"], "--placement changes nothing on paged memory"),
        (["--preset", "pagedattention-paper"], "leave out --requests, --what-if"),
        (
            ["--what-if", "watermark=1"],
            "--what-if load=2x --what-if watermark=1: watermark is 1: give from 0 to below 1",
        ),
        (["--what-if", "max-num-seqs=9000"], "--what-if max-num-seqs=9000: --max-num-batched-tok"),
        (["--num-blocks", "2"], "no request was served"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status = main.run(["simulate", "--requests", "9", "--what-if", "load=2x", *arguments])
    assert status == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""
    assert list(Path().iterdir()) == []


def test_the_table_fits_80_columns_and_marks_how_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    varied = ["--what-if", "num-blocks=0.5x,1x,2x", "--what-if", "block-size=8,16"]
    assert main.run(["simulate", *TRAFFIC, *varied, "--what-if", "load=1x,2x"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in out
    [base] = [line for line in lines if line.startswith("*") and "settings" not in line]
    assert base.split()[1:5] == ["1x", "16", "1x", "700"]
    assert "Simulated at its own settings (num-blocks 1x, block-size 16, load 1x): " in " ".join(
        out.split()
    )


def test_long_values_are_broken_and_numbers_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    number = "0.0123456789012345678901234567"
    varied = [
        *("--what-if", f"watermark={number},0.25", "--what-if", "max-num-batched-tokens=1x,16384"),
        *("--what-if", f"load=1.{'0' * 17}x,2x", "--what-if", "prefix-caching=on,off"),
    ]
    assert main.run(["simulate", *TRAFFIC, *varied]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    assert number[:10] in out and number[-5:] in out and "63.8" in out
    assert "Not shown, for the width: waste (%), TTFT p50 (s), output (tok/s)" in out
    # Where there is room for all there is nothing to say.
    assert main.run(["simulate", *TRAFFIC, "--what-if", "load=1x,2x"]) == 0
    assert "Not shown" not in capsys.readouterr().out


def test_the_report_and_the_json_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TRAFFIC[:-1], "--what-if", "block-size=8,16"]
    assert main.run(["simulate", *arguments, "--json", "a.json", "--report", "a.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Wrote a.json",
        "Wrote a.html: open it in a browser",
    ]
    assert "What if" in Path("a.html").read_text(encoding="utf-8")
    assert json.loads(Path("a.json").read_text())["format"] == "pagedkv-what-if"


def test_the_example_on_the_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "what-if.md").read_text(encoding="utf-8")
    example = page.partition("## An example")[2]
    command = re.search(r"^```sh\npagedkv (.*?)```", example, re.S | re.M)
    printed = re.search(r"^```text\n(.*?)```", example, re.S | re.M)
    assert command is not None and printed is not None
    assert main.run(shlex.split(command[1])) == 0
    out = capsys.readouterr().out
    assert [line.rstrip() for line in out.splitlines()] == printed[1].splitlines()
