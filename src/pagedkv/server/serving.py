"""`Serving`: the engine as the server has it, and who may come in.

The one object that owns the `LLM`. Endpoints ask it for an `Exchange`; whoever watches the
memory asks it for a look between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pagedkv.engine.outputs import Chunk
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.errors import BrokenLaw
from pagedkv.memory.block_key import Namespace
from pagedkv.server.errors import ApiError
from pagedkv.server.exchange import Exchange, News
from pagedkv.server.limits import ServerLimits

if TYPE_CHECKING:
    from pagedkv.engine.core import Engine
    from pagedkv.engine.llm import LLM

Found = TypeVar("Found")


class Serving:
    """A model, its memory, and the requests that are under way.

    Made before there is an event loop; `start` ties it to the one that runs.
    """

    def __init__(self, llm: LLM, *, model_name: str, limits: ServerLimits) -> None:
        self.llm = llm
        self.model_name = model_name
        self.limits = limits
        self.created_s = int(time.time())
        self.exchanges: set[Exchange] = set()
        self.num_streams = 0
        self.is_draining = False
        self.broken_law: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._said: list[tuple[Exchange, int, News]] = []  # in this step, by the engine's thread
        self._ends_s: list[float] = []
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
            arrived_s=arrived_s,
            on_end=self._left,
        )
        self.exchanges.add(exchange)
        self.num_streams += is_streamed
        exchange.order(self.llm, [self._listener(exchange, i) for i in range(len(prompts))])
        return exchange

    def check_open(self) -> None:
        """Raise `ApiError` 503 where nobody may come in."""
        if self.broken_law is not None:
            raise ApiError(
                503,
                f"a law of the memory is broken, nothing is admitted any more: {self.broken_law}",
                code="broken_law",
            )
        if self.is_draining:
            raise ApiError(
                503, "the server is shutting down", code="shutting_down", retry_after_s=5
            )

    async def between_steps(self, look: Callable[[Engine], Found]) -> Found:
        """What `look` finds in the engine between two steps, in a thread of its own."""

        def wait_and_look() -> Found:
            with self.llm.between_steps() as engine:
                return look(engine)

        return await asyncio.to_thread(wait_and_look)

    async def verify(self) -> None:
        """Check every law of the memory; a broken one stops admission. Raises `BrokenLaw`."""
        try:
            await self.between_steps(lambda engine: engine.scheduler.verify())
        except BrokenLaw as broken:
            self.broken_law = str(broken)
            raise

    def break_off_all(self, reason: Exception) -> None:
        """End all requests that are under way."""
        for exchange in list(self.exchanges):
            exchange.break_off(reason)

    def _check_load(self, is_streamed: bool) -> None:
        waiting = self.llm.num_waiting
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
        self.num_streams -= exchange.is_streamed
        self._ends_s = [*self._ends_s[-31:], time.perf_counter()]
        for order in exchange.orders:
            if order.request is None or not order.request.is_finished:
                self.llm.withdraw(order)

    def _listener(self, exchange: Exchange, place: int) -> Callable[[News], None]:
        """What the engine's thread calls with news of one prompt."""
        if exchange.is_streamed:
            return lambda news: self._said.append((exchange, place, news))
        begun: set[int] = set()

        def beginnings_and_ends(news: News) -> None:
            if isinstance(news, Chunk) and news.finish_reason is None:
                if news.sample in begun:
                    return
                begun.add(news.sample)
            self._said.append((exchange, place, news))

        return beginnings_and_ends

    def _hand_over(self, engine: Engine) -> None:
        """Send what was said in this step to the event loop, with one call: a call wakes it."""
        if self._said and self._loop is not None:
            said, self._said = self._said, []
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                self._loop.call_soon_threadsafe(self._hand_out, said)

    def _hand_out(self, said: list[tuple[Exchange, int, News]]) -> None:
        for exchange, place, news in said:
            exchange.put(place, news)
        for exchange in dict.fromkeys(exchange for exchange, _, _ in said):
            exchange.wake()
