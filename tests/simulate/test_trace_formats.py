"""Each format is told by its content and read to the same columns, whatever wraps it."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from models.trace_checks import check_trace
from pagedkv.errors import TraceError
from pagedkv.simulate.trace import Trace
from pagedkv.simulate.trace_formats import FORMATS, detection, read_trace, write_trace

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"

AZURE_2023 = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,27
"""
AZURE_2024 = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
2024-05-10 02:00:01.109930+02:00,76,15
2024-05-09 22:30:01.209930-01:30,76,15
"""
MOONCAKE = b"""{"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}
{"timestamp": 30000, "input_length": 512, "output_length": 4, "hash_ids": [7]}
{"timestamp": 30500, "input_length": 1025, "output_length": 3, "hash_ids": [7, 9, 2]}
"""
QWEN_BAILIAN = b"""{"chat_id": 55, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 17, \
"output_length": 9, "type": "text", "turn": 1, "hash_ids": [1089, 1090]}
{"chat_id": 60, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 16, \
"output_length": 9, "type": "image", "turn": 1, "hash_ids": [8]}
{"chat_id": 159, "parent_chat_id": 55, "timestamp": 62.0, "input_length": 33, \
"output_length": 2, "type": "text", "turn": 2, "hash_ids": [1089, 1091, 1092]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 63.0, "input_length": 1, \
"output_length": 2, "type": "text", "turn": 3, "hash_ids": [5]}
"""
BURSTGPT = b"""Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,\
Total tokens,Log Type
5,s1,3.2,ChatGPT,472,18,490,Conversation log
45,,1.5,GPT-4,1087,230,1317,API log
118,s1,0.4,GPT-4,417,0,417,Conversation log
119.5,s1,0.4,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_WITHOUT_SESSIONS = b"""Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
"""
VIDUR = b"""arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
5.8926549999999995,91,16
"""
PLAIN = b"""{"arrival_s": 0.5, "prompt_tokens": 33, "output_tokens": 4, "session": "anna", \
"prefix_granularity": 32, "prefix_ids": ["0xAB", "c0ffee"]}
{"arrival_s": 0.75, "prompt_tokens": 32, "output_tokens": 40, "prefix_granularity": 32, \
"prefix_ids": ["ab"]}
"""
SAMPLES = {
    "azure": AZURE_2023,
    "azure 2024": AZURE_2024,
    "mooncake": MOONCAKE,
    "qwen-bailian": QWEN_BAILIAN,
    "burstgpt": BURSTGPT,
    "burstgpt 1.1": BURSTGPT_WITHOUT_SESSIONS,
    "vidur": VIDUR,
    "plain": PLAIN,
}

WRAPPERS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda content: content,
    "gzip": gzip.compress,
    "gzip of two members": lambda content: (
        gzip.compress(content[:50]) + gzip.compress(content[50:])
    ),
    "gzip with padding": lambda content: gzip.compress(content) + b"\0" * 512,
    "zstd": lambda content: zstandard.ZstdCompressor().compress(content),
    "zstd without a size": lambda content: zstandard.ZstdCompressor(
        write_content_size=False, write_checksum=True
    ).compress(content),
    "zstd of two frames after a skippable one": lambda content: (
        b"\x50\x2a\x4d\x18\x03\0\0\0abc"
        + zstandard.compress(content[:50])
        + zstandard.compress(content[50:])
    ),
    "carriage returns": lambda content: content.replace(b"\n", b"\r\n"),
    "no newline at the end": lambda content: content.removesuffix(b"\n"),
    "byte order mark": lambda content: b"\xef\xbb\xbf" + content,
    "blank lines at both ends": lambda content: b"\n" + content + b"\r\n\n  \n",
}


def reading(folder: Path, content: bytes, name: str = "trace") -> Trace:
    place = folder / name
    place.write_bytes(content)
    return read_trace(str(place))


def lists_of(trace: Trace) -> list[list[int]]:
    bounds = zip(trace.prefix_offsets[:-1], trace.prefix_offsets[1:])
    return [trace.prefix_ids[a:b].tolist() for a, b in bounds]


def assert_same(one: Trace, other: Trace) -> None:
    for field in dataclasses.fields(Trace):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), field.name
        elif field.name not in ("name", "format", "remarks"):
            assert a == b, field.name


