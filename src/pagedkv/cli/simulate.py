"""`pagedkv simulate`: replay traffic, see where the memory goes."""

from __future__ import annotations

import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from pagedkv._version import __version__
from pagedkv.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkv.simulate.model_geometry import ModelGeometry
    from pagedkv.simulate.results import SimulationResult
    from pagedkv.simulate.simulator import SimulationConfig
    from pagedkv.simulate.step_time import StepTime
    from pagedkv.simulate.trace import Trace

DEFAULT_GPU = "A100-40GB"
DEFAULT_MODEL = "llama-3-8b"
DEFAULT_WORKLOAD = "chat"
DEFAULT_REQUESTS = 2_000
GPU_MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory that an engine takes; what the weights leave of it is the KV memory."""

MOST = 2**31 - 1
"""The largest count that an option takes: block ids are int32."""

STANDARD_OUTPUT = "-"

Settings: TypeAlias = dict[str, str | int | float | bool | None]


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

    PAPER = "pagedattention-paper"


_TRAFFIC, _MEMORY, _SCHEDULER, _TIME, _OUTPUT = (
    "Traffic",
    "Memory",
    "Scheduler",
    "Time",
    "Output",
)

_OF_A_WORKLOAD = ("workload", "rate", "arrivals", "seed")
_IN_SECONDS = ("samples", "placement", "gpu", "num_gpus", "prefill_rate", "step_time")
_WITH_A_PRESET = ("preset", "seed", "report", "no_report", "json", "explain", "colour")
"""Parameters that a trace excludes, those that `--by-step` excludes, and the only ones that a
preset leaves open."""

_RECORDED: dict[str, tuple[str, type]] = {
    "num-blocks": ("num_blocks", int),
    "block-size": ("block_size", int),
    "max-model-len": ("max_model_len", int),
    "prefix-caching": ("prefix_caching", bool),
    "max-num-seqs": ("max_num_seqs", int),
    "max-num-batched-tokens": ("max_num_batched_tokens", int),
    "chunked-prefill": ("chunked_prefill", bool),
    "watermark": ("watermark", float),
}
"""Settings that a recorded run brings along: the parameter and the type of each."""


def simulate(
    context: typer.Context,
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help="A trace file: Azure, Mooncake, Qwen-Bailian, BurstGPT, Vidur or our own, plain "
            "or compressed with gzip or zstd; - is standard input. Without one, a built-in "
            "workload.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Built-in workload: chat, sharegpt, alpaca, azure-conversation or azure-code. "
            f"[default: {DEFAULT_WORKLOAD}]",
            show_default=False,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Requests of the workload, or the first so many of the trace. "
            f"[default: {DEFAULT_REQUESTS} of a workload, all of a trace]",
            show_default=False,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            help="Requests a second of a workload. [default: the workload's own, 6 for "
            f"{DEFAULT_WORKLOAD}]",
            show_default=False,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    arrivals: Annotated[
        Arrivals,
        typer.Option(help="How the requests of a workload arrive.", rich_help_panel=_TRAFFIC),
    ] = Arrivals.POISSON,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Of a workload: the same seed, the same requests.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = 0,
    duration: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Stop after so much simulated time: 10min, 1h. A workload then has requests for "
            "all of it, unless --requests says how many. [default: until all are served]",
            show_default=False,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            metavar="N", help="Answers to each prompt, by forking.", rich_help_panel=_TRAFFIC
        ),
    ] = 1,
    by_step: Annotated[
        bool,
        typer.Option(
            "--by-step",
            help="Repeat a recorded run step by step: the same decisions, on paged memory. Time "
            "is counted in steps, 1 s each.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = False,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="Repeat a published experiment and print its figures beside ours. Only --seed "
            "and the output can be chosen with it.",
            show_default=False,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="KV memory: 24GiB. [default: what the model's weights leave of "
            f"{GPU_MEMORY_UTILIZATION:.0%} of the GPU's memory]",
            show_default=False,
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="KV memory in blocks, instead of --memory.",
            show_default=False,
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(metavar="N", help="Tokens in a block.", rich_help_panel=_MEMORY)
    ] = 16,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="A model by name, or the path of a Hugging Face config.json.",
            rich_help_panel=_MEMORY,
        ),
    ] = DEFAULT_MODEL,
    kv_dtype: Annotated[
        KVDtype,
        typer.Option(
            help="Of keys and values; auto is what the model's config says.",
            rich_help_panel=_MEMORY,
        ),
    ] = KVDtype.AUTO,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of the longest request that is served, prompt and output; reserve-max "
            "reserves as many for each. [default: the model's, or the trace's longest if that is "
            "longer]",
            show_default=False,
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    scheme: Annotated[
        list[Scheme] | None,
        typer.Option(
            metavar="<paged|reserve-max|reserve-pow2|reserve-exact>",
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
        int,
        typer.Option(
            metavar="N", help="Requests that run at once, at most.", rich_help_panel=_SCHEDULER
        ),
    ] = 256,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="Tokens that a step computes, at most.", rich_help_panel=_SCHEDULER
        ),
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
            metavar="SHARE",
            help="Share of the blocks, 0 to 1, that admission leaves free.",
            rich_help_panel=_SCHEDULER,
        ),
    ] = 0.01,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="GPU by name (A100-80GB, H100, RTX 4090, ...); its roofline times a step.",
            rich_help_panel=_TIME,
        ),
    ] = DEFAULT_GPU,
    num_gpus: Annotated[
        int,
        typer.Option(metavar="N", help="GPUs that share the model.", rich_help_panel=_TIME),
    ] = 1,
    prefill_rate: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            help="Measured, instead of a roofline: prompt tokens a second; with --step-time.",
            show_default=False,
            rich_help_panel=_TIME,
        ),
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Measured: what each step takes besides, 20ms; with --prefill-rate.",
            show_default=False,
            rich_help_panel=_TIME,
        ),
    ] = None,
    report: Annotated[
        str,
        typer.Option(metavar="FILE", help="Where the report goes.", rich_help_panel=_OUTPUT),
    ] = "report.html",
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Write no report.", rich_help_panel=_OUTPUT)
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write every number to this file; - prints them instead of the table.",
            show_default=False,
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Define every metric, and stop.", rich_help_panel=_OUTPUT),
    ] = False,
    colour: Annotated[
        bool,
        typer.Option(
            "--color/--no-color",
            help="Colours, on a terminal; NO_COLOR works too.",
            rich_help_panel=_OUTPUT,
        ),
    ] = True,
) -> None:
    """Replay traffic on paged memory and on the contiguous schemes it replaces."""
    from pagedkv.simulate import table

    console = _console(colour)
    if explain:
        table.explain(console)
        return
    typed = _typed(context)
    report_path = _report_path(report, no_report, typed)
    _check_writable("--report", report_path)
    _check_writable("--json", json)
    if report_path is not None and json is not None and _same_file(report_path, json):
        raise InvalidInput(f"--report and --json are both {json}: give two names")
    with _progress(colour) as bars:
        if preset is not None:
            _refuse_with_preset(preset, typed)
            result = _run_preset(preset, seed, _command(context), bars)
        else:
            given = _Given(
                trace=trace,
                workload=workload,
                requests=requests,
                rate=rate,
                arrivals=arrivals.value,
                seed=seed,
                duration=duration,
                samples=samples,
                by_step=by_step,
                memory=memory,
                num_blocks=num_blocks,
                block_size=block_size,
                model=model,
                kv_dtype=kv_dtype.value,
                max_model_len=max_model_len,
                schemes=tuple(s.value for s in scheme or ()),
                placement=placement.value,
                prefix_caching=prefix_caching,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                chunked_prefill=chunked_prefill,
                watermark=watermark,
                gpu=gpu,
                num_gpus=num_gpus,
                prefill_rate=prefill_rate,
                step_time=step_time,
            )
            _refuse_conflicts(given, typed)
            result = _run(given, typed, _command(context), bars)
        bars.wait("writing")
        _write(result, report_path, json)
    # Only now, so that a reader who closes the pipe early has the files all the same.
    _print(result, report_path, json, console)


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
    by_step: bool
    memory: str | None
    num_blocks: int | None
    block_size: int
    model: str
    kv_dtype: str
    max_model_len: int | None
    schemes: tuple[str, ...]
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

    @property
    def is_measured(self) -> bool:
        """Whether step times were given, so that no roofline is needed."""
        return self.prefill_rate is not None or self.step_time is not None

    @property
    def sizes_memory(self) -> bool:
        """Whether the memory was given, so that no GPU has to tell it."""
        return self.memory is not None or self.num_blocks is not None


@dataclass(frozen=True)
class _KVMemory:
    """The memory to simulate, and in words where its size is from."""

    num_blocks: int
    bytes_per_token: int | None  # None where only a number of blocks is known
    source: str


# What the command line may not say. All of it is looked at before anything slow begins.


def _typed(context: typer.Context) -> dict[str, str]:
    """The parameters that the command line names, each with the name it has there."""
    typed = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            is_argument = parameter.param_type_name == "argument"
            typed[name] = "TRACE" if is_argument else parameter.opts[0]
    return typed


def _refuse_with_preset(preset: str, typed: dict[str, str]) -> None:
    too_much = [flag for name, flag in typed.items() if name not in _WITH_A_PRESET]
    if too_much:
        raise InvalidInput(
            f"--preset {preset} fixes everything but --seed and the output: leave out "
            f"{', '.join(too_much)}"
        )


def _refuse_conflicts(given: _Given, typed: dict[str, str]) -> None:
    for option, value in (
        ("--requests", given.requests),
        ("--samples", given.samples),
        ("--num-blocks", given.num_blocks),
        ("--block-size", given.block_size),
        ("--max-model-len", given.max_model_len),
        ("--max-num-seqs", given.max_num_seqs),
        ("--max-num-batched-tokens", given.max_num_batched_tokens),
        ("--num-gpus", given.num_gpus),
    ):
        if value is not None and not 1 <= value <= MOST:
            bound = "at least 1" if value < 1 else f"at most {MOST:,}"
            raise InvalidInput(f"{option} is {value}: give {bound}")
    if given.trace is not None:
        for name in _OF_A_WORKLOAD:
            if name in typed:
                raise InvalidInput(
                    f"{typed[name]} belongs to a built-in workload: leave it or the trace out"
                )
    if given.by_step:
        if given.trace is None:
            raise InvalidInput("--by-step repeats a recorded run: give its file")
        for name in _IN_SECONDS:
            if name in typed:
                raise InvalidInput(
                    f"{typed[name]} changes nothing with --by-step, where a step is a step: leave "
                    "it out"
                )
        if given.schemes not in ((), (Scheme.PAGED.value,)):
            raise InvalidInput("--by-step repeats what paged memory did: leave out other schemes")
    if given.memory is not None and given.num_blocks is not None:
        raise InvalidInput("--memory and --num-blocks both size the memory: give one")
    if given.is_measured and (given.prefill_rate is None or given.step_time is None):
        missing = "--prefill-rate" if given.prefill_rate is None else "--step-time"
        raise InvalidInput(f"--prefill-rate and --step-time belong together: add {missing}")
    if given.is_measured and given.sizes_memory:
        for name in ("gpu", "num_gpus"):
            if name in typed:
                raise InvalidInput(
                    f"{typed[name]} changes nothing where memory and step time are given: leave "
                    "it out"
                )


def _report_path(report: str, no_report: bool, typed: dict[str, str]) -> str | None:
    if not no_report:
        if report == STANDARD_OUTPUT:
            raise InvalidInput("--report -: a report is a page for a browser, name a file")
        return report
    if "report" in typed:
        raise InvalidInput("--report and --no-report: give one")
    return None


def _check_writable(option: str, path: str | None) -> None:
    """Find out now, and not after the simulation, that nothing can be written to `path`."""
    if path is None or path == STANDARD_OUTPUT:
        return
    try:
        target = Path(path).resolve()
        if target.is_dir():
            raise InvalidInput(f"{option} {path}: it is a directory, name a file in it")
        if target.is_file() or not target.exists():
            # Asking for permissions tells less: root has them all, on a disk that cannot be
            # written to as well.
            tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise InvalidInput(
            f"{option} {path}: cannot be written: {error.strerror or error}; choose another path"
        ) from error


def _same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


# The simulation.


def _run(given: _Given, typed: dict[str, str], command: str, bars: _Bars) -> SimulationResult:
    from pagedkv.simulate.model_geometry import model_geometry
    from pagedkv.simulate.results import SimulationResult
    from pagedkv.simulate.simulator import simulate_scheme, trace_curve

    geometry = model_geometry(given.model, kv_dtype=given.kv_dtype)
    step_time = _step_time(given, geometry)
    memory = _memory(given, geometry, model_is_given="model" in typed)
    horizon_s = _horizon_s(given)
    bars.wait("reading" if given.trace else "drawing requests")
    trace = _trace(given, horizon_s)
    if trace.recorded_with is not None:
        given = _as_recorded(given, typed, trace)
        memory = _memory(given, geometry, model_is_given="model" in typed)
    config, remarks = _config(given, trace, geometry, memory, step_time, horizon_s)
    try:
        schemes = tuple(simulate_scheme(trace, config, s, bars) for s in config.schemes)
        bars.wait("hit-rate curve")
        curve = trace_curve(trace, block_size=config.block_size)
    except MemoryError as error:
        raise InvalidInput(
            f"{config.num_blocks:,} blocks and {len(trace):,} requests are more than fits into "
            "this machine: simulate fewer"
        ) from error
    if not any(scheme.finished for scheme in schemes):
        raise InvalidInput(f"{trace.name}: no request was served: {_why_none(schemes[0].refused)}")
    return SimulationResult(
        command=command,
        settings=_settings(given, trace, geometry, memory, config),
        trace_name=trace.name,
        trace_format=trace.format,
        num_requests=trace.num_requests,
        num_answers=len(trace) * config.num_samples,
        prompt_tokens=trace.num_prompt_tokens,
        output_tokens=int(trace.output_tokens.sum()) * config.num_samples,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        bytes_per_token=memory.bytes_per_token,
        schemes=schemes,
        curve=curve,
        remarks=(*trace.remarks, *remarks),
    )


def _run_preset(preset: str, seed: int, command: str, bars: _Bars) -> SimulationResult:
    from pagedkv.simulate import paper
    from pagedkv.simulate.model_geometry import model_geometry
    from pagedkv.simulate.results import SimulationResult

    geometry = model_geometry(paper.MODEL, kv_dtype=paper.KV_DTYPE)
    config = paper.setting(bytes_per_token=geometry.kv_bytes_per_token)
    comparison = paper.compare(config, seed=seed, progress=bars)
    trace = comparison.sharegpt
    memory = _KVMemory(
        config.num_blocks,
        geometry.kv_bytes_per_token,
        f"{paper.KV_MEMORY_BYTES / 2**30:g}GiB",
    )
    settings: Settings = {
        "version": __version__,
        "preset": preset,
        "workload": trace.name,
        "rate": paper.SHAREGPT_RATE_PER_S,
        "arrivals": Arrivals.POISSON.value,
        "seed": seed,
        "duration": f"{config.horizon_s:g}s",
    }
    return SimulationResult(
        command=command,
        settings=settings | _memory_settings(paper.MODEL, geometry, memory, config),
        trace_name=f"{trace.name}, at {paper.SHAREGPT_RATE_PER_S:g} requests a second",
        trace_format=trace.format,
        num_requests=len(trace),
        num_answers=len(trace),
        prompt_tokens=int(trace.prompt_tokens.sum()),
        output_tokens=int(trace.output_tokens.sum()),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        bytes_per_token=geometry.kv_bytes_per_token,
        schemes=comparison.schemes,
        curve=None,
        remarks=paper.REMARKS,
        comparison=tuple(comparison.figures),
    )


def _trace(given: _Given, horizon_s: float) -> Trace:
    from pagedkv.simulate.trace_formats import read_trace
    from pagedkv.simulate.workloads import make_workload

    if given.trace is not None:
        trace = read_trace(given.trace, by_step=given.by_step)
        return trace if given.requests is None else trace.first(given.requests)
    for_all_of_it = given.requests is None and math.isfinite(horizon_s)
    return make_workload(
        given.workload or DEFAULT_WORKLOAD,
        num_requests=None if for_all_of_it else given.requests or DEFAULT_REQUESTS,
        duration_s=horizon_s if for_all_of_it else None,
        rate_per_s=given.rate,
        arrivals=given.arrivals,
        seed=given.seed,
    )


def _as_recorded(given: _Given, typed: dict[str, str], trace: Trace) -> _Given:
    """The command line with the settings of the recorded run where it says nothing else."""
    taken: Settings = {}
    for option, value in (trace.recorded_with or {}).items():
        name, kind = _RECORDED.get(option, ("", type(None)))
        if not name or name in typed or (name == "num_blocks" and "memory" in typed):
            continue
        if type(value) is not kind:
            raise InvalidInput(
                f"{trace.name}: the run was recorded with {option} {value!r}, which it cannot be: "
                f"give --{option}"
            )
        taken[name] = value
    recorded: _Given = replace(given, **taken)  # type: ignore[arg-type]
    _refuse_conflicts(recorded, typed)
    return recorded


def _horizon_s(given: _Given) -> float:
    from pagedkv.cli.quantities import parse_seconds

    if given.duration is None:
        return math.inf
    return parse_seconds(given.duration, option="--duration")


def _memory(given: _Given, geometry: ModelGeometry, *, model_is_given: bool) -> _KVMemory:
    """How many blocks there are.

    Bytes a token are known where a model was named, and not where the one that nobody asked for
    times the steps of a memory that is given in blocks.
    """
    from pagedkv.cli.quantities import parse_bytes
    from pagedkv.simulate.gpus import gpu_by_name

    bytes_per_token = geometry.kv_bytes_per_token
    if given.num_blocks is not None:
        known = bytes_per_token if model_is_given and bytes_per_token > 0 else None
        return _KVMemory(given.num_blocks, known, "from --num-blocks")
    if bytes_per_token == 0:
        raise InvalidInput(f"model {geometry.name} keeps no keys and values: nothing to simulate")
    if given.memory is not None:
        memory_bytes = parse_bytes(given.memory, option="--memory")
        source = given.memory
        place, cure = f"--memory {given.memory}", "give more memory or a smaller --block-size"
    else:
        gpu = gpu_by_name(given.gpu)
        count = "" if given.num_gpus == 1 else f"{given.num_gpus} x "
        memory_bytes = (
            int(gpu.memory_bytes * given.num_gpus * GPU_MEMORY_UTILIZATION) - geometry.weight_bytes
        )
        source = place = (
            f"{GPU_MEMORY_UTILIZATION:.0%} of {count}{gpu.name} less "
            f"{geometry.weight_bytes / 2**30:.1f} GiB of weights of {geometry.name}"
        )
        cure = "give another --gpu, more --num-gpus, or --memory"
    block_bytes = bytes_per_token * given.block_size
    num_blocks = memory_bytes // block_bytes
    if num_blocks < 1:
        raise InvalidInput(
            f"{place} has no room for one block of {given.block_size} tokens of {geometry.name}, "
            f"{block_bytes:,} bytes: {cure}"
        )
    if num_blocks > MOST:
        raise InvalidInput(
            f"{place} has room for {num_blocks:,} blocks of {given.block_size} tokens, and "
            f"{MOST:,} is the most: give less memory or a larger --block-size"
        )
    return _KVMemory(num_blocks, bytes_per_token, source)


def _step_time(given: _Given, geometry: ModelGeometry) -> StepTime:
    from pagedkv.cli.quantities import parse_seconds
    from pagedkv.simulate.gpus import gpu_by_name
    from pagedkv.simulate.step_time import ONE_STEP, measured_step_time, roofline_step_time

    if given.by_step:
        return ONE_STEP
    if given.prefill_rate is None or given.step_time is None:
        return roofline_step_time(gpu_by_name(given.gpu), geometry, num_gpus=given.num_gpus)
    return measured_step_time(
        prefill_rate_tokens_per_s=given.prefill_rate,
        base_s=parse_seconds(given.step_time, option="--step-time"),
    )


def _config(
    given: _Given,
    trace: Trace,
    geometry: ModelGeometry,
    memory: _KVMemory,
    step_time: StepTime,
    horizon_s: float,
) -> tuple[SimulationConfig, list[str]]:
    from pagedkv.scheduling.limits import SchedulerConfig
    from pagedkv.simulate.simulator import SimulationConfig

    remarks = list(geometry.remarks)
    if trace.recorded_with is not None:
        remarks.append("what was not given here is as it was in the recorded run")
    if given.by_step:
        remarks.append("time is counted in steps of the recorded run: 1 s is one step")
    if given.trace == STANDARD_OUTPUT:  # the same sign stands for standard input
        remarks.append("the trace came through standard input: running it again needs it there")
    max_model_len = given.max_model_len
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    if max_model_len is None:
        max_model_len = geometry.max_model_len or longest
        if longest > max_model_len:
            remarks.append(
                f"the longest request has {longest:,} tokens, {geometry.name} serves "
                f"{max_model_len:,}: simulated as if it served {longest:,}; --max-model-len "
                f"{max_model_len} refuses what is longer"
            )
            max_model_len = longest
    config = SimulationConfig(
        num_blocks=memory.num_blocks,
        block_size=given.block_size,
        step_time=step_time,
        scheduler=SchedulerConfig(
            max_num_seqs=given.max_num_seqs,
            max_num_batched_tokens=given.max_num_batched_tokens,
            chunked_prefill=given.chunked_prefill,
            watermark=given.watermark,
        ),
        schemes=_schemes(given),
        placement=given.placement,
        prefix_caching=given.prefix_caching,
        max_model_len=max_model_len,
        num_samples=given.samples,
        horizon_s=horizon_s,
    )
    return config, remarks


def _schemes(given: _Given) -> tuple[str, ...]:
    from pagedkv.simulate.simulator import SCHEMES

    wanted = (Scheme.PAGED.value,) if given.by_step else given.schemes
    return tuple(s for s in SCHEMES if not wanted or s in wanted)


def _settings(
    given: _Given,
    trace: Trace,
    geometry: ModelGeometry,
    memory: _KVMemory,
    config: SimulationConfig,
) -> Settings:
    """Every setting that had a say, by the name of its flag, defaults filled in."""
    from pagedkv.simulate.gpus import gpu_by_name
    from pagedkv.simulate.workloads import WORKLOADS

    settings: Settings = {"version": __version__}
    if given.trace is None:
        for_all_of_it = given.requests is None and given.duration is not None
        settings |= {
            "workload": trace.name,
            "requests": "as many as come within --duration" if for_all_of_it else len(trace),
            "rate": given.rate or WORKLOADS[trace.name].default_rate_per_s,
            "arrivals": given.arrivals,
            "seed": given.seed,
        }
    else:
        settings |= {
            "trace": given.trace,
            "requests": "all" if given.requests is None else given.requests,
        }
        if given.by_step:
            settings["by-step"] = True
    settings["duration"] = given.duration or "until all are served"
    settings |= _memory_settings(given.model, geometry, memory, config)
    if not ((given.is_measured or given.by_step) and given.sizes_memory):
        settings |= {"gpu": gpu_by_name(given.gpu).name, "num-gpus": given.num_gpus}
    if given.is_measured:
        settings |= {"prefill-rate": given.prefill_rate, "step-time": given.step_time}
    return settings


def _memory_settings(
    model: str, geometry: ModelGeometry, memory: _KVMemory, config: SimulationConfig
) -> Settings:
    """The settings that workloads, traces and presets have in common."""
    return {
        "samples": config.num_samples,
        "memory": memory.source,
        "num-blocks": config.num_blocks,
        "block-size": config.block_size,
        "model": model,
        "kv-dtype": geometry.kv_dtype,
        "max-model-len": config.max_model_len,
        "scheme": ", ".join(config.schemes),
        "placement": config.placement,
        "prefix-caching": config.prefix_caching,
        "max-num-seqs": config.scheduler.max_num_seqs,
        "max-num-batched-tokens": config.scheduler.max_num_batched_tokens,
        "chunked-prefill": config.scheduler.chunked_prefill,
        "watermark": config.scheduler.watermark,
        "time of a step": config.step_time.description,
    }


def _why_none(refused: tuple[str, ...]) -> str:
    return refused[0] if refused else "the time given was over before one finished"


def _command(context: typer.Context) -> str:
    """What was typed, which is what to type again."""
    words = context.obj if isinstance(context.obj, tuple) else ("simulate",)
    return shlex.join(["pagedkv", *words])


# What comes out.


def _write(result: SimulationResult, report: str | None, json: str | None) -> None:
    from pagedkv.simulate.report import write_report
    from pagedkv.simulate.result_json import write_json

    if json is not None and json != STANDARD_OUTPUT:
        write_json(result, json)
    if report is not None:
        write_report(result, report)


def _print(
    result: SimulationResult,
    report: str | None,
    json: str | None,
    console: Console,
) -> None:
    from rich.text import Text

    from pagedkv.simulate import table
    from pagedkv.simulate.result_json import as_json

    written = console
    if json == STANDARD_OUTPUT:
        print(dumps(as_json(result), allow_nan=False))
        written = type(console)(stderr=True, color_system=None)
    else:
        table.print_result(result, console)
        if result.comparison:
            console.print()
            table.print_paper_comparison(result.comparison, console)
        if json is not None:
            console.print(Text(f"Wrote {json}"))
    if report is not None:
        written.print(Text(f"Wrote {report}: open it in a browser"))


def _console(colour: bool, *, stderr: bool = False) -> Console:
    from rich.console import Console

    plain = not colour or bool(os.environ.get("NO_COLOR"))
    return Console(color_system=None if plain else "auto", highlight=False, stderr=stderr)


class _Bars:
    """One bar at a time, for what is being done now."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._what = ""
        self._task = None

    def __call__(self, what: str, done: float) -> None:
        """`what` is done to the share `done`, 0 to 1."""
        self._show(what, total=1.0)
        self._progress.update(self._task, completed=done)

    def wait(self, what: str) -> None:
        """`what` takes as long as it takes."""
        self._show(what, total=None)

    def _show(self, what: str, *, total: float | None) -> None:
        if what != self._what:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._what = what
            self._task = self._progress.add_task(what, total=total)


@contextmanager
def _progress(colour: bool) -> Iterator[_Bars]:
    """Bars on standard error where that is a terminal, gone in the end."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description:16}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=_console(colour, stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        yield _Bars(progress)
