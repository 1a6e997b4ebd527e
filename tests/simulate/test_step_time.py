from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from pagedkv.errors import InvalidInput
from pagedkv.simulate.gpus import GPU, gpu_by_name
from pagedkv.simulate.model_geometry import model_geometry
from pagedkv.simulate.step_time import (
    StepTime,
    measured_step_time,
    roofline_step_time,
    step_time_s,
)

# Round numbers: 2 flops a token and weight, 4 bytes a weight.
ROUND_GPU = GPU("round", 1 << 30, 1e12, 1e9, "made up")
ROUND_MODEL = replace(
    model_geometry("opt-13b"),
    name="round",
    num_active_parameters=500_000,
    attention_flops_per_pair=1_000,
    weight_bytes=3_000_000,
    expert_weight_bytes=0,
    routed_share=0.0,
    kv_bytes_per_token=100,
)
EXACT = {"compute_efficiency": 1.0, "bandwidth_efficiency": 1.0, "overhead_s": 0.0}


def seconds(step: StepTime, *, prefill=0, decode=0, context=0, pairs=0, running=0) -> float:
    return step_time_s(step.params(), prefill, decode, context, pairs, running)


def decode_s(gpu: str, model: str, *, batch: int, length: int, num_gpus: int = 1) -> float:
    step = roofline_step_time(gpu_by_name(gpu), model_geometry(model), num_gpus=num_gpus)
    tokens = batch * length
    return seconds(step, decode=batch, context=tokens, pairs=tokens, running=batch)


def prefill_s(gpu: str, model: str, *, prompt: int, num_gpus: int = 1) -> float:
    step = roofline_step_time(gpu_by_name(gpu), model_geometry(model), num_gpus=num_gpus)
    pairs = prompt * (prompt + 1) // 2
    return seconds(step, prefill=prompt, context=prompt, pairs=pairs, running=1)


def test_few_tokens_take_the_time_of_reading_weights_and_context():
    step = roofline_step_time(ROUND_GPU, ROUND_MODEL, **EXACT)
    assert seconds(step, decode=1, context=0) == pytest.approx(3e-3)
    assert seconds(step, decode=1, context=10_000) == pytest.approx(4e-3)


def test_many_tokens_take_the_time_of_their_arithmetic():
    step = roofline_step_time(ROUND_GPU, ROUND_MODEL, **EXACT)
    assert seconds(step, prefill=10_000) == pytest.approx(10e-3)
    assert seconds(step, prefill=9_000, decode=1_000) == pytest.approx(10e-3)
    assert seconds(step, prefill=10_000, pairs=1_000_000) == pytest.approx(11e-3)


def test_more_gpus_and_higher_efficiency_divide_the_time_and_leave_the_overhead():
    half = {"compute_efficiency": 0.5, "bandwidth_efficiency": 0.5, "overhead_s": 0.0}
    for work in ({"decode": 1, "context": 10_000}, {"prefill": 10_000}):
        once = seconds(roofline_step_time(ROUND_GPU, ROUND_MODEL, **EXACT), **work)
        slower = roofline_step_time(ROUND_GPU, ROUND_MODEL, **half)
        assert seconds(slower, **work) == pytest.approx(2 * once)
        four = roofline_step_time(ROUND_GPU, ROUND_MODEL, num_gpus=4, **EXACT)
        assert seconds(four, **work) == pytest.approx(once / 4)
        late = roofline_step_time(
            ROUND_GPU, ROUND_MODEL, **EXACT | {"overhead_s": 0.5}, sequence_s=0.25
        )
        assert seconds(late, **work, running=2) == pytest.approx(once + 1.0)


def test_the_more_tokens_the_more_of_the_experts_are_read():
    model = replace(ROUND_MODEL, expert_weight_bytes=2_000_000, routed_share=0.25)
    step = roofline_step_time(ROUND_GPU, model, **EXACT)
    assert seconds(step, decode=1) == pytest.approx(1e-3 + 0.25 * 2e-3)
    assert seconds(step, decode=2) == pytest.approx(1e-3 + (1 - 0.75**2) * 2e-3)
    assert seconds(step, decode=500) == pytest.approx(3e-3)


