"""Who may use the admin API."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import Forbidden, MicroserveError, Unauthorized
from engine.web import AllowedHosts
from router.api.admin.access import Body, check_admin, same_key
from router.base import UnsupportedMediaType

JSON = "application/json"
LOCAL = AllowedHosts.of("", "127.0.0.1")
LISTED = AllowedHosts.of("box.lan", "127.0.0.1")


def called(
    headers: dict[str, str] | None = None,
    *,
    key: str = "",
    given: str | None = None,
    remote: str = "127.0.0.1",
    hosts: AllowedHosts = LOCAL,
) -> str | type[MicroserveError]:
    """Return who calls, or the type of the refusal."""
    router: Any = SimpleNamespace(config=SimpleNamespace(admin_key=key))
    http: Any = SimpleNamespace(
        headers={"host": "localhost", **(headers or {})}, remote=remote, who=""
    )
    try:
        check_admin(router, http, given, hosts)
    except MicroserveError as error:
        assert http.who == "" or isinstance(error, UnsupportedMediaType)
        return type(error)
    return str(http.who)


@pytest.mark.parametrize("given", ["", "K", "kk", None, "\udcff"])
def test_a_key_is_needed_where_one_is_configured(given: str | None):
    assert called(key="k", given="k") == "admin_key"
    assert called(key="k", given=given) is Unauthorized
    assert called(key="k", given=given, remote="10.1.2.3") is Unauthorized


def test_a_wrong_key_is_told_from_none():
    for given, said in (("", "needs its key"), (None, "needs its key"), ("K", "is not the key")):
        router: Any = SimpleNamespace(config=SimpleNamespace(admin_key="k"))
        http: Any = SimpleNamespace(headers={"host": "localhost"}, remote="127.0.0.1", who="")
        with pytest.raises(Unauthorized, match=said):
            check_admin(router, http, given, LOCAL)


def test_with_the_key_an_admin_calls_from_anywhere():
    foreign = {"host": "evil.example", "origin": "http://evil.example"}
    assert called(foreign, key="k", given="k", remote="10.1.2.3") == "admin_key"
    assert called(foreign, key="k", given="k", hosts=LISTED) is Forbidden
    assert called({"host": "box.lan"}, key="k", given="k", hosts=LISTED) == "admin_key"


@pytest.mark.parametrize(
    ("host", "remote", "hosts", "who"),
    [
        ("localhost:8000", "127.0.0.1", LOCAL, "127.0.0.1"),
        ("[::1]", "::1", LOCAL, "::1"),
        ("localhost", "10.1.2.3", LOCAL, Forbidden),
        ("10.1.2.3", "127.0.0.1", LOCAL, Forbidden),
        ("box.lan", "127.0.0.1", LOCAL, Forbidden),
        ("box.lan", "127.0.0.1", LISTED, "127.0.0.1"),
        ("box.lan", "10.1.2.3", LISTED, Forbidden),
        ("", "127.0.0.1", LOCAL, Forbidden),
        ("localhost", "", LOCAL, Forbidden),
    ],
)
def test_without_a_key_the_call_comes_from_this_host(
    host: str, remote: str, hosts: AllowedHosts, who: str | type[MicroserveError]
):
    assert called({"host": host}, remote=remote, hosts=hosts) == who


def test_without_a_key_no_page_of_another_site_calls():
    assert called({"sec-fetch-site": "cross-site"}) is Forbidden
    assert called({"origin": "http://localhost:3000"}) is Forbidden
    assert called({"origin": "http://localhost"}) == "127.0.0.1"


@pytest.mark.parametrize("key", ["", "k"])
@pytest.mark.parametrize(
    ("headers", "good"),
    [
        ({}, True),
        ({"content-length": "0"}, True),
        ({"content-length": "0", "content-type": "text/plain"}, True),
        ({"content-length": "1"}, False),
        ({"content-length": "2", "content-type": "text/plain"}, False),
        ({"content-length": "2", "content-type": JSON}, True),
        ({"content-length": "2", "content-type": f" {JSON.upper()} ; charset=x"}, True),
        ({"content-length": "2", "content-type": f"text/plain; {JSON}"}, False),
        ({"transfer-encoding": "chunked"}, False),
        ({"transfer-encoding": "chunked", "content-length": "0"}, False),
        ({"transfer-encoding": "chunked", "content-type": JSON}, True),
    ],
)
def test_a_body_is_declared_as_json(key: str, headers: dict[str, str], good: bool):
    who = called(headers, key=key, given=key)
    assert who == (("admin_key" if key else "127.0.0.1") if good else UnsupportedMediaType)


def test_keys_are_compared_as_bytes():
    assert same_key("é", "é") and same_key("k", "k")
    assert not same_key("e", "é") and not same_key(None, "") and not same_key("", "k")


def test_bodies_have_the_declared_fields_and_types_alone():
    class Number(Body):
        n: int

    assert Number.model_validate({"n": 1}).n == 1
    for wrong in ({"n": "1"}, {"n": 1, "m": 2}, {}):
        with pytest.raises(ValueError, match="validation error"):
            Number.model_validate(wrong)
