"""The `openai` package's own tests of its resources against the API: `make compat`.

They were written against a mock that knows every endpoint, takes every field and finds every id: the stores here find
every id, too, and what is not served or taken is listed with the error that says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import openai
import pytest

from petalnode.node.api.batches.runner import BatchLimits, BatchRunner
from petalnode.node.api.batches.store import BatchStore, StoredBatch, StoredFile
from petalnode.node.api.engine.generation import ApiLimits, ServedModel
from petalnode.node.api.openai.endpoints import ResponseStore, StoredResponse
from tests.api.conftest import Served
from tests.import_graph import ROOT
from tests.memory_api import MemoryApi, memory_api

SUITE: Final = ROOT / f"build/compat/openai-{openai.__version__}"
MODELS: Final = ("gpt-6-astra", "gpt-4o-mini", "gpt-3.5-turbo-instruct", "text-embedding-3-small")
"""That the suite asks for."""
FILES: Final = (
    "test_batches.py",
    "test_completions.py",
    "test_embeddings.py",
    "test_files.py",
    "test_models.py",
    "test_responses.py",
    "chat/test_completions.py",
    "responses/test_input_items.py",
    "responses/test_input_tokens.py",
)
"""Of the suite's tests, those of resources of which the API serves any. It has none of the others."""

EXPECTED: Final = {
    "there is no /v1/chat/completions/completion_id here": "chats are not kept",
    "there is no /v1/responses/resp_677efb5139a88190b512bc3fef8e535d/cancel here": "no responses in the background",
    "405 - Method Not Allowed": "chats are not listed, models not deleted, responses not compacted",
    "responses are not streamed again": "no responses in the background",
    "input: a text or a list of items is expected": "asks without an input",
    "purpose: only batch is known here": "files are for batches",
    "limit: from 1 to 10000": "a list of no items",
    "suffix: text cannot be put between two texts here": "all fields of a completion at once",
    "background: answers are made while their clients wait": "all fields of a response at once",
    "functions: this is the old form: use tools": "all fields of a chat at once",
    "dimensions: a model's hidden states have one size only": "embeddings of another size",
    "conversation: conversations are kept by previous_response_id only": "all fields of a count at once",
    "Data returned by API invalid for expected schema": "strict clients do not take the base64 that they ask for",
    "aiohttp client is not compatible with respx2_mock": "the suite skips these itself",
}
"""What the tests that do not pass are told, and why."""


class AllResponses(ResponseStore):
    """Finds the oldest response under every id."""

    def find(self, owner: str, name: str) -> StoredResponse:
        found = next(iter(self._kept.values()))[0]
        return replace(found, response={**found.response, "id": name})

    def drop(self, owner: str, name: str) -> bool:
        return True


class AllBatches(BatchStore):
    """Finds a file and a batch under every id."""

    def file(self, owner: str, name: str) -> StoredFile:
        return StoredFile(name, owner, "requests.jsonl", "batch", 1_700_000_000, 2)

    def content(self, owner: str, name: str) -> bytes:
        return b"{}"

    def batch(self, owner: str, name: str) -> StoredBatch:
        return StoredBatch(name, owner, "/v1/responses", "file-1", "cancelling", 1_700_000_000)


@pytest.fixture
def finding_all(served: Served, tmp_path: Path) -> Iterator[MemoryApi]:
    store, responses = AllBatches(tmp_path / "batches"), AllResponses()
    with memory_api(
        served.swarm,
        served.folder,
        models=[ServedModel(name) for name in MODELS],
        limits=ApiLimits(answer_tokens=8),
        batches=BatchRunner(store, BatchLimits(slots=0)),
        responses=responses,
    ) as api:
        with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none") as client:
            client.responses.create(input="a", max_output_tokens=1)
        yield api
    store.close()


def outcomes(api: MemoryApi, report: Path) -> dict[str, str]:
    """For each test of the suite how it ended: empty if it has passed."""
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", "default", f"--junit-xml={report}"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/api_resources/{name}" for name in FILES)],
        cwd=SUITE,
        env={**os.environ, "TEST_API_BASE_URL": f"{api.url}/v1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return {
        f"{case.get('classname')}.{case.get('name')}": " ".join(str(part.get("message")) for part in case)
        for case in ElementTree.parse(report).getroot().iter("testcase")
    }


def test_all_pass_but_those_that_are_listed(finding_all: MemoryApi, tmp_path: Path) -> None:
    found = outcomes(finding_all, tmp_path / "report.xml")
    counted: Counter[str] = Counter()
    unexpected = {}
    for name, told in found.items():
        known = next((part for part in EXPECTED if part in told), None)
        if told and known is None:
            unexpected[name] = told
        counted[known or ""] += 1
    print(f"\n{len(found)} tests, {counted.pop('')} passed")
    for part, count in counted.most_common():
        print(f"{count:4} {EXPECTED[part]}: {part}")
    assert not unexpected
    assert set(counted) == set(EXPECTED), "some of what is listed passes now"
