"""The kernels on a device: right, and what share they reach of what it can copy and multiply.

Two parts of `gpu.py`, which runs them. Times are of the device alone, by its own events, medians;
work that is launched often is captured as a graph, as the engine does.
"""

from __future__ import annotations

import gc
import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from pagedkv.attention import LayerShape, reference_attend
from pagedkv.attention.gpu import GPUStorage, tiles
from pagedkv.attention.gpu.pieces import NUM_ROWS
from pagedkv.attention.gpu.tiles import Tile

BARS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
KV_HEADS, HEADS, DIM = 8, 32, 128
WARMING_S = 0.03
CHECK_S = 10.0
"""What a check may take, with all that is compiled for it."""
LARGE_TOKENS = 512 * 1024
"""Batch times context from which decoding is to reach its bar."""


class Settings(Protocol):
    device: str
    smoke: bool
    tune: bool

    def seconds_left(self) -> float: ...

    def keep(self, found: dict[str, Any]) -> None: ...


Keep: TypeAlias = Callable[[Any], None]
"""Writes what has been found of one table so far."""


def check(settings: Settings) -> dict[str, Any]:
    """Whether the kernels are right."""
    cases = correctness(settings, lambda found: settings.keep({"correctness": found}))
    wrong = [case for case in cases if case["right"] is False]
    failed = {"failed": f"{len(wrong)} checks of correctness"} if wrong else {}
    return {"correctness": cases, **failed}


def measure(settings: Settings) -> dict[str, Any]:
    """How fast they are."""
    warm_up(settings)
    rates = device_rates(settings)
    result: dict[str, Any] = {"device_rates": rates}
    parts: dict[str, Callable[[Keep], Any]] = {
        "decode": lambda keep: decode(settings, rates["copy_gb_per_s"], keep),
        "prefill": lambda keep: prefill(settings, rates["matrix_tflops"], keep),
        "host": lambda _: host_time(settings),
    }
    if settings.tune:
        parts["tune"] = lambda keep: tune(settings, rates["copy_gb_per_s"], keep)
    failed: list[str] = []
    for name, run in parts.items():

        def keep(found: Any, name: str = name) -> None:
            result[name] = found
            settings.keep(result)

        try:
            keep(run(keep))
        except Exception as problem:  # what was found before is not lost
            traceback.print_exc()
            keep({"failed": repr(problem), "found": result.get(name)})
            failed.append(name)
    if failed:
        result["failed"] = ", ".join(failed)
    return result


# Correctness


def correctness(settings: Settings, keep: Keep) -> list[dict[str, Any]]:
    """Every kernel and dtype against the reference; NaN lies in every slot nobody wrote.

    First what can only be seen on a device. `right` is None where no time was left for a check,
    or no device that works.
    """
    print("correctness, largest error beside the largest number of its row", flush=True)
    # Each size of head, block and group is compiled: not all with all, which takes minutes.
    sizes = {
        "bfloat16": [(64, 8, 1), (80, 16, 4), (96, 32, 8), (128, 64, 5), (256, 256, 3)],
        "float16": [(80, 16, 2), (128, 16, 4)],
        "float32": [(64, 16, 4), (96, 8, 7), (256, 64, 2)],
    }
    if settings.smoke:
        sizes = {dtype: [(80, 16, 3)] for dtype in BARS}
    many: list[tuple[str, Callable[[], float], float]] = [
        ("a graph replayed on new batches", lambda: replayed(settings), 1e-5),
        ("places beyond 2^31 numbers", lambda: far_error(settings), BARS["bfloat16"]),
    ]
    for dtype in sizes:
        for i, (dim, block_size, each) in enumerate(sizes[dtype]):
            for name, some in _options(2 * each).items():
                if i and some:
                    continue
                many.append((
                    f"{dtype} size {dim}, block {block_size}, {each} heads each, {name}",
                    lambda a=(dtype, dim, block_size, each, some): ragged_error(settings, *a),
                    BARS[dtype],
                ))  # fmt: skip
        many.append((
            f"{dtype} one long context among short ones",
            lambda dtype=dtype: long_error(settings, dtype),
            BARS[dtype],
        ))  # fmt: skip
        many.append((f"{dtype} write, read and copy", lambda d=dtype: moved(settings, d), 0.0))
    found: list[dict[str, Any]] = []
    is_lost = False
    for name, check, bar in many:
        if is_lost or settings.seconds_left() < CHECK_S:
            why = "the device does not work any more" if is_lost else "out of time"
            found.append({"case": name, "error": f"not run: {why}", "right": None})
            continue
        try:
            error = check()
            case = {"case": name, "error": error, "right": error <= bar}
        except Exception as problem:  # one that does not compile must not hide the others
            traceback.print_exc()
            case = {"case": name, "error": repr(problem), "right": False}
            is_lost = not still_works(settings)
        found.append(case)
        keep(found)
        if not case["right"]:
            print(f"  WRONG {name}: {case['error']}, bar {bar}", flush=True)
    right, left = (sum(case["right"] is told for case in found) for told in (True, None))
    print(f"  {right} of {len(found) - left} right" + f", {left} not run" * bool(left), flush=True)
    for dtype in BARS:
        errors = [
            case["error"] for case in found
            if case["case"].startswith(dtype) and isinstance(case["error"], float)
        ]  # fmt: skip
        print(f"  {dtype}: at most {max(errors, default=float('nan')):.2g}, bar {BARS[dtype]:g}")
    return found


