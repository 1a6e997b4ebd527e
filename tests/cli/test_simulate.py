"""`pagedkv simulate`, from the command line to what it prints and writes."""

from __future__ import annotations

import gzip
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zstandard

from pagedkv import __version__
from pagedkv.cli import main
from pagedkv.cli import simulate_request as asked
from pagedkv.simulate import paper, report, simulator
from pagedkv.simulate import trace_formats as formats
from pagedkv.simulate.built_in_models import BUILT_IN_CONFIGS
from pagedkv.simulate.gpus import GPUS
from pagedkv.simulate.metrics import METRICS
from pagedkv.simulate.model_geometry import model_geometry
from pagedkv.simulate.simulator import SCHEMES
from pagedkv.simulate.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

SMALL = ["--requests", "20", "--no-report"]

MOONCAKE = "".join(
    json.dumps(
        {
            "timestamp": 1000 * i,
            "input_length": 700 + i,
            "output_length": 5 + i % 3,
            "hash_ids": [i % 2, 10 + i],
        }
    )
    + "\n"
    for i in range(12)
)


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `pagedkv simulate` with arguments, in this process."""

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        status = main.run(["simulate", *arguments])
        out, err = capsys.readouterr()
        # Which test is the first to compile depends on the order.
        return Outcome(status, out, re.sub(r"pagedkv: compiling .*\n", "", err))

    return run


@pytest.fixture
def numbers(simulate: Callable[..., Outcome]) -> Callable[..., dict[str, Any]]:
    """Run `pagedkv simulate` with arguments, and return what `--json -` prints."""

    def run(*arguments: str) -> dict[str, Any]:
        outcome = simulate(*arguments, "--json", "-", "--no-report")
        assert outcome.status == 0, outcome.err
        found: dict[str, Any] = json.loads(outcome.out)
        return found

    return run


def as_process(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the real command in a process of its own, at 80 columns."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "pagedkv", "simulate", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        **options,
    )


def files() -> list[str]:
    return sorted(os.listdir("."))


def assert_refused(outcome: Outcome, *fragments: str) -> None:
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("pagedkv: ")
    assert outcome.err.count("\n") == 1 and outcome.err.endswith("\n")
    for fragment in fragments:
        assert fragment in outcome.err


# Bad input: one line, exit status 2, and nothing written.

MOONCAKE_LINE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (b"", ["trace: is empty"]),
        (b"\n \n", ["trace: is empty"]),
        (b"a,b\n1,2\n", ["trace, line 1", "is not a trace"]),
        (b"\x00\x01\x02", ["trace: is not a trace"]),
        (b"[1, 2]\n", ["trace, line 1"]),
        (MOONCAKE_LINE.encode() + b"{oh\n", ["trace, line 2", "is not JSON"]),
        (
            MOONCAKE_LINE.encode() + b'{"timestamp',
            ["trace, line 2: is not JSON: Unterminated string starting at column 2"],
        ),
        (
            MOONCAKE_LINE.replace("600", "-600").encode(),
            ["trace, line 1", "field 'input_length'"],
        ),
        (
            MOONCAKE_LINE.encode() + b'{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}\n',
            ["trace, line 2", "field 'output_length'"],
        ),
        (
            MOONCAKE_LINE.replace("[1, 2]", "[1]").encode(),
            ["trace, line 1", "field 'hash_ids'", "has 1 ids, 600 tokens need 2"],
        ),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,480x,8\n",
            ["trace, line 2", "field 'ContextTokens'"],
        ),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", ["trace: has a header and no requests"]),
        (
            b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            b"5,ChatGPT,472,0,472,Conversation log\n",
            ["trace: no usable request"],
        ),
        (gzip.compress(MOONCAKE.encode())[:-12], ["trace: the gzip data is cut off"]),
    ],
)
def test_a_bad_trace_is_refused_with_its_place(
    content: bytes, fragments: list[str], simulate: Callable[..., Outcome]
) -> None:
    Path("trace").write_bytes(content)
    assert_refused(simulate("trace", "--json", "all.json"), *fragments)
    assert files() == ["trace"]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ("missing.jsonl", "missing.jsonl: no such file"),
        (".", ".: is a folder, not a trace file"),
        ("--workload poetry", "unknown workload 'poetry': choose from chat, "),
        ("--model llama-9", "unknown model 'llama-9': did you mean"),
        ("--model .", "model .: the folder has no config.json"),
        ("--model ''", "the model is empty: name one"),
        ("--model /nonexistent/config.json", "model /nonexistent/config.json: no such file\n"),
        ("--model ./nonexistent", "model ./nonexistent: no such file\n"),
        ("--model nonexistent.json", "model nonexistent.json: no such file\n"),
        ("''", "TRACE is empty: give a file, - for standard input"),
        ("--memory 24", "--memory 24 (24 bytes, without a unit) has no room for one block of 16"),
        ("--memory 24", "for GiB write --memory 24GiB"),
        ("--num-gpus 1000000000", "give fewer --num-gpus or a larger --block-size"),
        ("--requests 1e3", "invalid value for '--requests': '1e3' is no whole number: see"),
        ("--gpu H900", "unknown GPU 'H900': did you mean"),
        ("--memory '24 GiBs'", "--memory: '24 GiBs' has an unknown unit 'GiBs'"),
        ("--memory 1e400GiB", "--memory: '1e400GiB' is too large"),
        ("--memory 2MiB --model llama-3-8b --block-size 32", "no room for one block of 32 tokens"),
        ("--memory 9e12TiB", "2,147,483,647 is the most"),
        ("--model llama-3-70b", "give another --gpu, more --num-gpus, or --memory"),
        ("--num-blocks 0", "--num-blocks is 0: give at least 1"),
        ("--num-blocks 2147483648", "--num-blocks is 2147483648: give at most 2,147,483,647"),
        ("--block-size 0", "--block-size is 0: give at least 1"),
        ("--block-size -16", "--block-size is -16"),
        ("--block-size x", "invalid value for '--block-size'"),
        ("--requests 0", "--requests is 0"),
        ("--samples 0", "--samples is 0"),
        ("--samples 3 --max-num-seqs 2", "3 samples of a prompt run at once"),
        ("--num-gpus 0", "--num-gpus is 0"),
        ("--max-model-len 0", "--max-model-len is 0"),
        ("--max-num-seqs 0", "--max-num-seqs is 0"),
        (
            "--max-num-batched-tokens 100",
            "--max-num-batched-tokens is 100: give at least --max-num-s",
        ),
        ("--watermark 1", "--watermark is 1: give from 0 to below 1"),
        ("--watermark nan", "--watermark is nan"),
        ("--rate 0", "--rate is 0: give 1e-06 to 1e+09 requests a second"),
        ("--rate 1e9 --requests 5", "a rate of 1e+09 requests a second: the 900 s of conv"),
        ("--rate 1e300 --requests 5", "--rate is 1e+300: give"),
        ("--rate 1e-320", "--rate is 9.99989e-321: give"),
        ("--rate inf", "--rate is inf: give"),
        ("--seed -1", "--seed is -1: give 0 or more"),
        ("--duration soon", "--duration: 'soon' is no number with a unit"),
        ("--duration 5m", "--duration: '5m' has an unknown unit 'm'"),
        ("--duration 0s", "--duration: '0s' is not above 0"),
        ("--step-time 20ms", "belong together: add --prefill-rate"),
        ("--prefill-rate 9000", "belong together: add --step-time"),
        ("--prefill-rate -1 --step-time 20ms", "--prefill-rate is -1: give"),
        ("--prefill-rate 1e-300 --step-time 1ms", "--prefill-rate is 1e-300: give"),
        ("--prefill-rate 9000 --step-time 0", "--step-time: '0' is not above 0"),
        ("--prefill-rate 9000 --step-time 1e300", "--step-time 1e300: give"),
        ("--scheme reserve-half", "invalid value for '--scheme'"),
        ("--placement worst-fit", "invalid value for '--placement'"),
        ("--arrivals never", "invalid value for '--arrivals'"),
        ("--kv-dtype int3", "invalid value for '--kv-dtype'"),
        ("--preset gpt", "invalid value for '--preset'"),
        ("--page-size 16", "no such option: --page-size"),
        ("--requests 3 --num-blocks 1", "chat: no request was served: request 1 ("),
        ("--requests 3 --max-model-len 9", "chat: no request was served: request 1 ("),
        ("--requests 3 --duration 1us", "chat: no request was served: the time given was over"),
    ],
)
def test_a_bad_option_is_refused_by_name(
    arguments: str, fragment: str, simulate: Callable[..., Outcome]
) -> None:
    assert_refused(simulate(*shlex.split(arguments), "--json", "all.json"), fragment)
    assert files() == []


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ("--memory 1GiB --num-blocks 5", "--memory and --num-blocks both size the memory"),
        ("trace --workload chat", "--workload belongs to a built-in workload"),
        ("trace --rate 4", "--rate belongs to a built-in workload"),
        ("trace --seed 0", "--seed belongs to a built-in workload"),
        ("trace --arrivals poisson", "--arrivals belongs to a built-in workload"),
        ("--report a.html --no-report", "--report and --no-report: give one"),
        ("--report same --json same", "--report and --json are both same"),
        ("--report ./same --json same", "give two names"),
        (
            "--num-blocks 9 --prefill-rate 9000 --step-time 1ms --gpu H100",
            "--gpu changes nothing where memory and step time are given",
        ),
        (
            "--memory 1GiB --prefill-rate 9000 --step-time 1ms --num-gpus 1",
            "--num-gpus changes nothing",
        ),
        (
            "trace --preset pagedattention-paper --block-size 16",
            "fixes everything but --seed and the output: leave out TRACE, --block-size",
        ),
        (
            "--preset pagedattention-paper --no-prefix-caching",
            "leave out --no-prefix-caching",
        ),
        (
            "--scheme paged --placement buddy",
            "--placement changes nothing on paged memory: leave it out",
        ),
        (
            "--scheme reserve-max --no-prefix-caching",
            "--no-prefix-caching changes nothing without paged memory: leave it out",
        ),
        (
            "--scheme reserve-max --scheme reserve-pow2 --watermark 0.5",
            "--watermark changes nothing without paged memory",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused_and_not_ignored(
    arguments: str, fragment: str, simulate: Callable[..., Outcome]
) -> None:
    Path("trace").write_text(MOONCAKE)
    assert_refused(simulate(*shlex.split(arguments)), fragment)
    assert files() == ["trace"]


def test_a_gpu_still_counts_where_only_one_of_memory_and_step_time_is_given(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    few = ["--requests", "3", "--scheme", "paged", "--gpu", "H100"]
    measured = numbers(*few, "--prefill-rate", "9000", "--step-time", "20ms")
    assert measured["settings"]["gpu"] == "H100"
    assert measured["settings"]["step-time"] == "20ms"
    assert "80 GiB" not in measured["settings"]["memory"]
    assert measured["memory"]["num_blocks"] > 20_000  # those of an H100, not of an A100-40GB
    given = numbers(*few, "--memory", "4GiB")
    assert given["settings"]["time of a step"] == "roofline of H100 with llama-3-8b"
    assert given["memory"]["num_blocks"] == 2048


@pytest.mark.parametrize("option", ["--report", "--json"])
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("folder", "folder: it is a directory, name a file in it"),
        ("nowhere/file", "nowhere/file: cannot be written: No such file or directory"),
        ("trace/file", "trace/file: cannot be written: Not a directory"),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_before_anything_is_read(
    option: str,
    path: str,
    problem: str,
    simulate: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("folder").mkdir()
    Path("trace").write_text(MOONCAKE)

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("read the trace first")

    monkeypatch.setattr(formats, "read_trace", too_late)
    monkeypatch.setattr(simulator, "simulate_scheme", too_late)
    assert_refused(simulate("trace", option, path), f"{option} {path}: ", problem)
    assert files() == ["folder", "trace"]
    assert os.listdir("folder") == []


@pytest.mark.parametrize("option", ["--report", "--json"])
def test_an_empty_name_of_a_file_is_called_empty(
    option: str, simulate: Callable[..., Outcome]
) -> None:
    assert_refused(simulate(option, ""), f"pagedkv: {option} is empty: name a file\n")


@pytest.mark.parametrize("option", ["--report", "--json"])
@pytest.mark.parametrize("way", ["same", "dotted", "link", "linked", "hard", "model", "folder"])
def test_no_output_is_written_over_an_input(
    option: str, way: str, simulate: Callable[..., Outcome]
) -> None:
    Path("trace").write_text(MOONCAKE)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("link").symlink_to("trace")
    os.link("trace", "hard")
    read, written = {
        "same": ("trace", "trace"),
        "dotted": ("trace", "model/../trace"),
        "link": ("link", "trace"),
        "linked": ("trace", "link"),
        "hard": ("trace", "hard"),
        "model": ("--model model/config.json", "model/config.json"),
        "folder": ("--model model", "model/config.json"),
    }[way]
    called = "--model" if "model" in read else "TRACE"
    outcome = simulate(*read.split(), option, written)
    assert_refused(outcome, f"{option} {written}: it is {called}, and read: choose another path")
    assert Path("trace").read_text() == MOONCAKE
    assert Path("model/config.json").read_text() == "{}"
    assert files() == ["hard", "link", "model", "trace"]


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (["--json", "trace"], b"--json trace"),
        (["--json", "-"], b"--json -"),
        ([], b"standard output"),
    ],
)
def test_what_standard_input_comes_from_is_an_input_too(output: list[str], named: bytes) -> None:
    Path("trace").write_text(MOONCAKE)
    with open("trace", "rb") as read, open("trace", "ab") as written:
        process = as_process(
            "-", "--no-report", *output, stdin=read, stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL if output[1:] == ["trace"] else written,
        )  # fmt: skip
        _, err = process.communicate()
    assert process.returncode == 2
    assert err == (
        b"pagedkv: " + named + b": it is what TRACE comes from, and read: choose another path\n"
    )
    assert Path("trace").read_text() == MOONCAKE


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be bound by permissions, which root is not, in a folder of one's own."""
    with tempfile.TemporaryDirectory() as folder:  # whose way is open, unlike that of tmp_path
        monkeypatch.chdir(folder)
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        yield
        if is_root:
            os.seteuid(0)
        monkeypatch.undo()


