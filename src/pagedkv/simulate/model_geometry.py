"""How many bytes a token's keys and values take in a model, and how large the model itself is.

Everything is computed from the fields of a Hugging Face `config.json`, for the models that are
built in by name as much as for a file that is given.

**KV bytes per token** are the sum over the layers of what each keeps for one token:

===================  =====================================================================
multi-head           `2 * num_attention_heads * head_dim`
grouped-query        `2 * num_key_value_heads * head_dim`
multi-query          `2 * head_dim`
multi-head latent    `kv_lora_rank + qk_rope_head_dim`, and the sparse indexer's key if any
shared               nothing: the layer reads another layer's keys and values
recurrent            nothing: the state belongs to the sequence and does not grow
===================  =====================================================================

times the bytes of the KV dtype. Layers whose attention reaches back only a window (or a chunk)
are counted as if they kept every token: this memory does not drop blocks behind a window yet.
`ModelGeometry.remarks` says so where it applies.

**Parameters** are estimated as the weight matrices: embeddings (once where tied), attention
projections, feed-forward matrices (3 where gated, 2 where not), experts and their router.
Biases and norms, under 0.1 %, are left out. A recurrent layer's mixer is taken as four
`hidden_size x hidden_size` matrices, which is rough. *Active* parameters are those that take
part in the matrix products of one token: the experts that it is routed to, and the output
embedding but not the input one, which is a look-up.

**Attention work**: one query token against one key token costs `2 * (key_dim + value_dim)`
floating-point operations a query head, in each layer that attends.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.errors import InvalidInput
from pagedkv.simulate.built_in_models import BUILT_IN_CONFIGS

KV_DTYPES = ("auto", "fp16", "bf16", "fp32", "fp8", "int8")
"""What `kv_dtype` may be; `auto` is the dtype that the config names."""

_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
_DTYPE_NAMES = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


@dataclass(frozen=True)
class ModelGeometry:
    """The sizes of one model, with one KV dtype.

    `kv_bytes_per_token` bytes, all layers together. `num_parameters` and
    `num_active_parameters` are estimates, see the module. `weight_bytes` holds all weights,
    `expert_weight_bytes` those of them that belong to routed experts, of which a token uses
    `routed_share` (0 to 1; 0 where the model has no experts). `attention_flops_per_pair`:
    floating-point operations for one query token and one key token in all layers and heads.
    `max_model_len` in tokens, None where the config does not say. `num_layers` counts all
    layers, `num_kv_layers` those that keep keys and values. `remarks`: what the user should
    know about these numbers, a line each.
    """

    name: str
    source: str
    kv_dtype: str
    kv_bytes_per_token: int
    num_layers: int
    num_kv_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    attention_flops_per_pair: int
    num_parameters: int
    num_active_parameters: int
    weight_bytes: int
    expert_weight_bytes: int
    routed_share: float
    max_model_len: int | None
    remarks: tuple[str, ...] = ()


def model_geometry(
    model: str | Path | Mapping[str, Any], *, kv_dtype: str = "auto"
) -> ModelGeometry:
    """The geometry of `model`: a built-in name, the path of a config.json or of the folder that
    holds one, or the config itself as a dictionary.

    Names are matched whatever their case and with or without the organisation before a slash.
    Raises `InvalidInput`, one line, for an unknown name (with the closest ones), a file that
    cannot be read, a field that is missing or wrong (with file and field), and a KV dtype that
    is none of `KV_DTYPES`.

    >>> model_geometry("llama-3-8b").kv_bytes_per_token // 1024
    128
    >>> model_geometry("OPT-13B", kv_dtype="fp8").kv_bytes_per_token // 1024
    400
    """
    dtype = _DTYPE_NAMES.get(kv_dtype.lower(), kv_dtype.lower())
    if dtype not in KV_DTYPES:
        raise InvalidInput(f"unknown KV dtype {kv_dtype!r}: choose from {', '.join(KV_DTYPES)}")
    if isinstance(model, Mapping):
        name = model.get("_name_or_path") or model.get("model_type")
        return _geometry(_Fields.of(model, "config"), str(name or "config"), "config", dtype)
    built_in = built_in_name(str(model))
    if built_in is not None:
        repository, config = BUILT_IN_CONFIGS[built_in]
        fields = _Fields.of(config, f"built-in model {built_in}")
        return _geometry(fields, built_in, f"built in, after {repository}", dtype)
    path = _path(model)
    if str(model) == "" or not path.is_file():
        raise InvalidInput(_missing(str(model)))
    name = path.stem if path.name != "config.json" else path.absolute().parent.name
    return _geometry(_Fields.of(_read(path), str(path)), name, str(path), dtype)


def built_in_name(name: str) -> str | None:
    """The built-in model that `name` means, or None where it means none, as a path does."""
    if name.startswith((".", "/", "~")):
        return None
    short = name.strip().lower().rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-")
    return short if short in BUILT_IN_CONFIGS else None


def config_file(model: str) -> Path | None:
    """The file that `model_geometry` reads for a name or a path, or None where it reads none."""
    path = _path(model)
    return None if built_in_name(model) or not path.is_file() else path


def built_in_models() -> tuple[str, ...]:
    """Names of all built-in models, sorted."""
    return tuple(sorted(BUILT_IN_CONFIGS))


def _path(model: str | Path) -> Path:
    path = Path(model)
    return path / "config.json" if path.is_dir() else path


def _missing(name: str) -> str:
    """Why there is no model of that name: a list of names helps nobody who gave a path."""
    if not name:
        return "the model is empty: name one, or give the path of a config.json"
    if Path(name).is_dir():
        return f"model {name}: the folder has no config.json"
    if name.endswith(".json") or os.path.isabs(name) or name.startswith((".", "~")):
        return f"model {name}: no such file"
    close = difflib.get_close_matches(
        name.lower().rsplit("/", 1)[-1], BUILT_IN_CONFIGS, n=4, cutoff=0.5
    )
    known = (
        f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(BUILT_IN_CONFIGS)}."
    )
    return f"unknown model {name!r}: {known} The path of a config.json works too"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror})") from None
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")  # of some, where a place is to follow
        raise InvalidInput(f"{path}, line {error.lineno}: not JSON ({problem})") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: not a JSON text file") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{path}: a model config is a JSON object, this is none")
    return config


@dataclass(frozen=True)
class _Fields:
    """The fields of one config, read with errors that name file and field.

    Where a model has several parts (text, vision), the fields of the text part hide the outer
    ones; where the part leaves out what its architecture takes for granted, that is filled in.
    """

    values: Mapping[str, Any]
    place: str

    @classmethod
    def of(cls, config: Mapping[str, Any], place: str) -> _Fields:
        values = dict(config)
        for part in ("text_config", "llm_config", "language_config"):
            if isinstance(config.get(part), Mapping):
                values.update(config[part])
                break
        for prefix, assumed in _TAKEN_FOR_GRANTED.items():
            if str(values.get("model_type", "")).startswith(prefix):
                values = {**assumed, **values}
        return cls(values, place)

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", ""))

    def wrong(self, field: str, problem: str) -> InvalidInput:
        return InvalidInput(f"{self.place}, field {field!r}: {problem}")

    def flag(self, field: str, *, default: bool = False) -> bool:
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, f"must be true or false, not {value!r}")
        return value

    def maybe(self, *names: str, least: int = 1) -> int | None:
        """The first of `names` that is there and not null, as a whole number."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.wrong(name, f"must be a whole number, not {value!r}")
            if value < least:
                raise self.wrong(name, f"must be at least {least}, not {value}")
            return value
        return None

    def need(self, *names: str) -> int:
        value = self.maybe(*names)
        if value is None:
            raise self.wrong(names[0], "missing, and the size of the model depends on it")
        return value

    def part(self, field: str) -> _Fields:
        """A nested object, empty where it is missing."""
        value = self.values.get(field)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.wrong(field, f"must be an object, not {value!r}")
        return _Fields(value, self.place)

    def each(self, field: str) -> list[Any] | None:
        value = self.values.get(field)
        if value is None or isinstance(value, list):
            return value
        raise self.wrong(field, f"must be a list, not {value!r}")


