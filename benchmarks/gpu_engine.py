"""The engine on a device, beside `transformers`' own continuous batching, on random weights.

A part of `gpu.py`, which runs it. The load is the one that nano-vllm publishes: 256 requests of 100
to 1,024 prompt tokens that are all answered with 100 to 1,024 tokens, here greedily. Weights are
random and of the shapes of Qwen3-0.6B and Qwen3-8B: what a token is costs nothing.
"""

from __future__ import annotations

import gc
import inspect
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3Config,
)
from transformers.utils import logging

from pagedkv.engine import LLM, SamplingParams

BARS = {"times_generate_batch": 3.0, "forward_share": 0.85, "share_of_reading_once": 0.70}
RESERVED_S = {"Qwen3-0.6B": 130.0, "Qwen3-8B": 60.0}
"""Kept for what comes after the peer, which may take long."""

NEEDED_S = {"Qwen3-8B": 75.0}
"""A model is not begun with less."""

LEAST_S = 20.0
"""A peer that is stopped before says nothing."""

STOPPING_S = 20.0
"""What a peer is given to stop."""


class PeerGoesOn(Exception):
    """The peer did not stop: whatever is measured beside it would be wrong."""


class Settings(Protocol):
    device: str
    smoke: bool

    def seconds_left(self) -> float: ...

    def keep(self, found: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Load:
    """What is asked for, and in what memory."""

    requests: int
    shortest: int
    longest: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def made(self, vocabulary: int) -> list[tuple[list[int], int]]:
        """Prompts and the tokens of their answers; always the same."""
        rng = random.Random(0)
        return [
            (
                rng.choices(range(vocabulary), k=rng.randint(self.shortest, self.longest)),
                rng.randint(self.shortest, self.longest),
            )
            for _ in range(self.requests)
        ]


def measure(settings: Settings) -> dict[str, Any]:
    result: dict[str, Any] = {"bars": BARS}
    load = Load(256, 100, 1024, 256, 8192)
    if settings.smoke:
        load = Load(5, 3, 12, 4, 16)
    bandwidth = copy_bandwidth(settings)
    result["copy_gb_per_s"] = bandwidth / 1e9
    failed: list[str] = []
    goes_on = False
    for name, config in shapes(settings).items():
        result[name] = figures = {}
        left_s = settings.seconds_left()
        if goes_on or left_s < NEEDED_S.get(name, 0.0):
            figures["not_run"] = "a peer does not stop" if goes_on else f"{left_s:.0f} s were left"
        else:
            try:
                measure_model(name, config, load, bandwidth, settings, figures)
            except Exception as problem:  # what was measured before stays
                traceback.print_exc()
                figures["failed"] = reason(problem)
                failed.append(f"{name}: {figures['failed']}")
                goes_on = isinstance(problem, PeerGoesOn)
        clear()
        settings.keep(result)
        show(name, figures)
    if failed:
        result["failed"] = "; ".join(failed)
    return result


def measure_model(
    name: str,
    config: Qwen3Config,
    load: Load,
    bandwidth: float,
    settings: Settings,
    figures: dict[str, Any],
) -> None:
    """Everything about one model, into `figures` as it is found."""
    model = random_model(config, settings)
    requests = load.made(config.vocab_size)
    limit_s = settings.seconds_left() - RESERVED_S.get(name, 0.0)
    theirs = figures["generate_batch"] = limited(
        lambda: peer_rate(model, requests, limit_s), limit_s + 2 * STOPPING_S
    )
    settings.keep({name: figures})
    clear()
    figures["pagedkv"] = our_rate(model, requests, load)
    if theirs.get("is_whole"):
        rate = figures["pagedkv"]["tokens_per_s"]
        figures["times_generate_batch"] = rate / theirs["tokens_per_s"]
    settings.keep({name: figures})
    clear()
    figures["decode"] = decode_rate(model, load, bandwidth, settings)


def shapes(settings: Settings) -> dict[str, Qwen3Config]:
    """The models by name, as their configurations have them."""
    alike = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
    alike |= {"max_position_embeddings": 40_960, "rope_theta": 1_000_000.0}
    large = {
        "Qwen3-0.6B": {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        "Qwen3-8B": {
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    }
    if settings.smoke:
        alike |= {"head_dim": 16, "num_key_value_heads": 2, "vocab_size": 199}
        alike |= {"max_position_embeddings": 256}
        small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        large = {"tiny": {**small, "num_hidden_layers": 2, "tie_word_embeddings": True}}
    return {
        name: Qwen3Config(**alike, **own, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        for name, own in large.items()
    }


def random_model(config: Qwen3Config, settings: Settings) -> Any:
    """A model of this shape, in bfloat16 on the device."""
    torch.manual_seed(0)
    dtype = torch.float32 if settings.device == "cpu" else torch.bfloat16
    with torch.device(settings.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def our_rate(model: Any, requests: list[tuple[list[int], int]], load: Load) -> dict[str, Any]:
    """Tokens a second of this engine, and where the time of its steps goes."""
    with our_engine(model, load, max_model_len=2 * load.longest) as (llm, told):
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
        prompts = [ids for ids, _ in requests]
        # What is compiled at the first step of its kind is compiled now.
        warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate([ids[::-1] for ids in prompts], warm)
        before = llm.statistics()
        start_s = time.perf_counter()
        answers = llm.generate(prompts, params)
        seconds = time.perf_counter() - start_s
        after = llm.statistics()
    tokens = sum(len(answer.token_ids) for answer in answers)
    assert tokens == sum(n for _, n in requests), "not every answer has its length"
    step_s, forward_s = after.step_s - before.step_s, after.forward_s - before.forward_s
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "steps": after.memory.num_steps - before.memory.num_steps,
        "forward_share": forward_s / step_s,
        "preemptions": after.memory.preemptions,
        "told": told,
    }


@contextmanager
def our_engine(model: Any, load: Load, *, max_model_len: int) -> Iterator[tuple[LLM, list[str]]]:
    """An engine on `model`, with the lines that it said while it was made."""
    told: list[str] = []
    sizes: dict[str, Any] = {"kv_memory": "auto"}
    if next(model.parameters()).device.type == "cpu":
        sizes = {"num_tokens": 512}
    llm = LLM(
        model,
        **sizes,
        max_model_len=max_model_len,
        max_num_seqs=load.max_num_seqs,
        max_num_batched_tokens=load.max_num_batched_tokens,
        announce=told.append,
        ahead=True,
    )
    with llm:
        yield llm, told


def peer_rate(model: Any, requests: list[tuple[list[int], int]], limit_s: float) -> dict[str, Any]:
    """Tokens a second of `generate_batch`, whose manager is used as it uses it itself, since it
    takes one length for all answers. After `limit_s` it is stopped; what had ended by then is told,
    and is less than it did."""
    ends_at = time.monotonic() + limit_s
    if limit_s < LEAST_S:
        return {"not_run": "no time was left for it"}
    config = GenerationConfig(do_sample=False, max_new_tokens=max(n for _, n in requests))
    logging.set_verbosity_error()
    told: dict[str, Any] = {}
    tokens = ended = 0
    problem: object = None
    with ExitStack() as stack:
        manager = peer_manager(model, config, requests, told, stack)
        told["attention"] = model.config._attn_implementation
        start_s = time.perf_counter()
        for i, (ids, n) in enumerate(requests):
            manager.add_request(ids, request_id=f"r{i}", max_new_tokens=n, eos_token_id=-1)
        while ended < len(requests) and time.monotonic() < ends_at:
            found = manager.get_result(timeout=0.2)
            if found is None:
                problem = manager.background_thread_status.fatal_error
            elif found.is_finished():
                # One that failed is finished too.
                asked = requests[int(found.request_id.removeprefix("r"))][1]
                problem = found.error
                if problem is None and len(found.generated_tokens) != asked:
                    problem = f"{len(found.generated_tokens)} tokens instead of {asked}"
                tokens += len(found.generated_tokens)
                ended += 1
            if problem is not None:
                break
        seconds = time.perf_counter() - start_s
        if ended < len(requests):
            manager.stop(block=True, timeout=STOPPING_S, hard_stop=True)
    if problem is not None:
        failed = reason(problem) if isinstance(problem, BaseException) else str(problem)[:300]
        return {**told, "failed": failed, "answers": ended}
    return {
        **told,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "answers": ended,
        "is_whole": ended == len(requests),
    }


def peer_manager(
    model: Any,
    config: GenerationConfig,
    requests: list[tuple[list[int], int]],
    told: dict[str, Any],
    stack: ExitStack,
) -> Any:
    """What `generate_batch` runs, made as it makes it, with its graphs captured."""
    make = model.continuous_batching_context_manager
    given: dict[str, Any] = {"block": True, "timeout": STOPPING_S}
    if "workload_hints" in inspect.signature(make).parameters:
        from transformers.generation.continuous_batching.utils import WorkloadHints

        given["workload_hints"] = WorkloadHints(
            max_prompt_length=max(len(ids) for ids, _ in requests),
            max_generated_length=max(n for _, n in requests),
            num_requests=len(requests),
        )
    try:
        return stack.enter_context(make(config, **given))
    except Exception as problem:
        # Where the package `kernels` is installed it takes flash attention from the network.
        told["without_flash"] = reason(problem)
    clear()
    own = ContinuousBatchingConfig(auto_switch_to_flash=False)
    return stack.enter_context(make(config, continuous_batching_config=own, **given))


def decode_rate(model: Any, load: Load, bandwidth: float, settings: Settings) -> dict[str, Any]:
    """How long a step takes in which all sequences decode at short context, beside the time of
    reading the weights and their keys and values once."""
    prompt, answer, timed = (3, 16, 4) if settings.smoke else (32, 96, 48)
    with our_engine(model, load, max_model_len=prompt + answer) as (llm, _):
        vocabulary = model.config.vocab_size
        rng = random.Random(1)
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        with llm.between_steps() as engine:
            for _ in range(load.max_num_seqs):
                engine.add(rng.choices(range(vocabulary), k=prompt), params)
            while engine.scheduler.statistics().computed_tokens < load.max_num_seqs * prompt:
                engine.step()
            for _ in range(4):
                engine.step()
            held = [engine.scheduler.statistics().held_tokens]
            start_s = time.perf_counter()
            for _ in range(timed):
                engine.step()
            step_s = (time.perf_counter() - start_s) / timed
            held.append(engine.scheduler.statistics().held_tokens)
            token_bytes = engine.storage.bytes_per_token
            replays = None if engine.graphs is None else engine.graphs.num_replays
            while not engine.is_idle:
                engine.step()
    embedding = model.get_input_embeddings().weight
    is_tied = bool(model.config.tie_word_embeddings)
    weights = sum(p.nbytes for p in model.parameters()) - (0 if is_tied else embedding.nbytes)
    tokens = sum(held) / 2
    reading_s = (weights + tokens * token_bytes) / bandwidth
    return {
        "batch": load.max_num_seqs,
        "context": tokens / load.max_num_seqs,
        "step_ms": 1e3 * step_s,
        "reading_once_ms": 1e3 * reading_s,
        "share_of_reading_once": reading_s / step_s,
        "replays": replays,
    }


def copy_bandwidth(settings: Settings) -> float:
    """Bytes a second that the device reads and writes while it copies a large tensor."""
    size = 1 << 20 if settings.smoke else 2 << 30
    source = torch.zeros(size, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        synchronize(settings)
        start_s = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        synchronize(settings)
        times.append((time.perf_counter() - start_s) / 4)
    del source, target
    clear()
    return 2 * size / median(times[2:])


def synchronize(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()


def clear() -> None:
    """Have the memory back of what is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def limited(run: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    """What `run` gives, or how it failed: a peer that does not run here keeps nothing else back.

    Raises `PeerGoesOn` where it has not ended after `limit_s`, or a moment if that is less.
    """
    found: list[dict[str, Any]] = []

    def work() -> None:
        try:
            found.append(run())
        except Exception as problem:
            found.append({"failed": reason(problem)})

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(max(limit_s, 1.0))
    if not found:
        raise PeerGoesOn(f"generate_batch did not end within {limit_s:.0f} s")
    thread.join()
    return found[0]


def reason(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"[:300]


def show(name: str, figures: dict[str, Any]) -> None:
    """What there is of one model."""
    print(name)
    for told in ("not_run", "failed"):
        if told in figures:
            print(f"  {told.replace('_', ' ')}: {figures[told]}")
    ours, theirs, decode = (figures.get(part) for part in ("pagedkv", "generate_batch", "decode"))
    if ours is not None:
        for line in ours["told"]:
            print(f"  {line}")
        print(
            f"  pagedkv         {ours['tokens_per_s']:10,.0f} tokens/s   {ours['tokens']:,} tokens "
            f"of answers, {ours['forward_share']:.1%} of a step in the forward"
        )
    if theirs is not None and "tokens_per_s" in theirs:
        whole = "" if theirs["is_whole"] else f" (stopped after {theirs['answers']} answers)"
        print(f"  generate_batch  {theirs['tokens_per_s']:10,.0f} tokens/s{whole}")
    elif theirs is not None:
        print(f"  generate_batch: {theirs}")
    if "times_generate_batch" in figures:
        print(f"  {figures['times_generate_batch']:.2f} times generate_batch")
    if decode is not None:
        print(
            f"  decode at batch {decode['batch']}, context {decode['context']:.0f}: "
            f"{decode['step_ms']:.2f} ms a step, reading once {decode['reading_once_ms']:.2f} ms: "
            f"{decode['share_of_reading_once']:.1%}"
        )
    sys.stdout.flush()
