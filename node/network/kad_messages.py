"""Kademlia's messages (https://github.com/libp2p/specs/tree/master/kad-dht), which are bounded before they are parsed.

A message of 40 KiB may have 20,000 empty peers in it, one of 256 KiB 130,000.
"""

from __future__ import annotations

import time
from typing import Final

from google.protobuf.message import DecodeError
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record

from ...protocols.delimited import parse_message

KAD: Final = str(PROTOCOL_ID)
MAX_REQUEST: Final = 40 * 1024
"""Bytes; the longest one carries a list of models."""
MAX_ANSWER: Final = 256 * 1024
"""Bytes: 20 peers on the way and hundreds of providers."""
MAX_REQUEST_FIELDS: Final = 256
MAX_ANSWER_FIELDS: Final = 8192
"""Of a message and of the messages in it, together."""
MAX_KEY: Final = 128  # bytes


class BadMessage(ValueError):
    """No message of Kademlia, or one that is out of bounds."""


def parse(data: bytes, *, max_fields: int) -> Message:
    """The message in `data`, which has at most `max_fields` fields.

    Raises:
        BadMessage: it has more, or it is malformed.
    """
    try:
        return parse_message(Message, data, most=max_fields)
    except DecodeError as error:
        raise BadMessage(f"no message of Kademlia: {error}") from error


def record_of(key: bytes, value: bytes, received: float | None = None) -> Record:
    """A value as it is sent, in the form of RFC 3339. With the time at which it came (seconds since 1970), if any."""
    record = Record(key=key, value=value)
    if received is not None:
        record.timeReceived = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(received))
    return record
