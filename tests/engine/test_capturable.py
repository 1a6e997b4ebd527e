"""Which models can be captured as graphs: those that never look at their own numbers on the host.

Seen by the operations that a decode step asks torch for, on a CPU: one that gives a number to the
host, or whose shape depends on numbers, would make a device wait.
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
from pagedkv.engine.measuring import largest_step
from pagedkv.engine.model import PagedModel
from pagedkv.scheduling.limits import SchedulerConfig

WAITING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"}
WAITING |= {"_unique2", "unique_dim", "unique_consecutive"}


class Watched(TorchDispatchMode):
    """Notes operations that no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: set[str] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = operation.__name__.split(".")[0]
        if name in WAITING:
            self.waiting.add(name)
        if name in ("index", "index_put", "index_put_"):
            places = [place for place in arguments[1] if place is not None]
            if any(place.dtype == torch.bool for place in places):
                self.waiting.add(f"{name} by a mask")
        return operation(*arguments, **(options or {}))


def waiting(model_type: str, **changes: Any) -> set[str]:
    """What a decode step of four sequences waits for."""
    model = PagedModel(tiny_model(model_type, **changes), pack_weights=False)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=4)
    batch = largest_step(config, block_size=4, max_model_len=64)
    storage = model.make_storage(4, 4)
    with Watched() as watched:
        model.logits(storage, batch, batch.due_rows)
    return watched.waiting


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "qwen3", "qwen3_moe"])
def test_a_decode_step_waits_for_nothing(model_type: str) -> None:
    assert waiting(model_type) == set()


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", sorted(WORKING - {"gpt2"}))
def test_a_decode_step_of_every_other_architecture_waits_for_nothing(model_type: str) -> None:
    assert waiting(model_type) == set()


def test_what_the_documentation_names_waits() -> None:
    assert waiting("gpt2")
    assert waiting("gpt2", pad_token_id=None) == set()
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    assert waiting("llama", rope_parameters=scaled)
