"""Logits of tokens that may not come next become -inf, where the logits lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagedkv.engine.device import uploaded
from pagedkv.engine.grammars import Bits


@torch.inference_mode()
def bar_tokens(logits: torch.Tensor, rows: Sequence[int], allowed: Sequence[Bits]) -> None:
    """Set all logits [k, vocabulary] of `rows` to -inf but those of the tokens `allowed` in each.

    In place: these rows are read by nobody else, and a copy of all would cost the others in the
    step more than the grammars do.
    """
    vocabulary = logits.shape[1]
    if logits.device.type == "cpu":
        for row, bits in zip(rows, allowed, strict=True):
            barred = np.unpackbits(~bits, count=vocabulary, bitorder="little").view(np.bool_)
            logits[row].masked_fill_(torch.from_numpy(barred), -torch.inf)
        return
    num_words = -(-vocabulary // 64)
    words = np.zeros((len(rows), 8 * num_words), dtype=np.uint8)
    for place, bits in enumerate(allowed):
        words[place, : len(bits)] = bits
    there, packed = uploaded([np.array(rows, dtype=np.int64), words.view("<i8")], logits.device)
    shifts = torch.arange(64, device=logits.device)
    is_allowed = ((packed[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocabulary]
    logits[there] = logits[there].masked_fill(~is_allowed, -torch.inf)
