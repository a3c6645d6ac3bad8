"""What fuzzing has found, each as the least input that shows it."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from multiaddr import Multiaddr

from petalnode.node.blocks.quantisation.stored import StoredQuantised
from petalnode.node.client.chat import held_chat
from petalnode.node.client.request import pledged_points
from petalnode.node.errors import BadInput, ModelError
from petalnode.node.models.checkpoint import Checkpoint, read_header
from petalnode.node.models.manifest import canonical_architecture
from petalnode.node.models.stored_scheme import stored_scheme
from petalnode.node.network.addresses import dialable, parse_peer
from petalnode.node.network.standard_protocols import keep_identified
from petalnode.node.network.transport.muxed_stream import HEADER, RST, SYN, WINDOW_UPDATE
from petalnode.node.network.transport.negotiation import question
from petalnode.node.placement.planning.machines_file import read_machines
from petalnode.node.testing import stream_pair
from petalnode.node.trust.receipt_file import load
from petalnode.node.tuning.adapter_files import check_adapter
from petalnode.node.tuning.dataset import read_dataset
from petalnode.protocols import standard_pb2 as standard
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import DOMAIN, open_signed
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import TensorError, wire_nbytes
from petalnode.protocols.inference import Refusal, bad_request
from petalnode.protocols.nat_traversal import IDENTIFY, DialStatus, ask_dial_back, readable_addrs
from tests.fuzz import corpus
from tests.fuzz.connections import Opened, Tampered, handshakes, node_host
from tests.fuzz.harness import without_threads
from tests.fuzz.mutation import frame
from tests.fuzz.quantised import MATRIX, SHAPE, files_of, quantised, read
from tests.fuzz.server import InPlace, blocks
from tests.memory_muxer import DIRECT, muxer, settled
from tests.node_inspection import held_back
from tests.quantised_checkpoints import LAYOUTS


@pytest.mark.parametrize("span", [(0, 0), (5, 2), (0, 2)])
def test_pledge_for_no_blocks_pledges_nothing(span: tuple[int, int]) -> None:
    """It raised in the routing of every client that wants pledges."""
    message = corpus.announcement()
    message.pledge.span.start, message.pledge.span.end = span
    data = message.SerializeToString()
    signed = wire.SignedAnnouncement(announcement=data, signature=corpus.ATTACKER.sign(DOMAIN, data))
    assert pledged_points(open_signed(signed, now=corpus.NOW).content, (), corpus.NOW_MS) is None


@pytest.mark.parametrize("codec", ["none", "int8-block64"])
def test_huge_shape_is_refused_before_it_is_multiplied(codec: str) -> None:
    """The product took seconds, or was too large for a float."""
    with pytest.raises(TensorError, match="dimensions"):
        wire_nbytes([(1 << 32) - 1] * 1000, "float32", codec)


def test_a_size_that_no_float_holds_is_exact() -> None:
    assert wire_nbytes([(1 << 31) + 1] * 3, "float32", "int8-block64") == ((1 << 31) + 1) ** 3 + 2 * (
        (((1 << 31) + 1) ** 3 + 63) // 64
    )


def test_address_written_unreadably_is_none() -> None:
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
def test_files_shape_is_multiplied_only_if_valid(tmp_path: Path, shape: object) -> None:
    """A text times a number took as much memory as a stranger liked."""
    with pytest.raises(ModelError, match="damaged"):
        read_header(safetensors(tmp_path, {"shape": shape}))


@pytest.mark.parametrize("offsets", [[], [0], "", "x", {}])
def test_adapter_with_offsets_that_are_none_is_damaged(tmp_path: Path, offsets: object) -> None:
    safetensors(tmp_path, {"data_offsets": offsets}, "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput):
        check_adapter(tmp_path)


def test_configuration_that_is_nested_too_deeply_is_refused() -> None:
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
def test_plan_for_blocks_of_no_size_is_refused(tmp_path: Path, size: float) -> None:
    file = tmp_path / "machines.json"
    machine = {"name": "a", "device": "t4"}
    file.write_text(json.dumps({"machines": [machine], "model": {"block_mb": size}}))
    with pytest.raises(BadInput, match="block_mb"):
        read_machines(file)


def test_table_of_machines_with_endless_field_is_refused(tmp_path: Path) -> None:
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


@pytest.fixture
def in_place() -> Iterator[None]:
    """What threads would do is done by the loop."""
    with without_threads():
        yield


@pytest.mark.virtual_time
@pytest.mark.usefixtures("in_place")
async def test_a_status_that_is_no_text_is_read() -> None:
    """Old protobuf lets bytes through where a text is due; they raised in the task that looks after reachability."""
    raw, other = stream_pair()
    answer = standard.AutoNat(type=standard.AutoNat.DIAL_RESPONSE)
    answer.dial_response.status = standard.AutoNat.OK
    text = b"\x12\x02\xff\xfe"  # field 2 of the response
    inner = answer.dial_response.SerializeToString() + text
    await other.write(frame(b"\x08\x01\x1a" + bytes([len(inner)]) + inner))
    stream = DelimitedStream(raw, "peer")
    answered = await ask_dial_back(stream, corpus.SERVER.peer_id, ["/ip4/1.2.3.4/tcp/1"], timeout=1.0)
    assert answered.status is DialStatus.OK and answered.text == "\ufffd\ufffd"


@pytest.mark.virtual_time
@pytest.mark.usefixtures("in_place")
async def test_refusal_of_pass_is_what_client_is_told() -> None:
    """It was told that the server had failed, and every server would have been tried."""

    def refused() -> Generator[None, None, None]:
        yield
        raise bad_request("too large")

    thread = InPlace(blocks())
    thread.start()
    with pytest.raises(Refusal, match="too large"):
        await thread.run_pass(refused())


@pytest.mark.virtual_time
@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("last", range(7))
async def test_connection_that_ends_while_made_is_forgotten(last: int) -> None:
    """It stayed in libp2p's list for ever, and a node with 4,096 of them would have taken no connection any more."""
    async with handshakes() as hosts:
        for _ in range(3):
            await hosts.feed(Tampered({}, (None, None), last))
        assert set(hosts.held().values()) == {0}


