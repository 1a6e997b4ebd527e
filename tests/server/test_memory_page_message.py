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


def test_a_sample_is_made_of_what_changed_since_the_last_one() -> None:
    history = History()
    history.note(10.0, counters(100, 50, 10))
    assert history.samples(10.0).shape == (0, 6)
    history.note(12.0, counters(300, 150, 85, used=4, held=12))
    assert history.samples(12.0).tolist() == [[0.0, 100.0, 0.75, 0.5, 0.25, 0.75]]
    history.note(13.0, counters(350, 150, 85))
    assert history.samples(13.5)[:, :3].tolist() == [[1.5, 100.0, 0.75], [0.5, 50.0, -1.0]]


def test_a_sample_is_due_at_once_and_then_a_second_after_the_last_one() -> None:
    history = History()
    assert history.due_s < 0
    history.note(10.0, counters(0))
    assert history.due_s == 11.0
    history.note(12.5, counters(0))
    assert history.due_s == 13.5


def test_who_was_told_of_samples_is_told_of_those_that_came_after() -> None:
    history = History()
    for second in range(5):
        history.note(float(second), counters(second))
    assert history.samples(3.5, after_s=1.0)[:, 0].tolist() == [1.5, 0.5]
    assert history.samples(4.0, after_s=3.5)[:, 0].tolist() == [0.0]
    assert history.samples(4.5, after_s=4.0).shape == (0, 6)


def test_ages_are_right_after_years() -> None:
    history = History()
    for second in range(3):
        history.note(100_000_000.25 + second, counters(0))
    assert history.samples(100_000_003.0)[:, 0].tolist() == [1.75, 0.75]


def test_where_nothing_was_asked_or_used_there_is_no_rate() -> None:
    history = History()
    history.note(0.0, counters(0))
    history.note(1.0, counters(0))
    assert history.samples(1.0).tolist() == [[0.0, 0.0, -1.0, 0.0, 0.25, -1.0]]


def test_only_the_last_minutes_are_kept() -> None:
    history = History()
    assert history.samples(0.0).shape == (0, 6)
    for second in range(60 * MINUTES + 50):
        history.note(float(second), counters(second))
    assert history.samples(400.0).shape == (60 * MINUTES, 6)
    assert history.samples(400.0)[0, 0] == 350.0
