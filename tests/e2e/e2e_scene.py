"""One request between two engines, brought to a chosen moment for a test to disturb."""

from __future__ import annotations

import signal
from collections.abc import Callable

from e2e_faults import (
    LEASE_MS,
    PAGE,
    SLACK_S,
    Call,
    Generation,
    Lease,
    Memory,
    kind_of,
    prompt_of,
    until,
)
from engine_process import EngineProcess

PROMPT, DECOY, OTHER = (prompt_of(name, 513) for name in ("prompt", "decoy", "other"))
END = len(PROMPT) - 1
TOKENS = 64  # the length of the disturbed generation
TRIES = 10


class Missed(Exception):
    """The moment had passed before the test could disturb it; the test tries again."""


def ends(outcome: str) -> None:
    """Check that a call before the moment succeeded.

    Raises: `Missed` if the lease expired, as it may on a busy machine.
    """
    if outcome == "lease_expired":
        raise Missed
    assert outcome == "ok"


class Scene:
    """A sender, a receiver with a canary in each page, and one request between them."""

    def __init__(self, running: list[EngineProcess]) -> None:
        self.running = running
        self.engine = dict(zip(("sender", "receiver"), running, strict=True))
        self.epoch = {name: one.state()["epoch"] for name, one in self.engine.items()}
        self.memory = Memory(self.receiver)
        self.memory.fill()
        self.leases: list[Lease] = []
        self.calls: dict[str, Call] = {}

    @property
    def sender(self) -> EngineProcess:
        return self.engine["sender"]

    @property
    def receiver(self) -> EngineProcess:
        return self.engine["receiver"]

    @property
    def lease(self) -> Lease:
        return self.leases[0]

    @property
    def landed(self) -> int:
        return self.memory.landed(self.lease)

    # Actions that bring a request to a step

    def prepare(self) -> None:
        self.leases.append(Lease(self.receiver, "r", PROMPT, END))

    def prepare_for_long(self) -> None:
        self.leases.append(Lease(self.receiver, "r", PROMPT, END, lease_ms=20_000))

    def send(self) -> None:
        self.calls["send"] = Call(lambda: self.lease.send(self.sender))

    def send_another(self) -> None:
        """Keep the sender busy: the next send claims its lease and queues behind this one."""
        decoy = Lease(self.receiver, "decoy", DECOY, END)
        self.leases.append(decoy)
        self.calls["send another"] = Call(lambda: decoy.send(self.sender))
        self._during("send another", lambda: self.memory.landed(decoy) > 0, "the other send")

    def until_claimed(self) -> None:
        self._during("send", lambda: self.memory.claimed(self.lease), "the claim")

    def until_some_landed(self) -> None:
        self._during("send", lambda: self.landed > 0, "the first chunk")

    def until_sent(self) -> None:
        ends(self.calls.pop("send").outcome())

    def start(self) -> None:
        self.calls["start"] = Generation(
            self.receiver,
            PROMPT,
            request_id="r",
            begin=END,
            lease_id=self.lease.id,
            max_tokens=TOKENS,
        )

    def until_it_waits(self) -> None:
        self._during("start", lambda: self.receiver.state()["waiting"] == 1, "start_generate")

    def until_generating(self) -> None:
        self._during("start", lambda: bool(self.generation.tokens), "the first token")

    def _during(self, name: str, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds. Raises `Missed` if the call has ended before."""
        call = self.calls[name]
        until(lambda: condition() or call.done, what)
        if not condition():
            ends(call.outcome())
            raise Missed

    def commit(self) -> None:
        ends(kind_of(self.receiver.post("commit", lease_id=self.lease.id)))

    def release(self) -> None:
        self.lease.release()

    def freeze(self) -> None:
        """Stop both engines. Else the moment may pass while one of them takes a signal."""
        for engine in self.engine.values():
            engine.signal(signal.SIGSTOP)

    @property
    def generation(self) -> Generation:
        generation = self.calls["start"]
        assert isinstance(generation, Generation)
        return generation

    # Checks that the moment has not passed

    def nothing_landed(self) -> bool:
        return not self.landed and not self.memory.written() & set(self.lease.pages)

    def some_landed(self) -> bool:
        return 0 < self.landed < END

    def still_generating(self) -> bool:
        return len(self.generation.tokens) < TOKENS


def check_it_rests(engine: EngineProcess) -> None:
    """Check that every page is returned within the lease's time, and the engine's integrity."""
    engine.at_rest(LEASE_MS / 1000 + SLACK_S)


def check_integrity(engine: EngineProcess) -> None:
    assert engine.http.get("/microserving/integrity").json() == {"ok": True}


def check_canaries(scene: Scene) -> None:
    """Check that only leased pages, and those of the receiver's own generation, were written."""
    leased = {page for lease in scene.leases for page in lease.pages}
    foreign = scene.memory.written() - leased
    grown = TOKENS // PAGE + 1 if "start" in scene.calls else 0
    assert 0 not in foreign and len(foreign) <= grown
