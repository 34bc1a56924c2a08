"""URLs of stores: what is understood, and that no message has the password."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.protocol import BadRequest
from router.store import StoreAddress

GOOD = {
    "redis://h": ("redis://h", "microserve"),
    "redis://u:p%23w@h:6380/3#fleet-a": ("redis://u:p%23w@h:6380/3", "fleet-a"),
    "rediss://:p@[::1]:6379/0": ("rediss://:p@[::1]:6379/0", "microserve"),
    "valkey://h:1/2": ("redis://h:1/2", "microserve"),
    "valkeys://h": ("rediss://h", "microserve"),
    "unix:///run/redis.sock?db=2#b": ("unix:///run/redis.sock?db=2", "b"),
    "unix://:p@/run/redis.sock": ("unix://:p@/run/redis.sock", "microserve"),
}
BAD = {
    "redis://:s3cret#pw@h/0": "is written %23",
    "redis://h#a b": "name of a fleet",
    "redis://h#": "name of a fleet",
    "redis://:s3cret/pw@h:6379/0": "write / as %2F",
    "redis://h1:6379,h2:6379/0": "several hosts",
    "redis://h1,h2/0": "list of hosts",
    "redis://:s3cret@h:port": "port is no number",
    "redis://:s3cret@h:99999": "port is no number",
    "redis://:s3cret@h/abc": "number of a database",
    "redis://:s3cret@/0": "names no host",
    "redis+sentinel://h:26379/m": "Sentinel is not supported",
    "rediss-sentinel://h:26379/m": "Sentinel is not supported",
    "http://s3cret@h": "begins with one of redis, rediss, unix, valkey, valkeys",
    "unix://": "path of a socket",
    "s3cret": "not the URL of a store",
}


@pytest.mark.parametrize(("given", "read"), GOOD.items())
def test_a_url_is_read(given: str, read: tuple[str, str]):
    address = StoreAddress.parse(given)
    assert (address.url, address.name, address.username) == (*read, None)


@pytest.mark.parametrize(("given", "said"), BAD.items())
def test_what_is_wrong_is_said_without_the_password(given: str, said: str):
    with pytest.raises(BadRequest, match=said) as caught:
        StoreAddress.parse(given)
    assert "s3cret" not in str(caught.value)


def test_a_password_is_in_the_url_or_in_a_file(tmp_path: Path):
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    for given, user in (("redis://u@h:1/2#a", "u"), ("redis://h:1/2#a", "")):
        address = StoreAddress.parse(given, password_file=str(file))
        assert (address.url, address.username, address.name) == ("redis://h:1/2", user, "a")
    with pytest.raises(BadRequest, match="has a password already"):
        StoreAddress.parse("redis://:other@h", password_file=str(file))
    for content in (b"", b"two\nlines", b"\xff", b"x" * 5000):
        file.write_bytes(content)
        with pytest.raises(BadRequest, match="--store-password-file"):
            StoreAddress.parse("redis://h", password_file=str(file))
