"""Tokenizers built from GGUF metadata, against slow implementations of their definitions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.models import CorruptModel, UnsupportedTokenizer
from engine.models.loading.fields import Fields
from engine.models.loading.gguf_file import GGUFFile
from engine.models.loading.gguf_tokenizer import _SPLITS, read_tokenization
from engine.models.loading.locate import locate
from engine.models.loading.tokenization import Tokenization

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = [
    "",
    "What is the capital of France?",
    "In 2024, 1234567 people's dogs weren't  here;\tthey'd   left\n\n\nagain. ",
    "def f(x):\n    return x**2 + 3.14159e-10  # ½ ² 四 ٣٤",
    "naïve café, Straße, Ωμέγα, Привет мир, 漢字かな交じり, שלום, 👩‍👩‍👧‍👦🏽 é vs é",
    " leading and trailing ",
    "x" * 300 + "\u00a0\u3000\u200b\x00\x7f",
]


def bpe(symbols: list[str], rank: dict[tuple[str, str], int]) -> list[str]:
    """Merge the neighbours of the lowest rank, leftmost first, until none can be merged."""
    while True:
        pairs = list(pairwise(symbols))
        best = min(range(len(pairs)), key=lambda i: rank.get(pairs[i], 10**9), default=None)
        if best is None or pairs[best] not in rank:
            return symbols
        symbols = [*symbols[:best], "".join(pairs[best]), *symbols[best + 2 :]]


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_smollm2_tokenizes_as_defined():
    """Digits alone, GPT-2's words, bytes as letters, merges by rank."""
    metadata = GGUFFile(locate("smollm2").path).metadata
    tokenizer = Tokenizer.from_str(read_tokenization(metadata).tokenizer_json)
    tokens = metadata.strings("tokenizer.ggml.tokens")
    merges = metadata.strings("tokenizer.ggml.merges")
    rank = {tuple(merge.split(" ")): index for index, merge in enumerate(merges)}
    letters = bytes_to_unicode()
    for text in TEXTS:
        expected: list[str] = []
        for part in regex.findall(r"\p{N}|\P{N}+", text):
            for word in regex.findall(GPT2, part):
                expected += bpe([letters[byte] for byte in word.encode()], rank)
        encoded = tokenizer.encode(text)
        assert encoded.tokens == expected
        assert encoded.ids == [tokens.index(token) for token in expected]
        assert tokenizer.decode(encoded.ids) == text


@pytest.mark.slow
def test_smollm2_special_tokens(smollm2):
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids[:2] == [1, 4093]
    assert tokenizer.decode([1, 4093, 2]) == "user"
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.eos_token_ids == (2, 0)
    assert not smollm2.add_bos
    assert "You are a helpful AI assistant named SmolLM" in str(smollm2.chat_template)


def metadata(tokens: list[str], **values: Any) -> Fields:
    base = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": []}
    all_values = {f"tokenizer.ggml.{key}": value for key, value in (base | values).items()}
    return Fields(all_values, "m.gguf")


def byte_level(**values: Any) -> Tokenization:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ab", "<bos>", "<|im_end|>", "<|eot_id|>", "[user]"]
    types = [1] * 257 + [3, 3, 3, 4]
    return read_tokenization(
        metadata(tokens, merges=["a b"], token_type=types, bos_token_id=257, **values)
    )


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 1234 x!!", ["it", "'s", "Ġ1234", "Ġx", "!!"]),
        ("smollm", "it's 1234", ["it", "'s", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("qwen2", "IT'S 123\n\n x", ["IT", "'S", "Ġ", "1", "2", "3", "ĊĊ", "Ġx"]),
        ("tekken", "aWord 12 x", ["a", "Word", "Ġ", "1", "2", "Ġx"]),
    ],
)
def test_pre_tokenizers(pre, text, words):
    assert [word for word, _ in _SPLITS[pre]().pre_tokenize_str(text)] == words


@pytest.mark.parametrize("pre", sorted(_SPLITS))
def test_every_pre_tokenizer_keeps_the_text(pre):
    tokenizer = Tokenizer.from_str(byte_level(pre=pre).tokenizer_json)
    for text in TEXTS:
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == normal


