"""The engine on a storage in torch's memory that Triton's kernels read: in their interpreter here,
on a GPU where there is one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from models.gpu_batch import DEVICE
from models.tiny_engine import TinyEngine, greedy
from models.tiny_models import VOCABULARY, tiny_model
from pagedkv.engine.graphs import CUDACapture
from pagedkv.engine.model import PagedModel
from pagedkv.engine.sampling_params import SamplingParams


def on_device(model_type: str, **changes: Any) -> PagedModel:
    """A tiny model where Triton runs."""
    return PagedModel(tiny_model(model_type, **changes).to(DEVICE), triton=True)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


PROMPTS = [prompt(1, 9), prompt(1, 9)[:6] + prompt(2, 4), prompt(3, 2)]

MIXTURES = ("gpt_oss", "deepseek_v3")
"""Models of experts."""


def again(compute: Callable[[], None]) -> Callable[[], None]:
    """Captures a step as a graph does, by computing it anew on the same buffers."""
    compute()
    return compute


@pytest.mark.parametrize(
    ("model_type", "ahead", "graphs"),
    [
        *(("llama", ahead, graphs) for ahead in (False, True) for graphs in (False, True)),
        ("gemma2", True, True),
        ("gpt_oss", True, True),
        ("qwen3", False, True),
        ("phi3", True, False),
        ("deepseek_v3", True, True),
    ],
)
def test_an_architecture_says_on_the_device_what_it_says_on_the_cpu(
    model_type: str, ahead: bool, graphs: bool
) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if model_type in ("gemma2", "gpt_oss", "qwen3"):
        changes |= {"layer_types": ["sliding_attention", "full_attention"]}
    expected = TinyEngine(tiny_model(model_type, **changes), 40).answers(PROMPTS, greedy(5))
    capture = None
    if graphs:
        capture = again if DEVICE == "cpu" else CUDACapture(torch.device(DEVICE, 0))
    model = on_device(model_type, **changes)
    assert model.fused is not None and model.fused.norms > 4 and model.fused.rotary == 1
    running = TinyEngine(model, 7, budget=9, seats=3, ahead=ahead, capture=capture)
    if DEVICE != "cpu" and model_type in MIXTURES and running.graph_problem is not None:
        # In float32 torch may multiply one expert after the other, whose sizes the host reads.
        assert f"of {model_type} cannot be captured" in running.graph_problem
    else:
        assert running.graph_problem is None
    assert running.answers(PROMPTS, greedy(5)) == expected
    assert running.scheduler.statistics().used_blocks == 0


def test_with_its_own_layers_a_model_says_the_same_on_the_device() -> None:
    expected = TinyEngine(tiny_model("llama", num_hidden_layers=2), 40).answers(PROMPTS, greedy(5))
    own = tiny_model("llama", num_hidden_layers=2).to(DEVICE)
    running = TinyEngine(PagedModel(own, triton=True, fused_layers=False), 40, ahead=True)
    assert running.answers(PROMPTS, greedy(5)) == expected


def test_samples_that_fork_and_draw_get_the_same_on_the_device() -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=5, logprobs=1)
    found = []
    for model in (PagedModel(tiny_model("llama")), on_device("llama")):
        running = TinyEngine(model, 40, ahead=model.is_on_triton)
        request = running.add(prompt(1, 6), params)
        running.finish_all()
        found.append([c.token_ids for c in request.generation().completions])
    assert found[0] == found[1] and len(set(found[0])) == 3


def test_small_steps_take_every_size_of_tile_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = TinyEngine(on_device("llama", num_hidden_layers=1), 40, budget=64)
    storage, tiles = running.storage, set()
    attend = storage.attend_planned

    def noted(layer: int, q: Any, plan: Any, **options: Any) -> Any:
        out = attend(layer, q, plan, **options)
        tiles.update(launch.tile for cut in plan._cuts.values() for launch in cut.launches)
        return out

    monkeypatch.setattr(storage, "attend_planned", noted)
    running.compile_kernels()
    (kind,) = storage._kinds
    assert tiles == set(storage._machine.tiles(kind))
    monkeypatch.undo()
    expected = TinyEngine(tiny_model("llama", num_hidden_layers=1), 40).answers(PROMPTS, greedy(5))
    assert running.answers(PROMPTS, greedy(5)) == expected
