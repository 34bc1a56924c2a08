"""The tokens of a model, as text: what an OpenAI server's text is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from engine.protocol import Internal

__all__ = ["Vocabulary"]

CONTEXT = 5  # tokens that are decoded again: a token's text may depend on its neighbours
ANCHORS = ("\n", "a")  # texts after which a text begins within a line, or within a word


class Vocabulary:
    """A tokenizer. Construction takes as long as its vocabulary is large: it belongs in a thread.

    Raises `Internal` if `tokenizer_json` is none.
    """

    def __init__(self, tokenizer_json: str, size: int) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
        except BaseException as error:
            # A panic within it is no `Exception`.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise Internal(f"the tokenizer: {error}") from error
        self._tokenizer.encode_special_tokens = True  # in answers they are text like any other
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special = frozenset(number for number, token in added if token.special)
        self.size = size
        self._byte_level = "ByteLevel" in repr(self._tokenizer.decoder)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def recent(self, tokens: Sequence[int], skipped: Iterable[int]) -> list[int]:
        """Return the last tokens, without those in `skipped`, on which the next text may depend."""
        unwanted = frozenset(skipped)
        return [token for token in tokens[-4 * CONTEXT :] if token not in unwanted][-CONTEXT:]

    def encodings(self, text: str) -> Iterable[list[int]]:
        """Yield tokens for `text` in the middle of an output, the likeliest first.

        A tokenizer may put a space before a text that begins with a letter. So the text is also
        encoded behind anchors, whose tokens are dropped.
        """
        yield self._encode(text)
        for anchor in ANCHORS:
            before, whole = self._encode(anchor), self._encode(anchor + text)
            if whole[: len(before)] == before:
                yield whole[len(before) :]

    def id_of(self, piece: str | None) -> int | None:
        """Return the token that is written so in the vocabulary, if there is one."""
        token: int | None = self._tokenizer.token_to_id(piece) if piece else None
        return token

    def piece(self, token: int) -> tuple[str, list[int]]:
        """Return a token as text and as bytes, for log probabilities."""
        piece = self._tokenizer.id_to_token(token) or ""
        if self._byte_level and all(char in _BYTE_OF for char in piece):
            raw = bytes(_BYTE_OF[char] for char in piece)
            return raw.decode("utf-8", "replace"), list(raw)
        text = self.text([token])
        return text, list(text.encode())

    def _encode(self, text: str) -> list[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character for each byte, used by byte-level BPE vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + index): byte for index, byte in enumerate(others)}
    return table


_BYTE_OF = _byte_alphabet()
