from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from models.attention_model import relative_error
from models.gpu_batch import gpu_batch
from pagedkv.attention import LayerShape

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "some", [{}, {"window": 33, "soft_cap": 5.0, "sinks": np.arange(4.0)}, {"chunk": 20}]
)
def test_a_mixed_batch_is_attended_to_as_by_the_book(dtype: str, some: dict[str, Any]) -> None:
    batch = gpu_batch(
        np.random.default_rng(0),
        [(300, 1), (77, 40), (1, 1), (30, 30), (90, 3), (5, 0)],
        shape=LayerShape(2, 16, 16),
        heads_each=2,
        dtype=dtype,
    )
    assert relative_error(batch.attend(**some), batch.expected(**some)) < TOLERANCE[dtype]
