"""`pagedkv simulate`: replay traffic, see where the memory goes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.cli.files import STANDARD_STREAM, check_writable, refuse_overwriting, same_file
from pagedkv.cli.simulate_request import (
    Arrivals,
    Given,
    KVDtype,
    Placement,
    Preset,
    Scheme,
    refuse_conflicts,
    refuse_with_preset,
    refuse_with_what_if,
    typed_parameters,
)
from pagedkv.cli.simulate_runs import run_preset, run_simulation, run_what_if
from pagedkv.cli.simulate_setup import (
    DEFAULT_GPU,
    DEFAULT_MODEL,
    DEFAULT_REQUESTS,
    DEFAULT_WORKLOAD,
    GPU_MEMORY_UTILIZATION,
)
from pagedkv.cli.terminal import console_with, progress
from pagedkv.cli.what_if import NAMES, parse_variations
from pagedkv.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkv.simulate.results import SimulationResult, WhatIfResult

_TRAFFIC, _MEMORY, _SCHEDULER, _TIME, _OUTPUT = (
    "Traffic",
    "Memory",
    "Scheduler",
    "Time",
    "Output",
)


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
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="Replay at each of these values too, on paged memory, and compare: "
            f"{', '.join(NAMES[:-1])} or {NAMES[-1]}; 2x is twice what it was. May be given "
            "several times: every combination.",
            show_default=False,
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
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
            help="Share of the blocks, from 0 to below 1, that admission leaves free.",
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

    console = console_with(colour)
    if explain:
        table.explain(console)
        return
    typed = typed_parameters(context)
    report_path = _report_path(report, no_report, typed)
    check_writable("--report", report_path)
    check_writable("--json", json)
    if report_path is not None and json is not None and same_file(report_path, json):
        raise InvalidInput(f"--report and --json are both {json}: give two names")
    refuse_overwriting(
        {"--report": report_path, "--json": json},
        {"TRACE": trace, "--model": _model_file(model)},
    )
    variations = parse_variations(what_if or ())
    result: SimulationResult | WhatIfResult
    with progress(colour) as bars:
        if preset is not None:
            refuse_with_preset(preset, typed)
            result = run_preset(preset, seed, _command(context), bars)
        else:
            given = Given(
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
            refuse_conflicts(given, typed)
            if variations:
                refuse_with_what_if(given, variations, typed)
                result = run_what_if(given, variations, typed, _command(context), bars)
            else:
                result = run_simulation(given, typed, _command(context), bars)
        bars.wait("writing")
        forms = _forms_of(result)
        _write(forms, report_path, json)
    # Only now, so that a reader who closes the pipe early has the files all the same.
    _print(forms, report_path, json, console)


def _report_path(report: str, no_report: bool, typed: dict[str, str]) -> str | None:
    if not no_report:
        if report == STANDARD_STREAM:
            raise InvalidInput("--report -: a report is a page for a browser, name a file")
        return report
    if "report" in typed:
        raise InvalidInput("--report and --no-report: give one")
    return None


def _model_file(model: str) -> str | None:
    """The config.json that is read, or None for a model that is built in."""
    from pagedkv.simulate.model_geometry import config_file

    path = config_file(model)
    return None if path is None else str(path)


def _command(context: typer.Context) -> str:
    """What was typed, which is what to type again."""
    words = context.obj if isinstance(context.obj, tuple) else ("simulate",)
    return shlex.join(["pagedkv", *words])


@dataclass(frozen=True)
class _Forms:
    """What can be made of a result, of a simulation as of a what-if."""

    as_json: Callable[[], dict[str, Any]]
    as_page: Callable[[], str]
    print_tables: Callable[[Console], None]


def _forms_of(result: SimulationResult | WhatIfResult) -> _Forms:
    from pagedkv.simulate.report import report_html
    from pagedkv.simulate.result_json import as_json
    from pagedkv.simulate.results import WhatIfResult
    from pagedkv.simulate.table import print_paper_comparison, print_result
    from pagedkv.simulate.what_if_json import what_if_as_json
    from pagedkv.simulate.what_if_report import what_if_html
    from pagedkv.simulate.what_if_table import print_what_if

    if isinstance(result, WhatIfResult):
        return _Forms(
            partial(what_if_as_json, result),
            partial(what_if_html, result),
            partial(print_what_if, result),
        )

    def print_tables(console: Console) -> None:
        print_result(result, console)
        if result.comparison:
            console.print()
            print_paper_comparison(result.comparison, console)

    return _Forms(
        partial(as_json, result),
        partial(report_html, result),
        print_tables,
    )


def _write(forms: _Forms, report: str | None, json: str | None) -> None:
    """Both files or, whatever interrupts it, neither."""
    from pagedkv.simulate.report_page import page_bytes
    from pagedkv.simulate.result_json import json_bytes
    from pagedkv.simulate.whole_file import write_together

    contents: dict[str | os.PathLike[str], bytes] = {}
    if json is not None and json != STANDARD_STREAM:
        contents[json] = json_bytes(forms.as_json())
    if report is not None:
        contents[report] = page_bytes(forms.as_page())
    write_together(contents)


def _print(forms: _Forms, report: str | None, json: str | None, console: Console) -> None:
    from rich.text import Text

    written = console
    if json == STANDARD_STREAM:
        print(dumps(forms.as_json(), allow_nan=False))
        written = type(console)(stderr=True, color_system=None)
    else:
        forms.print_tables(console)
        if json is not None:
            console.print(Text(f"Wrote {json}"))
    if report is not None:
        written.print(Text(f"Wrote {report}: open it in a browser"))
