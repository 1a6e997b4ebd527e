"""A small run before the first request, so that no request waits for a compiler.

Compiled code is loaded, or made where this machine has none yet, when it is first called. In a
server that would be within somebody's answer, and for the ways of ending one, when somebody
first hangs up: with every other answer waiting.
"""

from __future__ import annotations

from contextlib import suppress

from pagedkv.engine.beam_search import BeamSearchParams
from pagedkv.engine.core import Engine
from pagedkv.engine.model import PagedModel
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.scheduling.limits import SchedulerConfig

_NUM_BLOCKS = 16
_NUM_TOKENS = 4


def rehearse(model: PagedModel, *, block_size: int, ahead: bool) -> None:
    """Let requests of every kind arrive, run, fork and be cancelled, in an engine of their own.

    What a device compiles is left to the engine that follows: to its graphs, which run a step
    before they capture it, and to `Engine.compile_kernels`.

    What fails here fails again in the request that needs it, and is told there.
    """
    engine = Engine(
        model,
        num_blocks=_NUM_BLOCKS,
        block_size=block_size,
        max_model_len=_NUM_TOKENS,
        config=SchedulerConfig(max_num_seqs=_NUM_TOKENS, max_num_batched_tokens=_NUM_TOKENS),
        texts=None,
        end_token_ids=frozenset(),
        ahead=ahead,
    )
    with suppress(Exception):
        sampled = engine.add([0], SamplingParams(n=2, max_tokens=3, temperature=1.0, seed=0))
        searched = engine.add_search([0], BeamSearchParams(num_beams=2, max_tokens=3))
        engine.step()
        engine.step()
        engine.cancel(sampled)
        engine.cancel(searched)
