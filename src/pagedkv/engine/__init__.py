"""A model running on the blocks: `LLM`, and what goes in and comes out of it.

Names are imported when they are first used: parameters can be looked at without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.engine.beam_search import BeamSearchParams
    from pagedkv.engine.llm import LLM
    from pagedkv.engine.outputs import Beam, BeamGeneration, Chunk, Completion, Generation
    from pagedkv.engine.sampling_params import SamplingParams
    from pagedkv.engine.structured_output import StructuredOutput

__all__ = [
    "LLM",
    "Beam",
    "BeamGeneration",
    "BeamSearchParams",
    "Chunk",
    "Completion",
    "Generation",
    "SamplingParams",
    "StructuredOutput",
]

_HOMES = {
    "LLM": "llm",
    "Beam": "outputs",
    "BeamGeneration": "outputs",
    "BeamSearchParams": "beam_search",
    "Chunk": "outputs",
    "Completion": "outputs",
    "Generation": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutput": "structured_output",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
