"""Structured output: grammars are compiled by xgrammar and matched token by token.

xgrammar is an optional dependency. It is imported with the first grammar, because the import takes
seconds and pulls in transformers. Compilation releases the GIL; it runs on its own thread and
blocks neither the event loop nor the step loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from engine.protocol import BadRequest, NoCapacity, Structure
from engine.text.detokenizer import token_bytes
from engine.text.grammar_limits import check_limits

if TYPE_CHECKING:
    import xgrammar

__all__ = ["Grammars", "Matcher"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_Key = tuple[str, str, bool]
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")

COMPILE_S = 10.0  # time limit of one compilation, without the wait for earlier ones
MAX_LATE = 2  # threads past it that may run on; then no grammar is compiled until one ends
MAX_CACHED = 32  # compiled grammars, least recently used evicted first
MAX_COMPILED_BYTES = 16 << 20  # of one compiled grammar
MAX_WHITESPACE = 16  # between two JSON tokens; small models would emit it endlessly
TRIAL_TOKENS = 32  # length of the trial run of a new grammar
SLOW_S = 0.1  # CPU time for one token, which delays every generation of the same step


class _TooSlow(BadRequest):
    """A grammar whose compilation did not end in time."""


class Matcher:
    """The position of one output in its grammar. Not thread-safe."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, usable: npt.NDArray[np.bool_], eos: list[int]
    ) -> None:
        """`usable`, `[vocab]`, masks tokens in general; `eos` tokens may end a complete output."""
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled, override_stop_tokens=eos)
        self._bits: npt.NDArray[np.int32] = np.zeros((1, -(-len(usable) // 32)), dtype=np.int32)
        self._usable = usable
        self._broken = False

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow, `[vocab]`; `eos` tokens too if the output is complete.

        A grammar that fails or is slow accepts no token afterwards. So only its own generation
        fails, not the whole step.
        """
        began = time.thread_time()
        try:
            self._matcher.fill_next_token_bitmask(self._bits)
        except RuntimeError:
            log.exception("a grammar matcher failed")
            self._broken = True
        if time.thread_time() - began > SLOW_S:
            log.warning("a grammar took over %g s for one token", SLOW_S)
            self._broken = True
        bits = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")
        return bits[: len(self._usable)].view(np.bool_) & self._usable

    def accept(self, token: int) -> bool:
        """Advance by a token. Return False, without advancing, if the grammar forbids it."""
        return not self._broken and bool(self._matcher.accept_token(token))

    def accept_all(self, tokens: Sequence[int]) -> bool:
        """Advance by several tokens. Return False if the grammar forbids one of them."""
        return all(self.accept(token) for token in tokens)

    @property
    def finished(self) -> bool:
        """Whether an `eos` token has ended the output."""
        return bool(self._matcher.is_terminated())


class Grammars:
    """Compiles and caches the grammars of one engine's requests, for its tokenizer.

    Belongs to one asyncio event loop.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = sorted(eos)
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._all_tokens = np.ones(vocab, dtype=np.bool_)
        # For JSON: without control characters, which JSON forbids in strings.
        self._json_tokens = self._all_tokens
        # A compilation that took too long stays here too, so that it is not tried again.
        self._cache: OrderedDict[_Key, asyncio.Task[xgrammar.CompiledGrammar]] = OrderedDict()
        self._turn = asyncio.Lock()  # one compilation at a time
        self._late: set[threading.Thread] = set()  # past their deadline

    async def matcher(self, structure: Structure, output: Sequence[int]) -> Matcher:
        """Return a matcher that has accepted `output`, the tokens emitted so far.

        Cancellation does not stop the compilation, which other requests may wait for.

        Raises: `BadRequest` with the client's name of the parameter, if the grammar is invalid, too
        large, or matches no text; if `output` does not follow it; or if xgrammar is not installed.
        `NoCapacity` while too many grammars compile past their deadline.
        """
        try:
            matcher = self._matcher(await self._compiled(structure), structure)
        except BadRequest as error:  # cached, and shared with requests that use another parameter
            raise BadRequest(error.message, param=structure.param, code=error.code) from error
        if output and not await asyncio.to_thread(matcher.accept_all, output):
            raise BadRequest("output does not follow the grammar", param="output")
        if matcher.finished:
            raise BadRequest("output is complete already", param="output")
        return matcher

    async def _compiled(self, structure: Structure) -> xgrammar.CompiledGrammar:
        key = (structure.kind, structure.source, structure.strict)
        compiled = self._cache.get(key)
        if compiled is None:
            check_limits(structure)
            compiled = asyncio.create_task(self._compile_in_turn(structure))
            compiled.add_done_callback(_retrieve_exception)
            self._cache[key] = compiled
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        await asyncio.wait((compiled,))  # does not cancel it: other requests may share it
        failed = compiled.cancelled() or compiled.exception() is not None
        if failed and not _is_late(compiled) and self._cache.get(key) is compiled:
            del self._cache[key]
        return compiled.result()

    async def _compile_in_turn(self, structure: Structure) -> xgrammar.CompiledGrammar:
        async with self._turn:
            self._late = {thread for thread in self._late if thread.is_alive()}
            if len(self._late) >= MAX_LATE:
                raise NoCapacity(f"{len(self._late)} grammars still compile past their deadline")
            compiler = self._compiler
            if compiler is None:
                compiler = self._compiler = await self._on_thread(self._make_compiler, None)
            try:
                return await self._on_thread(
                    lambda: self._compile(compiler, structure), limit_s=COMPILE_S
                )
            except TimeoutError:
                self._compiler = None  # the thread still uses it
                raise _TooSlow(f"the grammar takes over {COMPILE_S:g} s to compile") from None

    async def _on_thread(self, work: Callable[[], T], limit_s: float | None) -> T:
        """Run `work` on a daemon thread, so that the process can end while xgrammar works.

        Raises what `work` raises, and `TimeoutError`; nothing can stop the thread then.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def body() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  it is raised in the caller
                _post(loop, done, done.set_exception, error)
            else:
                _post(loop, done, done.set_result, result)

        thread = threading.Thread(target=body, name="grammar", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(limit_s):
                return await done
        except TimeoutError:
            self._late.add(thread)
            raise

    # On the compiler's thread

    def _compile(
        self, compiler: xgrammar.GrammarCompiler, structure: Structure
    ) -> xgrammar.CompiledGrammar:
        try:
            if structure.kind == "json_schema":
                compiled = compiler.compile_json_schema(
                    structure.source,
                    strict_mode=structure.strict,
                    max_whitespace_cnt=MAX_WHITESPACE,
                )
            elif structure.kind == "regex":
                compiled = compiler.compile_regex(structure.source)
            elif structure.kind == "ebnf":
                compiled = compiler.compile_grammar(structure.source)
            else:
                compiled = compiler.compile_lark(structure.source)
        except (RuntimeError, ValueError, UnicodeError) as error:
            raise BadRequest(f"invalid grammar: {_reason(error)}") from error
        if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
            raise BadRequest(f"the grammar is too large: {compiled.memory_size_bytes} bytes")
        self._run_trial(self._matcher(compiled, structure))
        return compiled

    def _matcher(self, compiled: xgrammar.CompiledGrammar, structure: Structure) -> Matcher:
        usable = self._json_tokens if structure.kind == "json_schema" else self._all_tokens
        return Matcher(compiled, usable, self._eos)

    def _make_compiler(self) -> xgrammar.GrammarCompiler:
        if not self._eos:
            raise BadRequest("this model has no token that ends an output")
        try:
            import xgrammar
        except ImportError as missing:
            raise BadRequest(
                "structured outputs need xgrammar on the engine: "
                f"pip install -e '.[structured]' in the clone ({missing})",
                code="unsupported_parameter",
            ) from missing
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {number for number, token in added if token.special}
        pieces = [
            b"" if token in special else bytes(token_bytes(self._tokenizer, token)[1])
            for token in range(len(self._all_tokens))
        ]
        # xgrammar allows control characters in strings of limited length, so mask them here.
        self._json_tokens = np.array([not _CONTROL.search(piece) for piece in pieces])
        info = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=self._eos
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _run_trial(self, matcher: Matcher) -> None:
        """Follow a new grammar for some tokens, and reject it if it is a dead end or slow.

        Otherwise it would delay or fail in a step that it shares with other generations.

        Raises: `BadRequest`.
        """
        for _ in range(TRIAL_TOKENS):
            allowed = matcher.allowed()
            if not allowed.any():
                raise BadRequest("the grammar is impossible: no text of this model follows it")
            if not matcher.accept(int(allowed.nonzero()[0][-1])):
                raise BadRequest("the grammar is too large: it takes too long to match")
            if matcher.finished:
                return


def _post(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Any],
    settle: Callable[[Any], None],
    value: object,
) -> None:
    """Settle a future from another thread, unless its waiter has gone."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(lambda: None if done.done() else settle(value))


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Mark the exception as retrieved: all who waited for it may have gone."""
    if not task.cancelled():
        task.exception()


def _is_late(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and isinstance(task.exception(), _TooSlow)


def _reason(error: Exception) -> str:
    """Return xgrammar's message without its timestamp, source file and stack trace."""
    first = str(error).strip().partition("\n")[0]
    return first.partition(": ")[2][:500] if first.startswith("[") else first[:500]
