"""Small JSON schemas, drawn, and what is a value of one, said in the obvious way."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-30, 5), st.integers(0, 400)).map(
        lambda r: {"type": "integer", "minimum": r[0], "maximum": r[0] + r[1]}
    ),
    st.integers(0, 5).map(lambda n: {"type": "string", "maxLength": n}),
    st.lists(st.sampled_from(["a", "abc", 'q"', "é", 7, None, True]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(["a", "b", "key"]), inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties) or [""])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & set(properties)),
                "additionalProperties": False,
            }
        )
    )


def _lists(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(inner, st.integers(0, 1), st.integers(1, 2)).map(
        lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[2]}
    )


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _lists(inner),
        st.lists(inner, min_size=2, max_size=2).map(lambda found: {"anyOf": found}),
    ),
    max_leaves=4,
)
"""Schemas whose values are short, however they are chosen."""


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether `value` is one of `schema`, which is one of `SCHEMAS`."""
    if "enum" in schema:
        return any(type(value) is type(own) and value == own for own in schema["enum"])
    if "anyOf" in schema:
        return any(is_valid(value, one) for one in schema["anyOf"])
    kind = schema["type"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "null":
        return value is None
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "array":
        is_long = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_long and all(is_valid(one, schema["items"]) for one in value)
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(schema["properties"])
        and all(is_valid(value[name], schema["properties"][name]) for name in value)
    )
