"""What runs is known to run; everything else is refused by name, with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv.engine.architectures import WORKING, check_architecture, longest_exact
from pagedkv.errors import InvalidInput


def config(model_type: str, **settings: Any) -> Any:
    made = SimpleNamespace(model_type=model_type, **settings)
    made.get_text_config = lambda: made
    return made


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (config("mamba2"), "state for each sequence"),
        (config("qwen3_next", layer_types=["linear_attention"]), "state for each sequence"),
        (config("llama", layer_types=["full_attention", "conv"]), "layers of kind conv"),
        (config("falcon"), "built into the model"),
        (config("doge"), "bias"),
        (config("diffllama"), "twice in each layer"),
        (config("t5", is_encoder_decoder=True), "encoder"),
        (config("brand_new"), "not among the architectures that were tried"),
    ],
)
def test_what_would_not_run_right_is_refused_with_the_reason(made: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=f"{made.model_type}.*{reason}") as refusal:
        check_architecture(made)
    assert "\n" not in str(refusal.value)


def test_what_works_is_let_through() -> None:
    for model_type in WORKING:
        check_architecture(config(model_type))
    check_architecture(config("llama", layer_types=["full_attention", "sliding_attention"]))


def test_the_page_about_architectures_names_exactly_those_that_work() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
    works = page.split("Everything else is refused")[0]
    assert set(re.findall(r"`([a-z]\w*)`", works)) - {"transformers", "model_type"} == WORKING


@pytest.mark.parametrize(
    ("made", "length"),
    [
        (config("llama", max_position_embeddings=512), 512),
        (config("biogpt"), None),
        (
            config(
                "phi3",
                max_position_embeddings=4096,
                rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 128},
            ),
            128,
        ),
        (
            config(
                "llama", max_position_embeddings=256, rope_scaling={"type": "dynamic", "factor": 2}
            ),
            256,
        ),
        (
            config(
                "gemma3_text",
                max_position_embeddings=4096,
                rope_parameters={
                    "full_attention": {
                        "rope_type": "longrope",
                        "original_max_position_embeddings": 64,
                    },
                    "sliding_attention": {"rope_type": "default"},
                },
            ),
            64,
        ),
        (
            config(
                "llama4_text",
                max_position_embeddings=100_000,
                attn_temperature_tuning=True,
                floor_scale=8192,
            ),
            8191,
        ),
    ],
)
def test_length_is_limited_to_where_a_batch_gives_what_one_sequence_gives(
    made: Any, length: int | None
) -> None:
    assert longest_exact(made)[0] == length
