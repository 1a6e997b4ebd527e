"""What the engine tells of itself: counts since it was made, and the times of a step."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.scheduling.continuous import SchedulerStatistics


@dataclass(frozen=True)
class EngineStatistics:
    """What happened since the engine was made."""

    memory: SchedulerStatistics
    requests: int
    output_tokens: int
    step_s: float
    """Time in steps, all together."""
    forward_s: float
    """Of that, the time in the model's forward."""
    readmitted_tokens: int
    """Tokens of all sequences when they were admitted again after they had given way."""
    readmitted_hit_tokens: int
    """Of those, the ones that were cached still."""

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens generated a second of time in steps; 0 before any."""
        return self.output_tokens / self.step_s if self.step_s else 0.0


@dataclass(frozen=True)
class StepTimes:
    """Where the time of one step went, in seconds."""

    scheduling_s: float
    """Deciding who computes what, and where it goes."""
    forward_s: float
    sampling_s: float
    """Choosing a token for each sequence that was due one."""
    total_s: float
    """All of it: committing and the text of the tokens too."""
