"""A tab of a browser that does what it is told, in the network namespace that it is started in.

    python -m tests.interop.browser '{"kind": "chromium" or "firefox", "insecure": false, "arguments": []}'

`insecure`: it takes any certificate, as if a person had agreed. `arguments` are of Chromium's command line. Chromium
is driven by playwright, Firefox by WebDriver BiDi, which Debian's speaks without a driver beside it. On standard input
it takes {"number", "do", "with"} for the methods of a tab, and answers {"number", "result" or "error"}.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from playwright.sync_api import Page, sync_playwright
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Message, Request, TextMessage

SIZE: Final = (900, 860)
LONG: Final = 600.0  # seconds, for a start or an answer beside much other work


class Tab(Protocol):
    """One tab of a browser."""

    def open(self, url: str) -> None: ...

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript, in the page."""

    def picture(self, path: str) -> None: ...

    def asked(self) -> list[str]:
        """The URLs that the page has asked for so far."""


class Chromium:
    def __init__(self, page: Page) -> None:
        self._page = page
        self._devtools = page.context.new_cdp_session(page)  # what it has changed lasts as long as it is there
        self._asked: list[str] = []
        page.on("request", lambda request: self._asked.append(request.url))

    def open(self, url: str) -> None:
        self._page.goto(url, timeout=1000 * LONG)

    def run(self, expression: str) -> Any:
        return self._page.evaluate(expression)

    def picture(self, path: str) -> None:
        self._page.screenshot(path=path, timeout=1000 * LONG)

    def asked(self) -> list[str]:
        return self._asked

    def devtools(self, method: str, given: dict[str, Any]) -> Any:
        """A command of the DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""
        return self._devtools.send(method, given)


@contextmanager
def chromium(insecure: bool, arguments: Sequence[str]) -> Iterator[Tab]:
    with sync_playwright() as playwright:
        found = shutil.which("chromium")
        arguments = ["--no-sandbox", *arguments]
        browser = playwright.chromium.launch(executable_path=found, args=arguments, timeout=1000 * LONG)
        try:
            size = {"width": SIZE[0], "height": SIZE[1]}
            yield Chromium(browser.new_page(viewport=size, ignore_https_errors=insecure))  # type: ignore[arg-type]
        finally:
            browser.close()


class Bidi:
    """A connection of WebDriver BiDi (https://w3c.github.io/webdriver-bidi), one command after the other."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=LONG)
        self._connection = WSConnection(ConnectionType.CLIENT)
        self._numbers = itertools.count(1)
        self._waiting: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._socket.sendall(self._connection.send(Request(host=f"{host}:{port}", target="/session")))
        self._text = ""
        while not self._read():
            pass

    def ask(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        text = json.dumps({"id": number, "method": method, "params": params})
        self._socket.sendall(self._connection.send(Message(data=text)))
        while True:
            for message in self._waiting:
                if message.get("id") == number:
                    self._waiting.remove(message)
                    if message["type"] == "error":
                        raise RuntimeError(message["message"])
                    return message["result"]
            self._read()

    def _read(self) -> bool:
        """Takes what comes; whether that was the end of the handshake."""
        self._connection.receive_data(self._socket.recv(1 << 16))
        accepted = False
        for event in self._connection.events():
            accepted |= isinstance(event, AcceptConnection)
            if isinstance(event, TextMessage):
                self._text += event.data
                if event.message_finished:
                    message, self._text = json.loads(self._text), ""
                    (self.events if message["type"] == "event" else self._waiting).append(message)
        return accepted


class Firefox:
    def __init__(self, bidi: Bidi, insecure: bool) -> None:
        self._bidi = bidi
        bidi.ask("session.new", capabilities={"alwaysMatch": {"acceptInsecureCerts": insecure}})
        bidi.ask("session.subscribe", events=["network.beforeRequestSent"])
        self._context = bidi.ask("browsingContext.getTree")["contexts"][0]["context"]
        bidi.ask(
            "browsingContext.setViewport",
            context=self._context,
            viewport={"width": SIZE[0], "height": SIZE[1]},
        )

    def open(self, url: str) -> None:
        self._bidi.ask("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def run(self, expression: str) -> Any:
        target = {"context": self._context}
        said = self._bidi.ask(
            "script.evaluate",
            expression=f"Promise.resolve({expression}).then(value => JSON.stringify(value))",
            target=target,
            awaitPromise=True,
        )
        if said["type"] == "exception":
            raise RuntimeError(said["exceptionDetails"]["text"])
        return json.loads(said["result"]["value"]) if "value" in said["result"] else None

    def picture(self, path: str) -> None:
        said = self._bidi.ask("browsingContext.captureScreenshot", context=self._context)
        Path(path).write_bytes(base64.b64decode(said["data"]))

    def asked(self) -> list[str]:
        self.run("0")  # what came before it was read with the answer
        return [_url_of(event["params"]["request"]) for event in self._bidi.events]


def _url_of(request: dict[str, Any]) -> str:
    """Firefox tells of a WebSocket as of the request that it begins with."""
    headers = {header["name"].lower() for header in request["headers"]}
    url = str(request["url"])
    return url.replace("http", "ws", 1) if headers & {"upgrade", "sec-websocket-key"} else url


@contextmanager
def firefox(insecure: bool, arguments: Sequence[str]) -> Iterator[Tab]:
    """`arguments` are preferences, NAME=VALUE each."""
    with tempfile.TemporaryDirectory() as profile:
        preferences = (argument.partition("=") for argument in arguments)
        lines = [f'user_pref("{name}", {value});\n' for name, _, value in preferences]
        Path(profile, "user.js").write_text("".join(lines))
        command = ["firefox-esr", "--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            said = (re.search(r"BiDi listening on ws://([^:]+):(\d+)", line) for line in process.stderr)
            address = next(found for found in said if found is not None)
            yield Firefox(Bidi(address[1], int(address[2])), insecure)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


KINDS: Final = {"chromium": chromium, "firefox": firefox}


def main(options: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the browser ends as well
    with ExitStack() as stack:
        tab = stack.enter_context(KINDS[options["kind"]](options.get("insecure", False), options.get("arguments", ())))
        print(json.dumps({"event": "ready", "peer_id": "", "addrs": []}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer = {"result": getattr(tab, asked["do"])(**asked["with"])}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"number": asked["number"], **answer}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
