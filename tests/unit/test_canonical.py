from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.canonical import canonical, digest

FIELD = st.recursive(
    st.binary(max_size=8) | st.text(max_size=4) | st.integers(-(2**127), 2**127 - 1),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
FIELDS = st.lists(FIELD, max_size=4).map(tuple)


@given(st.text(max_size=3), FIELDS, st.text(max_size=3), FIELDS)
def test_different_values_never_give_the_same_bytes(domain_a, a, domain_b, b):
    assert (canonical(domain_a, *a) == canonical(domain_b, *b)) == ((domain_a, a) == (domain_b, b))


def test_moving_a_border_between_fields_changes_the_bytes():
    assert canonical("d", "ab", "c") != canonical("d", "a", "bc")
    assert canonical("d", b"a") != canonical("d", "a")
    assert canonical("d", ["a", "b"]) != canonical("d", "a", "b")


def test_bytes_like_values_are_equal_to_bytes():
    data = bytes(range(100))
    assert canonical("d", memoryview(data)) == canonical("d", bytearray(data)) == canonical("d", data)
    assert canonical("d", memoryview(data)[::2]) == canonical("d", data[::2])


@given(st.text(max_size=3), FIELDS)
def test_digest_is_the_hash_of_the_canonical_bytes(domain, fields):
    assert digest(domain, *fields) == hashlib.sha256(canonical(domain, *fields)).digest()


@pytest.mark.parametrize("value", [True, 1.0, None, {"a": 1}])
def test_values_without_one_meaning_are_refused(value):
    with pytest.raises(TypeError, match="canonical"):
        canonical("d", value)


def test_the_bytes_never_change_between_versions():
    # Signatures and receipts of older nodes must stay valid.
    assert digest("petalnode/test", b"\x01", "é", -5, ["x", 2**64]).hex() == (
        "32526302e8a99e338bf3bed3bbb3875b536340516d9de3f3bf84382d1569ceac"
    )