def test_azure_2023_times_are_read_to_the_last_digit(tmp_path: Path) -> None:
    trace = reading(tmp_path, AZURE_2023)
    assert trace.format == "azure"
    assert trace.arrival_s.tolist() == [0.0, 0.052, 2.0]
    assert trace.prompt_tokens.tolist() == [4808, 3180, 110]
    assert trace.output_tokens.tolist() == [10, 8, 27]
    assert trace.session.tolist() == [-1, -1, -1]
    assert not trace.has_prefix_ids and len(trace.prefix_ids) == 0


def test_azure_2024_times_have_a_zone_and_maybe_no_fraction(tmp_path: Path) -> None:
    assert reading(tmp_path, AZURE_2024).arrival_s.tolist() == [0.0, 0.99007, 1.1, 1.2]


def test_mooncake_has_milliseconds_and_an_id_for_each_512_tokens(tmp_path: Path) -> None:
    trace = reading(tmp_path, MOONCAKE)
    assert trace.format == "mooncake" and trace.granularity == 512
    assert trace.arrival_s.tolist() == [0.0, 3.0, 3.5]
    assert lists_of(trace) == [[0, 1], [0], [0, 1, 2]]


def test_mooncake_fields_without_ids_give_a_trace_without_prefixes(tmp_path: Path) -> None:
    trace = reading(tmp_path, b'{"timestamp": 3, "input_length": 600, "output_length": 5}')
    assert trace.format == "mooncake" and not trace.has_prefix_ids
    assert trace.prefix_offsets.tolist() == [0, 0]


def test_qwen_bailian_chats_that_continue_each_other_are_one_session(tmp_path: Path) -> None:
    trace = reading(tmp_path, QWEN_BAILIAN)
    assert trace.format == "qwen-bailian" and trace.granularity == 16
    assert trace.arrival_s.tolist() == [0.0, 0.25, 0.75, 1.75]
    first, second, third, fourth = trace.session.tolist()
    assert first == third == fourth != second
    assert lists_of(trace) == [[0, 1], [2], [0, 3, 4], [5]]


def qwen_line(chat: object, parent: object) -> bytes:
    line = {"chat_id": chat, "parent_chat_id": parent, "timestamp": 1, "input_length": 1}
    return json.dumps(line | {"output_length": 1, "hash_ids": [1]}).encode() + b"\n"


def test_a_parent_that_is_not_in_the_file_still_joins_its_children(tmp_path: Path) -> None:
    lines = [qwen_line(5, 1), qwen_line(6, 1), qwen_line(7, None), qwen_line(8, 6)]
    a, b, c, d = reading(tmp_path, b"".join(lines)).session.tolist()
    assert a == b == d != c


def test_a_child_may_stand_before_its_parent_and_a_chain_may_be_long(tmp_path: Path) -> None:
    lines = [qwen_line(i, i - 1 if i else -1) for i in range(500)]
    trace = reading(tmp_path, b"".join(reversed(lines)) + qwen_line(1000, -1))
    assert len(set(trace.session.tolist()[:-1])) == 1
    assert trace.session[-1] != trace.session[0]


@pytest.mark.parametrize("circle", [[(1, 1)], [(1, 2), (2, 1)], [(1, 2), (2, 3), (3, 1), (4, 1)]])
def test_a_chain_of_parents_that_goes_in_a_circle_is_an_error(
    tmp_path: Path, circle: list[tuple[int, int]]
) -> None:
    with pytest.raises(TraceError, match="circle"):
        reading(tmp_path, b"".join(qwen_line(*pair) for pair in circle))


def test_burstgpt_leaves_out_failed_requests_and_says_so(tmp_path: Path) -> None:
    trace = reading(tmp_path, BURSTGPT)
    assert trace.format == "burstgpt"
    assert trace.arrival_s.tolist() == [0.0, 40.0, 114.5]
    assert trace.session.tolist() == [0, -1, 0]
    assert trace.remarks == ("1 failed request (0 output tokens) left out, first on line 4",)


def test_burstgpt_without_sessions(tmp_path: Path) -> None:
    trace = reading(tmp_path, BURSTGPT_WITHOUT_SESSIONS)
    assert trace.format == "burstgpt"
    assert trace.session.tolist() == [-1, -1] and trace.remarks == ()


def test_vidur(tmp_path: Path) -> None:
    trace = reading(tmp_path, VIDUR)
    assert trace.format == "vidur"
    assert trace.arrival_s.tolist() == [0.0, 4.314579, 5.8926549999999995]


