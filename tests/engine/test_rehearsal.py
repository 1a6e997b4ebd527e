"""What a request finds when it comes: everything compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")

_A_RUN = """
import json
import sys

from numba.core.caching import Cache

made = []
load = Cache.load_overload


def noted(self, signature, target_context):
    made.append(self._name)
    return load(self, signature, target_context)


Cache.load_overload = noted

from models.tiny_models import tiny_model
from pagedkv.engine import LLM, BeamSearchParams, SamplingParams

llm = LLM(tiny_model("llama"), num_blocks=12, block_size=4, max_num_seqs=4)
while_loading = sorted(made)
made.clear()

llm.generate([[1] * 9, [1] * 9, [2, 3]], SamplingParams(n=2, max_tokens=9, temperature=0.5))
llm.generate([[1] * 20, [2] * 20, [3] * 20], SamplingParams(max_tokens=16))  # preempts, evicts
llm.beam_search([5, 6], BeamSearchParams(num_beams=3, max_tokens=6))
with llm.between_steps() as engine:
    first = engine.add([1, 2], SamplingParams(max_tokens=9))
    second = engine.add([4] * 9, SamplingParams(max_tokens=9, n=2))
    engine.step()
    engine.cancel(first)
    engine.cancel(second)
assert llm.statistics().memory.preemptions
print(json.dumps([while_loading, sorted(made)]))
"""


def test_no_request_waits_for_a_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _A_RUN],
        check=True,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    while_loading, later = json.loads(done.stdout.splitlines()[-1])
    assert any("schedule" in name for name in while_loading)
    assert later == []
