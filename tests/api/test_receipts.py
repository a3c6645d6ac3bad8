"""The receipts of an answer: a file that shows who has computed what, to somebody who was not there."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from petalnode.crypto.identity import Identity
from petalnode.node.api.http.admission import Admission, ApiKeys, hash_of_key
from petalnode.node.cli import app as command_line
from petalnode.node.errors import BadInput
from petalnode.node.testing.memory_servers import memory_swarm
from petalnode.node.trust.receipt_file import AnswerReceipts, SignedReply, check, digest_of, load, to_json
from tests.api.conftest import Served
from tests.memory_api import MemoryApi, memory_api

ASKED: dict[str, Any] = {"model": "tiny-llama", "prompt": "abc", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def answered(api: MemoryApi) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer, and its receipts."""
    answer = httpx.post(f"{api.url}/v1/completions", json={**ASKED, "n": 2}, timeout=None).json()
    receipts = httpx.get(f"{api.url}/v1/petalnode/receipts/{answer['id']}", timeout=None).json()
    return answer, receipts


@pytest.fixture
def file(answered: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> Path:
    path = tmp_path / "receipts.json"
    path.write_text(json.dumps(answered[1]))
    return path


def test_answer_has_each_servers_receipt_for_each_step(
    answered: tuple[dict[str, Any], dict[str, Any]], file: Path
) -> None:
    answer, receipts = answered
    way = answer["x_petalnode"]
    assert way["receipts"] == {"count": len(receipts["receipts"]), "digest": receipts["digest"]}
    stated, replies = load(file)
    found = check(stated, replies)
    assert found.wrong == ()
    assert [server.blocks for server in found.work] == [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6), (4, 6)]
    route = {hop["peer_id"] for choice in way["choices"] for hop in choice["route"]}
    assert {server.peer_id for server in found.work} == route
    steps = answer["usage"]["completion_tokens"] // 2
    assert all(server.replies >= steps for server in found.work)


