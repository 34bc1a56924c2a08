from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

from engine.protocol import Sampling
from engine.scheduling.jobs import Generation, Send
from kvcache.types import SeqId


def test_a_new_generation_has_computed_nothing():
    job = Generation("r", SeqId(1), [5, 6, 7, 8], 3, Sampling(), frozenset())
    assert (job.target, list(job.output)) == (4, [8])
    assert (job.forks, job.priority, job.cached, job.generated) == (0, 0, 0, 0)
    assert not job.started
    assert job.matcher is job.fork_of is job.begin is job.mirror is None


def test_a_new_send_has_the_usual_priority_and_has_not_failed():
    put = cast(Any, None)
    job = Send("s", SeqId(1), [5, 6, 7], 1, 2, put, Future(), 4.5, True)
    assert (job.target, job.priority, job.computed_at) == (3, 0, 0.0)
    assert job.failure is None


def test_jobs_are_compared_by_identity():
    jobs = [Generation("r", SeqId(1), [5], 1, Sampling(), frozenset()) for _ in range(2)]
    assert len(set(jobs)) == 2 and jobs[0] != jobs[1]
