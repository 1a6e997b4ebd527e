"""The choice of a token, step by step on plain lists in double precision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from pagedkv.engine.sampling_params import SamplingParams


def penalised(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> list[float]:
    """Logits after bias and penalties, counted anew from all tokens."""
    found = []
    times = Counter(output_ids)
    for token_id, logit in enumerate(logits):
        logit += (params.logit_bias or {}).get(token_id, 0.0)
        if token_id in prompt_ids or token_id in times:
            if logit < 0:
                logit *= params.repetition_penalty
            else:
                logit /= params.repetition_penalty
        logit -= params.frequency_penalty * times[token_id]
        if times[token_id]:
            logit -= params.presence_penalty
        found.append(logit)
    return found


def distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The probability of each token: temperature, then top-k, top-p and min-p."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / params.temperature) for logit in logits]
    ranked = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if params.top_k > 0:
        kth = logits[ranked[min(params.top_k, len(ranked)) - 1]]
        ranked = [token_id for token_id in ranked if logits[token_id] >= kth]
    if params.top_p < 1:
        mass = sum(weights[token_id] for token_id in ranked)
        nucleus, before = [], 0.0
        for token_id in ranked:
            if before >= params.top_p * mass:
                break
            nucleus.append(token_id)
            before += weights[token_id]
        ranked = nucleus
    kept = {token_id for token_id in ranked if weights[token_id] >= params.min_p}
    total = sum(weights[token_id] for token_id in kept)
    return [
        weights[token_id] / total if token_id in kept else 0.0 for token_id in range(len(logits))
    ]


def stopped_text(text: str, stops: Sequence[str], searched_from: int = 0) -> tuple[str, str | None]:
    """The text before the first stop string that is complete, and which one.

    The first to be complete counts, and of those the longest; it must end behind `searched_from`.
    """
    ends = [
        (place + len(stop), -len(stop), stop)
        for stop in stops
        for place in range(len(text))
        if text.startswith(stop, place) and place + len(stop) > searched_from
    ]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop
