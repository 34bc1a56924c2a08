"""Conversion of a GGUF file's tokenizer to `tokenizer.json`.

There are two kinds: byte-level BPE ("gpt2"), with a pre-tokenizer identified by llama.cpp's name
for it, and SentencePiece BPE ("llama"), which has scores instead of merges.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from engine.models.errors import CorruptModel, UnsupportedTokenizer
from engine.models.loading.fields import Fields
from engine.models.loading.tokenization import Tokenization

__all__ = ["read_tokenization"]

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of token_type that are used

# Tokens that end a chat turn, by their text. Many files declare one end token but use several.
_TURN_ENDS = {
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
}


def read_tokenization(metadata: Fields) -> Tokenization:
    """Read the tokenizer from the metadata.

    Raises: `UnsupportedTokenizer` for a kind that is not implemented, `CorruptModel` for bad data.
    """
    kind = metadata.text(_KEY + "model")
    tokens = metadata.strings(_KEY + "tokens")
    if len(set(tokens)) != len(tokens):
        raise CorruptModel(f"{metadata.origin}: the vocabulary has duplicate tokens")
    types = metadata.integers(_KEY + "token_type", [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CorruptModel(f"{metadata.origin}: {len(tokens)} tokens have {len(types)} types")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens, types)
    else:
        raise UnsupportedTokenizer(
            f"{metadata.origin}: tokenizer {kind!r} is not supported; supported are gpt2 and llama "
            "(the same model as a Hugging Face folder may work)"
        )
    control = [t for t, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == _USER_DEFINED
        ]
    )
    bos, eos = (_special(metadata, tokens, name) for name in ("bos", "eos"))
    add_bos = metadata.flag(_KEY + "add_bos_token", add_bos)
    if add_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokens.index(bos))]
        )
    ends = [_special(metadata, tokens, name) for name in ("eos", "eot", "eom")]
    ends += [token for token in control if token in _TURN_ENDS]
    template = "tokenizer.chat_template"
    return Tokenization(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.text(template) if template in metadata else None,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=tuple(tokens.index(end) for end in dict.fromkeys(ends) if end is not None),
        add_bos=add_bos and bos is not None,
    )


def _special(metadata: Fields, tokens: list[str], name: str) -> str | None:
    """Return the token whose id the file declares under this name, if any."""
    key = f"{_KEY}{name}_token_id"
    if key not in metadata:
        return None
    index = metadata.integer(key)
    if not 0 <= index < len(tokens):
        raise CorruptModel(f"{metadata.origin}: {key} is {index}, outside the vocabulary")
    return tokens[index]


def _byte_level(metadata: Fields, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return byte-level BPE, and whether BOS is prepended if the file does not specify it."""
    pre = metadata.text(_KEY + "pre", "default")
    if pre not in _SPLITS:
        raise UnsupportedTokenizer(
            f"{metadata.origin}: pre-tokenizer {pre!r} is not supported; supported are "
            f"{', '.join(sorted(_SPLITS))} (the same model as a Hugging Face folder may work)"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for merge in metadata.strings(_KEY + "merges"):
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise CorruptModel(f"{metadata.origin}: merge {merge!r} is not in the vocabulary")
        merges.append((left, right))
    llama3_like = pre in ("llama-bpe", "tekken")  # whole words bypass merges; BOS is prepended
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3_like))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, llama3_like


def _sentencepiece(metadata: Fields, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Return SentencePiece BPE, whose merges are ordered by the score of the merged piece."""
    scores = metadata.numbers(_KEY + "scores")
    if len(scores) != len(tokens):
        raise CorruptModel(f"{metadata.origin}: {len(tokens)} tokens have {len(scores)} scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    pieces = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _NORMAL]
    pieces.sort(key=lambda piece: -scores[vocab[piece]])
    normal = set(pieces)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    unknown = next((t for t, type_ in zip(tokens, types, strict=True) if type_ == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaced = metadata.flag(_KEY + "add_space_prefix", True)
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space]) if spaced else space
    )
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(decoder + [decoders.Strip(" ", 1, 0)] * spaced)
    return tokenizer, True


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _regex(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


# Pre-tokenizers by llama.cpp's names (`llama_vocab::impl::load` in llama.cpp).
_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,  # converters older than these names knew only GPT-2's pre-tokenizer
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "llama-bpe": _regex(_LLAMA3 % "{1,3}"),
    "qwen2": _regex(_LLAMA3 % ""),
    "deepseek-r1-qwen": _regex(_LLAMA3 % ""),
    "tekken": _regex(_TEKKEN),
}
