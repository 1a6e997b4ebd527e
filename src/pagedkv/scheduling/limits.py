"""What a step may hold: the scheduler's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.errors import InvalidInput


class Limits(NamedTuple):
    """`SchedulerConfig` as compiled code takes it."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    watermark_blocks: int


@dataclass(frozen=True)
class SchedulerConfig:
    """How many sequences and tokens a step may hold, and how much memory admission leaves free.

    `max_num_seqs`: sequences that run at once. `max_num_batched_tokens`: tokens that one step
    computes; decodes come first, prefills share the rest. `chunked_prefill`: whether a prompt
    may be computed over several steps; without, a prompt longer than the budget runs in a step
    of its own. `watermark`: share of the blocks that admission leaves for running sequences to
    grow into, from 0 to below 1.

    Raises `InvalidInput` for values out of range.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    chunked_prefill: bool = True
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise InvalidInput(f"max_num_seqs is {self.max_num_seqs}: give at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidInput(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: give at least "
                f"max_num_seqs, {self.max_num_seqs}, so that no running sequence waits for a token"
            )
        if not 0 <= self.watermark < 1:
            raise InvalidInput(f"watermark is {self.watermark:g}: give from 0 to below 1")

    def limits(self, *, num_blocks: int, block_size: int) -> Limits:
        """These limits for a memory of `num_blocks` blocks."""
        return Limits(
            block_size=block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunked_prefill=self.chunked_prefill,
            watermark_blocks=int(self.watermark * num_blocks),
        )
