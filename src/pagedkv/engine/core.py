"""The engine: requests in, tokens out, one step at a time.

A step is: admit and extend (`Scheduler.schedule`), run (`PagedModel.logits`), sample, commit.
`docs/engine.md` follows one step with the data that it carries. Everything here happens between
two steps or inside one, in whichever thread calls; `LLM` sees to it that only one does.

With `ahead` a device is given its next step while it computes one: steps are begun in the order
in which they are scheduled, and concluded, tokens read and committed, in that order too::

    step()     begin 1   begin 2   conclude 1
    step()               begin 3   conclude 2
    step()               begin 4   conclude 3
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.beam_request import BeamRequest
from pagedkv.engine.beam_search import BeamSearchParams, BeamStep
from pagedkv.engine.begun_step import BegunStep
from pagedkv.engine.detokenizer import Detokenizer, TokenTexts
from pagedkv.engine.device import (
    ForwardTime,
    OutOfDeviceMemory,
    current,
    give_back_unused,
    on_host,
    uploaded,
)
from pagedkv.engine.device_sampling import DeviceSampler
from pagedkv.engine.grammars import Grammar, GrammarFailed, Grammars
from pagedkv.engine.graphs import Capture, DecodeGraphs, ladder
from pagedkv.engine.logprobs import TokenLogprob, log_probabilities, prompt_logprobs
from pagedkv.engine.measuring import largest_step
from pagedkv.engine.model import PagedModel
from pagedkv.engine.random_stream import request_seed
from pagedkv.engine.recording import Answer, Cut, Recorder, UnderWay
from pagedkv.engine.request import Listener, Request, Sample
from pagedkv.engine.sampling import NotFinite, SamplerState, sample
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.statistics import EngineStatistics, StepTimes
from pagedkv.engine.stopping import OutputText, output_limit
from pagedkv.engine.token_masks import bar_tokens
from pagedkv.engine.turn import Turn
from pagedkv.errors import InvalidInput
from pagedkv.memory.block_key import Namespace
from pagedkv.scheduling.continuous import CHOSEN_LATER, Batch, Scheduler
from pagedkv.scheduling.limits import SchedulerConfig

RECORDED_AHEAD = (
    "a run that is scheduled ahead sees ends a step late, which a recording cannot say: record "
    "without ahead"
)

_REPORTED_ROWS = 256
"""Logits of a prompt that are made float32 and read at a time: all of them can be gigabytes."""

_SMALL_STEPS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens of each."""

_Said: TypeAlias = tuple[
    NDArray[np.int64],
    tuple[TokenLogprob | None, ...],
    list[tuple[BeamRequest, BeamStep | None]],
    NDArray[np.int64],
]
"""The token of each sequence that is due, what is to be told of these, how searches go on, and for
which of these the next step was begun with another token."""


