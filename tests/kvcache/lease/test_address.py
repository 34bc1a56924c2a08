from __future__ import annotations

import base64
import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.errors import BadAddress
from kvcache.lease.address import MAC_BYTES, KVAddress, _mac, page_runs, prompt_digest
from kvcache.shard import Shard
from kvcache.types import EngineId, LeaseId, PageId

SECRET = b"cluster"
ADDRESS = KVAddress(
    engine_id=EngineId("127.0.0.1:8100"),
    epoch=(1 << 62) + 1,
    endpoint="shm:1:2",
    lease_id=LeaseId("0f"),
    slot=7,
    nonce=(1 << 63) - 1,
    begin=16,
    end=61,
    room=75,
    runs=((3, 2), (9, 1)),
    fingerprint="f",
    digest=prompt_digest(range(61)),
    url="http://127.0.0.1:8100",
)
SIGNED = ADDRESS.sign(SECRET)


def test_an_address_reads_back():
    assert KVAddress.verify(SIGNED, SECRET) == ADDRESS


def test_an_address_of_a_shard_reads_back():
    part = replace(ADDRESS, shards=(Shard(0, 2, 1, 3), Shard(2, 4, 1, 3)))
    assert KVAddress.verify(part.sign(SECRET), SECRET) == part


def test_it_is_url_safe():
    assert set(SIGNED) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def test_runs_expand_to_pages():
    assert ADDRESS.pages() == [3, 4, 9]


def test_consecutive_pages_are_one_run():
    pages = [PageId(page) for page in (1, 2, 3, 9, 10, 4, 6)]
    assert page_runs(pages) == ((1, 3), (9, 2), (4, 1), (6, 1))


@given(st.lists(st.integers(1, 50), unique=True))
def test_pages_survive_as_runs(pages: list[int]):
    address = replace(ADDRESS, runs=page_runs([PageId(page) for page in pages]))
    assert address.pages() == pages
    assert KVAddress.verify(address.sign(SECRET), SECRET) == address


def test_another_secret_is_refused():
    with pytest.raises(BadAddress, match="secret"):
        KVAddress.verify(SIGNED, b"other")


@pytest.mark.parametrize("text", ["", "=", "A", "é", "not base64!", "AAAA", "\0", SIGNED + "!"])
def test_malformed_addresses_are_refused(text: str):
    with pytest.raises(BadAddress):
        KVAddress.verify(text, SECRET)


@given(st.integers(0, len(SIGNED) - 1))
def test_a_truncated_address_is_refused(length: int):
    with pytest.raises(BadAddress):
        KVAddress.verify(SIGNED[:length], SECRET)


@given(st.data())
def test_a_flipped_bit_is_refused(data: st.DataObject):
    raw = bytearray(base64.urlsafe_b64decode(SIGNED + "=" * (-len(SIGNED) % 4)))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadAddress):
        KVAddress.verify(base64.urlsafe_b64encode(raw).decode().rstrip("="), SECRET)


@given(st.text(max_size=200))
@pytest.mark.slow
def test_any_text_is_refused(text: str):
    with pytest.raises(BadAddress):
        KVAddress.verify(text, SECRET)


def test_new_fields_under_an_old_signature_are_refused():
    raw = base64.urlsafe_b64decode(SIGNED + "=" * (-len(SIGNED) % 4))
    body = json.loads(raw[MAC_BYTES:])
    body[KVAddress.__slots__.index("end")] = 100
    forged = base64.urlsafe_b64encode(raw[:MAC_BYTES] + json.dumps(body).encode()).decode()
    with pytest.raises(BadAddress, match="secret"):
        KVAddress.verify(forged.rstrip("="), SECRET)


def test_digests_tell_prompts_apart():
    assert prompt_digest([1, 2]) == prompt_digest((1, 2))
    digests = {prompt_digest(tokens) for tokens in ([], [1], [1, 2], [2, 1], [1, 2, 0], [258])}
    assert len(digests) == 6


def signed(fields: object) -> str:
    body = json.dumps(fields).encode()
    return base64.urlsafe_b64encode(_mac(SECRET, body) + body).decode().rstrip("=")


FIELDS = list(asdict(ADDRESS).values())


def test_its_fields_are_signed_as_a_list():
    assert KVAddress.verify(signed(FIELDS), SECRET) == ADDRESS


@pytest.mark.parametrize(
    "fields",
    [
        [], {}, 7, None, "x", FIELDS[:-1], [*FIELDS, 0], FIELDS[::-1], [None] * len(FIELDS),
        dict(zip(KVAddress.__slots__, FIELDS, strict=True)),
        [*FIELDS[:-1], [1, 2]], [*FIELDS[:-1], {"layer": 0}],
        [*FIELDS[:-1], {"layer": 0, "layer_end": 2, "head": 0, "head_end": "2"}],
    ],
)  # fmt: skip
def test_a_signed_address_of_another_version_is_refused(fields: object):
    with pytest.raises(BadAddress, match="another version"):
        KVAddress.verify(signed(fields), SECRET)


@given(
    st.integers(0, len(FIELDS) - 2), st.none() | st.booleans() | st.floats() | st.lists(st.text())
)
def test_a_signed_field_of_another_type_is_refused(at: int, value: object):
    fields = [*FIELDS[:at], value, *FIELDS[at + 1 :]]
    if (at, value) != (KVAddress.__slots__.index("runs"), []):
        with pytest.raises(BadAddress, match="another version"):
            KVAddress.verify(signed(fields), SECRET)


@pytest.mark.parametrize("name", ["epoch", "slot", "nonce", "begin", "end", "room"])
def test_a_signed_number_below_zero_is_refused(name: str):
    """An index of -1 would be the last one."""
    with pytest.raises(BadAddress, match="another version"):
        KVAddress.verify(replace(ADDRESS, **{name: -1}).sign(SECRET), SECRET)
    zero = replace(ADDRESS, **{name: 0})
    assert KVAddress.verify(zero.sign(SECRET), SECRET) == zero


@pytest.mark.parametrize(
    "change",
    [
        {"runs": ((-1, 2),)}, {"runs": ((1, -2),)}, {"runs": ((1, 2), (True, 1))},
        {"shards": (Shard(-1, 2, 0, 1),)}, {"shards": (Shard(0, 2, 0, -1),)}, {"engine_id": 7},
        {"url": None}, {"digest": 1.0}, {"epoch": True}, {"room": 2.0}, {"slot": "1"},
    ],
)  # fmt: skip
def test_a_signed_value_of_another_kind_is_refused(change: dict[str, object]):
    with pytest.raises(BadAddress, match="another version"):
        KVAddress.verify(replace(ADDRESS, **change).sign(SECRET), SECRET)  # type: ignore[arg-type]
