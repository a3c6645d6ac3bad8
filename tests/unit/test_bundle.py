"""Evidence as a file: what third parties find proved and what refuted, with real blocks and without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.evidence import ACCUSATION_DOMAIN
from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.crypto.receipts import Receipt
from petalnode.crypto.statement import now_ms
from petalnode.node.errors import BadInput, PetalnodeError
from petalnode.node.models import compute_manifest
from petalnode.node.models.folder import ModelFolder, open_folder
from petalnode.node.trust import bundle as bundles
from petalnode.node.trust.bundle import (
    BadBundle,
    Bundle,
    Measurement,
    batch_bundle,
    equivocation_bundle,
    needed,
    resigned,
    session_bundle,
)
from petalnode.node.trust.receipt_log import SessionLog
from petalnode.node.verification import evidence_check
from petalnode.node.verification.evidence_check import check_evidence, wanted_blocks
from petalnode.node.verification.observed import observed_session
from petalnode.node.verification.recomputation import SessionQuestion
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import pledge_to_wire, receipt_from_wire, receipt_to_wire, root_of
from tests.attacks.forger import ATTACKER as ACCUSER
from tests.attacks.forger import altered, hidden
from tests.signing_server import SigningServer, spoiled
from tests.swarm.processes import environment, petalnode
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Of a llama, or of the kind that a test names."""
    path = tmp_path_factory.mktemp("model")
    save_tiny(getattr(request, "param", "llama"), path)
    return open_folder(path, "tiny")


@pytest.fixture(scope="module")
def server(folder: ModelFolder) -> SigningServer:
    return SigningServer(folder.path, compute_manifest(folder).version, Span(1, 4), kernels="auto")


STEPS = [(0, hidden(7, 2), ()), (7, hidden(4, 2, 1), ()), (9, hidden(3, 2, 2), (1, 0)), (12, hidden(1, 2, 3), ())]
"""A prefill, a draft, a rollback into it in which the rows change places, and a step."""


def reread(bundle: Bundle) -> Bundle:
    return Bundle.from_bytes(bundle.to_bytes())


@pytest.mark.parametrize(
    ("folder", "codec", "padding"),
    [
        ("llama", "none", ()), ("llama", "bfloat16", (0, 3)), ("llama", "int8-block64", ()),
        ("qwen3_5", "none", ()), ("qwen3_5", "bfloat16", (0, 3)),
    ],
    indirect=["folder"],
)  # fmt: skip
def test_wrong_answer_is_proved_and_right_one_refuted(
    server: SigningServer, folder: ModelFolder, padding: tuple[int, ...], codec: str
) -> None:
    steps = [(position, 16 * given, reorder) for position, given, reorder in STEPS]  # roundings hide nothing of it
    for spoil, proven in ((None, False), (spoiled, True)):
        options = {} if spoil is None else {"spoil": spoil}
        log = server.session(steps, left_padding=padding, codec=codec, **options)  # type: ignore[arg-type]
        outcome = check_evidence(reread(session_bundle(ACCUSER, log, len(steps) - 1)), folder)
        assert outcome.proven == proven, outcome
        assert (outcome.error > outcome.tolerance) == proven
        earlier = check_evidence(reread(session_bundle(ACCUSER, log, 1)), folder)
        assert not earlier.proven, earlier


def test_what_a_server_gives_for_padding_proves_nothing(server: SigningServer, folder: ModelFolder) -> None:
    def spoil_row(output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:1], torch.cat([spoiled(output[1:, :3]), output[1:, 3:]], dim=1)])

    for padding, proven in (((), True), ((0, 3), False), ((0, 2), True)):
        log = server.session(STEPS[:1], left_padding=padding, spoil=spoil_row)
        outcome = check_evidence(session_bundle(ACCUSER, log, 0), folder)
        assert outcome.proven == proven, (padding, outcome)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_answer_to_what_no_server_takes_proves_nothing(
    server: SigningServer, folder: ModelFolder, value: float
) -> None:
    asked = hidden(3)
    asked[0, 1, 2] = value
    outcome = check_evidence(session_bundle(ACCUSER, server.session([(0, asked, ())], spoil=spoiled), 0), folder)
    assert not outcome.proven and "NaN or infinity" in outcome.reason


