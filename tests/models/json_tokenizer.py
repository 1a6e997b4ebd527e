"""A tokenizer that can write every text, with words of several bytes as JSON has them, and an end
token."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 0
_MERGES = [
    *('{ "', '" :', ': "', '" ,', '" }', "t r", "tr u", "tru e", "f a", "fa l", "fal s", "fals e"),
    *("1 2", "12 3", "- 1", "a b", "ab c", "n u", "l l", "nu ll", ", {", "[ ]", "} ]"),
]
VOCABULARY = 1 + 256 + len(_MERGES) + 4
"""The model's: the end token, all bytes, the words, and rows for which there is no token."""


def json_tokenizer() -> PreTrainedTokenizerFast:
    """All bytes and some words; token 0 ends a text."""
    words = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    words += [left + right for left, right in merges]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
