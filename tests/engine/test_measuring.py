from __future__ import annotations

from functools import cache

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")

import torch

from models.tiny_models import tiny_model
from pagedkv.engine import measuring
from pagedkv.engine.device_sampling import DeviceSampler
from pagedkv.engine.llm import LLM
from pagedkv.engine.measuring import LEAST_RESERVED_BYTES, largest_step, measure_memory
from pagedkv.engine.model import PagedModel
from pagedkv.errors import InvalidInput
from pagedkv.scheduling.limits import SchedulerConfig

GIB = 1 << 30


@cache
def model() -> PagedModel:
    return PagedModel(tiny_model("llama"))


class Gauge:
    """A device with `total` bytes, of which a step takes what it is told."""

    def __init__(self, total: int, free: int, step: int) -> None:
        self.total, self.free, self.step = total, free, step
        self.is_running = False

    def restart(self) -> None:
        self.is_running = True

    def most_bytes(self) -> int:
        assert self.is_running
        return self.step

    def free_bytes(self) -> int:
        return self.free

    def total_bytes(self) -> int:
        return self.total


def config(seats: int, budget: int) -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget)


@pytest.mark.parametrize(("seats", "budget", "longest"), [(4, 64, 512), (1, 9, 9), (5, 40, 10)])
def test_the_largest_step_has_as_many_tokens_and_sequences_as_there_may_be(
    seats: int, budget: int, longest: int
) -> None:
    batch = largest_step(config(seats, budget), block_size=4, max_model_len=longest)
    assert len(batch.token_ids) == batch.query_starts[-1] == min(budget, seats * longest)
    assert len(batch.sequences) == len(batch.due_rows) == seats
    assert batch.lengths.max() <= longest and batch.lengths.min() >= 1
    assert len(np.unique(batch.slots)) == len(batch.slots)
    storage = model().make_storage(int(batch.block_tables.max()) + 1, 4)
    assert model().logits(storage, batch, batch.due_rows).shape[0] == seats


def test_what_is_left_is_what_neither_the_step_nor_the_reserve_takes() -> None:
    gauge = Gauge(total=80 * GIB, free=60 * GIB, step=2 * GIB)
    found = measure_memory(model(), config(4, 32), block_size=4, max_model_len=64, meter=gauge)
    storage = model().make_storage(11, 4)  # one of 29 tokens and three of one
    assert found.step_bytes == 2 * GIB - storage.nbytes
    assert found.reserved_bytes == int(0.04 * 80 * GIB)
    assert found.kv_bytes == 60 * GIB - found.step_bytes - found.reserved_bytes
    assert "a step of 32 tokens takes 2.0 GiB, 3.2 GiB are kept in reserve: 54.8 GiB" in str(found)


def test_where_nothing_is_left_one_line_says_where_it_went() -> None:
    gauge = Gauge(total=GIB, free=LEAST_RESERVED_BYTES // 2, step=1)
    with pytest.raises(InvalidInput, match=r"nothing is left for keys.*max_num_batched_tokens"):
        measure_memory(model(), config(4, 32), block_size=4, max_model_len=64, meter=gauge)


@pytest.mark.parametrize("what", ["the model", "penalties", "drawing"])
def test_a_largest_step_that_does_not_fit_is_refused_in_one_line(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    if what == "the model":
        monkeypatch.setattr(model(), "logits", full)
    elif what == "penalties":
        monkeypatch.setattr(DeviceSampler, "_adjusted", full)
    else:
        monkeypatch.setattr(DeviceSampler, "_draw", full)
    with pytest.raises(InvalidInput, match="no memory for a step of 32 tokens") as refusal:
        gauge = Gauge(GIB, GIB, 1)
        measure_memory(model(), config(4, 32), block_size=4, max_model_len=64, meter=gauge)
    assert "\n" not in str(refusal.value)


def test_on_a_cpu_it_is_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "free_bytes", lambda device: 64 << 20)
    told: list[str] = []
    llm = LLM(tiny_model("llama"), kv_memory="auto", announce=told.append)
    assert (32 << 20) - llm.budget.block_bytes < llm.budget.num_bytes <= 32 << 20
    assert told[0].startswith(
        "kv_memory auto: the machine has 64.0 MiB free beside the weights, 32"
    )
    assert llm.generate([[5, 6, 7]])[0].token_ids


def test_a_system_that_does_not_say_what_is_free_wants_a_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "free_bytes", lambda device: None)
    with pytest.raises(InvalidInput, match="give a size"):
        LLM(tiny_model("llama"), kv_memory="auto")
