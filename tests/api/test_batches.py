"""/v1/files and /v1/batches by the official client, across a restart, beside others, and without room."""

from __future__ import annotations

import json
import math
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
import trio.testing
from starlette.requests import Request
from starlette.routing import Route

from petalnode.node.api.batches.endpoints import batch_routes
from petalnode.node.api.batches.objects import WINDOW_SECONDS, read_input
from petalnode.node.api.batches.runner import BatchLimits, BatchRunner, free_slots, next_batch
from petalnode.node.api.batches.store import BATCH_STORE, BatchLine, BatchStore, NoRoom, StoredBatch
from petalnode.node.api.errors import ApiError
from petalnode.node.api.http.admission import Admission, AdmissionMiddleware, ApiKeys, hash_of_key
from petalnode.node.errors import BadInput, MachineError
from tests.api.conftest import Served
from tests.memory_api import MemoryApi, memory_api
from tests.patience import eventually

MODEL = "tiny-llama"
CHAT = "/v1/chat/completions"
KEYS = ApiKeys({hash_of_key("pn-a"): "alice", hash_of_key("pn-b"): "bob"})


@contextmanager
def running(
    served: Served, path: Path, limits: BatchLimits | None = None, kind: type[BatchStore] = BatchStore
) -> Iterator[MemoryApi]:
    store = kind(path)
    try:
        runner = BatchRunner(store, limits)
        with memory_api(served.swarm, served.folder, admission=Admission(KEYS), batches=runner) as api:
            yield api
    finally:
        store.close()


def of(api: MemoryApi, key: str = "pn-a") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=0, timeout=None)


def request(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**asked, **body}}


def lines(requests: Sequence[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(one)}\n" for one in requests).encode()


def start(client: openai.OpenAI, requests: Sequence[dict[str, Any]], endpoint: Any = CHAT) -> Any:
    file = client.files.create(file=("requests.jsonl", lines(requests)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"of": "a test"}
    )


def until(client: openai.OpenAI, name: str, wanted: Callable[[Any], bool]) -> Any:
    found: list[Any] = []

    async def reached() -> bool:
        found[:] = [await trio.to_thread.run_sync(client.batches.retrieve, name)]
        return wanted(found[0])

    trio.run(eventually, reached, "the batch is as far as that")
    return found[0]


def over(batch: Any) -> bool:
    return batch.status in ("completed", "failed", "cancelled", "expired")


def results(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    assert file is not None
    found = [json.loads(line) for line in client.files.content(file).text.splitlines()]
    return {line["custom_id"]: line["response"] for line in found}


def test_a_batch_from_its_file_to_its_answers(served: Served, tmp_path: Path) -> None:
    with running(served, tmp_path / "batches") as api, of(api) as client:
        asked = [request("one"), request("two", max_tokens=2), request("wrong", temperature=-1)]
        batch = start(client, asked)
        assert batch.status in ("validating", "in_progress")
        batch = until(client, batch.id, over)
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 2, 1)
        assert batch.metadata == {"of": "a test"}
        found = results(client, batch.output_file_id)
        alone = client.chat.completions.create(**asked[0]["body"]).choices[0].message.content
        assert found["one"]["status_code"] == 200
        assert found["one"]["body"]["choices"][0]["message"]["content"] == alone
        assert set(found) == {"one", "two"}
        wrong = results(client, batch.error_file_id)["wrong"]
        assert (wrong["status_code"], wrong["body"]["error"]["param"]) == (400, "temperature")
        assert [listed.id for listed in client.batches.list()] == [batch.id]
        assert len(list(client.files.list(limit=1))) == 3
        assert next(iter(client.files.list(order="asc"))).id == batch.input_file_id
        assert [file.id for file in client.files.list()][-1] == batch.input_file_id
        with pytest.raises(openai.BadRequestError, match="is for batch_output, and not for batch"):
            client.batches.create(input_file_id=batch.output_file_id, endpoint=CHAT, completion_window="24h")
        for file in list(client.files.list()):
            client.files.delete(file.id)
        assert not list(client.files.list())
        # Nothing of it is another key's.
        with of(api, "pn-b") as bob:
            assert not list(bob.batches.list())
            with pytest.raises(openai.NotFoundError):
                bob.batches.retrieve(batch.id)
            with pytest.raises(openai.NotFoundError):
                bob.batches.cancel(batch.id)
    assert stat.S_IMODE((tmp_path / "batches").stat().st_mode) == 0o600


def test_a_batch_goes_on_after_a_restart(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "batches"
    none = BatchLimits(slots=0)  # as if others took all there is
    with running(served, path, none) as api, of(api) as client:
        batch = start(client, [request(str(number), max_tokens=1) for number in range(3)])
        until(client, batch.id, lambda batch: batch.status == "in_progress")
    store = BatchStore(path)
    (first, *_) = store.open_lines(batch.id, 0, 1)
    store.note_result(first, False, json.dumps({"custom_id": first.custom_id, "response": {"kept": True}}))
    store.close()
    with running(served, path) as api, of(api) as client:
        batch = until(client, batch.id, over)
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)
        found = results(client, batch.output_file_id)
        assert found["0"] == {"kept": True}  # not asked again
        assert [found[name]["status_code"] for name in ("1", "2")] == [200, 200]


def test_batch_that_is_cancelled_keeps_what_it_has(served: Served, tmp_path: Path) -> None:
    with running(served, tmp_path / "batches", BatchLimits(slots=1)) as api, of(api) as client:
        unending = {"logit_bias": {"127": -100}, "max_tokens": 900}
        long = [request(str(number), **unending) for number in range(100)]
        batch = start(client, [request("short", max_tokens=1), *long])
        until(client, batch.id, lambda batch: batch.request_counts.completed >= 1)
        client.batches.cancel(batch.id)
        batch = until(client, batch.id, over)
        assert batch.status == "cancelled"
        found = results(client, batch.output_file_id)
        assert "short" in found
        assert len(found) == batch.request_counts.completed < 101
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)