def test_bos_is_prepended_if_the_file_says_so():
    assert not byte_level().add_bos
    assert byte_level(pre="llama-bpe").add_bos
    assert not byte_level(pre="llama-bpe", add_bos_token=False).add_bos
    text = byte_level(add_bos_token=True)
    assert text.add_bos
    tokenizer = Tokenizer.from_str(text.tokenizer_json)
    assert tokenizer.encode("ab").tokens == ["<bos>", "ab"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    tokenizer = Tokenizer.from_str(byte_level().tokenizer_json)
    encoded = tokenizer.encode("ab[user]<|im_end|>")
    assert encoded.tokens == ["ab", "[user]", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "ab[user]"


def test_all_end_of_turn_tokens_end_a_generation():
    assert byte_level(eos_token_id=257).eos_token_ids == (257, 258, 259)
    assert byte_level(eos_token_id=257, eot_token_id=256).eos_token_ids == (257, 256, 258, 259)


def sentencepiece() -> tuple[Fields, list[str], list[float]]:
    words = ["▁hello", "▁world", "▁the", "ello", "orld", "he", "hel", "lo", "▁w", "▁h", "or", "ld"]
    words += ["▁▁", "ll", "▁t", "th", "▁he", "wor", "o▁", "é", "▁", *"helowrdt"]
    words = [*words[:20], *dict.fromkeys(words[20:])]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *words]
    scores = [0.0] * 259 + [-float(index * 7 % 23) for index in range(len(words))]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    fields = metadata(
        tokens, model="llama", scores=scores, token_type=types, bos_token_id=1, eos_token_id=2
    )
    return fields, tokens, scores


@pytest.mark.parametrize(
    "text", ["hello world", "the  hello", "helloworld thé ☃", "", " ", "wwoorrlldd hhello lo"]
)
def test_sentencepiece_merges_by_score(text):
    fields, tokens, scores = sentencepiece()
    score = dict(zip(tokens, scores, strict=True))
    normal = set(tokens[259:])
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while (
        True
    ):  # sentencepiece's definition: merge the neighbours that form the piece with the best score
        joined = [a + b for a, b in pairwise(symbols)]
        able = [index for index, piece in enumerate(joined) if piece in normal]
        if not able:
            break
        best = max(able, key=lambda index: (score[joined[index]], -index))
        symbols[best : best + 2] = [joined[best]]
    expected: list[str] = []
    for symbol in symbols:
        known = [symbol] if symbol in normal else [f"<0x{b:02X}>" for b in symbol.encode()]
        expected += known
    read = read_tokenization(fields)
    tokenizer = Tokenizer.from_str(read.tokenizer_json)
    assert tokenizer.encode(text, add_special_tokens=False).tokens == expected
    assert tokenizer.encode(text).tokens == ["<s>", *expected]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert read.add_bos
    assert read.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedTokenizer, "tokenizer 'bert' is not supported"),
        ({"pre": "gpt-4o"}, UnsupportedTokenizer, "pre-tokenizer 'gpt-4o' is not supported"),
        ({"tokens": ["a", "a"]}, CorruptModel, "duplicate tokens"),
        ({"tokens": None}, CorruptModel, r"lacks tokenizer\.ggml\.tokens"),
        ({"token_type": [1]}, CorruptModel, "2 tokens have 1 types"),
        ({"merges": ["a c"]}, CorruptModel, "merge 'a c' is not in the vocabulary"),
        ({"merges": ["ab"]}, CorruptModel, "merge 'ab' is not in the vocabulary"),
        ({"eos_token_id": 2}, CorruptModel, "eos_token_id is 2, outside the vocabulary"),
        ({"model": "llama", "scores": [0.0]}, CorruptModel, "2 tokens have 1 scores"),
    ],
)
def test_unsupported_and_corrupt_tokenizers_are_refused(values, error, message):
    with pytest.raises(error, match=message):
        read_tokenization(
            metadata(["a", "b"], **values) if "tokens" not in values else metadata(**values)
        )
