"""`LLM`: a model that generates text out of paged memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from pagedkv.engine.architectures import llama4_scale
from pagedkv.engine.beam_request import BeamRequest
from pagedkv.engine.beam_search import BeamSearchParams
from pagedkv.engine.chat import chat_token_ids
from pagedkv.engine.core import RECORDED_AHEAD, Engine
from pagedkv.engine.detokenizer import TokenTexts
from pagedkv.engine.device import give_back_unused, parse_device
from pagedkv.engine.grammars import Grammar, Grammars
from pagedkv.engine.graphs import CUDACapture
from pagedkv.engine.heap import keep_freed_memory
from pagedkv.engine.loading import ModelSource, check_fits, load_model, load_tokenizer, moved
from pagedkv.engine.measuring import measure_memory
from pagedkv.engine.memory_budget import (
    AUTO,
    DEFAULT_KV_MEMORY,
    MemoryBudget,
    check_sizes,
    format_bytes,
    plan_memory,
)
from pagedkv.engine.model import PagedModel
from pagedkv.engine.outputs import BeamGeneration, Chunk, Generation
from pagedkv.engine.recording import Recorder, check_is_new
from pagedkv.engine.rehearsal import rehearse
from pagedkv.engine.request import Request
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.statistics import EngineStatistics
from pagedkv.errors import InvalidInput
from pagedkv.memory.block_key import Namespace
from pagedkv.scheduling.limits import SchedulerConfig

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the messages of a chat, each with a role and a content."""

_Params = TypeVar("_Params", SamplingParams, BeamSearchParams)


