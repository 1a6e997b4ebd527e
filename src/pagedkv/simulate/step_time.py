"""How long one step of the engine takes: from a roofline, or from rates that were measured.

One formula serves all (`docs/step-time.md` derives it)::

    step = base + sequence * num_running + prefill_token * prefill_tokens
           + decode_token * decode_tokens + read_token * context_tokens_read
           + pair * attention_token_pairs + max(compute, memory)

    compute = token_compute * (prefill_tokens + decode_tokens)
              + pair_compute * attention_token_pairs
    memory  = dense_weights + expert_weights * touched + context_token * context_tokens_read
    touched = 1 - (1 - routed_share) ^ (prefill_tokens + decode_tokens)

A roofline leaves the rates of tokens and pairs at 0; measured rates leave `compute` and `memory`
at 0. `step_time_fit` finds rates in the steps of a recorded run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled
from pagedkv.errors import InvalidInput
from pagedkv.simulate.gpus import GPU
from pagedkv.simulate.model_geometry import ModelGeometry

COMPUTE_EFFICIENCY = 0.6
"""Share of the peak arithmetic that the matrix products of a prefill reach."""

BANDWIDTH_EFFICIENCY = 0.8
"""Share of the peak memory bandwidth that reading weights and KV reaches."""

OVERHEAD_S = 0.001
"""Seconds. What a step costs beside its kernels: scheduling, launches, sampling."""

MOST_S = 1e6
"""Seconds. A step that takes longer is taken for a slip of the keyboard; the sums stay finite."""

LEAST_STEP_S = 1e-9
PREFILL_RATES_TOKENS_PER_S = (1e-3, 1e12)
LEAST_EFFICIENCY = 1e-6


@dataclass(frozen=True)
class StepTime:
    """The coefficients of the formula above, all in seconds but `routed_share` (0 to 1).

    Made by `roofline_step_time`, `measured_step_time` or `fitted_step_time`; `description` says
    from what.
    """

    description: str
    base_s: float = 0.0
    sequence_s: float = 0.0
    prefill_token_s: float = 0.0
    token_compute_s: float = 0.0
    pair_compute_s: float = 0.0
    dense_weights_s: float = 0.0
    expert_weights_s: float = 0.0
    routed_share: float = 0.0
    context_token_s: float = 0.0
    decode_token_s: float = 0.0
    read_token_s: float = 0.0
    pair_s: float = 0.0

    def params(self) -> NDArray[np.float64]:
        """float64 [12], what `step_time_s` takes: the coefficients in their order above."""
        return np.array(
            [
                self.base_s,
                self.sequence_s,
                self.prefill_token_s,
                self.token_compute_s,
                self.pair_compute_s,
                self.dense_weights_s,
                self.expert_weights_s,
                self.routed_share,
                self.context_token_s,
                self.decode_token_s,
                self.read_token_s,
                self.pair_s,
            ],
            np.float64,
        )


ONE_STEP = StepTime("one step of the recorded run", base_s=1.0)
"""A step is a step, whatever is in it: for a run that is repeated step by step."""


def roofline_step_time(
    gpu: GPU,
    model: ModelGeometry,
    *,
    num_gpus: int = 1,
    compute_efficiency: float = COMPUTE_EFFICIENCY,
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY,
    overhead_s: float = OVERHEAD_S,
    sequence_s: float = 0.0,
) -> StepTime:
    """Step time of `model` on `num_gpus` GPUs that share its weights and KV evenly.

    Efficiencies are shares of the peak, from 1e-6 to 1; `overhead_s` seconds a step and
    `sequence_s` seconds a running sequence come on top. What GPUs tell each other costs
    nothing here. Raises `InvalidInput` for a value out of range.
    """
    if num_gpus < 1:
        raise InvalidInput(f"num_gpus is {num_gpus}: it must be at least 1")
    for name, share in (
        ("compute_efficiency", compute_efficiency),
        ("bandwidth_efficiency", bandwidth_efficiency),
    ):
        if not LEAST_EFFICIENCY <= share <= 1:
            raise InvalidInput(f"{name} is {share:g}: it must be from {LEAST_EFFICIENCY:g} to 1")
    _check_seconds("overhead_s", overhead_s)
    _check_seconds("sequence_s", sequence_s)
    flops_per_s = gpu.flops_per_s * num_gpus * compute_efficiency
    bytes_per_s = gpu.bandwidth_bytes_per_s * num_gpus * bandwidth_efficiency
    count = "" if num_gpus == 1 else f"{num_gpus} x "
    return StepTime(
        description=f"roofline of {count}{gpu.name} with {model.name}",
        base_s=overhead_s,
        sequence_s=sequence_s,
        token_compute_s=2 * model.num_active_parameters / flops_per_s,
        pair_compute_s=model.attention_flops_per_pair / flops_per_s,
        dense_weights_s=(model.weight_bytes - model.expert_weight_bytes) / bytes_per_s,
        expert_weights_s=model.expert_weight_bytes / bytes_per_s,
        routed_share=model.routed_share,
        context_token_s=model.kv_bytes_per_token / bytes_per_s,
    )


def measured_step_time(
    *, prefill_rate_tokens_per_s: float, base_s: float, sequence_s: float = 0.0
) -> StepTime:
    """Step time from three measured figures.

    `prefill_rate_tokens_per_s`: prompt tokens computed a second; `base_s`: seconds that any step
    takes, a decode step with it; `sequence_s`: seconds more for each running sequence. Raises
    `InvalidInput` for a rate below 1e-3 or above 1e12 and for times that no step takes: time
    always passes, and stays finite.
    """
    least, most = PREFILL_RATES_TOKENS_PER_S
    if not least <= prefill_rate_tokens_per_s <= most:
        raise InvalidInput(
            f"prefill rate is {prefill_rate_tokens_per_s:g} tokens/s: it must be from {least:g} to "
            f"{most:g}"
        )
    if not LEAST_STEP_S <= base_s <= MOST_S:
        raise InvalidInput(
            f"step time is {base_s:g} s: it must be from {LEAST_STEP_S:g} to {MOST_S:g}"
        )
    _check_seconds("sequence_s", sequence_s)
    return StepTime(
        description=(
            f"measured: {prefill_rate_tokens_per_s:g} prompt tokens/s, {base_s:g} s a step, "
            f"{sequence_s:g} s a running sequence"
        ),
        base_s=base_s,
        sequence_s=sequence_s,
        prefill_token_s=1 / prefill_rate_tokens_per_s,
    )


@compiled
def step_time_s(
    params: NDArray[np.float64],
    prefill_tokens: int,
    decode_tokens: int,
    context_tokens_read: int,
    attention_token_pairs: int,
    num_running: int,
) -> float:
    """Seconds that one step takes.

    `params` float64 [12] from `StepTime.params`. `prefill_tokens` and `decode_tokens` are
    computed in this step; `context_tokens_read` sums, over the sequences in the step, the
    tokens whose keys and values their attention reads, those of this step included;
    `attention_token_pairs` sums the key tokens that each query token attends to: a decode at
    length `n` adds `n`, a prefill chunk of `m` after `c` earlier tokens `m*c + m*(m + 1)/2`.
    """
    tokens = prefill_tokens + decode_tokens
    compute = params[3] * tokens + params[4] * attention_token_pairs
    touched = 1.0 - (1.0 - params[7]) ** float(tokens)
    memory = params[5] + params[6] * touched + params[8] * context_tokens_read
    measured = (
        params[1] * num_running
        + params[2] * prefill_tokens
        + params[9] * decode_tokens
        + params[10] * context_tokens_read
        + params[11] * attention_token_pairs
    )
    return float(params[0] + measured + max(compute, memory))


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value <= MOST_S:
        raise InvalidInput(f"{name} is {value:g} s: it must be from 0 to {MOST_S:g}")