def test_plain_keys_may_be_hexadecimal_and_sessions_names(tmp_path: Path) -> None:
    trace = reading(tmp_path, PLAIN)
    assert trace.format == "plain" and trace.granularity == 32 and not trace.covers_output
    assert trace.arrival_s.tolist() == [0.0, 0.25]
    assert trace.session.tolist() == [0, -1]
    assert lists_of(trace) == [[0, 1], [0]]  # 0xAB and ab are one key


def test_plain_ids_may_go_on_over_the_output(tmp_path: Path) -> None:
    line = b'{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2, "prefix_granularity": 4, '
    trace = reading(
        tmp_path, line + b'"covers_output": true, "prefix_ids": [3, 18446744073709551615]}'
    )
    assert trace.covers_output and lists_of(trace) == [[0, 1]]


def test_the_name_is_the_files(tmp_path: Path) -> None:
    assert reading(tmp_path, VIDUR, "mine.csv").name == "mine.csv"


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_file_reads_the_same_however_it_is_wrapped(
    tmp_path: Path, sample: str, wrapper: str
) -> None:
    expected = reading(tmp_path, SAMPLES[sample])
    check_trace(expected)
    # A name that tells something else must not matter.
    got = reading(tmp_path, WRAPPERS[wrapper](SAMPLES[sample]), "trace.csv.gz")
    assert got.format == expected.format
    assert_same(got, expected)


@pytest.mark.parametrize("wrapper", ["as it is", "gzip", "zstd"])
def test_standard_input(monkeypatch: pytest.MonkeyPatch, wrapper: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(WRAPPERS[wrapper](MOONCAKE)))
    monkeypatch.setattr(sys, "stdin", stream)
    trace = read_trace("-")
    assert len(trace) == 3 and trace.name == "standard input"


def test_extra_fields_and_another_order_do_not_matter(tmp_path: Path) -> None:
    swapped = b'GeneratedTokens,x, TIMESTAMP ,ContextTokens\n10,"a,b", 2023-11-16 18:17:03 , 5\n'
    trace = reading(tmp_path, swapped)
    assert trace.output_tokens.tolist() == [10] and trace.prompt_tokens.tolist() == [5]
    line = b'{"x": {"y": [1, "z"]}, "output_tokens": 1, "arrival_s": 3, "prompt_tokens": 2.0}'
    assert reading(tmp_path, line).prompt_tokens.tolist() == [2]


def test_times_that_go_backwards_are_sorted_and_said(tmp_path: Path) -> None:
    lines = [
        b'{"timestamp": %d, "input_length": %d, "output_length": 1, "hash_ids": [%d]}\n' % row
        for row in [(2000, 10, 1), (1000, 11, 2), (3000, 12, 3), (1000, 13, 4), (2000, 14, 1)]
    ]
    trace = reading(tmp_path, b"\n".join(lines))  # with a blank line between any two
    assert trace.arrival_s.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0]
    assert trace.prompt_tokens.tolist() == [11, 13, 10, 14, 12]
    assert lists_of(trace) == [[0], [1], [2], [2], [3]]
    assert trace.remarks == (
        "times go backwards at 2 places, first on line 3: requests were sorted by arrival",
    )


def test_requests_that_come_at_the_same_time_stay_in_the_order_of_the_file(tmp_path: Path) -> None:
    lines = [f"{-(i // 50)},{i + 1},1" for i in range(200)]
    trace = reading(
        tmp_path, "\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *lines]).encode()
    )
    expected = [start + i + 1 for start in (150, 100, 50, 0) for i in range(50)]
    assert trace.prompt_tokens.tolist() == expected


def test_the_ids_of_a_failed_request_go_with_it(tmp_path: Path) -> None:
    trace = reading(
        tmp_path,
        b"".join(
            b'{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}\n' % row
            for row in [(1, 5, 1, b"[7]"), (2, 1500, 0, b"[7, 8, 9]"), (3, 600, 1, b"[7, 6]")]
        ),
    )
    assert lists_of(trace) == [[0], [0, 1]]


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_order_in_which_formats_are_tried_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: str
) -> None:
    expected = reading(tmp_path, SAMPLES[sample]).format
    monkeypatch.setattr(detection, "FORMATS", FORMATS[::-1])
    assert reading(tmp_path, SAMPLES[sample]).format == expected


REAL = {
    "azure_code.csv": ("azure", 8_819, 0, 0),
    "azure_conv.csv": ("azure", 19_366, 0, 0),
    "mooncake_conversation.jsonl": ("mooncake", 12_031, 288_500, 182_790),
    "mooncake_synthetic.jsonl": ("mooncake", 3_993, 121_877, 43_924),
}


