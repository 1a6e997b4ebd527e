from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_engine.py"


def test_the_example_generates_what_its_model_without_a_cache_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = runpy.run_path(str(EXAMPLE))
    shared = [7, 1, 7, 3, 9, 9, 2, 5]
    prompts = [[4, 8, 15], [*shared, 11], [*shared, 30, 31]]
    answers = example["generate"](prompts, 6)
    assert capsys.readouterr().out.splitlines() == [
        "prompt of 3 tokens: 0 cached",
        "prompt of 9 tokens: 0 cached",
        "prompt of 10 tokens: 8 cached",
    ]
    for prompt, answer in zip(prompts, answers):
        tokens = list(prompt)
        for token in answer:
            assert token == next_token(example, tokens)
            tokens.append(token)


def next_token(model: dict[str, Any], tokens: list[int]) -> int:
    x = model["embedding"][tokens].astype(np.float64)
    dim, each = model["DIM"], model["HEADS"] // model["KV_HEADS"]
    q = (x[-1] @ model["to_q"]).reshape(-1, dim)
    k, v = ((x @ model[name]).reshape(len(x), -1, dim) for name in ("to_k", "to_v"))
    heads = []
    for head in range(model["HEADS"]):
        weights = np.exp(k[:, head // each] @ q[head] * dim**-0.5)
        heads.append(weights @ v[:, head // each] / weights.sum())
    return int((np.concatenate(heads) @ model["to_logits"]).argmax())
