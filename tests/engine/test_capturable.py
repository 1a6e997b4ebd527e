"""Which models can be captured as graphs: those that never look at their own numbers on the host.

A decode step is computed on torch's device without numbers, "meta": there whatever asks for one
fails, as it fails while a graph is captured, and so does every shape that hangs on one.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.tiny_models import tiny_model
from pagedkv.engine.architectures import WORKING
from pagedkv.engine.model import PagedModel

WAITING = {"gpt2", "jetmoe"}


class _Attention:
    """Attends to nothing."""

    def attend(self, module: Any, query: Any, key: Any, value: Any, *_: Any) -> torch.Tensor:
        return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


class _Crossing(TorchDispatchMode):
    """Fails where tensors cross between the device and the host."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        found = operation(*arguments, **(options or {}))
        name = operation.__name__.split(".")[0]
        if name in ("_to_copy", "copy_"):
            source = arguments[1 if name == "copy_" else 0]
            if source.device != found.device:
                raise RuntimeError(f"a copy from {source.device} to {found.device}")
        return found


def decode(model_type: str, **changes: Any) -> None:
    """A step of four sequences in bfloat16; fails if it waits for the device."""
    model = PagedModel(
        tiny_model(model_type, **changes).to("meta", torch.bfloat16), pack_weights=False
    )
    four = torch.zeros(4, dtype=torch.int64, device="meta")
    with _Crossing():
        logits = model.forward(four, four, four, _Attention())
    assert logits.shape == (4, model.vocab_size)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "qwen3", "qwen3_moe"])
def test_a_decode_step_waits_for_nothing(model_type: str) -> None:
    decode(model_type)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", sorted(WORKING - WAITING))
def test_a_decode_step_of_every_other_architecture_waits_for_nothing(model_type: str) -> None:
    decode(model_type)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gpt2", {}),
        ("jetmoe", {}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_what_the_documentation_names_waits(model_type: str, changes: dict[str, Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        decode(model_type, **changes)


def test_without_a_token_for_padding_gpt2_does_not() -> None:
    decode("gpt2", pad_token_id=None)


class _Unlaunched:
    """A kernel that computes nothing: the interpreter would read its arguments."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


class _Reading(TorchDispatchMode):
    """Fails where the host looks at a number, or asks how many there are."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = operation.__name__.split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "is_pinned", "_pin_memory"), name
        return operation(*arguments, **(options or {}))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_what_is_captured_brings_nothing_from_the_host(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from models.gpu_batch import DEVICE
    from models.tiny_engine import TinyEngine
    from pagedkv.attention.gpu import storage
    from pagedkv.engine.fused import gates, norms, rotary

    captured = []

    def capture(compute: Any) -> Any:
        compute()  # the kinds of layers are met, as in the run before a capture
        with monkeypatch.context() as patch, _Reading():
            for name in ("from_numpy", "as_tensor"):
                patch.delattr(torch, name)
            compute()
        captured.append(compute)
        return compute

    model = PagedModel(tiny_model(model_type).to(DEVICE), triton=True)
    assert model.fused is not None and model.fused.norms and model.fused.rotary
    for module, kernel in (
        *((storage, name) for name in ("attend_pieces", "combine_parts", "write_rows")),
        (gates, "multiply_by_gate"),
        (norms, "normalize_rows"),
        (rotary, "rotate_heads"),
    ):
        monkeypatch.setattr(module, kernel, _Unlaunched())
    running = TinyEngine(model, 8, seats=2, capture=capture)
    if DEVICE == "cpu" or model_type != "gpt_oss":
        assert running.graph_problem is None and len(captured) == 2
