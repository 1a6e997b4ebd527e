"""One HTTP request's prompts in the engine: asked in the event loop, answered by another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pagedkv.engine.outputs import Chunk
from pagedkv.engine.request import Request
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.errors import InvalidInput
from pagedkv.memory.block_key import Namespace
from pagedkv.server.errors import BrokenOff
from pagedkv.server.metrics import AnswerTimes

if TYPE_CHECKING:
    from pagedkv.engine.llm import LLM, Order

News: TypeAlias = Request | Chunk | BaseException
"""What the engine says of a prompt: it has arrived, its next tokens, or why it ended early."""


class ClientLeft(Exception):
    """Nobody reads the answer any more."""


class Exchange:
    """The prompts of one HTTP request on their way, and a mailbox for what comes back.

    Everything here happens in the event loop. `params` are for all prompts. Of a request that is
    not streamed only the beginning and the end of each sample are put into the mailbox; what it
    said is in `requests` when it has ended.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        namespace: Namespace | None,
        is_streamed: bool,
        times: AnswerTimes,
        on_end: Callable[[Exchange], None],
        on_close: Callable[[Exchange], None],
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.namespace = namespace
        self.is_streamed = is_streamed
        self.times = times
        self.requests: list[Request | None] = [None] * len(prompts)
        self._orders: list[Order] = []
        self._on_end = on_end
        self._on_close = on_close
        self._has_ended = False
        self._was_reminded = False  # and nothing was said since
        self._was_silent = False  # and whoever waits should know
        self.num_going_on = len(prompts) * params.n
        """Answers that have not ended."""
        self._mailbox: list[tuple[int, Chunk]] = []
        self.reason: Exception | None = None
        """What broke it off; None while nothing did."""
        self._waiter: asyncio.Future[None] | None = None

    def order(self, llm: LLM, listeners: Sequence[Callable[[News], None]]) -> None:
        """Submit all prompts; `listeners` hear of one each, in the engine's thread."""
        for ids, listener in zip(self.prompts, listeners):
            self._orders.append(llm.submit(ids, self.params, listener, namespace=self.namespace))

    @property
    def orders(self) -> Sequence[Order]:
        """What was asked of the engine."""
        return self._orders

    async def accepted(self) -> None:
        """Wait until all prompts have arrived in the engine; raises its refusal of one."""
        while self.reason is None and None in self.requests:
            await self._news()
        if self.reason is not None:
            raise self.reason

    async def chunks(self) -> list[tuple[int, Chunk]] | None:
        """Wait for more, and take all that has come, each with the place of its prompt.

        Empty where nothing came for so long that the client should hear of it; None when
        everything has ended. Raises what broke the answer off.
        """
        self._was_silent = False
        while not (self._mailbox or self.reason or self._was_silent) and self.num_going_on:
            await self._news()
        if self.reason is not None:
            raise self.reason
        if not (self._mailbox or self._was_silent):
            return None
        taken, self._mailbox = self._mailbox, []
        return taken

    async def finished(self) -> list[Request]:
        """Wait for the end, and give the requests with all that was said."""
        while await self.chunks() is not None:
            pass
        return [request for request in self.requests if request is not None]

    def put(self, place: int, news: News, now_s: float) -> None:
        """Note what the engine said of one prompt. `wake` follows, once for all."""
        if self._has_ended:
            return
        self._was_reminded = False
        if isinstance(news, Chunk):
            if news.finish_reason == "abort":
                return  # the reason follows
            self.times.note(place, news, self.requests[place], now_s)
            self._mailbox.append((place, news))
            self.num_going_on -= news.finish_reason is not None
            if not self.num_going_on:
                self._end()
        elif isinstance(news, Request):
            self.requests[place] = news
        else:
            self.break_off(_told(news))

    def wake(self) -> None:
        """Let whoever waits look at what was put."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def remind(self) -> None:
        """Time has passed: let whoever waits go on, if nothing was said since the last time."""
        if self._was_reminded:
            self._was_silent = True
            self.wake()
        self._was_reminded = True

    def close(self) -> None:
        """Nobody reads any more, or all was read: it ends, if it had not. To be called once."""
        self.break_off(ClientLeft())
        self._on_close(self)

    def break_off(self, reason: Exception) -> None:
        """End it before its time, for a reason that whoever waits is told."""
        if self._has_ended:
            return
        self.reason = reason
        self._end()
        self.wake()

    def _end(self) -> None:
        self._has_ended = True
        self._on_end(self)

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


def _told(reason: BaseException) -> Exception:
    """What a client is told of an error of the engine's."""
    if isinstance(reason, InvalidInput):
        return reason
    line = (str(reason) or type(reason).__name__).splitlines()[0]
    return BrokenOff(500, f"the step that computed this answer failed: {line}", code="step_failed")
