"""Every metric of a simulation: its key, label, unit and a definition of one line.

The table, the report, the JSON and `docs/metrics.md` all read this list, so none of them can call
a number by another name. Tools in this field disagree on most of these words; the definitions
say which meaning is ours.

`python -m pagedkv.simulate.metrics_page` prints `docs/metrics.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pagedkv.simulate.palette import STYLES
from pagedkv.simulate.results import KINDS, SchemeResult

MEMORY = "Where the memory goes"
CONCURRENCY = "Requests at once"
PREFIXES = "Prefix hits and sharing"
SPEED = "Throughput and latency"
RUN = "The run"
CURVE = "Hit-rate curve of the trace"


@dataclass(frozen=True)
class Definition:
    """What one number means.

    `key` is its path in the JSON (below a scheme, or below `curve`); `unit` is the unit in which
    it is shown, the JSON always has the base unit: shares from 0 to 1, seconds, counts.
    """

    key: str
    label: str
    unit: str
    group: str
    definition: str


@dataclass(frozen=True)
class Metric(Definition):
    """A number that every scheme has, and how to read and show it.

    `read` gives it in the base unit, None where it does not apply; shown is `scale` times that.
    """

    read: Callable[[SchemeResult], float | None]
    scale: float = 1.0
    decimals: int | None = None  # None: three significant digits


def filled_share(scheme: SchemeResult) -> float | None:
    """Of the slots that requests hold, the share that holds token states; None if none is held."""
    tokens = scheme.share["token_states"]
    held = tokens + scheme.share["reserved"] + scheme.share["never_used"]
    return tokens / held if held > 0 else None


def _share_of(kind: str) -> Callable[[SchemeResult], float | None]:
    return lambda scheme: scheme.share[kind]


def _percentile_of(quantity: str, percent: int) -> Callable[[SchemeResult], float | None]:
    def read(scheme: SchemeResult) -> float | None:
        value = float(getattr(getattr(scheme, quantity), f"p{percent}"))
        return value if math.isfinite(value) else None

    return read


_KIND_DEFINITIONS = {
    "token_states": "Slots that hold the keys and values of a token of a running request; a slot "
    "that several requests share counts once.",
    "reserved": "Slots that a running request holds, empty now, and will fill before it leaves.",
    "never_used": "Slots that a running request holds and will never fill (internal "
    "fragmentation).",
    "unusable": "Free slots that the request at the head of the queue cannot get because they lie "
    "in holes too small for it (external fragmentation), and what a buddy system rounds up.",
    "cached": "Slots of blocks that nobody uses now, whose content a later prompt can still hit; "
    "they are handed out again when needed.",
    "free": "Slots that hold nothing and that the next request could take.",
}

METRICS: tuple[Metric, ...] = (
    *(
        Metric(
            f"share.{kind}",
            STYLES[kind].label,
            "%",
            MEMORY,
            _KIND_DEFINITIONS[kind],
            _share_of(kind),
            100.0,
            1,
        )
        for kind in KINDS
    ),
    Metric(
        "filled_share",
        "Held memory, filled",
        "%",
        MEMORY,
        "Of the slots that running requests hold (token states, reserved, never used), the share "
        "that holds token states.",
        filled_share,
        100.0,
        1,
    ),
    Metric(
        "running_mean",
        "Running, mean",
        "requests",
        CONCURRENCY,
        "Requests that hold memory, averaged over the time during which any request waits or runs.",
        lambda scheme: scheme.running_mean,
        1.0,
        2,
    ),
    Metric(
        "running_peak",
        "Running, peak",
        "requests",
        CONCURRENCY,
        "The most requests that held memory in one step.",
        lambda scheme: scheme.running_peak,
        1.0,
        0,
    ),
    Metric(
        "preemptions",
        "Preemptions",
        "",
        CONCURRENCY,
        "Times that a running request had to give back its memory and wait again because no "
        "block was free.",
        lambda scheme: scheme.preemptions,
        1.0,
        0,
    ),
    Metric(
        "recomputed_tokens",
        "Recomputed",
        "tokens",
        CONCURRENCY,
        "Tokens whose keys and values had been computed, were lost to a preemption and were "
        "computed again.",
        lambda scheme: scheme.recomputed_tokens,
        1.0,
        0,
    ),
    Metric(
        "hit_rate_first",
        "Hit rate, first time",
        "%",
        PREFIXES,
        "Of the prompt tokens of all requests, each counted at its first admission only, the "
        "share found in the prefix cache.",
        lambda scheme: scheme.hit_rate_first,
        100.0,
        2,
    ),
    Metric(
        "hit_rate_all",
        "Hit rate, all",
        "%",
        PREFIXES,
        "The same over all admissions: a preempted request that comes back counts again, with its "
        "prompt and the answer so far, and may find its own blocks.",
        lambda scheme: scheme.hit_rate_all,
        100.0,
        2,
    ),
    Metric(
        "hit_tokens_first",
        "Hit, first time",
        "tokens",
        PREFIXES,
        "Prompt tokens found in the prefix cache at first admissions.",
        lambda scheme: None if scheme.hit_rate_first is None else scheme.hit_tokens_first,
        1.0,
        0,
    ),
    Metric(
        "saved_by_sharing",
        "Saved by sharing",
        "%",
        PREFIXES,
        "Of all block-table entries, the share that names a block which another entry names too "
        "and which is counted there, averaged over time.",
        lambda scheme: scheme.saved_by_sharing if scheme.scheme == "paged" else None,
        100.0,
        1,
    ),
    Metric(
        "requests_per_s",
        "Throughput",
        "requests/s",
        SPEED,
        "Requests finished, divided by the duration of the run.",
        lambda scheme: scheme.requests_per_s,
    ),
    Metric(
        "output_tokens_per_s",
        "Output",
        "tokens/s",
        SPEED,
        "Output tokens that came out, those of unfinished requests too, divided by the duration of "
        "the run; recomputed tokens do not count.",
        lambda scheme: scheme.output_tokens_per_s,
    ),
    *(
        Metric(
            f"ttft_s.p{percent}",
            f"TTFT p{percent}",
            "s",
            SPEED,
            "Time to first token, percentile over requests that got one before the run ended: from "
            "arrival, waiting included, to the end of the step that yields it.",
            _percentile_of("ttft_s", percent),
        )
        for percent in (50, 90, 99)
    ),
    *(
        Metric(
            f"tpot_s.p{percent}",
            f"TPOT p{percent}",
            "ms",
            SPEED,
            "Time per output token, percentile over finished requests with two "
            "output tokens or more: from first to last token, divided by their number less one.",
            _percentile_of("tpot_s", percent),
            1000.0,
        )
        for percent in (50, 90, 99)
    ),
    Metric(
        "duration_s",
        "Duration",
        "s",
        RUN,
        "Simulated time from the first arrival to the end of the last step; a run cut short by "
        "--duration ends with the step that reaches that time, or at it where nobody is there.",
        lambda scheme: scheme.duration_s,
    ),
    Metric(
        "num_steps",
        "Steps",
        "",
        RUN,
        "Forward passes of the model that the scheduler ordered.",
        lambda scheme: scheme.num_steps,
        1.0,
        0,
    ),
    Metric(
        "began",
        "Began",
        "requests",
        RUN,
        "Requests that got their first output token before the run ended: those that TTFT is of.",
        lambda scheme: scheme.began,
        1.0,
        0,
    ),
    Metric(
        "finished",
        "Finished",
        "requests",
        RUN,
        "Requests that got all their output tokens.",
        lambda scheme: scheme.finished,
        1.0,
        0,
    ),
    Metric(
        "num_refused",
        "Refused",
        "requests",
        RUN,
        "Requests that are longer than the model serves, or need more memory or seats than there "
        "are under this scheme: refused when they arrive.",
        lambda scheme: len(scheme.refused),
        1.0,
        0,
    ),
)

CURVE_DEFINITIONS: tuple[Definition, ...] = (
    Definition(
        "hit_rate",
        "Hit rate at a size",
        "%",
        CURVE,
        "Share of the trace's accesses that find their block in a cache of that many blocks which "
        "drops the least recently used first; exact, time ignored.",
    ),
    Definition(
        "ceiling",
        "Ceiling",
        "%",
        CURVE,
        "The hit rate with unlimited memory: no size and no policy can hit more on this trace.",
    ),
    Definition(
        "smallest",
        "Smallest memory",
        "blocks",
        CURVE,
        "The fewest blocks whose hit rate reaches the given share of the ceiling.",
    ),
    Definition(
        "accesses",
        "Accesses",
        "blocks",
        CURVE,
        "Look-ups of all requests in turn: one for each prefix id, a last one for fewer tokens "
        "too, if the ids are a prompt's and no finer than a block; else one for each block that a "
        "prompt fills.",
    ),
    Definition(
        "distinct",
        "Distinct",
        "blocks",
        CURVE,
        "Different blocks among the accesses: each misses at least once.",
    ),
)


WASTE = Metric(
    "waste",
    "Waste",
    "%",
    MEMORY,
    "Of the slots that running requests hold, the share that holds no token: what their memory "
    "that is filled leaves of 100 %; given by --what-if, which compares settings of one scheme.",
    lambda scheme: None if (filled := filled_share(scheme)) is None else 1.0 - filled,
    100.0,
    2,
)
"""Where settings of one scheme are compared; schemes are compared by what is filled."""


def metric_by_key(key: str) -> Metric:
    """The metric of that key in the JSON."""
    return next(metric for metric in METRICS if metric.key == key)


_IN_STEPS = {
    "s": "steps",
    "ms": "steps",
    "tokens/s": "tokens/step",
    "requests/s": "requests/step",
}


def unit_in_steps(unit: str) -> str:
    """The unit where the steps of a run are repeated and time is counted in them."""
    return _IN_STEPS.get(unit, unit)


def show_number(value: float | None, decimals: int | None) -> str:
    """`value` for people: thousands in commas, fixed decimals or three significant digits.

    >>> show_number(1234.5678, None), show_number(0.04567, None), show_number(None, 1)
    ('1,235', '0.0457', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if decimals is None:
        magnitude = math.floor(math.log10(abs(value))) if value else 0
        decimals = min(max(2 - magnitude, 0), 6)
    return f"{value:,.{decimals}f}"


def show_metric(metric: Metric, scheme: SchemeResult) -> str:
    """The metric of this scheme in the metric's unit; an en dash where it does not apply."""
    value = metric.read(scheme)
    return show_number(None if value is None else value * metric.scale, metric.decimals)


def applying(schemes: tuple[SchemeResult, ...]) -> list[Metric]:
    """The metrics that apply to at least one of the schemes, in order."""
    return [m for m in METRICS if any(m.read(scheme) is not None for scheme in schemes)]


def label_with_unit(definition: Definition) -> str:
    """The label with its unit in brackets, where it has one."""
    return f"{definition.label} ({definition.unit})" if definition.unit else definition.label


def definitions_by_group() -> dict[str, list[Definition]]:
    """All definitions, metrics and curve, in order under the title of their group.

    The percentiles of one quantity have one definition and become one entry.
    """
    groups: dict[str, list[Definition]] = {}
    of_memory = [metric for metric in METRICS if metric.group == MEMORY]
    for definition in (*of_memory, WASTE, *METRICS[len(of_memory) :], *CURVE_DEFINITIONS):
        entries = groups.setdefault(definition.group, [])
        if entries and entries[-1].definition == definition.definition:
            last = entries[-1]
            percentile = definition.label.rsplit(" ", 1)[1]
            entries[-1] = Definition(
                f"{last.key}, .{percentile}",
                f"{last.label}, {percentile}",
                last.unit,
                last.group,
                last.definition,
            )
        else:
            entries.append(definition)
    return groups


_ANSWERS = (
    "Where several answers are generated to a prompt (--samples), each answer counts as a request"
)

GROUP_NOTES = {
    MEMORY: "Shares of the KV memory, averaged over the time during which any request waits or "
    "runs. The six kinds add up to 100 %.",
    CONCURRENCY: f"{_ANSWERS}.",
    SPEED: f"{_ANSWERS}. Who still waits for a first token when --duration ends the run is in no "
    "percentile, which flatters a scheme that keeps many waiting: compare how many began.",
    RUN: f"{_ANSWERS}, but for those refused, which are prompts.",
    CURVE: "One pass over the trace, whatever the scheme; only for traces with prefix ids.",
}
"""What holds for a whole group, said once."""
