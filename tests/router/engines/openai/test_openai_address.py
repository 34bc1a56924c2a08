"""URLs of OpenAI servers, wherever engines are given."""

from __future__ import annotations

import pytest

from engine.protocol import BadRequest
from router.engines.engines_file import engine_url, parse_engines
from router.engines.openai import ServerAddress


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("openai+http://host:8000", "http://host:8000"),
        ("openai+https://host/", "https://host"),
        ("openai+http://host:8000/v1", "http://host:8000"),
        ("openai+http://host:8000/v1/", "http://host:8000"),
        ("openai+https://host/team/llm/v1", "https://host/team/llm"),
        ("openai+http://[::1]:8000/llm", "http://[::1]:8000/llm"),
    ],
)
def test_what_precedes_the_paths(url, base):
    address = ServerAddress.parse(url)
    assert (address.base, address.url) == (base, url.rstrip("/"))
    assert engine_url(url) == address.url


def test_options():
    address = ServerAddress.parse("openai+http://h:1/v1/?model=org%2Fname&max_streams=8")
    assert (address.model, address.max_streams) == ("org/name", 8)
    assert address.url == "openai+http://h:1/v1?model=org%2Fname&max_streams=8"
    assert ServerAddress.parse(address.url) == address


@pytest.mark.parametrize(
    "url",
    [
        "openai+http://", "openai+http:///v1", "openai+ftp://host", "openai+http://host:99999",
        "openai+http://user:secret@host", "openai+http://host#a", "openai+http://ho st",
        "openai+http://host?modell=a", "openai+http://host?model=a&model=b",
        "openai+http://host?model", "openai+http://host?max_streams=0",
        "openai+http://host?max_streams=many", "openai+http://host?model=" + "a" * 300,
        "openai+http://host\n",
    ],
)  # fmt: skip
def test_others_are_refused(url):
    with pytest.raises(BadRequest):
        engine_url(url)


def test_a_plain_engine_still_has_no_options():
    with pytest.raises(BadRequest):
        engine_url("http://host:8000?model=a")


def test_in_an_engines_file():
    (entry,) = parse_engines("openai+http://host:8000/v1?model=a role=decode zone=b")
    assert (entry.url, entry.role) == ("openai+http://host:8000/v1?model=a", "decode")
    with pytest.raises(BadRequest, match="line 1"):
        parse_engines("openai+http://host?nothing=a")
