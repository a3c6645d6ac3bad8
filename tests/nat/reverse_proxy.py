"""A reverse proxy in front of a node of the same machine that listens for WebSocket, as nginx and Caddy are.

    python -m tests.nat.reverse_proxy PORT PORT_OF_THE_NODE CERTIFICATE KEY

It ends TLS, asks the node in its own words, and hands bytes on late and in other pieces than they came in. For each
line of standard input it cuts the connections that it has, and prints {"event": "cut", "requests"}: how many there
have been.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import sys
from typing import Final

_SIZES: Final = itertools.cycle((1, 2, 125, 1000, 4096, 65536))  # bytes of what it hands on at once
_HELD: Final = 0.002  # seconds for which it gathers


class ReverseProxy:
    def __init__(self, node: int) -> None:
        self._node = node
        self._writers: set[asyncio.StreamWriter] = set()
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        self.requests += 1
        ends = {writer}
        try:
            request, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            near, far = await asyncio.open_connection("127.0.0.1", self._node)
            ends.add(far)
            kept = [field for field in fields if not field.lower().startswith("host:")]
            own = ["Host: behind", "X-Forwarded-For: 203.0.113.9", "X-Forwarded-Proto: https"]
            far.write("\r\n".join([request, *own, *kept, "", ""]).encode())
            self._writers |= ends
            await asyncio.gather(self._hand_on(reader, far), self._hand_on(near, writer))
        except (OSError, EOFError):
            pass
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _hand_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await asyncio.sleep(_HELD)
            while data:
                size = next(_SIZES)
                target.write(data[:size])
                data = data[size:]
                await target.drain()
        raise EOFError

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


async def main(port: int, node: int, certificate: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    proxy = ReverseProxy(node)
    async with await asyncio.start_server(proxy.serve, port=port, ssl=context):
        print(json.dumps({"event": "ready", "peer_id": "", "addrs": []}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            proxy.cut()
            print(json.dumps({"event": "cut", "requests": proxy.requests}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
