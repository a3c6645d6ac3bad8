"""The files of the pages, sent as they are: no template, nothing that depends on who asks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

STATIC: Final = Path(__file__).with_name("static")
INDEX: Final = "index.html"
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # A text becomes HTML or a script nowhere, not even by mistake (W3C Trusted Types).
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content-Security-Policy level 3: nothing inline, no eval, nothing from elsewhere, no frame around the page."""

_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a newer petalnode has newer files; the ETag saves sending them again
}


@dataclass(frozen=True)
class StaticFile:
    """One file with the headers that it is sent with."""

    body: bytes
    media_type: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> StaticFile:
        body = path.read_bytes()
        return cls(body, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:24]}"')

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def page_routes() -> list[BaseRoute]:
    """`/` and the files of the pages. They are read once: what is asked for is a key of a table and no path."""
    files = {path.name: StaticFile.read(path) for path in sorted(STATIC.iterdir()) if path.suffix in MEDIA_TYPES}
    return [Route("/", partial(_send, files)), Route("/web/{name}", partial(_send, files))]


async def _send(files: dict[str, StaticFile], request: Request) -> Response:
    found = files.get(request.path_params.get("name", INDEX))
    if found is None:
        raise HTTPException(404)
    return found.answer(request)
