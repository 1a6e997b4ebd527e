"""Where a model computes: the CPU, or a CUDA device; and how numbers get there."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.errors import InvalidInput, PagedKVError


class OutOfDeviceMemory(PagedKVError):
    """A step needed more memory than the device had left."""

    def __init__(self, device: torch.device, num_tokens: int) -> None:
        super().__init__(
            f"{device} has no memory left for a step of {num_tokens} tokens: lower "
            "max_num_batched_tokens, or kv_memory"
        )


def parse_device(name: str) -> torch.device:
    """The device of that name: "auto", "cpu", "cuda" or "cuda:1"; auto is CUDA where there is one.

    Raises `InvalidInput`, one line, for another name and for a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InvalidInput(f"unknown device {name!r}: choose from auto, cpu, cuda, cuda:1 ...")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidInput(
                f"device is {name}, but torch {torch.__version__} finds no CUDA device here: "
                "give cpu"
            )
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise InvalidInput(f"device is {name}: this machine has cuda:0 to cuda:{last}")
    return device


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raise `InvalidInput` where the device does not compute in `dtype`."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        major, _ = torch.cuda.get_device_capability(device)
        if major < 8:
            raise InvalidInput(
                f"{torch.cuda.get_device_name(device)} does not compute in bfloat16: "
                "give --dtype float16"
            )


def free_bytes(device: torch.device) -> int | None:
    """Bytes of memory that nobody has taken; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def give_back_unused(device: torch.device) -> None:
    """Let the device have memory again that torch has kept from tensors that are gone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Within, what names no device means this one: streams, events and graphs."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def uploaded(arrays: list[NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """`arrays`, int64 each, on the device: one copy, which nobody waits for.

    The memory that it is copied from is torch's, and is not used again before that has happened.
    """
    sizes = [array.size for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate([array.reshape(-1) for array in arrays], out=packed.numpy())
    there = packed.to(device, non_blocking=True)
    return [part.view(array.shape) for part, array in zip(there.split(sizes), arrays, strict=True)]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float32 in host memory, itself where it is one."""
    return tensor.float().cpu()


class Read:
    """A tensor on its way from the device to the host, asked for as soon as it is computed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def numpy(self) -> NDArray[Any]:
        """What it holds, once it is there: waits for that and for no later work."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: NDArray[Any] = self._tensor.numpy()
        return found

    def order(self, stream: torch.cuda.Stream) -> None:
        """What `stream` is given from now on comes after this."""
        if self._arrived is not None:
            stream.wait_event(self._arrived)


def rows_aside(tensor: torch.Tensor, rows: NDArray[np.int64], ready: Read) -> torch.Tensor:
    """Some rows of a tensor [n, m], float32 in host memory, without waiting for later work.

    `ready` must have been made when the tensor had been computed. On a stream of its own, or what
    the device was given since then would come first.
    """
    if tensor.device.type != "cuda":
        return on_host(tensor[torch.from_numpy(rows)])
    aside = _aside(tensor.device.index)
    with torch.cuda.stream(aside):
        ready.order(aside)
        (there,) = uploaded([rows], tensor.device)
        return on_host(tensor[there])


@functools.cache
def _aside(index: int) -> torch.cuda.Stream:
    """The stream of a device on which nothing is computed."""
    return torch.cuda.Stream(index)


class ForwardTime:
    """How long the model computes, by the device's own clock where that runs by itself.

    A context around no more than the forward itself: what comes before it, like planning and
    copying, is the host's time, and a device that has nothing else to do waits for it.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        """`clock` tells the host's seconds."""
        self._marks: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._clock = clock
        self._start_s = 0.0
        self._host_s: float | None = None

    def __enter__(self) -> None:
        """The model begins."""
        if self._marks:
            self._marks[0].record()
        self._start_s = self._clock()

    def __exit__(self, *_: object) -> None:
        """All that the model does has been asked for."""
        self._host_s = self._clock() - self._start_s
        if self._marks:
            self._marks[1].record()

    def seconds(self) -> float:
        """Between the two, once the device is that far; 0 where nothing began."""
        if self._host_s is None:
            return 0.0
        if not self._marks:
            return self._host_s
        self._marks[1].synchronize()
        return float(self._marks[0].elapsed_time(self._marks[1])) / 1e3