@pytest.mark.parametrize("option", ["--report", "--json"])
def test_a_protected_file_is_refused_before_anything_is_simulated(
    option: str, simulate: Callable[..., Outcome], unprivileged: None
) -> None:
    Path("protected").write_text("mine")
    Path("protected").chmod(0o444)
    outcome = simulate("--requests", "5", option, "protected")
    assert_refused(outcome, f"{option} protected: cannot be written: Permission denied")
    assert Path("protected").read_text() == "mine"
    assert Path("protected").stat().st_mode & 0o777 == 0o444
    assert files() == ["protected"]


def test_a_report_does_not_go_to_standard_output(simulate: Callable[..., Outcome]) -> None:
    assert_refused(simulate("--report", "-"), "--report -: a report is a page for a browser")
    assert files() == []


def test_more_than_the_machine_has_is_refused(
    simulate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(simulator, "simulate_scheme", exhausted)
    assert_refused(simulate("--num-blocks", "2000000000"), "2,000,000,000 blocks", "simulate fewer")


def test_a_request_that_fits_nowhere_is_named_and_the_others_go_on(
    simulate: Callable[..., Outcome], numbers: Callable[..., dict[str, Any]]
) -> None:
    lines = [
        {"arrival_s": i, "prompt_tokens": tokens, "output_tokens": 3}
        for i, tokens in enumerate((20, 4000, 30))
    ]
    Path("trace").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["trace", "--num-blocks", "50", "--scheme", "paged", "--no-report"]
    outcome = simulate(*arguments)
    assert outcome.status == 0
    assert "paged refused 1:\n  request 2 (4,003 tokens, at 1.0 s) needs 251 blocks" in outcome.out
    (scheme,) = numbers(*arguments[:-1])["schemes"]
    assert scheme["finished"] == 2
    assert len(scheme["refused"]) == 1


def test_times_that_go_backwards_are_sorted_and_said(simulate: Callable[..., Outcome]) -> None:
    lines = MOONCAKE.splitlines()
    Path("trace").write_text("\n".join([lines[3], *lines[:3], *lines[4:]]))
    outcome = simulate("trace", "--scheme", "paged", "--no-report")
    assert outcome.status == 0
    assert "times go backwards" in outcome.out
    assert "sorted by arrival" in " ".join(outcome.out.split())


# Traces: files, compressed files, standard input.


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda content: content,
        gzip.compress,
        lambda content: zstandard.ZstdCompressor().compress(content),
    ],
    ids=["plain", "gzip", "zstd"],
)
def test_standard_input_and_compressed_files_give_the_same_numbers(
    wrapped: Callable[[bytes], bytes],
    numbers: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("trace").write_text(MOONCAKE)
    content = wrapped(MOONCAKE.encode())
    Path("wrapped").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    plain, file, piped = (
        numbers(name, "--num-blocks", "100") for name in ("trace", "wrapped", "-")
    )
    assert plain["trace"]["format"] == "mooncake"
    assert plain["trace"]["num_requests"] == 12
    for other in (file, piped):
        assert other["schemes"] == plain["schemes"]
        assert other["curve"] == plain["curve"]
    assert any("standard input" in remark for remark in piped["remarks"])
    assert not any("standard input" in remark for remark in plain["remarks"])


def test_requests_takes_the_first_of_a_trace(numbers: Callable[..., dict[str, Any]]) -> None:
    Path("trace").write_text(MOONCAKE)
    found = numbers("trace", "--requests", "5", "--num-blocks", "100")
    assert found["trace"]["num_requests"] == 5
    assert found["settings"]["requests"] == 5
    assert numbers("trace", "--num-blocks", "100")["settings"]["requests"] == "all"


def test_a_trace_without_prefix_ids_says_so_and_gives_no_hit_rate(
    simulate: Callable[..., Outcome], numbers: Callable[..., dict[str, Any]]
) -> None:
    found = numbers("--workload", "alpaca", "--requests", "20")
    assert found["curve"] is None
    assert {scheme["hit_rate_first"] for scheme in found["schemes"]} == {None}
    assert "no prefix ids" in simulate("--workload", "alpaca", *SMALL).out


# What each option does.


def paged(found: dict[str, Any]) -> dict[str, Any]:
    scheme: dict[str, Any] = next(s for s in found["schemes"] if s["scheme"] == "paged")
    return scheme


def test_without_options_everything_is_the_default_that_help_names(
    numbers: Callable[..., dict[str, Any]], help_text: str
) -> None:
    told = defaults_in(help_text)
    found = numbers()
    settings = found["settings"]
    plain = (
        *("workload", "arrivals", "seed", "duration", "samples", "block-size", "model"),
        *("placement", "max-num-seqs", "max-num-batched-tokens", "watermark", "gpu", "num-gpus"),
    )
    assert {name: told[name] for name in plain} == {name: str(settings[name]) for name in plain}
    for switch in ("prefix-caching", "chunked-prefill"):
        assert told[switch] == ("" if settings[switch] else "no-") + switch
    assert told["requests"] == f"{settings['requests']} of a workload, all of a trace"
    assert told["rate"] == f"the workload's own, {settings['rate']:g} for {settings['workload']}"
    share, gpu = settings["memory"].split(" less ")[0].split(" of ")
    assert told["memory"] == f"what the model's weights leave of {share} of the GPU's memory"
    assert gpu == told["gpu"]
    assert (told["scheme"], settings["scheme"]) == ("all", ", ".join(SCHEMES))
    assert told["kv-dtype"] == "auto"
    assert numbers("--kv-dtype", "auto")["settings"] == settings
    assert told["max-model-len"].startswith("the model's, ")
    assert settings["max-model-len"] == model_geometry(told["model"]).max_model_len
    outside = {"report", "color"}  # what comes out, and no setting of the run
    assert set(told) - outside == set(settings) - {"version", "num-blocks", "time of a step"}


def test_several_answers_to_a_prompt_are_counted_as_answers_and_the_prompt_once(
    simulate: Callable[..., Outcome], numbers: Callable[..., dict[str, Any]]
) -> None:
    few = ["--workload", "alpaca", "--requests", "30", "--scheme", "paged"]
    one, three = numbers(*few), numbers(*few, "--samples", "3")
    tokens = one["trace"]["output_tokens"]
    assert (one["trace"]["num_requests"], one["trace"]["num_answers"]) == (30, 30)
    assert (three["trace"]["num_requests"], three["trace"]["num_answers"]) == (30, 90)
    assert three["trace"]["output_tokens"] == 3 * tokens
    assert three["trace"]["prompt_tokens"] == one["trace"]["prompt_tokens"]
    assert paged(three)["finished"] == paged(three)["began"] == 90
    made = paged(three)["output_tokens_per_s"] * paged(three)["duration_s"]
    assert made == pytest.approx(3 * tokens)
    first_line = " ".join(simulate(*few, "--samples", "3", "--no-report").out.split())
    assert f"30 requests, 90 answers, {three['trace']['prompt_tokens']:,} prompt" in first_line
    assert f"{3 * tokens:,} output tokens" in first_line


def test_schemes_are_those_chosen_in_their_usual_order(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    found = numbers("--requests", "20", "--scheme", "reserve-exact", "--scheme", "paged")
    assert [scheme["scheme"] for scheme in found["schemes"]] == ["paged", "reserve-exact"]
    assert found["settings"]["scheme"] == "paged, reserve-exact"


@pytest.mark.parametrize("placement", ["first-fit", "best-fit", "buddy"])
def test_placement_is_that_of_the_contiguous_schemes(
    placement: str, numbers: Callable[..., dict[str, Any]]
) -> None:
    found = numbers("--requests", "20", "--placement", placement)
    assert [scheme["placement"] for scheme in found["schemes"]] == [None] + 3 * [placement]


def test_arrivals_rate_and_seed_shape_a_workload(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    few = ["--workload", "alpaca", "--requests", "200", "--scheme", "paged"]
    usual = numbers(*few)
    bursty = numbers(*few, "--arrivals", "bursty")
    assert bursty["settings"]["arrivals"] == "bursty"
    assert paged(bursty)["running_peak"] > paged(usual)["running_peak"]
    slow = numbers(*few, "--rate", "1")
    assert slow["settings"]["rate"] == 1.0
    assert paged(slow)["duration_s"] > 10 * paged(usual)["duration_s"]
    other = numbers(*few, "--seed", "1")
    assert other["settings"]["seed"] == 1
    assert other["trace"]["prompt_tokens"] != usual["trace"]["prompt_tokens"]


def test_duration_ends_a_run_and_fills_it_with_a_workload(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    found = numbers("--workload", "alpaca", "--duration", "2min", "--scheme", "paged")
    assert 3000 < found["trace"]["num_requests"] < 4200  # 30 a second
    assert 118 < paged(found)["duration_s"] < 121
    assert found["settings"]["duration"] == "2min"
    assert found["settings"]["requests"] == "as many as come within --duration"
    cut = numbers("--requests", "400", "--duration", "10s", "--scheme", "paged")
    assert cut["trace"]["num_requests"] == 400
    assert 9.9 < paged(cut)["duration_s"] < 11


def test_samples_share_the_prompt(numbers: Callable[..., dict[str, Any]]) -> None:
    few = ["--workload", "alpaca", "--requests", "50", "--scheme", "paged", "--rate", "5"]
    one, four = numbers(*few), numbers(*few, "--samples", "4")
    assert paged(one)["saved_by_sharing"] == 0
    assert paged(four)["saved_by_sharing"] > 0.02
    assert paged(four)["finished"] == 4 * paged(one)["finished"]


def test_prefix_caching_can_be_turned_off(numbers: Callable[..., dict[str, Any]]) -> None:
    few = ["--requests", "100", "--scheme", "paged"]
    assert paged(numbers(*few))["hit_rate_first"] > 0.2
    off = numbers(*few, "--no-prefix-caching")
    assert paged(off)["hit_rate_first"] is None
    assert off["settings"]["prefix-caching"] is False
    assert off["curve"] is not None  # what a cache would do is still known


def test_memory_comes_from_the_model_and_the_kv_dtype(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    few = ["--workload", "alpaca", "--requests", "20", "--scheme", "paged", "--memory", "1GiB"]
    opt = numbers(*few, "--model", "opt-13b")["memory"]
    assert opt == {
        "num_blocks": 81,
        "block_size": 16,
        "bytes_per_token": 800 * 1024,
        "capacity_bytes": 81 * 16 * 800 * 1024,
    }
    assert numbers(*few, "--model", "opt-13b", "--block-size", "8")["memory"]["num_blocks"] == 163
    fp8 = numbers(*few, "--model", "opt-13b", "--kv-dtype", "fp8")
    assert fp8["memory"]["num_blocks"] == 163
    assert fp8["settings"]["kv-dtype"] == "fp8"
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
    }
    Path("config.json").write_text(json.dumps(config))
    own = numbers(*few, "--model", "config.json")
    assert own["memory"]["bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert own["settings"]["model"] == "config.json"


def test_the_memory_left_by_the_weights_grows_with_the_gpus(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    few = ["--requests", "3", "--scheme", "paged", "--gpu", "A100-80GB"]
    one, two = (numbers(*few, "--num-gpus", n)["memory"]["capacity_bytes"] for n in "12")
    block_bytes = 16 * 128 * 1024
    assert abs(two - one - 0.9 * 80 * 2**30) < block_bytes  # the weights are there once


def test_bytes_are_known_for_blocks_only_where_a_model_is_named(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    few = ["--requests", "5", "--scheme", "paged", "--num-blocks", "600"]
    without, named = numbers(*few), numbers(*few, "--model", "llama-3-8b")
    assert without["memory"]["bytes_per_token"] is None
    assert named["memory"]["capacity_bytes"] == 600 * 16 * 128 * 1024
    assert without["settings"]["memory"] == "from --num-blocks"
    assert without["settings"]["num-blocks"] == 600


def test_the_scheduler_keeps_its_limits(numbers: Callable[..., dict[str, Any]]) -> None:
    few = ["--requests", "60", "--scheme", "paged", "--rate", "50"]
    usual, narrow = numbers(*few), numbers(*few, "--max-num-seqs", "3")
    assert paged(narrow)["running_peak"] == 3 < paged(usual)["running_peak"]
    slow = numbers(*few, "--max-num-seqs", "64", "--max-num-batched-tokens", "64")
    assert paged(slow)["num_steps"] > 1.5 * paged(usual)["num_steps"]
    # 60 requests under way in a memory for a few: a watermark keeps more of it for them.
    tight = [*few, "--num-blocks", "700"]
    eager, careful = numbers(*tight, "--watermark", "0"), numbers(*tight, "--watermark", "0.5")
    assert paged(eager)["running_mean"] > paged(careful)["running_mean"]
    whole = numbers(*few, "--no-chunked-prefill")
    assert whole["settings"]["chunked-prefill"] is False
    assert paged(whole) != paged(usual)


def test_measured_rates_replace_the_roofline(numbers: Callable[..., dict[str, Any]]) -> None:
    lines = '{"arrival_s": 0, "prompt_tokens": 1000, "output_tokens": 11}\n'
    Path("trace").write_text(lines)
    found = numbers(
        "trace", "--num-blocks", "99", "--prefill-rate", "10000", "--step-time", "20ms",
        "--scheme", "paged",
    )  # fmt: skip
    assert paged(found)["ttft_s"]["p50"] == pytest.approx(0.12)
    assert paged(found)["tpot_s"]["p50"] == pytest.approx(0.02)
    assert "gpu" not in found["settings"]
    assert found["settings"]["prefill-rate"] == 10000


def test_longer_requests_than_the_model_serves_are_served_and_said_unless_refused(
    numbers: Callable[..., dict[str, Any]],
) -> None:
    lines = [
        {"arrival_s": 0, "prompt_tokens": tokens, "output_tokens": 2} for tokens in (50, 10_000)
    ]
    Path("trace").write_text("\n".join(map(json.dumps, lines)))
    found = numbers("trace", "--scheme", "paged")
    (remark,) = (r for r in found["remarks"] if "longest request" in r)
    assert "10,002 tokens, llama-3-8b serves 8,192" in remark
    assert paged(found)["finished"] == 2
    flag = re.search(r"--max-model-len \d+", remark)
    assert flag is not None
    refused = numbers("trace", "--scheme", "paged", *flag[0].split())
    assert paged(refused)["finished"] == 1
    assert "longer than the model's maximum" in paged(refused)["refused"][0]


# Running it again.


def test_the_command_of_a_result_gives_the_same_bytes_again(
    simulate: Callable[..., Outcome],
) -> None:
    Path("my trace").write_text(MOONCAKE)
    for arguments in (
        ["my trace", "--num-blocks", "200", "--json", "a b.json", "--no-report"],
        [*SMALL, "--seed", "7", "--json", "a b.json", "--scheme", "paged"],
        ["--requests", "30", "--duration", "15s", "--json", "a b.json", "--report", "r.html"],
    ):
        assert simulate(*arguments).status == 0
        first = {name: Path(name).read_bytes() for name in files()}
        typed = shlex.split(json.loads(first["a b.json"])["command"])
        assert typed == ["pagedkv", "simulate", *arguments]
        Path("a b.json").unlink()
        assert simulate(*typed[2:]).status == 0
        assert {name: Path(name).read_bytes() for name in files()} == first


@pytest.mark.parametrize(
    "arguments",
    [
        ["--requests", "60"],
        ["--workload", "alpaca", "--duration", "20s", "--arrivals", "bursty", "--seed", "5"],
        [
            "--requests", "40", "--rate", "9", "--samples", "2", "--memory", "3GiB",
            "--block-size", "32", "--model", "opt-13b", "--kv-dtype", "fp8",
            "--scheme", "paged", "--scheme", "reserve-pow2", "--placement", "buddy",
            "--no-prefix-caching", "--max-num-seqs", "20", "--max-num-batched-tokens", "300",
            "--no-chunked-prefill", "--watermark", "0.1", "--gpu", "L40S", "--num-gpus", "2",
            "--max-model-len", "2000",
        ],
        ["trace", "--requests", "9", "--num-blocks", "150", "--prefill-rate", "7000",
         "--step-time", "30ms", "--duration", "1h"],
    ],
)  # fmt: skip
def test_the_settings_alone_are_enough_to_run_it_again(
    arguments: list[str], numbers: Callable[..., dict[str, Any]]
) -> None:
    Path("trace").write_text(MOONCAKE)
    first = numbers(*arguments)
    again = []
    for name, value in first["settings"].items():
        if name == "version":
            assert value == __version__
        elif name == "trace":
            again.append(value)
        elif name in ("memory", "time of a step") or value in (
            "all",
            "until all are served",
            "as many as come within --duration",
        ):
            continue  # words for people; --num-blocks has the memory, --gpu the time
        elif name == "scheme":
            again += [word for scheme in value.split(", ") for word in ("--scheme", scheme)]
        elif isinstance(value, bool):
            again.append(f"--{name}" if value else f"--no-{name}")
        else:
            again += [f"--{name}", str(value)]
    second = numbers(*again)
    assert second["schemes"] == first["schemes"]
    assert second["trace"] == first["trace"]
    told = {"memory"}
    assert {k: v for k, v in second["settings"].items() if k not in told} == {
        k: v for k, v in first["settings"].items() if k not in told
    }


# What is printed and written.


def test_the_report_and_the_json_are_written_and_named(simulate: Callable[..., Outcome]) -> None:
    outcome = simulate("--requests", "20", "--json", "all.json")
    assert outcome.status == 0
    assert outcome.err == ""
    assert files() == ["all.json", "report.html"]
    assert outcome.out.endswith("Wrote all.json\nWrote report.html: open it in a browser\n")
    assert "pagedkv simulate --requests 20 --json all.json" in Path("report.html").read_text()
    assert len(json.loads(Path("all.json").read_text())["schemes"]) == 4


def test_the_table_fits_80_columns_without_colour(simulate: Callable[..., Outcome]) -> None:
    out = simulate(*SMALL).out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    for scheme in SCHEMES:
        assert scheme in out


def test_json_on_standard_output_is_alone_there(simulate: Callable[..., Outcome]) -> None:
    outcome = simulate("--requests", "20", "--json", "-")
    assert outcome.out.count("\n") == 1
    assert set(json.loads(outcome.out)) >= {"settings", "schemes", "curve"}
    assert outcome.err == "Wrote report.html: open it in a browser\n"
    assert files() == ["report.html"]


def test_colours_can_be_turned_off(
    simulate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in simulate(*SMALL).out
    assert "\x1b[" not in simulate(*SMALL, "--no-color").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in simulate(*SMALL).out


def test_explain_defines_every_metric_and_stops(simulate: Callable[..., Outcome]) -> None:
    outcome = simulate("--explain")
    assert outcome.status == 0
    words = " ".join(outcome.out.split())
    for metric in METRICS:
        assert " ".join(metric.definition.split()) in words
    assert max(len(line.rstrip()) for line in outcome.out.splitlines()) <= 80
    assert files() == []


def test_an_interruption_leaves_the_old_report_and_nothing_half_written(
    simulate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("report.html").write_text("the old one")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulator, "simulate_scheme", interrupted)
    outcome = simulate("--json", "all.json")
    assert outcome.status == 130
    assert outcome.out == "" and outcome.err.strip() == ""
    assert files() == ["report.html"]
    assert Path("report.html").read_text() == "the old one"


def test_an_interruption_while_writing_leaves_both_files_or_neither(
    simulate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as while_drawing:
        while_drawing.setattr(report, "report_html", interrupted)
        assert simulate("--requests", "5", "--json", "all.json").status == 130
    assert files() == []
    really_replace = Path.replace

    def interrupted_once_done(self: Path, target: Path) -> Path:
        done = really_replace(self, target)
        signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(Path, "replace", interrupted_once_done)
    assert simulate("--requests", "5", "--json", "all.json").status == 130
    assert files() == ["all.json", "report.html"]


def test_ctrl_c_in_a_real_process_is_status_130_and_no_traceback() -> None:
    process = as_process(
        "-", "--json", "all.json", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A suite that runs in the background may ignore the signal, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdin is not None and process.stderr is not None
    # More than a pipe holds: once it is written, the process is reading.
    process.stdin.write(MOONCAKE.encode() * 200)
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert out == b""
    assert err.strip() == b""
    assert files() == []


def test_a_reader_that_has_enough_gets_no_traceback_and_the_report_all_the_same() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = as_process("--requests", "20", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    _, err = process.communicate()
    assert process.returncode == 1
    assert b"Traceback" not in err and b"Broken pipe" not in err
    assert files() == ["report.html"]


def test_a_bad_trace_is_one_line_of_a_real_process() -> None:
    Path("trace").write_text("a,b\n")
    process = as_process("trace", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert_refused(Outcome(process.returncode, out.decode(), err.decode()), "trace, line 1")
    assert files() == ["trace"]


def test_bars_are_drawn_on_standard_error_where_that_is_a_terminal() -> None:
    terminal, far_end = pty.openpty()
    process = as_process(*SMALL, "--scheme", "paged", stdout=subprocess.PIPE, stderr=far_end)
    os.close(far_end)
    drawn = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        drawn += part
    os.close(terminal)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert b"drawing requests" in drawn
    assert b"\x1b" in drawn
    assert b"\x1b" not in out and b"drawing" not in out


# The preset.


def test_the_preset_prints_the_papers_figures_and_writes_them(
    simulate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "HOUR_S", 60.0)  # the hour itself: tests/simulate/test_paper.py
    arguments = ["--preset", "pagedattention-paper", "--seed", "2", "--json", "all.json"]
    outcome = simulate(*arguments)
    assert outcome.status == 0
    assert re.search(r"\n2 +Orca \(Max\) +token states \(%\) +20\.40", outcome.out)
    assert re.search(r"\n13 +Orca \(Max\) +ShareGPT batch +7\.00", outcome.out)
    assert re.search(r"\n15 +vLLM +saved, 2 samples.* 6\.09", outcome.out)
    assert "22 figures within the bar, and " in outcome.out
    assert "fitted, not predicted: 36 ms and 0.29 ms" in " ".join(outcome.out.split())
    assert max(map(len, outcome.out.splitlines())) <= 80
    found = json.loads(Path("all.json").read_text())
    assert found["settings"]["seed"] == 2
    assert found["settings"]["placement"] == "buddy"
    assert found["settings"]["num-blocks"] == 983
    assert len(found["comparison"]) == 24
    assert next(f["paper"] for f in found["comparison"] if f["system"] == "vLLM") == 96.3
    first = Path("all.json").read_bytes()
    assert simulate(*shlex.split(found["command"])[2:]).status == 0
    assert Path("all.json").read_bytes() == first
    other = simulate("--preset", "pagedattention-paper", "--seed", "3", "--json", "-")
    assert json.loads(other.out)["comparison"] != found["comparison"]


# Help and documentation.


@pytest.fixture
def help_text(simulate: Callable[..., Outcome]) -> str:
    outcome = simulate("--help")
    assert outcome.status == 0
    return outcome.out


def test_help_fits_80_columns_with_every_name_and_default_whole(help_text: str) -> None:
    assert max(map(len, help_text.splitlines())) <= 80
    words = " ".join(help_text.split())
    for whole in (
        "--max-num-batched-tokens N",
        "--chunked-prefill / --no-chunked-prefill",
        "[default: 2000 of a workload, all of a trace]",
        "[default: what the model's weights leave of 90% of the GPU's memory]",
        "<paged|reserve-max|reserve-pow2|reserve-exact>",
        f"the workload's own, {WORKLOADS['chat'].default_rate_per_s:g} for chat]",
        "[default: llama-3-8b]",
        "[default: 0.01]",
    ):
        assert whole in words
    assert "…" not in help_text


def test_help_groups_the_options(help_text: str) -> None:
    titles = re.findall(r"^(\w+):$", help_text, re.MULTILINE)
    assert titles == [
        "Arguments", "Traffic", "Memory", "Scheduler", "Time", "Output", "Options",
    ]  # fmt: skip
    traffic = help_text[help_text.index("Traffic:") : help_text.index("Memory:")]
    assert "--rate" in traffic and "--gpu" not in traffic


def defaults_in(help_text: str) -> dict[str, str]:
    """Option -> the default that help names, for those that have one."""
    entries = re.split(r"\n  (?=--)", help_text)
    found = {}
    for entry in entries:
        name = re.match(r"--([a-z-]+)", entry)
        default = re.search(r"\[default: (.*?)\]", " ".join(entry.split()))
        if name and default:
            found[name[1]] = default[1]
    return found


def options_of(help_text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", help_text)) - {"--help"}


def test_the_page_on_simulating_names_every_option_and_no_other(help_text: str) -> None:
    page = (DOCS / "simulate.md").read_text(encoding="utf-8")
    assert options_of(page) == options_of(help_text)


def test_the_page_on_simulating_names_what_is_built_in() -> None:
    page = (DOCS / "simulate.md").read_text(encoding="utf-8")
    for name in (*WORKLOADS, *BUILT_IN_CONFIGS, *(gpu.name for gpu in GPUS)):
        assert f"`{name}`" in page, name


def test_the_choices_of_the_command_are_those_of_the_simulator() -> None:
    from pagedkv.simulate.model_geometry import KV_DTYPES
    from pagedkv.simulate.regions import PLACEMENTS
    from pagedkv.simulate.workloads import ARRIVALS

    assert tuple(asked.Scheme) == SCHEMES
    assert set(asked.Placement) == set(PLACEMENTS)
    assert tuple(asked.Arrivals) == ARRIVALS
    assert tuple(asked.KVDtype) == KV_DTYPES
