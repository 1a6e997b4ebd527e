"""How many kernels a layer asks the device for: as `docs/gpu.md` tells."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="triton is not installed")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.gpu_batch import DEVICE
from models.tiny_models import tiny_model
from pagedkv.engine.fused import gates, norms, rotary
from pagedkv.engine.model import PagedModel

FREE = {
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "permute"),
    "reshape",  # here of what lies in order
    *("select", "slice", "split", "split_with_sizes", "t", "transpose", "unbind", "unsqueeze"),
    *("squeeze", "view", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh"),
}
"""What torch does without the device."""


class _Attention:
    """Attends to nothing, in two launches: writing keys and values, and attending."""

    def __init__(self, count: Counter[str]) -> None:
        self.count = count

    def attend(self, module: Any, query: Any, key: Any, value: Any, *_: Any) -> torch.Tensor:
        self.count["attention"] += 2
        return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


class _Counting(TorchDispatchMode):
    def __init__(self, count: Counter[str]) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        found = operation(*arguments, **(options or {}))
        name = operation.__name__.split(".")[0]
        if name not in FREE:
            self.count[name] += 1
        return found


class _Counted:
    """Stands where a kernel does, and launches nothing."""

    def __init__(self, name: str, count: Counter[str]) -> None:
        self.name, self.count = name, count

    def __getitem__(self, grid: Any) -> Any:
        def launch(*_: Any, **__: Any) -> None:
            self.count[self.name] += 1

        return launch


def of_a_layer(
    monkeypatch: pytest.MonkeyPatch, model_type: str, *, fused_layers: bool
) -> Counter[str]:
    """The kernels of a decode step in bfloat16: of three layers, less those of two."""
    counts = []
    for num_layers in (2, 3):
        changes: dict[str, Any] = {"num_hidden_layers": num_layers}
        if model_type != "llama":
            changes["layer_types"] = ["full_attention"] * num_layers
        made = tiny_model(model_type, **changes).to(DEVICE, torch.bfloat16)
        model = PagedModel(made, triton=True, pack_weights=False, fused_layers=fused_layers)
        count: Counter[str] = Counter()
        four = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        with monkeypatch.context() as patch:
            for module, name in (
                (norms, "normalize_rows"),
                (gates, "multiply_by_gate"),
                (rotary, "rotate_heads"),
            ):
                patch.setattr(module, name, _Counted(name, count))
            with torch.inference_mode(), _Counting(count):
                model.forward(four, four, four, _Attention(count))  # type: ignore[arg-type]
        counts.append(count)
    return counts[1] - counts[0]


@pytest.mark.parametrize(
    ("model_type", "before", "after"), [("qwen3", 55, 14), ("llama", 39, 12), ("gemma2", 63, 14)]
)
def test_a_layer_asks_for_as_many_kernels_as_the_documentation_says(
    monkeypatch: pytest.MonkeyPatch, model_type: str, before: int, after: int
) -> None:
    own = of_a_layer(monkeypatch, model_type, fused_layers=False)
    fused = of_a_layer(monkeypatch, model_type, fused_layers=True)
    assert (own.total(), fused.total()) == (before, after)
