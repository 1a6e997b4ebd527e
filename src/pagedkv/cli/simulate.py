"""`pagedkv simulate`: replay traffic, see where the memory goes."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkv.simulate.model_geometry import ModelGeometry
    from pagedkv.simulate.results import SimulationResult
    from pagedkv.simulate.simulator import Progress, SimulationConfig
    from pagedkv.simulate.step_time import StepTime
    from pagedkv.simulate.trace import Trace

DEFAULT_GPU = "A100-40GB"
DEFAULT_MODEL = "llama-3-8b"
DEFAULT_WORKLOAD = "chat"
DEFAULT_REQUESTS = 2_000
GPU_MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory that an engine takes; what the weights leave of it is the KV memory."""

PAPER_PRESET = "pagedattention-paper"


class Scheme(StrEnum):
    """What `--scheme` takes."""

    PAGED = "paged"
    RESERVE_MAX = "reserve-max"
    RESERVE_POW2 = "reserve-pow2"
    RESERVE_EXACT = "reserve-exact"


class Placement(StrEnum):
    """What `--placement` takes."""

    FIRST_FIT = "first-fit"
    BEST_FIT = "best-fit"
    BUDDY = "buddy"


class Arrivals(StrEnum):
    """What `--arrivals` takes."""

    POISSON = "poisson"
    BURSTY = "bursty"


class KVDtype(StrEnum):
    """What `--kv-dtype` takes."""

    AUTO = "auto"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8"


class Preset(StrEnum):
    """What `--preset` takes."""

    PAPER = PAPER_PRESET


_TRAFFIC, _MEMORY, _SCHEDULER, _TIME, _OUTPUT = (
    "Traffic",
    "Memory",
    "Scheduler",
    "Time",
    "Output",
)