def test_what_was_rolled_back_is_not_needed(server: SigningServer) -> None:
    steps = [(0, hidden(6), ()), (6, hidden(1), ()), (4, hidden(2), ()), (6, hidden(1), ())]
    bundle = session_bundle(ACCUSER, server.session(steps), 3)
    assert set(bundle.payloads) == {"input.0", "input.2", "input.3", "output"}


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 4), st.booleans()), min_size=1, max_size=12))
def test_the_needed_steps_make_the_same_cache(plan: list[tuple[float, int, bool]]) -> None:
    steps: list[tuple[wire.Step, int]] = []
    length = 0
    for share, tokens, reorder in plan:
        position = round(share * length)
        steps.append((wire.Step(position=position, reorder=[1, 1] if reorder else []), tokens))
        length = position + tokens

    def cache(numbers: list[int]) -> list[list[tuple[int, int]]]:
        rows: list[list[tuple[int, int]]] = [[], []]
        for number in numbers:
            step, tokens = steps[number]
            assert step.position <= len(rows[0])
            rows = [row[: step.position] for row in rows]
            if step.reorder:
                rows = [list(rows[row]) for row in step.reorder]
            for index, row in enumerate(rows):
                row.extend((number, index) for _ in range(tokens))
        return rows

    chosen = needed([step for step, _ in steps])
    assert chosen[-1] == len(steps) - 1
    assert cache(chosen) == cache(list(range(len(steps))))


@pytest.mark.parametrize("folder", ["llama", "qwen3_5"], indirect=True)
@pytest.mark.parametrize("backward", [False, True])
def test_wrong_pass_is_proved_and_right_one_refuted(server: SigningServer, folder: ModelFolder, backward: bool) -> None:
    given, gradient = 16 * hidden(20, 2), 16 * hidden(20, 2, 9) if backward else None
    assert not check_evidence(reread(batch_bundle(ACCUSER, server.work(given, gradient))), folder).proven
    wrong = check_evidence(reread(batch_bundle(ACCUSER, server.work(given, gradient, spoil=spoiled))), folder)
    assert wrong.proven or "nobody has measured" in wrong.reason


def test_wrong_gradient_of_prompts_is_proved(server: SigningServer, folder: ModelFolder) -> None:
    passing = {"prompts": hidden(2, len(server.span), 8).unsqueeze(1), "gradient": hidden(5, 2, 9)}
    for spoil, proven in ((None, False), (spoiled, True)):
        options = {} if spoil is None else {"spoil_kept": spoil}
        outcome = check_evidence(reread(batch_bundle(ACCUSER, server.work(hidden(5, 2), **passing, **options))), folder)
        assert outcome.proven == proven and not outcome.inconclusive, outcome
        assert ("gradient of deep prompts" in outcome.reason) == proven
        assert (outcome.error > outcome.tolerance) == proven


def test_server_is_held_to_dtype_that_it_signed(server: SigningServer, folder: ModelFolder) -> None:
    """What is right in bfloat16 is wrong in float32."""
    coarse = SigningServer(folder.path, server.version, server.span, dtype="bfloat16")
    assert not check_evidence(session_bundle(ACCUSER, coarse.session(STEPS), 3), folder).proven
    coarse.dtype = "float32"
    assert check_evidence(session_bundle(ACCUSER, coarse.session(STEPS), 3), folder).proven


# --- liars who accuse


