"""The runs of `pagedkv simulate`: a simulation, a what-if, a published experiment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagedkv._version import __version__
from pagedkv.cli.simulate_request import Arrivals, Given, Scheme, as_recorded
from pagedkv.cli.simulate_setup import (
    KVMemory,
    Settings,
    config_of,
    horizon_s_of,
    is_timed_by_its_own_steps,
    measured_ttft_s_of,
    memory_of,
    memory_settings,
    settings_of,
    step_time_of,
    trace_of,
)
from pagedkv.cli.terminal import Bars
from pagedkv.cli.what_if import Choice, Variation, base_values, choices
from pagedkv.errors import InvalidInput

if TYPE_CHECKING:
    from pagedkv.simulate.model_geometry import ModelGeometry
    from pagedkv.simulate.results import SchemeResult, SimulationResult, WhatIfResult
    from pagedkv.simulate.simulator import SimulationConfig
    from pagedkv.simulate.trace import Trace


@dataclass(frozen=True)
class _Setup:
    """What a run needs, all of it known before anything is simulated."""

    given: Given
    trace: Trace
    geometry: ModelGeometry
    memory: KVMemory
    config: SimulationConfig
    is_timed_by_itself: bool
    """Whether the steps of a recorded run say how long steps take."""
    remarks: tuple[str, ...]

    @property
    def settings(self) -> Settings:
        return settings_of(
            self.given,
            self.trace,
            self.geometry,
            self.memory,
            self.config,
            is_timed_by_itself=self.is_timed_by_itself,
        )


def run_simulation(
    given: Given, typed: dict[str, str], command: str, bars: Bars
) -> SimulationResult:
    """Replay the traffic on every scheme asked for."""
    from pagedkv.simulate.headline import first_tokens_after
    from pagedkv.simulate.results import SimulationResult
    from pagedkv.simulate.simulator import simulate_scheme, trace_curve

    setup = _set_up(given, typed, bars)
    trace, config = setup.trace, setup.config
    try:
        schemes = tuple(simulate_scheme(trace, config, s, bars) for s in config.schemes)
        bars.wait("hit-rate curve")
        curve = trace_curve(trace, block_size=config.block_size)
    except MemoryError as error:
        raise _too_large(config.num_blocks, len(trace)) from error
    _refuse_if_none_was_served(trace, schemes)
    measured = measured_ttft_s_of(setup.given, trace)
    remarks = setup.remarks
    paged = next((scheme for scheme in schemes if scheme.scheme == "paged"), None)
    if measured is not None and paged is not None:
        remarks = (
            f"measured in the recorded run: {first_tokens_after(measured)}; simulated on paged "
            f"memory: {first_tokens_after(paged.ttft_s)}",
            *remarks,
        )
    return SimulationResult(
        command=command,
        settings=setup.settings,
        trace_name=trace.name,
        trace_format=trace.format,
        num_requests=trace.num_requests,
        num_answers=len(trace) * config.num_samples,
        prompt_tokens=trace.num_prompt_tokens,
        output_tokens=int(trace.output_tokens.sum()) * config.num_samples,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        bytes_per_token=setup.memory.bytes_per_token,
        schemes=schemes,
        curve=curve,
        remarks=remarks,
        measured_ttft_s=measured,
    )


def run_what_if(
    given: Given,
    variations: tuple[Variation, ...],
    typed: dict[str, str],
    command: str,
    bars: Bars,
) -> WhatIfResult:
    """Replay the traffic on paged memory at each choice of the varied settings.

    The settings as they are come first, unless one of the choices is just these.
    """
    from pagedkv.simulate.headline import NO_PREFIX_IDS
    from pagedkv.simulate.results import WhatIfResult, WhatIfRow
    from pagedkv.simulate.simulator import simulate_scheme

    setup = _set_up(replace(given, schemes=(Scheme.PAGED.value,)), typed, bars)
    base = setup.config
    wanted: dict[tuple[SimulationConfig, float], tuple[str, ...]] = {}
    again = []
    for choice in choices(variations, setup.given, base.num_blocks):
        try:
            key = _config_at(base, choice), choice.load
        except InvalidInput as error:
            named = zip(variations, choice.values)
            told = " ".join(f"--what-if {v.name}={value}" for v, value in named)
            raise InvalidInput(f"{told}: {error}") from error
        if wanted.setdefault(key, choice.values) != choice.values:
            again.append(choice.values)
    if (base, 1.0) not in wanted:
        wanted = {(base, 1.0): base_values(variations, setup.given, base.num_blocks), **wanted}
    rows = []
    for (config, load), values in wanted.items():
        trace = setup.trace if load == 1.0 else setup.trace.at_load(load)
        try:
            scheme = simulate_scheme(trace, config, "paged")
        except MemoryError as error:
            raise _too_large(config.num_blocks, len(trace)) from error
        is_base = config == base and load == 1.0
        rows.append(WhatIfRow(values, config.num_blocks, config.block_size, scheme, is_base))
        bars("what if", len(rows) / len(wanted))
    _refuse_if_none_was_served(setup.trace, tuple(row.scheme for row in rows))
    remarks = setup.remarks if setup.trace.has_prefix_ids else (*setup.remarks, NO_PREFIX_IDS)
    is_timed = given.by_step or given.is_measured or setup.is_timed_by_itself
    if setup.trace.recorded_with is not None and not is_timed:
        remarks = (_simulated_times(setup, typed), *remarks)
    if again:
        names = "; ".join(
            ", ".join(f"{v.name} {value}" for v, value in zip(variations, values))
            for values in again[:3]
        )
        more = f" and {len(again) - 3:,} more" if len(again) > 3 else ""
        remarks = (*remarks, f"asked for twice in other words, and listed once: {names}{more}")
    return WhatIfResult(
        command=command,
        settings=setup.settings,
        trace_name=setup.trace.name,
        trace_format=setup.trace.format,
        num_requests=setup.trace.num_requests,
        num_answers=len(setup.trace) * base.num_samples,
        prompt_tokens=setup.trace.num_prompt_tokens,
        output_tokens=int(setup.trace.output_tokens.sum()) * base.num_samples,
        num_blocks=base.num_blocks,
        block_size=base.block_size,
        bytes_per_token=setup.memory.bytes_per_token,
        names=tuple(variation.name for variation in variations),
        rows=tuple(rows),
        remarks=remarks,
        measured_ttft_s=measured_ttft_s_of(setup.given, setup.trace),
    )


def _simulated_times(setup: _Setup, typed: dict[str, str]) -> str:
    """On what a recorded run is simulated, where its own steps do not say how long they take."""
    assumed = [f"--{name}" for name in ("gpu", "model") if name not in typed]
    whence = f", which {' and '.join(assumed)} would change" if assumed else ""
    return (
        f"times are simulated for {setup.settings['gpu']} with {setup.geometry.name}{whence}; how "
        "long a step takes also decides how many run at once, and so has a say in hits, "
        "preemptions and waste: --by-step repeats the run's own steps"
    )


def _set_up(given: Given, typed: dict[str, str], bars: Bars) -> _Setup:
    from pagedkv.simulate.model_geometry import model_geometry
    from pagedkv.simulate.step_time_fit import fitted_step_time

    geometry = model_geometry(given.model, kv_dtype=given.kv_dtype)
    step_time = step_time_of(given, geometry)
    memory = memory_of(given, geometry, model_is_given="model" in typed)
    horizon_s = horizon_s_of(given)
    bars.wait("reading" if given.trace else "drawing requests")
    trace = trace_of(given, horizon_s)
    if trace.recorded_with is not None:
        given = as_recorded(given, typed, trace)
        memory = memory_of(given, geometry, model_is_given="model" in typed)
    timed = []
    fit = None
    if trace.measured_steps is not None and is_timed_by_its_own_steps(given, trace, typed):
        try:
            fit = fitted_step_time(trace.measured_steps)
        except InvalidInput as why:
            timed.append(f"steps are not timed by this recording: {why}")
        else:
            step_time = fit.step_time
            timed.append(fit.in_words)
    config, remarks = config_of(given, trace, geometry, memory, step_time, horizon_s)
    remarks = [*timed, *trace.remarks, *remarks]
    return _Setup(given, trace, geometry, memory, config, fit is not None, tuple(remarks))


def _config_at(base: SimulationConfig, choice: Choice) -> SimulationConfig:
    """The configuration with the settings of a choice; the rest is as it was."""
    given = choice.given
    return replace(
        base,
        num_blocks=choice.num_blocks,
        block_size=given.block_size,
        prefix_caching=given.prefix_caching,
        scheduler=replace(
            base.scheduler,
            max_num_seqs=given.max_num_seqs,
            max_num_batched_tokens=given.max_num_batched_tokens,
            chunked_prefill=given.chunked_prefill,
            watermark=given.watermark,
        ),
    )


def _too_large(num_blocks: int, num_requests: int) -> InvalidInput:
    return InvalidInput(
        f"{num_blocks:,} blocks and {num_requests:,} requests are more than fits into this "
        "machine: simulate fewer"
    )


def _refuse_if_none_was_served(trace: Trace, schemes: tuple[SchemeResult, ...]) -> None:
    if not any(scheme.finished for scheme in schemes):
        refused = schemes[0].refused
        why = refused[0] if refused else "the time given was over before one finished"
        raise InvalidInput(f"{trace.name}: no request was served: {why}")


def run_preset(preset: str, seed: int, command: str, bars: Bars) -> SimulationResult:
    """Repeat a published experiment."""
    from pagedkv.simulate import paper
    from pagedkv.simulate.model_geometry import model_geometry
    from pagedkv.simulate.results import SimulationResult

    geometry = model_geometry(paper.MODEL, kv_dtype=paper.KV_DTYPE)
    config = paper.setting(bytes_per_token=geometry.kv_bytes_per_token)
    comparison = paper.compare(config, seed=seed, progress=bars)
    trace = comparison.sharegpt
    memory = KVMemory(
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
        settings=settings | memory_settings(paper.MODEL, geometry, memory, config),
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
