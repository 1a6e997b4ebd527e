"""A model of `transformers` that computes batches on paged memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.attention import KVStorage
from pagedkv.engine.architectures import check_architecture, longest_exact
from pagedkv.engine.packed_linear import pack_linear_layers
from pagedkv.engine.paged_attention import StepAttention, attending, survey, use_block_tables
from pagedkv.errors import InvalidInput
from pagedkv.scheduling.continuous import Batch

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class PagedModel:
    """A model whose layers keep their keys and values in blocks; the model itself is unchanged.

    Takes over the model given: its attention function, and with `pack_weights` its linear layers.
    `shapes` are the layers that keep something, in order; `doubled_bytes` of weights are there
    twice after packing.

    Raises `InvalidInput` for a model that would not run right.
    """

    def __init__(self, model: Any, *, pack_weights: bool = True) -> None:
        check_architecture(model.config)
        self.config = model.config
        self._model = model.eval()
        text = model.config.get_text_config()
        dtype = next(model.parameters()).dtype
        if dtype not in _DTYPE_NAMES:
            raise InvalidInput(f"the model's weights are {dtype}: load it in float32 or bfloat16")
        self.dtype = _DTYPE_NAMES[dtype]
        self.vocab_size = int(text.vocab_size)
        self.longest_exact, self.longest_exact_reason = longest_exact(model.config)
        use_block_tables(model)
        self.shapes, self._places = survey(model)
        self.doubled_bytes = pack_linear_layers(model) if pack_weights else 0

    def make_storage(self, num_blocks: int, block_size: int) -> KVStorage:
        """Blocks for this model's keys and values."""
        return KVStorage(num_blocks, block_size, self.shapes, dtype=self.dtype)

    def logits(
        self,
        storage: KVStorage,
        batch: Batch,
        rows: NDArray[np.int64],
        said: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `batch`; the logits [len(rows), vocab] after its tokens at `rows`, ascending.

        `said` int64 [k]: what the sequences that were due a token in the step before have said,
        for `batch.awaited`.

        float32, whatever the model computes in. Keys and values of all tokens of the batch are in
        `storage` afterwards.
        """
        if len(batch.copies):
            storage.copy_blocks(batch.copies)
        # A model makes logits for at least one row.
        wanted = torch.from_numpy(rows if len(rows) else np.zeros(1, dtype=np.int64))
        token_ids = torch.from_numpy(batch.token_ids)
        if len(batch.awaited):
            assert said is not None
            places, sources = torch.from_numpy(batch.awaited).unbind(1)
            token_ids = token_ids.index_copy(0, places, said[sources])
        attention = StepAttention(storage, self._places, batch)
        with torch.inference_mode(), attending(attention):
            output = self._model(
                input_ids=token_ids[None],
                position_ids=torch.from_numpy(batch.positions)[None],
                use_cache=False,
                logits_to_keep=wanted,
            )
        logits: torch.Tensor = output.logits[0, : len(rows)].float()
        return logits

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens with which the model itself ends an answer."""
        for config in (getattr(self._model, "generation_config", None), self.config):
            ends = getattr(config, "eos_token_id", None)
            if ends is not None:
                return frozenset([ends] if isinstance(ends, int) else ends)
        return frozenset()
