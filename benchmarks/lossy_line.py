"""TCP, with CUBIC and with BBR, beside QUIC on a line that loses frames.

    sudo python benchmarks/lossy_line.py [--loss 0.02] [--rtt 100] [--rate 50] [--rounds 3]

Two hosts (`delay_bridge.py`), the line between them with that share of lost frames each way, milliseconds there and
back, and Mbit/s. `step` is 2,304 bytes there and back, one after the other, as a token of SmolLM2 through one server:
the median, the 95th of a hundred, and the longest, in milliseconds. `bulk` is 1 MiB one way, in Mbit/s, as of a long
prompt. TCP is the kernel's; QUIC is aioquic alone, without py-libp2p above it, so no slower than that could be. Neither
has Noise. Prints one JSON object for each way, the medians of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioquic.asyncio import connect, serve
from aioquic.quic.configuration import QuicConfiguration
from delay_bridge import delay_network

PORT = 4433
STEP, STEPS, BULK = 2304, 100, 1 << 20
WAYS = ("cubic", "bbr", "quic")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Steps come back; of the bulk behind them, the last byte."""
    for _ in range(STEPS):
        writer.write(await reader.readexactly(STEP))
    await reader.readexactly(BULK)
    writer.write(b"\0")


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, float]:
    took = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        writer.write(bytes(STEP))
        await reader.readexactly(STEP)
        took.append(1000 * (time.perf_counter() - begun))
    begun = time.perf_counter()
    writer.write(bytes(BULK))
    await reader.readexactly(1)
    bulk = 8e-6 * BULK / (time.perf_counter() - begun)
    return {"step": statistics.median(took), "step95": sorted(took)[-6], "longest": max(took), "bulk": bulk}


def spawned(handler: Callable[..., Any]) -> Callable[..., None]:
    """As aioquic wants it: a function that is called with each stream."""
    tasks: set[asyncio.Task[None]] = set()

    def on_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(handler(reader, writer)))

    return on_stream


def socket_of(way: str) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, way.encode())
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


async def listening(way: str, certificate: str, key: str) -> None:
    if way == "quic":
        configuration = QuicConfiguration(is_client=False, alpn_protocols=["x"])
        configuration.load_cert_chain(certificate, key)
        await serve("0.0.0.0", PORT, configuration=configuration, stream_handler=spawned(answer))
    else:
        made = socket_of(way)
        made.bind(("0.0.0.0", PORT))
        await asyncio.start_server(answer, sock=made)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def asking(way: str, address: str) -> dict[str, float]:
    if way == "quic":
        configuration = QuicConfiguration(alpn_protocols=["x"], verify_mode=ssl.CERT_NONE)
        async with connect(address, PORT, configuration=configuration) as line:
            return await ask(*await line.create_stream())
    made = socket_of(way)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, (address, PORT))
    return await ask(*await asyncio.open_connection(sock=made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", type=float, default=0.02)
    parser.add_argument("--rtt", type=float, default=100)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)  # a process of this one
    options = parser.parse_args()
    if options.part:
        what, *rest = options.part
        if what == "listen":
            asyncio.run(listening(*rest))
        else:
            print(json.dumps(asyncio.run(asking(*rest))))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("cert.pem", "key.pem")]
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
        subprocess.run([*made, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
        with delay_network(2, options.rtt / 2000, options.rate, options.loss) as network:

            def part(host: int, *arguments: str) -> subprocess.Popen[str]:
                command = network.command(host, [sys.executable, __file__, "--part", *arguments])
                return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

            for _ in range(options.rounds):
                for way in WAYS:
                    listener = part(0, "listen", way, *files)
                    assert listener.stdout is not None and listener.stdout.readline() == "ready\n"
                    found[way].append(json.loads(part(1, "ask", way, network.address(0)).communicate()[0]))
                    listener.communicate("\n")
    for way, rounds in found.items():
        medians = {name: round(statistics.median(one[name] for one in rounds), 1) for name in rounds[0]}
        print(json.dumps({"way": way, **medians}))


if __name__ == "__main__":
    main()
