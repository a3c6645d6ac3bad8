"""`petalnode api` as a process: from its ready event to an answer of the official client, and to its end."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from petalnode.node.api.http.admission import ApiKeys, hash_of_key
from petalnode.node.cli.commands.api import ApiOptions, _make_key, admission_of, listeners_of
from petalnode.node.cli.output import Output
from petalnode.node.errors import BadInput, MachineError
from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import STOP_TIMEOUT, Running, environment, wait_ended


def test_from_the_command_to_an_answer(shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    key = "pn-of-this-test"
    keys.write_text(f"sha256:{hash_of_key(key)} alice\n")
    command = [
        *(sys.executable, "-m", "petalnode", "api", str(shared_swarm.folder), "--peer", shared_swarm.peer),
        *("--http-port", "0", "--api-key-file", str(keys), "--json"),
    ]
    server = Running(command, environment(tmp_path))
    try:
        ready = json.loads(server.line())
        assert (ready["event"], ready["models"]) == ("ready", ["tiny-llama"])
        asked: dict[str, Any] = {"model": "tiny-llama", "prompt": "abc", "max_tokens": 6, "temperature": 0}
        with openai.OpenAI(base_url=f"{ready['url']}/v1", api_key=key, max_retries=0, timeout=None) as client:
            text = client.completions.create(**asked).choices[0].text
            pieces = client.completions.create(**asked, stream=True)
            assert "".join(piece.choices[0].text for piece in pieces) == text
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="pn-another").models.list()
        with httpx.Client(base_url=ready["url"], timeout=None, trust_env=False) as reader:
            assert reader.get("/metrics").status_code == 401
            page = reader.get("/metrics", headers={"Authorization": f"Bearer {key}"}).text
        for line in (
            'petalnode_api_answers_total{reason="length"} 2.0',
            'petalnode_api_tokens_total{kind="completion"} 12.0',
            "petalnode_api_first_token_seconds_count 2.0",
            'petalnode_build_info{role="api",',
        ):
            assert line in page
    finally:
        server.process.send_signal(signal.SIGTERM)
        code = wait_ended(server.process, STOP_TIMEOUT)
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in server.errors
    assert key not in server.errors


def test_a_new_key_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    _make_key(ApiOptions(api_key_file=file, new_api_key="alice"), Output(True))
    event = json.loads(capsys.readouterr().out)
    assert ApiKeys.read(file).owner(event["key"]) == event["name"] == "alice"
    with pytest.raises(BadInput, match="--api-key-file"):
        _make_key(ApiOptions(new_api_key="alice"), Output(True))


def test_other_machines_are_let_in_with_keys_only(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(BadInput, match="--api-key-file"):
            admission_of(ApiOptions(host=host))
    assert admission_of(ApiOptions()).hosts
    file = tmp_path / "keys"
    _make_key(ApiOptions(api_key_file=file, new_api_key="alice"), Output(True))
    admission = admission_of(ApiOptions(host="0.0.0.0", api_key_file=file))
    assert admission.keys is not None
    assert not admission.hosts


@pytest.mark.parametrize("origin", ["chat.example.org", "https://", "https://chat.example.org/", "file:///x"])
def test_an_origin_has_to_be_one(origin: str) -> None:
    with pytest.raises(BadInput, match="--cors-origin"):
        admission_of(ApiOptions(cors_origin=[origin]))


async def test_taken_port_is_told_in_one_line() -> None:
    first = await listeners_of(ApiOptions(http_port=0))
    port = first[0].socket.getsockname()[1]
    with pytest.raises(MachineError, match=f"--http-port {port}.*in use"):
        await listeners_of(ApiOptions(http_port=port))
    with pytest.raises(MachineError, match=r"192\.0\.2\.1"):
        await listeners_of(ApiOptions(host="192.0.2.1", http_port=0))
    for listener in first:
        await listener.aclose()
