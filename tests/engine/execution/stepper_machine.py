"""A stepper in virtual time, with a cache but without a model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from engine_helpers import generation, make_cache

from engine.execution.step_output import StepOutput, StepResult
from engine.execution.stepper import SWEEP_S, Stepper
from engine.protocol import MicroserveError
from engine.sampling.sampled import Sampled
from engine.scheduling.chunk import Chunk
from engine.scheduling.jobs import Generation, Send
from engine.scheduling.scheduler import Scheduler
from kvcache.cache import KVCache
from kvcache.lease.table import ReceiveLease
from kvcache.transport import MemoryNetwork
from kvcache.types import LeaseId, SeqId, TokenPos

STEP_S = 0.01
TOKEN_S = 0.001
PROMPT = list(range(100))


class Machine:
    """A stepper with a simulated clock, model and sampler."""

    def __init__(self, pages: int, budget: int, network: MemoryNetwork | None, name: str) -> None:
        self.now = 0.0
        self.cache: KVCache = make_cache(network, pages, name)
        self.scheduler = Scheduler(self.cache, token_budget=budget, max_batch=16, swap=False)
        self.stepper = Stepper(
            self.cache, self.scheduler, self, self.sample, self.deliver, lambda: self.now
        )
        self.outputs: list[StepOutput] = []
        self.steps: list[list[int]] = []  # the token counts of each step's chunks
        self.failure: Exception | None = None  # raised by the next step
        self.sampling_s = 0.0  # per step
        self.unsampled: dict[Generation, MicroserveError] = {}  # no token can be sampled for these

    def run(self, chunks: Sequence[Chunk]) -> None:
        counts = [len(chunk.tokens) for chunk in chunks]
        self.steps.append(counts)
        self.cache.begin_forward([chunk.seq_id for chunk in chunks], counts)
        self.now += STEP_S + TOKEN_S * sum(counts)
        if self.failure is not None:
            self.cache.abort_forward()
            failure, self.failure = self.failure, None
            raise failure
        for layer in range(self.cache.layout.layers):
            self.cache.put(layer)
        self.cache.end_forward()

    def sample(self, logits: None, generations: Sequence[Generation]) -> list[Sampled]:
        self.now += self.sampling_s
        return [
            Sampled(len(one.tokens) % 512, failure=self.unsampled.get(one)) for one in generations
        ]

    def deliver(self, outputs: list[StepOutput]) -> None:
        self.outputs += outputs

    def tokens(self, job: Generation) -> list[int]:
        return [
            output.sampled.token
            for output in self.outputs
            if output.generation is job and output.sampled is not None
        ]

    def run_until_idle(self) -> StepResult:
        """Step until there is nothing to compute."""
        while (result := self.stepper.step()).chunks:
            assert result.next_at == self.now
        return result


def sweep(machine: Machine, times: int) -> None:
    """Let the time of some sweeps pass."""
    for _ in range(times):
        machine.now += SWEEP_S
        machine.stepper.step()


def new_send(sender: Machine, receiver: Machine, begin: int, end: int) -> tuple[Send, ReceiveLease]:
    """Return a send of positions `[begin, end)` of `PROMPT`, and its lease."""
    lease, address = receiver.cache.prep_recv("r", PROMPT, end, 0, 5.0)
    if begin:  # a put begins at the watermark
        earlier = sender.cache.open_put(address, PROMPT, 0, begin)
        earlier.signal(TokenPos(begin))
        earlier.close().result(10)
    put = sender.cache.open_put(address, PROMPT, begin, end)
    # The match may exceed `end`, as in `engine.service.sends`.
    cached = min(sender.cache.add_sequence(SeqId(2), PROMPT), end)
    sender.cache.grow(SeqId(2), end)
    made = Send("s", SeqId(2), PROMPT[:end], begin, cached, put, Future(), sender.now, True)
    return made, lease


def cached_send(
    sender: Machine, receiver: Machine, begin: int = 0, end: int = 96
) -> tuple[Send, ReceiveLease]:
    """Return a send of a prompt of which the sender has cached 96 tokens, and its lease."""
    sender.stepper.submit(generation(1, PROMPT, max_tokens=1))
    sender.run_until_idle()
    return new_send(sender, receiver, begin, end)


class FakeMirror:
    """A `KVMirror` that notes its calls."""

    lease_id = LeaseId("m")
    landed = 0
    stopped: MicroserveError | None = None

    def __init__(self) -> None:
        self.over = False
        self.calls: list[str] = []

    def advance(self, seq_id: SeqId) -> None:
        self.calls.append(f"advance {seq_id}")

    def renew(self) -> None:
        self.calls.append("renew")

    def end(self) -> None:
        self.calls.append("end")
