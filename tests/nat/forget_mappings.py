"""Empties the table of connections of the network namespace that it runs in, as `conntrack -F` does."""

from __future__ import annotations

import os
import socket
import struct

_NETLINK_NETFILTER = 12
_DELETE = 1 << 8 | 2  # the subsystem of connection tracking, IPCTNL_MSG_CT_DELETE; without attributes: all
_REQUEST, _ACK = 1, 4

with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as netlink:
    netlink.bind((0, 0))
    netlink.send(struct.pack("=IHHIIBBH", 20, _DELETE, _REQUEST | _ACK, 1, 0, 0, 0, 0))
    (error,) = struct.unpack("=i", netlink.recv(4096)[16:20])
    if error:
        raise OSError(-error, os.strerror(-error))
