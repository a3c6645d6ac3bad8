from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.swarm import view as view_module
from petalnode.node.swarm.view import SwarmView
from petalnode.protocols.announcement import ServerState, SignedAnnouncement, counts_until
from petalnode.protocols.ids import Span
from tests.announcements import MODEL, identity_of, signed

NOW = 1_800_000_000.0
IDENTITIES = [identity_of(number) for number in range(4)]


def record(server: int, *, at: float = NOW, **fields) -> SignedAnnouncement:
    return signed(IDENTITIES[server], Span(server, server + 5), now=at, **{"num_blocks": 30} | fields)


def peers(view: SwarmView, now: float = NOW) -> list[str]:
    return [content.peer_id for content in view.servers(now=now)]


def test_servers_come_sorted_by_span():
    view = SwarmView().merge([record(2), record(0), record(1)], NOW)
    assert [content.span.start for content in view.servers(now=NOW)] == [0, 1, 2]


def test_newer_announcement_replaces_and_older_one_never_does():
    old, new = record(0, at=NOW, queue_depth=1), record(0, at=NOW + 1, queue_depth=2)
    for order in ([old, new], [new, old], [new, old, old]):
        view = SwarmView()
        for one in order:
            view = view.merge([one], NOW + 1)
        (content,) = view.servers(now=NOW + 1)
        assert content.queue_depth == 2


def test_dates_ahead_are_replaced_by_right_ones() -> None:
    """A server whose clock was a day ahead would be in its own view as it was then, for a day."""
    ahead = record(1, at=NOW + 86400)
    view = SwarmView().merge([ahead], NOW + 86400)
    view = view.merge([record(1)], NOW, source="itself", met=True)
    assert view.records[IDENTITIES[1].peer_id].content.sequence == int(NOW * 1e9)
    # Within what clocks may differ by, the newest stays the newest.
    near = SwarmView().merge([record(1, at=NOW + 5)], NOW)
    assert near.merge([record(1, at=NOW)], NOW).records is near.records


def test_an_expired_server_vanishes_without_a_merge():
    view = SwarmView().merge([record(0, lifetime=45), record(1, lifetime=3000)], NOW)
    gone = counts_until(view.servers(now=NOW)[0]) + 0.001
    assert len(peers(view, gone - 0.01)) == 2
    assert peers(view, gone) == [IDENTITIES[1].peer_id]
    assert view.get(IDENTITIES[0].peer_id, gone) is None
    assert len(view.merge([], gone).records) == 1


def test_an_expired_record_is_never_taken_in():
    view = SwarmView().merge([record(0, at=NOW - 1000)], NOW)
    assert not view.records


def test_goodbye_hides_the_server_from_older_announcements():
    before, goodbye = record(0, at=NOW), record(0, at=NOW + 1, state=ServerState.OFFLINE)
    view = SwarmView().merge([before], NOW).merge([goodbye], NOW + 1).merge([before], NOW + 2)
    assert peers(view, NOW + 2) == []
    back = record(0, at=NOW + 3)
    assert peers(view.merge([back], NOW + 3), NOW + 3) == [IDENTITIES[0].peer_id]


def test_merging_nothing_new_returns_the_same_view():
    view = SwarmView().merge([record(0)], NOW)
    assert view.merge([record(0)], NOW) is view


def test_servers_of_one_model_are_told_apart():
    other = b"w" * 32
    view = SwarmView().merge([record(0), record(1, model_version=other)], NOW)
    assert [content.model_version for content in view.servers(other, now=NOW)] == [other]
    assert len(view.servers(now=NOW)) == 2


def test_models_are_named_as_most_say():
    view = SwarmView().merge([record(0), record(1), record(2, model_name="liar", num_blocks=31)], NOW)
    assert view.models(now=NOW) == {MODEL: ("model", 30)}


def test_records_are_bounded_and_expire_soonest_first(monkeypatch):
    monkeypatch.setattr(view_module, "MAX_RECORDS", 2)
    view = SwarmView().merge([record(0, lifetime=50), record(1, lifetime=40), record(2, lifetime=60)], NOW)
    assert peers(view) == [IDENTITIES[0].peer_id, IDENTITIES[2].peer_id]


@given(st.permutations([(server, second) for server in range(3) for second in range(3)]))
def test_order_in_which_announcements_come_does_not_matter(order):
    view = SwarmView()
    for server, second in order:
        view = view.merge([record(server, at=NOW + second, queue_depth=second)], NOW + 3)
    assert [content.queue_depth for content in view.servers(now=NOW + 3)] == [2, 2, 2]