class _NoText:
    """The text of tokens without a tokenizer."""

    def append(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Engine:
    """A model, its blocks and its scheduler.

    Not thread-safe: one thread at a time. `end_token_ids` end an answer by themselves; `seed`
    gives requests without a seed of their own a stream each. `recorder` writes the run down.
    `clock` tells seconds, for the statistics and the recording only. `ahead`: whether a step is
    scheduled while the one before runs, where its tokens can be chosen without looking at them.
    `capture`: how decode steps are captured, to be replayed; where the model cannot be captured,
    `graph_problem` says why, in a line, and every step is computed anew.

    Raises `InvalidInput` for a run that is recorded and scheduled ahead.
    """

    def __init__(
        self,
        model: PagedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        config: SchedulerConfig,
        prefix_caching: bool = True,
        texts: TokenTexts | None,
        end_token_ids: frozenset[int],
        seed: int = 0,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ahead: bool = False,
        capture: Capture | None = None,
    ) -> None:
        if ahead and recorder is not None:
            raise InvalidInput(RECORDED_AHEAD)
        self.model = model
        self.max_model_len = max_model_len
        self.storage = model.make_storage(num_blocks, block_size)
        self.scheduler = Scheduler(
            num_blocks,
            config,
            block_size=block_size,
            max_model_len=max_model_len,
            prefix_caching=prefix_caching,
        )
        self.graphs: DecodeGraphs | None = None
        self.graph_problem: str | None = None
        if capture is not None:
            self._capture_steps(capture)
        self.end_token_ids = end_token_ids
        self._texts = texts
        self.grammars = Grammars(
            texts, vocab_size=model.vocab_size, end_token_ids=self.end_token_ids
        )
        """What structured outputs follow; any thread may have them compiled."""
        self._seed = seed
        self._recorder = recorder
        self._clock = clock
        self._start_s = clock()
        self._ahead = ahead
        # On a CPU the sampler of the host is the faster one.
        self._sampler: DeviceSampler | None = None
        if ahead or model.device.type == "cuda":
            self._sampler = DeviceSampler(model.device)
        self._begun: deque[BegunStep] = deque()  # in the order in which they will be concluded
        self._samples: dict[int, Sample] = {}  # by sequence
        self._structured: set[int] = set()  # sequences of those that follow a grammar
        self._beams: dict[int, BeamRequest] = {}  # by sequence
        self._num_requests = 0
        self._output_tokens = 0
        self.num_failed_steps = 0
        """Steps whose model, or whose choice of tokens, failed: their requests have ended."""
        self._step_s = 0.0
        self._step_start_s = 0.0
        self._forward_s = 0.0
        self._readmitted_tokens = 0
        self._readmitted_hit_tokens = 0
        self.last_step: StepTimes | None = None
        """The times of the newest step; None before any, and where it failed."""

    def _capture_steps(self, capture: Capture) -> None:
        try:
            self.graphs = DecodeGraphs(
                self.model,
                self.storage,
                sizes=ladder(self.scheduler.config.max_num_seqs),
                max_model_len=self.max_model_len,
                capture=capture,
            )
        except Exception as problem:  # whatever a model does that no graph can
            lines = str(problem).strip().splitlines() or [type(problem).__name__]
            self.graph_problem = (
                f"decode steps of {self.model.config.model_type} cannot be captured as graphs, "
                f"and are computed without: {lines[0]}"
            )
            with suppress(RuntimeError):  # a capture that broke off can leave torch unable to
                give_back_unused(self.model.device)

    def compile_kernels(self) -> None:
        """Run small steps of every size of tile, so that no request waits for Triton's compiler.

        Before anything is added: while nobody holds a block, any of them may be written.
        """
        slots = self.scheduler.num_blocks * self.scheduler.block_size
        most = min(self.scheduler.config.max_num_batched_tokens, self.max_model_len, slots)
        with current(self.model.device):
            # Rows of a tile are tokens times heads: one of these is within any tile of any model.
            for num_tokens in (size for size in _SMALL_STEPS if size <= most):
                config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=num_tokens)
                batch = largest_step(
                    config, block_size=self.scheduler.block_size, max_model_len=self.max_model_len
                )
                self.model.logits(self.storage, batch, batch.due_rows)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.is_idle

    def seconds(self) -> float:
        """Seconds since it was made, by its clock. Any thread may ask."""
        return self._clock() - self._start_s

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        name: str = "",
        namespace: Namespace | None = None,
        listener: Listener | None = None,
        came_s: float | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """A request arrives. It computes from the next step on, as soon as there is memory.

        `came_s`: when it came, by `seconds`, if it had to wait for a step to end; now unless given.
        `grammar`: what `grammars` has compiled of `params.structured`; it is compiled here unless
        given, and every step waits for that.

        Raises `NeverFits` for one that could not be served by the whole memory, and
        `InvalidInput` for a prompt that is empty, too long or has unknown tokens, or a structure
        that cannot be followed.
        """
        if grammar is None and params.structured is not None:
            grammar = self.grammars.compiled(params.structured)
        limit = self._max_new_tokens(prompt_ids, params.max_tokens, name)
        request = Request(prompt, prompt_ids, params, limit, listener)
        places = [None if grammar is None else grammar.begin() for _ in range(params.n)]
        sequences = self.scheduler.add(
            np.array(prompt_ids, dtype=np.int64),
            max_new_tokens=limit,
            num_samples=params.n,
            namespace=namespace,
            reuse=params.prompt_logprobs is None,
            name=name,
        )
        seed = params.seed
        if seed is None:
            seed = request_seed(self._seed, self._num_requests)
        for index, (sequence, place) in enumerate(zip(sequences, places, strict=True)):
            state = SamplerState(
                params,
                prompt_ids,
                seed=seed,
                sample=index,
                # A grammar bars them itself, and never all that there is.
                end_ids=None if grammar is not None else self.end_token_ids,
            )
            output = OutputText(
                params,
                self._detokenizer(prompt_ids, params.skip_special_tokens),
                eos_token_ids=self.end_token_ids,
                limit=limit,
            )
            made = Sample(request, index, sequence, state, output, place)
            request.samples.append(made)
            self._samples[sequence] = made
            if place is not None:
                self._structured.add(sequence)
        self._num_requests += 1
        if self._recorder is not None:
            request.arrival = self._recorder.arrived(
                s=self.seconds() if came_s is None else came_s,
                step=self.scheduler.num_steps,
                namespace=namespace,
                is_shared=params.prompt_logprobs is None,
            )
        return request

    def add_search(
        self,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        *,
        prompt: str | None = None,
        name: str = "",
        namespace: Namespace | None = None,
    ) -> BeamRequest:
        """A beam search arrives. Its beams are sequences that share blocks and are forked.

        Raises what `add` raises, and `InvalidInput` where the run is recorded: the words of a
        recording are who came and how long each answer was, and a beam is forked from whichever
        other the model makes it.
        """
        if self._recorder is not None:
            raise InvalidInput(
                f"{name or 'the prompt'}: beam search cannot be recorded so that it could be "
                "repeated: search without recording"
            )
        limit = self._max_new_tokens(prompt_ids, params.max_tokens, name)
        sequence = self.scheduler.add_search(
            np.array(prompt_ids, dtype=np.int64),
            max_new_tokens=limit,
            num_beams=params.num_beams,
            namespace=namespace,
            name=name,
        )
        request = BeamRequest(
            prompt,
            prompt_ids,
            params,
            max_new_tokens=limit,
            end_token_ids=self.end_token_ids,
            sequence=sequence,
            detokenizer=lambda: self._detokenizer(prompt_ids, skip_special_tokens=True),
        )
        self._beams[sequence] = request
        self._num_requests += 1
        return request

    def cancel(self, request: Request | BeamRequest) -> None:
        """Nobody wants this request any more. Not within a step.

        Its blocks come back now, or where a step is scheduled ahead before the one after that.
        """
        if isinstance(request, BeamRequest):
            if not request.is_finished:
                self.scheduler.cancel(request.sequences)
                self._drop_search(request)
        else:
            going_on = [s for s in request.samples if not s.is_finished]
            if going_on:
                self.scheduler.cancel([s.sequence for s in going_on])
                self._drop(going_on, Cut(self.scheduler.num_steps))
        self._conclude_unwanted()

    def step(self) -> None:
        """Compute one step, and tell listeners what it brought.

        If the model or the choice of a token fails, the requests of this step are cancelled, the
        others can go on, and the error is raised.
        """
        with current(self.model.device):  # that of a thread, and any thread may call
            self._step()

    def _step(self) -> None:
        self._step_start_s = self._clock()
        self.last_step = None
        self._record_progress(self._step_start_s - self._start_s)
        if not self._begun:
            start_s = self._clock()
            self._begin(self.scheduler.schedule(), start_s, None)
        first = self._begun[0]
        if first.is_postponed:
            self._run(first)
        if self._ahead and len(self._begun) == 1 and first.is_known_to_device:
            start_s = self._clock()
            batch = self.scheduler.schedule_ahead()
            if batch is not None:
                self._begin(batch, start_s, first)
        self._conclude()
        # One that could not even be begun fails now: whoever interrupted it waits for that.
        while self._begun and self._begun[0].failure is not None:
            self._conclude()
        self._conclude_unwanted()

    def _begin(self, batch: Batch, start_s: float, last: BegunStep | None) -> None:
        """Give the device what was scheduled from `start_s` on; `last` runs, or None does."""
        self._note_hits(batch, start_s)
        step = BegunStep(batch, last, self._clock() - start_s)
        self._begun.append(step)
        self._run(step)

    def _run(self, step: BegunStep) -> None:
        """Run the model, and choose the tokens where the device can.

        Where the device has no memory left for it, once more with what torch had kept unused; if
        another step runs, after that one. All that it writes, it writes again, but for copies.
        """
        step.is_postponed = False
        if not len(step.batch.sequences):
            return
        try:
            if not self._has_computed(step):
                give_back_unused(self.model.device)
                if step is not self._begun[0]:
                    step.is_postponed = True
                    return
                self._compute(step)
        except BaseException as failure:
            step.failure = failure
        step.last = None

    def _has_computed(self, step: BegunStep) -> bool:
        """Whether there was memory for it; if not, nothing of the attempt is held any more."""
        try:
            self._compute(step)
        except torch.OutOfMemoryError:
            return False
        return True

    def _compute(self, step: BegunStep) -> None:
        batch = step.batch
        step.rows, inverse = self._rows(batch)
        step.reports = self._prompts_to_report(batch)
        step.forward_time = ForwardTime(self.model.device, self._clock)
        said = None
        if step.last is not None and step.last.choice is not None:
            said = step.last.choice.said
        # What a graph says is overwritten by the next one, and reports are read after that.
        size = None if self.graphs is None or step.reports else self.graphs.size_for(batch)
        if len(batch.copies) and not step.has_copied:
            self.storage.copy_blocks(batch.copies)
            step.has_copied = True
        if self.graphs is not None and size is not None:
            logits = self.graphs.logits(size, batch, step.rows, said, step.forward_time)
        else:
            logits = self.model.logits(self.storage, batch, step.rows, said, step.forward_time)
        step.all_logits = step.logits = logits
        if len(inverse) != len(step.rows) or (inverse[1:] <= inverse[:-1]).any():
            (there,) = uploaded([inverse], logits.device)
            step.logits = logits[there]
        if self._sampler is not None and not self._is_chosen_later(batch):
            step.choice = self._sampler.choose(
                step.logits, self._turns(step), said, is_overwritten=size is not None
            )

    def _is_chosen_later(self, batch: Batch) -> bool:
        """Whether what some of those that are due a token say is chosen when the step is read:
        beams choose together, and what a grammar allows depends on the token before."""
        if not (self._beams or self._structured):
            return False
        return any(s in self._beams or s in self._structured for s in batch.due.tolist())

    def _turns(self, step: BegunStep) -> list[Turn | None]:
        """By what each sequence that is due a token says one; None for one that has ended."""
        awaited: dict[int, int] = {}
        if step.last is not None and step is not self._begun[0]:  # not read yet
            last = step.last.batch.due.tolist()
            awaited = dict(zip(last, range(len(last))))
        turns: list[Turn | None] = []
        for sequence in step.batch.due.tolist():
            member = self._samples.get(sequence)
            turns.append(None if member is None else Turn(member.state, awaited.get(sequence)))
        return turns

    def _conclude(self) -> None:
        """Read what the oldest step says, commit it, and tell listeners."""
        step = self._begun[0]
        batch = step.batch
        sampling_start_s = self._clock()
        try:
            if step.failure is not None:
                raise step.failure
            due = batch.due.tolist()
            places = [i for i, sequence in enumerate(due) if sequence in self._samples]
            members = [self._samples[due[i]] for i in places]
            num_told = len(members) + sum(sequence in self._beams for sequence in due)
            said = self._read(step, places, members)
            if said is None:
                give_back_unused(self.model.device)
                said = self._all_said(step, places, members)
            token_ids, logprobs, searches, mistaken = said
        except BaseException as failure:
            self._begun.popleft()
            failed = Cut(self.scheduler.num_steps - 1, by_failure=True)
            self.num_failed_steps += 1
            told = failure
            if isinstance(failure, torch.OutOfMemoryError):
                step.all_logits = step.logits = torch.empty(0)
                give_back_unused(self.model.device)
                told = OutOfDeviceMemory(self.model.device, len(batch.token_ids))
            ended = self.scheduler.abandon()
            for request in dict.fromkeys(self._beams[s] for s in ended if s in self._beams):
                request.failure = told
                self._drop_search(request)
            dropped = [self._samples[s] for s in ended if s in self._samples]
            for member in dropped:
                member.request.failure = told
            self._drop(dropped, failed)
            if told is not failure:
                raise told from None
            raise
        forward_s = 0.0 if step.forward_time is None else step.forward_time.seconds()
        sampling_s = self._clock() - sampling_start_s
        self._begun.popleft()
        self.scheduler.commit(token_ids)
        said_s = self.seconds()
        completed: set[int] = set()
        if self._structured:
            completed = self._advance(members, token_ids[places].tolist())
        stuck: dict[Request, str] = {}
        finished: list[int] = []
        for member, token_id, logprob in zip(
            members, token_ids[places].tolist(), logprobs, strict=True
        ):
            member.state.append(token_id)
            if not member.token_ids:
                member.first_token_s = said_s
            member.token_ids.append(token_id)
            if member.logprobs is not None and logprob is not None:
                member.logprobs.append(logprob)
            progress = member.output.append(token_id, is_last=member.sequence in completed)
            member.tell(progress, (token_id,), logprob)
            if progress.finish is not None:
                finished.append(member.sequence)
            elif member.grammar is not None and member.grammar.problem is not None:
                stuck[member.request] = member.grammar.problem
        if self._recorder is not None and len(batch.sequences):
            start_s, end_s = self._step_start_s - self._start_s, self.seconds()
            self._recorder.stepped(batch.lengths, batch.query_starts, start_s=start_s, end_s=end_s)
        if finished:
            self.scheduler.finish(finished)
            self._structured.difference_update(finished)
            self._record([self._samples.pop(sequence) for sequence in finished])
        for request_given_up, problem in stuck.items():
            self._give_up(request_given_up, problem)
        for request, beam_step in searches:
            self._go_on(request, beam_step)
        if len(mistaken):
            self._correct(step, token_ids, mistaken)
        self._output_tokens += num_told
        times = self._times(step, forward_s, sampling_s)
        self._forward_s += times.forward_s
        self._step_s += times.total_s
        self.last_step = times

    def _read(self, step: BegunStep, places: list[int], members: list[Sample]) -> _Said | None:
        """`_all_said`; None if there was no memory for it, and then nothing of the try is held."""
        try:
            return self._all_said(step, places, members)
        except torch.OutOfMemoryError:
            return None

    def _all_said(self, step: BegunStep, places: list[int], members: list[Sample]) -> _Said:
        """Read what a step says. Until all is on the host, nothing is noted that a second try would
        note again."""
        self._note_prompt_logprobs(step)
        token_ids, logprobs, mistaken = self._chosen(step, places, members)
        searches = self._search(step.batch.due.tolist(), step.logits)
        return token_ids, logprobs, searches, mistaken

    @staticmethod
    def _advance(members: list[Sample], token_ids: list[int]) -> set[int]:
        """Note what those say that follow a grammar. Gives the sequences whose text is complete."""
        completed = set()
        for member, token_id in zip(members, token_ids, strict=True):
            if member.grammar is not None:
                member.grammar.append(token_id)
                if member.grammar.is_complete:
                    completed.add(member.sequence)
        return completed

    def _give_up(self, request: Request, problem: str) -> None:
        """End a request that cannot go on."""
        request.failure = GrammarFailed(f"the answer cannot go on by its grammar: {problem}")
        going_on = [s for s in request.samples if not s.is_finished]
        self.scheduler.cancel([s.sequence for s in going_on])
        self._drop(going_on, Cut(self.scheduler.num_steps))

    def _correct(
        self, step: BegunStep, token_ids: NDArray[np.int64], mistaken: NDArray[np.int64]
    ) -> None:
        """A step says `token_ids`, and not what the device took it to say for the `mistaken`.

        A step that was begun with that is computed again: all that it wrote, it writes again. Also
        where nobody wants to know any more, since the blocks are named by what was said.
        """
        sequences = step.batch.due[mistaken]
        for sequence in sequences.tolist():
            member = self._samples.get(sequence)
            if member is not None and self._sampler is not None:
                self._sampler.forget(member.state)
        if not self._begun or step.choice is None:
            return
        following = self._begun[0]
        if not np.isin(sequences, following.batch.sequences).any():
            return
        (said,) = uploaded([token_ids], self.model.device)
        step.choice = replace(step.choice, said=said)
        if following.failure is None and not following.is_postponed:
            following.last = step
            self._run(following)

    def _times(self, step: BegunStep, forward_s: float, sampling_s: float) -> StepTimes:
        """What the host does while the device computes takes no time of its own."""
        total_s = self._clock() - self._step_start_s
        forward_s = min(forward_s, total_s)
        scheduling_s = min(step.scheduling_s, total_s - forward_s)
        sampling_s = min(sampling_s, total_s - forward_s - scheduling_s)
        return StepTimes(scheduling_s, forward_s, sampling_s, total_s)

    def _chosen(
        self, step: BegunStep, places: list[int], members: list[Sample]
    ) -> tuple[NDArray[np.int64], tuple[TokenLogprob | None, ...], NDArray[np.int64]]:
        """What each sequence that is due says, int64 [k], what is to be told of `members`, and for
        which of the k the device took it to be another token.

        `places`: of these in `Batch.due`. What another says there means nothing.
        """
        is_beam = [sequence in self._beams for sequence in step.batch.due.tolist()]
        token_ids = np.where(is_beam, CHOSEN_LATER, 0).astype(np.int64, copy=False)
        none = np.empty(0, dtype=np.int64)
        if not members:
            return token_ids, (), none
        if step.choice is not None:
            wanted = np.array(places, dtype=np.int64)
            found = step.choice.conclude(wanted)
            return found.token_ids, tuple(found.logprobs[i] for i in places), found.mistaken
        own = step.logits if len(members) == len(token_ids) else step.logits[places]
        if self._structured:
            self._bar(own, members)
        states = [s.state for s in members]
        if self._sampler is None:
            sampled = sample(on_host(own).numpy(), states)
            token_ids[places] = sampled.token_ids
            return token_ids, sampled.logprobs, none
        choice = self._sampler.choose(own, [Turn(state) for state in states])
        concluded = choice.conclude(np.arange(len(states)))
        token_ids[places] = concluded.token_ids
        return token_ids, concluded.logprobs, none

    @staticmethod
    def _bar(logits: torch.Tensor, members: list[Sample]) -> None:
        """Bar the tokens that the grammars of `members` do not allow, in their logits [m, v]."""
        rows, allowed = [], []
        for row, member in enumerate(members):
            if (place := member.grammar) is not None:
                params = member.request.params
                bars_ends = params.ignore_eos or len(member.token_ids) < params.min_tokens
                rows.append(row)
                allowed.append(place.allowed_without_ends if bars_ends else place.allowed)
        if rows:
            bar_tokens(logits, rows, allowed)

    def _conclude_unwanted(self) -> None:
        """Have done with steps that compute for nobody any more, and so with their blocks."""
        while self._begun and not any(
            s in self._samples or s in self._beams for s in self._begun[0].batch.sequences.tolist()
        ):
            self._step_start_s = self._clock()
            if self._begun[0].is_postponed:  # it never ran, and what it was to write is not there
                self._begun.popleft()
                self.scheduler.abandon()
            else:
                self._conclude()

    def statistics(self) -> EngineStatistics:
        """What happened so far."""
        return EngineStatistics(
            memory=self.scheduler.statistics(),
            requests=self._num_requests,
            output_tokens=self._output_tokens,
            step_s=self._step_s,
            forward_s=self._forward_s,
            readmitted_tokens=self._readmitted_tokens,
            readmitted_hit_tokens=self._readmitted_hit_tokens,
        )

    def _max_new_tokens(self, prompt_ids: Sequence[int], max_tokens: int | None, name: str) -> int:
        """Tokens that a request may generate: what it asks for, as far as the model goes.

        Raises `InvalidInput` for a prompt that is empty, too long or has unknown tokens.
        """
        prompt_tokens = len(prompt_ids)
        if prompt_tokens == 0:
            raise InvalidInput(f"{name or 'the prompt'} has no tokens: give at least one")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self.model.vocab_size:
            raise InvalidInput(
                f"{name or 'the prompt'} has a token id that is not 0 to "
                f"{self.model.vocab_size - 1}, the model's vocabulary"
            )
        limit = output_limit(
            max_tokens, prompt_tokens=prompt_tokens, max_model_len=self.max_model_len
        )
        if limit < 1:
            raise InvalidInput(
                f"{name or 'the prompt'} has {prompt_tokens} tokens, which leaves no room for an "
                f"answer: the model's maximum is {self.max_model_len}"
            )
        if max_tokens is None:
            # Without a limit of its own it ends where the model or the memory does.
            slots = self.scheduler.num_blocks * self.scheduler.block_size
            limit = max(min(limit, slots + 1 - prompt_tokens), 1)
        return limit

    def _note_hits(self, batch: Batch, now_s: float) -> None:
        for sequence in batch.preempted.tolist():
            self._request_of(sequence)[0].num_preemptions += 1
        for sequence, num_cached in zip(batch.admitted.tolist(), batch.num_cached.tolist()):
            request, num_tokens = self._request_of(sequence)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached
                request.admitted_s = now_s
            else:
                self._readmitted_tokens += num_tokens
                self._readmitted_hit_tokens += num_cached

    def _request_of(self, sequence: int) -> tuple[Request | BeamRequest, int]:
        """Whose sequence it is, and how many tokens it has."""
        member = self._samples.get(sequence)
        if member is None:
            search = self._beams[sequence]
            return search, search.num_tokens
        return member.request, len(member.request.prompt_ids) + len(member.token_ids)

    def _search(
        self, due: list[int], logits: torch.Tensor
    ) -> list[tuple[BeamRequest, BeamStep | None]]:
        """Note what the model says of beams, and decide how those searches go on whose beams are
        all known. `logits` [k, vocabulary] are of all k sequences that are due."""
        places = [i for i, sequence in enumerate(due) if sequence in self._beams]
        if not places:
            return []
        rows = on_host(logits[places]).numpy()
        bad = np.flatnonzero(~np.isfinite(rows.max(1)))
        if len(bad):
            raise NotFinite([places[i] for i in bad])
        requests = []
        for place, row in zip(places, log_probabilities(rows)):
            request = self._beams[due[place]]
            request.note(due[place], row)
            requests.append(request)
        return [(r, r.advance()) for r in dict.fromkeys(requests) if r.is_known]

    def _go_on(self, request: BeamRequest, step: BeamStep | None) -> None:
        """The beams of a search go on as decided, or end."""
        for sequence in request.sequences:
            del self._beams[sequence]
        if step is None:
            self.scheduler.finish(request.sequences)
            request.end()
        else:
            request.sequences = self.scheduler.branch(
                request.sequences, step.parents, step.token_ids
            )
            self._beams |= dict.fromkeys(request.sequences, request)

    def _drop_search(self, request: BeamRequest) -> None:
        """Nobody goes on with this search: its sequences are gone."""
        for sequence in request.sequences:
            del self._beams[sequence]
        request.cancel()

    def _rows(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The places in the batch whose logits are needed, ascending, and of each due sequence
        which of them is its own."""
        wanted = [batch.due_rows]
        for i, request in self._prompts_to_report(batch):
            start, stop = int(batch.query_starts[i]), int(batch.query_starts[i + 1])
            last = len(request.prompt_ids) - 1 - int(batch.positions[start])
            wanted.append(np.arange(start, min(stop, start + last), dtype=np.int64))
        if len(wanted) == 1:
            rows, inverse = np.unique(batch.due_rows, return_inverse=True)
        else:
            rows = np.unique(np.concatenate(wanted))
            inverse = np.searchsorted(rows, batch.due_rows)
        return rows, inverse

    def _prompts_to_report(self, batch: Batch) -> list[tuple[int, Request]]:
        """Places in the batch of sequences that compute prompt tokens somebody wants to know of."""
        found = []
        for i, sequence in enumerate(batch.sequences.tolist()):
            member = self._samples.get(sequence)
            if member is not None and member.request.prompt_logprobs is not None:
                request = member.request
                known = len(member.request.prompt_logprobs)
                start = int(batch.positions[batch.query_starts[i]])
                if known < len(request.prompt_ids) and start < len(request.prompt_ids) - 1:
                    found.append((i, request))
        return found

    def _note_prompt_logprobs(self, step: BegunStep) -> None:
        batch, rows, logits = step.batch, step.rows, step.all_logits
        for i, request in step.reports:
            start, stop = int(batch.query_starts[i]), int(batch.query_starts[i + 1])
            position = int(batch.positions[start])
            stop = min(stop, start + len(request.prompt_ids) - 1 - position)
            first = int(np.searchsorted(rows, start))
            known = request.prompt_logprobs or []
            for part in logits[first : first + stop - start].split(_REPORTED_ROWS):
                found = prompt_logprobs(
                    on_host(part).numpy(),
                    request.prompt_ids,
                    start=position,
                    num_top=request.params.prompt_logprobs or 0,
                )
                # After a preemption some are computed a second time.
                known += found[max(len(known) - 1 - position, 0) :]
                position += len(part)

    def _detokenizer(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        if self._texts is None:
            return _NoText()
        return self._texts.stream(skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)

    def _drop(self, samples: list[Sample], cut: Cut) -> None:
        """Nobody goes on with these samples: their sequences are gone."""
        for member in samples:
            del self._samples[member.sequence]
            self._structured.discard(member.sequence)
            member.cut = cut
            member.tell(member.output.abort(), (), None)
        self._record(samples)

    def _record(self, ended: list[Sample]) -> None:
        """Write down the requests that ended with these samples."""
        if self._recorder is None:
            return
        for request in dict.fromkeys(member.request for member in ended):
            if request.is_finished and request.arrival is not None:
                self._recorder.ended(request.arrival, request.prompt_ids, _answers(request))
        self._recorder.flush(s=self.seconds(), step=self.scheduler.num_steps)

    def _record_progress(self, now_s: float) -> None:
        """Write down how far everybody has come, where that was not done lately."""
        if self._recorder is None or not self._recorder.is_progress_due(now_s):
            return
        under_way = []
        for request in dict.fromkeys(member.request for member in self._samples.values()):
            arrival, samples = request.arrival, request.samples
            # Of thousands that wait there is nothing new once they were told.
            is_new = bool(samples[0].token_ids) or len(samples) > 1
            if arrival is not None and (is_new or not self._recorder.was_told(arrival)):
                under_way.append(UnderWay(arrival, request.prompt_ids, _answers(request)))
        self._recorder.progress(under_way, s=now_s, step=self.scheduler.num_steps)


def _answers(request: Request) -> list[Answer]:
    """The samples of a request as a recording has them."""
    return [
        Answer(s.index, s.token_ids, s.cut, s.is_finished, s.first_token_s) for s in request.samples
    ]
