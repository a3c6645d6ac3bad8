"""The options shared by all commands that join a swarm, and joining it with them."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import typing
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import Field, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from typer.models import OptionInfo

from ...crypto.canonical import digest
from ...crypto.identity import Identity, IdentityError, IdentityLocked, held_identity, others_can_read, peer_id_to_bytes
from ...crypto.swarm_key import SwarmKeyError, find_swarm_key, is_swarm_key
from ..errors import BadInput, MachineError, PetalnodeError, SwarmError, unwrapped
from ..links.format import SwarmTarget, read_target
from ..models.cache_dir import data_folder
from ..network.addresses import parse_own, parse_peer
from ..network.nat.relay import RelayLimits
from ..network.transport.bandwidth import parse_rate
from ..network.transport.websocket import Certificate
from ..swarm.config import SwarmConfig
from ..swarm.peer_file import peer_store_file
from ..swarm.swarm import Swarm, open_swarm
from ..swarm.versions import SeveralVersions
from ..trust.evidence_message import TrustedValidators, parse_trusted
from ..trust.store import TrustStore, trust_file
from .option import option, options_of, parameter_of
from .output import Output
from .process import leaves, say_error, set_logs
from .terminal import ask_version

PEERS_VARIABLE = "PETALNODE_PEERS"
SWARM_KEY_VARIABLE = "PETALNODE_SWARM_KEY"
MDNS_VARIABLE = "PETALNODE_MDNS"
REMEMBER_VARIABLE, GOSSIP_VARIABLE = "PETALNODE_REMEMBER", "PETALNODE_GOSSIP"
ALL_IN_HELP: Final = "--help-all" in sys.argv
_SHOWN: Final = {
    "serve": ("num_blocks", "blocks", "quant", "device", "peer"),
    "chat": ("prompt", "system", "temperature", "resume", "session", "show_route", "peer"),
    "api": ("http_port", "host", "api_key_file", "adapter", "peer"),
    "tune": ("data", "method", "epochs", "out", "peer"),
    "validate": ("once", "interval", "evidence_dir", "gossip", "peer"),
    "status": ("peer", "swarm_key", "json"),
    "bootstrap": ("listen", "announce", "relay_reservations", "swarm_key", "peer"),
    "doctor": ("peer", "swarm_key", "listen", "json"),
    "self_test": ("timeout", "peer", "swarm_key", "listen", "json"),
    "show": ("peer", "swarm_key", "json"),
    "plan": ("machines", "num_blocks", "block_mb", "trusted_blocks", "peer", "json"),
}
"""The options that most people need, by command; `--help` names the others, and `--help-all` explains them."""
_FIRST_PORT, _PORTS = 20000, 20000
KEY_IN_SIGHT: Final = (
    "this link has the swarm's key, and others on this machine can read the command line: `petalnode join` asks for it"
)
_HOW_TO_JOIN = "Give --peer and a link or an address (servers print theirs), or try `petalnode demo` on this machine"


@dataclass(frozen=True)
class JoinOptions:
    """The options shared by all commands that join a swarm."""

    peer: list[str] | None = option(
        None,
        "Address of a node of the swarm, /ip4/../tcp/../p2p/.., or a link (`petalnode invite`); repeatable. "
        f"Also {PEERS_VARIABLE}, comma-separated.",
        "MULTIADDR|LINK",
        names=("--peer", "-p"),
    )
    new_swarm: bool = option(False, "Start a new swarm: do not look for peers of earlier runs or on the local network.")
    swarm_key: Path | None = option(
        None,
        "Join the private swarm of this key file (`petalnode swarm-key` makes one). Also "
        f"{SWARM_KEY_VARIABLE}: the file, or the key itself, which others could read on a command line.",
        "FILE",
    )
    identity: Path | None = option(
        None, "File of this node's private key; created if missing. Default: one file per command.", "FILE"
    )
    listen: list[str] | None = option(
        None, "Address to listen at; repeatable. Default: all interfaces, on a port that stays the same.", "MULTIADDR"
    )
    announce: list[str] | None = option(
        None, "Announce this address to other nodes, such as that of a forwarded port; repeatable.", "MULTIADDR"
    )
    relay: str = option(
        "auto",
        "Relay for incoming connections if this node cannot be dialed directly; off: neither use nor be one.",
        "auto|off|MULTIADDR",
    )
    mdns: bool = option(
        True, "Discover nodes on the local network by multicast DNS.", names=("--mdns/--no-mdns",), envvar=MDNS_VARIABLE
    )
    remember: bool = option(
        True,
        "Remember peers and servers' faults from run to run.",
        names=("--remember/--no-remember",),
        envvar=REMEMBER_VARIABLE,
    )
    max_upload: str | None = option(None, "Limit of bytes sent per second, such as 10MB.", "RATE")
    max_download: str | None = option(None, "Limit of bytes received per second, such as 10MB.", "RATE")
    tls_certificate: Path | None = option(None, "Certificate (PEM) for listening at an address with /tls/ws.", "FILE")
    tls_key: Path | None = option(None, "The certificate's private key (PEM).", "FILE")
    gossip: bool = option(
        False,
        "Receive evidence of servers' faults from other nodes, check it, and forward it.",
        names=("--gossip/--no-gossip",),
        envvar=GOSSIP_VARIABLE,
    )
    trust_validator: list[str] | None = option(
        None,
        "Trust the verdicts of this validator, which OWNER runs, once --trust-quorum owners agree, and accept "
        "the points it issues; repeatable.",
        "PEER[=OWNER]",
    )
    trust_quorum: int = option(
        2, "How many owners of trusted validators have to agree before a server is banned.", "K", min=1
    )
    log_level: str = option("warning", "Log messages to print: debug, info, warning or error.", "LEVEL")
    log_format: str = option("text", "How they are printed: text, or json, an object a line.", "FORMAT")
    json: bool = option(False, "Print one JSON object per line to standard output, and text to standard error.")

    @functools.cached_property  # a link that ends while this node runs is of use to it all the same
    def target(self) -> SwarmTarget:
        """What --peer, else the environment, says of the swarm: addresses and links.

        Raises:
            BadInput: one cannot be used, or --peer stands together with --new-swarm.
        """
        if self.new_swarm:
            if self.peer:
                raise BadInput("--new-swarm starts a swarm and --peer joins one: give one of them")
            return SwarmTarget((), self._own_key)
        given, key = filter(str.strip, self.peer or os.environ.get(PEERS_VARIABLE, "").split(",")), self._own_key
        try:
            return read_target(given, key)
        except BadInput as error:
            raise error if self.peer else BadInput(f"the variable {PEERS_VARIABLE}: {error}") from None

    @property
    def peers(self) -> tuple[str, ...]:
        """Multiaddrs of the nodes to join through. Raises BadInput as `target`."""
        return self.target.peers

    def check(self) -> None:
        """Checks all that can be checked without a network.

        Raises:
            BadInput: an option, or an address in the environment, cannot be used.
        """
        if self.peer and self.psk is not None and self._own_key is None:
            say_error(KEY_IN_SIGHT, "warning")
        for what, addresses in (("listen", self.listen), ("announce", self.announce)):
            for address in addresses or ():
                parse_own(address, what)
        if self.relay not in ("auto", "off"):
            parse_peer(self.relay)
        parse_rate(self.max_upload, "--max-upload")
        parse_rate(self.max_download, "--max-download")
        if self.tls is not None and (ended := Certificate(*self.tls).ended) is not None:
            say_error(f"the certificate {self.tls[0]} ended on {ended}: browsers will refuse it", "warning")
        secrets = (
            (self.key_file, "join your swarm"),
            (self.identity, "sign as this node"),
            (self.tls_key, "listen in the name of its certificate"),
        )
        for file, harm in secrets:
            if file is not None and others_can_read(file):
                say_error(f"others on this machine can read {file}, and so {harm}: chmod 600 {file}", "warning")
        _ = self.trusted

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The files of the certificate and its key. Raises BadInput: only one was given."""
        if self.tls_certificate is None and self.tls_key is None:
            return None
        if self.tls_certificate is None or self.tls_key is None:
            raise BadInput("--tls-certificate and --tls-key go together: give both files")
        return self.tls_certificate, self.tls_key

    @property
    def key_file(self) -> Path | None:
        """The file of the private swarm's key, from --swarm-key or the environment; None if there is none."""
        variable = os.environ.get(SWARM_KEY_VARIABLE, "")
        return self.swarm_key or (Path(variable) if variable and not is_swarm_key(variable) else None)

    @property
    def psk(self) -> str | None:
        """The private swarm's key, 64 hexadecimal digits; None for the public swarm. Raises BadInput as `target`."""
        return self.target.psk

    @property
    def _own_key(self) -> str | None:
        """The key that was given by itself, in no link.

        Raises:
            BadInput: the file cannot be read, or is no swarm key, or the key itself is on the command line.
        """
        if self.swarm_key is not None and is_swarm_key(str(self.swarm_key)) and not self.swarm_key.exists():
            raise BadInput(
                "--swarm-key takes the key's file, and not the key: all users of this machine can read the command "
                "line. Make a new key (`petalnode swarm-key`), and give its file, or the key in the variable "
                f"{SWARM_KEY_VARIABLE}"
            )
        given = self.swarm_key or os.environ.get(SWARM_KEY_VARIABLE)
        try:
            return find_swarm_key(given) if given else None
        except SwarmKeyError as error:
            raise BadInput(str(error)) from error

    @property
    def trusted(self) -> TrustedValidators:
        """The validators whose verdicts count.

        Raises:
            BadInput: a peer id is malformed.
        """
        try:
            return TrustedValidators(dict(map(parse_trusted, self.trust_validator or ())), self.trust_quorum)
        except ValueError as error:
            raise BadInput(f"--trust-validator: {error}") from error

    @property
    def searches(self) -> bool:
        """Whether a swarm can be found without a peer's address."""
        return not self.new_swarm and (self.mdns or self.remember)

    @property
    def places(self) -> str:
        """Where a swarm is looked for without --peer, in words."""
        ways = {"peers of earlier runs": self.remember, "nodes on this network": self.mdns}
        return " and ".join(way for way, open_ in ways.items() if open_)

    def config(self, identity: Identity, *, listens: bool, data_dir: Path, relay_limits: RelayLimits) -> SwarmConfig:
        """The configuration of a node with this identity; a client does not listen.

        Raises:
            BadInput: an option is invalid, or no way is left to find a swarm.
        """
        peers, psk = self.peers, self.psk
        if not listens and not peers and not self.searches:
            raise BadInput(f"which swarm? {_HOW_TO_JOIN}")
        listen = tuple(self.listen or ())
        return SwarmConfig(
            identity=identity,
            listen=listen or ((f"/ip4/0.0.0.0/tcp/{kept_port(identity)}",) if listens else ()),
            announce=tuple(self.announce or ()),
            peers=peers,
            psk=psk,
            serve_dht=listens,
            relay=self.relay,
            relay_limits=relay_limits,
            # A client that was given a peer needs no discovery.
            mdns=self.mdns and not self.new_swarm and (listens or not peers),
            remembered=peer_store_file(data_dir, psk) if self.remember and not self.new_swarm else None,
            max_upload=parse_rate(self.max_upload, "--max-upload"),
            max_download=parse_rate(self.max_download, "--max-download"),
            tls=self.tls,
            gossip=self.gossip,
            trust=TrustStore(trust_file(data_dir) if self.remember else None, self.trusted),
        )