def simulate(
    trace: Annotated[
        str | None,
        typer.Argument(
            help="A trace file (Azure, Mooncake, Qwen-Bailian, BurstGPT, Vidur or our own; also "
            "gzip or zstd), or - for standard input. Without one, a built-in workload.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="Built-in workload: chat, sharegpt, alpaca, azure-conversation, azure-code. "
            f"[default: {DEFAULT_WORKLOAD}]",
            show_default=False,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests of the workload, or the first so many of the trace. "
            f"[default: {DEFAULT_REQUESTS} of a workload, all of a trace]",
            show_default=False,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second, of a workload. [default: the workload's own]",
            show_default=False,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    arrivals: Annotated[
        Arrivals,
        typer.Option(help="How the requests of a workload arrive.", rich_help_panel=_TRAFFIC),
    ] = Arrivals.POISSON,
    seed: Annotated[int, typer.Option(help="Of a workload.", rich_help_panel=_TRAFFIC)] = 0,
    duration: Annotated[
        str | None,
        typer.Option(
            help="Stop after so much simulated time: 10min, 1h.",
            show_default=False,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(help="Answers to each prompt, by forking.", rich_help_panel=_TRAFFIC),
    ] = 1,
    memory: Annotated[
        str | None,
        typer.Option(
            help="KV memory: 24GiB. [default: what the model's weights leave of "
            f"{GPU_MEMORY_UTILIZATION:.0%} of the GPU's memory]",
            show_default=False,
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="KV memory in blocks, instead of --memory.",
            show_default=False,
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(help="Tokens in a block.", rich_help_panel=_MEMORY)
    ] = 16,
    model: Annotated[
        str,
        typer.Option(
            help="A model by name, or the path of a Hugging Face config.json.",
            rich_help_panel=_MEMORY,
        ),
    ] = DEFAULT_MODEL,
    kv_dtype: Annotated[
        KVDtype,
        typer.Option(help="Of keys and values; auto is the model's.", rich_help_panel=_MEMORY),
    ] = KVDtype.AUTO,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest request, prompt and output; reserve-max reserves it. [default: the "
            "model's, or the trace's longest if that is longer]",
            show_default=False,
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    scheme: Annotated[
        list[Scheme] | None,
        typer.Option(
            help="Only this one; may be given several times. [default: all]",
            show_default=False,
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    placement: Annotated[
        Placement,
        typer.Option(help="How contiguous schemes choose a hole.", rich_help_panel=_MEMORY),
    ] = Placement.FIRST_FIT,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Find the blocks of known prefixes again, in the paged scheme.",
            rich_help_panel=_MEMORY,
        ),
    ] = True,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that run at once.", rich_help_panel=_SCHEDULER)
    ] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens that a step computes.", rich_help_panel=_SCHEDULER)
    ] = 8192,
    chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--chunked-prefill/--no-chunked-prefill",
            help="Compute long prompts over several steps.",
            rich_help_panel=_SCHEDULER,
        ),
    ] = True,
    watermark: Annotated[
        float,
        typer.Option(
            help="Share of the blocks that admission leaves free.", rich_help_panel=_SCHEDULER
        ),
    ] = 0.01,
    gpu: Annotated[
        str,
        typer.Option(help="GPU by name; its roofline times a step.", rich_help_panel=_TIME),
    ] = DEFAULT_GPU,
    num_gpus: Annotated[
        int, typer.Option(help="GPUs that share the model.", rich_help_panel=_TIME)
    ] = 1,
    prefill_rate: Annotated[
        float | None,
        typer.Option(
            help="Measured instead of a roofline: prompt tokens a second; with --step-time.",
            show_default=False,
            rich_help_panel=_TIME,
        ),
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option(
            help="Measured: what a step takes besides, 20ms; with --prefill-rate.",
            show_default=False,
            rich_help_panel=_TIME,
        ),
    ] = None,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="A published experiment, whole, beside its figures.",
            show_default=False,
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    report: Annotated[
        str, typer.Option(help="Where the report goes.", rich_help_panel=_OUTPUT)
    ] = "report.html",
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Write no report.", rich_help_panel=_OUTPUT)
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(
            help="Write every number to this file.", show_default=False, rich_help_panel=_OUTPUT
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Define every metric, and stop.", rich_help_panel=_OUTPUT),
    ] = False,
    colour: Annotated[
        bool,
        typer.Option("--color/--no-color", help="NO_COLOR works too.", rich_help_panel=_OUTPUT),
    ] = True,
) -> None:
    """Replay traffic on paged memory and on the contiguous schemes it replaces."""
    from pagedkv.simulate import table

    console = _console(colour)
    if explain:
        table.explain(console)
        return
    if preset is not None:
        result = _run_preset(seed, console)
    else:
        given = _Given(
            trace, workload, requests, rate, arrivals.value, seed, duration, samples, memory,
            num_blocks, block_size, model, kv_dtype.value, max_model_len,
            tuple(s.value for s in scheme or ()), placement.value, prefix_caching, max_num_seqs,
            max_num_batched_tokens, chunked_prefill, watermark, gpu, num_gpus, prefill_rate,
            step_time,
        )  # fmt: skip
        result = _run(given, console)
        table.print_result(result, console)
    _write(result, None if no_report else report, json, console)


@dataclass(frozen=True)
class _Given:
    """The command line, by the names of its options."""

    trace: str | None
    workload: str | None
    requests: int | None
    rate: float | None
    arrivals: str
    seed: int
    duration: str | None
    samples: int
    memory: str | None
    num_blocks: int | None
    block_size: int
    model: str
    kv_dtype: str
    max_model_len: int | None
    scheme: tuple[str, ...]
    placement: str
    prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    watermark: float
    gpu: str
    num_gpus: int
    prefill_rate: float | None
    step_time: str | None


def _run(given: _Given, console: Console) -> SimulationResult:
    from pagedkv.simulate.model_geometry import model_geometry
    from pagedkv.simulate.results import SimulationResult
    from pagedkv.simulate.simulator import simulate_scheme, trace_curve

    geometry = model_geometry(given.model, kv_dtype=given.kv_dtype)
    step_time = _step_time(given, geometry)
    num_blocks, bytes_per_token = _num_blocks(given, geometry)
    trace = _trace(given)
    config, remarks = _config(given, trace, geometry, num_blocks, step_time)
    with _progress(console) as progress:
        schemes = tuple(simulate_scheme(trace, config, s, progress) for s in config.schemes)
        curve = trace_curve(trace, block_size=config.block_size)
    if not any(scheme.finished for scheme in schemes):
        raise InvalidInput(f"{trace.name}: no request was served: {_why_none(schemes[0].refused)}")
    return SimulationResult(
        command=_command(),
        settings=_settings(given, trace, config, step_time),
        trace_name=trace.name,
        trace_format=trace.format,
        num_requests=len(trace),
        prompt_tokens=int(trace.prompt_tokens.sum()),
        output_tokens=int(trace.output_tokens.sum()),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        bytes_per_token=bytes_per_token,
        schemes=schemes,
        curve=curve,
        remarks=(*trace.remarks, *remarks),
    )


def _run_preset(seed: int, console: Console) -> SimulationResult:
    from pagedkv.simulate import paper, table
    from pagedkv.simulate.model_geometry import model_geometry
    from pagedkv.simulate.results import SimulationResult

    geometry = model_geometry(paper.MODEL, kv_dtype="fp16")
    config = paper.setting(bytes_per_token=geometry.kv_bytes_per_token)
    with _progress(console) as progress:
        schemes, rows = paper.compare(config, seed=seed, progress=progress)
    sharegpt, _ = paper.traces(seed=seed)
    result = SimulationResult(
        command=_command(),
        settings={
            "preset": PAPER_PRESET,
            "seed": seed,
            "model": geometry.name,
            "step time": config.step_time.description,
            "placement": config.placement,
            "max-model-len": config.max_model_len,
            "duration": f"{config.horizon_s:.0f}s",
        },
        trace_name="sharegpt, at 2 requests a second",
        trace_format=sharegpt.format,
        num_requests=len(sharegpt),
        prompt_tokens=int(sharegpt.prompt_tokens.sum()),
        output_tokens=int(sharegpt.output_tokens.sum()),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        bytes_per_token=geometry.kv_bytes_per_token,
        schemes=schemes,
        curve=None,
        remarks=(),
    )
    table.print_result(result, console)
    console.print()
    table.print_paper_comparison(rows, console)
    return result


def _trace(given: _Given) -> Trace:
    from pagedkv.simulate.trace_formats import read_trace
    from pagedkv.simulate.workloads import make_workload

    if given.trace is None:
        return make_workload(
            given.workload or DEFAULT_WORKLOAD,
            num_requests=DEFAULT_REQUESTS if given.requests is None else given.requests,
            rate_per_s=given.rate,
            arrivals=given.arrivals,
            seed=given.seed,
        )
    if given.workload is not None or given.rate is not None:
        option = "--workload" if given.workload is not None else "--rate"
        raise InvalidInput(f"{option} belongs to a built-in workload: leave it or the trace out")
    trace = read_trace(given.trace)
    if given.requests is not None:
        if given.requests < 1:
            raise InvalidInput(f"--requests is {given.requests}: give at least 1")
        trace = trace.first(given.requests)
    return trace


def _num_blocks(given: _Given, geometry: ModelGeometry) -> tuple[int, int | None]:
    """Blocks of the memory, and bytes a token where the memory was given in bytes."""
    from pagedkv.cli.quantities import parse_bytes
    from pagedkv.simulate.gpus import gpu_by_name

    if given.block_size < 1:
        raise InvalidInput(f"--block-size is {given.block_size}: give at least 1")
    if given.num_blocks is not None:
        if given.memory is not None:
            raise InvalidInput("--memory and --num-blocks both size the memory: give one")
        if given.num_blocks < 1:
            raise InvalidInput(f"--num-blocks is {given.num_blocks}: give at least 1")
        return given.num_blocks, None
    bytes_per_token = geometry.kv_bytes_per_token
    if bytes_per_token == 0:
        raise InvalidInput(f"model {geometry.name} keeps no keys and values: nothing to simulate")
    if given.memory is not None:
        memory_bytes = parse_bytes(given.memory, option="--memory")
        source = f"--memory {given.memory}"
    else:
        gpu = gpu_by_name(given.gpu)
        usable = int(gpu.memory_bytes * given.num_gpus * GPU_MEMORY_UTILIZATION)
        memory_bytes = usable - geometry.weight_bytes
        source = (
            f"{GPU_MEMORY_UTILIZATION:.0%} of {given.num_gpus} x {gpu.name} less "
            f"{geometry.weight_bytes / 2**30:.1f} GiB of weights of {geometry.name}"
        )
    num_blocks = memory_bytes // (bytes_per_token * given.block_size)
    if num_blocks < 1:
        raise InvalidInput(
            f"{source} leaves no room for one block of {given.block_size} tokens, "
            f"{bytes_per_token * given.block_size:,} bytes: give more memory"
        )
    return num_blocks, bytes_per_token


def _step_time(given: _Given, geometry: ModelGeometry) -> StepTime:
    from pagedkv.cli.quantities import parse_seconds
    from pagedkv.simulate.gpus import gpu_by_name
    from pagedkv.simulate.step_time import measured_step_time, roofline_step_time

    if given.prefill_rate is None and given.step_time is None:
        return roofline_step_time(gpu_by_name(given.gpu), geometry, num_gpus=given.num_gpus)
    if given.prefill_rate is None or given.step_time is None:
        missing = "--prefill-rate" if given.prefill_rate is None else "--step-time"
        raise InvalidInput(f"--prefill-rate and --step-time belong together: add {missing}")
    return measured_step_time(
        prefill_rate_tokens_per_s=given.prefill_rate,
        base_s=parse_seconds(given.step_time, option="--step-time"),
    )


def _config(
    given: _Given, trace: Trace, geometry: ModelGeometry, num_blocks: int, step_time: StepTime
) -> tuple[SimulationConfig, list[str]]:
    from pagedkv.cli.quantities import parse_seconds
    from pagedkv.scheduling.limits import SchedulerConfig
    from pagedkv.simulate.simulator import SCHEMES, SimulationConfig

    remarks = list(geometry.remarks)
    max_model_len = given.max_model_len
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    if max_model_len is None:
        max_model_len = geometry.max_model_len or longest
        if longest > max_model_len:
            remarks.append(
                f"the longest request has {longest:,} tokens, {geometry.name} serves "
                f"{max_model_len:,}: simulated as if it served {longest:,} (--max-model-len)"
            )
            max_model_len = longest
    horizon_s = math.inf
    if given.duration is not None:
        horizon_s = parse_seconds(given.duration, option="--duration")
    config = SimulationConfig(
        num_blocks=num_blocks,
        block_size=given.block_size,
        step_time=step_time,
        scheduler=SchedulerConfig(
            max_num_seqs=given.max_num_seqs,
            max_num_batched_tokens=given.max_num_batched_tokens,
            chunked_prefill=given.chunked_prefill,
            watermark=given.watermark,
        ),
        schemes=tuple(s for s in SCHEMES if not given.scheme or s in given.scheme),
        placement=given.placement,
        prefix_caching=given.prefix_caching,
        max_model_len=max_model_len,
        num_samples=given.samples,
        horizon_s=horizon_s,
    )
    return config, remarks


def _settings(
    given: _Given, trace: Trace, config: SimulationConfig, step_time: StepTime
) -> dict[str, str | int | float | bool | None]:
    """Every setting by the name of its flag, defaults filled in."""
    settings: dict[str, str | int | float | bool | None] = {"trace": given.trace or "none"}
    if given.trace is None:
        settings |= {
            "workload": trace.name,
            "requests": len(trace),
            "rate": given.rate or "the workload's own",
            "arrivals": given.arrivals,
            "seed": given.seed,
        }
    elif given.requests is not None:
        settings["requests"] = given.requests
    return settings | {
        "duration": given.duration or "all of it",
        "samples": config.num_samples,
        "memory": given.memory or "from --num-blocks" if given.num_blocks else "from --gpu",
        "num-blocks": config.num_blocks,
        "block-size": config.block_size,
        "model": given.model,
        "kv-dtype": given.kv_dtype,
        "max-model-len": config.max_model_len,
        "scheme": ", ".join(config.schemes),
        "placement": config.placement,
        "prefix-caching": config.prefix_caching,
        "max-num-seqs": config.scheduler.max_num_seqs,
        "max-num-batched-tokens": config.scheduler.max_num_batched_tokens,
        "chunked-prefill": config.scheduler.chunked_prefill,
        "watermark": config.scheduler.watermark,
        "step time": step_time.description,
    }


def _why_none(refused: tuple[str, ...]) -> str:
    return refused[0] if refused else "the time given was over before one finished"


def _write(
    result: SimulationResult, report: str | None, json: str | None, console: Console
) -> None:
    from rich.text import Text

    from pagedkv.simulate.report import write_report
    from pagedkv.simulate.result_json import write_json

    if json is not None:
        write_json(result, json)
        console.print(Text(f"Wrote {json}"))
    if report is not None:
        write_report(result, report)
        console.print(Text(f"Wrote {report}: open it in a browser"))


def _console(colour: bool) -> Console:
    from rich.console import Console

    plain = not colour or bool(os.environ.get("NO_COLOR"))
    return Console(color_system=None if plain else "auto", highlight=False)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar for each scheme, on a terminal, gone when all are done."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description:14}"), BarColumn(), TaskProgressColumn())
    errors = type(console)(stderr=True, no_color=console.no_color)
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bars:
        tasks: dict[str, Any] = {}

        def show(scheme: str, done: float) -> None:
            if scheme not in tasks:
                for task in tasks.values():
                    bars.remove_task(task)
                tasks.clear()
                tasks[scheme] = bars.add_task(scheme, total=1.0)
            bars.update(tasks[scheme], completed=done)

        yield show


def _command() -> str:
    return shlex.join(["pagedkv", *sys.argv[1:]])
