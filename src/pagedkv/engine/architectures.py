"""Which models run on the blocks, and why the others do not.

A model works when all that it remembers of a token is a key and a value in each layer, and when it
reads them through the attention function that `transformers` calls. A model that remembers
anything else would mix the sequences of a batch *without any error*, so what is not known to work
is refused by name. `docs/architectures.md` is this list in words.
"""

from __future__ import annotations

from typing import Any

from pagedkv.errors import InvalidInput

_WORKING_NAMES = """
afmoe apertus arcee biogpt bitnet codegen cohere cohere2 cwm deepseek_v2 deepseek_v3
ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text gemma3n_text
gemma4_text glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite
granitemoe helium hunyuan_v1_dense hy_v3 jetmoe laguna llama llama4_text mimo_v2_flash
minimax_m2 ministral ministral3 mistral mixtral nanochat olmo2 olmo3 olmoe opt persimmon phi
phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
vaultgemma youtu
"""

WORKING = frozenset(_WORKING_NAMES.split())
"""`model_type` of every architecture that gave the tokens of `transformers.generate`."""

_RECURRENT_NAMES = """
bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2
nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba
zamba2
"""
_RECURRENT = (
    "its recurrent layers keep a state for each sequence, which is no key and value of a token"
)
_BUILT_IN = "its attention is built into the model, which calls no function that could be replaced"
_INDEX = "its attention looks only at tokens that an index of its own selects"
_REFUSED = {
    "deepseek_v32": _INDEX,
    "deepseek_v4": _INDEX,
    "diffllama": "it attends twice in each layer, with the same keys and other values",
    "doge": "it adds a bias, computed from the values, to its attention scores",
    "minimax": _RECURRENT,
    **dict.fromkeys(("bloom", "falcon", "mpt", "xglm"), _BUILT_IN),
    **dict.fromkeys(_RECURRENT_NAMES.split(), _RECURRENT),
}

_LAYER_TYPES = frozenset(("full_attention", "sliding_attention", "chunked_attention", "attention"))
"""Kinds of layers that keep a key and a value of every token, and nothing else."""


def check_architecture(config: Any) -> None:
    """Raise `InvalidInput` for a model that would not run right, with the reason."""
    text = config.get_text_config()
    name = str(config.model_type)
    reason = _REFUSED.get(name) or _REFUSED.get(str(text.model_type))
    if reason is None:
        kinds = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
        if kinds:
            reason = f"it has layers of kind {', '.join(sorted(kinds))}; {_RECURRENT}"
        elif getattr(config, "is_encoder_decoder", False):
            reason = "it has an encoder, and a decoder that attends to it"
        elif name not in WORKING:
            reason = "it is not among the architectures that were tried; see docs/architectures.md"
    if reason is not None:
        raise InvalidInput(f"model type {name!r} does not run on paged memory: {reason}")


def longest_exact(config: Any) -> tuple[int | None, str]:
    """Tokens up to which a packed batch gives what one sequence alone gives, and what limits them.

    None where nothing does. Some rotary scalings look at the largest position of the whole batch,
    so one long sequence would change the others; Llama 4 scales queries by their place in the
    batch. Below the length at which that begins both are without effect.
    """
    text = config.get_text_config()
    limits: list[tuple[int, str]] = []
    positions = getattr(text, "max_position_embeddings", None)
    if positions:
        limits.append((int(positions), "max_position_embeddings"))
    for rope in _rotary_settings(text):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", positions
            )
            limits.append((int(original or 0), "longrope changes the whole batch beyond it"))
        elif kind == "dynamic":
            original = rope.get("original_max_position_embeddings") or positions
            limits.append((int(original or 0), "dynamic rotary scaling begins there"))
    scale = llama4_scale(config)
    if scale is not None:
        limits.append((scale - 1, "Llama 4's temperature tuning begins there"))
    return min(limits, default=(None, ""), key=lambda limit: limit[0] or 0)


def llama4_scale(config: Any) -> int | None:
    """The tokens of a *batch* from which Llama 4's temperature tuning would count them wrongly."""
    text = config.get_text_config()
    if text.model_type == "llama4_text" and getattr(text, "attn_temperature_tuning", False):
        return int(text.floor_scale)
    return None


def window_of_mask(config: Any, layer: int) -> int | None:
    """The window that a layer has by the mask that the model would make, where it sends none.

    Most models tell the attention function; those that do not would silently look back too far.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    is_windowed = types[layer] == "sliding_attention" if types else text.model_type == "phimoe"
    return int(window) if window and is_windowed else None


def _rotary_settings(text: Any) -> list[dict[str, Any]]:
    """The model's rotary settings: one, or one for each kind of layer."""
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if any(isinstance(value, dict) for value in given.values()):
        return [value for value in given.values() if isinstance(value, dict)]
    return [given]
