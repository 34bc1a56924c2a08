"""Which Host and Origin headers are allowed."""

from __future__ import annotations

import pytest

from engine.protocol import Forbidden
from engine.web import AllowedHosts, check_origin, is_loopback


def allows(hosts: AllowedHosts, header: str | None) -> bool:
    try:
        hosts.check(header)
    except Forbidden as refused:
        assert refused.code == "host_not_allowed"
        return False
    return True


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("localhost", True),
        ("LocalHost:8000", True),
        ("localhost.", True),
        ("app.localhost:1", True),
        ("127.0.0.1:8000", True),
        ("127.8.8.8", True),
        ("10.1.2.3:80", True),  # no name, so no rebinding
        ("[::1]:8000", True),
        ("[2001:db8::1]", True),
        (None, True),  # HTTP/1.0
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("evillocalhost", False),
        ("127.0.0.1.nip.io", False),
        ("127.0.0.1@evil.example", False),
        ("evil.example#localhost", False),
        ("localhost/", False),
        ("localhost:8000:1", False),
        ("localhost:x", False),
        ("[localhost]", False),
        ("::1", False),  # needs brackets
        ("", False),
        (":8000", False),
        (" localhost", False),
        ("local\udcffhost", False),
    ],
)
def test_a_server_on_loopback_has_local_names_and_addresses(header: str | None, allowed: bool):
    for hosts in (AllowedHosts.of("", "127.0.0.1"), AllowedHosts.of("", "localhost")):
        assert allows(hosts, header) is allowed
        assert allows(hosts, header) is allowed  # also once it is known
        assert not hosts.enforced


def test_the_default_depends_on_the_address():
    assert allows(AllowedHosts.of("", "Box.lan"), "box.LAN:8000")
    assert not allows(AllowedHosts.of("", "box.lan"), "lan")
    for everywhere in ("0.0.0.0", "::", ""):
        assert allows(AllowedHosts.of("", everywhere), "router.default.svc:8000")
    assert allows(AllowedHosts.of("", "127.0.0.1", "http://pod-3.engines:8100"), "pod-3.engines")
    for malformed in ("http://[x", "http://a@b/", "nothing"):
        assert not allows(AllowedHosts.of("", "127.0.0.1", malformed), "b")


def test_a_list_adds_names_and_is_enforced():
    for bound in ("127.0.0.1", "0.0.0.0"):
        hosts = AllowedHosts.of("a.example, B.example.,", bound)
        assert hosts.enforced
        assert allows(hosts, "A.example:80") and allows(hosts, "b.example")
        assert allows(hosts, "localhost:8000") and allows(hosts, "10.1.2.3")
        assert not allows(hosts, "c.example") and not allows(hosts, "")
        assert hosts.is_local("a.example:1") and not hosts.is_local("10.1.2.3")
    hosts = AllowedHosts.of("a.example,*", "127.0.0.1")
    assert allows(hosts, "anything") and not hosts.enforced
    assert not hosts.is_local("anything")


def test_the_memory_of_accepted_headers_is_bounded():
    hosts = AllowedHosts.of("", "0.0.0.0")
    for number in range(10_000):
        hosts.check(f"name-{number}")
    assert len(hosts._known) == 64
    hosts = AllowedHosts.of("", "127.0.0.1")
    for header in ("localhost", "evil.example"):
        assert allows(hosts, header) is (header == "localhost")
    assert hosts._known == {"localhost"}


@pytest.mark.parametrize(
    "name", ["localhost", "a.localhost", "127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"]
)
def test_loopback(name: str):
    assert is_loopback(name)


@pytest.mark.parametrize("name", ["", "10.0.0.1", "::", "0.0.0.0", "localhost.example", "127.1"])
def test_not_loopback(name: str):
    assert not is_loopback(name)


HERE = {"host": "localhost:8000"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:8000"},
        {"origin": "https://LOCALHOST:8000"},
        {"origin": "http://localhost:8000", "host": "LocalHost:8000"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        # A reverse proxy that sets Host to its own destination.
        {"sec-fetch-site": "same-origin", "origin": "https://ui.example"},
    ],
)
def test_calls_by_no_page_or_by_one_of_the_same_site(headers: dict[str, str]):
    check_origin({**HERE, **headers})


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:3000"},
        {"origin": "http://localhost"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://[x"},
        {"origin": "http://localhost:8000@evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},  # another port
        {"sec-fetch-site": ""},
        {"sec-fetch-site": "cross-site", "origin": "http://localhost:8000"},
    ],
)
def test_calls_by_pages_of_other_sites(headers: dict[str, str]):
    with pytest.raises(Forbidden) as refused:
        check_origin({**HERE, **headers})
    assert refused.value.code == "cross_site"