class LLM:
    """A model of `transformers`, unchanged, that keeps its keys and values in blocks.

    `model` is a hub id, a folder, or a GGUF file (also as a folder and `gguf_file`), or a model
    that is loaded already, which then belongs to this object. How much memory its keys and
    values get is one of `kv_memory` (bytes or text like `"2GiB"`; 1 GiB unless given),
    `num_blocks` and `num_tokens`; on a CPU it is taken from the system only as it is written to.
    `kv_memory="auto"` is what the weights and the largest step leave.

    `device` is "auto", "cpu", "cuda" or "cuda:1": a CUDA device where there is one. There decode
    steps are replayed as `graphs`, and with `ahead` a step is scheduled while the one before runs:
    on CUDA unless it is said otherwise, and not where the run is recorded. Neither changes a token.
    With `fused_layers` norms, rotary embedding and gates compute there in one kernel each, and what
    multiplies the same input at once; but for the order in which numbers are added, the same.

    `max_model_len`: longest sequence, prompt and answer; the model's own maximum unless given.
    `max_num_seqs` and `max_num_batched_tokens` bound a step; longer prompts are computed in
    chunks. `tokenizer` is loaded with the model unless given; with a loaded model and none,
    prompts and answers are token ids. `record` names a new file to which the run is written, for
    `pagedkv simulate` to repeat: times, lengths and who shares a prefix with whom, never token
    ids or text. `announce` is told in one line each what a model that is loaded here is at, what
    the memory is worth and what packing the weights costs: `print` shows them.

    Raises `InvalidInput`, one line, for what cannot be: a folder without a model, a model that
    needs more memory than there is, an architecture that would not run right.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any,
        *,
        gguf_file: str | None = None,
        tokenizer: Any | None = None,
        device: str = "auto",
        dtype: str = "auto",
        kv_memory: int | str | None = None,
        num_blocks: int | None = None,
        num_tokens: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        watermark: float = 0.01,
        prefix_caching: bool = True,
        pack_weights: bool = True,
        fused_layers: bool = True,
        graphs: bool = True,
        ahead: bool | None = None,
        seed: int = 0,
        record: str | os.PathLike[str] | None = None,
        announce: Callable[[str], object] | None = None,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            watermark=watermark,
        )
        check_sizes(
            block_size=block_size, kv_memory=kv_memory, num_blocks=num_blocks, num_tokens=num_tokens
        )
        if record is not None:
            if ahead:
                raise InvalidInput(RECORDED_AHEAD)
            check_is_new(record)
        announce = announce or _silent
        keep_freed_memory()
        if isinstance(model, (str, os.PathLike)):
            announce("reading the weights")
        loaded, tokenizer = _loaded(model, gguf_file, tokenizer, dtype, device)
        self.tokenizer = tokenizer
        if isinstance(model, (str, os.PathLike)):
            announce("laying the weights out")
        with _room_on(next(loaded.parameters()).device):
            paged = PagedModel(loaded, pack_weights=pack_weights, fused_layers=fused_layers)
        self.max_model_len = _max_model_len(paged, max_model_len)
        self.max_num_seqs = max_num_seqs
        _check_batch(paged, config)
        is_asked = any(size is not None for size in (kv_memory, num_blocks, num_tokens))
        if kv_memory == AUTO:
            measured = measure_memory(
                paged, config, block_size=block_size, max_model_len=self.max_model_len
            )
            announce(str(measured))
            kv_memory = measured.kv_bytes
        self.budget: MemoryBudget = plan_memory(
            paged.shapes,
            dtype=paged.dtype,
            block_size=block_size,
            max_model_len=self.max_model_len,
            kv_memory=kv_memory,
            num_blocks=num_blocks,
            num_tokens=num_tokens,
        )
        check_fits(self.budget.num_bytes, "the blocks", paged.device)
        announce(str(self.budget))
        if not is_asked:
            announce(
                f"nobody asked for more than {DEFAULT_KV_MEMORY} for keys and values: give "
                "kv_memory a size, or auto for what is left beside the weights"
            )
        if paged.doubled_bytes:
            announce(
                f"the output layer shares its weight with the embedding: packed for the CPU "
                f"it takes {format_bytes(paged.doubled_bytes)} more"
            )
        ends = paged.end_token_ids
        if not ends and tokenizer is not None and tokenizer.eos_token_id is not None:
            ends = frozenset([int(tokenizer.eos_token_id)])
        self._recorder = None
        if record is not None:
            self._recorder = Recorder(
                record,
                block_size=block_size,
                settings={
                    "num-blocks": self.budget.num_blocks,
                    "block-size": block_size,
                    "max-model-len": self.max_model_len,
                    "prefix-caching": prefix_caching,
                    "max-num-seqs": config.max_num_seqs,
                    "max-num-batched-tokens": config.max_num_batched_tokens,
                    "chunked-prefill": config.chunked_prefill,
                    "watermark": config.watermark,
                },
            )
        is_cuda = paged.device.type == "cuda"
        if ahead is None:
            ahead = is_cuda and record is None
            if is_cuda and not ahead:
                announce("the run is recorded, so no step is scheduled while another one runs")
        with _room_on(paged.device):
            rehearse(paged, block_size=block_size, ahead=ahead)
            self._engine = Engine(
                paged,
                num_blocks=self.budget.num_blocks,
                block_size=block_size,
                max_model_len=self.max_model_len,
                config=config,
                prefix_caching=prefix_caching,
                texts=None if tokenizer is None else TokenTexts(tokenizer),
                end_token_ids=ends,
                seed=seed,
                recorder=self._recorder,
                ahead=ahead,
                capture=CUDACapture(paged.device) if graphs and is_cuda else None,
            )
            if paged.is_on_triton:
                self._engine.compile_kernels()
        if self._engine.graph_problem is not None:
            announce(self._engine.graph_problem)
        self._driving = _Driving(self._engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: Namespace | None = None,
        on_chunk: Callable[[int, Chunk], object] | None = None,
    ) -> list[Generation]:
        """Generate for all `prompts` together, and return what came of each, in their order.

        A single prompt is a list of one. `params` are for all of them, or one for each; the
        defaults of `SamplingParams` unless given. `namespace` separates the cache from that of
        other namespaces. `on_chunk` is told each chunk as it comes, with its prompt's place.

        Raises `InvalidInput` or `NeverFits` for a prompt that could not be served, and then
        serves none; `GrammarFailed` where an answer cannot go on by its grammar. An interrupt, or
        an error, cancels all of them.
        """
        listed = _listed(prompts)
        each = _params_for_each(listed, params, SamplingParams())
        grammars = [self._grammar(one) for one in each]
        encoded = [self._encoded(prompt, f"prompt {i + 1}") for i, prompt in enumerate(listed)]
        told = None if on_chunk is None else _Told(on_chunk)
        requests: list[Request] = []
        try:
            with self._driving.engine() as engine:
                for i, (text, ids) in enumerate(encoded):
                    request = engine.add(
                        ids,
                        each[i],
                        prompt=text,
                        name=f"prompt {i + 1}",
                        namespace=namespace,
                        listener=None if told is None else told.listener(i),
                        grammar=grammars[i],
                    )
                    requests.append(request)
            self._run(requests, told)
        finally:
            self._cancel(requests)
        return [request.generation() for request in requests]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        *,
        namespace: Namespace | None = None,
    ) -> list[BeamGeneration]:
        """Search for the likeliest answers to all `prompts` together, in their order.

        As `generate`, with the sequences that `transformers` finds with `num_beams`. Beams are
        sequences like any other: they share the blocks of what they have in common, run in the
        same steps as other requests, and give way when memory runs out.

        Raises what `generate` raises, and `InvalidInput` where the run is recorded.
        """
        listed = _listed(prompts)
        each = _params_for_each(listed, params, BeamSearchParams())
        encoded = [self._encoded(prompt, f"prompt {i + 1}") for i, prompt in enumerate(listed)]
        requests: list[BeamRequest] = []
        try:
            with self._driving.engine() as engine:
                for i, (text, ids) in enumerate(encoded):
                    request = engine.add_search(
                        ids, each[i], prompt=text, name=f"prompt {i + 1}", namespace=namespace
                    )
                    requests.append(request)
            self._run(requests)
        finally:
            self._cancel(requests)
        return [request.generation() for request in requests]

    def _run(self, requests: Sequence[Request | BeamRequest], told: _Told | None = None) -> None:
        """Run steps until these have ended. Raises what one of them failed of, whichever thread ran
        that step, or who is told of them."""
        have_ended = not requests
        while not have_ended:
            self._driving.turn()
            # Before the look at failures: another thread's step may end them in between.
            have_ended = all(request.is_finished for request in requests)
            if told is not None and told.failure is not None:
                raise told.failure
            for request in requests:
                if request.failure is not None:
                    raise request.failure

    def _cancel(self, requests: Sequence[Request | BeamRequest]) -> None:
        with self._driving.engine() as engine:
            for request in requests:
                engine.cancel(request)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: Namespace | None = None,
    ) -> AsyncIterator[Chunk]:
        """Generate for one prompt, and yield each chunk as it comes.

        Steps run in a thread of their own, so the event loop goes on; many streams share them.
        Leaving the loop early, or cancelling the task, cancels the request: its blocks come back
        before the next step.

        Raises what `generate` raises, and what the step that computed it raised.
        """
        text, ids = self._encoded(prompt, "the prompt")
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()

        def tell(news: Chunk | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                loop.call_soon_threadsafe(arrived.put_nowait, news)

        wanted = params or SamplingParams()
        grammar = None
        if wanted.structured is not None:
            grammar = await asyncio.to_thread(self._grammar, wanted)
        order = Order(ids, wanted, text, namespace, tell, grammar=grammar)
        self._driving.submit(order)
        going_on = order.params.n
        try:
            while going_on:
                news = await arrived.get()
                if isinstance(news, BaseException):
                    raise news
                yield news
                # What is aborted, unless by leaving, is followed by the reason.
                going_on -= news.finish_reason not in (None, "abort")
        finally:
            if going_on:
                self._driving.withdraw(order)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tell: Callable[[Request | Chunk | BaseException], None],
        *,
        namespace: Namespace | None = None,
    ) -> Order:
        """Ask for an answer without waiting for it, as a server does.

        `tell` hears of it in the thread that runs the steps, and must neither block nor raise:
        first the `Request`, when it has arrived in the engine, then each chunk; or the reason
        why it was refused. If its step fails, its chunks end with an abort each, and the reason
        follows them.

        What `params.structured` says is compiled here and now, unless `grammars` has it.

        Raises `InvalidInput` when this object is closed, and for a structure that cannot be
        followed.
        """
        grammar = self._grammar(params)
        order = Order(
            list(prompt_ids), params, None, namespace, tell, hears_request=True, grammar=grammar
        )
        self._driving.submit(order)
        return order

    def withdraw(self, order: Order) -> None:
        """Nobody wants this answer any more: its blocks come back before the next step."""
        self._driving.withdraw(order)

    def watch(self, watcher: Callable[[Engine], None]) -> None:
        """Call `watcher` after each step, and whenever orders were taken, in that same thread.

        The engine is between two steps then. It must neither block nor raise.
        """
        self._driving.watchers.append(watcher)

    def between_steps(self) -> contextlib.AbstractContextManager[Engine]:
        """The engine, for as long as the context lasts between two steps: look, and be quick."""
        return self._driving.engine()

    @property
    def grammars(self) -> Grammars:
        """What compiles structured outputs, for any thread."""
        return self._engine.grammars

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a seat or for blocks; told at once, also within a step."""
        return self._driving.num_waiting

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows: 0 up to this."""
        return self._engine.model.vocab_size

    @property
    def recording_failure(self) -> str | None:
        """Why the run is written down no further, in one line; None while it is, or need not be."""
        return None if self._recorder is None else self._recorder.failure

    @property
    def num_steps(self) -> int:
        """Steps begun so far; told at once, also within one."""
        return self._engine.scheduler.num_steps

    def statistics(self) -> EngineStatistics:
        """What the memory holds and what happened so far."""
        with self._driving.engine() as engine:
            return engine.statistics()

    def verify(self) -> None:
        """Check every law of the memory; raises `BrokenLaw`."""
        with self._driving.engine() as engine:
            engine.scheduler.verify()

    def close(self) -> None:
        """Stop the thread that serves streams, if there is one; what goes on is cancelled.

        Raises `InvalidInput` if the recording could not be written.
        """
        self._driving.close()
        if self._recorder is not None:
            self._recorder.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """What the answer must follow, compiled in the thread that asks for it."""
        return None if params.structured is None else self.grammars.compiled(params.structured)

    def _encoded(self, prompt: Prompt, name: str) -> tuple[str | None, list[int]]:
        """The text and the token ids of a prompt."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInput(f"{name} is text, but there is no tokenizer: give token ids")
            return prompt, list(self.tokenizer(prompt)["input_ids"])
        if len(prompt) and isinstance(prompt[0], Mapping):
            if self.tokenizer is None:
                raise InvalidInput(f"{name} is a chat, but there is no tokenizer: give token ids")
            return None, chat_token_ids(self.tokenizer, prompt, name)
        if not all(isinstance(token_id, int) for token_id in prompt):
            raise InvalidInput(f"{name} is neither text nor token ids nor messages of a chat")
        return None, [int(token_id) for token_id in prompt if isinstance(token_id, int)]


