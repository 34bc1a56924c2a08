from __future__ import annotations

import pytest
from kv_helpers import small_layout

from kvcache.errors import Internal
from kvcache.memory import LocalRegion, SharedRegion
from kvcache.transport.base import Registered


def test_a_transport_has_one_region_of_its_kind():
    own, region = Registered(LocalRegion), LocalRegion(small_layout(3))
    with pytest.raises(Internal, match="no memory"):
        own.get()
    with pytest.raises(Internal, match="cannot be registered"):
        Registered(SharedRegion).set(region)
    assert own.set(region) is own.get() is region
    with pytest.raises(Internal, match="cannot be registered"):
        own.set(LocalRegion(small_layout(3)))
    assert own.get() is region
