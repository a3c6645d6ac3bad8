"""What happens to the file of bans and reputations when it is damaged, and when it only cannot be used now."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from petalnode.node.errors import MachineError
from petalnode.node.trust import store as store_module
from petalnode.node.trust.store import TrustStore, trust_file
from tests.swarm.processes import environment, petalnode

NO_DATABASE = b"this is no database at all, whatever its name says" * 100


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """With a ban of 200 peers, on several pages."""
    store = TrustStore(tmp_path / "trust.sqlite")
    for number in range(200):
        store.ban(f"bad {number}", "it lied", "own")
    store.save()
    return tmp_path / "trust.sqlite"


def damage(file: Path, where: str) -> None:
    if where == "everywhere":
        file.write_bytes(NO_DATABASE)
        return
    data = bytearray(file.read_bytes())
    # The first page, with header and tables, stays as it is.
    data[4096:] = bytes(byte ^ 0x5A for byte in data[4096:])
    file.write_bytes(data)


def aside(file: Path) -> list[Path]:
    return list(file.parent.glob("trust.sqlite.damaged-*"))


@pytest.mark.parametrize("where", ["everywhere", "in the middle"])
def test_damaged_file_is_moved_aside_and_begun_anew(file: Path, where: str, caplog: pytest.LogCaptureFixture) -> None:
    damage(file, where)
    damaged = file.read_bytes()
    store = TrustStore(file)
    store.load()
    (moved,) = aside(file)
    assert moved.read_bytes() == damaged
    (told,) = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert str(moved) in told and "used again" in told and "recover" in told
    caplog.clear()
    store.ban("new", "it lied", "own")
    store.save()
    again = TrustStore(file)
    again.read()
    assert [ban.peer_id for ban in again.bans()] == ["new"]
    assert "damaged" not in caplog.text and aside(file) == [moved]


def test_who_asks_for_bans_is_not_told_none(file: Path) -> None:
    damage(file, "everywhere")
    with pytest.raises(MachineError, match="damaged"):
        TrustStore(file).read()
    TrustStore(file).read()
    damage(file, "everywhere")
    with pytest.raises(MachineError, match="damaged"):
        TrustStore(file).forgive("bad 1")


def test_running_node_writes_into_the_new_file(file: Path) -> None:
    store = TrustStore(file)
    store.load()
    store.note_version(b"weights", b"version")
    store.save()
    damage(file, "in the middle")
    store.ban("new", "it lied", "own")
    store.save()
    again = TrustStore(file)
    again.read()
    assert len(again.bans()) == 201 and again.version_used(b"weights") == b"version"


def test_of_many_that_find_damage_one_moves_file(file: Path) -> None:
    damage(file, "everywhere")
    barrier, raised = threading.Barrier(6), list[str]()

    def use(number: int) -> None:
        store = TrustStore(file)
        store.ban(f"new {number}", "it lied", "own")
        barrier.wait()
        try:
            store.read()
        except MachineError as error:
            raised.append(str(error))
        store.save()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(aside(file)) == 1 and len(raised) == 1, raised
    again = TrustStore(file)
    again.read()
    assert len(again.bans()) == 6


class MovedAway(TrustStore):
    """Its file is moved away at the first look."""

    def _read(self, connection: sqlite3.Connection) -> None:
        assert self._file is not None
        elsewhere = self._file.with_name("elsewhere")
        if not elsewhere.exists():
            self._file.rename(elsewhere)
            raise sqlite3.OperationalError("disk I/O error")
        super()._read(connection)


def test_file_moved_away_meanwhile_is_begun_anew(file: Path) -> None:
    """sqlite says that the disk fails."""
    store = MovedAway(file)
    store.ban("new", "it lied", "own")
    store.read()
    store.save()
    again = TrustStore(file)
    again.read()
    assert [ban.peer_id for ban in again.bans()] == ["new"] and not aside(file)


def test_locked_file_is_not_damaged(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "STORE", replace(store_module.STORE, busy_seconds=0.05))
    holder = sqlite3.connect(file)
    holder.execute("BEGIN EXCLUSIVE")
    store = TrustStore(file)
    with pytest.raises(MachineError, match="locked"):
        store.read()
    store.ban("new", "it lied", "own")
    store.note_version(b"weights", b"version")
    store.note_tokens("good", 1000)
    once = store.reputation("good")
    store.note_tokens("good", 1000)
    store.save()
    holder.close()
    assert not aside(file)
    store.save()  # and what could not be written then is written now
    again = TrustStore(file)
    again.read()
    assert len(again.bans()) == 201 and again.version_used(b"weights") == b"version"
    assert again.reputation("good") > once > 0


def test_the_tables_of_a_newer_version_stay(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA user_version = 7")
    data = file.read_bytes()
    with pytest.raises(MachineError, match="newer version of petalnode"):
        TrustStore(file).read()
    store = TrustStore(file)
    store.load()
    for _ in range(2):
        store.ban("new", "it lied", "own")
        store.save()
    assert caplog.text.count("newer version") == 1 and file.read_bytes() == data and not aside(file)


def test_a_column_more_is_no_harm(file: Path) -> None:
    with sqlite3.connect(file) as database:
        for table in ("bans", "standings", "versions"):
            database.execute(f"ALTER TABLE {table} ADD COLUMN later TEXT")
    store = TrustStore(file)
    store.read()
    store.ban("new", "it lied", "own")
    store.note_version(b"weights", b"version")
    store.save()
    again = TrustStore(file)
    again.read()
    assert len(again.bans()) == 201 and again.version_used(b"weights") == b"version"


_READ = """
import sys
from pathlib import Path
from petalnode.node.trust.store import TrustStore
TrustStore(Path(sys.argv[1])).read()
"""


def test_a_file_of_somebody_else_stays(file: Path) -> None:
    file.chmod(0)
    like_others = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []  # root may read everything
    read = subprocess.run([*like_others, sys.executable, "-c", _READ, str(file)], capture_output=True, text=True)
    assert "MachineError" in read.stderr and "cannot be kept" in read.stderr
    assert not aside(file)


def test_a_folder_in_its_place_stays(tmp_path: Path) -> None:
    (tmp_path / "trust.sqlite").mkdir()
    with pytest.raises(MachineError, match="cannot be kept"):
        TrustStore(tmp_path / "trust.sqlite").read()
    assert (tmp_path / "trust.sqlite").is_dir()


_FULL = """
import logging, resource, sys
from pathlib import Path
from petalnode.node.trust.store import TrustStore, trust_file
from tests.swarm.processes import environment, petalnode
file = Path(sys.argv[1])
store = TrustStore(file)
store.read()
resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, resource.RLIM_INFINITY))
for number in range(500):
    store.ban(f"new {number}", "it lied " * 20, "own")
store.save()
print(len(store.bans()), flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.save()
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no limit of a file's size here")
def test_a_full_disk_loses_nothing(file: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _FULL, str(file)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "700\n", done
    assert done.stderr.count("cannot be kept") == 1
    assert not aside(file)
    again = TrustStore(file)
    again.read()
    assert len(again.bans()) == 700


def test_command_fails_while_bans_are_unknown(tmp_path: Path) -> None:
    env = environment(tmp_path)
    file = trust_file(tmp_path / "data" / "petalnode")
    file.parent.mkdir(parents=True)
    file.write_bytes(NO_DATABASE)
    file.chmod(0o600)
    done = petalnode("bans", env=env)
    (moved,) = aside(file)
    assert done.code == 4 and done.out == "" and str(moved) in done.err and len(done.err.splitlines()) == 1, done
    done = petalnode("bans", env=env)
    assert done.code == 0 and done.out == "nobody is banned\n" and done.err == "", done
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA user_version = 7")
    for arguments in ((), ("--forgive", "12D3bad")):
        done = petalnode("bans", *arguments, env=env)
        assert done.code == 4 and done.out == "" and "newer version" in done.err, done
