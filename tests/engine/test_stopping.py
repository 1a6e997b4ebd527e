"""When a sequence ends, with what text, and what a stream may show before."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.sampling_model import stopped_text
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.stopping import Finish, OutputText, Progress, output_limit

EOS = 1000


class Characters:
    """A detokenizer whose token ids are pieces of text, one character late if asked."""

    def __init__(self, pieces: list[str], *, late: bool = False) -> None:
        self.pieces = pieces
        self.late = late
        self.kept = ""

    def append(self, token_id: int) -> str:
        text = self.kept + (self.pieces[token_id] if token_id != EOS else "</s>")
        self.kept = text[-1:] if self.late else ""
        return text[: len(text) - len(self.kept)]

    def flush(self) -> str:
        kept, self.kept = self.kept, ""
        return kept


def run(
    pieces: list[str], *, late: bool = False, eos: bool = False, limit: int = 10**6, **options: Any
) -> tuple[list[str], Finish | None]:
    """The pieces shown, and why the sequence ended, if it did."""
    params = SamplingParams(max_tokens=None, **options)
    output = OutputText(params, Characters(pieces, late=late), eos_token_ids=[EOS], limit=limit)
    shown = []
    for token_id in [*range(len(pieces)), *([EOS] if eos else [])]:
        progress = output.append(token_id)
        shown.append(progress.text)
        if progress.finish is not None:
            break
    assert output.text == "".join(shown)
    assert output.finish == progress.finish
    return shown, progress.finish


def test_the_end_token_ends_a_sequence_and_is_no_text() -> None:
    assert run(["a", "b"], eos=True) == (["a", "b", ""], Finish("stop"))


def test_the_end_token_is_ignored_on_request() -> None:
    assert run(["a"], eos=True, ignore_eos=True) == (["a", "</s>"], None)


def test_a_stop_token_ends_a_sequence_and_is_named() -> None:
    assert run(["a", "b", "c"], stop_token_ids=[1]) == (["a", ""], Finish("stop", 1))


def test_the_text_of_a_stop_token_is_kept_on_request() -> None:
    found = run(["a", "b"], stop_token_ids=[1], include_stop_str_in_output=True)
    assert found == (["a", "b"], Finish("stop", 1))


def test_a_stop_token_that_is_the_end_token_too_is_named_also_where_eos_is_ignored() -> None:
    found = run(["a"], eos=True, stop_token_ids=[EOS], ignore_eos=True)
    assert found == (["a", ""], Finish("stop", EOS))


def test_an_end_token_that_is_a_stop_token_too_is_named() -> None:
    assert run(["a"], eos=True, stop_token_ids=[EOS]) == (["a", ""], Finish("stop", EOS))


def test_the_limit_ends_a_sequence_with_its_last_token() -> None:
    assert run(["a", "b", "c"], limit=2) == (["a", "b"], Finish("length"))


def test_an_end_token_at_the_limit_is_a_stop() -> None:
    assert run(["a"], eos=True, limit=2) == (["a", ""], Finish("stop"))


def test_a_stop_string_at_the_limit_is_a_stop() -> None:
    assert run(["a", "b"], limit=2, stop="b") == (["a", ""], Finish("stop", "b"))


def test_a_stop_string_across_two_tokens_is_held_back_and_cut() -> None:
    shown, finish = run(["Hello", "\n", "\nUser:", " hi"], stop="\n\n")
    assert (shown, finish) == (["Hello", "", ""], Finish("stop", "\n\n"))


def test_text_before_and_behind_a_stop_string_in_one_token() -> None:
    assert run(["one STOP two"], stop=["STOP"]) == (["one "], Finish("stop", "STOP"))


def test_what_turns_out_to_be_no_stop_string_is_shown_at_once() -> None:
    shown, finish = run(["a", "ST", "O", "ne", "ST"], stop="STOP", eos=True)
    assert (shown, finish) == (["a", "", "", "STOne", "", "ST"], Finish("stop"))


def test_no_more_is_held_back_than_could_become_a_stop_string() -> None:
    assert run(["xaab", "aa", "c"], stop="aabaac")[0] == ["x", "", ""]
    assert run(["xaab", "aab"], stop="aabaac")[0] == ["x", "aab"]


def test_the_stop_string_is_kept_on_request() -> None:
    found = run(["one ST", "OP two"], stop="STOP", include_stop_str_in_output=True)
    assert found == (["one ", "STOP"], Finish("stop", "STOP"))


def test_the_first_stop_string_to_be_complete_counts_then_the_longest() -> None:
    assert run(["xabc"], stop=["abc", "b"])[1] == Finish("stop", "b")
    assert run(["xabc"], stop=["bc", "abc", "c"]) == (["x"], Finish("stop", "abc"))


def test_before_min_tokens_nothing_stops_a_sequence() -> None:
    found = run(["a", "STOP", "b", "c"], min_tokens=3, stop="STOP", stop_token_ids=[0, 3])
    assert found == (["a", "STOP", "b", ""], Finish("stop", 3))


def test_a_stop_string_may_begin_before_min_tokens_and_end_behind() -> None:
    assert run(["a", "ST", "OP"], min_tokens=2, stop="STOP") == (
        ["a", "", ""],
        Finish("stop", "STOP"),
    )


def test_text_that_the_detokenizer_has_kept_comes_at_the_end() -> None:
    assert run(["ab", "cd"], late=True, limit=2) == (["a", "bcd"], Finish("length"))
    assert run(["ab", "cd"], late=True, eos=True) == (["a", "bc", "d"], Finish("stop"))


def test_a_stop_string_that_is_complete_only_at_the_end_counts() -> None:
    assert run(["ab", "cd"], late=True, limit=2, stop="d") == (["a", "bc"], Finish("stop", "d"))


def test_a_cancelled_sequence_gives_what_it_has() -> None:
    output = OutputText(SamplingParams(stop="cde"), Characters(["ab", "c"]), limit=9)
    assert [output.append(0).text, output.append(1).text] == ["ab", ""]
    assert output.abort() == Progress("c", Finish("abort"))
    assert output.text == "abc"


def test_a_cancelled_sequence_gives_what_its_detokenizer_has_kept() -> None:
    output = OutputText(SamplingParams(), Characters(["ab", "cd"], late=True), limit=9)
    assert [output.append(0).text, output.append(1).text] == ["a", "bc"]
    assert output.abort() == Progress("d", Finish("abort"))


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(1, Progress("", Finish("stop", "d"))), (2, Progress("d", Finish("abort")))],
)
def test_a_stop_string_counts_in_what_is_left_when_cancelled_unless_min_tokens_are_not_reached(
    min_tokens: int, expected: Progress
) -> None:
    params = SamplingParams(stop="d", min_tokens=min_tokens)
    output = OutputText(params, Characters(["ab", "cd"], late=True), limit=9)
    output.append(0)
    output.append(1)
    assert output.abort() == expected


def test_a_stop_string_that_may_not_count_yet_may_begin_the_next() -> None:
    found = run(["xaa", "a", "b"], min_tokens=1, stop="aa")
    assert found == (["xa", ""], Finish("stop", "aa"))


@given(
    text=st.text("ab", max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    late=st.booleans(),
    keeps=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_the_text_does_not_depend_on_how_it_is_cut_into_tokens(
    text: str, cuts: list[int], stops: list[str], late: bool, keeps: bool, min_tokens: int
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    shown, finish = run(
        pieces,
        late=late,
        limit=len(pieces),
        stop=stops,
        include_stop_str_in_output=keeps,
        min_tokens=min_tokens,
    )
    barred = places[min(min_tokens, len(pieces))]
    if late and min_tokens < len(pieces):  # its last character comes with the next token
        barred = max(barred - 1, 0)
    elif late and min_tokens >= len(pieces):
        barred = len(text)
    expected, stop = stopped_text(text, stops, searched_from=barred)
    assert "".join(shown) == expected + (stop if stop and keeps else "")
    assert finish == (Finish("stop", stop) if stop else Finish("length"))


@given(
    text=st.text("ab", max_size=20),
    stop=st.text("ab", min_size=1, max_size=5),
)
def test_what_is_shown_is_all_that_is_safe_to_show(text: str, stop: str) -> None:
    """After each character: everything but the longest end that is a beginning of the stop."""
    output = OutputText(SamplingParams(stop=stop), Characters(list(text)), limit=10**6)
    for place in range(len(text)):
        if output.append(place).finish is not None:
            return
        so_far = text[: place + 1]
        held = max(k for k in range(len(stop)) if so_far.endswith(stop[:k]))
        assert output.text == so_far[: len(so_far) - held]


@pytest.mark.parametrize(
    "max_tokens, prompt_tokens, limit", [(16, 10, 16), (16, 90, 10), (None, 40, 60), (16, 100, 0)]
)
def test_the_limit_is_max_tokens_or_what_the_model_has_room_for(
    max_tokens: int | None, prompt_tokens: int, limit: int
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    assert output_limit(params.max_tokens, prompt_tokens=prompt_tokens, max_model_len=100) == limit
