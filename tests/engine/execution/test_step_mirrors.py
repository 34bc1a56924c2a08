from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest
from engine_helpers import generation
from stepper_machine import FakeMirror

from engine.execution.step_mirrors import StepMirrors
from engine.scheduling.jobs import Generation, Send
from kvcache.types import SeqId


def mirrored(number: int) -> tuple[Generation, FakeMirror]:
    job, mirror = generation(number, [1, 2]), FakeMirror()
    job.mirror = mirror
    return job, mirror


@pytest.fixture
def mirrors() -> StepMirrors:
    return StepMirrors()


def test_the_mirrors_of_computed_jobs_advance(mirrors: StepMirrors):
    (one, first), (two, second), plain = mirrored(1), mirrored(2), generation(3, [1])
    send = Send("s", SeqId(4), [1], 0, 0, cast(Any, None), Future(), 0.0, True)
    mirrors.advance([one, plain, send])  # none is known yet
    for job in (one, two, plain):
        mirrors.add(job)
    mirrors.advance([plain, send, one])
    assert (first.calls, second.calls) == (["advance 1"], [])
    mirrors.advance([two, one])
    assert (first.calls, second.calls) == (["advance 1"] * 2, ["advance 2"])


def test_all_mirrors_are_renewed_until_they_are_over(mirrors: StepMirrors):
    (one, first), (two, second) = mirrored(1), mirrored(2)
    mirrors.add(one)
    mirrors.add(two)
    mirrors.renew()
    first.over = True
    mirrors.renew()
    mirrors.renew()
    assert (first.calls, second.calls) == (["renew"], ["renew"] * 3)
    mirrors.advance([one, two])  # the one that is over has been dropped
    assert (first.calls, second.calls) == (["renew"], ["renew"] * 3 + ["advance 2"])


def test_an_ended_generation_ends_its_mirror_once(mirrors: StepMirrors):
    (one, first), (two, second) = mirrored(1), mirrored(2)
    mirrors.add(one)
    mirrors.add(two)
    for _ in range(2):
        mirrors.end(one)
    mirrors.end(generation(3, [1]))  # has none
    mirrors.advance([one, two])
    mirrors.renew()
    assert (first.calls, second.calls) == (["end"], ["advance 2", "renew"])


def test_a_second_mirror_replaces_the_first(mirrors: StepMirrors):
    job, first = mirrored(1)
    mirrors.add(job)
    job.mirror = second = FakeMirror()
    mirrors.add(job)
    mirrors.advance([job])
    mirrors.end(job)
    assert (first.calls, second.calls) == ([], ["advance 1", "end"])
