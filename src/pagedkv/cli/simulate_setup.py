"""From what was asked of `pagedkv simulate` to the traffic, the memory and the model's speed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pagedkv._version import __version__
from pagedkv.cli.files import STANDARD_STREAM
from pagedkv.cli.simulate_request import MOST, RECORDED, Given, Scheme
from pagedkv.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Collection

    from pagedkv.simulate.model_geometry import ModelGeometry
    from pagedkv.simulate.results import Percentiles
    from pagedkv.simulate.simulator import SimulationConfig
    from pagedkv.simulate.step_time import StepTime
    from pagedkv.simulate.trace import Trace

DEFAULT_GPU = "A100-40GB"
DEFAULT_MODEL = "llama-3-8b"
DEFAULT_WORKLOAD = "chat"
DEFAULT_REQUESTS = 2_000
GPU_MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory that an engine takes; what the weights leave of it is the KV memory."""

_RATES = ("gpu", "num_gpus", "model", "prefill_rate", "step_time")
"""Parameters that say how long steps take, or on what."""

Settings: TypeAlias = dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class KVMemory:
    """The memory to simulate, and in words where its size is from."""

    num_blocks: int
    bytes_per_token: int | None  # None where only a number of blocks is known
    source: str


def horizon_s_of(given: Given) -> float:
    """When the simulated time is over, in seconds; infinite unless given."""
    from pagedkv.cli.quantities import parse_seconds

    if given.duration is None:
        return math.inf
    return parse_seconds(given.duration, option="--duration")


def trace_of(given: Given, horizon_s: float) -> Trace:
    """The requests: those of the file, or drawn from a built-in workload."""
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


def memory_of(given: Given, geometry: ModelGeometry, *, model_is_given: bool) -> KVMemory:
    """How many blocks there are.

    Bytes a token are known where a model was named, and not where the one that nobody asked for
    times the steps of a memory that is given in blocks.
    """
    from pagedkv.cli.quantities import is_bare, parse_bytes
    from pagedkv.simulate.gpus import gpu_by_name

    bytes_per_token = geometry.kv_bytes_per_token
    if given.num_blocks is not None:
        known = bytes_per_token if model_is_given and bytes_per_token > 0 else None
        return KVMemory(given.num_blocks, known, "from --num-blocks")
    if bytes_per_token == 0:
        raise InvalidInput(f"model {geometry.name} keeps no keys and values: nothing to simulate")
    if given.memory is not None:
        memory_bytes = parse_bytes(given.memory, option="--memory")
        source = given.memory
        place = f"--memory {given.memory}"
        cure, less = "give more memory or a smaller --block-size", "give less memory"
        if is_bare(given.memory):
            place += f" ({memory_bytes:,} bytes, without a unit)"
            cure = f"for GiB write --memory {given.memory.strip()}GiB"
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
        cure, less = "give another --gpu, more --num-gpus, or --memory", "give fewer --num-gpus"
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
            f"{MOST:,} is the most: {less} or a larger --block-size"
        )
    return KVMemory(num_blocks, bytes_per_token, source)


def step_time_of(given: Given, geometry: ModelGeometry) -> StepTime:
    """How long steps take: as measured, or by the roofline of the GPU, or one second each."""
    from pagedkv.cli.quantities import parse_seconds
    from pagedkv.simulate.gpus import gpu_by_name
    from pagedkv.simulate.step_time import (
        LEAST_STEP_S,
        MOST_S,
        ONE_STEP,
        measured_step_time,
        roofline_step_time,
    )

    if given.by_step:
        return ONE_STEP
    if given.prefill_rate is None or given.step_time is None:
        return roofline_step_time(gpu_by_name(given.gpu), geometry, num_gpus=given.num_gpus)
    base_s = parse_seconds(given.step_time, option="--step-time")
    if not LEAST_STEP_S <= base_s <= MOST_S:
        raise InvalidInput(
            f"--step-time {given.step_time}: give {LEAST_STEP_S:g} to {MOST_S:g} seconds"
        )
    return measured_step_time(prefill_rate_tokens_per_s=given.prefill_rate, base_s=base_s)