@pytest.mark.virtual_time
@pytest.mark.usefixtures("in_place")
async def test_opening_and_resetting_streams_fills_no_memory() -> None:
    async with muxer() as (ours, other):
        for _ in range(30):
            if ours.lost is None:  # it may be cut off
                other.say_bytes(HEADER.pack(0, WINDOW_UPDATE, SYN | RST, 1, 0) * 100)
                await settled()
        assert held_back(ours) < 2048


@pytest.mark.virtual_time
@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("protocol", [IDENTIFY, "/ipfs/id/push/1.0.0", "/ipfs/ping/1.0.0"])
async def test_streams_of_libp2ps_protocols_end_though_left_open(protocol: str) -> None:
    async with node_host("nat") as host:
        with trio.fail_after(100):
            await host.feed(Opened(((1, question(protocol) + frame(b"")),), 0, DIRECT))


@pytest.mark.virtual_time
@pytest.mark.usefixtures("in_place")
async def test_little_of_a_peers_own_words_is_kept() -> None:
    """Of each key that had ever connected, it was 1 MiB."""
    store, peer_id = PeerStore(), ID.from_string(corpus.ATTACKER.peer_id)
    addrs = [Multiaddr(f"/ip4/203.0.113.7/tcp/{port}").to_bytes() for port in range(1, 1000)]
    said = Identify(listen_addrs=[b"\xa5\x03" * 400, *addrs], protocols=["x" * 1000, *map(str, range(1000))])
    await keep_identified(store, peer_id, said)
    assert len(store.addrs(peer_id)) == 32
    assert len(store.get_protocols(peer_id)) == 128


def write(folder: Path, stated: dict[str, Any], held: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    for name, data in files_of(stated, held).items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("layout", "name", "dtype", "shape", "data"),
    [
        ("packed", "weight_shape", "I64", (1,), bytes(8)),
        ("packed", "weight_shape", "I64", (2,), (16).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little")),
        ("packed", "weight_scale", "BF16", (0, 2), b""),
        ("packed", "weight_scale", "BF16", (16, 0), b""),
        ("gptq", "scales", "F16", (32,), bytes(64)),
        ("gptq", "scales", "F16", (2, 16, 1), bytes(64)),
        ("gptq", "g_idx", "I32", (1 << 16,), bytes(1 << 18)),
    ],
)
def test_ill_fitting_parts_of_a_matrix_are_refused(
    layout: str, name: str, dtype: str, shape: tuple[int, ...], data: bytes, tmp_path: Path
) -> None:
    """They raised what torch raises, or asked for terabytes: for as many numbers as `weight_shape` says."""
    write(tmp_path, LAYOUTS[layout][0], quantised(layout) | {f"{MATRIX}.{name}": (dtype, shape, data)})
    with pytest.raises(ModelError):
        read(tmp_path)


def test_matrix_of_another_shape_is_not_held_quantised(tmp_path: Path) -> None:
    """It raised where the kernels take it, not where its shape is told."""
    write(tmp_path, LAYOUTS["packed"][0], quantised("packed"))
    with Checkpoint(tmp_path, 1) as weights:
        for rows, kind in ((SHAPE[0], "Q4_0"), (2 * SHAPE[0], None)):
            places, shapes = {f"{MATRIX}.weight": "weight"}, {"weight": (rows, SHAPE[1])}
            stored = StoredQuantised(weights, stored_scheme(LAYOUTS["packed"][0]), places, shapes)
            assert stored.kind("weight") == kind


@pytest.mark.parametrize("form", [{}, [], None, 1])
def test_a_format_that_is_no_text_is_refused(form: Any) -> None:
    stated = {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": {"num_bits": 4}, "format": form}},
    }
    with pytest.raises(ModelError, match="in the format"):
        stored_scheme(stated)


def test_scales_of_wide_blocks_take_no_more_memory(tmp_path: Path) -> None:
    held = {
        f"{MATRIX}.weight": ("F8_E4M3", (4, 4), bytes(16)),
        f"{MATRIX}.weight_scale_inv": ("F32", (2, 1), bytes(8)),
    }
    write(tmp_path, {"quant_method": "fp8", "weight_block_size": [2, 1 << 62]}, held)
    read(tmp_path)


def test_receipts_of_too_many_values_are_not_parsed(tmp_path: Path) -> None:
    (file := tmp_path / "r.json").write_text("[" + "[]," * (1 << 20) + "[]]")
    with pytest.raises(BadInput, match="1,048,576 values at most"):
        load(file)
