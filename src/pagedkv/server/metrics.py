"""What the server counts, for Prometheus: `docs/server-metrics.md` has each name and its meaning.

What the engine knows is read from it when somebody asks; only times of requests are noted as they
come, and those in the event loop. vLLM's names stand beside ours, made of the same numbers, so
that dashboards for it work.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from pagedkv.engine.outputs import Chunk
from pagedkv.engine.request import Request
from pagedkv.engine.statistics import StepTimes
from pagedkv.server.vllm_metrics import vllm_metrics

if TYPE_CHECKING:
    from pagedkv.engine.statistics import EngineStatistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FINISHES = ("stop", "length", "abort", "error")

REFUSALS = (
    *("invalid", "context_length_exceeded", "unsupported_parameter", "body_too_large"),
    *("body_timeout", "invalid_api_key", "not_found", "model_not_found", "queue_full"),
    *("too_many_streams", "too_many_watchers", "too_many_connections", "head_too_large"),
    *("overloaded", "shutting_down", "broken_law"),
)
"""What `ApiError.reason` may be, of all that is not the server's own failure."""

_WAITING_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOKENS = tuple(2**power for power in range(18))
_TIMES = (0, 1, 2, 3, 5, 10, 20)


class RequestMetrics:
    """What is noted of requests as they come and go. Used in the event loop alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"pagedkv_{name}", text, buckets=buckets, registry=registry)

        self.finished = Counter(
            "pagedkv_requests_finished",
            "Answers that ended, by reason: stop, length, abort (the client left), error.",
            ["reason"],
            registry=registry,
        )
        self.refused = Counter(
            "pagedkv_requests_refused",
            "Requests that were answered with an error and never let in, by its code.",
            ["reason"],
            registry=registry,
        )
        # All at 0 from the start: a rate does not see the first of a series that begins at 1.
        for reason in FINISHES:
            self.finished.labels(reason)
        for reason in REFUSALS:
            self.refused.labels(reason)
        self.prompt_tokens = Counter(
            "pagedkv_prompt_tokens",
            "Tokens of the prompts that got a first token.",
            registry=registry,
        )
        self.cached_tokens = Counter(
            "pagedkv_cached_prompt_tokens",
            "Of the tokens of prompts that got a first token, those that the cache had.",
            registry=registry,
        )
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _WAITING_S,
        )
        self.output_token = histogram(
            "time_per_output_token_seconds",
            "Of an answer that ended: time between its first and last token, per token.",
            _TOKEN_S,
        )
        self.queue = histogram(
            "request_queue_time_seconds",
            "From a request's arrival to its first admission, or to when it gave up waiting.",
            _WAITING_S,
        )
        self.prefill = histogram(
            "request_prefill_time_seconds",
            "From a prompt's first admission to its first token.",
            _WAITING_S,
        )
        self.decode = histogram(
            "request_decode_time_seconds",
            "Of an answer that ended: from its first token to its last.",
            _WAITING_S,
        )
        self.inference = histogram(
            "request_inference_time_seconds",
            "Of an answer that ended: from its prompt's first admission to its last token.",
            _WAITING_S,
        )
        self.duration = histogram(
            "request_duration_seconds",
            "From a request's arrival to the end of an answer to it.",
            _WAITING_S,
        )
        self.prompt_length = histogram(
            "request_prompt_tokens", "Tokens of a prompt that got a first token.", _TOKENS
        )
        self.computed_length = histogram(
            "request_computed_prompt_tokens",
            "Of a prompt that got a first token, the tokens that the cache had not.",
            _TOKENS,
        )
        self.output_length = histogram(
            "request_output_tokens", "Tokens of an answer that ended.", _TOKENS
        )
        self.longest_output = histogram(
            "request_max_output_tokens",
            "Tokens of the longest answer to a prompt whose answers have all ended.",
            _TOKENS,
        )
        self.preemptions = histogram(
            "request_preemptions",
            "Times that an answer to a prompt gave way until all of them had ended.",
            _TIMES,
        )


class AnswerTimes:
    """When the answers to one HTTP request's prompts began, and how they went."""

    def __init__(self, metrics: RequestMetrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._first_s: dict[tuple[int, int], float] = {}
        self._begun: set[int] = set()
        self._lengths: dict[int, list[int]] = {}  # of the answers to a prompt that have ended

    def note(self, place: int, chunk: Chunk, request: Request | None, now_s: float) -> None:
        """A chunk of the prompt at `place` came."""
        first_s = self._first_s.get((place, chunk.sample))
        if first_s is None:
            first_s = self._first_s[place, chunk.sample] = now_s
            if place not in self._begun and request is not None:
                self._begun.add(place)
                self._begin(request, now_s)
        if chunk.finish_reason is not None and request is not None:
            self._end(chunk, request, first_s, now_s)
            lengths = self._lengths.setdefault(place, [])
            lengths.append(len(request.samples[chunk.sample].token_ids))
            if len(lengths) == request.params.n:
                self._metrics.longest_output.observe(max(lengths))
                self._metrics.preemptions.observe(request.num_preemptions)

    def give_up(self, requests: Sequence[Request | None], now_s: float) -> None:
        """It ended before its time: note how long those have waited that got no first token."""
        for place, request in enumerate(requests):
            if place not in self._begun:
                admitted_s = None if request is None else request.admitted_s
                self._wait(now_s if admitted_s is None else admitted_s)

    def _begin(self, request: Request, now_s: float) -> None:
        metrics = self._metrics
        num_tokens, num_cached = len(request.prompt_ids), request.num_cached_tokens or 0
        metrics.first_token.observe(now_s - self._arrived_s)
        metrics.prompt_tokens.inc(num_tokens)
        metrics.cached_tokens.inc(num_cached)
        metrics.prompt_length.observe(num_tokens)
        metrics.computed_length.observe(num_tokens - num_cached)
        if request.admitted_s is not None:
            self._wait(request.admitted_s)
            metrics.prefill.observe(now_s - request.admitted_s)

    def _wait(self, until_s: float) -> None:
        self._metrics.queue.observe(until_s - self._arrived_s)

    def _end(self, chunk: Chunk, request: Request, first_s: float, now_s: float) -> None:
        metrics = self._metrics
        num_tokens = len(request.samples[chunk.sample].token_ids)
        metrics.finished.labels(chunk.finish_reason).inc()
        metrics.duration.observe(now_s - self._arrived_s)
        metrics.decode.observe(now_s - first_s)
        if request.admitted_s is not None:
            metrics.inference.observe(now_s - request.admitted_s)
        metrics.output_length.observe(num_tokens)
        if num_tokens > 1:
            metrics.output_token.observe((now_s - first_s) / (num_tokens - 1))


class TokenGaps:
    """Time between one token of an answer and the next. Used in the engine's thread alone.

    Plain numbers, since this alone is for each token: a histogram of the library's takes a lock
    for its sum and one for the bucket, and three times as long.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(_TOKEN_S) + 1)
        self._sum_s = 0.0

    def note(self, gap_s: float) -> None:
        """A token came so long after the one before."""
        self._counts[bisect.bisect_left(_TOKEN_S, gap_s)] += 1
        self._sum_s += gap_s

    def family(self) -> HistogramMetricFamily:
        """As Prometheus reads it."""
        bounds = [*map(floatToGoString, _TOKEN_S), "+Inf"]
        return HistogramMetricFamily(
            "pagedkv_inter_token_latency_seconds",
            "Between one token of an answer and the next.",
            buckets=list(zip(bounds, itertools.accumulate(self._counts))),
            sum_value=self._sum_s,
        )


class StepMetrics:
    """Where the time of steps goes. Used in the engine's thread alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.duration = Histogram(
            "pagedkv_step_seconds", "Duration of a step.", buckets=_STEP_S, registry=registry
        )
        self.part_s = {"scheduling": 0.0, "forward": 0.0, "sampling": 0.0, "other": 0.0}

    def note(self, times: StepTimes) -> None:
        """A step was computed."""
        self.duration.observe(times.total_s)
        self.part_s["scheduling"] += times.scheduling_s
        self.part_s["forward"] += times.forward_s
        self.part_s["sampling"] += times.sampling_s
        rest_s = times.total_s - times.scheduling_s - times.forward_s - times.sampling_s
        self.part_s["other"] += rest_s