def flip(name: str) -> Callable[[wire.Evidence, dict[str, bytes]], None]:
    def change(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        payloads[name] = bytes([payloads[name][0] ^ 1]) + payloads[name][1:]

    return change


def drop(name: str) -> Callable[[wire.Evidence, dict[str, bytes]], None]:
    return lambda evidence, payloads: payloads.pop(name) and None


LIES: dict[str, Callable[[wire.Evidence, dict[str, bytes]], None]] = {
    "another answer": flip("output"),
    "another question": flip("input.3"),
    "another past": flip("input.0"),
    "no answer": drop("output"),
    "no past": drop("input.0"),
    "no steps": lambda evidence, payloads: evidence.ClearField("steps"),
    "a step left out": lambda evidence, payloads: evidence.steps.pop(1) and None,
    "the first step left out": lambda evidence, payloads: evidence.steps.pop(0) and None,
    "other padding": lambda evidence, payloads: evidence.opening.left_padding.extend([0, 3]),
    "another codec": lambda evidence, payloads: setattr(evidence.opening, "codec", "float16"),
    "fewer rows": lambda evidence, payloads: setattr(evidence.opening, "batch", 1),
    "another epoch": lambda evidence, payloads: setattr(evidence, "session_epoch", b"x" * 16),
    "no pledge": lambda evidence, payloads: evidence.ClearField("pledge"),
    "another server": lambda evidence, payloads: setattr(evidence, "accused", b"\0$\x08\x01\x12 " + b"x" * 32),
    "another position": lambda evidence, payloads: setattr(evidence.steps[3].step, "position", 7),
    "another order": lambda evidence, payloads: evidence.steps[2].step.ClearField("reorder"),
    "another dtype": lambda evidence, payloads: setattr(evidence.steps[3].receipt, "dtype", "bfloat16"),
    "no signature": lambda evidence, payloads: setattr(evidence.steps[3].receipt, "signature", b""),
    "a position beyond": lambda evidence, payloads: setattr(evidence.steps[0].step, "position", 1 << 60),
    "no shape": lambda evidence, payloads: evidence.steps[0].tensor.ClearField("shape"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_accuser_is_refuted(server: SigningServer, folder: ModelFolder, name: str) -> None:
    honest = session_bundle(ACCUSER, server.session(STEPS), 3)
    outcome = check_evidence(reread(altered(honest, LIES[name])), folder)
    assert not outcome.proven and outcome.reason
    wrong = session_bundle(ACCUSER, server.session(STEPS, spoil=spoiled), 3)
    assert not check_evidence(reread(altered(wrong, LIES[name])), folder).proven


def test_nobody_can_accuse_with_his_own_signature(server: SigningServer, folder: ModelFolder) -> None:
    liar = SigningServer(folder.path, server.version, server.span)
    log = liar.session(STEPS, spoil=spoiled)
    log.peer_id = server.identity.peer_id
    assert not check_evidence(session_bundle(ACCUSER, log, 3), folder).proven


# --- faults that prove themselves


def pledge_bundle(log: SessionLog, receipts: Sequence[Receipt]) -> Bundle:
    """Evidence of a session whose last receipt is outside of the pledge that it ran under."""
    assert log.granted is not None
    statement = wire.Evidence(
        version=1,
        accused=peer_id_to_bytes(log.peer_id),
        kind="pledge",
        opening=log.opening,
        session_epoch=log.granted.session_epoch,
        pledge=log.granted.pledge,
        receipts=map(receipt_to_wire, receipts),
    ).SerializeToString(deterministic=True)
    return Bundle(statement, ACCUSER.peer_id, ACCUSER.sign(ACCUSATION_DOMAIN, statement), {})


def test_equivocation_and_broken_pledges_need_no_weights(server: SigningServer) -> None:
    log = server.session(STEPS)
    receipts = [entry.receipt for entry in log.entries]
    other = replace(receipts[3], reply_hash=b"x" * 32).signed(server.identity)
    assert check_evidence(reread(equivocation_bundle(ACCUSER, log.peer_id, receipts[3], other)), None).proven
    assert not check_evidence(reread(equivocation_bundle(ACCUSER, log.peer_id, receipts[3], receipts[3])), None).proven
    assert not check_evidence(reread(pledge_bundle(log, receipts)), None).proven
    outside = server.session(STEPS, span=(1, 5))
    assert check_evidence(reread(pledge_bundle(outside, [entry.receipt for entry in outside.entries])), None).proven


def test_what_cannot_be_checked_is_said(server: SigningServer, folder: ModelFolder, tmp_path: Path) -> None:
    bundle = session_bundle(ACCUSER, server.session(STEPS), 3)
    with pytest.raises(BadInput, match="name the model"):
        check_evidence(bundle, None)
    save_tiny("llama", tmp_path, seed=3)
    with pytest.raises(BadInput, match="is about model version"):
        check_evidence(bundle, open_folder(tmp_path, "other"))
    log = server.session(STEPS)
    log.forget_tensors()
    with pytest.raises(ValueError, match="not kept"):
        session_bundle(ACCUSER, log, 3)
    with pytest.raises(ValueError, match="not all"):
        session_bundle(ACCUSER, SessionLog("x"), 0)
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    for file in folder.path.iterdir():
        (hollow / file.name).write_bytes(file.read_bytes())
    half = open_folder(hollow, "tiny")
    assert compute_manifest(half).version == server.version
    (weights,) = hollow.glob("*.safetensors")
    with patch.object(evidence_check, "compute_manifest", lambda *_: compute_manifest(folder)):
        weights.write_bytes(weights.read_bytes()[:-1000])
        with pytest.raises(PetalnodeError):  # and not a verdict of any kind
            check_evidence(bundle, half)


def test_evidence_of_session_with_adapter_decides_nothing(server: SigningServer, folder: ModelFolder) -> None:
    def adapted(log: SessionLog) -> SessionLog:
        log.entries[0] = replace(log.entries[0], receipt=signed)  # type: ignore[index]
        return log

    log = server.session(STEPS[:1], spoil=spoiled)
    assert log.opening is not None and log.granted is not None
    log.opening.adapter = b"a" * 32
    root = root_of(log.opening, server.client.peer_id, log.granted.session_epoch, server.pledge.hash())
    signed = replace(log.entries[0].receipt, adapter=b"a" * 32, previous_receipt=root).signed(server.identity)
    outcome = check_evidence(session_bundle(ACCUSER, adapted(log), 0), folder)
    assert outcome.inconclusive and not outcome.proven and "adapter" in outcome.reason


def test_which_blocks_are_needed_to_check_evidence(server: SigningServer) -> None:
    log = server.session(STEPS)
    assert wanted_blocks(session_bundle(ACCUSER, log, 3)) == server.span
    receipt = log.entries[3].receipt
    other = replace(receipt, reply_hash=b"x" * 32).signed(server.identity)
    assert wanted_blocks(equivocation_bundle(ACCUSER, log.peer_id, receipt, other)) is None
    assert wanted_blocks(equivocation_bundle(ACCUSER, log.peer_id, receipt, receipt)) is None


def test_what_an_auditor_sees_of_a_session(server: SigningServer) -> None:
    log = server.session(STEPS, left_padding=(0, 3), codec="bfloat16")
    seen = observed_session(log, "cpu")
    assert seen is not None and (seen.peer_id, seen.span, seen.dtype) == (log.peer_id, server.span, "float32")
    assert isinstance(seen.question, SessionQuestion) and seen.question.left_padding == (0, 3)
    assert [(step.position, step.reorder) for step in seen.question.steps] == [(p, tuple(r)) for p, _, r in STEPS]
    assert [answer.shape[1] for answer in seen.claimed] == [step[1].shape[1] for step in STEPS]
    assert (seen.device, seen.codec, seen.source, seen.direction) == ("cpu", "bfloat16", log, "forward")
    for name in ("step", "asked", "input", "output"):  # of the third step, so that nothing after it counts
        cut = server.session(STEPS)
        cut.entries[2] = replace(cut.entries[2], **{name: None})  # type: ignore[index]
        found = observed_session(cut)
        assert found is not None and len(found.claimed) == 2
        cut.entries[0] = replace(cut.entries[0], **{name: None})  # type: ignore[index]
        assert observed_session(cut) is None
    cut = server.session(STEPS)
    cut.complete = False
    assert observed_session(cut) is None
    assert observed_session(SessionLog("x", keeps_tensors=True)) is None
    adapted = server.session(STEPS, adapter=b"a" * 32)
    assert observed_session(adapted) is None


# --- files


def test_file_survives_and_damaged_one_is_told(server: SigningServer, tmp_path: Path) -> None:
    bundle = session_bundle(ACCUSER, server.session(STEPS), 3)
    path = tmp_path / "a" / "b.evidence"
    bundle.save(path)
    back = Bundle.load(path)
    assert back == bundle and back.id == bundle.id and back.accuser == ACCUSER.peer_id
    data = path.read_bytes()
    for damaged in (b"", b"x", data[:100], data[:-5], b"\xff" * 64, data + b"x", b"{}" * 500):
        path.write_bytes(damaged)
        with pytest.raises(BadBundle):
            Bundle.load(path)
    with pytest.raises(BadBundle, match="cannot read"):
        Bundle.load(tmp_path / "nothing")
    with pytest.raises(BadBundle, match="not signed"):
        reread(replace(bundle, signature=bytes(64)))
    with pytest.raises(BadBundle, match="not signed"):
        reread(replace(bundle, accuser=server.identity.peer_id))
    other = reread(resigned(bundle, server.client))
    assert other.accuser == server.client.peer_id and other.accused == bundle.accused and other.id != bundle.id
    with pytest.raises(BadBundle, match="not known"):
        reread(altered(bundle, lambda evidence, payloads: setattr(evidence, "kind", "rumour")))


def test_no_more_is_read_than_evidence_may_have(
    server: SigningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = session_bundle(ACCUSER, server.session(STEPS), 3)
    data, path = bundle.to_bytes(), tmp_path / "long.evidence"
    path.write_bytes(data)
    for name, most, why in (
        ("max_bytes", len(data), "MiB"),
        ("max_statement", len(bundle.statement), "too long"),
        ("max_tensors", len(bundle.payloads), "too long"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(bundles, "BUNDLE", replace(bundles.BUNDLE, **{name: most}))
            assert Bundle.from_bytes(data) == Bundle.load(path) == bundle
            patched.setattr(bundles, "BUNDLE", replace(bundles.BUNDLE, **{name: most - 1}))
            with pytest.raises(BadBundle, match=why):
                Bundle.from_bytes(data)
            with pytest.raises(BadBundle, match=f"long.evidence.*{why}"):
                Bundle.load(path)
    with monkeypatch.context() as patched:
        patched.setattr(bundles, "BUNDLE", replace(bundles.BUNDLE, max_statement=len(bundle.statement) - 1))
        with pytest.raises(ValueError, match="more than evidence may have"):
            resigned(bundle, ACCUSER)
    room = sum(map(len, bundle.payloads.values()))
    monkeypatch.setattr(bundles, "BUNDLE", replace(bundles.BUNDLE, max_bytes=2 * bundles.BUNDLE.max_statement + room))
    assert resigned(bundle, ACCUSER).payloads == bundle.payloads
    monkeypatch.setattr(
        bundles, "BUNDLE", replace(bundles.BUNDLE, max_bytes=2 * bundles.BUNDLE.max_statement + room - 1)
    )
    with pytest.raises(ValueError, match="more than evidence may have"):
        resigned(bundle, ACCUSER)


def described(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\1" + bytes(7) + b"{}", "no safetensors"),
        (b"\3" + bytes(7) + b"{}", "no safetensors"),
        (described([]), "no JSON object"),
        (described({}), "without evidence"),
        (described({"__metadata__": {"petalnode_evidence": 3}}), "no texts"),
        (described({"__metadata__": []}), "without evidence"),
        (described({"__metadata__": {"petalnode_evidence": "*"}}), "no evidence"),
        (described(b"[" * 100_000), "no evidence"),
    ],
)
def test_other_files_are_no_evidence(data: bytes, why: str) -> None:
    with pytest.raises(BadBundle, match=why):
        Bundle.from_bytes(data)


def test_evidence_of_another_version_is_not_known(server: SigningServer) -> None:
    bundle = session_bundle(ACCUSER, server.session(STEPS), 3)
    with pytest.raises(BadBundle, match="version 2, is not known"):
        reread(altered(bundle, lambda evidence, payloads: setattr(evidence, "version", 2)))


def test_what_was_measured_goes_with_evidence(server: SigningServer) -> None:
    measured = Measurement(0.5, 0.1, "cuda")
    log = server.session(STEPS)
    for bundle in (
        session_bundle(ACCUSER, log, 3, measured),
        batch_bundle(ACCUSER, server.work(hidden(5)), measured),
        resigned(session_bundle(ACCUSER, log, 3), server.client, measured),
    ):
        said = bundle.evidence
        assert (said.error, said.tolerance, said.server_device) == (0.5, pytest.approx(0.1), "cuda")
        assert abs(said.time_ms - now_ms()) < 600_000
    again = resigned(session_bundle(ACCUSER, log, 3, measured), server.client)
    assert (again.evidence.error, again.evidence.tolerance, again.evidence.server_device) == (0, 0, "")
    old = altered(again, lambda evidence, payloads: setattr(evidence, "time_ms", 1))
    assert resigned(old, ACCUSER).evidence.time_ms > 1


def test_the_receipt_that_completed_the_fault(server: SigningServer) -> None:
    log, work = server.session(STEPS), server.work(hidden(5))
    last = session_bundle(ACCUSER, log, 2).last_receipt
    assert last is not None and receipt_from_wire(last) == log.entries[2].receipt
    last = batch_bundle(ACCUSER, work).last_receipt
    assert last is not None and receipt_from_wire(last) == work.receipt
    nothing = altered(session_bundle(ACCUSER, log, 2), lambda evidence, payloads: evidence.ClearField("steps"))
    assert nothing.last_receipt is None
    empty = altered(nothing, lambda evidence, payloads: setattr(evidence, "kind", "pledge"))
    assert empty.last_receipt is None


def test_batchs_pledge_goes_with_it(server: SigningServer) -> None:
    pledge, log = pledge_to_wire(server.pledge), server.session(STEPS)
    work = server.work(hidden(5))
    assert not batch_bundle(ACCUSER, work).evidence.HasField("pledge")
    assert batch_bundle(ACCUSER, replace(work, pledge=pledge)).evidence.pledge == pledge
    assert session_bundle(ACCUSER, log, 3).evidence.pledge == pledge
    assert log.granted is not None
    log.granted.ClearField("pledge")
    assert not session_bundle(ACCUSER, log, 3).evidence.HasField("pledge")
    for name in ("opening", "granted"):
        lost = server.session(STEPS)
        setattr(lost, name, None)
        with pytest.raises(ValueError, match="how the session was opened"):
            session_bundle(ACCUSER, lost, 3)
    lost = server.session(STEPS)
    lost.complete = False
    with pytest.raises(ValueError, match="not all of the session's receipts"):
        session_bundle(ACCUSER, lost, 3)


def test_the_command_says_proven_refuted_or_unreadable(
    server: SigningServer, folder: ModelFolder, tmp_path: Path
) -> None:
    env = environment(tmp_path)
    wrong, right, junk = (tmp_path / name for name in ("wrong.evidence", "right.evidence", "junk.evidence"))
    session_bundle(ACCUSER, server.session(STEPS, spoil=spoiled), 3).save(wrong)
    session_bundle(ACCUSER, server.session(STEPS), 3).save(right)
    junk.write_bytes(b"junk")
    for path, code, verdict in ((wrong, 0, "proven"), (right, 1, "refuted")):
        done = petalnode("verify-evidence", str(path), str(folder.path), "--json", env=env)
        assert done.code == code, done
        (told,) = done.objects
        assert (told["verdict"], told["peer_id"]) == (verdict, server.identity.peer_id)
        assert (told["error"] > told["tolerance"]) == (verdict == "proven")
        json.dumps(told, allow_nan=False)
    done = petalnode("verify-evidence", str(junk), env=env)
    assert done.code == 2 and "no evidence" in done.err and "Traceback" not in done.err
