"""The key that shards on several hosts derive: by the standard, and different wherever a store is."""

from __future__ import annotations

from psstore.server.keys import hkdf, signing_key

TOKEN = b"correct horse battery staple"
HOSTS = ("ps://h1:2222", "ps://h2:2222")


def test_hkdf_is_that_of_rfc_5869() -> None:
    """Appendix A, test cases 1 and 3: the first 32 bytes of their output."""
    first = hkdf(b"\x0b" * 22, salt=bytes(range(13)), info=bytes(range(0xF0, 0xFA)))
    assert first.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    third = hkdf(b"\x0b" * 22, salt=b"", info=b"")
    assert third.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


def test_every_host_derives_the_same_key() -> None:
    assert signing_key(TOKEN, addresses=HOSTS, store="a") == signing_key(TOKEN, addresses=list(HOSTS), store="a")


def test_another_token_another_list_or_another_life_is_another_key() -> None:
    keys = {
        signing_key(TOKEN, addresses=HOSTS, store="a"),
        signing_key(TOKEN + b"!", addresses=HOSTS, store="a"),
        signing_key(TOKEN, addresses=HOSTS[::-1], store="a"),
        signing_key(TOKEN, addresses=HOSTS[:1], store="a"),
        signing_key(TOKEN, addresses=HOSTS, store="b"),
    }
    assert len(keys) == 5
    assert all(len(key) == 32 for key in keys)
