"""A model of `transformers` that computes batches on paged memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.attention import KVStorage
from pagedkv.engine.architectures import check_architecture, longest_exact
from pagedkv.engine.device import uploaded
from pagedkv.engine.packed_linear import pack_linear_layers
from pagedkv.engine.paged_attention import StepAttention, attending, survey, use_block_tables
from pagedkv.errors import InvalidInput
from pagedkv.scheduling.continuous import Batch

if TYPE_CHECKING:
    from pagedkv.attention.gpu import GPUStorage
    from pagedkv.engine.fused import FusedLayers

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class PagedModel:
    """A model whose layers keep their keys and values in blocks; the model itself is unchanged.

    Takes over the model given: its attention function, and with `pack_weights` its linear layers,
    which are packed on the CPU only. `shapes` are the layers that keep something, in order;
    `doubled_bytes` of weights are there twice after packing. With `triton` the keys and values
    are in torch's memory and read by Triton's kernels: on a CUDA device unless it is said
    otherwise. On a CPU that works in Triton's interpreter only. There `fused_layers` lets parts of
    the model compute in fewer kernels; `fused` says which.

    Raises `InvalidInput` for a model that would not run right.
    """

    def __init__(
        self,
        model: Any,
        *,
        pack_weights: bool = True,
        fused_layers: bool = True,
        triton: bool | None = None,
    ) -> None:
        check_architecture(model.config)
        self.config = model.config
        self._model = model.eval()
        text = model.config.get_text_config()
        weight = next(model.parameters())
        if weight.dtype not in _DTYPE_NAMES:
            raise InvalidInput(
                f"the model's weights are {weight.dtype}: load it in float32 or bfloat16"
            )
        self.dtype = _DTYPE_NAMES[weight.dtype]
        self.device = weight.device
        is_cuda = self.device.type == "cuda"
        self.is_on_triton = is_cuda if triton is None else triton
        self.vocab_size = int(text.vocab_size)
        self.longest_exact, self.longest_exact_reason = longest_exact(model.config)
        use_block_tables(model)
        self.shapes, self.places = survey(model)
        self.doubled_bytes = 0
        self.fused: FusedLayers | None = None
        if self.is_on_triton and fused_layers:
            from pagedkv.engine.fused import fuse_layers

            self.fused = fuse_layers(model, lambda: survey(model))
        elif pack_weights and not is_cuda:
            self.doubled_bytes = pack_linear_layers(model)

    def make_storage(self, num_blocks: int, block_size: int) -> KVStorage | GPUStorage:
        """Blocks for this model's keys and values, where it computes."""
        if not self.is_on_triton:
            return KVStorage(num_blocks, block_size, self.shapes, dtype=self.dtype)
        from pagedkv.attention.gpu import GPUStorage

        return GPUStorage(num_blocks, block_size, self.shapes, dtype=self.dtype, device=self.device)

    def logits(
        self,
        storage: Any,
        batch: Batch,
        rows: NDArray[np.int64],
        said: torch.Tensor | None = None,
        timed: AbstractContextManager[None] | None = None,
    ) -> torch.Tensor:
        """Compute `batch`; the logits [len(rows), vocab] after its tokens at `rows`, ascending.

        `said` int64 [k]: what the sequences that were due a token in the step before have said,
        for `batch.awaited`. `timed` is entered for the forward, when all that it needs is ready.

        On the model's device, which need not have computed them yet; float32 on the CPU, and in
        the model's dtype on others. Keys and values of all tokens of the batch are in `storage`
        afterwards; the blocks of `batch.copies` have been copied before.
        """
        # A model makes logits for at least one row.
        wanted = rows if len(rows) else np.zeros(1, dtype=np.int64)
        places, sources = batch.awaited[:, 0], batch.awaited[:, 1]
        arrays = [batch.token_ids, batch.positions, wanted, batch.slots, places, sources]
        slots: Any = batch.slots
        if self.is_on_triton:
            token_ids, positions, kept, slots, at, taken = uploaded(arrays, self.device)
        else:
            token_ids, positions, kept, _, at, taken = map(torch.from_numpy, arrays)
        if len(places):
            assert said is not None
            token_ids = token_ids.index_copy(0, at, said[taken])
        plan = storage.plan(batch.block_tables, batch.lengths, batch.query_starts)
        attention = StepAttention(storage, self.places, slots, plan)
        with timed or nullcontext():
            logits = self.forward(token_ids, positions, kept, attention)[: len(rows)]
        return logits if self.device.type == "cuda" else logits.float()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        """The logits [r, vocab] of the tokens at `rows` int64 [r] of T tokens int64 [T]."""
        with torch.inference_mode(), attending(attention):
            output = self._model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens with which the model itself ends an answer."""
        for config in (getattr(self._model, "generation_config", None), self.config):
            ends = getattr(config, "eos_token_id", None)
            if ends is not None:
                return frozenset([ends] if isinstance(ends, int) else ends)
        return frozenset()
