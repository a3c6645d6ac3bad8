"""Strangers: what a person is told before a prompt goes to their servers, and options that keep blocks from them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from multiaddr import Multiaddr

from ...crypto.identity import write_private
from ...protocols.announcement import Announcement
from ..client.core import CODEC_CHOICES
from ..client.server_selection import ServerSelection
from ..errors import BadInput
from ..network.addresses import ip_of, is_loopback, plain_ip
from ..swarm.swarm import Swarm
from ..swarm.trusted_servers import TrustedServers, trusted_servers
from .join import check_peer_id
from .option import option
from .output import Output
from .terminal import LineReader

_FILE: Final = "told-of-strangers"
_QUESTION: Final = "Go on? [y/N] "


@dataclass(frozen=True)
class TrustedOptions:
    """The options of commands that may keep blocks to servers of one's own."""

    trusted: list[str] | None = option(
        None, "Let only this server of yours (a peer id) compute the first and the last blocks; repeatable.", "PEER"
    )
    trusted_blocks: int | None = option(
        None, "Blocks at each end that only --trusted servers compute. Default: 2.", "N", min=1
    )

    def trusted_servers(self, allowed: Collection[str] = (), blocked: Collection[str] = ()) -> TrustedServers:
        """Who may compute which blocks; `allowed` and `blocked` are what else was said of servers.

        Raises:
            BadInput: no peer id, or options that contradict each other.
        """
        for peer in self.trusted or ():
            check_peer_id(peer, "--trusted")
        return trusted_servers(self.trusted or (), self.trusted_blocks, allowed=allowed, blocked=blocked)


@dataclass(frozen=True)
class ServerChoice(TrustedOptions):
    """The options of commands that answer over servers of a person's choice."""

    codec: str = option(
        "none",
        "How hidden states travel. none: as they are. float16, bfloat16 and int8 take less of a slow line, "
        "and round. auto: one that rounds by at most 0.1 %, from the second session on, where the bandwidth that "
        "was measured says that it saves a tenth of the time.",
        among=CODEC_CHOICES,
    )

    allow: list[str] | None = option(None, "Use only this server (a peer id); repeatable.", "PEER")
    deny: list[str] | None = option(None, "Never use this server (a peer id); repeatable.", "PEER")

    def chosen_servers(self) -> TrustedServers:
        """Who may compute which blocks.

        Raises:
            BadInput: no peer id, or options that contradict each other.
        """
        for name, peers in (("--allow", self.allow), ("--deny", self.deny)):
            for peer in peers or ():
                check_peer_id(peer, name)
        if both := set(self.allow or ()) & set(self.deny or ()):
            raise BadInput(f"--allow and --deny both name {min(both)}: give one of them")
        return self.trusted_servers(self.allow or (), self.deny or ())


def notices_file(data_dir: Path) -> Path:
    """Is there once a person has been told and went on; whoever deletes it is told again."""
    return data_dir / _FILE


class StrangerNotice:
    """Says once that a prompt goes to strangers, and asks a person at a terminal whether it may.

    Strangers are all servers that may compute blocks, with three exceptions. These are those that the person has
    `named`, the members of a `private` swarm, and those on this machine. Who sits at no terminal is told by a line on
    standard error, and neither asked nor waited for: scripts and pipes go on. Only a person's yes is remembered, in
    `file`.

    Args:
        yes: the person knows; nothing is said.
        asks: whether a person reads and types.
    """

    def __init__(
        self,
        client: ServerSelection,
        output: Output,
        file: Path,
        *,
        named: Collection[str] = (),
        private: bool = False,
        yes: bool = False,
        asks: bool,
    ) -> None:
        self._client = client
        self._output = output
        self._file = file
        self._named = frozenset(named)
        self._asks = asks
        self._done = yes or private or file.exists()

    async def permits(self, reader: LineReader | None = None) -> bool:
        """Whether the next prompt may go out. `reader` is where a person types."""
        if self._done:
            return True
        if self._asks:  # so that there are connections, which tell who is on this machine
            await self._client.candidates()
        strangers = self._strangers()
        if not strangers:
            return True
        text = self._text(len(strangers))
        if not self._asks or reader is None:
            self._done = True
            self._output.note(f"{text}; --yes leaves this line out")
            return True
        self._output.say(f"{text}.")
        line = await reader.read(_QUESTION)
        if line is None or line.strip().lower() not in ("y", "yes"):
            return False
        self._done = True
        with suppress(OSError):  # else the person is asked again the next time
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_private(self._file, b"The text of a chat may go to strangers: said, and agreed to.\n")
        return True

    def _strangers(self) -> list[Announcement]:
        """The servers that may be used now, and are neither named nor on this machine."""
        blocks, trusted, swarm = self._client.model.num_blocks, self._client.trusted, self._client.swarm
        return [
            server
            for server in self._client.servers()
            if server.peer_id not in self._named
            and trusted.usable(server.peer_id, server.span, blocks) is not None
            and not is_here(swarm, server)
        ]

    def _text(self, strangers: int) -> str:
        model, trusted = self._client.model, self._client.trusted
        who = f"{'one server' if strangers == 1 else f'{strangers} servers'} of people whom you have not named"
        if trusted.peers:
            return (
                f"blocks {trusted.middle(model.num_blocks)} of {model.name} are computed by {who}; also from their "
                "hidden states much of the text can be told (docs/privacy.md)"
            )
        return (
            f"{model.name} is served by {who}. Who serves its first blocks can read what you ask, and who serves its "
            "last blocks what is answered (docs/privacy.md). With --trusted PEER your own servers compute those blocks"
        )


def is_here(swarm: Swarm, server: Announcement) -> bool:
    """Whether this server runs on this machine, as its connections tell; before there are any, as it announces."""
    ways = [(connection.path, connection.local_host) for connection in swarm.host.connections(server.peer_id)]
    if not ways:
        return bool(server.addrs) and all(is_loopback(Multiaddr(addr)) for addr in server.addrs)
    return all(
        path.direct and path.remote_addr is not None and _same_host(path.remote_addr, local_host)
        for path, local_host in ways
    )


def _same_host(remote_addr: str, local_host: str | None) -> bool:
    """Whether a connection to this multiaddr, from this address of ours, does not leave the machine."""
    addr = Multiaddr(remote_addr)
    remote = ip_of(addr)
    return is_loopback(addr) or (remote is not None and local_host is not None and remote == plain_ip(local_host))
