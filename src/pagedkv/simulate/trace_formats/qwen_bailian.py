"""Qwen-Bailian traces (Wang et al., KVCache in the Wild, ATC 2025): seconds, one id for each 16
prompt tokens, and chats that name the chat they continue."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TraceError
from pagedkv.simulate.trace_formats.fields import Container, Field, Kind, Table, TraceFormat


def _sessions(table: Table, file: str) -> NDArray[np.int64]:
    """The first chat of each request's chain of parents, found by doubling the steps taken.

    A parent that is not in the file, since traces are cut at both ends, still joins its children.
    """
    chat, parent = table.columns["chat_id"], table.columns["parent_chat_id"]
    if np.any(chat < 0):
        line = int(table.line[np.argmax(chat < 0)])
        raise TraceError("is empty", file=file, line=line, field="chat_id")
    root = np.arange(len(table.labels), dtype=np.int64)
    has_parent = (parent >= 0) & (parent != table.labels.get("-1", -1))
    # In reverse, so that of several lines with one chat id the first that names a parent decides.
    root[chat[has_parent][::-1]] = parent[has_parent][::-1]
    step = root.copy()
    for _ in range(len(root).bit_length()):
        step = step[step]
    circular = has_parent & (root[step[chat]] != step[chat])
    circular |= has_parent & (parent == chat)
    if np.any(circular):
        line = int(table.line[np.argmax(circular)])
        problem = "the chain of parents goes in a circle"
        raise TraceError(problem, file=file, line=line, field="parent_chat_id")
    sessions: NDArray[np.int64] = step[chat]
    return sessions


QWEN_BAILIAN = TraceFormat(
    name="qwen-bailian",
    container=Container.JSONL,
    fields=(
        Field("chat_id", Kind.LABEL),
        Field("parent_chat_id", Kind.LABEL),  # -1 for the first request of a conversation
        Field("timestamp", Kind.NUMBER),
        Field("input_length", Kind.COUNT),
        Field("output_length", Kind.COUNT),
        Field("hash_ids", Kind.IDS),
    ),
    arrival="timestamp",
    prompt="input_length",
    output="output_length",
    prefix_ids="hash_ids",
    granularity=16,
    sessions=_sessions,
)
