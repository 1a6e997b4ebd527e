"""Decode steps that are captured once and replayed: a CUDA graph for each of some batch sizes.

A step in which every sequence computes one token is some hundred small kernels, and asking for
each of them takes the host longer than the device needs for it. A graph is all of them asked for at
once. It works on the memory it was captured with: token ids, positions, slots and the plan of the
attention lie in fixed buffers, which are filled anew before each replay. A batch takes the
smallest graph that it fits into; what is left over of that computes for nobody: slot -1, length 0.

    ids        [ 17 | 4 | 99 | 0 ]     3 sequences in the graph for 4
    positions  [ 20 | 7 |  3 | 0 ]
    slots      [ 36 | 7 | 51 |-1 ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.device import uploaded
from pagedkv.engine.model import PagedModel
from pagedkv.engine.paged_attention import StepAttention
from pagedkv.memory.block_table import blocks_for
from pagedkv.scheduling.continuous import Batch

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes what computes a step on fixed buffers; gives what computes it again, on what is in them."""

_TABLES_OF_MEMORY = 2
"""Entries of block tables that a graph has room for, over the blocks there are: more than one,
since sequences share blocks. A batch with more is computed without a graph."""


def ladder(max_num_seqs: int) -> list[int]:
    """The batch sizes that are captured: 1, 2, 4, then every 8, and the largest there can be.

    >>> ladder(30)
    [1, 2, 4, 8, 16, 24, 30]
    """
    sizes = [1, 2, 4, *range(8, max_num_seqs, 8)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class CUDACapture:
    """Captures on a CUDA device, all graphs in one pool of memory: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            # One for all graphs: libraries keep a workspace for every stream that they have seen.
            self._aside = torch.cuda.Stream()

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Run `compute`, so that all is compiled and made that is made once; then capture.

        One that waits for the device fails before anything is captured. Whatever fails, the
        thread is on the stream again that it was on.
        """
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            try:
                graph = self._captured(compute, before)
            except BaseException:
                # Torch leaves a capture that failed without going back, and may still take it to be
                # under way, in which no unused memory can be given back.
                torch.cuda.set_stream(before)
                with suppress(Exception):
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                raise
        replay: Callable[[], None] = graph.replay
        return replay

    def _captured(self, compute: Callable[[], None], before: Any) -> torch.cuda.CUDAGraph:
        self._aside.wait_stream(before)
        with torch.cuda.stream(self._aside):
            compute()
            with _waiting_fails():
                compute()
        before.wait_stream(self._aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may do what they like meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"
        ):
            compute()
        return graph


@contextmanager
def _waiting_fails() -> Iterator[None]:
    """Within, torch raises where the host would wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class DecodeGraphs:
    """Graphs of a model's decode steps on one storage, for `sizes` sequences each.

    Raises whatever the model raises that cannot be captured: one that looks at its own numbers on
    the host, or whose shapes depend on them.
    """

    def __init__(
        self,
        model: PagedModel,
        storage: Any,
        *,
        sizes: list[int],
        max_model_len: int,
        capture: Capture,
    ) -> None:
        self._logits: torch.Tensor | None = None
        self._graphs = {}
        largest = max(sizes)
        # Plans share the room of the largest, and so do the graphs that of what comes and goes.
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = _Graph(
                model,
                storage,
                size,
                min(
                    blocks_for(max_model_len, storage.block_size),
                    blocks_for(_TABLES_OF_MEMORY * storage.num_blocks, size),
                ),
                capture,
                lambda logits: self._keep(logits, largest),
            )
        self.sizes = sorted(self._graphs)
        self.num_replays = 0

    def _keep(self, logits: torch.Tensor, most: int) -> None:
        """The logits of all graphs go to one place: they are large, and one graph runs at once."""
        if self._logits is None:
            self._logits = logits.new_empty(most, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)

    def size_for(self, batch: Batch) -> int | None:
        """The graph that a batch takes; None for one with chunks of prompts, or too large."""
        n = len(batch.sequences)
        if n == 0 or len(batch.token_ids) != n:
            return None
        size = next((size for size in self.sizes if size >= n), None)
        return size if size is not None and self._graphs[size].has_room_for(batch) else None

    def logits(
        self,
        size: int,
        batch: Batch,
        rows: NDArray[np.int64],
        said: torch.Tensor | None = None,
        timed: AbstractContextManager[None] | None = None,
    ) -> torch.Tensor:
        """What `PagedModel.logits` gives. They are overwritten by the next replay of any size."""
        self.num_replays += 1
        self._graphs[size].replay(batch, said, timed or nullcontext())
        assert self._logits is not None
        if len(rows) == len(batch.sequences):
            return self._logits[: len(rows)]
        (there,) = uploaded([rows], self._logits.device)
        return self._logits[there]


class _Graph:
    """One graph, with the buffers that it reads."""

    def __init__(
        self,
        model: PagedModel,
        storage: Any,
        size: int,
        blocks_each: int,
        capture: Capture,
        keep: Callable[[torch.Tensor], None],
    ) -> None:
        self._size = size
        self._storage = storage
        self._most_blocks = size * blocks_each
        self._is_pinned = model.device.type == "cuda"
        self._inputs = torch.zeros((3, size), dtype=torch.int64, device=model.device)
        token_ids, positions, slots = self._inputs.unbind()
        slots.fill_(-1)
        self._plan = storage.decode_plan(size, blocks_each)
        rows = torch.arange(size, device=model.device)
        attention = StepAttention(storage, model.places, slots, self._plan)
        self._replay = capture(lambda: keep(model.forward(token_ids, positions, rows, attention)))

    def has_room_for(self, batch: Batch) -> bool:
        """Whether the block tables of `batch` fit into the plan."""
        return int((-(-batch.lengths // self._storage.block_size)).sum()) <= self._most_blocks

    @torch.inference_mode()
    def replay(
        self, batch: Batch, said: torch.Tensor | None, timed: AbstractContextManager[None]
    ) -> None:
        """Compute `batch`, all on the current stream; within `timed` the graph itself."""
        n, u = len(batch.sequences), len(batch.awaited)
        # Torch's, and not used again before it is copied.
        packed = torch.empty(3 * self._size + 2 * u, dtype=torch.int64, pin_memory=self._is_pinned)
        numbers = packed.numpy()
        inputs = numbers[: 3 * self._size].reshape(3, self._size)
        inputs[:2, n:], inputs[2, n:] = 0, -1
        inputs[:, :n] = batch.token_ids, batch.positions, batch.slots
        numbers[3 * self._size :] = batch.awaited.T.reshape(-1)
        self._inputs.copy_(packed[: 3 * self._size].view(3, self._size), non_blocking=True)
        if u:
            assert said is not None
            places, sources = (
                packed[3 * self._size :].to(self._inputs.device, non_blocking=True).view(2, u)
            )
            self._inputs[0].index_copy_(0, places, said[sources])
        self._plan.update(batch.block_tables, batch.lengths)
        with timed:
            self._replay()