def test_measured_rates_add_up():
    step = measured_step_time(prefill_rate_tokens_per_s=10_000, base_s=0.02, sequence_s=0.001)
    assert seconds(step, decode=5, context=9_999, pairs=9_999, running=5) == pytest.approx(0.025)
    assert seconds(step, prefill=1_000, running=1) == pytest.approx(0.121)


def test_params_hold_every_coefficient_in_the_order_of_the_fields():
    step = StepTime("distinct", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    assert step.params().dtype == np.float64
    assert step.params().tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert len(fields(StepTime)) == 1 + len(step.params())


# Measured with TensorRT-LLM 0.5 and 0.6.1, A100, fp16; see docs/step-time.md.
@pytest.mark.parametrize(("prompt", "measured_ms"), [(2048, 133), (128, 16)])
def test_a_7b_prefill_on_an_a100_is_near_the_published_first_token_latency(prompt, measured_ms):
    ours_ms = 1e3 * prefill_s("A100-80GB", "llama-2-7b", prompt=prompt)
    assert ours_ms == pytest.approx(measured_ms, rel=0.45)


def test_a_70b_prefill_on_four_a100_is_near_the_published_first_token_latency():
    ours_ms = 1e3 * prefill_s("A100-80GB", "llama-2-70b", prompt=2048, num_gpus=4)
    assert ours_ms == pytest.approx(377, rel=0.1)


def test_a_7b_decode_on_an_a100_is_near_the_published_throughput():
    # 60 sequences that grow from 128 to 2,176 tokens.
    ours = 60 / decode_s("A100-80GB", "llama-2-7b", batch=60, length=1_152)
    assert ours == pytest.approx(1_928, rel=0.1)


def test_descriptions_say_what_the_time_is_from():
    gpu, model = gpu_by_name("H100"), model_geometry("llama-3-8b")
    assert roofline_step_time(gpu, model).description == "roofline of H100 with llama-3-8b"
    assert "2 x H100" in roofline_step_time(gpu, model, num_gpus=2).description
    measured = measured_step_time(prefill_rate_tokens_per_s=5_000, base_s=0.02)
    assert measured.description == (
        "measured: 5000 prompt tokens/s, 0.02 s a step, 0 s a running sequence"
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"compute_efficiency": 0.0}, "compute_efficiency is 0"),
        ({"compute_efficiency": 1e-300}, "compute_efficiency is 1e-300: it must be from 1e-06"),
        ({"overhead_s": 1e300}, r"overhead_s is 1e\+300 s: it must be from 0 to 1e\+06"),
        ({"bandwidth_efficiency": 1.5}, r"bandwidth_efficiency is 1\.5"),
        ({"overhead_s": -1.0}, "overhead_s is -1 s"),
        ({"sequence_s": float("nan")}, "sequence_s is nan s"),
    ],
)
def test_a_roofline_out_of_range_is_refused_by_name(changes, named):
    with pytest.raises(InvalidInput, match=named):
        roofline_step_time(ROUND_GPU, ROUND_MODEL, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prefill_rate_tokens_per_s": 0}, "prefill rate is 0 tokens/s"),
        ({"prefill_rate_tokens_per_s": float("inf")}, "prefill rate is inf"),
        ({"base_s": 0}, "step time is 0 s: it must be from 1e-09 to"),
        ({"base_s": -1}, "step time is -1 s"),
        ({"base_s": 1e-300}, "step time is 1e-300 s"),
        ({"base_s": 1e300}, r"step time is 1e\+300 s"),
        ({"prefill_rate_tokens_per_s": 1e-300}, "prefill rate is 1e-300 tokens/s: it must be from"),
        ({"prefill_rate_tokens_per_s": float("nan")}, "prefill rate is nan"),
        ({"sequence_s": -1}, "sequence_s is -1 s"),
    ],
)
def test_measured_rates_with_which_no_time_passes_or_all_of_it_are_refused(changes, named):
    rates = {"prefill_rate_tokens_per_s": 1_000.0, "base_s": 0.02} | changes
    with pytest.raises(InvalidInput, match=named):
        measured_step_time(**rates)
