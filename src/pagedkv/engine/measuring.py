"""How much memory is left for keys and values: measured, after loading and after a largest step."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pagedkv.engine.device import free_bytes, give_back_unused
from pagedkv.engine.device_sampling import DeviceSampler
from pagedkv.engine.memory_budget import format_bytes
from pagedkv.engine.model import PagedModel
from pagedkv.engine.sampling import NotFinite, SamplerState
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.turn import Turn
from pagedkv.errors import InvalidInput
from pagedkv.memory.block_table import NO_BLOCK
from pagedkv.scheduling.continuous import Batch
from pagedkv.scheduling.limits import SchedulerConfig

RESERVED_SHARE = 0.04
"""Of a device's memory: for graphs, for what libraries take later, for gaps between tensors."""

LEAST_RESERVED_BYTES = 512 << 20

CPU_SHARE = 0.5
"""Of a machine's free memory: there others take some too, and no step is run to measure."""


@dataclass(frozen=True)
class MeasuredMemory:
    """What `kv_memory="auto"` found."""

    device: str
    free_bytes: int
    """With the weights loaded."""
    step_bytes: int
    """What the largest step takes at most, beside its keys and values."""
    step_tokens: int
    reserved_bytes: int

    @property
    def kv_bytes(self) -> int:
        """What is left; 0 or less if nothing is."""
        return self.free_bytes - self.step_bytes - self.reserved_bytes

    def __str__(self) -> str:
        """Where the memory goes, in one line."""
        step = ""
        if self.step_tokens:
            step = f"a step of {self.step_tokens:,} tokens takes {format_bytes(self.step_bytes)}, "
        left = f"{format_bytes(self.kv_bytes)} are" if self.kv_bytes > 0 else "nothing is"
        return (
            f"kv_memory auto: {self.device} has {format_bytes(self.free_bytes)} free beside the "
            f"weights, {step}{format_bytes(self.reserved_bytes)} are kept in reserve: {left} left "
            "for keys and values"
        )


class Meter(Protocol):
    """Looks at a device's memory."""

    def restart(self) -> None:
        """Measure from now on."""

    def most_bytes(self) -> int:
        """What was taken since then, at most at any one time."""

    def free_bytes(self) -> int:
        """What nobody has taken."""

    def total_bytes(self) -> int:
        """All there is."""


class CUDAMeter:
    """A `Meter` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def restart(self) -> None:
        """Measure from now on."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def most_bytes(self) -> int:
        """What torch took since then, at most at any one time."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device)) - self._before

    def free_bytes(self) -> int:
        """What nobody has taken; what torch keeps unused is given back first."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def total_bytes(self) -> int:
        """All memory of the device."""
        return int(torch.cuda.mem_get_info(self._device)[1])


def measure_memory(
    model: PagedModel,
    config: SchedulerConfig,
    *,
    block_size: int,
    max_model_len: int,
    meter: Meter | None = None,
) -> MeasuredMemory:
    """What is left for keys and values beside `model` and the largest step that `config` allows.

    On a device that step is run. On a CPU, without a `meter`, `CPU_SHARE` of what is free now.

    Raises `InvalidInput`, one line, where nothing is left, and where nobody knows.
    """
    if meter is None and model.device.type == "cuda":
        meter = CUDAMeter(model.device)
    if meter is None:
        free = free_bytes(model.device)
        if free is None:
            raise InvalidInput(
                "kv_memory auto: this system does not say how much memory is free: give a size"
            )
        measured = MeasuredMemory("the machine", free, 0, 0, int(free * (1 - CPU_SHARE)))
    else:
        measured = _with_largest_step(model, config, block_size, max_model_len, meter)
    if measured.kv_bytes <= 0:
        raise InvalidInput(
            f"{measured}: lower max_num_batched_tokens, or load the model in a smaller dtype"
        )
    return measured


def _with_largest_step(
    model: PagedModel, config: SchedulerConfig, block_size: int, max_model_len: int, meter: Meter
) -> MeasuredMemory:
    batch = largest_step(config, block_size=block_size, max_model_len=max_model_len)
    num_blocks = int(batch.block_tables.max()) + 1
    num_tokens = len(batch.token_ids)
    try:
        meter.restart()
        storage = model.make_storage(num_blocks, block_size)
        nbytes = storage.nbytes
        logits = model.logits(storage, batch, batch.due_rows)
        _choose_by_all_there_is(logits)
        taken = meter.most_bytes() - nbytes
    except torch.OutOfMemoryError:
        give_back_unused(model.device)
        raise InvalidInput(
            f"kv_memory auto: {model.device} has no memory for a step of {num_tokens:,} tokens "
            "beside the weights: lower max_num_batched_tokens"
        ) from None
    del storage, logits
    gc.collect()  # it knows objects that know it
    reserved = max(int(RESERVED_SHARE * meter.total_bytes()), LEAST_RESERVED_BYTES)
    return MeasuredMemory(
        str(model.device), meter.free_bytes(), max(taken, 0), num_tokens, reserved
    )


def _choose_by_all_there_is(logits: torch.Tensor) -> None:
    """Choose a token for each row, as those do that take the most memory for it."""
    params = SamplingParams(temperature=1.0, top_p=0.99, repetition_penalty=1.1, logprobs=1)
    turns = [Turn(SamplerState(params, (0,), seed=i)) for i in range(len(logits))]
    sampler = DeviceSampler(logits.device)
    with suppress(NotFinite):  # by such a row, of a made-up prompt, nothing is chosen
        for _ in range(2):  # only the second time is it known which rows must be sorted whole
            sampler.choose(logits, turns).conclude(np.arange(len(turns)))


def largest_step(config: SchedulerConfig, *, block_size: int, max_model_len: int) -> Batch:
    """As many tokens as a step may have, of as many sequences as it may have, all due a token."""
    budget = config.max_num_batched_tokens
    num_sequences = min(config.max_num_seqs, budget)
    lengths = np.ones(num_sequences, dtype=np.int64)
    left = budget - num_sequences
    for i in range(num_sequences):
        more = min(left, max_model_len - 1)
        lengths[i] += more
        left -= more
    starts = np.concatenate([[0], np.cumsum(lengths)])
    num_blocks = -(-lengths // block_size)
    tables = np.full((num_sequences, int(num_blocks.max())), NO_BLOCK, dtype=np.int32)
    is_held = np.arange(tables.shape[1]) < num_blocks[:, None]
    tables[is_held] = np.arange(is_held.sum(), dtype=np.int32)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    rows = np.repeat(np.arange(num_sequences), lengths)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size
    numbers = np.arange(num_sequences, dtype=np.int64)
    none = np.empty(0, dtype=np.int64)
    return Batch(
        sequences=numbers,
        token_ids=np.zeros(starts[-1], dtype=np.int64),
        positions=positions,
        slots=slots + positions % block_size,
        block_tables=tables,
        lengths=lengths,
        query_starts=starts,
        copies=np.empty((0, 2), dtype=np.int32),
        due=numbers,
        due_rows=starts[1:] - 1,
        admitted=none,
        num_cached=none,
        preempted=none,
        awaited=np.empty((0, 2), dtype=np.int64),
    )
