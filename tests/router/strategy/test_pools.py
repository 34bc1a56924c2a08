"""Pools of engines that a strategy narrows: by label, by capability, by what exchanges KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import ALL_CAPABILITIES, ModelInfo
from router.engines.backend import Backend
from router.engines.circuit_breaker import CircuitBreaker
from router.strategy.cluster import Cluster
from router.strategy.engine import Engine


class Made:
    """The cluster of an attempt on some engines: by name, role, labels, KV and what they lack."""

    def __init__(self, *engines: tuple[str, dict[str, Any]]) -> None:
        self.fallbacks: list[str] = []
        registry = SimpleNamespace(turn=lambda pool: 0)
        backends = [self._backend(name, **fields) for name, fields in engines]
        attempt: Any = SimpleNamespace(
            backends=backends, alone=len(backends) == 1, fallback=self._fallback,
            runtime=SimpleNamespace(registry=registry),
        )  # fmt: skip
        self.cluster = Cluster(attempt, {})

    @staticmethod
    def _backend(
        name: str, role: str = "any", kv: str = "f", lacks: str = "", **labels: str
    ) -> Any:
        client: Any = SimpleNamespace(url=f"http://{name}:1")
        backend = Backend(client, CircuitBreaker(5, 5.0, lambda: 0.0), id=name)
        backend.role, backend.labels = role, labels  # type: ignore[assignment]
        can = [each for each in ALL_CAPABILITIES if each != lacks]
        backend.model = ModelInfo.model_construct(fingerprint=kv, capabilities=can)
        return backend

    def _fallback(self, name: str, *, once: bool = False) -> None:
        assert once
        self.fallbacks.append(name)

    def __getitem__(self, name: str) -> Engine:
        return next(engine for engine in self.cluster.engines if engine.id == name)


def ids(pool: Any) -> list[str]:
    return [engine.id for engine in pool]


def test_a_pool_is_chosen_by_labels():
    made = Made(
        ("a", {"kind": "vllm", "zone": "1"}), ("b", {"kind": "own", "zone": "1"}),
        ("c", {"kind": "vllm", "zone": "2"}), ("d", {"role": "decode", "zone": "1"}),
    )  # fmt: skip
    pools = made.cluster
    assert ids(pools.engines.where(kind="vllm")) == ["a", "c"]
    assert ids(pools.engines.where(kind="vllm", zone="2")) == ["c"]
    assert ids(pools.decode.where(zone="1")) == ["d"]
    assert ids(pools.decode.where(kind="own")) == ["b"]  # of another role
    assert ids(pools.engines.where()) == ["a", "b", "c", "d"]
    assert made.fallbacks == []
    assert ids(pools.decode.where(kind="none")) == ["d"]
    assert made.fallbacks == ["unlabelled"]
    # What is excluded is replaced by another engine with the label.
    here = pools.engines.where(kind="vllm")
    assert here.least_loaded(exclude=made["a"]).id == "c"
    assert here.where(zone="2").least_loaded(exclude=made["c"]).id == "c"


def test_a_pool_is_chosen_by_capabilities():
    made = Made(
        ("a", {"lacks": "pin"}), ("b", {"lacks": "commit"}), ("c", {}), ("d", {"role": "decode"}),
    )  # fmt: skip
    pools = made.cluster
    assert ids(pools.engines.able("pin")) == ["b", "c", "d"]
    assert ids(pools.engines.able("pin", "commit")) == ["c", "d"]
    assert ids(pools.engines.able()) == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match="no capability 'pins'"):
        pools.engines.able("pins")  # type: ignore[arg-type]
    lone = Made(("a", {"lacks": "pin"}), ("b", {"lacks": "pin"}))
    assert ids(lone.cluster.engines.able("pin")) == ["a", "b"]  # calling it raises
    assert made.fallbacks == lone.fallbacks == []


def test_a_pool_has_the_engines_that_exchange_kv_with_one():
    made = Made(
        ("p1", {"role": "prefill"}), ("p2", {"role": "prefill", "kv": "g"}),
        ("p3", {"role": "prefill", "lacks": "remote_send"}), ("d1", {"role": "decode"}),
        ("d2", {"role": "decode", "kv": "g", "lacks": "prep_recv"}),
        ("d3", {"role": "decode", "kv": "h"}),
    )  # fmt: skip
    pools = made.cluster
    assert ids(pools.prefill.sending_to(made["d1"])) == ["p1"]
    assert ids(pools.decode.receiving_from(made["p1"])) == ["d1"]
    assert ids(pools.engines.sending_to(made["d1"])) == ["p1", "d1"]
    assert ids(pools.prefill.receiving_from(made["d2"])) == ["p2"]
    assert made.fallbacks == []
    assert ids(pools.prefill.sending_to(made["d2"])) == ["d2"]  # it cannot receive
    assert ids(pools.prefill.sending_to(made["d3"])) == ["d3"]
    assert ids(pools.decode.receiving_from(made["p3"])) == ["p3"]
    assert made.fallbacks == ["not_sent"] * 3
    lone = Made(("a", {}))
    assert ids(lone.cluster.prefill.sending_to(lone["a"])) == ["a"]
    assert lone.fallbacks == []  # the attempt says so: `collapsed`


def test_an_engine_that_has_left_the_cluster_is_paired_too():
    """As a drained one, whose generations move."""
    made, gone = Made(("a", {}), ("b", {"kv": "g"})), Made(("old", {"kv": "g"}))
    assert ids(made.cluster.decode.receiving_from(gone["old"])) == ["b"]
    lost = Made(("old", {"kv": "h"}))
    assert ids(made.cluster.decode.receiving_from(lost["old"])) == ["old"]
    assert made.fallbacks == ["not_sent"]
