from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from engine_helpers import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.sampling.sampled import Sampled
from engine.text.detokenizer import Detokenizer, Released, token_bytes

TOKENIZER = Tokenizer.from_str(tiny().tokenizer_json)
TEXT = "Hi 😀! naïve 日本語 – e\u0301 👩‍👩‍👧 \ufffd end"


def byte_pairs() -> Tokenizer:
    """A byte-level tokenizer whose tokens begin and end inside characters."""
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng, merges = random.Random(1), set()
    raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (piece, _) = raw.pre_tokenize_str(TEXT)[0]
    while len(merges) < 20:
        at = rng.randrange(len(piece) - 1)
        merges.add((piece[at], piece[at + 1]))
    vocab = {token: index for index, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=sorted(merges)))
    tokenizer.pre_tokenizer, tokenizer.decoder = raw, decoders.ByteLevel()
    return tokenizer


PAIRS = byte_pairs()


def stream(detokenizer: Detokenizer, tokens: Sequence[int], *, ends: bool = True) -> list[Released]:
    """Return what each token releases, up to a stop string; the last token ends the output."""
    released = []
    for index, token in enumerate(tokens):
        released.append(detokenizer.push(Sampled(token), last=ends and index == len(tokens) - 1))
        if released[-1].stopped is not None:
            break
    return released


def text_of(released: Sequence[Released]) -> str:
    return "".join(part.text for part in released)


def ids_of(released: Sequence[Released]) -> list[int]:
    return [sampled.token for part in released for sampled in part.sampled]


def encode(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@given(st.text(max_size=60))
@example(TEXT)
@pytest.mark.slow
def test_released_text_equals_the_tokenizers_decoding(text: str):
    for tokenizer in (TOKENIZER, PAIRS):
        tokens = encode(text, tokenizer)
        released = stream(Detokenizer(tokenizer, []), tokens)
        assert text_of(released) == tokenizer.decode(tokens)
        assert ids_of(released) == tokens


@settings(max_examples=200)
@given(st.lists(st.integers(0, 275), min_size=1, max_size=30), st.booleans())
@example([128, 128, 240 - 1, 159], True)
def test_random_tokens_are_released_as_the_tokenizer_decodes_them(tokens: list[int], pairs: bool):
    """The tokens include invalid bytes, special tokens and pieces of several characters."""
    tokenizer = PAIRS if pairs else TOKENIZER
    released = stream(Detokenizer(tokenizer, []), tokens)
    assert text_of(released) == tokenizer.decode(tokens)
    assert ids_of(released) == tokens


@given(st.binary(min_size=1, max_size=30))
@example(b"\x80\x80\xf0\x9f\x98\x80")
@example(b"\xf0\x9f\x98\xc3\xa9")
@example(b"\xf0\x9f\x98A")
def test_invalid_bytes_swallow_no_characters(raw: bytes):
    alphabet = {token_bytes(TOKENIZER, token)[1][0]: token for token in range(256)}
    tokens = [alphabet[byte] for byte in raw]
    released = stream(Detokenizer(TOKENIZER, []), tokens)
    assert text_of(released) == TOKENIZER.decode(tokens) == raw.decode("utf-8", "replace")


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 275), max_size=12),
    st.lists(st.integers(0, 275), min_size=1, max_size=30),
    st.sampled_from([[], ["a"], ["é", "!!"]]),
)
def test_a_stream_resumes_after_any_released_token(
    prompt: list[int], tokens: list[int], stop: list[str]
):
    """Another engine continues behind the released tokens with the same text."""
    whole = stream(Detokenizer(TOKENIZER, prompt, stop=stop), tokens)
    for cut in range(1, len(whole)):
        emitted = ids_of(whole[:cut])
        if len(emitted) == len(tokens):
            continue
        rest = Detokenizer(TOKENIZER, [*prompt, *emitted], stop=stop)
        again = stream(rest, tokens[len(emitted) :])
        assert text_of(whole[:cut]) + text_of(again) == text_of(whole)
        assert [*emitted, *ids_of(again)] == ids_of(whole)
        assert again[-1].stopped == whole[-1].stopped


