"""The choice of tokens that stays on the device: what needs nothing but the logits of a row.

Only what gives the token that `sampling.sample` gives for the same logits, for certain, is chosen
here: the likeliest one. Drawing compares sums of floats with a random number, and a device adds in
another order than a CPU.
"""

from __future__ import annotations

import torch

from pagedkv.engine.sampling import SamplerState


def chooses_on_device(state: SamplerState) -> bool:
    """Whether the next token of a sequence is the likeliest of its logits as they are, and nobody
    wants to know how likely."""
    params = state.params
    return (
        params.is_greedy
        and not params.logit_bias
        and params.logprobs is None
        and state.counts is None
        and not state.bars_end
    )


def choose_greedily(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token of each row of logits [k, vocabulary], and whether there is one.

    int64 [k], the lowest of several that are equally likely, and bool [k]: false where the largest
    logit is infinite or NaN. Nothing waits for the device.
    """
    # `max` would not promise which of several it names.
    token_ids = logits.argmax(1)
    largest = logits.gather(1, token_ids[:, None])[:, 0]
    return token_ids, largest.isfinite()
