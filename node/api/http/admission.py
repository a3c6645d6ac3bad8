"""Who is let in: keys, web pages, hosts, and how many requests at once. Before anything of a request's body is read.

A key is 32 random bytes, of which only a plain SHA-256 is kept. That cannot be searched, and a slow hash would be of no
more use.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....crypto.identity import write_private
from ...errors import BadInput, MachineError
from ...network.shares import ShareCount
from ..errors import MESSAGES_PATH, REQUEST_ID, ApiError, error_response
from .server import LOOPBACK, host_name

_PREFIX: Final = "pn-"
_LINE: Final = re.compile(r"sha256:([0-9a-f]{64})(?:\s+(\S.*))?")
_NO_NAME: Final = "key"


def hash_of_key(key: str) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class ApiKeys:
    """The keys that are accepted, by their hashes, with the name of each one's owner."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    def __len__(self) -> int:
        """How many owners there are."""
        return len({*self._names.values()})

    def owner(self, key: str) -> str | None:
        """The name that goes with `key`; None if it is not one of them."""
        return self._names.get(hash_of_key(key))

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """From a file with a line `sha256:HASH NAME` for each key. Empty lines and those that begin with # say nothing.

        Raises:
            BadInput: a line is no hash, or there is none.
            MachineError: it cannot be read.
        """
        names: dict[str, str] = {}
        for number, line in enumerate(_read(path).splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line)
            if found is None:
                raise BadInput(
                    f"{path}, line {number} is no hash of a key: lines are `sha256:HASH NAME`, as "
                    f"`petalnode api --new-api-key NAME --api-key-file {path}` writes them"
                )
            names[found[1]] = found[2] or f"{_NO_NAME}-{number}"
        if not names:
            raise BadInput(f"{path} has no key: `petalnode api --new-api-key NAME --api-key-file {path}` makes one")
        return cls(names)


def add_key(path: Path, name: str) -> str:
    """Makes a new key, writes its hash to `path` (which only its owner can read) and returns the key.

    Raises:
        BadInput: `name` is empty or has several lines.
        MachineError: the file cannot be read or written.
    """
    name = name.strip()
    if not name or not name.isprintable():
        raise BadInput("--new-api-key takes the name of whom the key is for, on one line")
    key = _PREFIX + secrets.token_urlsafe(32)
    text = _read(path) if path.exists() else ""
    text += "" if text.endswith("\n") or not text else "\n"
    try:
        write_private(path, f"{text}sha256:{hash_of_key(key)} {name}\n".encode())
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}") from error
    return key


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(
            f"there is no file {path}: `petalnode api --new-api-key NAME --api-key-file {path}` makes it"
        ) from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is no text") from None
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error


_LOCKED: Final = ("/v1/", "/api/", "/metrics")
_BUSY_SECONDS: Final = "2"


@dataclass(frozen=True)
class Admission:
    """Who may use the API.

    Attributes:
        keys: that are accepted; None lets in everybody who reaches the port.
        origins: of web pages (`https://chat.example.org`) that may use it from a browser; "*" is all of them.
        hosts: names by which requests may reach it; empty for any. Without keys, a web page whose name is made to
            mean 127.0.0.1 would else be let in (DNS rebinding).
        requests: that are answered at once. With several keys, each may have no more of them than are left for others.
    """

    keys: ApiKeys | None = None
    origins: tuple[str, ...] = ()
    hosts: Collection[str] = field(default=LOOPBACK)
    requests: int = 64


class AdmissionMiddleware:
    """An ASGI application before another one. It finds the owner of the key in `scope["state"]["owner"]`. It also finds
    the id that responses have as `x-request-id` (for Anthropic's clients `request-id`) in
    `scope["state"]["request_id"]`. Log lines about the request have it from `REQUEST_ID`.

    Attributes:
        application: the one behind it.
        changed: is called when one of them has ended.
    """

    def __init__(self, application: ASGIApp, admission: Admission) -> None:
        self.application = application
        self._admission = admission
        least = 1 if admission.keys is not None and len(admission.keys) > 1 else admission.requests
        self._shares = ShareCount(admission.requests, least)
        self.changed: Callable[[], object] = lambda: None

    @property
    def running(self) -> int:
        """Requests that are being answered, those that only read left out."""
        return self._shares.total

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope.setdefault("state", {})["request_id"] = f"req_{secrets.token_hex(12)}"
        token = REQUEST_ID.set(request_id)
        try:
            await self._admitted(scope, receive, _with_request_id(send, scope["path"], request_id))
        finally:
            REQUEST_ID.reset(token)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        host, origins = headers.get("host", ""), self._admission.origins
        allowed = origin is not None and ("*" in origins or origin in origins)
        own = f"http://{host}", f"https://{host}"  # a page of this server, maybe through a proxy that has TLS
        try:
            self._check_host(host)
            if origin is not None and not allowed and origin not in own:
                raise ApiError(
                    403, f"web pages of {origin[:200]} may not use this API: --cors-origin lets them", code="origin"
                )
            if scope["method"] == "OPTIONS" and allowed:
                await _preflight(headers)(scope, receive, _with_cors(send, origin or ""))
                return
            owner = self._owner(scope["path"], headers)
        except ApiError as error:
            refusal = send if not allowed else _with_cors(send, origin or "")
            await error_response(error, scope)(scope, receive, refusal)
            return
        scope["state"]["owner"] = owner
        await self._counted(scope, receive, _with_cors(send, origin or "") if allowed else send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self.application(scope, receive, send)
            return
        owner: str = scope["state"]["owner"]
        if not self._shares.add(owner):
            error = ApiError(
                429,
                f"{self.running} requests are being answered, and no more are allowed at once"
                f"{' for this key' if self.running < self._admission.requests else ''}: ask again later",
                code="too_many_requests",
                headers={"Retry-After": _BUSY_SECONDS},
            )
            await error_response(error, scope)(scope, receive, send)
            return
        try:
            await self.application(scope, receive, send)
        finally:
            self._shares.remove(owner)
            self.changed()

    def _check_host(self, host: str) -> None:
        hosts = self._admission.hosts
        if hosts and host_name(host) not in hosts:
            raise ApiError(403, f"this server does not answer for the host {host[:200]!r}", code="host")

    def _owner(self, path: str, headers: Headers) -> str:
        keys = self._admission.keys
        if keys is None or not path.startswith(_LOCKED):
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # as Anthropic's clients have it
        owner = keys.owner(key.strip())
        if owner is None:
            raise ApiError(
                401,
                "this API needs a key that it knows: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return owner


def _preflight(headers: Headers) -> Response:
    asked = headers.get("access-control-request-headers", "")
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": asked[:1000] or "authorization, content-type",
            "Access-Control-Max-Age": "600",
        },
    )


@dataclass(frozen=True)
class _WithHeaders:
    """Sends what it is given, a response with these headers."""

    send: Send
    headers: Mapping[str, str]
    vary: str = ""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            headers = MutableHeaders(scope=message)
            headers.update(self.headers)
            if self.vary:
                headers.add_vary_header(self.vary)
        await self.send(message)


def _with_request_id(send: Send, path: str, request_id: str) -> Send:
    name = "request-id" if path.startswith(MESSAGES_PATH) else "x-request-id"
    return _WithHeaders(send, {name: request_id})


def _with_cors(send: Send, origin: str) -> Send:
    return _WithHeaders(send, {"Access-Control-Allow-Origin": origin}, vary="Origin")
