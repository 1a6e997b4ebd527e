"""Many clients at once, more than memory has room for, and many of them leave midway."""

from __future__ import annotations

import asyncio
import random

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("fastapi", reason="needs the extra [server]")
pytest.importorskip("prometheus_client", reason="needs the extra [server]")
pytest.importorskip("openai", reason="needs OpenAI's client")

from models.event_client import ask_all
from models.tiny_server import tiny_server
from pagedkv.engine import SamplingParams


def test_every_answer_is_the_engines_own_and_nobody_is_lost() -> None:
    rng = random.Random(1)
    count = 120
    system = rng.choices(range(5, 190), k=24)  # that every third begins with
    prompts = [
        (system if i % 3 == 0 else []) + rng.choices(range(5, 190), k=rng.randint(1, 60))
        for i in range(count)
    ]
    lengths = [rng.randint(2, 24) for _ in prompts]
    leaving = [rng.randint(1, 8) if i % 3 == 1 else None for i in range(count)]
    bodies = [
        {"prompt": ids, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        for ids, length in zip(prompts, lengths)
    ]
    # Room for about a dozen of them.
    with tiny_server(num_tokens=600, max_num_seqs=24) as server:
        answers = asyncio.run(ask_all(server.url, bodies, clients=48, leave_after=leaving))
        server.wait_until(lambda: not server.serving.exchanges and server.used_blocks == 0)
        server.llm.verify()
        memory = server.llm.statistics().memory
        assert memory.preemptions > 0 and memory.hit_tokens > 0
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths
        ]
        expected = server.llm.generate(prompts, params, namespace={"apart": 1})
    completed = 0
    for answer, wanted, leaves in zip(answers, expected, leaving, strict=True):
        assert answer.status == 200 and answer.error is None
        if answer.is_done:
            completed += 1
            assert (answer.text, answer.finish_reason) == (wanted.text, "length")
        else:
            assert leaves is not None
    assert completed >= sum(leaves is None for leaves in leaving)