OTHER = Identity.generate().peer_id
Change = Callable[[list[SignedReply]], list[SignedReply]]
CHANGES: dict[str, tuple[Change, str]] = {
    "another signer": (
        lambda found: [SignedReply(OTHER, found[0].receipt), *found[1:]],
        "signed",
    ),
    "no peer id": (lambda found: [SignedReply("nobody", found[0].receipt), *found[1:]], "signed"),
    "other blocks": (
        lambda found: [SignedReply(found[0].peer_id, replace(found[0].receipt, span=(0, 6))), *found[1:]],
        "signed",
    ),
    "one left out": (lambda found: [found[0], *found[2:]], "follow"),
    "another order": (lambda found: [found[1], found[0], *found[2:]], "follow"),
    "none": (lambda found: [], "no receipts"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_receipts_that_were_changed_are_found_out(change: str, file: Path) -> None:
    stated, replies = load(file)
    changed, said = CHANGES[change][0](replies), CHANGES[change][1]
    if [reply.receipt for reply in changed] != [reply.receipt for reply in replies]:
        assert any("digest" in wrong for wrong in check(stated, changed).wrong)
    assert any(said in wrong for wrong in check(digest_of(changed), changed).wrong)


def test_receipts_for_two_clients_are_no_one_answers(file: Path) -> None:
    _, replies = load(file)
    server = Identity.generate()
    other = replace(replies[0].receipt, client=server.peer_id, session_epoch=bytes(16)).signed(server)
    mixed = [*replies, SignedReply(server.peer_id, other)]
    assert check(digest_of(mixed), mixed).wrong == ("the receipts are for 2 clients",)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "petalnode-receipts/2", "digest": "", "receipts": []}',
        '{"format": "petalnode-receipts/1", "digest": "x", "receipts": []}',
        '{"format": "petalnode-receipts/1", "digest": "", "receipts": [{"peer_id": "x", "receipt": "?"}]}',
        '{"format": "petalnode-receipts/1", "digest": "", "receipts": [{"peer_id": "x", "receipt": "AAAA"}]}',
        '{"format": "petalnode-receipts/1", "digest": "", "receipts": [{"peer_id": "x", "receipt": "'
        + base64.b64encode(b"\xff" * 40).decode()
        + '"}]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_file_of_receipts_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "receipts.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"receipts\.json"):
        load(path)


def test_the_command_says_what_they_show(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stated, replies = load(file)
    assert command_line.run(["verify-receipts", str(file), "--json", "--digest", stated.hex()]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["ok"], said["digest"], len(said["servers"])) == (True, stated.hex(), 6)
    assert command_line.run(["verify-receipts", str(file), "--digest", "00"]) == 1
    assert "another digest" in capsys.readouterr().err
    shorter = tmp_path / "shorter.json"
    shorter.write_text(json.dumps(to_json("x", [replies[0], *replies[2:]])))
    assert command_line.run(["verify-receipts", str(shorter)]) == 1
    assert "do not follow" in capsys.readouterr().out


def test_receipts_are_for_the_key_that_asked(served: Served) -> None:
    keys = ApiKeys({hash_of_key(key): key for key in ("a", "b")})
    with memory_api(served.swarm, served.folder, admission=Admission(keys)) as api:

        def ask(key: str, method: str, path: str, **more: Any) -> httpx.Response:
            with_key = {"Authorization": f"Bearer {key}"}
            return httpx.request(method, api.url + path, headers=with_key, timeout=None, **more)

        name = ask("a", "POST", "/v1/completions", json=ASKED).json()["id"]
        assert ask("a", "GET", f"/v1/petalnode/receipts/{name}").status_code == 200
        assert ask("b", "GET", f"/v1/petalnode/receipts/{name}").status_code == 404
        assert ask("a", "GET", "/v1/petalnode/receipts/other").status_code == 404
        # What servers hold of one's words is not reused for, or shown to, another.
        longer = {**ASKED, "prompt": "what servers hold of it"}
        assert ask("a", "POST", "/v1/completions", json=longer).status_code == 200
        cached = [
            ask(key, "POST", "/v1/completions", json=longer).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for key in ("b", "a", "b")
        ]
        whole = len(longer["prompt"]) - 1  # the last token is always sent
        assert cached == [0, whole, whole]


def test_only_so_many_receipts_are_kept(answered: tuple[dict[str, Any], dict[str, Any]], file: Path) -> None:
    _, replies = load(file)
    book = AnswerReceipts(most=2 * len(replies))
    for name in ("first", "second", "third"):
        book.keep("", name, replies[:1])  # one choice of it has ended
        book.keep("", name, replies)
    assert book.find("", "first") is None
    assert book.find("", "second") == book.find("", "third") == tuple(replies)
    book.keep("", "long", [*replies, *replies, *replies])
    book.keep("", "longer", [*replies, *replies, *replies])
    assert book.find("", "long") is None and book.find("", "third") is None
    assert book.find("", "longer") is not None  # the last answer's are kept, however many
    for number in range(10 * len(replies)):  # those of chains that are compared have none
        book.keep("", f"empty {number}", [])
        book.keep("", f"empty {number}", [])
    assert sum(book.find("", f"empty {number}") is not None for number in range(10 * len(replies))) == 2 * len(replies)


def test_an_answer_of_exact_servers_is_computed_again(api_model: Path) -> None:
    """What the page shows as "Verified to the bit"."""
    with memory_swarm() as swarm:
        servers = [swarm.start(api_model, blocks, exact=True, dtype="float32") for blocks in ("0:3", "3:6")]
        assert all(server.ready["quantisation"] == "none/exact-1" for server in servers)
        with memory_api(swarm, api_model) as api:
            asked = {**ASKED, "prompt": "a text with room for an answer", "n": 2}
            answer = httpx.post(f"{api.url}/v1/completions", json=asked, timeout=None).json()
            receipts = f"{api.url}/v1/petalnode/receipts/{answer['id']}"
            found = httpx.post(f"{receipts}/check", timeout=None).json()["answers"]
            assert [choice["verdict"] for choice in found] == ["yes", "yes"], found
            assert "answers" not in httpx.get(receipts).json()  # nobody is told the text who is shown the receipts
            told = httpx.get(receipts, params={"tokens": "true"}).json()["answers"]
            assert [choice["prompt_tokens"] for choice in told] == 2 * [len(asked["prompt"])]
            assert httpx.post(f"{api.url}/v1/petalnode/receipts/other/check").status_code == 404


def test_an_answer_of_other_servers_is_not(answered: tuple[dict[str, Any], dict[str, Any]], api: MemoryApi) -> None:
    refused = httpx.post(f"{api.url}/v1/petalnode/receipts/{answered[0]['id']}/check", timeout=None)
    assert refused.status_code == 409 and "same bits" in refused.json()["error"]["message"]
