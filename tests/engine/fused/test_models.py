"""Whole models give with fused layers what they give with their own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from models.gpu_batch import DEVICE
from models.tiny_models import VOCABULARY, tiny_model
from pagedkv.engine.architectures import WORKING
from pagedkv.engine.fused import FusedLayers
from pagedkv.engine.model import PagedModel

SOME = {
    "llama": FusedLayers(norms=9, gates=4, linear=12, rotary=1),
    "gemma2": FusedLayers(norms=17, gates=4, linear=12, rotary=1),
    "cohere": FusedLayers(norms=0, gates=4, linear=12, rotary=1),  # turns neighbours
    "deepseek_v3": FusedLayers(norms=17, gates=7, linear=8, rotary=1),  # gives halves; experts
    "gpt_neox": FusedLayers(norms=0, gates=0, linear=0, rotary=1),  # turns a part of a head
    "gpt_oss": FusedLayers(norms=9, gates=0, linear=12, rotary=1),  # cosines for each pair
    "gemma3n_text": FusedLayers(norms=58, gates=6, linear=15, rotary=1),  # turns one at a time
    "phi3": FusedLayers(norms=9, gates=4, linear=0, rotary=1),  # has gate and up in one
    "qwen3": FusedLayers(norms=17, gates=4, linear=12, rotary=1),
    "gpt2": FusedLayers(),
}


class _Causal:
    """Attends over the tokens of one sequence, without blocks."""

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, scale: Any, *_: Any
    ) -> torch.Tensor:
        each = query.shape[1] // key.shape[1]
        q, k, v = (t.transpose(0, 1).float() for t in (query, key, value))
        k, v = (t.repeat_interleave(each, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * (query.shape[2] ** -0.5 if scale is None else scale)
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).to(query.dtype).contiguous()


def logits(model: PagedModel) -> torch.Tensor:
    tokens = torch.randint(3, VOCABULARY, (11,), generator=torch.Generator().manual_seed(1))
    places = torch.arange(11, device=DEVICE)
    return model.forward(tokens.to(DEVICE), places, places, _Causal())  # type: ignore[arg-type]


def fused_and_own(model_type: str, dtype: torch.dtype) -> tuple[PagedModel, Any, Any]:
    own, fused = (
        PagedModel(
            tiny_model(model_type).to(DEVICE, dtype),
            triton=True,
            pack_weights=False,
            fused_layers=fused_layers,
        )
        for fused_layers in (False, True)
    )
    return fused, logits(fused), logits(own)


@pytest.mark.parametrize("model_type", SOME)
def test_a_model_with_fused_layers_says_the_same(model_type: str) -> None:
    model, found, expected = fused_and_own(model_type, torch.float32)
    assert model.fused == SOME[model_type]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "olmo2"])
def test_in_half_precision_it_is_as_far_off_as_roundings_are(model_type: str) -> None:
    _, found, expected = fused_and_own(model_type, torch.bfloat16)
    exact = fused_and_own(model_type, torch.float32)[2]
    own = (expected.float() - exact).norm()
    assert (found.float() - exact).norm() < 1.25 * own


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", sorted(WORKING - set(SOME)))
def test_every_other_architecture_says_the_same(model_type: str) -> None:
    _, found, expected = fused_and_own(model_type, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
