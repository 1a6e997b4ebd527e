"""A step between the moment when the device is given it and the moment when its tokens are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.device import ForwardTime
from pagedkv.engine.device_sampling import Choice
from pagedkv.scheduling.continuous import Batch

if TYPE_CHECKING:
    from pagedkv.engine.request import Request


def _no_rows() -> NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


def _nothing() -> torch.Tensor:
    return torch.empty(0)


@dataclass(eq=False)
class BegunStep:
    """What is known of a step while it runs. Tensors are the device's, which may still compute."""

    batch: Batch
    last: BegunStep | None
    """The step that ran when this was scheduled, until this one has taken its tokens."""
    scheduling_s: float
    rows: NDArray[np.int64] = field(default_factory=_no_rows)
    """The places in the batch whose logits there are, ascending."""
    all_logits: torch.Tensor = field(default_factory=_nothing)
    """[len(rows), vocabulary]."""
    logits: torch.Tensor = field(default_factory=_nothing)
    """[k, vocabulary]: those of the sequences that are due a token, in the order of `batch.due`."""
    choice: Choice | None = None
    """What they say, where the device has chosen it."""
    forward_time: ForwardTime | None = None
    reports: list[tuple[int, Request]] = field(default_factory=list)
    """Places in the batch of prompts whose log probabilities somebody wants."""
    has_copied: bool = False
    """Whether the blocks of `batch.copies` are copied: once it has written to others, what was in
    them is no more."""
    failure: BaseException | None = None
    """Why it could not be begun: to be raised when it is its turn."""
    is_postponed: bool = False
    """Whether the device is to be given it only when nothing else runs."""

    @property
    def is_known_to_device(self) -> bool:
        """Whether the next step can take what is said here before anybody has read it."""
        if self.failure is not None or self.is_postponed:
            return False
        return self.choice is not None or not len(self.batch.due)
