"""Whose next token is chosen in a step, and what of that is not known on the host yet."""

from __future__ import annotations

from typing import NamedTuple

from pagedkv.engine.sampling import SamplerState


class Turn(NamedTuple):
    """One sequence that is due a token."""

    state: SamplerState
    awaits: int | None = None
    """Where its token before this one stands among those that the step before says, while nobody
    has read them; None where `state` knows all."""

    @property
    def position(self) -> int:
        """The place of its next token in its output."""
        return self.state.num_output_tokens + (self.awaits is not None)
