"""What fuzzing has found, each as the least input that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from petalnode.node.client.chat import held_chat
from petalnode.node.client.request import pledged_points
from petalnode.node.errors import BadInput, ModelError
from petalnode.node.models.checkpoint import read_header
from petalnode.node.models.manifest import canonical_architecture
from petalnode.node.network.addresses import dialable, parse_peer
from petalnode.node.placement.planning.machines_file import read_machines
from petalnode.node.tuning.adapter_files import check_adapter
from petalnode.node.tuning.dataset import read_dataset
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import DOMAIN, open_signed
from petalnode.protocols.framing import TensorError, wire_nbytes
from petalnode.protocols.nat_traversal import readable_addrs
from tests.fuzz import corpus


@pytest.mark.parametrize("span", [(0, 0), (5, 2), (0, 2)])
def test_a_pledge_for_no_blocks_or_too_few_pledges_nothing(span: tuple[int, int]) -> None:
    """It raised in the routing of every client that wants pledges."""
    message = corpus.announcement()
    message.pledge.span.start, message.pledge.span.end = span
    data = message.SerializeToString()
    signed = wire.SignedAnnouncement(announcement=data, signature=corpus.ATTACKER.sign(DOMAIN, data))
    assert pledged_points(open_signed(signed, now=corpus.NOW).content, (), corpus.NOW_MS) is None


@pytest.mark.parametrize("codec", ["none", "int8-block64"])
def test_a_shape_of_a_thousand_dimensions_is_refused_before_it_is_multiplied(codec: str) -> None:
    """The product took seconds, or was too large for a float."""
    with pytest.raises(TensorError, match="dimensions"):
        wire_nbytes([(1 << 32) - 1] * 1000, "float32", codec)


def test_a_size_that_no_float_holds_is_exact() -> None:
    assert wire_nbytes([(1 << 31) + 1] * 3, "float32", "int8-block64") == ((1 << 31) + 1) ** 3 + 2 * (
        (((1 << 31) + 1) ** 3 + 63) // 64
    )


def test_an_address_that_the_library_writes_and_cannot_read_is_none() -> None:
    with pytest.raises(BadInput):
        parse_peer("/ip6zone/example.com")
    assert dialable("/ip6zone/example.com") is None


def test_long_addresses_are_not_decoded() -> None:
    """Base58 takes time that grows with the square: 64 KiB of it took seconds."""
    long = b"\xa5\x03" + b"\xff\xff\x03" + b"\x12" * 65535  # a peer id of 64 KiB
    assert readable_addrs([long]) == ()
    with pytest.raises(BadInput, match="too long"):
        parse_peer(f"/ip4/1.2.3.4/tcp/1/p2p/{'Q' * 70_000}")


def safetensors(folder: Path, entry: dict[str, object], name: str = "model.safetensors") -> Path:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return folder / name


@pytest.mark.parametrize("shape", [["a", 1 << 40], [["a"], 1 << 62], [(1 << 62)] * 50_000, "ab", {"a": 1}])
def test_a_shape_in_a_file_is_multiplied_only_if_it_is_one(tmp_path: Path, shape: object) -> None:
    """A text times a number took as much memory as a stranger liked."""
    with pytest.raises(ModelError, match="damaged"):
        read_header(safetensors(tmp_path, {"shape": shape}))


@pytest.mark.parametrize("offsets", [[], [0], "", "x", {}])
def test_an_adapter_with_offsets_that_are_none_is_damaged(tmp_path: Path, offsets: object) -> None:
    safetensors(tmp_path, {"data_offsets": offsets}, "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput):
        check_adapter(tmp_path)


def test_a_configuration_that_is_nested_too_deeply_is_refused() -> None:
    nested: Any = 1
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(ModelError, match="nested"):
        canonical_architecture({"rope_scaling": nested})


def test_labels_that_look_like_numbers_are_texts(tmp_path: Path) -> None:
    labels = ["--5", "-", "9" * 5000, "\u0663", "-0", "07", "10", "-2", "9"]
    file = tmp_path / "examples.jsonl"
    file.write_text("\n".join(json.dumps({"text": "a", "label": label}) for label in labels), encoding="utf-8")
    assert read_dataset(file).labels == ("-2", "9", "10", "-", "--5", "-0", "07", "9" * 5000, "\u0663")


@pytest.mark.parametrize("size", [0, 1e-300, 10**400])
def test_a_plan_for_blocks_of_no_size_is_refused(tmp_path: Path, size: float) -> None:
    file = tmp_path / "machines.json"
    machine = {"name": "a", "device": "t4"}
    file.write_text(json.dumps({"machines": [machine], "model": {"block_mb": size}}))
    with pytest.raises(BadInput, match="block_mb"):
        read_machines(file)


def test_a_table_of_machines_with_an_endless_field_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "machines.csv"
    file.write_text("name,blocks\n" + "a" * 200_000 + ",1\n")
    with pytest.raises(BadInput, match="limit"):
        read_machines(file)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"format": "petalnode-chat/1"}', "1e999"])
def test_what_is_no_conversation_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(text)
    with pytest.raises(BadInput), held_chat(file):
        pass
