"""What a simulation shows, in sentences: the same ones in the terminal and in the report."""

from __future__ import annotations

import math

from pagedkv.simulate.metrics import filled_share, show_number
from pagedkv.simulate.results import (
    HitRateCurve,
    Percentiles,
    SchemeResult,
    SimulationResult,
    WhatIfResult,
)

GIB = 2**30

NO_PREFIX_IDS = (
    "The trace has no prefix ids, so nobody can know which prompts share a prefix: no hit rate "
    "is given."
)


def paged_and_rival(result: SimulationResult) -> tuple[SchemeResult | None, SchemeResult | None]:
    """The paged scheme, and the contiguous one to tell it against: reserve-max where simulated.

    Either is None where the run has no such scheme.
    """
    paged = next((s for s in result.schemes if s.scheme == "paged"), None)
    rivals = [s for s in result.schemes if s.scheme != "paged"]
    rival = next((s for s in rivals if s.scheme == "reserve-max"), rivals[0] if rivals else None)
    return paged, rival


def headlines(result: SimulationResult) -> tuple[str, ...]:
    """The result in at most five sentences, the most important first.

    They say as readily that paging wins nothing (memory was never short) as that it wins much.
    """
    paged, rival = paged_and_rival(result)
    if paged is None or rival is None:
        return tuple(_alone(scheme) for scheme in result.schemes[:1])
    sentences = []
    running, running_rival = (show_number(s.running_mean, 1) for s in (paged, rival))
    is_apart = abs(paged.running_mean - rival.running_mean) > 0.02 * rival.running_mean
    if not is_apart:
        sentences.append(
            f"At this load memory is not the limit: paged and {rival.scheme} both hold "
            f"{running} requests at once."
        )
    else:
        hits = bool(paged.hit_rate_first)
        ours = "Paged memory and its prefix cache together hold" if hits else "Paged memory holds"
        sentences.append(
            f"{ours} {running} requests at once where {rival.scheme} holds "
            f"{running_rival}{_times(paged.running_mean, rival.running_mean)}."
        )
    filled, filled_rival = (filled_share(s) for s in (paged, rival))
    if filled is not None and filled_rival is not None:
        sentences.append(
            f"Of the memory that requests hold, {_percent(filled)} is full of tokens, against "
            f"{_percent(filled_rival)} under {rival.scheme}; of all KV memory, "
            f"{_percent(paged.share['token_states'])} against "
            f"{_percent(rival.share['token_states'])}."
        )
    cacheless = ", which has no prefix cache" if paged.hit_rate_first else ""
    wait, wait_rival = paged.ttft_s.p50, rival.ttft_s.p50
    if math.isfinite(wait) and math.isfinite(wait_rival) and paged.began != rival.began:
        sentences.append(
            f"Half of the requests that saw a first token saw it within {show_seconds(wait)} "
            f"({paged.began:,} requests), against {show_seconds(wait_rival)} under {rival.scheme} "
            f"({rival.began:,}){cacheless}."
        )
    elif math.isfinite(wait) and math.isfinite(wait_rival):
        sentences.append(
            f"Half of the requests see their first token within {show_seconds(wait)}, against "
            f"{show_seconds(wait_rival)} under {rival.scheme}{cacheless}."
        )
    if paged.hit_rate_first is not None:
        sentences.append(
            f"The prefix cache serves {_percent(paged.hit_rate_first)} of the prompt tokens "
            "without computing them again."
        )
        if is_apart and paged.hit_rate_first:
            sentences.append("--no-prefix-caching shows what paging alone does.")
    return tuple(sentences)


def _alone(scheme: SchemeResult) -> str:
    return (
        f"{scheme.scheme} holds {show_number(scheme.running_mean, 1)} requests at once; "
        f"{_percent(scheme.share['token_states'])} of the KV memory holds tokens."
    )


def _times(ours: float, theirs: float) -> str:
    if theirs <= 0 or ours <= 0:
        return ""
    return f" ({show_number(ours / theirs, 1 if ours < 20 * theirs else 0)} times as many)"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def show_seconds(value: float) -> str:
    """A duration for people: `85 ms`, `1.23 s`, `12.5 min`, `3.2 h`.

    >>> show_seconds(0.0853), show_seconds(1.234), show_seconds(750.0), show_seconds(11520.0)
    ('85.3 ms', '1.23 s', '12.5 min', '3.20 h')
    """
    if not math.isfinite(value):
        return "–"
    for limit, unit, divisor in ((1.0, "ms", 1e-3), (180.0, "s", 1.0), (7200.0, "min", 60.0)):
        if value < limit:
            return f"{show_number(value / divisor, None)} {unit}"
    return f"{show_number(value / 3600.0, None)} h"


def first_tokens_after(waited_s: Percentiles) -> str:
    """How long first tokens took: `first tokens after 810 ms (p50) and 2.40 s (p99)`."""
    p50, p99 = show_seconds(waited_s.p50), show_seconds(waited_s.p99)
    return f"first tokens after {p50} (p50) and {p99} (p99)"


def show_bytes(value: float) -> str:
    """A size in binary units: `24.0 GiB`.

    >>> show_bytes(24 * 2**30), show_bytes(800 * 2**10)
    ('24.0 GiB', '800 KiB')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{show_number(value / size, None)} {unit}"
    return f"{value:,.0f} B"


def traffic_size(result: SimulationResult | WhatIfResult) -> str:
    """The traffic in words: requests, their answers where these are more, and tokens."""
    answers = "" if result.num_answers == result.num_requests else f"{result.num_answers:,} answers"
    return (
        f"{result.num_requests:,} requests, {answers}{', ' if answers else ''}"
        f"{result.prompt_tokens:,} prompt and {result.output_tokens:,} output tokens"
    )


def memory_size(result: SimulationResult | WhatIfResult) -> str:
    """The simulated memory in words: blocks, and bytes where the size of a token is known."""
    size = f"{result.num_blocks:,} blocks of {result.block_size} tokens"
    if result.bytes_per_token is None:
        return size
    total = result.num_blocks * result.block_size * result.bytes_per_token
    return f"{size} ({show_bytes(total)})"


def simulated_blocks(curve: HitRateCurve, result: SimulationResult) -> int:
    """The simulated memory in blocks of the curve, which may have another block size."""
    return result.num_blocks * result.block_size // curve.block_size


def hit_rate_at(curve: HitRateCurve, num_blocks: int) -> float:
    """The hit rate with `num_blocks` blocks: the curve is a staircase, flat between its points."""
    at = int(curve.blocks.searchsorted(num_blocks, side="right"))
    return float(curve.hit_rate[at - 1]) if at > 0 else 0.0


def curve_bytes(curve: HitRateCurve, num_blocks: int, result: SimulationResult) -> int | None:
    """What `num_blocks` of the curve's blocks take, in bytes; None where a token's is unknown."""
    if result.bytes_per_token is None:
        return None
    return num_blocks * curve.block_size * result.bytes_per_token


def curve_rows(curve: HitRateCurve, result: SimulationResult) -> list[tuple[str, int, bool]]:
    """The sizes worth naming, ascending: where shares of the ceiling are reached, and this run's.

    Each is a label, a number of the curve's blocks, and whether it is the simulated memory.
    """
    rows = [
        (f"{100 * share:g} % of the ceiling", int(blocks), False)
        for share, blocks in curve.smallest.items()
    ]
    rows.append(("the memory simulated here", simulated_blocks(curve, result), True))
    return sorted(rows, key=lambda row: row[1])
