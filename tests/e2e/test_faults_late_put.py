"""A sender is stopped during a put and continues after its lease has ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from e2e_faults import LEASE_MS, Alone, Generation, Lease, NoRoom, engines, kind_of, started, until
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

pytestmark = pytest.mark.slow
KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
POOL = ("--pool-pages", "80")  # leases get half of it: there is no room for two prompts


@contextmanager
def stopped(
    writing: bool, actions: tuple[Callable[[Scene], None], ...], *flags: str
) -> Iterator[Scene]:
    """Yield a scene whose sender is stopped during a put.

    If `writing`, it is within a copy and holds the write right; else it is between two copies.
    """
    for _ in range(TRIES):
        with engines(2, *flags) as running:
            scene = Scene(running)
            try:
                for action in actions:
                    action(scene)
                stop(scene, writing)
            except Missed:
                continue
            yield scene
            return
    pytest.fail("the moment was missed each time")


def stop(scene: Scene, writing: bool) -> None:
    """Stop the sender during its put.

    Raises: `Missed` if the put ended first.
    """
    while scene.some_landed():
        if scene.memory.writing(scene.lease) == writing:
            scene.sender.signal(STOP)
            if scene.memory.writing(scene.lease) == writing and scene.some_landed():
                return
            scene.sender.signal(CONT)
    raise Missed


SENDING = (Scene.prepare, Scene.send, Scene.until_some_landed)


def new_owner(scene: Scene) -> Lease:
    """Return the lease of another request once there is room; it takes the first lease's pages."""

    def opened() -> bool:
        try:
            new = Lease(scene.receiver, "new owner", OTHER, END, lease_ms=20_000)
        except NoRoom:
            return False
        scene.leases.append(new)
        return True

    until(opened, "room")
    new = scene.leases[-1]
    assert set(new.pages) & set(scene.lease.pages)
    return new


def test_a_sender_stopped_between_two_copies(alone: Alone) -> None:
    """The pages are leased again at once, and the late put does not write to them."""
    with stopped(False, SENDING, *POOL) as scene:
        new = new_owner(scene)
        assert scene.receiver.state()["pages"]["quarantined"] == 0
        check_integrity(scene.receiver)
        half = END // 2
        assert kind_of(new.send(alone.engine, end=half)) == "ok"
        content = scene.memory.read(new.pages)
        scene.sender.signal(CONT)
        assert scene.calls["send"].outcome() == "lease_expired"
        assert scene.memory.landed(new) == half
        assert bool((scene.memory.read(new.pages) == content).all())
        check_canaries(scene)
        # The new owner's own sender still has its claim.
        assert kind_of(new.send(alone.engine, begin=half, as_id="the rest")) == "ok"
        assert started(new) == alone(OTHER)
        for one in scene.running:
            check_it_rests(one)
        assert 0 not in scene.memory.written()


@pytest.mark.parametrize("ending", [CONT, KILL], ids=["lets go", "dies"])
def test_a_sender_stopped_within_a_copy(ending: signal.Signals, alone: Alone) -> None:
    """The pages stay in quarantine until the sender drops its write right or dies."""
    with stopped(True, SENDING, *POOL) as scene:
        until(lambda: not scene.receiver.state()["leases"], "the lease's end")
        give_up = time.monotonic() + 2 * LEASE_MS / 1000
        while time.monotonic() < give_up:
            pages = scene.receiver.state()["pages"]
            assert pages["quarantined"] == len(scene.lease.pages)
            assert pages["free"] + pages["quarantined"] == pages["total"]
            with pytest.raises(NoRoom):
                Lease(scene.receiver, "no owner", OTHER, END)
        check_integrity(scene.receiver)
        check_canaries(scene)
        # Requests that fit beside the quarantined pages are served.
        small = Generation(scene.receiver, PROMPT[:40], request_id="small")
        assert small.outcome() == "ok"
        assert small.tokens == alone(PROMPT[:40])
        scene.sender.signal(ending)
        assert scene.calls["send"].outcome() == ("lease_expired" if ending == CONT else "cut")
        until(lambda: not scene.receiver.state()["pages"]["quarantined"], "quarantine's end")
        new = new_owner(scene)
        assert kind_of(new.send(alone.engine)) == "ok"
        assert started(new) == alone(OTHER)
        check_it_rests(scene.receiver)
        assert 0 not in scene.memory.written()


@pytest.mark.parametrize("writing", [True, False], ids=["within a copy", "between two copies"])
def test_a_generation_starts_from_what_has_landed(writing: bool, alone: Alone) -> None:
    """The generation does not wait for the stopped writer, whose late put does not change it."""
    with stopped(writing, SENDING) as scene:
        landed = scene.landed
        scene.calls["start"] = generation = Generation(
            scene.receiver, PROMPT, request_id="r", lease_id=scene.lease.id, max_tokens=TOKENS
        )
        scene.until_generating()
        quarantined = scene.receiver.state()["pages"]["quarantined"]
        # The page with the watermark has been copied, and no page below it is written again.
        assert quarantined == (len(scene.lease.pages) - landed // 16 if writing else 0)
        check_integrity(scene.receiver)
        scene.sender.signal(CONT)
        assert scene.calls["send"].outcome() == "lease_expired"
        assert generation.outcome() == "ok"
        assert generation.tokens == alone(PROMPT, TOKENS)
        for one in scene.running:
            check_it_rests(one)
        # The pages that it left in the receiver's prefix cache are right as well.
        again = Generation(scene.receiver, PROMPT, request_id="again", max_tokens=TOKENS)
        assert again.outcome() == "ok"
        assert again.tokens == generation.tokens
        assert 0 not in scene.memory.written()


@pytest.mark.parametrize("number", [KILL, STOP], ids=["killed", "stopped"])
def test_another_sender_continues_from_the_watermark(number: signal.Signals, alone: Alone) -> None:
    """A dead writer's KV is kept; a stopped writer later finds that it has lost its claim."""
    with stopped(False, (Scene.prepare_for_long, *SENDING[1:])) as scene:
        if number == KILL:
            scene.sender.signal(KILL)
        landed = scene.landed
        refused = scene.lease.send(alone.engine, begin=landed + 16, as_id="too far")
        assert kind_of(refused) == "bad_range"
        assert kind_of(scene.lease.send(alone.engine, begin=landed, as_id="second")) == "ok"
        content = scene.memory.read(scene.lease.pages)
        if number == STOP:
            scene.sender.signal(CONT)
        assert scene.calls["send"].outcome() == ("cut" if number == KILL else "lease_expired")
        assert bool((scene.memory.read(scene.lease.pages) == content).all())
        check_canaries(scene)
        assert started(scene.lease) == alone(PROMPT)
        check_it_rests(scene.receiver)