class Metrics:
    """All of it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        self.steps = StepMetrics(self.registry)
        self.gaps = TokenGaps()

    def page(
        self,
        statistics: EngineStatistics,
        *,
        model_name: str,
        num_waiting: int,
        has_recording_failed: bool = False,
    ) -> bytes:
        """The text that Prometheus reads. `statistics` are those of now."""
        recording = GaugeMetricFamily(
            "pagedkv_recording_failed",
            "1 where --record could not be written any further.",
            value=has_recording_failed,
        )
        ours = [*_of_engine(statistics, num_waiting), self._parts(), self.gaps.family(), recording]
        families = [*map(_without_birth, self.registry.collect()), *ours]
        found = CollectorRegistry()
        found.register(_Fixed([*families, *vllm_metrics(families, model_name=model_name)]))
        return bytes(generate_latest(found))

    def _parts(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "pagedkv_step_part_seconds", "Time in steps by what it went into.", labels=["part"]
        )
        for part, seconds in self.steps.part_s.items():
            family.add_metric([part], seconds)
        return family


def _without_birth(family: Metric) -> Metric:
    """Without the times at which counting began, which are as many samples again."""
    family.samples = [found for found in family.samples if not found.name.endswith("_created")]
    return family


class _Fixed:
    """A collector of families that are made already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families

    def describe(self) -> list[Metric]:
        return []


