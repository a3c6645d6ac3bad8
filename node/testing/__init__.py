"""For tests, of programs that are built on petalnode and of its own: whole swarms in one process, without sockets.

`memory_stream` has the two ends of a stream with the real framing and the faults of a network. `memory_network` has
nodes that reach each other over such streams, `memory_servers` real servers and clients on them. `run_autojumping` runs
trio with a clock that jumps to the next deadline as soon as all tasks wait: nobody sleeps.

May use `cli` and the rooms before it; no room uses it.
"""

from .memory_network import MemoryNetwork, MemoryNode, open_network, run_autojumping
from .memory_stream import MemoryStream, message_streams, stream_pair

__all__ = [
    "MemoryNetwork",
    "MemoryNode",
    "MemoryStream",
    "message_streams",
    "open_network",
    "run_autojumping",
    "stream_pair",
]
