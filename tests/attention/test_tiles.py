from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import config
from numpy.typing import NDArray

from models.attention_batches import options, sequences
from models.attention_model import PagedBatch, paged_batch, relative_error, rounded, slots_of
from pagedkv.attention import LayerShape, storage, tiles

torch = pytest.importorskip("torch", reason="NumPy has no bfloat16 queries, torch has")

BOUND = 1e-2
"""Of a row's largest number: weights and outputs are rounded to 8 bits."""


LENGTHS = st.integers(1, 260) | st.sampled_from([31, 32, 33, 95, 96, 97, 192, 193])
"""Across the borders of tiles, panels and gathered chunks."""


def brain_batch(rng: np.random.Generator, *some: Any, **options: Any) -> PagedBatch:
    """A batch with queries that are bfloat16 without another rounding."""
    batch = paged_batch(rng, *some, dtype="bfloat16", **options)
    batch.q = rounded(batch.q, "bfloat16")
    return batch


def attend(batch: PagedBatch, **options: Any) -> NDArray[np.float32]:
    queries, batch.q = batch.q, torch.from_numpy(batch.q).bfloat16()
    try:
        out: NDArray[np.float32] = batch.attend(**options).float().numpy()
    finally:
        batch.q = queries
    return out


@pytest.mark.parametrize("shape", [(2, 3, 64, 32), (1, 20, 32, 64)])
@given(data=st.data())
@settings(max_examples=6 if config.DISABLE_JIT else 40)
def test_any_ragged_batch_is_attended_to_as_by_the_book(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    num_kv_heads, heads_each, key_dim, value_dim = shape
    batch = brain_batch(
        np.random.default_rng(data.draw(st.integers(0, 1000))),
        data.draw(sequences(lengths=LENGTHS, most=3)),
        block_size=data.draw(st.sampled_from([1, 3, 16, 256])),
        shape=LayerShape(num_kv_heads, key_dim, value_dim),
        heads_each=heads_each,
        loudness=data.draw(st.sampled_from([0.1, 1.0, 4.0])),
    )
    some = data.draw(options(num_kv_heads * heads_each, farthest=200))
    assert relative_error(attend(batch, **some), batch.expected(**some)) < BOUND


def test_what_goes_to_the_tiles() -> None:
    there = config.DISABLE_JIT or tiles.have_tiles()
    assert tiles.fits_tiles(tiles.BFLOAT16, True, 64, 128, 0.1) == there
    for wrong in (
        (0, False, 64, 64, 0.1),
        (tiles.BFLOAT16, False, 64, 64, 0.1),
        (tiles.BFLOAT16, True, 80, 64, 0.1),
        (tiles.BFLOAT16, True, 64, 40, 0.1),
        (tiles.BFLOAT16, True, 64, 64, -0.1),
        (tiles.BFLOAT16 + 1, True, 64, 64, 0.1),
    ):
        assert not tiles.fits_tiles(*wrong)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scores_that_fall_as_products_rise_are_left_to_the_vectors(scale: float) -> None:
    batch = brain_batch(
        np.random.default_rng(0), [(150, 150)], shape=LayerShape(2, 64, 32), heads_each=3
    )
    assert relative_error(attend(batch, scale=scale), batch.expected(scale=scale)) < BOUND


def test_tiles_and_vectors_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = brain_batch(
        np.random.default_rng(1), [(700, 300), (90, 90)], shape=LayerShape(2, 64, 32), heads_each=3
    )
    here = attend(batch, window=180)
    monkeypatch.setattr(storage, "fits_tiles", lambda *_: False)
    assert relative_error(here, attend(batch, window=180).astype(np.float64)) < BOUND


def test_neither_batch_nor_threads_nor_block_size_change_a_bit() -> None:
    cases = [(400, 300), (64, 64), (1, 1), (97, 33)]
    results = []
    for num_threads, block_size in ((1, 16), (4, 16), (4, 3)):
        batch = brain_batch(
            np.random.default_rng(3),
            cases,
            shape=LayerShape(2, 64, 32),
            heads_each=3,
            block_size=block_size,
            num_threads=num_threads,
        )
        if not results:
            first = batch
        batch.q = first.q
        for i, length in enumerate(batch.lengths.tolist()):
            slots = slots_of(batch.block_tables[i], 0, length, block_size)
            batch.storage.write(1, first.k[i], first.v[i], slots)
        results.append(attend(batch))
        for i in range(len(cases)):
            start, stop = batch.query_starts[i : i + 2]
            assert np.array_equal(attend(batch.alone(i)), results[-1][start:stop])
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_a_key_that_is_no_number_is_not_hidden() -> None:
    batch = brain_batch(
        np.random.default_rng(4), [(64, 64)], shape=LayerShape(2, 64, 32), heads_each=3
    )
    bad = np.full((1, 2, 64), np.nan, dtype=np.float32)
    batch.storage.write(
        1, bad, np.zeros((1, 2, 32), np.float32), slots_of(batch.block_tables[0], 40, 41, 16)
    )
    out = attend(batch)
    assert np.isfinite(out[:40]).all()
    assert np.isnan(out[40:]).all()


@pytest.mark.skipif(config.DISABLE_JIT, reason="this is the uncompiled run")
def test_the_same_uncompiled_where_there_need_be_no_tiles() -> None:
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