_TAKEN_FOR_GRANTED: dict[str, dict[str, Any]] = {
    # Configs of these architectures leave out fields that equal the architecture's defaults.
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "llama4": {"interleave_moe_layer_step": 1, "n_shared_experts": 1},
    "falcon": {"max_position_embeddings": 2048},
}

_TIED = ("opt", "gpt2", "gpt_bigcode", "gemma", "falcon", "bloom", "mpt", "cohere")
_UNGATED = (
    "opt",
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_bigcode",
    "falcon",
    "bloom",
    "mpt",
    "codegen",
    "starcoder2",
    "nemotron",
)
_LEARNED_POSITIONS = ("opt", "gpt2", "gpt_bigcode", "gpt_neo")


# --- What kind each layer is ---------------------------------------------------------------------

_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "conv": "recurrent",
    "recurrent": "recurrent",
    "mlp": "none",
    "moe": "none",
}


def _layer_kinds(fields: _Fields) -> list[str]:
    """full, window, recurrent or none for each layer, by whatever field the family tells it."""
    num_layers = fields.maybe("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    pattern = fields.values.get("hybrid_override_pattern")
    if isinstance(pattern, str):  # Nemotron-H: a letter a layer
        return [{"M": "recurrent", "*": "full"}.get(letter, "none") for letter in pattern]
    for field in ("layer_types", "layers_block_type"):
        named = fields.each(field)
        if named is not None:
            if num_layers is not None and len(named) != num_layers:
                raise fields.wrong(field, f"names {len(named)} layers, the model has {num_layers}")
            for kind in named:
                if kind not in _KINDS:
                    raise fields.wrong(field, f"unknown kind of layer {kind!r}")
            return [_KINDS[kind] for kind in named]
    if num_layers is None:
        num_layers = fields.need("num_hidden_layers")
    layers = range(num_layers)

    listed = fields.each("full_attn_idxs")  # LFM2
    if listed is not None:
        return ["full" if i in listed else "recurrent" for i in layers]
    listed = fields.part("linear_attn_config").each("full_attn_layers")  # Kimi Linear, from 1
    if listed is not None:
        return ["full" if i + 1 in listed else "recurrent" for i in layers]
    period = fields.maybe("attn_layer_period")  # Jamba
    if period is not None:
        offset = fields.maybe("attn_layer_offset", least=0) or 0
        return ["full" if i % period == offset else "recurrent" for i in layers]
    period = fields.maybe("full_attention_interval")
    if period is None and fields.model_type.startswith(("qwen3_next", "qwen3_5")):
        period = 4
    if period is not None:
        return ["full" if (i + 1) % period == 0 else "recurrent" for i in layers]

    if fields.model_type.startswith("llama4") and fields.maybe("attention_chunk_size"):
        rotary = fields.each("no_rope_layers")
        if not rotary:
            period = fields.maybe("no_rope_layer_interval") or 4
            rotary = [(i + 1) % period != 0 for i in layers]
        return ["window" if flag else "full" for flag in rotary]
    if fields.maybe("sliding_window") and fields.flag("use_sliding_window", default=True):
        period = fields.maybe("sliding_window_pattern")
        if period is None:
            for prefix, usual in (("gemma2", 2), ("gemma3", 6), ("cohere2", 4)):
                if fields.model_type.startswith(prefix):
                    period = usual
        if period is not None:
            return ["full" if (i + 1) % period == 0 else "window" for i in layers]
        if not fields.model_type.startswith(("qwen2", "qwen3")):  # there it is off unless asked for
            return ["window"] * num_layers
    return ["full"] * num_layers


# --- Attention: what a token keeps, and the projections ------------------------------------------


@dataclass(frozen=True)
class _Attention:
    """One layer's attention: values kept a token, further bytes, weights, and sizes of a head."""

    kept: int
    kept_bytes: int
    weights: int
    kv_heads: int
    key_dim: int
    value_dim: int


def _attention(fields: _Fields, kind: str) -> _Attention:
    hidden = fields.need("hidden_size", "n_embd", "d_model")
    heads = fields.need("num_attention_heads", "n_head", "n_heads")
    rank = fields.maybe("kv_lora_rank")
    if rank is not None:
        return _latent_attention(fields, hidden, heads, rank)
    kv_heads = _kv_heads(fields, heads)
    head_dim = fields.maybe("head_dim")
    if kind == "full" and fields.model_type.startswith("gemma4"):
        head_dim = fields.maybe("global_head_dim") or head_dim
        kv_heads = fields.maybe("num_global_key_value_heads") or kv_heads
    if head_dim is None:
        if hidden % heads:
            raise fields.wrong(
                "head_dim", f"missing, and hidden_size {hidden} is no multiple of {heads} heads"
            )
        head_dim = hidden // heads
    if heads % kv_heads:
        raise fields.wrong(
            "num_key_value_heads", f"{heads} query heads cannot share {kv_heads} KV heads evenly"
        )
    value_dim = fields.maybe("v_head_dim") or head_dim
    kept = kv_heads * (head_dim + value_dim)
    weights = hidden * (heads * head_dim + kept) + heads * value_dim * hidden
    return _Attention(kept, 0, weights, kv_heads, head_dim, value_dim)


def _kv_heads(fields: _Fields, heads: int) -> int:
    if fields.model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        # Falcon writes num_kv_heads even where it is not used.
        if fields.flag("new_decoder_architecture"):
            return fields.maybe("num_kv_heads") or heads
        return 1 if fields.flag("multi_query", default=True) else heads
    given = fields.maybe("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if given is None:
        given = fields.part("attn_config").maybe("kv_n_heads")  # MPT
    if given is None and fields.flag("multi_query"):  # StarCoder
        given = 1
    return given or heads


def _latent_attention(fields: _Fields, hidden: int, heads: int, rank: int) -> _Attention:
    """All heads share one latent of `rank` values and one rotary key a token (DeepSeek-V2)."""
    rotary = fields.need("qk_rope_head_dim")
    plain = fields.maybe("qk_nope_head_dim", "head_dim") or 128
    value_dim = fields.maybe("v_head_dim") or plain
    queries = heads * (plain + rotary)
    query_rank = fields.maybe("q_lora_rank")
    weights = hidden * queries if query_rank is None else query_rank * (hidden + queries)
    weights += hidden * (rank + rotary) + rank * heads * (plain + value_dim)
    weights += heads * value_dim * hidden
    indexed = fields.maybe("index_head_dim") or 0
    # The sparse indexer keeps an fp8 key, and a float32 scale for each 128 of its values.
    kept_bytes = indexed + 4 * math.ceil(indexed / 128)
    return _Attention(rank + rotary, kept_bytes, weights, 1, plain + rotary, value_dim)


# --- Feed-forward layers -------------------------------------------------------------------------


@dataclass(frozen=True)
class _FeedForward:
    """Weights of one layer: those that every token uses, all routed experts, and the share of
    the routed ones that one token uses."""

    always: int
    routed: int
    routed_share: float


def _feed_forward(fields: _Fields, layer: int) -> _FeedForward:
    hidden = fields.need("hidden_size", "n_embd", "d_model")
    matrices = 2 if _is_any(fields, _UNGATED) or fields.model_type == "phi" else 3
    width = fields.maybe("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner")
    if width is None:
        width = fields.maybe("ffn_hidden_size") or (fields.maybe("expansion_ratio") or 4) * hidden
    experts = _num_experts(fields)
    if experts is None or not _has_experts(fields, layer):
        return _FeedForward(matrices * hidden * width, 0, 0.0)
    chosen = fields.need("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_top_k")
    if chosen > experts:
        raise fields.wrong("num_experts_per_tok", f"{chosen} of {experts} experts cannot be chosen")
    expert_width = fields.need("moe_intermediate_size", "intermediate_size")
    shared_width = fields.maybe("shared_expert_intermediate_size", least=0)
    if shared_width is None:
        shared = fields.maybe("n_shared_experts", "num_shared_experts", least=0) or 0
        shared_width = shared * expert_width
    return _FeedForward(
        always=hidden * (experts + matrices * shared_width),
        routed=experts * matrices * hidden * expert_width,
        routed_share=chosen / experts,
    )


def _num_experts(fields: _Fields) -> int | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count = fields.maybe(*names, least=0)
    return count if count is not None and count > 1 else None


def _has_experts(fields: _Fields, layer: int) -> bool:
    if layer < (fields.maybe("first_k_dense_replace", least=0) or 0):
        return False
    if layer in (fields.each("mlp_only_layers") or []):
        return False
    step = fields.maybe("decoder_sparse_step", "interleave_moe_layer_step") or 1
    return (layer + 1) % step == 0


def _is_any(fields: _Fields, prefixes: tuple[str, ...]) -> bool:
    return fields.model_type.startswith(prefixes)


# --- Bytes a weight ------------------------------------------------------------------------------


def _weight_bits(fields: _Fields, plain_bits: float) -> tuple[float, float, str | None]:
    """Bits of a layer's weight, bits of an expert's weight, and a remark, by quantisation."""
    quantised = fields.part("quantization_config")
    method = quantised.values.get("quant_method")
    if method is None:
        return plain_bits, plain_bits, None
    if method == "fp8":
        return 8, 8, None
    if method == "mxfp4":  # 4 bits, a shared 8-bit exponent for each 32; experts only
        return plain_bits, 4.25, None
    bits = quantised.maybe("bits", "w_bit")
    if bits is None and quantised.flag("load_in_4bit"):
        bits = 4
    if bits is None and quantised.flag("load_in_8bit"):
        bits = 8
    if bits is not None:
        return bits, bits, None
    return plain_bits, plain_bits, f"weights counted as unquantised: {method!r} is not known here"


def _dtype(fields: _Fields) -> str | None:
    for field in ("torch_dtype", "dtype"):
        value = fields.values.get(field)
        if value is None:
            continue
        short = str(value).removeprefix("torch.")
        short = _DTYPE_NAMES.get(short, short)
        if short not in _DTYPE_BYTES:
            raise fields.wrong(field, f"unknown dtype {value!r}")
        return short
    return None


# --- All together --------------------------------------------------------------------------------


_SIZES = ("hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers")
"""Fields of which every config of a model has one."""


def _geometry(fields: _Fields, name: str, source: str, kv_dtype: str) -> ModelGeometry:
    if not any(size in fields.values for size in (*_SIZES, "num_layers", "num_attention_heads")):
        raise InvalidInput(
            f"{fields.place} is no model's config: it has neither hidden_size nor "
            "num_hidden_layers nor what others call them; give a Hugging Face config.json"
        )
    config_dtype = _dtype(fields)
    if kv_dtype == "auto":
        if config_dtype is None:
            raise fields.wrong("torch_dtype", "missing: say which KV dtype, for example fp16")
        kv_dtype = config_dtype
    kinds = _layer_kinds(fields)
    hidden = fields.need("hidden_size", "n_embd", "d_model")
    heads = fields.need("num_attention_heads", "n_head", "n_heads")
    plain_bits = 8.0 * _DTYPE_BYTES[config_dtype or "fp16"]
    layer_bits, expert_bits, remark = _weight_bits(fields, plain_bits)
    remarks = [] if remark is None else [remark]

    shares_from = len(kinds) - (fields.maybe("num_kv_shared_layers", least=0) or 0)
    mixers_only = isinstance(fields.values.get("hybrid_override_pattern"), str)
    kept = kept_bytes = kv_layers = flops_per_pair = 0
    layer_weights = routed = 0
    routed_active = 0.0
    routed_share = 0.0
    full: _Attention | None = None
    for layer, kind in enumerate(kinds):
        if kind in ("full", "window"):
            attention = _attention(fields, kind)
            if full is None or kind == "full":
                full = attention
            flops_per_pair += 2 * heads * (attention.key_dim + attention.value_dim)
            layer_weights += attention.weights
            if layer < shares_from:
                kv_layers += 1
                kept += attention.kept
                kept_bytes += attention.kept_bytes
        elif kind == "recurrent":
            layer_weights += 4 * hidden * hidden
        if kind == "none" or not mixers_only:
            forward = _feed_forward(fields, layer)
            layer_weights += forward.always
            routed += forward.routed
            routed_active += forward.routed * forward.routed_share
            routed_share = max(routed_share, forward.routed_share)
    if full is None:
        raise fields.wrong("num_hidden_layers", "no layer attends: there is no KV cache to size")
    if "window" in kinds:
        count = kinds.count("window")
        remarks.append(
            f"{count} of {len(kinds)} layers attend within a window only; memory and time are "
            "counted as if they kept every token"
        )

    vocabulary = fields.need("vocab_size")
    embedding = vocabulary * hidden
    tied = fields.flag("tie_word_embeddings", default=_is_any(fields, _TIED))
    max_model_len = fields.maybe(
        "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"
    )
    embeddings = embedding if tied else 2 * embedding
    if fields.model_type in _LEARNED_POSITIONS:
        embeddings += (max_model_len or 0) * hidden
    expert_weight_bytes = math.ceil(routed * expert_bits / 8)
    return ModelGeometry(
        name=name,
        source=source,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=kept * _DTYPE_BYTES[kv_dtype] + kept_bytes,
        num_layers=len(kinds),
        num_kv_layers=kv_layers,
        num_query_heads=heads,
        num_kv_heads=full.kv_heads,
        head_dim=full.key_dim,
        attention_flops_per_pair=flops_per_pair,
        num_parameters=embeddings + layer_weights + routed,
        num_active_parameters=embedding + layer_weights + round(routed_active),
        weight_bytes=math.ceil((embeddings * plain_bits + layer_weights * layer_bits) / 8)
        + expert_weight_bytes,
        expert_weight_bytes=expert_weight_bytes,
        routed_share=routed_share,
        max_model_len=max_model_len,
        remarks=tuple(remarks),
    )
