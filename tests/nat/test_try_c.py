from tests.nat.nodes import LISTEN
def test_x(lab, nodes):
    lan=lab.lan("l"); hs=[lan.host("h"),lan.host("i")]
    for n,h in enumerate(hs): h.ip("address flush dev eth0 scope global", f"address add 169.254.7.{n+1}/16 dev eth0 scope link")
    a=nodes.light(hs[0], listen=[LISTEN], mdns=True, blocks=[0,4]); print(a.ready)
    b=nodes.light(hs[1], listen=[LISTEN], mdns=True); b.ready
    print(b.ask("wait_server", peer=a.peer_id))
