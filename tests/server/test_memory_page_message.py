"""What goes over the wire, and the samples of the last minutes."""

from __future__ import annotations

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


def counters(
    tokens: int, queries: int = 0, hits: int = 0, used: int = 0, held: int = 0
) -> dict[str, int]:
    return {
        "output_tokens": tokens,
        "query_tokens": queries,
        "hit_tokens": hits,
        "used_blocks": used,
        "cached_blocks": 2,
        "held_tokens": held,
        "num_blocks": 8,
        "block_size": 4,
    }


def test_a_sample_is_made_of_what_changed_in_a_second() -> None:
    history = History()
    assert not history.note(10.0, counters(100, 50, 10))
    assert not history.note(10.9, counters(150, 50, 10))
    assert history.note(12.0, counters(300, 150, 85, used=4, held=12))
    assert history.newest.tolist() == [[12.0, 100.0, 0.75, 0.5, 0.25, 0.75]]


def test_the_next_sample_is_of_what_changed_since_the_last_one() -> None:
    history = History()
    history.note(0.0, counters(0))
    assert history.note(1.0, counters(100))
    assert not history.note(1.5, counters(120))
    assert history.note(2.0, counters(150, 10, 5))
    assert history.all[:, :3].tolist() == [[1.0, 100.0, -1.0], [2.0, 50.0, 0.5]]


def test_where_nothing_was_asked_or_used_there_is_no_rate() -> None:
    history = History()
    history.note(0.0, counters(0))
    history.note(1.0, counters(0))
    assert history.newest.tolist() == [[1.0, 0.0, -1.0, 0.0, 0.25, -1.0]]


def test_only_the_last_minutes_are_kept() -> None:
    history = History()
    assert history.all.shape == (0, 6) and history.newest.shape == (0, 6)
    for second in range(60 * MINUTES + 50):
        history.note(float(second), counters(second))
    assert history.all.shape == (60 * MINUTES, 6)
    assert history.all[0, 0] == 50.0
