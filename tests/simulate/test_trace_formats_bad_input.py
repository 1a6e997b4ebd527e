"""Whatever is wrong with a file: one TraceError that names file, line and field, nothing else."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.trace_checks import check_trace
from pagedkv.errors import TraceError
from pagedkv.simulate.trace_formats import csv_lines, read_trace
from pagedkv.simulate.trace_formats.azure import AZURE
from pagedkv.simulate.trace_formats.burstgpt import BURSTGPT
from pagedkv.simulate.trace_formats.fields import MAX_TOKENS, Table, TraceFormat
from pagedkv.simulate.trace_formats.vidur import VIDUR

MOONCAKE_LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
QWEN_LINE = {
    "chat_id": 1,
    "parent_chat_id": -1,
    "timestamp": 0.5,
    "input_length": 17,
    "output_length": 5,
    "hash_ids": [1, 2],
}
PLAIN_LINE = {
    "arrival_s": 0.5,
    "prompt_tokens": 17,
    "output_tokens": 5,
    "prefix_granularity": 16,
    "prefix_ids": [1, 2],
}
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE_LINE = "2023-11-16 18:17:03.9799600,4808,10"
VIDUR_HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens"
BURSTGPT_HEADER = "Timestamp,Session ID,Request tokens,Response tokens"


def error_of(folder: Path, content: bytes | str) -> TraceError:
    place = folder / "trace"
    place.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TraceError) as caught:
        read_trace(str(place))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert caught.value.file == str(place)
    return caught.value


def jsonl(*lines: object) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def assert_at(error: TraceError, line: int | None, field: str | None = None) -> None:
    assert (error.line, error.field) == (line, field), str(error)


# Whole files.


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n", gzip.compress(b"")])
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    assert error_of(tmp_path, content).problem == "is empty"


@pytest.mark.parametrize(
    "content",
    [
        b"hello, world\n",
        b"a,b,c\n1,2,3\n",
        b'{"name": "x"}\n',
        b"{}\n",
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        b"PAR1\0\0\0",
        b"\xff\xfe{\0",
        b"3\n",
        b"null\n",
        b'[{"timestamp": 1}]\n',
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes) -> None:
    error_of(tmp_path, content)


@pytest.mark.parametrize(
    "content",
    [
        AZURE_HEADER + "\n",
        BURSTGPT_HEADER + "\n5,s,10,0\n6,s,0,0\n",
        jsonl(MOONCAKE_LINE | {"output_length": 0}),
    ],
)
def test_no_usable_request_is_an_error(tmp_path: Path, content: str) -> None:
    assert "no usable request" in str(error_of(tmp_path, content)) or "no requests" in str(
        error_of(tmp_path, content)
    )


def test_a_missing_file_a_folder_and_a_name_that_cannot_be(tmp_path: Path) -> None:
    for path, problem in (
        (str(tmp_path / "nothing"), "no such file"),
        (str(tmp_path), "is a folder, not a trace file"),
        ("a\0b", "no such file"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("new\nline", "no such file"),
    ):
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert caught.value.problem == problem
        assert "\n" not in str(caught.value)


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.TextIOWrapper(io.BytesIO(b""))
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(TraceError, match="standard input: is closed"):
            read_trace("-")


def compressed() -> list[bytes]:
    content = jsonl(*[MOONCAKE_LINE | {"timestamp": t} for t in range(500)]).encode()
    return [gzip.compress(content), zstandard.compress(content)]


@pytest.mark.parametrize("whole", compressed(), ids=["gzip", "zstd"])
def test_compressed_data_that_is_cut_off_anywhere(tmp_path: Path, whole: bytes) -> None:
    for end in [*range(5, len(whole), max(1, len(whole) // 40)), len(whole) - 1]:
        assert "cut off" in str(error_of(tmp_path, whole[:end])), end


@pytest.mark.parametrize("whole", compressed(), ids=["gzip", "zstd"])
def test_compressed_data_that_is_damaged(tmp_path: Path, whole: bytes) -> None:
    assert "damaged" in str(error_of(tmp_path, whole + b"more"))
    broken = bytearray(whole)
    broken[6 if whole[0] == 0x28 else -6] ^= 0xFF
    error_of(tmp_path, bytes(broken))


# Lines and fields.


@pytest.mark.parametrize(
    ("base", "change", "field"),
    [
        (MOONCAKE_LINE, {"input_length": -1}, "input_length"),
        (MOONCAKE_LINE, {"input_length": None}, "input_length"),
        (MOONCAKE_LINE, {"input_length": True}, "input_length"),
        (MOONCAKE_LINE, {"input_length": "600"}, "input_length"),
        (MOONCAKE_LINE, {"input_length": 600.5}, "input_length"),
        (MOONCAKE_LINE, {"input_length": 0, "hash_ids": []}, "input_length"),
        (MOONCAKE_LINE, {"input_length": MAX_TOKENS + 1}, "input_length"),
        (MOONCAKE_LINE, {"input_length": 10**400}, "input_length"),
        (MOONCAKE_LINE, {"input_length": 1e300}, "input_length"),
        (MOONCAKE_LINE, {"output_length": -5}, "output_length"),
        (MOONCAKE_LINE, {"output_length": [5]}, "output_length"),
        (MOONCAKE_LINE, {"timestamp": "now"}, "timestamp"),
        (MOONCAKE_LINE, {"timestamp": False}, "timestamp"),
        (MOONCAKE_LINE, {"timestamp": None}, "timestamp"),
        (MOONCAKE_LINE, {"timestamp": 10**30}, "timestamp"),
        (MOONCAKE_LINE, {"hash_ids": [1]}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": [1, 2, 3]}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": []}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": None}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": 3}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": {"1": 2}}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": "12"}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": [1, -2]}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": [1, 2.0]}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": [1, True]}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": [1, None]}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": [1, 2**64]}, "hash_ids"),
        (MOONCAKE_LINE, {"hash_ids": ["1", "2"]}, "hash_ids"),  # numbers on line 1
        (QWEN_LINE, {"hash_ids": [1]}, "hash_ids"),
        (QWEN_LINE, {"chat_id": None}, "chat_id"),
        (QWEN_LINE, {"chat_id": 1.5}, "chat_id"),
        (QWEN_LINE, {"chat_id": True}, "chat_id"),
        (QWEN_LINE, {"parent_chat_id": [1]}, "parent_chat_id"),
        (QWEN_LINE, {"hash_ids": None}, "hash_ids"),
        (PLAIN_LINE, {"prompt_tokens": 0}, "prompt_tokens"),
        (PLAIN_LINE, {"output_tokens": 0}, "output_tokens"),
        (PLAIN_LINE, {"session": 1.5}, "session"),
        (PLAIN_LINE, {"prefix_granularity": 8}, "prefix_granularity"),
        (PLAIN_LINE, {"prefix_granularity": None}, "prefix_granularity"),
        (PLAIN_LINE, {"prefix_granularity": 1.5}, "prefix_granularity"),
        (PLAIN_LINE, {"covers_output": True}, "covers_output"),
        (PLAIN_LINE, {"covers_output": 1}, "covers_output"),
        (PLAIN_LINE, {"prefix_ids": None}, "prefix_ids"),
        (PLAIN_LINE, {"prefix_ids": [1, 2, 3]}, "prefix_ids"),
        (PLAIN_LINE, {"prefix_ids": ["1", "xyz"]}, "prefix_ids"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) and len(value) < 3 else "",
)
def test_a_bad_value_in_json_is_named_with_its_line(
    tmp_path: Path, base: dict[str, object], change: dict[str, object], field: str
) -> None:
    assert_at(error_of(tmp_path, jsonl(base, base | change)), 2, field)


@pytest.mark.parametrize("base", [MOONCAKE_LINE, QWEN_LINE, PLAIN_LINE], ids=["m", "q", "p"])
def test_a_missing_json_field_is_named_on_the_first_line_and_on_later_ones(
    tmp_path: Path, base: dict[str, object]
) -> None:
    for field in base:
        without = {name: value for name, value in base.items() if name != field}
        assert_at(error_of(tmp_path, jsonl(base, base, without)), 3, field)
        if field not in ("hash_ids", "prefix_ids", "prefix_granularity") or base is QWEN_LINE:
            assert_at(error_of(tmp_path, jsonl(without, base)), 1, field)


def test_wide_keys_as_numbers_are_told_to_be_written_in_hexadecimal(tmp_path: Path) -> None:
    assert "hexadecimal" in str(error_of(tmp_path, jsonl(PLAIN_LINE | {"prefix_ids": [1, 2**70]})))


def test_a_granularity_of_zero(tmp_path: Path) -> None:
    error = error_of(tmp_path, jsonl(PLAIN_LINE | {"prefix_granularity": 0}))
    assert_at(error, 1, "prefix_granularity")


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"{'timestamp': 0}",
        b'{"timestamp": NaN, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}',
        b'{"timestamp": Infinity, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}',
        b"[1]",
        b"3",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"timestamp": ' + b"9" * 10_000 + b"}",
        b"{}  {}",
        b"timestamp,input_length",
    ],
    ids=range(12),
)
def test_a_line_that_is_no_json_object_is_named(tmp_path: Path, line: bytes) -> None:
    content = jsonl(MOONCAKE_LINE).encode() + b"\n" + line + b"\n"
    assert_at(error_of(tmp_path, content), 3)


@pytest.mark.parametrize(
    ("header", "line", "field"),
    [
        (AZURE_HEADER, "2023-11-16 18:17:03,4808,-1", "GeneratedTokens"),
        (AZURE_HEADER, "2023-11-16 18:17:03,,1", "ContextTokens"),
        (AZURE_HEADER, "2023-11-16 18:17:03,nan,1", "ContextTokens"),
        (AZURE_HEADER, "2023-11-16 18:17:03,0,1", "ContextTokens"),
        (AZURE_HEADER, "2023-11-16 18:17:03,1_0,1", "ContextTokens"),
        (AZURE_HEADER, "2023-11-16 18:17:03,1e2,1", "ContextTokens"),
        (AZURE_HEADER, "2023-11-16 18:17:03,١٢,1", "ContextTokens"),
        (AZURE_HEADER, "2023-11-16 18:17:03,99999999999999999999999,1", "ContextTokens"),
        (AZURE_HEADER, "2023-11-16,5,1", "TIMESTAMP"),
        (AZURE_HEADER, "2023-02-30 18:17:03,5,1", "TIMESTAMP"),
        (AZURE_HEADER, "2023-11-16 24:17:03,5,1", "TIMESTAMP"),
        (AZURE_HEADER, "2023-11-16 18:17:60,5,1", "TIMESTAMP"),
        (AZURE_HEADER, "0000-11-16 18:17:03,5,1", "TIMESTAMP"),
        (AZURE_HEADER, "9999-11-16 18:17:03,5,1", "TIMESTAMP"),
        (AZURE_HEADER, ",5,1", "TIMESTAMP"),
        (AZURE_HEADER, "2023-11-16 18:17:03,5", None),
        (AZURE_HEADER, "2023-11-16 18:17:03,5,1,1", None),
        (AZURE_HEADER, '2023-11-16 18:17:03,"5,1', None),
        (VIDUR_HEADER, "inf,5,1", "arrived_at"),
        (VIDUR_HEADER, "nan,5,1", "arrived_at"),
        (VIDUR_HEADER, "1e99,5,1", "arrived_at"),
        (VIDUR_HEADER, "x,5,1", "arrived_at"),
        (VIDUR_HEADER, "1,5.5,1", "num_prefill_tokens"),
        (BURSTGPT_HEADER, "5,s,10,", "Response tokens"),
        (BURSTGPT_HEADER, "5,s,0,7", "Request tokens"),
        (VIDUR_HEADER + ",extra", "5,6,7", None),
    ],
)
@pytest.mark.parametrize("bulk_bytes", [0, 10**9], ids=["in bulk", "line by line"])
def test_a_bad_value_in_csv_is_named_with_its_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bulk_bytes: int,
    header: str,
    line: str,
    field: str | None,
) -> None:
    monkeypatch.setattr(csv_lines, "BULK_BYTES", bulk_bytes)
    good = {
        AZURE_HEADER: AZURE_LINE,
        VIDUR_HEADER: "0.5,374,44",
        VIDUR_HEADER + ",extra": "0.5,374,44,x",
        BURSTGPT_HEADER: "5,s,1,2",
    }
    assert_at(error_of(tmp_path, f"{header}\n{good[header]}\n{line}\n"), 3, field)


@pytest.mark.parametrize("header", [AZURE_HEADER, VIDUR_HEADER])
def test_a_missing_or_doubled_csv_column_is_named(tmp_path: Path, header: str) -> None:
    names = header.split(",")
    for name in names:
        rest = ",".join(n for n in names if n != name)
        assert_at(error_of(tmp_path, rest + "\n1,2\n"), 1, name)
        assert_at(error_of(tmp_path, f"{header},{name}\n1,2,3,4\n"), 1, name)


def test_whole_numbers_with_a_point_are_counts(tmp_path: Path) -> None:
    place = tmp_path / "trace"
    place.write_text(f"{BURSTGPT_HEADER}\n5.0,,10.0,7.\n6,, +10 ,7.000\n")
    trace = read_trace(str(place))
    assert trace.prompt_tokens.tolist() == [10, 10]
    assert trace.output_tokens.tolist() == [7, 7]


# The two ways of reading csv agree.

SLOTS = {
    AZURE: [
        ["2023-11-16 18:17:03.9799600", "2024-05-10 00:00:01+00:00", "2024-05-10T00:00:01Z",
         "2024-05-10 00:00:01.5+02:00", "2023-02-30 00:00:00", "2023-11-16 18:17:60", "",
         "2023-11-16 18:17", "1600-01-01 00:00:00", "2023-11-16 18:17:03.123456789123"],
        ["5", "5.0", "0", "-1", "", " 7 ", "+3", "x", "1e3", "2147483647", "2147483648"],
        ["1", "99", "0", "nan"],
    ],
    VIDUR: [
        ["0.0", "4.314579", ".5", "1e3", "-2", "nan", "inf", "", "1e16", " 3", "0x10", "1_0"],
        ["5", "07", "true"],
        ["1", "99"],
    ],
    BURSTGPT: [
        ["5", "45.5"],
        ["", "a", "b", "None", "null", " a", "-1"],
        ["5", "6.5"],
        ["0", "9"],
    ],
}  # fmt: skip


@st.composite
def csv_files(draw: st.DrawFn) -> tuple[TraceFormat, bytes]:
    known = draw(st.sampled_from([AZURE, VIDUR, BURSTGPT]))
    values = SLOTS[known]
    usual = draw(st.booleans())  # so that flawless files are drawn often
    names = [f.name for f in known.fields]
    if known is BURSTGPT and draw(st.booleans()):
        values = [values[0], *values[2:]]
        names.remove("Session ID")
    extra = draw(st.booleans())
    lines = [",".join(names + ["x"] * extra)]
    for _ in range(draw(st.integers(0, 6))):
        cells = [draw(st.sampled_from(v[:1] if usual else v)) for v in values]
        lines.append(",".join(cells + ["y"] * extra))
        if not usual and draw(st.integers(0, 9)) == 0:
            lines.append(draw(st.sampled_from(["", "  ", ",,", "1", '"', "\0", "\r"])))
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    return known, (newline.join(lines) + newline * draw(st.integers(0, 2))).encode()


def table_or_error(known: TraceFormat, content: bytes, bulk_bytes: int) -> Table | str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_lines, "BULK_BYTES", bulk_bytes)
        try:
            return csv_lines.read_csv(content, known.fields, "file")
        except TraceError as error:
            return str(error)


@settings(max_examples=200, deadline=None)
@given(csv_files())
def test_reading_in_bulk_and_line_by_line_agree(drawn: tuple[TraceFormat, bytes]) -> None:
    known, content = drawn
    bulk = table_or_error(known, content, 0)
    slow = table_or_error(known, content, len(content) + 1)
    if isinstance(slow, str) or isinstance(bulk, str):
        assert bulk == slow
        return
    assert np.array_equal(bulk.line, slow.line) and bulk.labels == slow.labels
    for name, column in slow.columns.items():
        assert np.array_equal(bulk.columns[name], column), name
        assert bulk.columns[name].dtype == column.dtype or len(column) == 0, name
    for name, present in slow.present.items():
        assert np.array_equal(bulk.present[name], present)


@pytest.mark.parametrize("known", [AZURE, VIDUR, BURSTGPT], ids=lambda f: f.name)
def test_flawless_files_are_read_in_bulk(known: TraceFormat) -> None:
    lines = [",".join(f.name for f in known.fields)]
    lines += [",".join(cells[0] for cells in SLOTS[known]) for _ in range(3)]
    assert csv_lines._in_bulk("\r\n".join(lines).encode(), known.fields) is not None


# Nothing but TraceError, whatever the bytes.

HEADERS = [
    AZURE_HEADER.encode() + b"\n" + AZURE_LINE.encode() + b"\n",
    VIDUR_HEADER.encode() + b"\n",
    BURSTGPT_HEADER.encode() + b"\n",
    jsonl(MOONCAKE_LINE).encode(),
    jsonl(QWEN_LINE).encode(),
    jsonl(PLAIN_LINE).encode(),
    b"\x1f\x8b\x08\0",
    b"\x28\xb5\x2f\xfd",
    b"\x50\x2a\x4d\x18",
    b"{",
    b"",
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@st.composite
def changed_lines(draw: st.DrawFn) -> bytes:
    """Lines of a known format in which some values were replaced by anything at all."""
    base = draw(st.sampled_from([MOONCAKE_LINE, QWEN_LINE, PLAIN_LINE]))
    lines = [
        base | draw(st.dictionaries(st.sampled_from(sorted(base)), json_values, max_size=2))
        for _ in range(draw(st.integers(1, 4)))
    ]
    return jsonl(*lines).encode("utf-8", "surrogatepass")


def read_or_refuse(place: Path, content: bytes) -> None:
    place.write_bytes(content)
    try:
        trace = read_trace(str(place))
    except TraceError as error:
        assert "\n" not in str(error)
    else:
        check_trace(trace)


@settings(max_examples=250, deadline=None)
@given(
    head=st.sampled_from(HEADERS),
    tail=st.binary(max_size=80) | st.text(max_size=60).map(lambda t: t.encode("utf-8")),
)
@example(head=b"\x50\x2a\x4d\x18", tail=b"\xff\xff\xff\xff")
@example(head=b"{", tail=b'"timestamp":1,"input_length":' + b"1" * 5000 + b"}")
def test_arbitrary_bytes_give_a_trace_or_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, head: bytes, tail: bytes
) -> None:
    read_or_refuse(tmp_path_factory.getbasetemp() / "fuzz", head + tail)


@settings(max_examples=200, deadline=None)
@given(content=changed_lines())
def test_arbitrary_values_give_a_trace_or_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    read_or_refuse(tmp_path_factory.getbasetemp() / "fuzz", content)


@settings(max_examples=150, deadline=None)
@given(drawn=csv_files(), cut=st.integers(0, 200), bulk=st.booleans())
def test_arbitrary_csv_gives_a_trace_or_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[TraceFormat, bytes],
    cut: int,
    bulk: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_lines, "BULK_BYTES", 0 if bulk else 10**9)
        content = drawn[1]
        read_or_refuse(tmp_path_factory.getbasetemp() / "fuzz", content[: len(content) - cut])
