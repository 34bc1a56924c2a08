"""The stages of a pipeline against a recursion over all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.planning.stages import Stages

SECONDS = st.integers(0, 20).map(lambda tenths: tenths / 10)


@given(
    st.integers(1, 7),
    st.lists(st.tuples(SECONDS, SECONDS, st.sampled_from([0.0, 0.0, 0.5, 3.0])), max_size=40),
)
def test_each_batch_waits_for_the_one_before_in_every_stage(count, batches):
    """`end(n, k) = max(end(n, k-1), end(n-1, k)) + s(n)`, batch by batch and stage by stage."""
    stages, free, ready = Stages(count), [0.0] * count, 0.0
    for gap, seconds, extra in batches:
        ready += gap
        at = max(ready, free[0]) + seconds + extra
        free[0] = at
        for stage in range(1, count):
            at = max(at, free[stage]) + seconds
            free[stage] = at
        assert stages.enter(ready, seconds, extra) == pytest.approx(at)
        assert stages.free_s == pytest.approx(free[0])
