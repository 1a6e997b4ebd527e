"""What goes over the wire, and the samples of the last minutes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="needs the extra [server]")

from models.memory_messages import read_messages
from pagedkv.server.memory_page.history import MINUTES, History
from pagedkv.server.memory_page.message import message


@given(
    st.text(max_size=9),
    st.integers(0, 5),
    st.integers(0, 4),
    st.lists(st.integers(1, 9), max_size=9),
)
def test_a_message_is_read_as_it_was_written_however_it_is_cut(
    text: str, n: int, m: int, cuts: list[int]
) -> None:
    arrays = {
        "keys": np.arange(n, dtype=np.uint32) + np.uint32(2**32 - 8),
        "rows": -np.arange(n * m, dtype=np.int32).reshape(n, m).T,
        "samples": np.full((m, 2), 0.5, dtype=np.float32),
    }
    whole = message({"text": text}, arrays) * 2
    places = np.cumsum([0, *cuts])
    pieces = [whole[a:b] for a, b in zip(places, [*places[1:], len(whole)])]
    read = list(read_messages(pieces))
    assert len(read) == 2
    for facts, found in read:
        assert facts == {"text": text} and list(found) == list(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def statistics(tokens: int, queries: int = 0, hits: int = 0, used: int = 0, held: int = 0) -> Any:
    memory = SimpleNamespace(
        query_tokens=queries,
        hit_tokens=hits,
        used_blocks=used,
        cached_blocks=2,
        held_tokens=held,
        num_blocks=8,
        block_size=4,
    )
    return SimpleNamespace(memory=memory, output_tokens=tokens)


def test_a_sample_is_made_of_what_changed_in_a_second() -> None:
    history = History()
    history.note(10.0, statistics(100, 50, 10))
    history.note(10.9, statistics(150, 50, 10))
    assert history.num_samples == 0 and not history.is_due(10.9)
    history.note(12.0, statistics(300, 150, 85, used=4, held=12))
    assert history.since(0, 0.0).tolist() == [[12.0, 100.0, 0.75, 0.5, 0.25, 0.75]]


def test_the_next_sample_is_of_what_changed_since_the_last_one() -> None:
    history = History()
    for now_s, tokens, queries, hits in (
        (0, 0, 0, 0),
        (1, 100, 0, 0),
        (1.5, 120, 0, 0),
        (2, 150, 10, 5),
    ):
        history.note(now_s, statistics(tokens, queries, hits))
    assert history.since(0, 0.0)[:, :3].tolist() == [[1.0, 100.0, -1.0], [2.0, 50.0, 0.5]]
    assert history.since(1, 0.0)[:, :3].tolist() == [[2.0, 50.0, 0.5]]
    assert len(history.since(2, 0.0)) == 0


def test_times_are_told_from_when_the_page_was_opened() -> None:
    history = History()
    for second in range(4):
        history.note(5_000_000.25 + second, statistics(0))
    assert history.since(0, 5_000_002.0)[:, 0].tolist() == [-0.75, 0.25, 1.25]


def test_where_nothing_was_asked_or_used_there_is_no_rate() -> None:
    history = History()
    history.note(0.0, statistics(0))
    history.note(1.0, statistics(0))
    assert history.since(0, 0.0).tolist() == [[1.0, 0.0, -1.0, 0.0, 0.25, -1.0]]


def test_only_the_last_minutes_are_kept() -> None:
    history = History()
    assert history.since(0, 0.0).shape == (0, 6)
    for second in range(60 * MINUTES + 50):
        history.note(float(second), statistics(second))
    kept = history.since(0, 0.0)
    assert kept.shape == (60 * MINUTES, 6) and kept[0, 0] == 50.0
    assert len(history.since(history.num_samples - 2, 0.0)) == 2
