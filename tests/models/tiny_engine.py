"""An engine on a tiny model whose useless memory holds NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.engine.core import Engine
from pagedkv.engine.model import PagedModel
from pagedkv.engine.request import Request
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.memory.blocks import PUBLISHED
from pagedkv.scheduling.limits import SchedulerConfig


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """The likeliest token each time, and no end before `max_tokens`."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


class TinyEngine(Engine):
    """Checks all laws after each step, and spoils what nobody may read."""

    def __init__(
        self,
        model: Any,
        num_blocks: int,
        block_size: int = 4,
        *,
        seats: int = 8,
        budget: int = 16,
        max_model_len: int = 512,
        **options: Any,
    ) -> None:
        config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget, watermark=0.0)
        options = {"texts": None, "end_token_ids": frozenset(), **options}
        super().__init__(
            model if isinstance(model, PagedModel) else PagedModel(model),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            config=config,
            **options,
        )
        self.spoil()

    def step(self) -> None:
        super().step()
        self.scheduler.verify()
        self.spoil()

    def spoil(self) -> None:
        """Fill every block that nobody uses and that nobody could find with NaN."""
        pool = self.scheduler._memory.pool
        useless = (pool.ref_count == 0) & (pool.key_state != PUBLISHED)
        self.storage.data[useless] = np.nan

    def finish_all(self) -> None:
        """Run until nobody is left."""
        for _ in range(5_000):
            if self.is_idle:
                return
            self.step()
        raise AssertionError("somebody waits for ever")

    def answers(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        """The tokens of each prompt's first sample, all prompts together."""
        requests = [self.add(prompt, params) for prompt in prompts]
        self.finish_all()
        return [tokens_of(request) for request in requests]


def tokens_of(request: Request, sample: int = 0) -> list[int]:
    """What one sample of a request said."""
    return list(request.generation().completions[sample].token_ids)
