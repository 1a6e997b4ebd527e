"""`Serving`: the engine as the server has it, and who may come in.

The one object that owns the `LLM`. Endpoints ask it for an `Exchange`; whoever watches the
memory asks it for a look between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pagedkv.engine.outputs import Chunk
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.errors import BrokenLaw, InvalidInput
from pagedkv.memory.block_key import Namespace
from pagedkv.server.errors import ApiError, BrokenOff
from pagedkv.server.exchange import ClientLeft, Exchange, News
from pagedkv.server.limits import ServerLimits
from pagedkv.server.metrics import AnswerTimes, Metrics

if TYPE_CHECKING:
    from pagedkv.engine.core import Engine
    from pagedkv.engine.llm import LLM
    from pagedkv.engine.statistics import StepTimes

_LOG = logging.getLogger("pagedkv.server")

Found = TypeVar("Found")

_WRONG_IDS_TOLD = 5
"""Token ids that an error names before it counts the others."""


class Serving:
    """A model, its memory, and the requests that are under way.

    Made before there is an event loop; `start` ties it to the one that runs.
    """

    def __init__(self, llm: LLM, *, model_name: str, limits: ServerLimits) -> None:
        self.llm = llm
        self.model_name = model_name
        self.limits = limits
        self._created_s = int(time.time())
        self.exchanges: set[Exchange] = set()
        self.num_reading = 0
        """Long prompts that wait to become token ids."""
        self.num_streams = 0
        """Streams that are open: also those whose answers have ended and are being read."""
        self.is_draining = False
        self.broken_law: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._said: list[tuple[Exchange, int, News]] = []  # in this step, by the engine's thread
        self._ends_s: list[float] = []
        self._metrics = Metrics()
        self._noted: StepTimes | None = None
        self._failure: BaseException | None = None
        self._has_told_of_recording = False
        self._verified_steps = 0
        self._verifying = asyncio.Lock()
        llm.watch(self._hand_over)

    def start(self) -> None:
        """Requests come from the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def exchange(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        namespace: Namespace | None,
        is_streamed: bool,
        arrived_s: float,
    ) -> Exchange:
        """Ask the engine to answer `prompts`.

        Raises `ApiError` 503 while draining or when a law is broken, 429 past the limits.
        """
        self.check_open()
        self._check_load(is_streamed)
        exchange = Exchange(
            prompts,
            params,
            namespace=namespace,
            is_streamed=is_streamed,
            times=AnswerTimes(self._metrics.requests, arrived_s),
            on_end=self._left,
            on_close=self._closed,
        )
        self.exchanges.add(exchange)
        self.num_streams += is_streamed
        exchange.order(self.llm, [self._listener(exchange, i) for i in range(len(prompts))])
        return exchange

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within, a long prompt becomes token ids. Raises what `exchange` raises."""
        self.check_open()
        self._check_load(is_streamed=False)
        self.num_reading += 1
        try:
            yield
        finally:
            self.num_reading -= 1

    @contextlib.contextmanager
    def arriving(self, arrived_s: float, *, num_prompts: int, num_samples: int) -> Iterator[None]:
        """Within, prompts of a request become token ids; a client that leaves now is counted too.

        `num_samples` answers are asked for to each.
        """
        try:
            yield
        except ClientLeft:
            requests = self._metrics.requests
            requests.finished.labels("abort").inc(num_prompts * num_samples)
            AnswerTimes(requests, arrived_s).give_up([None] * num_prompts, time.perf_counter())
            raise

    def check_open(self) -> None:
        """Raise `ApiError` 503 where nobody may come in."""
        if self.broken_law is not None:
            raise ApiError(
                503,
                f"a law of the memory is broken, nothing is admitted any more: {self.broken_law}",
                code="broken_law",
            )
        if self.is_draining:
            raise ApiError.shutting_down()

    def count_refusal(self, error: ApiError) -> None:
        """Note what a client is answered instead of what it asked for. Not a failure of ours."""
        if error.status != 500 and not isinstance(error, BrokenOff):
            self._metrics.requests.refused.labels(error.reason).inc()

    def check_model(self, model: str | None) -> None:
        """Raise `ApiError` 404 for another model than the one that is served."""
        if model is not None and model != self.model_name:
            raise ApiError(
                404,
                f"there is no model {model!r}: {self.model_name!r} is served",
                param="model",
                code="model_not_found",
            )

    def check_vocabulary(self, token_ids: Collection[int], *, param: str) -> None:
        """Raise `ApiError` 400 with those of `token_ids` that the model has not."""
        size = self.llm.vocab_size
        if not token_ids or 0 <= min(token_ids) <= max(token_ids) < size:
            return
        wrong = list(dict.fromkeys(i for i in token_ids if not 0 <= i < size))
        told = ", ".join(map(str, wrong[:_WRONG_IDS_TOLD]))
        if len(wrong) > _WRONG_IDS_TOLD:
            told += f" and {len(wrong) - _WRONG_IDS_TOLD} more"
        raise ApiError(
            400, f"{param} has {told}: not 0 to {size - 1}, the model's vocabulary", param=param
        )

    def check_samples(self, num_samples: int, *, param: str) -> None:
        """Raise `ApiError` 400 for more samples of a prompt than can run at once, as they do."""
        most = self.llm.max_num_seqs
        if num_samples > most:
            raise ApiError(
                400,
                f"{param} is {num_samples}: give at most {most}, since the samples of a prompt run "
                "at once, and the server runs no more sequences",
                param=param,
            )

    def check_room(self, prompt_tokens: int, max_tokens: int, *, param: str) -> None:
        """Raise `ApiError` 400 where an answer that is asked for is longer than any can be.

        A prompt that leaves no room at all is the engine's to refuse.
        """
        budget = self.llm.budget
        longest = min(self.llm.max_model_len, budget.num_blocks * budget.block_size + 1)
        room = longest - prompt_tokens
        if 1 <= room < max_tokens:
            of = "model" if longest == self.llm.max_model_len else "memory"
            raise ApiError(
                400,
                f"{param} is {max_tokens}: after a prompt of {prompt_tokens} tokens give at most "
                f"{room}, since the {of} takes {longest} in all",
                param=param,
                code="context_length_exceeded",
            )

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits for an answer, or reads one."""
        return bool(self.exchanges) or self.num_streams > 0

    @property
    def description(self) -> dict[str, Any]:
        """The model as `/v1/models` lists it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "pagedkv",
            "max_model_len": self.llm.max_model_len,
        }

    async def between_steps(self, look: Callable[[Engine], Found]) -> Found:
        """What `look` finds in the engine between two steps, in a thread of its own."""

        def wait_and_look() -> Found:
            with self.llm.between_steps() as engine:
                return look(engine)

        return await asyncio.to_thread(wait_and_look)

    async def verify(self) -> None:
        """Check every law of the memory; a broken one stops admission. Raises `BrokenLaw`."""
        async with self._verifying:
            try:
                self._verified_steps = await self.between_steps(_verified)
            except BrokenLaw as broken:
                if self.broken_law is None:
                    _LOG.error("a law of the memory is broken, admission stops: %s", broken)
                self.broken_law = str(broken)
                raise

    async def verify_when_idle(self, every_s: float) -> None:
        """Go on checking the laws where there were steps and nobody waits for any. For a task."""
        while True:
            await asyncio.sleep(every_s)
            if self.exchanges or self.broken_law is not None:
                continue
            if self.llm.num_steps != self._verified_steps:
                with contextlib.suppress(BrokenLaw):  # noted, logged, and told by /health
                    await self.verify()

    async def remind_silent_streams(self) -> None:
        """Go on letting streams say that they wait, where they have said nothing. For a task."""
        while True:
            await asyncio.sleep(self.limits.silent_s / 2)
            for exchange in self.exchanges:
                if exchange.is_streamed:
                    exchange.remind()

    async def metrics_page(self) -> bytes:
        """What Prometheus reads."""
        statistics = await self.between_steps(lambda engine: engine.statistics())
        return self._metrics.page(
            statistics,
            model_name=self.model_name,
            num_waiting=self.llm.num_waiting,
            has_recording_failed=self.llm.recording_failure is not None,
        )

    def break_off_all(self, reason: BrokenOff) -> None:
        """End all requests that are under way."""
        for exchange in list(self.exchanges):
            exchange.break_off(reason)

    def _check_load(self, is_streamed: bool) -> None:
        waiting = self.llm.num_waiting + self.num_reading
        if waiting and waiting >= self.limits.max_waiting:
            raise ApiError(
                429,
                f"{waiting} sequences wait already, at most {self.limits.max_waiting} may",
                code="queue_full",
                retry_after_s=self._retry_after_s(waiting),
            )
        if is_streamed and self.num_streams >= self.limits.max_streams:
            raise ApiError(
                429,
                f"{self.num_streams} streams are open already",
                code="too_many_streams",
                retry_after_s=self._retry_after_s(waiting),
            )

    def _retry_after_s(self, waiting: int) -> int:
        """Seconds until half of those who wait will have gone, as fast as requests ended lately."""
        if len(self._ends_s) < 2:
            return 1
        span_s = max(time.perf_counter() - self._ends_s[0], 1e-3)
        return min(max(math.ceil(waiting / 2 * span_s / len(self._ends_s)), 1), 60)

    def _left(self, exchange: Exchange) -> None:
        self.exchanges.discard(exchange)
        if isinstance(exchange.reason, ClientLeft):
            self._metrics.requests.finished.labels("abort").inc(exchange.num_going_on)
        elif exchange.reason is not None and not isinstance(exchange.reason, InvalidInput):
            self._metrics.requests.finished.labels("error").inc(exchange.num_going_on)
        now_s = time.perf_counter()
        if exchange.reason is not None and not isinstance(exchange.reason, InvalidInput):
            exchange.times.give_up(exchange.requests, now_s)
        self._ends_s = [*self._ends_s[-31:], now_s]
        for order in exchange.orders:
            if order.request is None or not order.request.is_finished:
                self.llm.withdraw(order)

    def _closed(self, exchange: Exchange) -> None:
        self.num_streams -= exchange.is_streamed

    def _listener(self, exchange: Exchange, place: int) -> Callable[[News], None]:
        """What the engine's thread calls with news of one prompt."""
        gaps = self._metrics.gaps
        last_s: dict[int, float] = {}  # when each sample's last token came

        def heard(news: News) -> None:
            if isinstance(news, Chunk) and news.token_ids:
                now_s = time.perf_counter()
                before_s = last_s.get(news.sample)
                last_s[news.sample] = now_s
                if before_s is not None:
                    gaps.note(now_s - before_s)
                    if not exchange.is_streamed and news.finish_reason is None:
                        return  # beginnings and ends are enough
            self._said.append((exchange, place, news))

        return heard

    def _hand_over(self, engine: Engine) -> None:
        """Send what was said in this step to the event loop, with one call: a call wakes it.

        Called in the engine's thread after each step, and when orders were taken.
        """
        times = engine.last_step
        if times is not None and times is not self._noted:
            self._noted = times
            self._metrics.steps.note(times)
        if self.llm.recording_failure is not None and not self._has_told_of_recording:
            self._has_told_of_recording = True
            _LOG.error("%s; what is asked is answered all the same", self.llm.recording_failure)
        if self._said and self._loop is not None:
            said, self._said = self._said, []
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                self._loop.call_soon_threadsafe(self._hand_out, said, time.perf_counter())

    def _hand_out(self, said: list[tuple[Exchange, int, News]], now_s: float) -> None:
        for exchange, place, news in said:
            if isinstance(news, BaseException) and not isinstance(news, InvalidInput):
                self._log_failure(news)
            exchange.put(place, news, now_s)
        for exchange in dict.fromkeys(exchange for exchange, _, _ in said):
            exchange.wake()

    def _log_failure(self, failure: BaseException) -> None:
        """Log a step that failed, once for all whom it concerns."""
        if failure is not self._failure:
            self._failure = failure
            _LOG.error("a step failed: %s", failure, exc_info=failure)


def _verified(engine: Engine) -> int:
    engine.scheduler.verify()
    return engine.scheduler.num_steps
