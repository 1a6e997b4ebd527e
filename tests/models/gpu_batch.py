"""The batches of `attention_model` in a GPU's storage: on a device, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.attention_model import PagedBatch, paged_batch
from pagedkv.attention.gpu import GPUStorage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class GPUBatch:
    """A batch whose pages were copied as they are, NaN in unwritten slots included."""

    host: PagedBatch
    storage: GPUStorage

    def q(self, dtype: str | None = None) -> torch.Tensor:
        """The host's queries, rounded to the storage's dtype unless another is given."""
        return torch.from_numpy(self.host.q).to(DEVICE, getattr(torch, dtype or self.storage.dtype))

    def attend(self, *, q_dtype: str | None = None, **options: Any) -> NDArray[np.float32]:
        host = self.host
        result = self.storage.attend(
            host.layer, self.q(q_dtype), host.block_tables, host.lengths, host.query_starts,
            **options,
        )  # fmt: skip
        return result.float().cpu().numpy()

    def expected(self, *, q_dtype: str | None = None, **options: Any) -> NDArray[np.float64]:
        given = self.host.q
        self.host.q = self.q(q_dtype).float().cpu().numpy()
        try:
            return self.host.expected(**options)
        finally:
            self.host.q = given


def gpu_batch(
    rng: np.random.Generator, sequences: list[tuple[int, int]], **options: Any
) -> GPUBatch:
    """`paged_batch`, on the device."""
    host = paged_batch(rng, sequences, **options)
    given = host.storage
    storage = GPUStorage(
        given.num_blocks, given.block_size, given.layers, dtype=given.dtype, device=DEVICE
    )
    put(given.data, storage)
    return GPUBatch(host, storage)


def put(pages: NDArray[Any], storage: GPUStorage) -> None:
    """The pages of a `KVStorage` of the same shape, bit for bit."""
    bits = np.int32 if pages.itemsize == 4 else np.int16
    tensor = torch.from_numpy(pages.view(bits))
    storage.data.view(tensor.dtype).copy_(tensor)
