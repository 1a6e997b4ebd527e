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
    "pagedkv_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "pagedkv_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "pagedkv_request_inference_time_seconds": "vllm:request_inference_time_seconds",
    "pagedkv_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "pagedkv_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "pagedkv_request_prompt_tokens": "vllm:request_prompt_tokens",
    "pagedkv_request_output_tokens": "vllm:request_generation_tokens",
    "pagedkv_request_max_output_tokens": "vllm:request_max_num_generation_tokens",
    "pagedkv_request_computed_prompt_tokens": "vllm:request_prefill_kv_computed_tokens",
    "pagedkv_request_preemptions": "vllm:request_num_preemptions",
    "pagedkv_cached_prompt_tokens": "vllm:prompt_tokens_cached",
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
    sizes = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Sizes of the memory, as labels of a 1.",
        labels=["model_name", "block_size", "num_gpu_blocks"],
    )
    block_size, num_blocks = values["pagedkv_block_size_tokens",], values["pagedkv_blocks",]
    sizes.add_metric([model_name, f"{block_size:.0f}", f"{num_blocks:.0f}"], 1)
    yield sizes
    sources = CounterMetricFamily(
        "vllm:prompt_tokens_by_source", "Tokens of prompts.", labels=["model_name", "source"]
    )
    cached = values["pagedkv_cached_prompt_tokens_total",]
    computed = values["pagedkv_prompt_tokens_total",] - cached
    sources.add_metric([model_name, "local_compute"], computed)
    sources.add_metric([model_name, "local_cache_hit"], cached)
    yield sources
    # Theirs count first admissions alone, too.
    for theirs, text, name in (
        (
            "vllm:prefix_cache_queries",
            "Tokens of prompts at their first admission.",
            "pagedkv_prefix_query_tokens_total",
        ),
        (
            "vllm:prefix_cache_hits",
            "Of these, tokens that were found in the cache.",
            "pagedkv_prefix_hit_tokens_total",
        ),
    ):
        family = CounterMetricFamily(theirs, text, labels=["model_name"])
        family.add_metric([model_name], values[name, "first"])
        yield family
    ended = CounterMetricFamily(
        "vllm:request_success", "Answers that ended.", labels=["model_name", "finished_reason"]
    )
    for reason in ("stop", "length", "abort", "error"):
        value = values.get(("pagedkv_requests_finished_total", reason), 0.0)
        ended.add_metric([model_name, reason], value)
    yield ended
