"""What is asked of `pagedkv simulate`: its choices, what may not be said together, and what a
recorded run says where the command line says nothing.

All of it is looked at before anything slow begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from pagedkv.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.cli.what_if import Variation
    from pagedkv.scheduling.limits import SchedulerConfig
    from pagedkv.simulate.trace import Trace

MOST = 2**31 - 1
"""The largest count that an option takes: block ids are int32."""


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


_OF_A_WORKLOAD = ("workload", "rate", "arrivals", "seed")
_IN_SECONDS = ("samples", "placement", "gpu", "num_gpus", "prefill_rate", "step_time")
_WITH_A_PRESET = ("preset", "seed", "report", "no_report", "json", "explain", "colour")
"""Parameters that a trace excludes, those that `--by-step` excludes, and the only ones that a
preset leaves open."""

RECORDED: dict[str, tuple[str, type]] = {
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


@dataclass(frozen=True)
class Given:
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

    def scheduler_config(self) -> SchedulerConfig:
        """What a step may hold. Raises `InvalidInput`."""
        from pagedkv.scheduling.limits import SchedulerConfig

        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunked_prefill=self.chunked_prefill,
            watermark=self.watermark,
        )

    @property
    def sizes_memory(self) -> bool:
        """Whether the memory was given, so that no GPU has to tell it."""
        return self.memory is not None or self.num_blocks is not None


def typed_parameters(context: typer.Context) -> dict[str, str]:
    """The parameters that the command line names, each with the name it has there."""
    typed = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            is_argument = parameter.param_type_name == "argument"
            flags = parameter.opts
            if context.params[name] is False and parameter.secondary_opts:
                flags = parameter.secondary_opts
            typed[name] = "TRACE" if is_argument else flags[0]
    return typed


def refuse_with_preset(preset: str, typed: dict[str, str]) -> None:
    """Raise `InvalidInput` for what a preset fixes."""
    too_much = [flag for name, flag in typed.items() if name not in _WITH_A_PRESET]
    if too_much:
        raise InvalidInput(
            f"--preset {preset} fixes everything but --seed and the output: leave out "
            f"{', '.join(too_much)}"
        )


def refuse_with_what_if(
    given: Given, variations: Sequence[Variation], typed: dict[str, str]
) -> None:
    """Raise `InvalidInput` for what belongs to other schemes, or to another kind of time."""
    if given.schemes not in ((), (Scheme.PAGED.value,)):
        raise InvalidInput("--what-if asks about paged memory: leave out other schemes")
    if "placement" in typed:
        raise InvalidInput(f"{typed['placement']} changes nothing on paged memory: leave it out")
    if given.by_step and any(variation.name == "load" for variation in variations):
        raise InvalidInput("--what-if load is about seconds: leave out --by-step")


def refuse_conflicts(given: Given, typed: dict[str, str]) -> None:
    """Raise `InvalidInput` for numbers out of range, and for options that exclude each other."""
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
    _refuse_out_of_range(given)
    if given.trace == "":
        raise InvalidInput(
            "TRACE is empty: give a file, - for standard input, or leave it out for a workload"
        )
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
    _refuse_for_schemes(given, typed)
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


def _refuse_out_of_range(given: Given) -> None:
    from pagedkv.simulate.step_time import PREFILL_RATES_TOKENS_PER_S
    from pagedkv.simulate.workloads import RATES_PER_S

    for option, rate, (least, most), of in (
        ("--rate", given.rate, RATES_PER_S, "requests"),
        ("--prefill-rate", given.prefill_rate, PREFILL_RATES_TOKENS_PER_S, "prompt tokens"),
    ):
        if rate is not None and not least <= rate <= most:
            raise InvalidInput(f"{option} is {rate:g}: give {least:g} to {most:g} {of} a second")
    if given.seed < 0:
        raise InvalidInput(f"--seed is {given.seed}: give 0 or more")
    given.scheduler_config()


def _refuse_for_schemes(given: Given, typed: dict[str, str]) -> None:
    """Raise `InvalidInput` for what only schemes know that are not simulated."""
    if given.schemes and Scheme.PAGED.value not in given.schemes:
        for name in ("prefix_caching", "watermark"):
            if name in typed:
                raise InvalidInput(
                    f"{typed[name]} changes nothing without paged memory: leave it out, or add "
                    "--scheme paged"
                )
    if set(given.schemes) == {Scheme.PAGED.value} and "placement" in typed:
        raise InvalidInput(f"{typed['placement']} changes nothing on paged memory: leave it out")


def as_recorded(given: Given, typed: dict[str, str], trace: Trace) -> Given:
    """The command line with the settings of the recorded run where it says nothing else."""
    taken: dict[str, object] = {}
    for option, value in (trace.recorded_with or {}).items():
        name, kind = RECORDED.get(option, ("", type(None)))
        if not name or name in typed or (name == "num_blocks" and "memory" in typed):
            continue
        if type(value) is not kind:
            raise InvalidInput(
                f"{trace.name}: the run was recorded with {option} {value!r}, which it cannot be: "
                f"give --{option}"
            )
        taken[name] = value
    recorded: Given = replace(given, **taken)  # type: ignore[arg-type]
    refuse_conflicts(recorded, typed)
    return recorded