class _CancelledWhileRead(BatchStore):
    def begin(self, name: str, lines: Iterable[tuple[int, str, str]]) -> None:
        self.set_status(name, "cancelling")  # as its endpoint does, in another thread
        super().begin(name, lines)


def test_batch_that_is_cancelled_while_read(served: Served, tmp_path: Path) -> None:
    with running(served, tmp_path / "batches", kind=_CancelledWhileRead) as api, of(api) as client:
        batch = until(client, start(client, [request("one")]).id, over)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)


def test_batch_that_is_over_stays_so(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches")
    store.add_batch(StoredBatch("batch_a", "alice", CHAT, "file-a", "validating", 0))
    for status in ("completed", "cancelling"):
        store.set_status("batch_a", status)
    found = store.batch("alice", "batch_a")
    assert found is not None and found.status == "completed"
    store.close()


def test_batches_behind_a_faulty_one_are_answered(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petalnode.node.api.batches.runner._LOOK", math.inf)
    store = BatchStore(tmp_path / "batches")
    for name, content in (("batch_a", b"{"), ("batch_b", lines([request("one", max_tokens=1)]))):
        file = store.add_file("alice", "x.jsonl", "batch", content)
        store.add_batch(StoredBatch(name, "alice", CHAT, file.id, "validating", int(time.time())))
    store.close()
    with running(served, tmp_path / "batches") as api, of(api) as client:
        assert until(client, "batch_b", over).status == "completed"


def test_what_is_no_batch(served: Served, tmp_path: Path, client: Any) -> None:
    limits = BatchLimits(requests=3, file_bytes=10_000, open_batches=1)
    with running(served, tmp_path / "batches", limits) as api, of(api) as asking:
        for content in (b"", b"{", lines([request("a"), request("a")]), lines([request("a", stream=True)])):
            file = asking.files.create(file=("x.jsonl", content), purpose="batch")
            batch = asking.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            batch = until(asking, batch.id, over)
            assert (batch.status, len(batch.errors.data)) == ("failed", 1), content
        with pytest.raises(openai.APIStatusError) as raised:
            asking.files.create(file=("x.jsonl", b"x" * 100_000), purpose="batch")
        assert raised.value.status_code == 413
        for form in ({"files": {"file": b"x"}, "data": {"purpose": "other"}}, {"data": {"purpose": "batch"}}):
            answer = asking._client.post("/files", **form, headers={"Authorization": "Bearer pn-a"})
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
        with pytest.raises(openai.BadRequestError):
            asking.batches.create(input_file_id="file-0", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError, match="--batch-file"):  # an API that keeps none
        client.batches.list()


async def slowly(*_: object) -> Any:
    """The body of a request that does not come."""
    await trio.sleep_forever()


async def test_a_key_may_send_two_files_at_once(tmp_path: Path) -> None:
    with closing(BatchStore(tmp_path / "batches")) as store:
        routes = batch_routes(BatchRunner(store))
        upload = next(route.endpoint for route in routes if isinstance(route, Route) and route.path == "/v1/files")
        headers = [(b"content-type", b"multipart/form-data; boundary=x")]

        async def send(owner: str) -> None:
            scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": headers}
            with trio.move_on_after(0.1 if owner == "bob" else math.inf):
                await upload(Request({**scope, "state": {"owner": owner}}, slowly))

        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(send, "alice")
                await trio.testing.wait_all_tasks_blocked()
                await send("bob")
                with pytest.raises(ApiError, match="2 files of this key are being uploaded"):
                    await send("alice")
                nursery.cancel_scope.cancel()


async def test_batch_begins_beside_last_request_of_another(tmp_path: Path) -> None:
    looks = 0
    both, count = trio.Event(), 0

    class Store(BatchStore):
        def batches(self, owner: str | None = None) -> list[StoredBatch]:
            nonlocal looks
            looks += 1
            return super().batches(owner)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            both.set()
        await both.wait()
        if (await receive())["body"] == b"0":
            raise ValueError("a fault")
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ended() -> bool:
        return all(map(over, store.batches("alice")))

    with closing(Store(tmp_path / "a" / "folder" / "batches")) as store:
        for number in range(2):
            name = f"batch_{number}"
            store.add_batch(StoredBatch(name, "alice", CHAT, "file", "validating", int(time.time())))
            store.begin(name, [(1, "one", str(number))])
        async with trio.open_nursery() as nursery:
            runner = BatchRunner(store, BatchLimits(slots=2))
            nursery.start_soon(runner.run, AdmissionMiddleware(application, Admission()))
            await eventually(ended, "both batches are over")
            before = looks
            await trio.sleep(0.1)
            assert looks <= before + 4, "nothing is to be done"
            nursery.cancel_scope.cancel()
        failed, done = (store.batch("alice", f"batch_{number}") for number in range(2))
        assert failed is not None and done is not None and (failed.failed, done.completed) == (1, 1)
        told = json.loads(store.content("alice", failed.fields["error_file_id"]) or b"")
        assert told["response"]["status_code"] == 500


def test_file_is_for_one_process_and_one_kind(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches")
    with pytest.raises(MachineError, match="another process"):
        BatchStore(tmp_path / "batches")
    store.close()
    with closing(sqlite3.connect(tmp_path / "newer")) as database:
        database.execute("PRAGMA user_version = 7")
    with pytest.raises(BadInput, match="of this version"):
        BatchStore(tmp_path / "newer")
    (tmp_path / "other").write_bytes(b"something else" * 1000)
    with pytest.raises(BadInput, match="no file of batches"):
        BatchStore(tmp_path / "other")
    with closing(sqlite3.connect(tmp_path / "another program's")) as database:
        database.execute("CREATE TABLE bookmarks (url TEXT)")
    data = (tmp_path / "another program's").read_bytes()
    with pytest.raises(BadInput):
        BatchStore(tmp_path / "another program's")
    assert (tmp_path / "another program's").read_bytes() == data


def test_the_disk_is_bounded_and_shared(tmp_path: Path) -> None:
    disk = 4 << 20
    store = BatchStore(tmp_path / "batches", disk)
    share = disk // 4 - BATCH_STORE.object_bytes
    assert store.room("alice") == share
    kept = store.add_file("alice", "x", "batch", b"x" * share)
    assert store.room("alice") == 0
    with pytest.raises(NoRoom, match="one key"):
        store.add_file("alice", "y", "batch", b"x")
    store.add_file("bob", "x", "batch", b"x" * 1000)
    for number in range(20):
        try:
            store.add_file(f"key {number}", "x", "batch", b"x" * share)
        except NoRoom:
            break
    else:
        raise AssertionError("there is no bound")
    assert (tmp_path / "batches").stat().st_size <= disk
    batch = StoredBatch("batch_1", "bob", CHAT, "file", "validating", int(time.time()))
    store.add_batch(batch)
    with pytest.raises(NoRoom):
        store.begin("batch_1", [(number, str(number), "x" * 100_000) for number in range(100)])
    store.give_up(batch, "there is no room")
    found = store.batch("bob", "batch_1")
    assert found is not None and (found.status, found.total) == ("failed", 0)
    assert store.drop_file("alice", kept.id)
    store.add_file("alice", "y", "batch", b"x" * (disk // 8))
    store.close()


def test_full_disk_at_a_batchs_end_stops_nothing(served: Served, tmp_path: Path) -> None:
    """There is no room for an answer, and not even for the word that there is none."""
    gave_up: list[str] = []

    class Full(BatchStore):
        def note_result(self, *_: object, **fields: object) -> None:
            raise NoRoom("the files of batches have no room")

        finish = note_result

        def give_up(self, batch: StoredBatch, message: str) -> None:
            gave_up.append(message)
            raise sqlite3.OperationalError("database or disk is full")

    with running(served, tmp_path / "batches", kind=Full) as api, of(api) as client:
        batch = start(client, [request("one", max_tokens=1)])
        until(client, batch.id, lambda _: bool(gave_up))
        answer = client.chat.completions.create(**request("two", max_tokens=1)["body"])
        assert answer.choices and client.batches.retrieve(batch.id).status == "in_progress"


def test_a_batch_that_takes_too_long_expires(served: Served, tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches")
    old = StoredBatch("batch_1", "alice", CHAT, "file", "validating", int(time.time()) - WINDOW_SECONDS - 1)
    store.add_batch(old)
    store.begin("batch_1", [(1, "one", "{}"), (2, "two", "{}")])
    store.note_result(BatchLine("batch_1", 1, "one", "{}"), False, '{"custom_id": "one", "response": 1}')
    store.close()
    with running(served, tmp_path / "batches", BatchLimits(slots=0)) as api, of(api) as client:
        batch = until(client, "batch_1", over)
        assert batch.status == "expired"
        assert results(client, batch.output_file_id) == {"one": 1}


def test_interactive_requests_come_first_and_owners_take_turns() -> None:
    assert [free_slots(8, interactive, 2) for interactive in (0, 5, 6, 64)] == [6, 1, 0, 0]
    batches = [StoredBatch(f"batch_{name}", name, CHAT, "", "in_progress", 0) for name in ("a", "a", "b")]
    first = next_batch(batches, {})
    assert first is batches[0]
    assert next_batch(batches, {"a": 1}).owner == "b"
    assert next_batch(batches, {"a": 1, "b": 2}) is batches[0]
    assert next_batch([replace(batches[1], id="x")], {"a": 9}).id == "x"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        *((text, "invalid_json") for text in (b"[" * 100_000, b"\xff\n", b"null", b'{"a":' * 500 + b"}" * 500)),
        (b'{"custom_id": 1}', "missing_field"),
        (lines([request("a", url="/v1/completions")]), "invalid_value"),
        (lines([request("")]), "invalid_value"),
    ],
)
def test_hostile_lines_are_faults(content: bytes, code: str) -> None:
    requests, faults = read_input(content, CHAT, 10)
    assert not requests
    assert (faults[0].line, faults[0].code) == (1, code)
    assert len(read_input(b"{\n" * 1000, CHAT, 1000)[1]) == 20
    assert read_input(lines([request(str(number)) for number in range(11)]), CHAT, 10)[1][0].code == "too_many_requests"


def test_full_batch_may_end_with_blank_lines() -> None:
    full = lines([request(str(number)) for number in range(10)])
    requests, faults = read_input(full + b"\n" * 10, CHAT, 10)
    assert len(requests) == 10 and not faults
    assert read_input(full + b"\n" * 11, CHAT, 10)[1][0].code == "too_many_requests"
