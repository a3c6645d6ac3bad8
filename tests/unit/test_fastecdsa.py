"""The stand-in for fastecdsa in the wheel computes as OpenSSL does."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.import_graph import ROOT


def stand_in(name: str) -> ModuleType:
    """A module of packaging/fastecdsa, beside the real one if that is installed."""
    if "stand_in" not in sys.modules:
        spec = importlib.util.spec_from_file_location("stand_in", ROOT / "packaging" / "fastecdsa" / "__init__.py")
        assert spec is not None and spec.loader is not None
        sys.modules["stand_in"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["stand_in"])
    return importlib.import_module(f"stand_in.{name}")


def secret_of(private: int, public: tuple[int, int]) -> int:
    """The secret that OpenSSL agrees on."""
    theirs = ec.EllipticCurvePublicNumbers(*public, ec.SECP256R1()).public_key()
    return int.from_bytes(ec.derive_private_key(private, ec.SECP256R1()).exchange(ec.ECDH(), theirs), "big")


# RFC 5903, section 8.1: both sides' private keys and points, and the point they agree on.
I = 0xC88F01F510D9AC3F70A292DAA2316DE544E9AAB8AFE84049C62A9C57862D1433  # noqa: E741
R = 0xC6EF9C5D78AE012A011164ACB397CE2088685D8F06BF9BE0B283AB46476BEE53
SHARED = (
    0xD6840F6B42F6EDAFD13116E0E12565202FEF8E9ECE7DCE03812464D04B9442DE,
    0x522BDE0AF0D8585B8DEF9C183B5AE38F50235206A8674ECB5D98EDB20EB153A2,
)


def test_both_sides_agree_on_point_of_rfc() -> None:
    public = stand_in("keys").get_public_key
    for point in (public(I) * R, R * public(I), I * public(R)):
        assert (point.x, point.y) == SHARED


@pytest.mark.parametrize("scalar", [1, 2, 3, 7, -2, -1])
def test_multiple_of_point_is_that_of_openssl(scalar: int) -> None:
    keys, curve = stand_in("keys"), stand_in("curve").P256
    point = keys.get_public_key(I)
    expected = keys.get_public_key(I * scalar % curve.q)
    assert point * scalar == point * (scalar + curve.q) == expected


def test_infinity_and_points_off_the_curve_are_refused() -> None:
    point = stand_in("keys").get_public_key(I)
    with pytest.raises(ValueError):  # noqa: PT011
        point * point.curve.q
    with pytest.raises(ValueError, match="not on curve"):
        type(point)(point.x, point.y + 1)


@pytest.mark.parametrize("compressed", [False, True])
def test_public_keys_survive_their_encoding(compressed: bool) -> None:
    encoder, point = stand_in("encoding.sec1").SEC1Encoder, stand_in("keys").get_public_key(R)
    data = encoder.encode_public_key(point, compressed=compressed)
    assert len(data) == (33 if compressed else 65)
    assert encoder.decode_public_key(data, point.curve) == point


@pytest.mark.parametrize("data", [b"", b"\0", b"\x04" + bytes(64), b"\x02" + b"\xff" * 32, bytes(65)])
def test_what_is_no_public_key_is_refused(data: bytes) -> None:
    sec1 = stand_in("encoding.sec1")
    with pytest.raises(sec1.InvalidSEC1PublicKey):
        sec1.SEC1Encoder.decode_public_key(data, stand_in("curve").P256)


def test_new_private_key_exports_as_openssl_reads_it() -> None:
    keys, curve = stand_in("keys"), stand_in("curve").P256
    private = keys.gen_private_key(curve)
    assert 0 < private < curve.q and keys.gen_private_key(curve) != private
    read = serialization.load_pem_private_key(keys.export_key(private, curve, encoder=keys.PEMEncoder).encode(), None)
    assert isinstance(read, ec.EllipticCurvePrivateKey)
    assert read.private_numbers().private_value == private
    public = keys.get_public_key(private, curve)
    assert (public * I).x == secret_of(I, (public.x, public.y))


@pytest.mark.parametrize("number", [0, 1, 255, 256, 2**255, 2**256 - 1])
def test_the_bytes_of_an_integer_are_counted(number: int) -> None:
    assert stand_in("encoding.util").int_bytelen(number) == len(number.to_bytes(40, "big").lstrip(b"\0"))
