"""API keys: their files, their digests, and the header that carries them."""

from __future__ import annotations

import hashlib

import pytest

from engine.protocol import BadRequest, Unauthorized
from router.admission.keys import ANYBODY, Keys, bearer, make_key, parse_keys

HEX = hashlib.sha256(b"secret").hexdigest()


def test_a_key_is_known_by_its_secret_only():
    keys = Keys([make_key("secret", "ann")])
    assert len(keys) == 1
    assert keys.identify("secret").name == "ann"
    for wrong in ("", "Secret", "secret ", HEX, f"sha256:{HEX}"):
        with pytest.raises(Unauthorized) as refused:
            keys.identify(wrong)
        assert refused.value.code == "invalid_api_key"
    keys.replace([make_key(f"sha256:{HEX}")])
    assert keys.identify("secret").name == HEX[:8]
    keys.replace([make_key("other")])
    with pytest.raises(Unauthorized):
        keys.identify("secret")
    keys.replace([])
    assert keys.identify("anything") is ANYBODY


@pytest.mark.parametrize("secret", [f"sha256:{HEX.upper()}", f"sha256:{HEX}0", f"sha1:{HEX}", HEX])
def test_what_is_no_digest_is_a_secret(secret: str):
    assert Keys([make_key(secret)]).identify(secret)
    with pytest.raises(Unauthorized):
        Keys([make_key(secret)]).identify("secret")


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer k", "k"), ("bearer k", "k"), ("BEARER   k ", "k"), ("Bearer k l", "k l"),
        ("Bearer", ""), ("Bearer ", ""), ("Basic k", ""), ("k", ""), ("Bearerk", ""), ("", ""),
    ],
)  # fmt: skip
def test_the_header_of_a_key(header: str, key: str):
    assert bearer(header) == key


def test_a_line_may_name_a_key_and_its_limits():
    text = "# all keys\n\none\ntwo name=b rpm=60 # hers\nthree tpm=0 name=c=d\n"
    one, two, three = parse_keys(text)
    assert (one.name, one.requests_per_minute, one.tokens_per_minute) == (
        hashlib.sha256(b"one").hexdigest()[:8], None, None,
    )  # fmt: skip
    assert (two.name, two.requests_per_minute, two.tokens_per_minute) == ("b", 60, None)
    assert (three.name, three.requests_per_minute, three.tokens_per_minute) == ("c=d", None, 0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("s3cret name", "not KEY"),
        ("s3cret rpm=", "not KEY"),
        ("s3cret rpm=-1", "not KEY"),
        ("s3cret tpm=1.5", "not KEY"),
        ("s3cret tpm=²", "not KEY"),
        ("s3cret role=x", "not KEY"),
        ("first", "there before"),
        (f"sha256:{hashlib.sha256(b'first').hexdigest()}", "there before"),
    ],
)
def test_an_error_names_the_line_and_never_its_content(line: str, why: str):
    with pytest.raises(BadRequest) as wrong:
        parse_keys(f"first\n\n{line}\n")
    assert wrong.value.message.startswith("line 3: ") and why in wrong.value.message
    assert line.split()[0] not in wrong.value.message


@pytest.mark.parametrize("text", ["", "\n", "# first\n"])
def test_a_file_without_keys_would_admit_everybody(text: str):
    with pytest.raises(BadRequest, match="no key"):
        parse_keys(text)
