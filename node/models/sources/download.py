"""Downloading one file over HTTP, going on where it stopped: after a broken connection and after a restart."""

from __future__ import annotations

import base64
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ..cache_dir import is_disk_error
from ..progress import Progress

_TIMEOUT_S = 30.0  # for a connection, and for silence on it
_CHUNK = 1 << 20
_ATTEMPTS = 4  # in a row that bring nothing
_RANGE_NOT_SATISFIABLE = 416


def open_url(url: str, headers: Mapping[str, str]) -> Any:
    """An open response for `url`, with a deadline on every read. Proxies come from the environment, as do
    certificates (PIP_CERT, REQUESTS_CA_BUNDLE, SSL_CERT_FILE) and a login from the URL itself.

    Raises:
        OSError: if it cannot be had (urllib's URLError and HTTPError are OSErrors).
    """
    sent = dict(headers)
    parts = urllib.parse.urlsplit(url)
    if parts.username:
        login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        sent["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    bundle = os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE")
    context = ssl.create_default_context(cafile=bundle) if parts.scheme == "https" else None
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()
    request = urllib.request.Request(address)
    for name, value in sent.items():
        request.add_unredirected_header(name, value)  # a login is for this host, not for where it points to
    return urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context)


def download(
    url: str, target: Path, progress: Progress, *, what: str, headers: Mapping[str, str] | None = None
) -> None:
    """Brings `target` to the whole of what `url` gives; what `target` holds already is taken as its beginning.

    Raises:
        OSError, HTTPException: if it fails time after time without getting any further.
    """
    failures = 0
    while True:
        before = target.stat().st_size if target.exists() else 0
        try:
            _append(url, target, before, progress, what, headers or {})
            return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
            problem: OSError | HTTPException = error
        except (OSError, HTTPException) as error:
            if is_disk_error(error):
                raise
            problem = error
        failures = 0 if target.exists() and target.stat().st_size > before else failures + 1
        if failures >= _ATTEMPTS:
            raise problem
        if failures:
            time.sleep(2.0 ** (failures - 1))


def _append(url: str, target: Path, start: int, progress: Progress, what: str, headers: Mapping[str, str]) -> None:
    wanted = {**headers, "Range": f"bytes={start}-"} if start else headers
    try:
        response = open_url(url, wanted)
    except urllib.error.HTTPError as error:
        if error.code == _RANGE_NOT_SATISFIABLE and start:
            # Either the file is complete, or it is no beginning of this one: the caller checks its hash.
            if error.headers.get("Content-Range", "").endswith(f"/{start}"):
                return
            target.unlink()
            raise ConnectionError("the file on the server is another one now") from error
        raise
    with response:
        resumed = response.status == 206 if start else False
        done = start if resumed else 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with target.open("ab" if resumed else "wb") as stream:
            progress(what, done, total)
            while chunk := response.read(_CHUNK):
                stream.write(chunk)
                done += len(chunk)
                progress(what, done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection broke after {done:,} of {total:,} bytes")
