"""Each kernel gives what float64 gives, wherever its rows lie and however long they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from models.gpu_batch import DEVICE
from models.layer_model import RELATIVE, gated_model, in_float64, normalized_model, rotated_model
from pagedkv.engine.fused.gates import gated
from pagedkv.engine.fused.norms import FORMS, UNWEIGHTED, normalized
from pagedkv.engine.fused.rotary import FORMS as WAYS_TO_TURN
from pagedkv.engine.fused.rotary import RotaryForm, rotated

DTYPES = st.sampled_from(list(RELATIVE))
SEEDS = st.integers(0, 2**31)
SIZES = st.one_of(st.sampled_from([2, 16, 64, 80, 96, 128, 1000, 1536]), st.integers(2, 300))


def numbers(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    made = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(made).to(DEVICE, dtype)


def strided(seed: int, dtype: torch.dtype, layout: str, rows: int, size: int) -> torch.Tensor:
    """Rows that lie as models have them; what lies between them is NaN."""
    if layout == "one after the other":
        return numbers(seed, dtype, 1, rows, size)
    heads = 3
    shape = {"a part of wider rows": (1, rows, size), "[rows, n]": (rows, size)}.get(
        layout, (1, rows, heads, size)
    )
    wide = torch.full((*shape[:-1], size + 5), torch.nan, dtype=dtype, device=DEVICE)
    wide[..., 2 : 2 + size] = numbers(seed, dtype, *shape)
    part = wide[..., 2 : 2 + size]
    return part.transpose(1, 2) if layout == "heads first" else part


LAYOUTS = st.sampled_from(
    ["one after the other", "a part of wider rows", "[rows, n]", "heads", "heads first"]
)


@settings(max_examples=60)
@given(
    seed=SEEDS,
    dtype=DTYPES,
    size=SIZES,
    rows=st.integers(0, 20),
    layout=LAYOUTS,
    form=st.sampled_from([*FORMS, UNWEIGHTED]),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_a_row_is_divided_by_its_root_mean_square(
    seed: int, dtype: torch.dtype, size: int, rows: int, layout: str, form, scale: float
) -> None:
    x = strided(seed, dtype, layout, rows, size) * scale
    weight = numbers(seed + 1, dtype, size)
    found = normalized(x, weight, 1e-5, form)
    assert found.shape == x.shape and found.dtype == dtype and found.is_contiguous()
    expected = normalized_model(
        x, weight if form.is_weighted else None, 1e-5, plus_one=form.is_plus_one
    )
    tiny = torch.finfo(dtype).smallest_normal
    np.testing.assert_allclose(in_float64(found), expected, rtol=RELATIVE[dtype], atol=2 * tiny)


def test_a_row_of_other_strides_is_normalized_too() -> None:
    x = numbers(0, torch.float32, 2, 3, 4, 50).transpose(0, 1)[..., ::2]
    weight = numbers(1, torch.float32, 25)
    expected = normalized_model(x, weight, 1e-5)
    found = normalized(x, weight, 1e-5, FORMS[0])
    np.testing.assert_allclose(in_float64(found), expected, rtol=1e-5)


def test_a_nan_stays_in_its_own_row() -> None:
    x = numbers(0, torch.float32, 9, 50)
    x[4, 7] = torch.nan
    found = normalized(x, numbers(1, torch.float32, 50), 1e-5, FORMS[0])
    assert torch.isnan(found).any(1).nonzero().flatten().tolist() == [4]


@settings(max_examples=40)
@given(
    seed=SEEDS,
    dtype=DTYPES,
    size=st.one_of(st.sampled_from([96, 1024, 1500, 3072]), st.integers(1, 300)),
    shape=st.sampled_from([(1,), (0,), (7,), (1, 5), (2, 3)]),
    is_gelu=st.booleans(),
    is_part=st.booleans(),
)
def test_the_activated_half_multiplies_the_other(
    seed: int, dtype: torch.dtype, size: int, shape: tuple[int, ...], is_gelu: bool, is_part: bool
) -> None:
    halves = 3 * numbers(seed, dtype, *shape, 2 * size + (3 if is_part else 0))
    halves = halves[..., : 2 * size]
    found = gated(halves, is_gelu)
    assert found.shape == (*shape, size) and found.dtype == dtype
    # Of what is so small, no more than the digits that float16 has for it.
    facts = torch.finfo(dtype)
    tiny = max(1e-20, 20 * facts.smallest_normal * facts.eps)
    np.testing.assert_allclose(
        in_float64(found), gated_model(halves, is_gelu), rtol=RELATIVE[dtype], atol=tiny
    )


@pytest.mark.parametrize("is_gelu", [False, True])
def test_a_gate_far_from_zero_is_open_or_shut(is_gelu: bool) -> None:
    halves = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    assert gated(halves, is_gelu)[0].tolist() == pytest.approx([0, 0, 400, 2e4], abs=1e-30)


def places(form: RotaryForm, width: int) -> tuple[int, list[tuple[int, ...]]]:
    """How many numbers of a head are turned, and each pair as `rotated_model` wants it."""
    half = width if form.whole else width // 2
    found = []
    for i in range(half):
        taken = (2 * i, 2 * i + 1) if form.takes_neighbours else (i, half + i)
        given_ = (2 * i, 2 * i + 1) if form.gives_neighbours else (i, half + i)
        angles = (i, i) if form.is_half else taken
        found.append((*taken, *angles, *given_))
    return 2 * half, found


@settings(max_examples=80)
@given(
    seed=SEEDS,
    dtype=DTYPES,
    angle_dtype=st.sampled_from([None, torch.float32]),
    pairs=st.one_of(st.sampled_from([8, 32, 40, 64]), st.integers(1, 70)),
    rest=st.sampled_from([0, 0, 1, 16, 37]),
    heads=st.tuples(st.integers(1, 9), st.integers(0, 5)),
    tokens=st.integers(0, 5),
    form=st.sampled_from(WAYS_TO_TURN),
    by_token=st.booleans(),
    is_part=st.booleans(),
)
def test_heads_are_turned_by_their_tokens_angles(
    seed, dtype, angle_dtype, pairs, rest, heads, tokens, form, by_token, is_part
) -> None:
    width = pairs if form.whole else 2 * pairs
    turned, where = places(form, width)
    size = turned + rest

    def given_heads(seed: int, count: int) -> torch.Tensor:
        shape = (1, tokens, count, size) if by_token else (1, count, tokens, size)
        layout = np.random.default_rng(seed).permutation(2) + 1 if is_part else (1, 2)
        made = numbers(seed, dtype, *(shape[i] for i in (0, *layout)), size + 3 * is_part)
        return made.permute(0, *np.argsort(layout) + 1, 3)[..., :size]

    q = given_heads(seed, heads[0])
    k = given_heads(seed + 1, heads[1]) if heads[1] else None
    cos, sin = (numbers(seed + i, angle_dtype or dtype, 1, tokens, width) for i in (2, 3))
    form = form._replace(in_float32=form.in_float32 or angle_dtype is not None)
    found = rotated(q, k, cos, sin, form, by_token=by_token)
    assert (found[1] is None) == (k is None)
    for given_one, turned_one in zip((q, k), found):
        if given_one is None:
            continue
        assert turned_one.shape == given_one.shape and turned_one.dtype == dtype
        if not by_token:
            given_one, turned_one = given_one.transpose(1, 2), turned_one.transpose(1, 2)
        assert turned_one.is_contiguous()
        expected, sizes = rotated_model(given_one[0], cos[0], sin[0], where)
        tiny = torch.finfo(dtype).smallest_normal
        apart = np.abs(in_float64(turned_one[0]) - expected)
        assert (apart <= RELATIVE[dtype] * sizes + tiny).all()
        # What is not turned is the same, bit for bit.
        assert torch.equal(turned_one[..., turned:], given_one[..., turned:])


def test_heads_that_lie_more_than_2_to_the_31_numbers_apart_are_turned() -> None:
    apart, tokens, size = 2**30 + 8, 3, 8
    room = torch.empty(2 * apart + tokens * size, dtype=torch.float16, device=DEVICE)
    far = room.as_strided((1, tokens, 3, size), (room.numel(), size, apart, 1))
    near = numbers(5, torch.float16, 1, tokens, 3, size)
    far.copy_(near)
    cos, sin = (numbers(6 + i, torch.float16, 1, tokens, size) for i in range(2))
    form = RotaryForm(False, False, False, False, False)
    for found, expected in zip(
        rotated(far, far, cos, sin, form, by_token=True),
        rotated(near, near, cos, sin, form, by_token=True),
    ):
        assert found is not None and expected is not None and torch.equal(found, expected)
