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
    if logits.device.type == "cpu":
        _bar_by_row(logits, rows, allowed)
    else:
        _bar_at_once(logits, rows, allowed)


def _bar_by_row(logits: torch.Tensor, rows: Sequence[int], allowed: Sequence[Bits]) -> None:
    for row, bits in zip(rows, allowed, strict=True):
        barred = np.unpackbits(~bits, count=logits.shape[1], bitorder="little").view(np.bool_)
        logits[row].masked_fill_(torch.from_numpy(barred), -torch.inf)


def _bar_at_once(logits: torch.Tensor, rows: Sequence[int], allowed: Sequence[Bits]) -> None:
    """For a device, which is sent the bits and spreads them itself: nobody waits for it."""
    vocabulary = logits.shape[1]
    words = np.zeros((len(rows), 8 * (-(-vocabulary // 64))), dtype=np.uint8)
    for place, bits in enumerate(allowed):
        words[place, : len(bits)] = bits
    there, packed = uploaded([np.array(rows, dtype=np.int64), words.view("<i8")], logits.device)
    shifts = torch.arange(64, device=logits.device)
    is_allowed = ((packed[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocabulary]
    logits[there] = logits[there].masked_fill(~is_allowed, -torch.inf)