@dataclass(frozen=True)
class RelayOptions:
    """How much a public node relays for nodes behind NAT."""

    relay_reservations: int | None = option(
        None, f"Relay for at most N peers at a time. Default: {RelayLimits().reservations}.", "N", min=0
    )
    relay_circuits: int | None = option(
        None, f"Relay at most N connections at a time. Default: {RelayLimits().circuits}.", "N", min=0
    )
    relay_rate: str | None = option(None, "Relay at most this many bytes per second in total, such as 10MB.", "RATE")

    def limits(self) -> RelayLimits:
        """The limits that these options set; the default for each one that is not given.

        Raises:
            BadInput: --relay-rate is not a rate.
        """
        given = {
            "reservations": self.relay_reservations,
            "circuits": self.relay_circuits,
            "bytes_per_second": parse_rate(self.relay_rate, "--relay-rate"),
        }
        return replace(RelayLimits(), **{name: value for name, value in given.items() if value is not None})


def joins_swarm(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a typer command of a function: each parameter that is a dataclass (JoinOptions is one) becomes its fields,
    which are options (`option`), as parameters may be. The function receives the dataclasses, filled in.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    rest, parameters = list[str](), list[inspect.Parameter]()
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        hint, default = hints[parameter.name], parameter.default
        own = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint)
        if isinstance(default, Field):
            own = parameter_of(parameter.name, hint, default)
        for found in [own] if group is None else options_of(group):
            info = typing.get_args(found.annotation)[-1]
            if isinstance(info, OptionInfo):
                shown = found.name in _SHOWN.get(command.__name__, ()) or command.__name__ not in _SHOWN
                info.hidden = not shown and not ALL_IN_HELP
                if group is JoinOptions:
                    info.rich_help_panel = "Options for joining a swarm"
                if info.hidden:
                    rest.append(f"--{found.name.replace('_', '-')}")
            parameters.append(found)

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{field: arguments.pop(field) for field in inspect.signature(group).parameters})
        set_logs(arguments["join"].log_level, arguments["join"].log_format)
        try:
            command(**arguments)
        except Exception as error:
            several = next((one for one in leaves(error) if isinstance(one, SeveralVersions)), None)
            if several is None or "model" not in arguments:
                raise
            arguments["model"] = ask_version(several, Output(arguments["join"].json))
            command(**arguments)

    if rest:
        wrapper.__doc__ = f"{wrapper.__doc__}\n\n    More options, explained by --help-all: {', '.join(rest)}."
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {option.name: option.annotation for option in parameters}
    del wrapper.__wrapped__  # typer would follow it to the signature with the dataclasses
    return wrapper


