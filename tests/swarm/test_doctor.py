"""`petalnode doctor` beside a real node, and beside nobody."""

from __future__ import annotations

from tests.swarm.processes import LOOPBACK, Nodes, Outcome, petalnode

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWBhrhHZJGkd5mZzQm7dUeUqBvF9ypJTJQTtjrcDMWFXQV"


def found(outcome: Outcome) -> dict[str, str]:
    return {line["check"]: line["verdict"] for line in outcome.objects if line["event"] == "check"}


def test_healthy_node_in_swarm_is_told_so(node_starter: Nodes) -> None:
    peer = node_starter.bootstrap()
    outcome = petalnode("doctor", "--json", "--peer", peer.address, "--listen", LOOPBACK, env=node_starter.env)
    verdicts = found(outcome)
    assert {"versions", "device", "memory", "disk", "port", "swarm", "clock", "reachability"} <= set(verdicts), outcome
    assert (verdicts["swarm"], verdicts["clock"]) == ("ok", "ok"), outcome
    assert verdicts["reachability"] == "warning", outcome  # on loopback nobody else can reach it
    assert outcome.code == ("problem" in verdicts.values()), outcome
    assert "petalnode fit" in outcome.err.splitlines()[-1], outcome


def test_silent_swarm_is_a_problem_with_advice(node_starter: Nodes) -> None:
    outcome = petalnode("doctor", "--json", "--peer", NOBODY, "--listen", LOOPBACK, env=node_starter.env)
    assert found(outcome)["swarm"] == "problem", outcome
    assert outcome.objects[-1]["advice"]
    assert outcome.code == 1, outcome
    assert "Traceback" not in outcome.err
