from __future__ import annotations

import os
from pathlib import Path

import pytest
from nacl.bindings import crypto_secretbox

from petalnode.crypto.swarm_key import SwarmKeyError, find_swarm_key, load_swarm_key, make_swarm_key, xsalsa20

KEY = "0123456789abcdef" * 4


def test_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "swarm.key"
    make_swarm_key(path)
    key = load_swarm_key(path)
    assert len(bytes.fromhex(key)) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == f"/key/swarm/psk/1.0.0/\n/base16/\n{key}\n"
    with pytest.raises(SwarmKeyError, match="there already"):
        make_swarm_key(path)
    assert load_swarm_key(path) == key
    other = tmp_path / "other.key"
    make_swarm_key(other)
    assert load_swarm_key(other) != key


@pytest.mark.parametrize(
    "text", [f"/key/swarm/psk/1.0.0/\n/base16/\n{KEY}", f"/key/swarm/psk/1.0.0/\r\n/base16/\r\n{KEY.upper()}\r\n\r\n"]
)
def test_the_files_of_others_are_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    path.write_bytes(text.encode())
    assert load_swarm_key(path) == KEY


def test_a_key_may_be_given_itself(tmp_path: Path) -> None:
    assert find_swarm_key(KEY.upper()) == KEY
    make_swarm_key(tmp_path / "swarm.key")
    assert find_swarm_key(str(tmp_path / "swarm.key")) == load_swarm_key(tmp_path / "swarm.key")
    with pytest.raises(SwarmKeyError, match="cannot read"):
        find_swarm_key(KEY[:-1])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "first line"),
        (KEY.encode(), "first line"),
        (b"\x00\xff\x08\x01\x12", "first line"),
        (b"/key/swarm/psk/1.0.0/\n/base16/\n", "three lines"),
        (b"/key/swarm/psk/1.0.0/\n/base64/\nAAAA", "three lines"),
        (f"/key/swarm/psk/1.0.0/\n/base16/\n{KEY[:-2]}\n".encode(), "third line.*64 hex"),
        (f"/key/swarm/psk/1.0.0/\n/base16/\n{KEY[:-1]}x\n".encode(), "third line.*64 hex"),
    ],
)
def test_what_is_no_key_is_told_in_words(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    path.write_bytes(data)
    with pytest.raises(SwarmKeyError, match=f"{path}.*{said}|{said}.*{path}|third line of {path}"):
        load_swarm_key(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SwarmKeyError, match="No such file"):
        load_swarm_key(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(SwarmKeyError, match="cannot write"):
        make_swarm_key(tmp_path / "file" / "swarm.key")


def test_the_cipher_is_xsalsa20() -> None:
    """As NaCl has it: its boxes are XSalsa20, whose first 32 bytes are the key of what authenticates them."""
    for size in (0, 1, 1000):
        key, nonce, message = os.urandom(32), os.urandom(24), os.urandom(size)
        sealed = xsalsa20(key, nonce).encrypt(bytes(32) + message)
        assert sealed[32:] == crypto_secretbox(message, nonce, key)[16:]