def is_timed_by_its_own_steps(given: Given, trace: Trace, typed: Collection[str]) -> bool:
    """Whether the steps of a recorded run are to say how long steps take.

    Where they are known, unless steps are repeated, or whoever asks names rates or a machine.
    """
    if trace.measured_steps is None or given.by_step:
        return False
    return not any(name in typed for name in _RATES)


def measured_ttft_s_of(given: Given, trace: Trace) -> Percentiles | None:
    """How long requests of a recorded run waited for first tokens; None where that is not known,
    or where it is not that run which is simulated, whole and at its own settings."""
    import numpy as np

    from pagedkv.simulate.results import Percentiles

    waited_s = trace.measured_ttft_s
    is_whole = given.requests is None and given.duration is None and given.samples == 1
    if waited_s is None or not is_whole:
        return None
    for option, value in (trace.recorded_with or {}).items():
        name, _ = RECORDED.get(option, ("", None))
        if name and getattr(given, name) != value:
            return None
    return Percentiles(*(float(p) for p in np.nanpercentile(waited_s, (50, 90, 99))))


def config_of(
    given: Given,
    trace: Trace,
    geometry: ModelGeometry,
    memory: KVMemory,
    step_time: StepTime,
    horizon_s: float,
) -> tuple[SimulationConfig, list[str]]:
    """What the simulator is told, and remarks on what was not as asked."""
    from pagedkv.simulate.simulator import SimulationConfig

    remarks = list(geometry.remarks)
    if trace.recorded_with is not None:
        remarks.append("what was not given here is as it was in the recorded run")
    if given.by_step:
        remarks.append("time is counted in steps of the recorded run: 1 s is one step")
    if given.trace == STANDARD_STREAM:
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
        scheduler=given.scheduler_config(),
        schemes=_schemes(given),
        placement=given.placement,
        prefix_caching=given.prefix_caching,
        max_model_len=max_model_len,
        num_samples=given.samples,
        horizon_s=horizon_s,
    )
    return config, remarks


def _schemes(given: Given) -> tuple[str, ...]:
    from pagedkv.simulate.simulator import SCHEMES

    wanted = (Scheme.PAGED.value,) if given.by_step else given.schemes
    return tuple(s for s in SCHEMES if not wanted or s in wanted)


def settings_of(
    given: Given,
    trace: Trace,
    geometry: ModelGeometry,
    memory: KVMemory,
    config: SimulationConfig,
    *,
    is_timed_by_itself: bool = False,
) -> Settings:
    """Every setting that had a say, by the name of its flag, defaults filled in.

    `is_timed_by_itself`: whether the steps of a recorded run say how long steps take.
    """
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
    settings |= memory_settings(given.model, geometry, memory, config)
    needs_no_gpu = given.is_measured or given.by_step or is_timed_by_itself
    if not (needs_no_gpu and given.sizes_memory):
        settings |= {"gpu": gpu_by_name(given.gpu).name, "num-gpus": given.num_gpus}
    if is_timed_by_itself and memory.bytes_per_token is None:
        for name in ("model", "kv-dtype"):  # that nobody named, and that had no say
            del settings[name]
    if given.is_measured:
        settings |= {"prefill-rate": given.prefill_rate, "step-time": given.step_time}
    return settings


def memory_settings(
    model: str, geometry: ModelGeometry, memory: KVMemory, config: SimulationConfig
) -> Settings:
    """The settings that workloads, traces and presets have in common."""
    placed = {} if config.schemes == ("paged",) else {"placement": config.placement}
    return {
        "samples": config.num_samples,
        "memory": memory.source,
        "num-blocks": config.num_blocks,
        "block-size": config.block_size,
        "model": model,
        "kv-dtype": geometry.kv_dtype,
        "max-model-len": config.max_model_len,
        "scheme": ", ".join(config.schemes),
        **placed,
        "prefix-caching": config.prefix_caching,
        "max-num-seqs": config.scheduler.max_num_seqs,
        "max-num-batched-tokens": config.scheduler.max_num_batched_tokens,
        "chunked-prefill": config.scheduler.chunked_prefill,
        "watermark": config.scheduler.watermark,
        "time of a step": config.step_time.description,
    }