class Order:
    """A request on its way to the thread that runs the steps."""

    def __init__(
        self,
        ids: list[int],
        params: SamplingParams,
        prompt: str | None,
        namespace: Namespace | None,
        tell: Callable[[Any], None],
        *,
        hears_request: bool = False,
        grammar: Grammar | None = None,
    ) -> None:
        self.ids = ids
        self.params = params
        self.prompt = prompt
        self.namespace = namespace
        self.tell = tell
        self.hears_request = hears_request
        self.grammar = grammar
        self.came_s: float | None = None
        """When it was submitted, in seconds of the engine."""
        self.request: Request | None = None
        self.is_withdrawn = False


class _FairLock:
    """A lock that goes to those who wait in the order in which they came.

    A thread that runs step after step would otherwise take a plain one again before anybody else
    wakes up, and a cancellation or a look at the statistics could wait for whole answers.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_taken = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        try:
            ticket.acquire()
        except BaseException:  # an interrupt while waiting
            with self._guard:
                is_ours = ticket not in self._waiting
                if not is_ours:
                    self._waiting.remove(ticket)
            if is_ours:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()  # it stays taken, by the next one
            else:
                self._is_taken = False


class _Driving:
    """Who runs the steps: whoever waits for an answer, and a thread while there are streams.

    One lock is held for each step, so a step is for everybody's requests, whoever runs it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = _FairLock()
        self._news = threading.Condition()
        self._submitted: deque[Order] = deque()
        self._withdrawn: deque[Order] = deque()
        self._orders: list[Order] = []
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self.watchers: list[Callable[[Engine], None]] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, and orders that were not taken yet."""
        return len(self._submitted) + self._engine.scheduler.num_waiting

    @contextlib.contextmanager
    def engine(self) -> Iterator[Engine]:
        """The engine, between two steps."""
        with self._lock:
            yield self._engine

    def turn(self) -> None:
        """Take what was submitted and withdrawn, and run one step."""
        with self._lock:
            if self._has_news():
                self._take_orders()
                self._tell_watchers()
            if not self._engine.is_idle:
                try:
                    self._step()
                finally:
                    self._tell_watchers()

    def submit(self, order: Order) -> None:
        """Add a request before the next step; it is told its chunks, or why it was refused."""
        with self._news:
            if self._is_closing:
                raise InvalidInput("this LLM is closed")
            order.came_s = self._engine.seconds()
            self._submitted.append(order)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="pagedkv", daemon=True)
                self._thread.start()
            self._news.notify()

    def withdraw(self, order: Order) -> None:
        """Cancel a request before the next step."""
        with self._news:
            order.is_withdrawn = True
            self._withdrawn.append(order)
            self._news.notify()

    def close(self) -> None:
        """End the thread."""
        with self._news:
            self._is_closing = True
            thread = self._thread
            self._news.notify()
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._news:
                while not (self._is_closing or self._has_news() or not self._engine.is_idle):
                    self._news.wait()
                if self._is_closing:
                    break
            with contextlib.suppress(Exception):  # told to the streams that it concerns
                self.turn()
        with self._lock:
            self._take_orders()
            for order in self._orders:
                if order.request is not None and not order.request.is_finished:
                    self._engine.cancel(order.request)
                    order.tell(InvalidInput("this LLM was closed"))
            self._tell_watchers()

    def _tell_watchers(self) -> None:
        for watcher in self.watchers:
            watcher(self._engine)

    def _has_news(self) -> bool:
        return bool(self._submitted or self._withdrawn)

    def _take_orders(self) -> None:
        while self._submitted:
            order = self._submitted.popleft()
            if order.is_withdrawn:
                continue
            try:
                order.request = self._engine.add(
                    order.ids,
                    order.params,
                    prompt=order.prompt,
                    namespace=order.namespace,
                    listener=order.tell,
                    came_s=order.came_s,
                    grammar=order.grammar,
                )
            except Exception as refusal:
                order.tell(refusal)
                continue
            self._orders.append(order)
            if order.hears_request:
                order.tell(order.request)
        while self._withdrawn:
            order = self._withdrawn.popleft()
            if order.request is not None:
                self._engine.cancel(order.request)

    def _step(self) -> None:
        self._orders = [o for o in self._orders if o.request and not o.request.is_finished]
        running = self._orders
        num_failed_steps = self._engine.num_failed_steps
        try:
            self._engine.step()
        except BaseException as failure:
            ended = [o for o in running if o.request and o.request.failure is not None]
            if self._engine.num_failed_steps == num_failed_steps and isinstance(failure, Exception):
                # Nobody's model or token failed but the step itself, and so would the next one.
                ended = running
            for order in ended:
                own = None
                if order.request is not None:
                    self._engine.cancel(order.request)
                    own = order.request.failure
                order.tell(own or failure)
            raise
        for order in running:
            if order.request is not None and order.request.failure is not None:
                order.tell(order.request.failure)


def _loaded(
    model: Any, gguf_file: str | None, tokenizer: Any, dtype: str, device: str
) -> tuple[Any, Any]:
    if isinstance(model, (str, os.PathLike)):
        where = parse_device(device)
        source = ModelSource.parse(model, gguf_file)
        loaded = load_model(source, dtype, where)
        return loaded, load_tokenizer(source) if tokenizer is None else tokenizer
    if gguf_file is not None or dtype != "auto":
        raise InvalidInput("gguf_file and dtype are for models that are loaded here")
    return (model if device == "auto" else moved(model, parse_device(device))), tokenizer


@contextlib.contextmanager
def _room_on(device: torch.device) -> Iterator[None]:
    """Within, one line says it where `device` has too little memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        give_back_unused(device)
        raise InvalidInput(
            f"{device} has no memory left beside the weights and the blocks: lower kv_memory, or "
            "max_num_batched_tokens"
        ) from None


