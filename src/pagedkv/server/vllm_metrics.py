"""The same numbers under vLLM's names, for dashboards that know those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

_SAME = {
    "pagedkv_requests_running": "vllm:num_requests_running",
    "pagedkv_requests_waiting": "vllm:num_requests_waiting",
    "pagedkv_preemptions": "vllm:num_preemptions",
    "pagedkv_prompt_tokens": "vllm:prompt_tokens",
    "pagedkv_output_tokens": "vllm:generation_tokens",
    "pagedkv_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "pagedkv_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "pagedkv_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "pagedkv_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "pagedkv_request_prompt_tokens": "vllm:request_prompt_tokens",
    "pagedkv_request_output_tokens": "vllm:request_generation_tokens",
}


def vllm_metrics(ours: Iterable[Metric], *, model_name: str) -> Iterator[Metric]:
    """Families by vLLM's names and with its label, made of ours."""
    families = {family.name: family for family in ours}
    for name, theirs in _SAME.items():
        family = families[name]
        renamed = Metric(theirs, family.documentation, family.type)
        renamed.samples = [
            Sample(
                sample.name.replace(name, theirs, 1),
                {**sample.labels, "model_name": model_name},
                sample.value,
            )
            for sample in family.samples
        ]
        yield renamed
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Share of the blocks that are used.", labels=["model_name"]
    )
    usage.add_metric([model_name], values[("pagedkv_blocks_used",)] / values[("pagedkv_blocks",)])
    yield usage
    # Theirs count first admissions alone, too.
    for theirs, name in (
        ("vllm:prefix_cache_queries", "pagedkv_prefix_query_tokens_total"),
        ("vllm:prefix_cache_hits", "pagedkv_prefix_hit_tokens_total"),
    ):
        family = CounterMetricFamily(theirs, "Tokens of first admissions.", labels=["model_name"])
        family.add_metric([model_name], values[name, "first"])
        yield family
    ended = CounterMetricFamily(
        "vllm:request_success", "Answers that ended.", labels=["model_name", "finished_reason"]
    )
    for reason in ("stop", "length", "abort"):
        value = values.get(("pagedkv_requests_finished_total", reason), 0.0)
        ended.add_metric([model_name, reason], value)
    yield ended
