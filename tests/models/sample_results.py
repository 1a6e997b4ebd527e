"""Results as a simulation could find them, made by a crude one, for what shows results.

Requests arrive at random and are held for a while; each scheme reserves what it reserves and
places it by first fit in whole blocks. Nothing here is exact; the shapes are right: paged fills
its memory with tokens, reserve-max with holes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pagedkv.simulate.results import (
    KINDS,
    HitRateCurve,
    MemoryMap,
    PaperFigure,
    Percentiles,
    SchemeResult,
    SimulationResult,
    Timeline,
)

BLOCK_SIZE = 16
TOKENS, RESERVED, NEVER, UNUSABLE, CACHED, FREE = range(len(KINDS))


PAPER = (
    PaperFigure("figure 2", "Orca (Max)", "token states", "%", 20.4, 28.4, 8, "points"),
    PaperFigure("figure 2", "vLLM", "token states", "%", 96.3, 95.9, 96, "at least"),
    PaperFigure("figure 13", "vLLM", "requests", "", 30.0, 36.0, 25, "percent"),
    PaperFigure("figure 13", "vLLM", "fitted", "", 30.0, 30.0, 25, "percent", is_fitted=True),
)
"""Made up: one at its bar, one below it, one within it, and one that was fitted."""


def sample_result(
    *,
    trace_name: str = "sharegpt",
    schemes: tuple[str, ...] = ("paged", "reserve-max", "reserve-pow2", "reserve-exact"),
    with_prefix_ids: bool = True,
    bytes_per_token: int | None = 819_200,
    num_blocks: int = 981,
    rate_per_s: float = 2.0,
    num_requests: int = 400,
    seed: int = 0,
) -> SimulationResult:
    """A result with every field filled, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate_per_s, num_requests))
    prompt = np.clip(rng.lognormal(4.6, 0.9, num_requests), 4, 1000).astype(int)
    output = np.clip(rng.lognormal(5.5, 0.8, num_requests), 2, 1000).astype(int)
    curve = sample_curve(rng) if with_prefix_ids else None
    remarks = (
        "3 requests arrived before the one above them in the file: sorted by time.",
        "The step time is a roofline estimate for A100 (2.0 TB/s, 312 TFLOP/s).",
    )
    return SimulationResult(
        command=f"pagedkv simulate {trace_name} --memory 12GiB --model opt-13b --gpu a100",
        settings={
            "trace": trace_name,
            "memory": "12GiB",
            "model": "opt-13b",
            "block-size": BLOCK_SIZE,
            "max-num-seqs": 256,
            "max-num-batched-tokens": 2048,
            "watermark": 0.01,
            "prefix-caching": with_prefix_ids,
            "num-blocks": None,
            "seed": seed,
        },
        trace_name=trace_name,
        trace_format="synthetic",
        num_requests=num_requests,
        num_answers=num_requests,
        prompt_tokens=int(prompt.sum()),
        output_tokens=int(output.sum()),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        bytes_per_token=bytes_per_token,
        schemes=tuple(
            _scheme(name, arrival, prompt, output, num_blocks, with_prefix_ids) for name in schemes
        ),
        curve=curve,
        remarks=remarks,
        comparison=PAPER,
    )


def sample_curve(rng: np.random.Generator) -> HitRateCurve:
    """A staircase that rises to 36.6 % over 180,000 distinct blocks."""
    blocks = np.unique(np.geomspace(1, 180_000, 1500).astype(np.int64))
    rate = 0.366412 * (1 - np.exp(-((blocks / 14_000) ** 0.8)))
    rate[-1] = 0.366412
    rate = np.maximum.accumulate(rate)
    return HitRateCurve(
        block_size=BLOCK_SIZE,
        accesses=288_500,
        distinct=182_790,
        blocks=blocks,
        hit_rate=rate,
        ceiling=0.366412,
        smallest={
            share: int(blocks[np.searchsorted(rate, share * 0.366412)])
            for share in (0.5, 0.8, 0.95, 1.0)
        },
    )


def nan_result() -> SimulationResult:
    """A run in which no request had two output tokens and none finished under reserve-max."""
    result = sample_result(num_requests=30)
    nothing = Percentiles(float("nan"), float("nan"), float("nan"))
    paged, rival, *rest = result.schemes
    refused = tuple(f"request {i} needs 2,048 tokens, the whole memory has 1,024" for i in range(9))
    rival = replace(rival, ttft_s=nothing, began=0, finished=0, requests_per_s=0.0, refused=refused)
    return replace(result, schemes=(replace(paged, tpot_s=nothing), rival, *rest))


