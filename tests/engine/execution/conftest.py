from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from stepper_machine import Machine

from kvcache.transport import MemoryNetwork


@pytest.fixture
def new() -> Iterator[Callable[..., Machine]]:
    network, machines = MemoryNetwork(), []

    def make(pages: int = 64, budget: int = 64, name: str = "a") -> Machine:
        machines.append(Machine(pages, budget, network, name))
        return machines[-1]

    yield make
    for machine in machines:
        machine.cache.check_integrity()
        use = machine.cache.page_use()
        assert use.free + use.cached + use.leased == use.total
        machine.cache.transport.close()
