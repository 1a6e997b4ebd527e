"""Plans of a fixed size in a fixed place, as a captured graph has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="needs triton")

import torch

from models.attention_model import relative_error
from models.gpu_batch import DEVICE, gpu_batch
from pagedkv.attention import LayerShape

MANY: list[dict[str, Any]] = [{}, {"window": 30, "sinks": np.arange(4.0)}, {"soft_cap": 3.0}]


@settings(max_examples=5)
@given(data=st.data())
def test_a_plan_updated_in_place_gives_what_a_fresh_one_gives(data: st.DataObject) -> None:
    lengths = st.lists(st.one_of(st.integers(1, 60), st.just(200)), min_size=1, max_size=4)
    batch = gpu_batch(
        np.random.default_rng(0), [(length, 1) for length in data.draw(lengths)], heads_each=2
    )
    storage, host = batch.storage, batch.host
    plan = storage.decode_plan(max_sequences=5, max_blocks_each=30)
    q = torch.full((5, 4, 16), torch.nan, device=DEVICE)
    for some in (MANY[0], data.draw(st.sampled_from(MANY[1:]))):
        chosen = data.draw(st.permutations(range(len(host.lengths))))
        chosen = np.array(chosen[: data.draw(st.integers(0, len(chosen)))], dtype=np.int64)
        shorter = host.lengths[chosen] - data.draw(st.integers(0, 3))
        shorter = np.maximum(shorter, 1)
        tables = host.block_tables[chosen]
        plan.update(tables, shorter)
        q[: len(chosen)] = batch.q()[: len(chosen)]
        found = storage.attend_planned(1, q, plan, **some)
        starts = np.arange(len(chosen) + 1)
        fresh = storage.attend(1, q[: len(chosen)], tables, shorter, starts, **some)
        assert np.allclose(found[: len(chosen)].cpu(), fresh.cpu(), rtol=1e-5, atol=1e-6)
        assert bool((found[len(chosen) :] == 0).all())


def test_more_heads_than_a_tile_has_rows_are_padded_too() -> None:
    batch = gpu_batch(
        np.random.default_rng(0), [(40, 1)], heads_each=150, shape=LayerShape(1, 16, 16)
    )
    plan = batch.storage.decode_plan(max_sequences=2, max_blocks_each=3)
    plan.update(batch.host.block_tables[:, :3], batch.host.lengths)
    q = torch.cat([batch.q(), batch.q()])
    out = batch.storage.attend_planned(1, q, plan).cpu().numpy()
    assert relative_error(out[:1], batch.expected()) < 1e-5
    assert not out[1].any()


def test_a_plan_made_for_inference_may_be_updated_anywhere() -> None:
    batch = gpu_batch(np.random.default_rng(0), [(40, 1)])
    with torch.inference_mode():
        plan = batch.storage.decode_plan(max_sequences=1, max_blocks_each=3)
        first = batch.storage.attend_planned(1, batch.q(), plan)
    assert not first.any()
    plan.update(batch.host.block_tables[:, :3], batch.host.lengths)
    out = batch.storage.attend_planned(1, batch.q(), plan)
    assert relative_error(out.cpu().numpy(), batch.expected()) < 1e-5


def test_only_so_many_queries_as_the_plan_has_are_taken() -> None:
    batch = gpu_batch(np.random.default_rng(0), [(40, 1), (9, 1)])
    plan = batch.storage.decode_plan(max_sequences=3, max_blocks_each=3)
    with pytest.raises(ValueError, match="q has 2 tokens: this plan is for 3"):
        batch.storage.attend_planned(1, batch.q(), plan)


@pytest.mark.skipif(DEVICE == "cpu", reason="only a device captures graphs")
def test_a_captured_graph_reads_each_new_batch() -> None:
    batch = gpu_batch(
        np.random.default_rng(0), [(3000, 1), (50, 1), (700, 1)], heads_each=2, dtype="bfloat16"
    )
    storage, host = batch.storage, batch.host
    plan = storage.decode_plan(max_sequences=4, max_blocks_each=200)
    q = torch.zeros(4, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(q)
    storage.attend_planned(1, q, plan, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        storage.attend_planned(1, q, plan, out=out)
        with pytest.raises(ValueError, match="run all layers once with this plan before"):
            storage.attend_planned(1, q, plan, out=out, window=3)
    for chosen in ([0, 1, 2], [1], [2, 0], [], [1, 2, 0]):
        plan.update(host.block_tables[chosen], host.lengths[chosen])
        q[: len(chosen)] = batch.q()[: len(chosen)]
        graph.replay()
        starts = np.arange(len(chosen) + 1)
        fresh = storage.attend(
            1, q[: len(chosen)], host.block_tables[chosen], host.lengths[chosen], starts
        )
        torch.testing.assert_close(out[: len(chosen)], fresh, rtol=1e-2, atol=1e-2)
        assert bool((out[len(chosen) :] == 0).all())
