"""An engine dies or hangs at each step of the protocol. No page is lost or overwritten, no call
hangs, and the other engine, and the returning one, work at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from e2e_faults import (
    DEADLINE_S,
    FLAGS,
    LEASE_MS,
    SECRET,
    Alone,
    Generation,
    Lease,
    engines,
    kind_of,
    prompt_of,
    transfer,
    until,
)
from e2e_scene import (
    END,
    OTHER,
    PROMPT,
    TOKENS,
    TRIES,
    Missed,
    Scene,
    check_canaries,
    check_integrity,
    check_it_rests,
)
from engine_process import EngineProcess

THERE, BACK = prompt_of("there", 70), prompt_of("back", 50)
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@dataclass(frozen=True)
class Step:
    """The actions that lead to a step, a check that it has not passed, and exceptions to `ENDS`."""

    actions: tuple[Callable[[Scene], None], ...]
    still: Callable[[Scene], bool] = lambda _: True
    send_may_be: frozenset[str] = frozenset()
    generation_survives_the_sender: bool = False


S = Scene
STEPS = {
    "prepared": Step((S.prepare,)),
    "claimed": Step((S.prepare, S.send_another, S.send, S.until_claimed), S.nothing_landed),
    "in mid-put": Step((S.prepare, S.send, S.until_some_landed), S.some_landed),
    "landed": Step((S.prepare, S.send, S.until_sent)),
    "start waits for its signal": Step(
        (S.prepare, S.start, S.until_it_waits, S.send, S.until_some_landed), S.some_landed
    ),
    "generating": Step(
        (S.prepare, S.send, S.until_sent, S.start, S.until_generating),
        S.still_generating,
        generation_survives_the_sender=True,
    ),
    "committed": Step((S.prepare, S.send, S.until_sent, S.commit)),
    "released in mid-put": Step(
        (S.prepare, S.send, S.until_some_landed, S.release),
        S.some_landed,
        send_may_be=frozenset({"lease_expired"}),
    ),
}
GONE = {"peer_unreachable", "stale_epoch"}
# The outcomes of the calls under way. A dead receiver's memory lives as long as it is mapped, so a
# put into it may still succeed.
SEND_ENDS = {
    ("sender", KILL): {"cut"},
    ("sender", STOP): {"lease_expired"},
    ("receiver", KILL): {"ok", *GONE},
    ("receiver", STOP): {"ok"},
}
START_ENDS = {
    ("sender", KILL): "lease_expired",
    ("sender", STOP): "lease_expired",
    ("receiver", KILL): "cut",
    ("receiver", STOP): "ok",
}


# An ordinary run has each victim at each step, killed or stopped in turn.
CASES = [
    pytest.param(
        step,
        victim,
        number,
        id=f"{step}-{victim}-{how}",
        marks=[pytest.mark.thorough] * ((place + (victim == "receiver")) % 2 != (number is STOP)),
    )
    for place, step in enumerate(STEPS)
    for victim in ("sender", "receiver")
    for number, how in ((KILL, "killed"), (STOP, "stopped"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "victim", "number"), CASES)
def test_an_engine_fails(step: str, victim: str, number: signal.Signals, alone: Alone) -> None:
    other = "receiver" if victim == "sender" else "sender"
    for _ in range(TRIES):
        with engines(2) as running:
            scene = Scene(running)
            try:
                for action in STEPS[step].actions:
                    action(scene)
            except Missed:
                continue
            scene.freeze()
            if STEPS[step].still(scene):
                scene.engine[victim].signal(number)
                scene.engine[other].signal(signal.SIGCONT)
                after = {KILL: after_a_kill, STOP: after_a_stop}[number]
                after(scene, STEPS[step], victim, alone)
                return
    pytest.fail("the moment was missed each time")


def after_a_kill(scene: Scene, step: Step, victim: str, alone: Alone) -> None:
    other = "receiver" if victim == "sender" else "sender"
    survivor, old = scene.engine[other], scene.lease
    check_ends(scene, step, victim, KILL, alone)
    check_it_rests(survivor)
    check_canaries(scene)
    refused = GONE if victim == "receiver" else {"lease_expired"}
    if victim == "receiver":
        assert kind_of(old.send(survivor, as_id="to the dead")) in refused

    reborn = EngineProcess(*FLAGS, secret=SECRET, port=scene.engine[victim].port)
    scene.running.append(reborn)
    assert reborn.state()["epoch"] != scene.epoch[victim]
    assert transfer(survivor, reborn, THERE) == alone(THERE)
    assert transfer(reborn, survivor, BACK) == alone(BACK)
    for sender in (survivor, reborn) if victim == "receiver" else (reborn,):
        assert kind_of(old.send(sender, as_id="to the past")) in refused
    if victim == "receiver":
        late = Generation(reborn, PROMPT, request_id="late", lease_id=old.id)
        assert late.outcome() == "unknown_lease"
    for one in (survivor, reborn):
        check_it_rests(one)
    assert 0 not in scene.memory.written()


def after_a_stop(scene: Scene, step: Step, victim: str, alone: Alone) -> None:
    if victim == "sender":
        # The lease expires, and its pages are leased again before the sender continues.
        until(lambda: not scene.receiver.state()["leases"], "the lease's end")
        check_integrity(scene.receiver)
        check_canaries(scene)
        freed = {page for lease in scene.leases for page in lease.pages}
        new = Lease(scene.receiver, "new owner", OTHER, END, lease_ms=20_000)
        scene.leases.append(new)
        pages = scene.receiver.state()["pages"]
        if not pages["quarantined"] + pages["cached"] + pages["active"]:
            assert freed & set(new.pages)
        assert kind_of(new.send(alone.engine)) == "ok"
        content = scene.memory.read(new.pages)
        scene.sender.signal(signal.SIGCONT)
        check_ends(scene, step, victim, STOP, alone)
        until(lambda: not scene.sender.state()["puts_in_flight"], "the late sender's end")
        assert bool((scene.memory.read(new.pages) == content).all())
        check_canaries(scene)
        generation = Generation(
            scene.receiver, OTHER, request_id="new owner", begin=END, lease_id=new.id
        )
        assert generation.outcome() == "ok"
        assert generation.tokens == alone(OTHER)
    else:
        # The stopped receiver answers no call, but puts into it succeed.
        give_up = time.monotonic() + LEASE_MS / 1000
        while time.monotonic() < give_up:
            check_integrity(scene.sender)
        for name in {"send", "send another"} & set(scene.calls):
            assert scene.calls[name].outcome() in SEND_ENDS[victim, STOP] | step.send_may_be
        check_canaries(scene)
        scene.receiver.signal(signal.SIGCONT)
        check_ends(scene, step, victim, STOP, alone)
        check_it_rests(scene.receiver)
        check_canaries(scene)
    for one in (scene.sender, scene.receiver):
        check_it_rests(one)
    assert transfer(scene.sender, scene.receiver, THERE) == alone(THERE)
    assert transfer(scene.receiver, scene.sender, BACK) == alone(BACK)
    for one in (scene.sender, scene.receiver):
        check_it_rests(one)
    assert 0 not in scene.memory.written()


def check_ends(scene: Scene, step: Step, victim: str, number: signal.Signals, alone: Alone) -> None:
    """Check that each call under way ends in time with its outcome, and generations' tokens."""
    began = time.monotonic()
    for name, call in scene.calls.items():
        if isinstance(call, Generation):
            survives = victim == "sender" and step.generation_survives_the_sender
            assert call.outcome() == ("ok" if survives else START_ENDS[victim, number])
            whole = alone(PROMPT, TOKENS)
            assert call.tokens == (whole if call.outcome() == "ok" else whole[: len(call.tokens)])
        else:
            assert call.outcome() in SEND_ENDS[victim, number] | step.send_may_be, name
    assert time.monotonic() - began < DEADLINE_S
