"""Output that follows a grammar: compiled by xgrammar, then matched token by token.

xgrammar is an optional extra, and imported with the first grammar: it takes seconds, and brings
transformers along. Compiling lets go of the interpreter's lock, so it is done on a thread of its
own and holds up neither the event loop nor the step loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from engine.protocol import BadRequest, Structure
from engine.text.detokenizer import token_bytes

if TYPE_CHECKING:
    import xgrammar

__all__ = ["Grammars", "Matcher"]

log = logging.getLogger(__name__)
_Key = tuple[str, str, bool]
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")

COMPILE_S = 10.0  # the longest that a grammar may take; waiting for others does not count
MOST_NESTED = 100  # brackets; xgrammar's time grows with the square of a schema's depth
MOST_KEPT = 32  # compiled grammars, the latest used
MOST_BYTES = 16 << 20  # of one compiled grammar
MOST_BLANKS = 16  # between two JSON tokens: small models would go on with them for ever
TRIED_TOKENS = 32  # what a new grammar is tried out on
SLOW_S = 0.1  # of processor time for one token: whoever is in the same step waits for it


class Matcher:
    """Where one output stands in its grammar. Not to be shared between threads at a time."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, usable: npt.NDArray[np.bool_], eos: list[int]
    ) -> None:
        """`usable` is `[vocab]`: no others may come; `eos` end an output that is complete."""
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled, override_stop_tokens=eos)
        self._bits: npt.NDArray[np.int32] = np.zeros((1, -(-len(usable) // 32)), dtype=np.int32)
        self._usable = usable
        self._broken = False

    def allowed(self) -> npt.NDArray[np.bool_]:
        """`[vocab]`: which tokens may come next; the ends among them if the output is complete.

        A grammar that fails, or has become slow, accepts nothing from then on: that must not be
        the failure of a step that others are in too.
        """
        began = time.thread_time()
        try:
            self._matcher.fill_next_token_bitmask(self._bits)
        except RuntimeError:
            log.exception("a grammar cannot go on")
            self._broken = True
        if time.thread_time() - began > SLOW_S:
            log.warning("a grammar takes over %g s for one token", SLOW_S)
            self._broken = True
        bits = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")
        return bits[: len(self._usable)].view(np.bool_) & self._usable

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and no further, where the grammar does not allow it."""
        return not self._broken and bool(self._matcher.accept_token(token))

    def accept_all(self, tokens: Sequence[int]) -> bool:
        """Go on by many; False if the grammar does not allow one of them."""
        return all(self.accept(token) for token in tokens)

    @property
    def finished(self) -> bool:
        """Whether the output has been ended."""
        return bool(self._matcher.is_terminated())


class Grammars:
    """The grammars of one engine's requests, compiled for its tokenizer and kept for a while.

    Lives on one asyncio event loop.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = sorted(eos)
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._any = np.ones(vocab, dtype=np.bool_)
        self._json = self._any  # without control characters, which JSON does not allow in strings
        self._kept: OrderedDict[_Key, asyncio.Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._busy: tuple[_Key | None, float] = (None, 0.0)  # what is compiled since when, seconds
        self._thread: ThreadPoolExecutor | None = None

    async def matcher(self, structure: Structure, output: Sequence[int]) -> Matcher:
        """A matcher that has accepted `output`, what was emitted already.

        Raises `BadRequest`, naming what the client called it, for a grammar that is none, that
        nothing can follow, or that is too large; and where xgrammar is not installed.
        """
        try:
            matcher = self._matcher(await self._compiled(structure), structure)
        except BadRequest as error:  # kept, and shared with others who call it by another name
            raise BadRequest(error.message, param=structure.param, code=error.code) from error
        if output and not await asyncio.to_thread(matcher.accept_all, output):
            raise BadRequest("output does not follow the grammar", param="output")
        if matcher.finished:
            raise BadRequest("output is complete already", param="output")
        return matcher

    async def _compiled(self, structure: Structure) -> xgrammar.CompiledGrammar:
        key = (structure.kind, structure.source, structure.strict)
        kept = self._kept.get(key)
        if kept is None:
            _check_nesting(structure.source)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            loop = asyncio.get_running_loop()
            kept = self._kept[key] = loop.run_in_executor(self._thread, self._work, key, structure)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        while not kept.done():
            await asyncio.wait(
                (kept,), timeout=COMPILE_S
            )  # cancels nothing: others wait for it too
            busy, since = self._busy
            if not kept.done() and busy == key and time.monotonic() - since > COMPILE_S:
                raise BadRequest(f"the grammar takes over {COMPILE_S:g} s to compile")
        if kept.exception() is not None and self._kept.get(key) is kept:
            del self._kept[key]
        return kept.result()

    # On the thread

    def _work(self, key: _Key, structure: Structure) -> xgrammar.CompiledGrammar:
        if self._compiler is None:
            self._compiler = self._start()
        self._busy = (key, time.monotonic())
        return self._compile(self._compiler, structure)

    def _compile(
        self, compiler: xgrammar.GrammarCompiler, structure: Structure
    ) -> xgrammar.CompiledGrammar:
        try:
            if structure.kind == "json_schema":
                compiled = compiler.compile_json_schema(
                    structure.source,
                    strict_mode=structure.strict,
                    max_whitespace_cnt=MOST_BLANKS,
                )
            elif structure.kind == "regex":
                compiled = compiler.compile_regex(structure.source)
            elif structure.kind == "ebnf":
                compiled = compiler.compile_grammar(structure.source)
            else:
                compiled = compiler.compile_lark(structure.source)
        except (RuntimeError, ValueError, UnicodeError) as error:
            raise BadRequest(f"no grammar: {_complaint(error)}") from error
        if compiled.memory_size_bytes > MOST_BYTES:
            raise BadRequest(f"the grammar is too large: {compiled.memory_size_bytes} bytes")
        self._try_out(self._matcher(compiled, structure))
        return compiled

    def _matcher(self, compiled: xgrammar.CompiledGrammar, structure: Structure) -> Matcher:
        usable = self._json if structure.kind == "json_schema" else self._any
        return Matcher(compiled, usable, self._eos)

    def _start(self) -> xgrammar.GrammarCompiler:
        if not self._eos:
            raise BadRequest("this model has no token that ends an output")
        try:
            import xgrammar
        except ImportError as missing:
            raise BadRequest(
                "structured outputs need xgrammar on the engine: "
                f'pip install "microserve[structured]" ({missing})',
                code="unsupported_parameter",
            ) from missing
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {number for number, token in added if token.special}
        pieces = [
            b"" if token in special else bytes(token_bytes(self._tokenizer, token)[1])
            for token in range(len(self._any))
        ]
        # xgrammar lets them through where a string's length is limited.
        self._json = np.array([not _CONTROL.search(piece) for piece in pieces])
        info = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=self._eos
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _try_out(self, matcher: Matcher) -> None:
        """Follow a new grammar for some tokens: one that has no way to go, or that takes long to
        match, is better refused than met in a step that others are in too."""
        for _ in range(TRIED_TOKENS):
            allowed = matcher.allowed()
            if not allowed.any():
                raise BadRequest("the grammar is impossible: no text of this model follows it")
            if not matcher.accept(int(allowed.nonzero()[0][-1])):
                raise BadRequest("the grammar is too large: it takes too long to match")
            if matcher.finished:
                return


def _check_nesting(source: str) -> None:
    depth = deepest = 0
    for char in source:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MOST_NESTED:
        raise BadRequest(f"the grammar is too large: nested over {MOST_NESTED} deep")


def _complaint(error: Exception) -> str:
    """What xgrammar says, without its time, source file and stack."""
    first = str(error).strip().partition("\n")[0]
    return first.partition(": ")[2][:500] if first.startswith("[") else first[:500]