def _of_engine(statistics: EngineStatistics, num_waiting: int) -> Iterator[Metric]:
    memory = statistics.memory
    gauges = {
        "requests_running": ("Sequences that have blocks.", memory.num_running),
        "requests_waiting": ("Sequences that wait for blocks or a seat.", num_waiting),
        "blocks": ("Physical blocks.", memory.num_blocks),
        "block_size_tokens": ("Tokens that a block holds.", memory.block_size),
        "blocks_used": ("Blocks that some sequence's block table names.", memory.used_blocks),
        "blocks_shared": ("Of the used ones, those of several sequences.", memory.shared_blocks),
        "blocks_cached": (
            "Blocks that nobody uses, with content that can be found.",
            memory.cached_blocks,
        ),
        "blocks_free": ("Blocks that nobody uses, with nothing in them.", memory.free_blocks),
        "used_blocks_fill_ratio": (
            "Share of the slots in used blocks that hold a token; 1 while none is used.",
            1 - memory.waste,
        ),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"pagedkv_{name}", text, value=value)
    counters = {
        "requests": ("Prompts that arrived in the engine.", statistics.requests),
        "output_tokens": ("Tokens generated.", statistics.output_tokens),
        "steps": ("Steps computed.", memory.num_steps),
        "computed_tokens": ("Tokens whose keys and values were computed.", memory.computed_tokens),
        "preemptions": ("Times that a sequence gave way.", memory.preemptions),
        "recomputed_tokens": (
            "Tokens that were computed again after a sequence gave way.",
            memory.recomputed_tokens,
        ),
        "evicted_blocks": ("Cached blocks that were handed out again.", memory.evicted_blocks),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"pagedkv_{name}", text, value=value)
    queries = CounterMetricFamily(
        "pagedkv_prefix_query_tokens",
        "Tokens of sequences that were admitted, which the cache could have had.",
        labels=["admission"],
    )
    queries.add_metric(["first"], memory.query_tokens)
    queries.add_metric(["again"], statistics.readmitted_tokens)
    hits = CounterMetricFamily(
        "pagedkv_prefix_hit_tokens", "Of those, the ones that it had.", labels=["admission"]
    )
    hits.add_metric(["first"], memory.hit_tokens)
    hits.add_metric(["again"], statistics.readmitted_hit_tokens)
    yield from (queries, hits)
