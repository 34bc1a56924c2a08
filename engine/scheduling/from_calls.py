"""Jobs from the calls that ask for them: the same for an engine's service and in virtual time."""

from __future__ import annotations

from concurrent.futures import Future

from engine.protocol import RemoteSend, RemoteSendReply, StartGenerate, generation_begin
from engine.scheduling.jobs import Generation, Send
from kvcache.errors import NoCapacity
from kvcache.lease import Put
from kvcache.sequences import SequenceCache
from kvcache.types import SeqId

__all__ = ["generation_of", "reserve_send"]


def generation_of(call: StartGenerate, seq_id: SeqId, eos: frozenset[int]) -> Generation:
    """Return the generation that a call asks for; `eos` ends it unless the call ignores that."""
    return Generation(
        request_id=call.request_id,
        seq_id=seq_id,
        tokens=call.prompt + call.output,
        prompt_len=len(call.prompt),
        sampling=call,
        stop_ids=frozenset(call.stop_token_ids) | (frozenset() if call.ignore_eos else eos),
        forks=call.forks,
        fork_of=call.fork_of,
        priority=call.priority,
        asked=_asked(call),
    )


def _asked(call: StartGenerate) -> int:
    """Return the position from which a call wants tokens to be computed.

    A fork gets the prompt from another generation, but for the last token.
    """
    if call.fork_of is not None:
        return len(call.prompt) + len(call.output) - 1
    return generation_begin(call) or 0


def reserve_send(
    call: RemoteSend,
    begin: int,
    end: int,
    put: Put,
    cache: SequenceCache,
    seq_id: SeqId,
    arrived: float,
) -> Send:
    """Create a send of `prompt[begin:end]`, with its sequence and all pages that it needs.

    `arrived` is in seconds, by the clock of the stepper. Raises `NoCapacity`; loans are
    called back then, and nothing else changes.
    """
    with cache.lock:
        # The match may exceed `end`: a cached page can be sent in part.
        cached = min(cache.add_sequence(seq_id, call.prompt), end)
        try:
            cache.grow(seq_id, end, newcomer=True)
        except NoCapacity:
            cache.remove_sequence(seq_id)
            cache.call_back(end - cached)
            raise
    done: Future[RemoteSendReply] = Future()
    done.set_running_or_notify_cancel()  # a caller that stops waiting cannot cancel it
    return Send(
        request_id=call.request_id,
        seq_id=seq_id,
        tokens=call.prompt[:end],
        begin=begin,
        cached=cached,
        put=put,
        done=done,
        arrived=arrived,
        started=True,
        priority=call.priority,
    )
