"""Which engines EndpointSlices name."""

from __future__ import annotations

import msgspec
import pytest
from kube_api import endpoint, slice_of

from router.discovery.slices import MOST_ENGINES, EndpointSlice, engines_of


def found(*slices, known=()):
    return engines_of((msgspec.convert(one, EndpointSlice) for one in slices), known)


@pytest.mark.parametrize(
    ("conditions", "new", "known"),
    [
        ({}, True, True),
        ({"ready": False, "serving": False}, False, True),
        ({"ready": False, "serving": True, "terminating": True}, False, False),
        ({"ready": True, "serving": False}, False, True),  # publishNotReadyAddresses
        ({"ready": None, "serving": None, "terminating": None}, True, True),  # unknown
        ({"ready": False, "serving": None}, False, True),  # before Kubernetes 1.26
    ],
)
def test_conditions(conditions, new, known):
    one, url = slice_of("s", endpoint("10.0.0.1", **conditions)), "http://10.0.0.1:8100"
    assert (url in found(one), url in found(one, known=[url])) == (new, known)


def test_a_pod_of_two_families_counts_once():
    four, six = endpoint("10.0.0.1"), endpoint("fd00::1")
    six["targetRef"] = four["targetRef"]
    alone = endpoint("fd00::2")
    slices = slice_of("b", six, alone, addressType="IPv6"), slice_of("a", four)
    assert list(found(*slices)) == ["http://10.0.0.1:8100", "http://[fd00::2]:8100"]


def test_ports():
    ports = [{"name": "kv", "port": 1}, {"name": "https", "port": 8443}]
    assert list(found(slice_of("s", endpoint("10.0.0.1"), ports=ports))) == [
        "https://10.0.0.1:8443"
    ]
    ports = [{"name": "", "port": 9}, {"port": 10}]
    assert list(found(slice_of("s", endpoint("10.0.0.1"), ports=ports))) == ["http://10.0.0.1:9"]
    for none in ([], None, [{"name": "http"}], [{"name": "http", "port": 10**9}]):
        assert not found(slice_of("s", endpoint("10.0.0.1"), ports=none))


@pytest.mark.parametrize("label", ["prefill", "decode", "any", "engine"])
def test_a_service_may_say_the_role(label):
    one = slice_of("s", endpoint("10.0.0.1"), labels={"app.kubernetes.io/component": label})
    assert found(one)["http://10.0.0.1:8100"].role == (None if label == "engine" else label)


def test_what_is_no_address_is_left_out():
    bad = [endpoint(text) for text in ("", "a b", "x/y?", "[", "u@h")]
    empty = {**endpoint("10.0.0.2"), "addresses": []}
    names = slice_of("f", endpoint("host.example"), addressType="FQDN")
    slices = slice_of("s", *bad, empty, endpoint("10.0.0.1")), names, slice_of("n", endpoints=None)
    assert list(found(*slices)) == ["http://10.0.0.1:8100"]


def test_there_is_a_bound():
    many = [endpoint(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}") for n in range(MOST_ENGINES + 5)]
    assert len(found(slice_of("s", *many))) == MOST_ENGINES