def still_works(settings: Settings) -> bool:
    """Whether the device takes work after an error, which an access out of bounds ends for good."""
    try:
        torch.ones(1, device=settings.device).cpu()
    except RuntimeError:
        return False
    return True


def _options(num_heads: int) -> dict[str, dict[str, Any]]:
    sinks = np.linspace(-3, 8, num_heads)
    return {
        "plain": {},
        "all options": {"window": 100, "soft_cap": 20.0, "sinks": sinks, "scale": 0.2},
        "chunk": {"chunk": 64},
    }


class Sequences:
    """Sequences written into a storage that was full of NaN, and kept beside it."""

    def __init__(
        self,
        settings: Settings,
        lengths: list[int],
        shape: LayerShape,
        block_size: int,
        dtype: str,
        num_blocks: int | None = None,
    ) -> None:
        rng = np.random.default_rng(0)
        needed = [-(-length // block_size) for length in lengths]
        self.storage = GPUStorage(
            num_blocks or sum(needed) + 2, block_size, [LayerShape(1, 8, 8), shape], dtype=dtype,
            device=settings.device,
        )  # fmt: skip
        storage = self.storage
        if num_blocks is None:
            storage.data.fill_(torch.nan)
        self.tables = np.full((len(lengths), max(needed)), -1, dtype=np.int32)
        self.lengths = np.array(lengths)
        free = storage.num_blocks - 1 - rng.permutation(sum(needed)).astype(np.int32)
        self.k, self.v = [], []
        for i, length in enumerate(lengths):
            self.tables[i, : needed[i]], free = free[: needed[i]], free[needed[i] :]
            tokens = np.arange(length)
            slots = self.tables[i, tokens // block_size].astype(np.int64) * block_size
            rows = [
                torch.from_numpy(
                    rng.standard_normal((length, shape.num_kv_heads, dim), dtype=np.float32)
                ).to(storage.device, storage.data.dtype)
                for dim in (shape.key_dim, shape.value_dim)
            ]
            storage.write(1, rows[0], rows[1], slots + tokens % block_size)
            self.k.append(rows[0])
            self.v.append(rows[1])

    def queries(self, starts: np.ndarray[Any, Any], num_heads: int) -> torch.Tensor:
        rng = np.random.default_rng(1)
        q = rng.standard_normal((starts[-1], num_heads, self.k[0].shape[2]), dtype=np.float32)
        return torch.from_numpy(q).to(self.storage.device, self.storage.data.dtype)

    def error(self, out: torch.Tensor, q: torch.Tensor, starts: Any, **some: Any) -> float:
        """Of `out` against the reference in float64."""
        worst = 0.0
        for start, stop, k, v in zip(starts, starts[1:], self.k, self.v):
            if start == stop:
                continue
            arrays = [part.double().cpu().numpy() for part in (q[start:stop], k, v)]
            expected = reference_attend(*arrays, **some)
            worst = max(worst, relative_error(out[start:stop].double().cpu().numpy(), expected))
        return worst


def relative_error(result: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    if not np.isfinite(result).all():
        return float("inf")
    scale = np.maximum(np.abs(expected).max(axis=-1, keepdims=True), 1e-3)
    return float((np.abs(result - expected) / scale).max())


def ragged_error(
    settings: Settings, dtype: str, dim: int, block_size: int, each: int, some: dict[str, Any]
) -> float:
    cases = [(700, 1), (290, 33), (70, 70), (1, 1), (300, 5), (257, 1), (9, 0)]
    if settings.smoke:
        cases = [(40, 1), (20, 7), (3, 0)]
    batch = Sequences(
        settings, [length for length, _ in cases], LayerShape(2, dim, dim), block_size, dtype
    )
    starts = np.cumsum([0, *(new for _, new in cases)])
    q = batch.queries(starts, 2 * each)
    out = batch.storage.attend(1, q, batch.tables, batch.lengths, starts, **some)
    return batch.error(out, q, starts, **some)


def long_error(settings: Settings, dtype: str) -> float:
    long, short = (100_000, 200) if not settings.smoke else (200, 3)
    lengths = [long, *[10] * short]
    batch = Sequences(settings, lengths, LayerShape(2, 64, 64), 16, dtype)
    starts = np.arange(len(lengths) + 1)
    q = batch.queries(starts, 8)
    some = {"sinks": np.linspace(0, 9, 8)}
    out = batch.storage.attend(1, q, batch.tables, batch.lengths, starts, **some)
    return batch.error(out, q, starts, **some)


def moved(settings: Settings, dtype: str) -> float:
    """0 if what was written is read back, bit for bit, also from copies made one after another."""
    batch = Sequences(settings, [50], LayerShape(3, 80, 48), 8, dtype)
    storage, table = batch.storage, batch.tables[0]
    free = sorted(set(range(storage.num_blocks)) - set(table.tolist()))
    storage.copy_blocks([[table[0], free[0]], [free[0], free[1]], [table[1], table[0]]])
    copied = table.copy()
    for blocks in ([free[0], *table[1:]], [free[1], *table[1:]]):
        copied[:] = blocks
        for part, expected in zip(storage.read(1, copied, 50), (batch.k[0], batch.v[0])):
            if not torch.equal(part, expected.float()):
                return 1.0
    (k, _), first = storage.read(1, table, 8), batch.k[0][8:16].float()
    return 0.0 if torch.equal(k, first) else 1.0


def replayed(settings: Settings) -> float:
    lengths = [2000, 40, 300, 1] if not settings.smoke else [60, 9]
    batch = Sequences(settings, lengths, LayerShape(2, 64, 64), 16, "float32")
    size = len(lengths) + 1
    plan = batch.storage.decode_plan(size, batch.tables.shape[1])
    q = torch.zeros(size, 4, 64, device=settings.device)
    out = torch.empty_like(q)
    run = captured(settings, [lambda: batch.storage.attend_planned(1, q, plan, out=out)])
    worst = 0.0
    every = batch.queries(np.arange(size), 4)
    for chosen in ([0], list(range(size - 1)), [1, 0], []):
        plan.update(batch.tables[chosen], batch.lengths[chosen])
        q[: len(chosen)] = every[: len(chosen)]
        run()
        for i, sequence in enumerate(chosen):
            one = slice(i, i + 1)
            parts = (q[one], batch.k[sequence], batch.v[sequence])
            expected = reference_attend(*(part.double().cpu().numpy() for part in parts))
            worst = max(worst, relative_error(out[one].double().cpu().numpy(), expected))
        if bool((out[len(chosen) :] != 0).any()):
            return float("inf")
    return worst


def far_error(settings: Settings) -> float:
    """The last pages of a storage of more than 2^31 numbers."""
    shape, block_size = LayerShape(4, 64, 64), 64
    far = 1 if settings.smoke else 2**31 // (block_size * shape.numbers_per_token)
    batch = Sequences(settings, [200], shape, block_size, "bfloat16", num_blocks=far + 8)
    q = batch.queries(np.array([0, 1]), 8)
    out = batch.storage.attend(1, q, batch.tables, batch.lengths, [0, 1])
    return batch.error(out, q, [0, 1])


# What the device can do


def warm_up(settings: Settings) -> None:
    """Keep an idle device busy until its clocks are where they are under load."""
    if settings.device == "cuda":
        a = torch.randn(4096, 4096, device="cuda").bfloat16()
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until:
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()


def device_rates(settings: Settings) -> dict[str, float]:
    size = 2**20 if settings.smoke else 2**31
    source = torch.ones(size, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    seconds = seconds_of(settings, [lambda: target.copy_(source)] * 4, runs=15)
    copy = 2 * size / seconds / 1e9
    side = 64 if settings.smoke else 8192
    a, b = (torch.randn(side, side, device=settings.device).bfloat16() for _ in range(2))
    seconds = seconds_of(settings, [lambda: a @ b] * 4, runs=15)
    rates = {"copy_gb_per_s": copy, "matrix_tflops": 2 * side**3 / seconds / 1e12}
    print(
        f"device: copies {copy:.0f} GB/s (read and written), "
        f"multiplies {rates['matrix_tflops']:.0f} TFLOP/s in bf16",
        flush=True,
    )
    return rates


# Decoding


def decode(settings: Settings, copy_gb_per_s: float, keep: Keep) -> list[dict[str, Any]]:
    """Bytes of K and V a second, as a share of the copy bandwidth."""
    print("decode attention, bf16, 8 KV heads, 32 heads, size 128: share of the copy bandwidth")
    print("bar: 85 % from 512k tokens on, block size 16 within 5 % of 64")
    contexts, batches = (512, 4096, 32768), (1, 8, 64, 256)
    if settings.smoke:
        contexts, batches = (32,), (1, 2)  # type: ignore[assignment]
    found = []
    for context, batch in itertools.product(contexts, batches):
        rates = {}
        for block_size in (16, 64):
            case: dict[str, Any] = {"batch": batch, "context": context, "block_size": block_size}
            try:
                case |= decode_case(settings, batch, context, block_size)
            except torch.OutOfMemoryError:
                case["not_measured"] = "does not fit the memory"
            except Exception as problem:
                traceback.print_exc()
                case["not_measured"] = repr(problem)
            if "gb_per_s" in case:
                case["share"] = case["gb_per_s"] / copy_gb_per_s
                rates[block_size] = case["gb_per_s"]
            found.append(case)
        line = f"  batch {batch:3} context {context:6}"
        for case in found[-2:]:
            told = f"{case['share']:6.1%}" if "share" in case else case["not_measured"][:40]
            line += f"  block {case['block_size']}: {told}"
        if len(rates) == 2:
            line += f"  16 of 64: {rates[16] / rates[64]:.3f}"
        if batch * context >= LARGE_TOKENS:
            line += "  (bar 85 %)"
        print(line, flush=True)
        keep(found)
    return found


def decode_case(settings: Settings, batch: int, context: int, block_size: int) -> dict[str, Any]:
    if settings.seconds_left() < 40 and not settings.tune:
        return {"not_measured": "out of time"}
    shape = LayerShape(KV_HEADS, DIM, DIM)
    nbytes = batch * context * shape.numbers_per_token * 2
    free = 2**30
    if settings.device == "cuda":
        gc.collect()  # of a graph, whose memory torch keeps for it
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    # Layers that take turns, so that none is found in the cache that the last call left.
    num_layers = max(1, min(64, -(-(2**29) // nbytes)))
    if settings.smoke:
        num_layers = 2
    if nbytes * num_layers > 0.9 * free:
        return {"not_measured": "does not fit the memory"}
    num_blocks = batch * -(-context // block_size)
    storage = GPUStorage(num_blocks, block_size, [shape] * num_layers, device=settings.device)
    storage.data.normal_()
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(batch, -1)
    plan = storage.decode_plan(batch, tables.shape[1])
    plan.update(tables, np.full(batch, context))
    q = torch.randn(batch, HEADS, DIM, device=settings.device).bfloat16()
    out = torch.empty_like(q)
    calls = [
        lambda layer=layer: storage.attend_planned(layer, q, plan, out=out)
        for layer in range(num_layers)
    ]
    seconds = seconds_of(settings, calls * max(1, 4 // num_layers), runs=9)
    (launch,) = next(iter(plan._cuts.values())).launches
    used = int((launch.pieces[:, NUM_ROWS] > 0).sum())
    return {
        "microseconds": seconds * 1e6,
        "gb_per_s": nbytes / seconds / 1e9,
        "layers_in_turn": num_layers,
        "pieces": used,
    }


# Prefill


def prefill(settings: Settings, matrix_tflops: float, keep: Keep) -> list[dict[str, Any]]:
    """4 prompts of 4,096 tokens, whole and in chunks, beside flash SDPA on contiguous tensors."""
    print("prefill of 4 x 4,096 tokens, bf16, 32 heads, 8 KV heads, size 128; bar: 70 % of SDPA")
    batch, length, heads = (2, 32, 8) if settings.smoke else (4, 4096, HEADS)
    kv_heads = heads // 4
    dim = 16 if settings.smoke else DIM
    q = torch.randn(batch * length, heads, dim, device=settings.device).bfloat16()
    k, v = (
        torch.randn(batch * length, kv_heads, dim, device=settings.device).bfloat16()
        for _ in range(2)
    )
    flops = 4 * batch * heads * dim * length * (length + 1) / 2
    found: list[dict[str, Any]] = []

    def tell(name: str, measured: Callable[[], float]) -> None:
        try:
            seconds = measured()
        except Exception as problem:  # the others can be measured all the same
            traceback.print_exc()
            found.append({"case": name, "not_measured": repr(problem)})
            return
        rate = flops / seconds / 1e12
        case = {"case": name, "milliseconds": seconds * 1e3, "tflops": rate}
        case["share_of_matrix_rate"] = rate / matrix_tflops
        beside = ""
        if found and "milliseconds" in found[0]:
            case["share_of_sdpa"] = found[0]["milliseconds"] / case["milliseconds"]
            beside = f", {case['share_of_sdpa']:.1%} of SDPA"
        found.append(case)
        print(f"  {name}: {seconds * 1e3:.2f} ms, {rate:.0f} TFLOP/s{beside}", flush=True)
        keep(found)

    tell("flash SDPA, contiguous", lambda: sdpa_seconds(settings, q, k, v, batch))
    for block_size in (16, 64):
        num_blocks = batch * -(-length // block_size)
        storage = GPUStorage(
            num_blocks, block_size, [LayerShape(kv_heads, dim, dim)], device=settings.device
        )
        rng = np.random.default_rng(0)
        tables = rng.permutation(num_blocks).astype(np.int32).reshape(batch, -1)
        tokens = np.arange(length)
        slots = tables[:, tokens // block_size].astype(np.int64) * block_size
        there = torch.from_numpy((slots + tokens % block_size).reshape(-1)).to(settings.device)
        storage.write(0, k, v, there)
        if block_size == 16:
            rate = write_rate(settings, storage, k, v, there)
            print(f"  writing its keys and values: {rate:.0f} GB/s", flush=True)
        for chunk in (length, length // 4):
            name = f"block {block_size}, " + ("whole" if chunk == length else f"{chunk} at a time")
            tell(
                name,
                lambda a=(storage, q, tables, batch, chunk): chunked_seconds(settings, *a),
            )
    return found


def write_rate(
    settings: Settings, storage: GPUStorage, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> float:
    """GB/s read and written by scattering keys and values into their slots."""
    seconds = seconds_of(settings, [lambda: storage.write(0, k, v, slots)], runs=9)
    return 2 * (k.nbytes + v.nbytes) / seconds / 1e9


def sdpa_seconds(
    settings: Settings, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int
) -> float:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads_each = q.shape[1] // k.shape[1]
    parts = [
        part.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()
        for part in (q, k.repeat_interleave(heads_each, 1), v.repeat_interleave(heads_each, 1))
    ]
    backend = SDPBackend.FLASH_ATTENTION if settings.device == "cuda" else SDPBackend.MATH
    with sdpa_kernel(backend):
        work = [lambda: F.scaled_dot_product_attention(*parts, is_causal=True)]
        return seconds_of(settings, work, runs=15)


def chunked_seconds(
    settings: Settings, storage: GPUStorage, q: torch.Tensor, tables: Any, batch: int, chunk: int
) -> float:
    """All chunks, one step after the other, each of all sequences."""
    length = len(q) // batch
    calls = []
    for start in range(0, length, chunk):
        own = torch.cat([q[i * length + start : i * length + start + chunk] for i in range(batch)])
        starts = np.arange(batch + 1) * chunk
        plan = storage.plan(tables, np.full(batch, start + chunk), starts)
        out = torch.empty_like(own)
        calls.append(
            lambda own=own, plan=plan, out=out: storage.attend_planned(0, own, plan, out=out)
        )
    return seconds_of(settings, calls, runs=15) * len(calls)


# The host, and other tiles


def host_time(settings: Settings) -> dict[str, float]:
    """Microseconds that planning takes the host, which a device works through meanwhile."""
    batch, context = (256, 4096) if not settings.smoke else (2, 40)
    storage = GPUStorage(8, 16, [LayerShape(KV_HEADS, DIM, DIM)], device=settings.device)
    tables = np.zeros((batch, context // 16 + 1), dtype=np.int32)
    lengths = np.random.default_rng(0).integers(1, context, batch)
    q = torch.zeros(batch, HEADS, DIM, device=settings.device).bfloat16()
    plan = storage.decode_plan(batch, tables.shape[1])
    starts = np.arange(batch + 1)
    if not settings.smoke:
        storage.attend_planned(0, q, plan)
    found = {}
    for name, work in (
        ("update_microseconds", lambda: plan.update(tables, lengths)),
        ("plan_microseconds", lambda: storage.plan(tables, lengths, starts)),
    ):
        work()
        spent = []
        for _ in range(20):
            began = time.perf_counter()
            work()
            spent.append(time.perf_counter() - began)
        found[name] = median(spent) * 1e6
    print(
        f"host: a batch of {batch} is planned in {found['plan_microseconds']:.0f} µs, "
        f"a fixed plan updated in {found['update_microseconds']:.0f} µs",
        flush=True,
    )
    return found


def tune(settings: Settings, copy_gb_per_s: float, keep: Keep) -> list[dict[str, Any]]:
    """Other tiles than those of `pagedkv.attention.gpu.tiles`, for whoever chooses them anew."""
    print("other tiles: rows, tokens, warps, stages, programs on a processor")
    found: list[dict[str, Any]] = []
    decodes = [Tile(16, *rest) for rest in (
        (64, 4, 5, 3), (64, 4, 3, 3), (64, 4, 7, 2), (32, 4, 5, 4), (32, 4, 7, 4), (128, 4, 3, 2),
        (128, 8, 5, 1), (64, 2, 5, 3), (64, 8, 5, 2),
    )]  # fmt: skip
    prefills = [Tile(*sizes) for sizes in (
        (128, 64, 8, 5, 1), (128, 64, 8, 3, 1), (128, 128, 8, 3, 1), (64, 64, 4, 3, 2),
        (64, 64, 4, 5, 1), (128, 64, 4, 3, 1), (128, 32, 8, 5, 1),
    )]  # fmt: skip
    if settings.smoke:
        decodes, prefills = decodes[:1], []
    for tile in decodes:
        with only_tile(tile):
            for batch, context in ((64, 8192), (256, 2048), (8, 32768)):
                if settings.smoke:
                    batch, context = 1, 32
                case: dict[str, Any] = {"tile": tile, "batch": batch, "context": context}
                try:
                    case |= decode_case(settings, batch, context, 16)
                    print(f"  {tuple(tile)} batch {batch} context {context}: "
                          f"{case['gb_per_s'] / copy_gb_per_s:.1%}", flush=True)  # fmt: skip
                except Exception as problem:
                    case["not_measured"] = repr(problem)
                    print(f"  {tuple(tile)}: {problem!r:.80}", flush=True)
                found.append(case)
                keep(found)
    for tile in prefills:
        with only_tile(tile):
            print(f"  {tuple(tile)}")
            found.append({"tile": tile, "prefill": prefill(settings, 1.0, lambda _: None)})
            keep(found)
    return found


@contextmanager
def only_tile(tile: Tile) -> Iterator[None]:
    chosen = tiles._tiles
    tiles._tiles = lambda *_: (tile,)  # type: ignore[assignment]
    try:
        yield
    finally:
        tiles._tiles = chosen


# Time on the device


def captured(settings: Settings, calls: list[Callable[[], Any]]) -> Callable[[], None]:
    """All `calls` in one graph, after they ran once; without a device, one after the other."""

    def run() -> None:
        for call in calls:
            call()

    if settings.device != "cuda":
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds_of(settings: Settings, calls: list[Callable[[], Any]], *, runs: int) -> float:
    """The median of one call, `calls` having been captured together, after some runs for warmth:
    two or more, until the device has been busy for long enough to be at full speed."""
    if settings.device != "cuda":
        began = time.perf_counter()
        for call in calls[:1] if settings.smoke else calls:
            call()
        return max(time.perf_counter() - began, 1e-9)
    run = captured(settings, calls)
    run()
    until = time.perf_counter() + WARMING_S
    while True:
        run()
        torch.cuda.synchronize()
        if time.perf_counter() > until:
            break
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    spent = [start.elapsed_time(stop) for start, stop in itertools.pairwise(marks)]
    return median(spent) / 1e3 / len(calls)