def test_an_unfinished_character_is_held_back():
    tokens = encode("a😀b")
    released = stream(Detokenizer(TOKENIZER, []), tokens, ends=False)
    assert [part.text for part in released] == ["a", "", "", "", "😀", "b"]
    assert [len(part.sampled) for part in released] == [1, 0, 0, 0, 4, 1]


def test_the_end_holds_nothing_back():
    released = stream(Detokenizer(TOKENIZER, []), encode("a😀")[:-1])
    assert text_of(released) == "a\ufffd"
    assert len(ids_of(released)) == 4


def test_special_tokens_have_no_text_unless_requested():
    (special,) = tiny().eos_token_ids[:1]
    tokens = [*encode("a"), special, *encode("b")]
    assert text_of(stream(Detokenizer(TOKENIZER, []), tokens)) == "ab"
    kept = Detokenizer(TOKENIZER, [], skip_special_tokens=False)
    assert text_of(stream(kept, tokens)) == "a<|im_end|>b"


def test_a_special_token_within_a_character_does_not_break_it():
    smile = encode("😀")
    tokens = [smile[0], *tiny().eos_token_ids, *tiny().eos_token_ids, *smile[1:], *encode("b")]
    assert text_of(stream(Detokenizer(TOKENIZER, []), tokens)) == "😀b"


def test_a_stop_string_across_tokens():
    released = stream(Detokenizer(TOKENIZER, [], stop=["STOP"]), encode("one STOP two"))
    assert text_of(released) == "one "
    assert released[-1].stopped == "STOP"
    assert ids_of(released) == encode("one STOP")
    assert [part.text for part in released] == ["o", "n", "e", " ", "", "", "", ""]


def test_an_incomplete_stop_string_is_released_later():
    released = stream(Detokenizer(TOKENIZER, [], stop=["STOP"]), encode("STO STx"), ends=False)
    assert text_of(released) == "STO STx"
    assert [part.text for part in released][:4] == ["", "", "", "STO "]


def test_the_end_releases_an_incomplete_stop_string():
    assert text_of(stream(Detokenizer(TOKENIZER, [], stop=["STOP"]), encode("a ST"))) == "a ST"


def test_the_stop_string_may_be_included():
    kept = Detokenizer(TOKENIZER, [], stop=["b"], include_stop=True)
    assert text_of(stream(kept, encode("abc"))) == "ab"


def test_the_earliest_stop_string_wins():
    released = stream(Detokenizer(TOKENIZER, [], stop=["bc", "ab"]), encode("xabc"))
    assert text_of(released) == "x"
    assert released[-1].stopped == "ab"


def test_a_stop_string_may_overlap_itself():
    released = stream(Detokenizer(TOKENIZER, [], stop=["aab"]), encode("aaab"))
    assert text_of(released) == "a"
    assert released[-1].stopped == "aab"


def test_a_stop_string_in_the_prompt_does_not_count():
    released = stream(Detokenizer(TOKENIZER, encode("x END"), stop=["END"]), encode("abc"))
    assert text_of(released) == "abc"


@settings(max_examples=150)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_agree_with_a_naive_search(text: str, stop: list[str], include: bool):
    found = [(at, s) for s in stop if (at := text.find(s)) >= 0]
    # The first complete stop string ends the output; no later token is sampled.
    first_end = min((at + len(s) for at, s in found), default=len(text))
    seen = text[:first_end]
    found = [(at, s) for s in stop if (at := seen.find(s)) >= 0]
    expected = seen if not found else seen[: min(found)[0] + len(min(found)[1]) * include]
    released = stream(Detokenizer(TOKENIZER, [], stop=stop, include_stop=include), encode(text))
    assert text_of(released) == expected
    assert bool(found) == bool(released and released[-1].stopped)


@pytest.mark.parametrize("char", ["a", " ", "\n", "\u00ad"])
def test_token_bytes_are_those_of_the_text(char: str):
    assert b"".join(bytes(token_bytes(TOKENIZER, t)[1]) for t in encode(char)) == char.encode()


def test_token_bytes_of_half_a_character():
    first = encode("é")[0]
    assert token_bytes(TOKENIZER, first) == ("\ufffd", [0xC3])
