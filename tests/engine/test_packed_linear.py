"""Linear layers in panels give what plain ones do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.engine.panel_product import NEXT, PANEL, multiply, packed

torch = pytest.importorskip("torch", reason="needs the extra [engine]")

from pagedkv.engine.packed_linear import PanelLinear, pack_linear_layers, packed_form  # noqa: E402


def product(rows: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """`multiply` on arrays, as one thread would run it."""
    (num_rows, inputs), outputs = rows.shape, len(weight)
    out = np.full(num_rows * (outputs + PANEL), np.nan, dtype=np.float32)
    none = np.zeros(outputs, dtype=np.float32)
    counters = np.zeros(NEXT + 1, dtype=np.int64)
    multiply(
        counters,
        rows.reshape(-1),
        num_rows,
        inputs,
        packed(weight),
        none if bias is None else bias,
        int(bias is not None),
        out,
        outputs,
        3,
    )
    return out[: num_rows * outputs].reshape(num_rows, outputs)


@given(
    num_rows=st.integers(1, 40),
    inputs=st.integers(1, 20),
    outputs=st.integers(1, 100),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_product_is_that_of_float64(
    num_rows: int, inputs: int, outputs: int, has_bias: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((num_rows, 4 * inputs), dtype=np.float32)
    weight = rng.standard_normal((outputs, 4 * inputs), dtype=np.float32)
    bias = rng.standard_normal(outputs, dtype=np.float32) if has_bias else None
    expected = rows.astype(np.float64) @ weight.T.astype(np.float64)
    if bias is not None:
        expected += bias
    np.testing.assert_allclose(product(rows, weight, bias), expected, rtol=0, atol=2e-5)


def test_a_row_is_multiplied_alike_whatever_rows_are_beside_it() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((37, 64), dtype=np.float32)
    weight = rng.standard_normal((70, 64), dtype=np.float32)
    together = product(rows, weight, None)
    for count in (1, 2, 3, 5, 7, 9, 13, 25):
        assert np.array_equal(product(rows[:count], weight, None), together[:count])


@pytest.mark.parametrize("shape", [(3, 7), (7,), (1, 5, 2), (0,)])
@pytest.mark.parametrize("outputs", [64, 50])
def test_a_packed_layer_keeps_the_shape_of_a_batch(shape: tuple[int, ...], outputs: int) -> None:
    linear = torch.nn.Linear(24, outputs)
    if packed_form(linear) is not PanelLinear:
        pytest.skip("nothing is compiled")
    rows = torch.randn(*shape, 24)
    found = PanelLinear(linear)(rows)
    assert found.shape == (*shape, outputs)
    torch.testing.assert_close(found, linear(rows))


def test_rows_that_are_not_contiguous_are_read_right() -> None:
    linear = torch.nn.Linear(24, 40)
    model = torch.nn.Sequential(linear)
    rows = torch.randn(24, 6).t()
    expected = linear(rows)
    assert pack_linear_layers(model) == 0
    torch.testing.assert_close(model(rows), expected)


def test_a_shared_weight_is_counted_as_doubled() -> None:
    model = torch.nn.ModuleList([torch.nn.Embedding(40, 24), torch.nn.Linear(24, 40, bias=False)])
    model[1].weight = model[0].weight
    if packed_form(model[1]) is not PanelLinear:
        pytest.skip("nothing is compiled")
    assert pack_linear_layers(model) == 40 * 24 * 4
    assert model[0].weight.shape == (40, 24)


def test_a_layer_whose_inputs_are_no_multiple_of_four_stays_as_it_is() -> None:
    assert packed_form(torch.nn.Linear(6, 8)) is None
