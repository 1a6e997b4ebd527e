"""Models and tokenizers, from a hub id, a folder or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging

from pagedkv.engine.architectures import check_architecture
from pagedkv.engine.device import check_dtype, free_bytes
from pagedkv.engine.memory_budget import format_bytes
from pagedkv.errors import InvalidInput

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a hub id or folder, and in it a GGUF file if it is one."""

    name: str
    gguf_file: str | None = None

    @classmethod
    def parse(cls, model: str | os.PathLike[str], gguf_file: str | None = None) -> ModelSource:
        """`model` is a hub id, a folder, or the path of a GGUF file.

        Raises `InvalidInput` for a folder that holds no model, and for a path that is not there.
        """
        name = os.fspath(model)
        path = Path(name).expanduser()
        if path.is_file():
            if path.suffix.lower() != ".gguf":
                raise InvalidInput(f"{name} is a file, but no GGUF file: give a model's folder")
            return cls(str(path.parent), path.name)
        if path.is_dir():
            if gguf_file is not None and not (path / gguf_file).is_file():
                raise InvalidInput(f"{name} holds no {gguf_file}")
            if gguf_file is None and not (path / "config.json").is_file():
                raise InvalidInput(
                    f"{name} holds no model: there is no config.json in it, nor is gguf_file given"
                )
            return cls(str(path), gguf_file)
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise InvalidInput(f"{name} is not there: give a model's folder, GGUF file or hub id")
        return cls(name, gguf_file)

    def __str__(self) -> str:
        """The source as an error names it."""
        return f"{self.name}/{self.gguf_file}" if self.gguf_file else self.name


def load_model(source: ModelSource, dtype: str, device: torch.device | None = None) -> Any:
    """The model of `source` on `device`, the CPU unless given, ready for inference.

    `dtype` "auto" is the checkpoint's own. Raises `InvalidInput` for a model that is not there,
    cannot be read, lacks weights, needs more memory than there is, or is of an architecture that
    does not work, and for a dtype that the device does not compute in.
    """
    device = torch.device("cpu") if device is None else device
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidInput(f"unknown dtype {dtype!r}: choose from auto, {', '.join(DTYPES)}")
    arguments: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(source.name, **arguments)
    except Exception as problem:  # each library below raises errors of its own
        what = "no model that can be read"
        if not Path(source.name).expanduser().exists():
            what = "no folder or file here, and no model that the hub gives"
        raise InvalidInput(f"{source} is {what}: {_line(problem)}") from None
    check_architecture(config)
    if dtype != "auto":
        check_dtype(device, DTYPES[dtype])
    # On its way to a device it is in the machine's memory.
    for place in dict.fromkeys([torch.device("cpu"), device]):
        check_memory(source, None if dtype == "auto" else DTYPES[dtype], config, place)
    try:
        with _quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                source.name,
                config=config,
                dtype=DTYPES.get(dtype, "auto"),
                output_loading_info=True,
                **arguments,
            )
    except Exception as problem:
        raise InvalidInput(f"{source} cannot be loaded: {_line(problem)}") from None
    # `transformers` would fill them with random numbers.
    missing = sorted(report["missing_keys"])
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise InvalidInput(
            f"{source} lacks weights that its config.json asks for: {missing[0]}{others}"
        )
    return moved(model.eval(), device)


def moved(model: Any, device: torch.device) -> Any:
    """`model` on `device`. Raises `InvalidInput` where that has no room, or not its dtype."""
    check_dtype(device, next(model.parameters()).dtype)
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        size = sum(parameter.nbytes for parameter in model.parameters())
        raise InvalidInput(
            f"the weights need {format_bytes(size)}, more than {device} has free"
        ) from None


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer of `source`. Raises `InvalidInput` where there is none."""
    arguments: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(source.name, **arguments)
    except Exception as problem:
        raise InvalidInput(f"{source} has no tokenizer: {_line(problem)}") from None


def check_memory(
    source: ModelSource, dtype: torch.dtype | None, config: Any, device: torch.device
) -> None:
    """Raise `InvalidInput` for a folder whose weights are more than `device` has free."""
    folder = Path(source.name)
    if not folder.is_dir() or source.gguf_file:
        return
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    stored = getattr(config, "dtype", None)
    if dtype is not None and isinstance(stored, torch.dtype):
        size = size * dtype.itemsize // stored.itemsize
    check_fits(size, f"the weights of {source}", device)


def check_fits(size: int, what: str, device: torch.device) -> None:
    """Raise `InvalidInput` if `size` bytes are more than `device` has free, where that is known.

    `what` is what they are for.
    """
    available = free_bytes(device)
    if available is not None and size > available:
        where = "the machine" if device.type == "cpu" else str(device)
        raise InvalidInput(
            f"{what} need {format_bytes(size)}, {where} has {format_bytes(available)} free"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, `transformers` draws no progress bars and warns of nothing: it would run into what a
    command prints, and what matters of it is raised."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # The bar of GGUF files is not one of those that can be switched off.
    bar = getattr(modeling_gguf_pytorch_utils, "tqdm", None)
    if bar is not None:
        modeling_gguf_pytorch_utils.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        if bar is not None:
            modeling_gguf_pytorch_utils.tqdm = bar
        logging.set_verbosity(verbosity)
        if was_enabled:
            logging.enable_progress_bar()


def _line(problem: BaseException) -> str:
    text = str(problem).strip() or type(problem).__name__
    return text.splitlines()[0].rstrip(":")
