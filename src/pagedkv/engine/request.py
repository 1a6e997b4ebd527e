"""A request on its way through the engine, and the answers that are being written to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedkv.engine.grammars import GrammarPlace
from pagedkv.engine.logprobs import TokenLogprob
from pagedkv.engine.outputs import Chunk, Completion, Generation
from pagedkv.engine.recording import Arrival, Cut
from pagedkv.engine.sampling import SamplerState
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.stopping import Finish, OutputText, Progress

Listener = Callable[[Chunk], None]
"""Is told each chunk of a request, in the thread that runs the step; must not block or raise."""


class Request:
    """A prompt on its way; `generation` is what has come of it so far."""

    def __init__(
        self,
        prompt: str | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        max_new_tokens: int,
        listener: Listener | None,
    ) -> None:
        self.prompt = prompt
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.max_new_tokens = max_new_tokens
        self.listener = listener
        self.samples: list[Sample] = []
        self.arrival: Arrival | None = None
        self.num_cached_tokens: int | None = None
        """Tokens found in the cache when it was first admitted; None before."""
        self.admitted_s: float | None = None
        """When that was, by the engine's clock."""
        self.num_preemptions = 0
        """How often one of its samples gave way."""
        self.failure: BaseException | None = None
        """Why it was given up: what a step failed of in which it had a part, or `GrammarFailed`."""
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.is_finished for sample in self.samples)

    def generation(self) -> Generation:
        """All samples so far; one that goes on counts as aborted."""
        logprobs = self.prompt_logprobs
        return Generation(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            completions=tuple(sample.completion() for sample in self.samples),
            num_cached_tokens=self.num_cached_tokens or 0,
            prompt_logprobs=None if logprobs is None else tuple(logprobs),
        )


class Sample:
    """One answer that is being written."""

    __slots__ = (
        "cut",
        "first_token_s",
        "grammar",
        "index",
        "logprobs",
        "output",
        "request",
        "sequence",
        "state",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        sequence: int,
        state: SamplerState,
        output: OutputText,
        grammar: GrammarPlace | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.sequence = sequence
        self.state = state
        self.output = output
        self.grammar = grammar
        """Where in its grammar it is; None where any text will do."""
        self.cut: Cut | None = None
        self.first_token_s: float | None = None
        """When it got its first token, in seconds since the engine began."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        if request.params.logprobs is not None:
            self.logprobs = []

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, by whatever."""
        return self.output.finish is not None

    def completion(self) -> Completion:
        """The answer so far; one that goes on counts as aborted."""
        finish = self.output.finish or Finish("abort")
        return Completion(
            sample=self.index,
            text=self.output.text,
            token_ids=tuple(self.token_ids),
            finish_reason=finish.reason,
            stop_reason=finish.stop,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
        )

    def tell(
        self, progress: Progress, token_ids: tuple[int, ...], logprob: TokenLogprob | None
    ) -> None:
        """Tell the request's listener what is new."""
        if self.request.listener is not None:
            self.request.listener(
                Chunk(
                    sample=self.index,
                    text=progress.text,
                    token_ids=token_ids,
                    logprobs=None if logprob is None else (logprob,),
                    finish_reason=None if progress.finish is None else progress.finish.reason,
                    stop_reason=None if progress.finish is None else progress.finish.stop,
                )
            )