@pytest.mark.parametrize("file", REAL)
def test_the_real_traces_have_the_requests_and_ids_that_they_are_known_to_have(file: str) -> None:
    if not (TRACES / file).exists():
        pytest.skip(f"needs the real trace {file}")
    trace = read_trace(str(TRACES / file))
    name, requests, ids, distinct = REAL[file]
    assert trace.format == name and len(trace) == requests and trace.remarks == ()
    assert len(trace.prefix_ids) == ids and len(np.unique(trace.prefix_ids)) == distinct


def test_ids_of_a_real_trace_keep_their_numbers_where_they_appear_in_order() -> None:
    file = TRACES / "mooncake_conversation.jsonl"
    if not file.exists():
        pytest.skip(f"needs the real trace {file.name}")
    trace = read_trace(str(file))
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert lists_of(trace) == [row["hash_ids"] for row in rows]
    assert trace.prompt_tokens.tolist() == [row["input_length"] for row in rows]
    assert trace.arrival_s.tolist() == [row["timestamp"] / 1000 for row in rows]


# Writing.


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(1, 12))
    counts = st.lists(st.integers(1, 200), min_size=n, max_size=n)
    gaps = draw(st.lists(st.floats(0, 1e6), min_size=n - 1, max_size=n - 1))
    prompt, output = np.array(draw(counts)), np.array(draw(counts))
    granularity = draw(st.sampled_from([0, 1, 7, 16, 1000]))
    covers_output = granularity > 0 and draw(st.booleans())
    offsets = np.zeros(n + 1, np.int64)
    if granularity:
        covered = prompt + output if covers_output else prompt
        offsets[1:] = np.cumsum(-(-covered // granularity))
    sessions = draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n))
    ids = np.random.Generator(np.random.PCG64(n)).integers(0, 5, offsets[-1])
    return Trace(
        name="drawn",
        format="drawn",
        arrival_s=np.concatenate([[0.0], np.cumsum(gaps)]),
        prompt_tokens=prompt,
        output_tokens=output,
        session=renumbered(np.array(sessions)),
        prefix_ids=renumbered(ids),
        prefix_offsets=offsets,
        granularity=granularity,
        covers_output=covers_output,
    )


def renumbered(values: np.ndarray) -> np.ndarray:
    numbers: dict[int, int] = {}
    return np.array(
        [-1 if v < 0 else numbers.setdefault(v, len(numbers)) for v in values.tolist()], np.int64
    )


@pytest.mark.parametrize("suffix", ["", ".jsonl", ".gz", ".zst"])
@settings(max_examples=30, deadline=None)
@given(trace=traces())
def test_what_was_written_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, trace: Trace
) -> None:
    place = tmp_path_factory.getbasetemp() / f"written{suffix}"
    write_trace(trace, str(place))
    back = read_trace(str(place))
    check_trace(back)
    assert_same(back, trace)


def test_a_written_file_is_compressed_as_its_name_says_and_the_same_each_time(
    tmp_path: Path,
) -> None:
    trace = reading(tmp_path, PLAIN)
    for suffix, magic in ((".jsonl", b'{"'), (".gz", b"\x1f\x8b"), (".zst", b"\x28\xb5\x2f\xfd")):
        first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
        write_trace(trace, str(first))
        write_trace(trace, str(second))
        assert first.read_bytes().startswith(magic)
        assert first.read_bytes() == second.read_bytes()
    assert (tmp_path / "a.gz").read_bytes()[4:8] == b"\0" * 4  # no time of writing in it


def test_writing_that_is_interrupted_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = reading(tmp_path, PLAIN)
    place = tmp_path / "kept.jsonl"
    place.write_bytes(b"old")

    def interrupted(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_trace(trace, str(place))
    assert place.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept.jsonl", "trace"]


@pytest.mark.parametrize("path", ["no/such/folder/x.jsonl", "", "/", "a\0b"])
def test_a_place_that_cannot_be_written_to_is_one_clear_error(tmp_path: Path, path: str) -> None:
    trace = reading(tmp_path, PLAIN)
    with pytest.raises(TraceError) as caught:
        write_trace(trace, path)
    assert "\n" not in str(caught.value)


def test_every_format_has_a_sample_here() -> None:
    assert {f.name for f in FORMATS} <= set(SAMPLES)
