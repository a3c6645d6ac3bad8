"""As much of a Redis server as the programs of libp2p/unified-testing need: GET and SET. What is set is printed.

python -m tests.interop.redis_server HOST '{"key": "value"}'
"""

from __future__ import annotations

import json
import socketserver
import sys


class Values(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, host: str, values: dict[str, str]) -> None:
        super().__init__((host, 0), Connection)
        self._values = values

    def answer(self, command: str, key: str, *given: str) -> bytes:
        if command.upper() == "SET":
            self._values[key] = given[0]
            print(json.dumps({"event": "set", "key": key, "value": given[0]}), flush=True)
            return b"+OK\r\n"
        value = self._values.get(key)
        return b"$-1\r\n" if value is None else f"${len(value.encode())}\r\n{value}\r\n".encode()


class Connection(socketserver.StreamRequestHandler):
    server: Values

    def handle(self) -> None:
        while head := self.rfile.readline():
            sizes = (int(self.rfile.readline()[1:]) for _ in range(int(head[1:])))
            words = [self.rfile.read(size + 2)[:-2].decode() for size in sizes]
            self.wfile.write(self.server.answer(*words))


if __name__ == "__main__":
    with Values(sys.argv[1], json.loads(sys.argv[2])) as server:
        print(json.dumps({"event": "ready", "addr": "{}:{}".format(*server.server_address)}), flush=True)
        server.serve_forever()
