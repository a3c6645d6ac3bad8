"""A home router's UPnP, as miniupnpc talks to it: finds itself on the local network, and maps ports with iptables.

    python router.py <outer address>

Runs in a NAT's namespace until it is ended; says "ready" first and then what it does, a line each.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

INNER, OUTER, HTTP_PORT = "192.168.1.1", sys.argv[1], 49000
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0">
<specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>{DEVICE}</deviceType><friendlyName>router</friendlyName><UDN>uuid:1</UDN><deviceList>
<device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><UDN>uuid:2</UDN><deviceList>
<device><deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><UDN>uuid:3</UDN><serviceList>
<service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/events</eventSubURL><SCPDURL>/scpd.xml</SCPDURL></service>
</serviceList></device></deviceList></device></deviceList></device></root>"""
RULE = "-i wan -p tcp --dport {outer} -j DNAT --to-destination {host}:{inner}"
mapped: dict[str, str] = {}


def iptables(*arguments: str) -> None:
    subprocess.run(["iptables", *arguments], check=True)


def add(asked: dict[str, str]) -> dict[str, str]:
    outer = asked["NewExternalPort"]
    remove({"NewExternalPort": outer})
    rule = RULE.format(outer=outer, host=asked["NewInternalClient"], inner=asked["NewInternalPort"])
    iptables("-t", "nat", "-A", "PREROUTING", *rule.split())
    mapped[outer] = rule
    print(f"mapped {outer} for {asked['NewLeaseDuration']} s", flush=True)
    return {}


def remove(asked: dict[str, str]) -> dict[str, str]:
    rule = mapped.pop(asked["NewExternalPort"], None)
    if rule is not None:
        iptables("-t", "nat", "-D", "PREROUTING", *rule.split())
        print(f"unmapped {asked['NewExternalPort']}", flush=True)
    return {}


ACTIONS = {
    "GetStatusInfo": lambda _: {"NewConnectionStatus": "Connected", "NewLastConnectionError": "", "NewUptime": "9"},
    "GetExternalIPAddress": lambda _: {"NewExternalIPAddress": OUTER},
    "AddPortMapping": add,
    "DeletePortMapping": remove,
}


class Router(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.reply(DESCRIPTION)

    def do_POST(self) -> None:
        action = self.headers["SOAPAction"].strip('"').partition("#")[2]
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        asked = dict(re.findall(r"<(New\w+)>([^<]*)</", body))
        answer = "".join(f"<{name}>{value}</{name}>" for name, value in ACTIONS[action](asked).items())
        self.reply(
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
            f'<u:{action}Response xmlns:u="{SERVICE}">{answer}</u:{action}Response></s:Body></s:Envelope>'
        )

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def answer_searches() -> None:
    group = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    group.bind(("", 1900))
    member = socket.inet_aton("239.255.255.250") + socket.inet_aton(INNER)
    group.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    while True:
        question, source = group.recvfrom(4096)
        if b"M-SEARCH" in question and DEVICE.encode() in question:
            location = f"http://{INNER}:{HTTP_PORT}/root.xml"
            lines = ["HTTP/1.1 200 OK", f"ST: {DEVICE}", f"USN: uuid:1::{DEVICE}", f"LOCATION: {location}", "EXT:"]
            group.sendto("\r\n".join([*lines, "", ""]).encode(), source)


iptables("-I", "FORWARD", "-i", "wan", "-m", "conntrack", "--ctstate", "DNAT", "-j", "ACCEPT")
threading.Thread(target=answer_searches, daemon=True).start()
server = HTTPServer((INNER, HTTP_PORT), Router)
print("ready", flush=True)
server.serve_forever()
