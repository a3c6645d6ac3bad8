"""What other users of the machine can read: files of this node, and its command line."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from petalnode.crypto.identity import Identity
from petalnode.crypto.swarm_key import load_swarm_key, make_swarm_key
from petalnode.node.cli.join import SWARM_KEY_VARIABLE, JoinOptions
from petalnode.node.credits.ledger import Ledger
from petalnode.node.errors import BadInput
from petalnode.node.swarm.peer_file import PeerStore
from petalnode.node.trust.bundle import equivocation_bundle
from petalnode.node.trust.store import TrustStore
from petalnode.node.validator.history import History
from tests.attacks.forger import HONEST
from tests.receipts import RECEIPT

KEY = "1a" * 32

pytestmark = pytest.mark.skipif(os.name != "posix", reason="other systems have other permissions")


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def evidence(file: Path) -> None:
    accused = Identity.generate()
    first = RECEIPT.signed(accused)
    second = replace(first, reply_hash=b"x" * 32).signed(accused)
    equivocation_bundle(HONEST, accused.peer_id, first, second).save(file)


def ledger(file: Path) -> None:
    with Ledger(file, HONEST) as made:
        made.issue(HONEST.peer_id, 5)
        check(file)  # with what sqlite keeps beside it while it is open


def history(file: Path) -> None:
    History(file).__exit__(None, None, None)


def trust(file: Path) -> None:
    store = TrustStore(file)
    store.ban(HONEST.peer_id, "because", "evidence")
    store.save()


def peers(file: Path) -> None:
    PeerStore(file).update({HONEST.peer_id: ["/ip4/11.0.0.1/tcp/1"]}, [], 1.0)


def identity(file: Path) -> None:
    HONEST.save(file)


WRITERS: list[Callable[[Path], None]] = [evidence, ledger, history, trust, peers, identity]


def check(file: Path) -> None:
    """That nobody else can look into the folder, or read any file in it with something in it."""
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    for other in file.parent.iterdir():
        assert stat.S_IMODE(other.stat().st_mode) & 0o077 == 0 or not other.stat().st_size, other.name


@pytest.mark.parametrize("write", WRITERS)
def test_what_node_keeps_is_its_owner_s_alone(tmp_path: Path, umask: None, write: Callable[[Path], None]) -> None:
    file = tmp_path / "data" / "file"
    write(file)
    assert file.stat().st_size
    check(file)


@pytest.mark.parametrize("write", [ledger, history, trust])
def test_file_others_can_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Callable[[Path], None]
) -> None:
    file = tmp_path / "data" / "file"
    write(file)
    with caplog.at_level(logging.WARNING):
        write(file)
        assert not [record for record in caplog.records if "chmod" in record.getMessage()]
        file.chmod(0o644)
        for _ in range(3):
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(globals(), "check", lambda _file: None)
                write(file)
    (told,) = [record.getMessage() for record in caplog.records if "chmod" in record.getMessage()]
    assert str(file) in told


# --- the swarm key


def test_key_on_the_command_line_is_refused_unrepeated() -> None:
    """There every user of the machine sees it, and an error goes into logs."""
    with pytest.raises(BadInput) as caught:
        _ = JoinOptions(swarm_key=Path(KEY)).psk
    assert KEY not in str(caught.value)
    assert "file" in str(caught.value) and SWARM_KEY_VARIABLE in str(caught.value)


def test_environment_may_hold_key_or_name_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "swarm.key"
    make_swarm_key(file)
    monkeypatch.setenv(SWARM_KEY_VARIABLE, KEY.upper())
    assert JoinOptions().psk == KEY
    assert JoinOptions(swarm_key=file).psk == load_swarm_key(file)
    monkeypatch.setenv(SWARM_KEY_VARIABLE, str(file))
    assert JoinOptions().psk == load_swarm_key(file)
    monkeypatch.setenv(SWARM_KEY_VARIABLE, "")
    assert JoinOptions().psk is None


def test_key_files_others_can_read_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, own = tmp_path / "swarm.key", tmp_path / "identity"
    make_swarm_key(key)
    HONEST.save(own)
    monkeypatch.setenv(SWARM_KEY_VARIABLE, str(key))
    JoinOptions(identity=own).check()
    assert not capsys.readouterr().err
    key.chmod(0o640)
    own.chmod(0o604)
    JoinOptions(identity=own).check()
    told = capsys.readouterr().err
    assert f"chmod 600 {key}" in told and f"chmod 600 {own}" in told
