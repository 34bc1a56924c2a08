"""What is passed on has, at every moment, the text of its tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_openai import FILES, TEXT, TOKENIZER
from tokenizers import Tokenizer, decoders, models, normalizers

from router.engines.openai.transcript import Transcript
from router.engines.openai.vocabulary import Vocabulary

BYTES = Vocabulary(FILES.tokenizer_json, FILES.vocab_size)
PIECES = ["▁h", "▁w", "▁", *"helowrd!"]


def sentencepiece() -> Vocabulary:
    """A tokenizer that puts a space before a text, as Llama 2's does."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁", "w")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return Vocabulary(tokenizer.to_str(), len(vocab))


class Checked:
    """Passes the server's events on, and checks the invariant after each."""

    def __init__(self, vocabulary: Vocabulary, *, told: bool, before: list[int]) -> None:
        self.transcript = Transcript(vocabulary, before, told=told, skip_special=True, most=1 << 20)
        self.vocabulary, self.before = vocabulary, before
        self.tokens: list[int] = []
        self.text = ""

    def push(self, tokens: list[int], text: str, *, last: bool = False) -> None:
        released = self.transcript.push(tokens, text, [], last=last)
        self.tokens += released.tokens
        self.text += released.text
        if not last:
            prompt = self.vocabulary.text(self.before)
            shown = [token for token in self.tokens if token not in self.vocabulary.special]
            assert self.vocabulary.text([*self.before, *shown]) == prompt + self.text


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def shown(tokens: list[int]) -> str:
    text: str = TOKENIZER.decode(tokens)
    return text.rstrip("\ufffd")


@pytest.mark.parametrize("lag", [0, 1, 5])
def test_tokens_wait_for_their_text(lag):
    """A server that holds text back: for stop strings, and within characters."""
    checked, ids, told = Checked(BYTES, told=True, before=ids_of("Hi: ")), ids_of(TEXT), 0
    for count in range(1, len(ids) + 1):
        text = shown(ids[: max(0, count - lag)])
        checked.push([ids[count - 1]], text[told:])
        told = max(told, len(text))
    assert checked.transcript.exact
    checked.push([], TEXT[told:], last=True)
    assert (checked.tokens, checked.text) == (ids, TEXT)


def test_a_stop_string_within_a_token():
    checked = Checked(BYTES, told=True, before=[5])
    (th,) = ids_of("th")
    checked.push([*ids_of("wi")], "wi")
    checked.push([th], "t", last=True)
    assert (checked.tokens, checked.text) == ([*ids_of("wi"), th], "wit")


def test_special_tokens_have_no_text():
    checked = Checked(BYTES, told=True, before=[5])
    checked.push([1], "")
    checked.push([*ids_of("a"), 0], "a")
    assert (checked.tokens, checked.text) == ([1, *ids_of("a"), 0], "a")


def test_tokens_that_contradict_the_text_are_not_believed():
    checked = Checked(BYTES, told=True, before=[5])
    checked.push(ids_of("abc"), "xyz")
    assert not checked.transcript.exact
    checked.push(ids_of("d"), "!", last=True)
    assert (checked.tokens, checked.text) == (ids_of("xyz!"), "xyz!")


def test_text_without_tokens_is_a_contradiction_too():
    checked = Checked(BYTES, told=True, before=[5])
    checked.push(ids_of("ab"), "abc")
    assert (checked.tokens, checked.text) == (ids_of("abc"), "abc")


def test_tokens_without_text_are_not_waited_for_without_end(monkeypatch):
    """Each try decodes what waits, so it must not be tried again and again in ever longer parts."""
    decoded, text_of = [0], BYTES.text

    def counted(tokens: list[int]) -> str:
        decoded[0] += len(tokens)
        return text_of(tokens)

    monkeypatch.setattr(BYTES, "text", counted)
    first = ids_of("世")[:1]  # of three bytes
    checked = Transcript(BYTES, [5], told=True, skip_special=True, most=1 << 20)
    for _ in range(5000):
        checked.push(first, "", [])
    assert decoded[0] < 200_000
    assert not checked.exact
    assert checked.push([], "ab", []).text == "ab"


def test_many_tokens_at_once_are_passed_on_at_once():
    checked = Checked(BYTES, told=True, before=[5])
    checked.push(ids_of("ab " * 200), "ab " * 200)
    assert len(checked.tokens) == 600 and checked.text == "ab " * 200


@given(st.text(), st.data())
def test_tokens_made_from_the_text(text, data):
    text = text.encode("utf-8", "replace").decode()
    checked = Checked(BYTES, told=False, before=ids_of("a"))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    for begin, end in itertools.pairwise([0, *cuts, len(text)]):
        checked.push([], text[begin:end])
    checked.push([], "", last=True)
    assert checked.text == text
    assert BYTES.text(checked.tokens) == text


def test_text_that_looks_like_a_special_token():
    checked = Checked(BYTES, told=False, before=[5])
    checked.push([], "<|end|> is text")
    assert checked.text == "<|end|> is text" and 0 not in checked.tokens


def test_a_word_that_goes_on_where_the_tokenizer_would_put_a_space():
    vocabulary = sentencepiece()
    before = next(iter(vocabulary.encodings("hello")))
    checked = Checked(vocabulary, told=False, before=before)
    for part in ("world", " world", "!", "\n", "old"):
        checked.push([], part)
    assert checked.text == "world world!\nold"


def test_text_that_no_tokens_have_comes_at_the_end():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    vocabulary = Vocabulary(words.to_str(), 3)
    transcript = Transcript(vocabulary, [0], told=False, skip_special=True, most=1 << 20)
    assert transcript.push([], "nowhere", []).text == ""
    assert transcript.push([], " found", [], last=True).text == "nowhere found"


def test_log_probabilities_come_with_their_tokens():
    transcript = Transcript(BYTES, [5], told=True, skip_special=True, most=1 << 20)
    first, second = {"logprob": -1.0}, {"logprob": -2.0}
    a, b = ids_of("ab")
    assert transcript.push([a], "", [first]).logprobs == []
    released = transcript.push([b], "a", [second])
    assert (released.tokens, released.logprobs) == ([a], [first])
    released = transcript.push([], "b", [], last=True)
    assert (released.tokens, released.logprobs) == ([b], [second])


@pytest.mark.parametrize("last", [False, True])
def test_text_with_more_tokens_than_were_asked_for_is_cut(last):
    transcript = Transcript(BYTES, [5], told=False, skip_special=True, most=5)
    assert transcript.push([], "abc", []).tokens == ids_of("abc") and not transcript.full
    released = transcript.push([], "defg", [], last=last)
    assert (released.tokens, released.text) == (ids_of("de"), "de") and transcript.full


def test_a_cut_within_a_character_leaves_its_text_out():
    transcript = Transcript(BYTES, [5], told=False, skip_special=True, most=2)
    released = transcript.push([], "a\u4e16b", [])
    assert (released.tokens, released.text) == (ids_of("a\u4e16")[:2], "a")