@asynccontextmanager
async def joined(
    join: JoinOptions,
    output: Output,
    *,
    role: str,
    listens: bool,
    identity: Identity | None = None,
    relay_limits: RelayLimits | None = None,
) -> AsyncIterator[tuple[Swarm, Identity]]:
    """Opens a node in its swarm, with the identity of its role; leaves the swarm at the end of the block.

    A node that does not listen takes `identity`, or a new one, and needs a peer that answers.

    Raises:
        BadInput, SwarmError, MachineError: an address is wrong, nobody answers, the port or the identity is taken.
    """
    data_dir = data_folder()
    with ExitStack() as stack:
        if join.identity is not None and not join.identity.exists() and not join.json:
            folder = "" if join.identity.parent.exists() else f", in a new folder {join.identity.parent}"
            output.note(f"there is no key {join.identity} yet: making one{folder}")
        try:
            if listens or join.identity is not None:
                identity = stack.enter_context(held_identity(join.identity, role, data_dir))
            elif identity is None:
                identity = Identity.generate()
        except IdentityLocked as error:
            raise MachineError(str(error)) from error
        except IdentityError as error:
            raise BadInput(str(error)) from error
        config = join.config(identity, listens=listens, data_dir=data_dir, relay_limits=relay_limits or RelayLimits())
        if not (listens or join.peers or join.psk) and join.searches:
            from .control import own_addresses  # 0.1 s, where no swarm is named

            config = replace(config, peers=own_addresses())
        if not config.peers and join.searches:
            output.note(f"looking for a swarm: {join.places} ...")
        with unwrapped(PetalnodeError):
            async with config.trust.kept(), _opened(config, fallback=listens and not join.listen) as swarm:
                if not listens and swarm.joined is None:
                    raise SwarmError(f"no swarm was found, looking for {join.places}. {_HOW_TO_JOIN}")
                yield swarm, identity


@asynccontextmanager
async def _opened(config: SwarmConfig, *, fallback: bool) -> AsyncIterator[Swarm]:
    """Opens the swarm. With `fallback`, on any free port if the one of the configuration is taken."""
    opened = False
    try:
        async with open_swarm(config) as swarm:
            opened = True
            yield swarm
            return
    except MachineError:
        if opened or not fallback:
            raise
    async with open_swarm(replace(config, listen=("/ip4/0.0.0.0/tcp/0",))) as swarm:
        yield swarm


def check_peer_id(text: str, option: str, *, client: bool = False) -> None:
    """
    Raises:
        BadInput: this is no peer id, such as that of a `client`; names the option.
    """
    try:
        peer_id_to_bytes(text)
    except ValueError:
        where = "`petalnode chat --identity FILE` prints that of a client" if client else "they begin with 12D3KooW"
        raise BadInput(f"{option} {text}: this is no peer id; {where}") from None


def kept_port(identity: Identity) -> int:
    """A port derived from the public key, so that a node keeps its address from run to run."""
    return _FIRST_PORT + int.from_bytes(digest("petalnode/port/1", identity.public_key)[:4], "big") % _PORTS
