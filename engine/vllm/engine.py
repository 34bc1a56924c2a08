"""A vLLM engine behind the microserving calls: `ServedEngine` over `AsyncLLM` and its core."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from engine.execution.released_ids import ReleasedIds
from engine.models import ModelFolder
from engine.protocol import (
    BadRequest,
    Capability,
    Draining,
    DuplicateRequest,
    EngineConfig,
    EngineState,
    EngineStatistics,
    EngineTimeline,
    Extend,
    ExtendReply,
    Internal,
    Lease,
    Limits,
    MicroserveError,
    MirrorGeneration,
    ModelInfo,
    PageCounts,
    Pin,
    PrepRecv,
    PrepRecvReply,
    Release,
    RemoteSend,
    RemoteSendReply,
    StartGenerate,
    Unsupported,
    resolve_position,
)
from engine.service import EngineMetrics, EventMuxes, GenerationStream, PrefixFeed
from engine.vllm.core_client import CoreClient
from engine.vllm.generations import Generations
from engine.vllm.names import CachedNames
from engine.vllm.sends import Sends

__all__ = ["VllmEngine"]

log = logging.getLogger(__name__)

STUCK_S = 60.0  # without a step while requests run: counts as a hang
WATCH_S = 1.0  # between two looks at whether the core lives
LEASES_EVERY_S = 0.25  # how often leases are looked at, while there are any
CAPABILITIES: tuple[Capability, ...] = ("prep_recv", "remote_send", "commit", "pin", "prefixes")


class VllmEngine:
    """Implements `engine.api.served_engine.ServedEngine`. Lives on one event loop."""

    lending = None
    borrowing = home_orders = None

    def __init__(
        self,
        llm: Any,
        model: ModelFolder,
        config: EngineConfig,
        epoch: int,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """`tasks` are the parents of what runs here. `connect` completes it."""
        self.metrics = EngineMetrics(config.model)
        self.muxes = EventMuxes()
        self.names = CachedNames()
        self.prefixes = PrefixFeed(self.names)
        self.draining = False
        self._llm = llm
        self._core = CoreClient(llm)
        self._model = model
        self._config = config
        self._epoch = epoch
        self._tasks = tasks
        self._tokenizer = Tokenizer.from_str(model.tokenization.tokenizer_json)
        self._released = ReleasedIds()
        self._pages = PageCounts(
            total=0, free=0, cached=0, leased=0, active=0, quarantined=0, pinned=0
        )
        self._leases: list[Lease] = []
        self._lease_ids: defaultdict[str, set[str]] = defaultdict(set)  # by request
        self._scheduled = 0  # requests in the latest step
        self._stepped_at = time.monotonic()
        self._changed = asyncio.Event()
        self._hello: dict[str, Any] = {}
        self._context = self._vocab_size = 0
        self._limits: Limits
        self._generations: Generations
        self._sends: Sends
        self._following: asyncio.Task[None]
        self._watching: asyncio.Task[None]

    async def connect(self) -> None:
        """Ask the engine core what it holds, and follow it from now on."""
        self._hello = await self._core.call("hello")
        settings = self._llm.vllm_config
        vocabulary = settings.model_config.get_vocab_size()
        room = self._hello["total"] * self._hello["page_size"]
        context = settings.model_config.max_model_len
        self._context = min(context, room)
        self._vocab_size = vocabulary
        self._limits = Limits(vocabulary, context, room)
        most = settings.scheduler_config.max_num_seqs + self._config.max_waiting
        eos = frozenset(self._model.tokenization.eos_token_ids)
        self._generations = Generations(
            self._llm,
            self._core,
            self._limits,
            self.metrics,
            self._released,
            self._tokenizer,
            eos,
            self._tasks,
            self._changed.set,
            most=most,
        )
        self._sends = Sends(
            self._llm,
            self._core,
            self._limits,
            self.metrics,
            self._tasks,
            self._changed.set,
            most=most,
        )
        self._following = self._tasks.create_task(self._follow())
        self._watching = self._tasks.create_task(self._watch())
        self._changed.set()

    def on_note(self, note: dict[str, Any]) -> None:
        """Take in a note from the engine core."""
        if "step" in note:
            self._scheduled, self._stepped_at = note["step"], time.monotonic()
        elif "send" in note:
            self._sends.on_note(note)
        elif "landed" in note:
            self._generations.landed(note["landed"])
        if "added" in note:
            self.names.change(note["added"], note["removed"])
        if "pages" in note:
            self._pages = PageCounts(**note["pages"])

    @property
    def idle(self) -> bool:
        """Whether no generation, send or receive is under way, as far as the core has told."""
        return not (len(self._generations) or len(self._sends) or self._leases)

    def shut_down(self) -> None:
        """Refuse new calls and end running ones with an error, before the process exits."""
        self.draining = True
        self._generations.fail(Draining("this engine shuts down"))
        for request_id in self._sends:
            self._sends.abort(request_id)
        self.muxes.end()
        self.prefixes.end()

    def close(self) -> None:
        """End what runs here."""
        self._generations.fail(Draining("this engine shuts down"))
        self._following.cancel()
        self._watching.cancel()

    # The calls

    async def promote(self, prompt: list[int]) -> None:
        """There is no slower memory here that this project knows of."""
        self._admit(prompt)

    async def prep_recv(self, call: PrepRecv) -> PrepRecvReply:
        """Match `prompt[:end]`, take blocks for the rest, and return where to put it."""
        self._admit(call.prompt)
        self._released.check(call.request_id)
        end = resolve_position(call.end, len(call.prompt), "end")
        if self._lease_ids.get(call.request_id):
            raise DuplicateRequest(f"{call.request_id} has a lease", param="request_id")
        lease_ms = call.lease_ms or self._config.lease_ms
        self._lease_ids[call.request_id].add("")  # until its id is known
        try:
            reply = await self._core.call(
                "prep_recv",
                request_id=call.request_id,
                prompt=call.prompt,
                end=end,
                reserve=call.reserve,
                lease_s=lease_ms / 1e3,
            )
        except BaseException:
            self._lease_ids.pop(call.request_id, None)  # it may have been released, meanwhile
            raise
        lease_id = reply["lease_id"]
        self._lease_ids[call.request_id] = {lease_id}
        self._changed.set()
        try:
            self._released.check(call.request_id)  # it may have been, meanwhile
        except DuplicateRequest:
            await self._release(lease_id)
            raise
        self.metrics.prefix(end, reply["match_len"])
        return PrepRecvReply(
            lease_id=lease_id,
            kv_addr=reply["kv_addr"],
            match_len=reply["match_len"],
            end=end,
            expires_ms=lease_ms,
        )

    async def remote_send(self, call: RemoteSend) -> RemoteSendReply:
        """Put the KV of `prompt[begin:end]`, from the prefix cache or computed, layer by layer."""
        self._limits.check_prompt(call.prompt)
        self._released.check(call.request_id)
        return await self._sends.run(call)

    def may_wait(self, call: StartGenerate) -> bool:
        """Whether `start_generate` may wait for its KV."""
        return call.lease_id is not None

    async def start_generate(self, call: StartGenerate) -> GenerationStream:
        """Start a generation and return the stream of its events."""
        self._admit(call.prompt)
        self._released.check(call.request_id)
        return await self._generations.start(call)

    async def mirror(self, call: MirrorGeneration) -> None:
        raise Unsupported("a vLLM engine cannot mirror a generation")

    async def extend(self, call: Extend) -> ExtendReply:
        raise Unsupported("a vLLM engine cannot extend a lease")

    async def commit(self, lease_id: str) -> int:
        """Publish a landed lease to the prefix cache; return its number of tokens."""
        tokens = int((await self._core.call("commit", lease_id=lease_id))["tokens"])
        self._changed.set()
        return tokens

    async def pin(self, call: Pin) -> int:
        """Protect the cached part of `prompt` from eviction; return its number of tokens."""
        self._limits.check_prompt(call.prompt)
        return int((await self._core.call("pin", prompt=call.prompt))["tokens"])

    async def unpin(self, call: Pin) -> int:
        """End that protection; return the number of tokens that had it. Idempotent."""
        self._limits.check_prompt(call.prompt)
        return int((await self._core.call("unpin", prompt=call.prompt))["tokens"])

    async def release(self, call: Release) -> None:
        """End a lease, or everything that runs under a request id. Idempotent."""
        if (call.lease_id is None) == (call.request_id is None):
            raise BadRequest("give either lease_id or request_id", param="lease_id")
        if call.lease_id is not None:
            await self._release(call.lease_id)
            return
        if call.request_id is None:
            return
        self._released.add(call.request_id)
        self._sends.abort(call.request_id)
        for lease_id in self._lease_ids.pop(call.request_id, ()):
            if lease_id:
                await self._release(lease_id)
        await self._generations.abort(call.request_id)
        # Behind the abort, which vLLM takes in before it: the blocks are in the prefix cache then.
        await self._core.call("state")

    async def _release(self, lease_id: str) -> None:
        await self._core.call("release", lease_id=lease_id)
        self._changed.set()

    # Reports

    def model_info(self) -> ModelInfo:
        """Describe the model, for routers."""
        text = self._model.tokenization
        return ModelInfo(
            name=self._config.model,
            context_length=self._context,
            vocab_size=self._vocab_size,
            eos_token_ids=list(text.eos_token_ids),
            bos_token=text.bos_token,
            eos_token=text.eos_token,
            tokenizer_json=text.tokenizer_json,
            chat_template=text.chat_template,
            fingerprint=self._hello["fingerprint"],
            page_size=self._hello["page_size"],
            kv_bytes_per_token=self._hello["token_bytes"],
            layers=self._hello["layers"],
            add_bos=text.add_bos,
            capabilities=list(CAPABILITIES),
        )

    def state(self) -> EngineState:
        """Return blocks, leases and queues as they were when the engine core last told."""
        live = len(self._generations)
        running = min(self._scheduled, live)
        return EngineState(
            engine_id=self._config.engine_id,
            epoch=self._epoch,
            role=self._config.role,
            model=self._config.model,
            page_size=self._hello["page_size"],
            pages=self._pages,
            running=running,
            waiting=live - running,
            leases=self._leases,
            puts_in_flight=len(self._sends),
            prefix_tokens=len(self.names) * self._hello["page_size"],
            draining=self.draining,
            secret_digest=self._hello["secret_digest"],
        )

    def statistics(self) -> EngineStatistics:
        raise Unsupported("a vLLM engine keeps no statistics of its steps")

    def timeline(self, seconds: float) -> EngineTimeline:
        raise Unsupported("a vLLM engine keeps no time line of its steps")

    async def check_integrity(self) -> None:
        """Verify that every block has exactly the owners that vLLM and the leases say."""
        await self._core.call("check")

    def check_health(self) -> None:
        """Raise `Internal` if vLLM has failed, or makes no step while requests run."""
        if self._llm.errored:
            raise Internal("vLLM's engine core has ended")
        idle_s = time.monotonic() - self._stepped_at
        if len(self._generations) and idle_s > STUCK_S:
            raise Internal(f"vLLM has made no step for {idle_s:.0f} s")

    async def _watch(self) -> None:
        """Raise `Internal` when the engine core has ended: only a new process gets another."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._llm.errored:
                raise Internal("vLLM's engine core has ended, and this engine with it")

    async def _follow(self) -> None:
        """Keep leases and counts current: after each change, and while blocks may become free."""
        while True:
            try:
                # Blocks that no call holds any more become free when the last writes from them end.
                ending = self._pages.quarantined or (self.idle and self._pages.active)
                wait_s = LEASES_EVERY_S if self._leases or ending else None
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                state = await self._core.call("state")
            except MicroserveError as error:
                log.warning("the engine core does not tell its state: %s", error.message)
                await asyncio.sleep(LEASES_EVERY_S)
                continue
            self._leases = [Lease(**lease) for lease in state["leases"]]
            live = {lease.request_id for lease in self._leases}
            for request_id in set(self._lease_ids) - live:
                if "" not in self._lease_ids[request_id]:
                    del self._lease_ids[request_id]

    def _admit(self, prompt: Sequence[int]) -> None:
        if self.draining:
            raise Draining("this engine is draining")
        self._limits.check_prompt(prompt)