def _scheme(
    name: str,
    arrival: np.ndarray,
    prompt: np.ndarray,
    output: np.ndarray,
    num_blocks: int,
    with_prefix_ids: bool,
) -> SchemeResult:
    total = prompt + output
    step_s = 0.5
    waiting: list[int] = []
    running: dict[int, float] = {}  # request -> tokens held so far
    owner = np.full(num_blocks, -1)
    left = np.zeros(num_blocks, dtype=bool)  # content still there after the last user left
    place: dict[int, np.ndarray] = {}
    rows, marks, snaps, first_token = [], [], [], {}
    now, next_arrival = 0.0, 0
    while next_arrival < len(arrival) or waiting or running:
        while next_arrival < len(arrival) and arrival[next_arrival] <= now:
            waiting.append(next_arrival)
            next_arrival += 1
        blocked = False
        while waiting and not blocked:
            request = waiting[0]
            spot = _find(name, owner, int(prompt[request]), int(output[request]))
            if spot is None:
                blocked = True
            else:
                owner[spot], place[request] = request, spot
                left[spot] = False
                running[request] = float(prompt[request])
                first_token.setdefault(request, now + step_s - arrival[request])
                waiting.pop(0)
        counts = np.zeros(len(KINDS))
        kind = np.where(left & (owner < 0), CACHED if with_prefix_ids else FREE, FREE)
        if name != "paged":
            kind[owner < 0] = UNUSABLE if blocked else FREE
        for request, tokens in list(running.items()):
            tokens = min(tokens + 12, float(total[request]))
            running[request] = tokens
            if name == "paged" and len(place[request]) * BLOCK_SIZE < tokens:
                free = np.flatnonzero(owner < 0)[:1]
                if len(free) == 0:
                    running[request] = float(len(place[request]) * BLOCK_SIZE)
                    tokens = running[request]
                owner[free], left[free] = request, False
                place[request] = np.append(place[request], free)
            blocks = place[request]
            filled = -(-int(tokens) // BLOCK_SIZE)
            ever = -(-int(total[request]) // BLOCK_SIZE)
            kind[blocks[:filled]] = TOKENS
            kind[blocks[filled:ever]] = RESERVED
            kind[blocks[ever:]] = NEVER
            if tokens >= total[request]:
                owner[blocks] = -1
                left[blocks] = name == "paged"
                del running[request], place[request]
        for i in range(len(KINDS)):
            counts[i] = (kind == i).sum()
        if name == "paged":  # the last block of each request is half empty on average
            empty = min(len(running) * 0.5, counts[TOKENS])
            counts[TOKENS] -= empty
            counts[RESERVED] += 0.8 * empty
            counts[NEVER] += 0.2 * empty
        rows.append(counts / num_blocks)
        marks.append((len(running), len(waiting)))
        snaps.append(kind.astype(np.uint8))
        now += step_s
    share = np.array(rows)
    marks_array = np.array(marks, dtype=float)
    thin = max(len(share) // 300, 1)
    bins = [slice(i, i + thin) for i in range(0, len(share), thin)]
    columns = np.array(snaps)[:: max(len(snaps) // 240, 1)].T
    per_row = -(-num_blocks // 160)
    mapped = columns[::per_row]
    shared = (mapped == TOKENS) & (np.arange(len(mapped)) % 9 == 0)[:, None] & (name == "paged")
    waits = np.array(list(first_token.values()))
    preempted = 17 if name == "paged" else 0
    return SchemeResult(
        scheme=name,
        placement=None if name == "paged" else "first-fit",
        share={kind: float(share[:, i].mean()) for i, kind in enumerate(KINDS)},
        running_mean=float(marks_array[:, 0].mean()),
        running_peak=int(marks_array[:, 0].max()),
        preemptions=preempted,
        recomputed_tokens=preempted * 317,
        hit_rate_first=0.3361 if with_prefix_ids and name == "paged" else None,
        hit_rate_all=0.3412 if with_prefix_ids and name == "paged" else None,
        hit_tokens_first=int(0.3361 * prompt.sum()) if with_prefix_ids else 0,
        saved_by_sharing=0.11 if with_prefix_ids and name == "paged" else 0.0,
        requests_per_s=len(arrival) / now,
        output_tokens_per_s=float(output.sum()) / now,
        ttft_s=Percentiles(*(float(np.percentile(waits, p)) for p in (50, 90, 99))),
        tpot_s=Percentiles(0.0313, 0.0371, 0.0544),
        duration_s=now,
        num_steps=len(rows) * 16,
        began=len(arrival),
        finished=len(arrival),
        refused=(),
        timeline=Timeline(
            start_s=np.array([b.start * step_s for b in bins]),
            end_s=np.array([min(b.stop, len(share)) * step_s for b in bins]),
            share=np.array([share[b].mean(axis=0) for b in bins]),
            running=np.array([marks_array[b, 0].mean() for b in bins]),
            waiting=np.array([marks_array[b, 1].mean() for b in bins]),
        ),
        memory_map=MemoryMap(
            time_s=np.linspace(0, now, columns.shape[1], endpoint=False),
            kind=mapped,
            shared=shared.astype(np.uint8),
            slots_per_row=float(per_row * BLOCK_SIZE),
        ),
    )


def _find(name: str, owner: np.ndarray, prompt: int, output: int) -> np.ndarray | None:
    free = np.flatnonzero(owner < 0)
    if name == "paged":
        need = -(-prompt // BLOCK_SIZE) + 2
        return free[:need] if len(free) >= need + 8 else None
    tokens = {
        "reserve-max": 2048,
        "reserve-pow2": prompt + 2 ** int(np.ceil(np.log2(output))),
        "reserve-exact": prompt + output,
    }[name]
    need = -(-tokens // BLOCK_SIZE)
    starts = np.flatnonzero(np.convolve(owner < 0, np.ones(need), "valid") == need)
    return np.arange(starts[0], starts[0] + need) if len(starts) else None
