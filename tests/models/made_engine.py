"""An engine without a model: the scheduler, and tokens that follow from the tokens before them."""

from __future__ import annotations

from dataclasses import dataclass, field

from models.decisions import Decided, Keys, engine_decided
from pagedkv.engine.recording import Answer, Arrival, Cut, Recorder, UnderWay
from pagedkv.memory.block_key import Namespace
from pagedkv.scheduling.continuous import Scheduler


@dataclass(eq=False)
class MadeSample:
    request: MadeRequest
    index: int
    sequence: int
    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    cut: Cut | None = None


@dataclass(eq=False)
class MadeRequest:
    prompt_ids: list[int]
    num_new: int
    voice: int
    """Samples of voice 0 all say the same; others each say something of their own."""
    arrival: Arrival
    samples: list[MadeSample] = field(default_factory=list)


class MadeEngine:
    """What it does with the scheduler and the recorder is what `engine.core` does.

    Every step takes `step_s` seconds. `written` is, after each of them, how long the file is.
    """

    def __init__(self, scheduler: Scheduler, recorder: Recorder, *, step_s: float = 0.3) -> None:
        self.scheduler = scheduler
        self.recorder = recorder
        self.step_s = step_s
        self.written: list[int] = []
        self.decided: list[Decided] = []
        self.requests: list[MadeRequest] = []
        self._samples: dict[int, MadeSample] = {}
        self._rows: dict[int, int] = {}
        self._num_rows = 0
        self._keys: Keys = {}

    def add(
        self,
        prompt_ids: list[int],
        num_new: int,
        *,
        num_samples: int = 1,
        voice: int = 0,
        namespace: Namespace | None = None,
        reuse: bool = True,
    ) -> MadeRequest:
        """`num_new` tokens are said; the scheduler is told of more, as of one that may stop."""
        sequences = self.scheduler.add(
            prompt_ids,
            max_new_tokens=num_new + len(self.requests) % 3,
            num_samples=num_samples,
            namespace=namespace,
            reuse=reuse,
        )
        arrival = self.recorder.arrived(
            s=float(len(self.requests) // 2),  # a clock so coarse that two come at once
            step=self.scheduler.num_steps,
            namespace=namespace,
            is_shared=reuse,
        )
        request = MadeRequest(prompt_ids, num_new, voice, arrival)
        for index, sequence in enumerate(sequences):
            sample = MadeSample(request, index, sequence)
            request.samples.append(sample)
            self._samples[sequence] = sample
            self._rows[sequence] = self._num_rows
            self._num_rows += 1
        self.requests.append(request)
        return request

    def cancel(self, request: MadeRequest) -> None:
        going_on = [s for s in request.samples if not s.is_finished]
        if going_on:
            self.scheduler.cancel([s.sequence for s in going_on])
            self._drop(going_on, Cut(self.scheduler.num_steps))

    @property
    def now_s(self) -> float:
        return self.scheduler.num_steps * self.step_s

    def step(self, *, fails: bool = False) -> None:
        if self.recorder.is_progress_due(self.now_s):
            requests = dict.fromkeys(sample.request for sample in self._samples.values())
            under_way = [UnderWay(r.arrival, r.prompt_ids, _answers(r)) for r in requests]
            self.recorder.progress(under_way, s=self.now_s, step=self.scheduler.num_steps)
        batch = self.scheduler.schedule()
        before_end = self._rows.copy()
        if fails and len(batch.sequences):
            ended = self.scheduler.abandon()
            failed = Cut(self.scheduler.num_steps - 1, by_failure=True)
            self._drop([self._samples[s] for s in ended], failed)
        else:
            due = [self._samples[s] for s in batch.due.tolist()]
            self.scheduler.commit([self._said(s) for s in due])
            finished = []
            for sample in due:
                sample.token_ids.append(self._said(sample))
                # Samples of one request may end at different lengths.
                if len(sample.token_ids) >= max(sample.request.num_new - sample.index % 2, 1):
                    sample.is_finished = True
                    finished.append(sample)
            self.scheduler.finish([s.sequence for s in finished][::-1])
            self._record([self._samples.pop(s.sequence) for s in finished])
        self.scheduler.verify()
        self.decided.append(engine_decided(self.scheduler, batch, before_end, self._keys))
        self.written.append(self.recorder.path.stat().st_size)

    def _said(self, sample: MadeSample) -> int:
        """The next token: few different ones, so that answers meet each other again."""
        voice = sample.request.voice * (sample.index + 1)
        last = [*sample.request.prompt_ids, *sample.token_ids][-1]
        return (last + voice + 1) % 3

    def _drop(self, samples: list[MadeSample], cut: Cut) -> None:
        for sample in samples:
            del self._samples[sample.sequence]
            sample.is_finished, sample.cut = True, cut
        self._record(samples)

    def _record(self, ended: list[MadeSample]) -> None:
        for request in dict.fromkeys(s.request for s in ended):
            if all(s.is_finished for s in request.samples):
                self.recorder.ended(request.arrival, request.prompt_ids, _answers(request))
        self.recorder.flush(s=self.now_s, step=self.scheduler.num_steps)


def _answers(request: MadeRequest) -> list[Answer]:
    return [Answer(s.index, s.token_ids, s.cut, s.is_finished) for s in request.samples]
