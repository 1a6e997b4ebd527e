"""Both ways to bar tokens do what they should: logits of all others stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")

import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.engine.token_masks import _bar_at_once, _bar_by_row


@pytest.mark.parametrize("bar", [_bar_by_row, _bar_at_once])
@given(data=st.data(), vocabulary=st.integers(1, 200), num_rows=st.integers(1, 4))
def test_what_is_not_allowed_is_barred_and_nothing_else(
    bar: Callable[..., None], data: Any, vocabulary: int, num_rows: int
) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, num_rows - 1))))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    is_allowed = rng.random((num_rows, vocabulary)) < 0.4
    bits = [np.packbits(is_allowed[row], bitorder="little") for row in rows]
    before = torch.from_numpy(rng.standard_normal((num_rows, vocabulary)).astype(np.float32))
    logits = before.clone()
    bar(logits, rows, bits)
    for row in range(num_rows):
        expected = before[row].numpy()
        if row in rows:
            expected = np.where(is_allowed[row], expected, -np.inf)
        assert (logits[row].numpy() == expected).all()