def _silent(line: str) -> None:
    pass


def _max_model_len(model: PagedModel, wanted: int | None) -> int:
    """The longest sequence: what is wanted, if the model gives right answers up to there."""
    longest = model.longest_exact
    if wanted is None:
        if longest is None:
            raise InvalidInput("the model does not say how long it goes: give max_model_len")
        return longest
    if wanted < 1:
        raise InvalidInput(f"max_model_len is {wanted}: give at least 1")
    if longest is not None and wanted > longest:
        raise InvalidInput(
            f"max_model_len is {wanted}, but this model is right only up to {longest} tokens: "
            f"{model.longest_exact_reason}"
        )
    return wanted


def _check_batch(model: PagedModel, config: SchedulerConfig) -> None:
    scale = llama4_scale(model.config)
    if scale is not None and config.max_num_batched_tokens >= scale:
        raise InvalidInput(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}: Llama 4's temperature "
            f"tuning needs less than {scale}"
        )


def _listed(prompts: Any) -> list[Prompt]:
    """A list of prompts, of one that is alone too."""
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and isinstance(listed[0], (int, Mapping)):
        return [listed]
    return listed


def _params_for_each(
    prompts: list[Prompt], params: _Params | Sequence[_Params] | None, default: _Params
) -> list[_Params]:
    each = default if params is None else params
    if isinstance(each, type(default)):
        return [each] * len(prompts)
    listed = list(each) if isinstance(each, Sequence) else []
    if not all(isinstance(one, type(default)) for one in listed) or not isinstance(each, Sequence):
        raise InvalidInput(
            f"the parameters are {type(each).__name__}: give {type(default).__name__}, or one for "
            "each prompt"
        )
    if len(listed) != len(prompts):
        raise InvalidInput(f"{len(prompts)} prompts, but {len(listed)} parameters")
    return listed


class _Told:
    """Passes chunks on, until the one who is told fails.

    The failure waits until the step is over: others have a part in the step too.
    """

    def __init__(self, on_chunk: Callable[[int, Chunk], object]) -> None:
        self._on_chunk = on_chunk
        self.failure: BaseException | None = None

    def listener(self, place: int) -> Callable[[Chunk], None]:
        """What is told the chunks of the prompt at `place`."""

        def listen(chunk: Chunk) -> None:
            if self.failure is None:
                try:
                    self._on_chunk(place, chunk)
                except BaseException as failure:
                    self.failure = failure

        return listen
