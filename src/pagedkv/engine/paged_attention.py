"""The attention function that `transformers` calls, and what it learns about a model's layers.

`transformers` looks an attention function up by name in every layer. Ours is registered under one
private name and finds the step that it belongs to in a context variable: some models drop keyword
arguments on the way to their layers, none can drop this. No mask function is registered under the
name, so models make no mask; one that sends a mask all the same means something by it that the
block tables cannot say, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from pagedkv.attention import LayerShape
from pagedkv.engine.architectures import window_of_mask
from pagedkv.errors import InvalidInput

NAME = "blocktables"
"""Without the words that `transformers` looks for in such names: flash, sdpa, flex, paged."""


@dataclass(frozen=True)
class LayerPlace:
    """Where one layer of a model keeps its keys and values."""

    storage_layer: int
    is_writer: bool
    """False where it reads what another layer has written."""
    chunk: int | None
    """Llama 4: a token sees only the tokens of its own chunk of this size."""
    window: int | None
    """Tokens that it looks back on, its own included, where the model does not send it."""


class _Attention(Protocol):
    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """The output [T, heads, value_dim] for `query` [T, heads, key_dim] and new K and V."""


_CURRENT: ContextVar[_Attention | None] = ContextVar("pagedkv_attention", default=None)


def _attention_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As `transformers` calls it: query [1, H, T, D], key and value [1, Hkv, T, D] rotated."""
    current = _CURRENT.get()
    if current is None:
        raise RuntimeError("a model on paged memory was called without its engine")
    if attention_mask is not None:
        raise InvalidInput(
            f"{type(module).__name__} brings a mask of its own, which block tables cannot express"
        )
    if s_aux is None:
        s_aux = getattr(module, "sinks", None)
    out = current.attend(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        sliding_window,
        softcap,
        s_aux,
    )
    return out.unsqueeze(0), None


def use_block_tables(model: Any) -> None:
    """Make `model` call our attention function in every layer.

    Raises `InvalidInput` for a model that has its attention built in.
    """
    AttentionInterface.register(NAME, _attention_function)
    model.set_attn_implementation(NAME)
    if model.config.get_text_config()._attn_implementation != NAME:
        raise InvalidInput(
            f"{type(model).__name__} does not let its attention be replaced, "
            "so it cannot read keys and values from blocks"
        )


@contextmanager
def attending(attention: _Attention) -> Iterator[None]:
    """Within, layers of any model that uses block tables attend through `attention`."""
    token = _CURRENT.set(attention)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class StepAttention:
    """Attention of one batch: writes its keys and values, then reads through the block tables."""

    def __init__(self, storage: Any, places: dict[int, LayerPlace], slots: Any, plan: Any) -> None:
        """`storage` is a `KVStorage` or a `GPUStorage`, `plan` one of its plans for the batch, and
        `slots` int64 [T] as its `write` takes them."""
        self._storage = storage
        self._places = places
        self._slots = slots
        self._plan = plan

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend over all of every sequence."""
        place = self._places[module.layer_idx]
        if place.is_writer:
            self._storage.write(place.storage_layer, key, value, self._slots)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        self._storage.attend_planned(
            place.storage_layer,
            query,
            self._plan,
            scale=scale,
            window=place.window if window is None else window,
            chunk=place.chunk,
            soft_cap=soft_cap,
            sinks=sinks,  # of any dtype, where they lie: made float32 by whoever reads them
            out=out,
        )
        return out


class _Survey:
    """Attention that only notes which layers call it with what; its output is zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.chunks: dict[int, int | None] = {}
        self.types: dict[int, str | None] = {}

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        layer = module.layer_idx
        if layer in self.shapes:
            raise InvalidInput(
                f"{type(module).__name__} attends twice in layer {layer}, with one key a token"
            )
        types = getattr(module.config, "layer_types", None)
        self.types[layer] = types[layer] if types else None
        is_chunked = self.types[layer] == "chunked_attention"
        self.chunks[layer] = int(module.config.attention_chunk_size) if is_chunked else None
        self.shapes[layer] = LayerShape(
            num_kv_heads=key.shape[1], key_dim=key.shape[2], value_dim=value.shape[2]
        )
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def survey(model: Any) -> tuple[list[LayerShape], dict[int, LayerPlace]]:
    """What each layer of `model` keeps, found by running one token through it.

    Returns the shapes of the layers that write, in order, and the place of every layer by its
    `layer_idx`. Asking the model itself is right for every architecture, where a reading of its
    configuration would have to know each.

    Raises `InvalidInput` for a model with layers that keep something else.
    """
    seen = _Survey()
    first = torch.zeros((1, 1), dtype=torch.int64, device=next(model.parameters()).device)
    with torch.inference_mode(), attending(seen):
        model(
            input_ids=first,
            position_ids=first,
            use_cache=False,
        )
    text = model.config.get_text_config()
    num_layers = text.num_hidden_layers
    if len(seen.shapes) != num_layers:
        missing = sorted(set(range(num_layers)) - set(seen.shapes))
        raise InvalidInput(
            f"{type(model).__name__} has {num_layers} layers, but {len(missing)} of them "
            f"({', '.join(map(str, missing[:8]))}) keep no keys and values"
        )
    modes = getattr(text, "kv_sharing_modes", None) or [None] * num_layers
    shapes: list[LayerShape] = []
    places: dict[int, LayerPlace] = {}
    last_writer: dict[str | None, int] = {}  # by kind of layer
    for layer in sorted(seen.shapes):
        kind = seen.types[layer]
        is_writer = modes[layer] != "reuse"
        if is_writer:
            last_writer[kind] = len(shapes)
            shapes.append(seen.shapes[layer])
        window = window_of_mask(model.config, layer)
        places[layer] = LayerPlace(last_writer[kind], is_writer, seen.chunks[layer], window)
    return shapes, places
