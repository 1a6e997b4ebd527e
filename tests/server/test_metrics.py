"""What Prometheus reads: names, units, and numbers that are right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")

import httpx
from prometheus_client.parser import text_string_to_metric_families

from models.tiny_server import MODEL, TinyServer, tiny_server
from pagedkv.engine.outputs import Chunk
from pagedkv.engine.statistics import StepTimes
from pagedkv.server.limits import ServerLimits
from pagedkv.server.metrics import FINISHES, REFUSALS, AnswerTimes, Metrics, TokenGaps

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    """A server with so few blocks that somebody must give way."""
    with tiny_server(num_tokens=None, num_blocks=30, max_num_seqs=8) as made:
        client = made.client()
        for _ in range(2):
            client.completions.create(
                model=MODEL,
                prompt=[[5 + i] * 13 for i in range(4)],
                max_tokens=40,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        stream = client.completions.create(
            model=MODEL, prompt="Hi", max_tokens=90, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        made.wait_until(lambda: not made.serving.exchanges and made.used_blocks == 0)
        yield made


def values(server: TinyServer) -> dict[str, float]:
    """All samples, by their name and labels."""
    page = server.http().get("/metrics").text
    return {
        sample.name + "".join(f",{k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


class Answering:
    """A prompt that a test answers, and what is counted of it."""

    def __init__(self, num_answers: int = 1, admitted_s: float | None = 10.5) -> None:
        self.metrics = Metrics()
        self.times = AnswerTimes(self.metrics.requests, arrived_s=10.0)
        self.request: Any = SimpleNamespace(
            prompt_ids=(1, 2, 3),
            num_cached_tokens=2,
            num_preemptions=4,
            admitted_s=admitted_s,
            params=SimpleNamespace(n=num_answers),
            samples=[SimpleNamespace(token_ids=[7] * count) for count in (5, 1)],
        )

    def came(self, sample: int, now_s: float, finish: Any = None, *, place: int = 0) -> None:
        chunk = Chunk(sample, "x", token_ids=(7,), logprobs=None, finish_reason=finish)
        self.times.note(place, chunk, self.request, now_s)

    def counted(self, name: str) -> tuple[float | None, float | None]:
        """Sum and count of a histogram."""
        found = [f"pagedkv_{name}_{kind}" for kind in ("sum", "count")]
        return tuple(map(self.metrics.registry.get_sample_value, found))  # type: ignore[return-value]


def test_an_answer_is_timed_from_its_arrival_and_from_token_to_token() -> None:
    answering = Answering(num_answers=2)
    answering.came(0, 11.0)
    answering.came(1, 12.0, "stop")
    assert answering.counted("request_preemptions") == (0, 0)
    answering.came(0, 13.0, "length")
    for name, total, count in (
        ("time_to_first_token_seconds", 1.0, 1),  # of a prompt, however many answers it has
        ("request_queue_time_seconds", 0.5, 1),
        ("request_prefill_time_seconds", 0.5, 1),
        ("request_prompt_tokens", 3.0, 1),
        ("request_computed_prompt_tokens", 1.0, 1),
        ("request_duration_seconds", 2.0 + 3.0, 2),
        ("request_decode_time_seconds", 0.0 + 2.0, 2),
        ("request_inference_time_seconds", 1.5 + 2.5, 2),
        ("request_output_tokens", 5.0 + 1.0, 2),
        ("time_per_output_token_seconds", 0.5, 1),  # of one token there is no time between
        ("request_max_output_tokens", 5.0, 1),
        ("request_preemptions", 4.0, 1),
    ):
        assert answering.counted(name) == (pytest.approx(total), count), name
    value = answering.metrics.registry.get_sample_value
    assert value("pagedkv_cached_prompt_tokens_total") == 2
    assert value("pagedkv_prompt_tokens_total") == 3


def test_prompts_of_one_request_are_counted_apart() -> None:
    answering = Answering(num_answers=2)
    answering.came(0, 11.0, "stop", place=0)
    answering.came(1, 12.0, "stop", place=1)
    assert answering.counted("request_max_output_tokens") == (0, 0)  # one more for each
    answering.came(0, 12.0, "stop", place=1)
    assert answering.counted("request_max_output_tokens") == (5.0, 1)
    assert answering.counted("request_preemptions") == (4.0, 1)
    assert answering.counted("time_to_first_token_seconds") == (pytest.approx(1.0 + 2.0), 2)
    assert answering.counted("request_prompt_tokens") == (6.0, 2)


def test_who_ends_without_having_been_admitted_has_not_been_computed() -> None:
    answering = Answering(admitted_s=None)
    answering.request.num_cached_tokens = None
    answering.came(1, 11.0, "stop")
    for name in ("queue", "prefill", "inference"):
        assert answering.counted(f"request_{name}_time_seconds") == (0, 0)
    assert answering.counted("request_computed_prompt_tokens") == (3.0, 1)
    assert answering.counted("request_duration_seconds") == (1.0, 1)


@pytest.mark.parametrize(
    ("admitted_s", "waited_s"), [(None, 4.0), (10.5, 0.5)], ids=["in the queue", "admitted"]
)
def test_who_gives_up_before_a_first_token_has_waited_and_nothing_else(
    admitted_s: float | None, waited_s: float
) -> None:
    answering = Answering(admitted_s=admitted_s)
    answering.times.give_up([answering.request, None], 14.0)
    assert answering.counted("request_queue_time_seconds") == (pytest.approx(waited_s + 4.0), 2)
    for name in ("time_to_first_token_seconds", "request_prefill_time_seconds"):
        assert answering.counted(name) == (0, 0)
    assert answering.metrics.registry.get_sample_value("pagedkv_prompt_tokens_total") == 0


def test_who_gives_up_after_a_first_token_has_waited_once() -> None:
    answering = Answering()
    answering.came(0, 11.0)
    answering.times.give_up([answering.request], 14.0)
    assert answering.counted("request_queue_time_seconds") == (pytest.approx(0.5), 1)
    assert answering.counted("request_duration_seconds") == (0, 0)


def test_gaps_between_tokens_are_counted_at_and_below_their_bounds() -> None:
    gaps = TokenGaps()
    for gap_s in (0.0005, 0.001, 0.0011, 0.15, 2.5, 60.0):
        gaps.note(gap_s)
    found = {
        sample.labels.get("le", sample.name.rpartition("_")[2]): sample.value
        for sample in gaps.family().samples
    }
    assert [found[bound] for bound in ("0.001", "0.0025", "0.1", "0.15", "1.0", "2.5", "+Inf")] == [
        *(2, 3, 3, 4, 4, 5, 6)
    ]
    assert found["count"] == 6 and found["sum"] == pytest.approx(62.6526)


def test_every_number_is_on_the_page_under_its_own_name() -> None:
    metrics = Metrics()
    metrics.steps.note(StepTimes(scheduling_s=0.25, forward_s=1.0, sampling_s=0.5, total_s=2.0))
    for count, finish in enumerate(FINISHES, 51):
        metrics.requests.finished.labels(finish).inc(count)
    metrics.requests.prompt_tokens.inc(60)
    metrics.requests.cached_tokens.inc(20)
    memory = {"num_running": 1, "shared_blocks": 2, "cached_blocks": 7, "free_blocks": 8}
    memory |= {"num_blocks": 12, "used_blocks": 3, "block_size": 4, "waste": 0.25}
    memory |= {"query_tokens": 40, "hit_tokens": 30, "num_steps": 9, "computed_tokens": 10}
    memory |= {"preemptions": 13, "recomputed_tokens": 14, "evicted_blocks": 15}
    statistics: Any = SimpleNamespace(
        memory=SimpleNamespace(**memory),
        requests=5,
        output_tokens=6,
        readmitted_tokens=20,
        readmitted_hit_tokens=8,
    )
    page = metrics.page(statistics, model_name="m", num_waiting=16).decode()
    for line in (
        'pagedkv_step_part_seconds_total{part="scheduling"} 0.25',
        'pagedkv_step_part_seconds_total{part="forward"} 1.0',
        'pagedkv_step_part_seconds_total{part="sampling"} 0.5',
        'pagedkv_step_part_seconds_total{part="other"} 0.25',
        "pagedkv_requests_running 1.0",
        "pagedkv_requests_waiting 16.0",
        "pagedkv_blocks 12.0",
        "pagedkv_block_size_tokens 4.0",
        "pagedkv_blocks_used 3.0",
        "pagedkv_blocks_shared 2.0",
        "pagedkv_blocks_cached 7.0",
        "pagedkv_blocks_free 8.0",
        "pagedkv_used_blocks_fill_ratio 0.75",
        "pagedkv_requests_total 5.0",
        "pagedkv_output_tokens_total 6.0",
        "pagedkv_steps_total 9.0",
        "pagedkv_computed_tokens_total 10.0",
        "pagedkv_preemptions_total 13.0",
        "pagedkv_recomputed_tokens_total 14.0",
        "pagedkv_evicted_blocks_total 15.0",
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 51.0',
        'vllm:request_success_total{finished_reason="error",model_name="m"} 54.0',
        'vllm:prompt_tokens_by_source_total{model_name="m",source="local_compute"} 40.0',
        'vllm:prompt_tokens_by_source_total{model_name="m",source="local_cache_hit"} 20.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.25',
        'pagedkv_prefix_query_tokens_total{admission="again"} 20.0',
        'pagedkv_prefix_hit_tokens_total{admission="again"} 8.0',
        'vllm:prefix_cache_queries_total{model_name="m"} 40.0',
        'vllm:prefix_cache_hits_total{model_name="m"} 30.0',
        'vllm:num_requests_waiting{model_name="m"} 16.0',
        'vllm:cache_config_info{block_size="4",model_name="m",num_gpu_blocks="12"} 1.0',
    ):
        assert f"\n{line}\n" in page, line
    assert "_created" not in page


def test_requests_and_tokens_are_counted(server: TinyServer) -> None:
    found = values(server)
    memory = server.llm.statistics().memory
    assert found["pagedkv_requests_total"] == 9
    assert found["pagedkv_requests_finished_total,reason=length"] == 8
    assert found["pagedkv_requests_finished_total,reason=abort"] == 1
    assert found["pagedkv_prompt_tokens_total"] == 8 * 13 + 2
    assert found["pagedkv_output_tokens_total"] == server.llm.statistics().output_tokens >= 321
    for name, count in (
        ("time_to_first_token_seconds", 9),
        ("request_queue_time_seconds", 9),
        ("request_duration_seconds", 8),
        ("time_per_output_token_seconds", 8),
    ):
        assert found[f"pagedkv_{name}_count"] == count
        assert 0 < found[f"pagedkv_{name}_sum"] < 600
    # Of 90 tokens that were asked for a few had come when the client left.
    gaps = found["pagedkv_inter_token_latency_seconds_count"] - 8 * 39
    assert 0 <= gaps < 89
    assert 0 < found["pagedkv_inter_token_latency_seconds_sum"] < 600
    assert found["pagedkv_request_preemptions_sum"] == memory.preemptions
    assert found["pagedkv_request_max_output_tokens_count"] == 8
    computed = found["pagedkv_request_computed_prompt_tokens_sum"]
    cached = found["pagedkv_cached_prompt_tokens_total"]
    assert computed + cached == 8 * 13 + 2 and cached == memory.hit_tokens > 0
    # What a request spends is spent waiting, on its prompt, or on its answer.
    waited, prefill, decode, inference = (
        found[f"pagedkv_request_{name}_time_seconds_sum"]
        for name in ("queue", "prefill", "decode", "inference")
    )
    assert waited > 0 and prefill > 0 and 0 < decode < inference < decode + prefill
    # First tokens come before the last ones, also of answers that are not streamed.
    durations = found["pagedkv_request_duration_seconds_sum"]
    assert found["pagedkv_time_to_first_token_seconds_sum"] < durations
    assert found["pagedkv_request_output_tokens_sum"] == 8 * 40
    assert memory.preemptions > 0 and found["pagedkv_preemptions_total"] == memory.preemptions


def test_first_admissions_are_told_apart_from_those_after_giving_way(server: TinyServer) -> None:
    found = values(server)
    memory = server.llm.statistics().memory
    assert found["pagedkv_prefix_query_tokens_total,admission=first"] == 8 * 13 + 2
    assert found["pagedkv_prefix_hit_tokens_total,admission=first"] == memory.hit_tokens > 0
    again = found["pagedkv_prefix_query_tokens_total,admission=again"]
    hits = found["pagedkv_prefix_hit_tokens_total,admission=again"]
    assert again > 0 and 0 <= hits < again
    assert found["vllm:prefix_cache_queries_total,model_name=tiny"] == 8 * 13 + 2


def test_every_block_is_free_cached_or_used_and_the_parts_of_steps_are_the_whole(
    server: TinyServer,
) -> None:
    found = values(server)
    kinds = [found[f"pagedkv_blocks_{kind}"] for kind in ("used", "cached", "free")]
    assert sum(kinds) == found["pagedkv_blocks"] == 30 and kinds[0] == 0
    assert found["pagedkv_used_blocks_fill_ratio"] == 1
    parts = [value for name, value in found.items() if name.startswith("pagedkv_step_part_seconds")]
    assert len(parts) == 4 and sum(parts) == pytest.approx(found["pagedkv_step_seconds_sum"])
    assert found["pagedkv_step_seconds_count"] == found["pagedkv_steps_total"]


def test_every_refusal_is_counted_from_nothing_under_its_code() -> None:
    def refused(server: TinyServer) -> dict[str, float]:
        found = values(server)
        before = "pagedkv_requests_refused_total,reason="
        return {
            name.removeprefix(before): value
            for name, value in found.items()
            if name.startswith(before)
        }

    with tiny_server(limits=ServerLimits(max_body_bytes=10_000)) as server, server.http() as http:
        assert refused(server) == dict.fromkeys(REFUSALS, 0.0)
        for body in (
            {"prompt": 5},
            {"prompt": "Hi", "top_p": 2},
            {"prompt": [199]},
            {"prompt": "x" * 600},
            {"prompt": "x" * 11_000},
            {"prompt": "Hi", "suffix": "x"},
            {"prompt": "Hi", "model": "x"},
        ):
            assert http.post("/v1/completions", json=body).status_code >= 400
        assert http.get("/nowhere").status_code == 404
        assert {name: value for name, value in refused(server).items() if value} == {
            "invalid": 3,
            "context_length_exceeded": 1,
            "body_too_large": 1,
            "unsupported_parameter": 1,
            "model_not_found": 1,
            "not_found": 1,
        }


def test_vllms_names_have_the_same_numbers(server: TinyServer) -> None:
    found = values(server)
    assert (
        found["vllm:generation_tokens_total,model_name=tiny"]
        == (found["pagedkv_output_tokens_total"])
    )
    assert found["vllm:num_requests_running,model_name=tiny"] == 0
    assert found["vllm:kv_cache_usage_perc,model_name=tiny"] == 0
    assert found["vllm:request_success_total,finished_reason=length,model_name=tiny"] == 8
    name = "vllm:time_to_first_token_seconds_bucket,le=+Inf,model_name=tiny"
    assert found[name] == found["pagedkv_time_to_first_token_seconds_bucket,le=+Inf"] == 9
    for theirs, ours in (
        ("inter_token_latency_seconds", "inter_token_latency_seconds"),
        ("e2e_request_latency_seconds", "request_duration_seconds"),
        ("request_prefill_time_seconds", "request_prefill_time_seconds"),
        ("request_decode_time_seconds", "request_decode_time_seconds"),
        ("request_inference_time_seconds", "request_inference_time_seconds"),
        ("request_num_preemptions", "request_preemptions"),
    ):
        for kind in ("sum", "count", "bucket,le=+Inf"):
            assert found[f"vllm:{theirs}_{kind},model_name=tiny"] == found[f"pagedkv_{ours}_{kind}"]
    by_source = [
        found[f"vllm:prompt_tokens_by_source_total,model_name=tiny,source=local_{source}"]
        for source in ("compute", "cache_hit")
    ]
    assert sum(by_source) == found["vllm:prompt_tokens_total,model_name=tiny"]
    assert by_source[1] == found["vllm:prompt_tokens_cached_total,model_name=tiny"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_the_queue_is_counted_among_those_who_waited(stream: bool) -> None:
    with tiny_server(max_num_seqs=1) as server:
        running = server.client().completions.create(
            model=MODEL, prompt="Hi", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(running))
        body = {"prompt": ["Hello", "Hi"], "max_tokens": 5, "stream": stream}
        with pytest.raises(httpx.ReadTimeout), server.http() as http:
            told = http.stream("POST", "/v1/completions", json=body, timeout=0.3)
            with told as answer:
                answer.read()
        server.wait_until(lambda: len(server.serving.exchanges) == 1)
        running.close()
        server.wait_until(lambda: not server.serving.is_busy and server.used_blocks == 0)
        found = values(server)
        assert found["pagedkv_requests_finished_total,reason=abort"] == 3
        assert found["pagedkv_request_queue_time_seconds_count"] == 3
        assert found["pagedkv_time_to_first_token_seconds_count"] == 1
        assert found["pagedkv_request_prefill_time_seconds_count"] == 1
        assert found["pagedkv_prompt_tokens_total"] == 2


def test_who_is_refused_has_not_waited() -> None:
    with tiny_server(num_tokens=64) as server, server.http() as http:
        assert http.post("/v1/completions", json={"prompt": [5] * 90}).status_code == 400
        found = values(server)
        assert found["pagedkv_requests_refused_total,reason=context_length_exceeded"] == 1
        assert found["pagedkv_request_queue_time_seconds_count"] == 0


def test_names_follow_prometheus_conventions(server: TinyServer) -> None:
    page = server.http().get("/metrics").text
    for family in text_string_to_metric_families(page):
        assert family.documentation.endswith("."), family.name
        if family.name.startswith("vllm:"):
            continue
        assert re.fullmatch(r"pagedkv_[a-z_]+", family.name)
        assert not re.search(r"_(ms|millis|minutes|percent|kb|mb)", family.name)
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith("_total")


def families(server: TinyServer) -> set[str]:
    page = server.http().get("/metrics").text
    return {family.name for family in text_string_to_metric_families(page)}


def test_every_name_is_on_the_page_about_metrics(server: TinyServer) -> None:
    page = (DOCS / "server-metrics.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`((?:pagedkv_|vllm:)[a-z_0-9]+)`", page))
    assert told == families(server)


def test_the_dashboard_asks_for_nothing_that_is_not_there(server: TinyServer) -> None:
    dashboard: Any = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    there = families(server)
    names = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            names |= set(re.findall(r"pagedkv_[a-z_]+", target["expr"]))
    plain = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in names}
    assert len(plain) > 15 and plain <= there
