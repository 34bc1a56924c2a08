from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_cluster import RayCluster


@pytest.fixture(scope="module")
def on() -> Iterator[RayCluster]:
    """A Ray cluster of several nodes on this machine, of the module's own."""
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.end()
