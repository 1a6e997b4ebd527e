"""Log probabilities of the tokens that a step says, computed where its logits lie, and read later.

They are those of `logprobs.token_logprobs`: the same tokens and ranks, and the same numbers but for
the last digits of a float32, since a device adds in another order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.device import Read, uploaded
from pagedkv.engine.logprobs import TokenLogprob, possible
from pagedkv.engine.sampling_params import MAX_LOGPROBS


class DeviceLogprobs:
    """Of some rows of a step, on their way to the host."""

    def __init__(
        self, logits: torch.Tensor, token_ids: torch.Tensor, wanted: list[tuple[int, int]]
    ) -> None:
        """`wanted`: (row, how many of the likeliest to report) for logits [k, vocabulary] and
        tokens int64 [k]. Nothing waits for the device."""
        self._wanted = wanted
        (rows,) = uploaded([np.array([row for row, _ in wanted], dtype=np.int64)], logits.device)
        own = logits[rows].float()
        chosen = own.gather(1, token_ids[rows, None])
        rank = 1 + (own > chosen).sum(1, keepdim=True)
        largest = own.amax(1, keepdim=True)
        weights = (own - largest).exp_()
        log_totals = largest.double() + weights.sum(1, keepdim=True, dtype=torch.float64).log()
        columns = [chosen - log_totals, rank.double()]
        self._num_top = 0
        if any(num_top for _, num_top in wanted):
            self._num_top = min(MAX_LOGPROBS, own.shape[1])
            values, ids = _largest(own, self._num_top)
            columns += [values - log_totals, ids.double()]
        self._read = Read(torch.cat(columns, dim=1))

    def read(self, token_ids: NDArray[np.int64]) -> Iterator[tuple[int, TokenLogprob]]:
        """Each row, and what is to be told of its token in `token_ids` [k]; waits for that."""
        n = self._num_top
        for (row, num_top), numbers in zip(self._wanted, self._read.numpy().tolist(), strict=True):
            logprob, rank, *top = numbers
            likeliest = possible(list(map(int, top[n : n + num_top])), top[:num_top])
            yield row, TokenLogprob(int(token_ids[row]), logprob, int(rank), likeliest)


def _largest(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and places [n, k] of the largest of each row of float32 [n, m], largest first; of
    equal ones the first one first, and no others."""
    bits = (rows + 0.0).view(torch.int32).long()
    # As integers negative floats are in the opposite order.
    order = torch.where(bits < 0, -0x80000000 - bits, bits)
    places = torch.arange(rows.shape[1] - 1, -1, -1, device=rows.device)
    found = ((order << 32) | places).topk(k, dim=1).values
    ids = rows.shape[1] - 1 - (found & 0xFFFFFFFF)
    return rows.gather(1, ids), ids
