"""Mutation testing: small faults are put into the code one at a time, and the tests have to notice each.

    python -m tests.mutants --count 400 --seed 1 [--only crypto/ ...]

An own driver, because neither mutmut nor cosmic-ray does it. Above all, neither takes a guard out: an `if ...: raise`,
a call, one condition of several. cosmic-ray starts the tests anew for each mutant: importing torch, transformers and
libp2p takes seconds, most tests milliseconds. mutmut forks, but takes no sample, changes the texts of errors and logs,
and wants modules to lie on the disk as they are imported (`node/` is `petalnode.node` here).

Here one process imports everything, collects the tests and forks for each mutant; the child exchanges the code of one
function and runs the tests that call this function, quickest first, until one fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import os
import pickle
import random
import re
import resource
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

import pytest

from tests.mutations import Mutant, mutants_of, mutated
from tests.patience import Patience

ROOT: Final = Path(__file__).parent.parent


def _unit(names: str) -> tuple[str, ...]:
    return tuple(f"unit/test_{name}" for name in names.split())


SURVIVORS: Final = ROOT / "build" / "mutants.txt"
_SIGNED: Final = (
    "canonical credits evidence identity ledger receipts receipt_log bundle rewards swarm_key trust vectors "
    "bounded_json bounded_message"
)
_WIRE: Final = (
    "framing tensors announcement inference_protocol training_protocol circuit_protocol standard_protocols manifest "
    "adapter_folder dialogue swarm_view remembered addresses priority admission memory_streams chains"
)
_JUDGED: Final = "judging recomputation verdict substitution compared_chains bundle evidence receipt_log trust rewards"
_SERVED: Final = (
    "pushes admission priority cache_budget compute_order training_protocol deferred_backward span_input batching"
)
_KEPT: Final = "session_recovery session_stream reconnector answers_due history path_loss compared_chains receipt_log"
_MOVED: Final = "yamux muxed_stream noise bandwidth negotiation limits received_bytes private memory_budgets"
_KADEMLIA: Final = _unit("kademlia provider_lookup provider_records")
_ATTACKS: Final = ("attacks/test_*",)
_WEIGHTS: Final = ("attacks/weights/test_*",)
_MEMORY: Final = (
    *("swarm/test_inference_wire", "swarm/test_training_wire", "swarm/test_cheating_server", "swarm/test_resume"),
    *("swarm/test_adapter_wire", "swarm/test_training_recovery"),
)
_GENERATED: Final = ("swarm/test_drafted_batches", "swarm/test_drafted_generate", "swarm/test_python_api")
TESTS: Final[dict[str, tuple[str, ...]]] = {
    "crypto/*": (*_unit(_SIGNED), *_ATTACKS),
    "protocols/*": (*_unit(_SIGNED), *_unit(_WIRE), *_ATTACKS, *_MEMORY, "fuzz/test_findings"),
    "crypto/safetensors_header.py": (
        *_unit("bounded_json bundle models_checkpoint"),
        "fuzz/test_findings",
    ),
    "node/trust/*": (
        *_unit(_SIGNED),
        *_unit(_JUDGED),
        *_ATTACKS,
        "swarm/test_evidence_gossip",
        "swarm/test_evidence_nodes",
        "api/test_receipts",
    ),
    "node/verification/*": (*_unit(_JUDGED), *_ATTACKS, "swarm/test_validate", "swarm/test_compared_chains"),
    "node/server/requests/*": (*_unit(_SERVED), *_ATTACKS, *_MEMORY, "swarm/test_moving"),
    "node/client/session/*": (
        *_unit(_KEPT),
        *_ATTACKS,
        *_MEMORY,
        *("swarm/test_client_session", "swarm/test_recovery", "swarm/test_progress", "swarm/test_moving"),
        *("swarm/test_compared_chains", "swarm/test_longrope", "swarm/test_longrope_sessions"),
    ),
    "node/cli/conversation/*": (*_unit("terminal_chat"), "attacks/test_terminal_escapes", "swarm/test_talk"),
    "node/cli/dialogue.py": (*_unit("terminal_chat strangers"), "swarm/test_kept_conversation"),
    "node/client/chat.py": (*_unit("terminal_chat dialogue"), "swarm/test_kept_conversation"),
    "node/api/*": (
        *_unit("api_fields api_parts api_grammar bounded_json http_server request_ids"),
        *("attacks/test_full_share_at_api", "attacks/test_large_bodies_at_api", "api/test_batches"),
        *("attacks/test_one_key_at_api", "attacks/test_web_page_at_api"),
        *("api/test_hostile_requests", "api/test_strange_values", "api/test_many", "api/test_clients_that_leave"),
    ),
    "node/weights/*": (*_unit("weights_plan weights_places weights_store weights_questions"), *_WEIGHTS),
    "protocols/weights.py": (*_unit("weights_plan weights_store weights_questions"), *_WEIGHTS),
    "node/models/digests.py": (*_unit("manifest models_checkpoint models_gguf"), *_WEIGHTS),
    "node/network/kad_*.py": (*_KADEMLIA, "attacks/test_kademlia", "attacks/test_provider_records"),
    "node/network/kad_store.py": (*_KADEMLIA, "attacks/test_provider_records"),
    "node/network/routing_table.py": _KADEMLIA,
    "node/network/standard_protocols.py": (*_unit("standard_protocols"), "attacks/test_pings_and_pushes"),
    "node/network/shares.py": (
        *_unit("kademlia limits bandwidth"),
        *(f"attacks/test_{name}" for name in ("announced_addresses", "large_bodies_at_api", "gossip_floods")),
        "attacks/test_relay_and_dial_backs",
        "swarm/test_evidence_gossip",
    ),
    "node/models/sources/ranges.py": ("attacks/test_lying_hub",),
    "node/models/sources/hub_parts.py": (*_unit("models_hub_parts"), "attacks/test_lying_hub"),
    "node/models/sources/hub.py": _unit("models_hub models_hub_parts"),
    "node/models/part_headers.py": (*_unit("weights_store models_hub_parts"), "attacks/test_lying_hub"),
    "node/models/inventory.py": _unit("models_command"),
    "node/models/gguf/*": (*_unit("gguf_header models_gguf"), "attacks/test_changed_gguf", "parity/test_gguf"),
    "node/models/sources/gguf_files.py": (
        *_unit("models_gguf models_alias models_hub_gguf"),
        "attacks/test_changed_gguf",
    ),
    "node/blocks/kernels/packing.py": (*_unit("kernels"), "parity/test_kernels", "parity/test_gguf"),
    "node/blocks/kernels/recurrent.py": ("parity/test_recurrent_kernels",),
    "node/models/folder.py": (*_unit("models_sources sizing"), "parity/test_refused"),
    "node/models/stored_scheme.py": ("parity/test_refused", "parity/test_stored_quantised"),
    "node/blocks/quantisation/stored.py": ("parity/test_stored_quantised",),
    "node/models/sources/resolve.py": (*_unit("models_sources models_gguf"), "swarm/test_too_large"),
    "node/links/format.py": _unit("invite"),
    "node/links/making.py": (*_unit("invite"), "swarm/test_link_makers"),
    "node/placement/planning/model_sizes.py": _unit("fitting"),
    "node/swarm/cost.py": _unit("estimate codec_choice prefill_chunks routing"),
    "node/client/round_trips.py": (*_unit("round_trips"), "attacks/test_absent_servers"),
    "node/blocks/caches/states.py": (*_unit("state_ring"), "swarm/test_hybrids"),
    "node/client/api/row_drafts.py": _unit("row_drafts"),
    "node/client/api/generating.py": _GENERATED,
    "node/client/api/processors.py": (*_unit("row_drafts"), *_GENERATED),
    "node/client/generation/decoding.py": (*_GENERATED, "swarm/test_longrope"),
    "node/client/generation/mtp_head.py": ("parity/test_mtp_heads", "swarm/test_mtp_heads"),
    "node/client/api/arguments.py": ("unit/test_call_arguments", "swarm/test_call_arguments"),
    "node/blocks/config.py": (
        *_unit("block_config"),
        *("swarm/test_longrope", "swarm/test_longrope_sessions"),
        *("parity/test_refused", "parity/test_special"),
    ),
    "node/blocks/stack.py": (
        "swarm/test_longrope",
        "swarm/test_longrope_sessions",
        "attacks/test_other_factors",
        "parity/test_blocks",
    ),
    "node/blocks/architecture.py": (*_unit("sizing"), "parity/test_refused", "swarm/test_too_large"),
    "crypto/bounded_json.py": (*_unit("bounded_json manifest"), "attacks/test_costly_headers"),
    "protocols/delimited.py": (
        *_unit("bounded_message standard_protocols kademlia circuit_protocol"),
        *("attacks/test_message_memory", "attacks/test_kademlia", "fuzz/test_findings"),
    ),
    "node/server/turns.py": (
        *_unit("turns backlogged batching gathering priority"),
        "attacks/test_many_sessions_of_one",
    ),
    "node/server/accounts.py": _unit("turns backlogged gathering"),
    "node/server/compute_thread.py": (
        *_unit("compute_order compute_rests deferred_backward"),
        *("attacks/test_batches_of_many_keys", "attacks/test_abandoned_prompts", "attacks/test_kept_prefixes"),
    ),
    "node/swarm/streams.py": (
        *_unit("received_bytes"),
        *("attacks/test_held_places", "attacks/test_message_memory", "swarm/test_streams"),
    ),
    "node/network/gossip.py": (
        *("attacks/test_gossip_floods", "attacks/test_gossip_control", "attacks/test_gossip_with_many_keys"),
        "attacks/test_unreadable_gossip",
    ),
    "node/network/nat/circuits.py": ("attacks/test_unasked_circuits", "swarm/test_relay"),
    "node/network/nat/hole_punching.py": (*_unit("punch_plan"), "attacks/test_punches", "swarm/test_punching"),
    "node/network/nat/upnp.py": (*_unit("upnp"), "attacks/test_endless_router"),
    "node/validator/endorsing.py": (
        *("attacks/test_slow_evidence", "attacks/test_borrowed_evidence"),
        *("attacks/test_malformed_evidence", "attacks/test_replayed_evidence"),
    ),
    "node/network/transport/places.py": ("attacks/test_held_places",),
    "node/network/transport/limits.py": (
        *_unit("limits received_bytes kademlia"),
        *("attacks/test_frame_floods", "attacks/test_stream_resets", "attacks/test_unread_bytes"),
    ),
    "node/network/transport/memory.py": _unit("memory_budgets device_memory"),
    "node/network/transport/dialing.py": (*_unit("dialing"), "attacks/test_announced_addresses"),
    "node/network/mdns.py": _unit("mdns"),
    "node/trust/[ds]*.py": (
        *_unit("trust damaged_trust locked"),
        *("attacks/test_local_secrets", "attacks/test_slow_evidence", "attacks/test_gossip_with_many_keys"),
    ),
    "node/client/session/answers.py": (
        *_unit("prefix_memory answers_due session_stream"),
        *("attacks/test_rejected_push", "attacks/test_absent_servers", "attacks/test_claimed_lengths"),
    ),
    "node/client/session/prefixes.py": (
        *_unit("prefix_memory"),
        "attacks/test_kept_prefixes",
        "swarm/test_prefix_cache",
    ),
    "node/api/batches/*": ("api/test_batches", "attacks/test_full_share_at_api"),
    "node/api/anthropic.py": (*_unit("api_fields"), "api/test_anthropic_client", "api/test_anthropic_schemas"),
    "node/api/ollama.py": (*_unit("api_fields"), "api/test_ollama_client"),
    "node/server/lifecycle/[ms][ei][mz]*.py": (
        *_unit("sizing device_memory"),
        "parity/test_refused",
        "swarm/test_too_large",
    ),
    "node/network/transport/[lmnsy]*.py": (
        *_unit(_MOVED),
        *(
            "attacks/test_frame_floods",
            "attacks/test_memory_of_a_node",
            "attacks/test_stream_resets",
            "attacks/test_unread_bytes",
            "swarm/test_private_hosts",
            "swarm/test_relay",
        ),
    ),
}
"""Which tests concern a module: of these, those that call the mutated function are run, but for those that start
processes of petalnode, in which the fault is not."""
_PROCESSES: Final = {"node_starter", "echo_node"}
"""The fixtures that start them."""
_SLOWEST: Final = 12.0
"""Seconds of processor time for the tests of one mutant; who needs more leaves out the slowest."""
_IDLE: Final = 10.0
"""Seconds without progress after which a mutant hangs."""
_LARGEST_FILE: Final = 1 << 30
"""Bytes of a file that a mutant may write: one that writes for ever would fill the disk."""
_BROKEN: Final = 77
Key = tuple[str, str]
"""A file and the qualified name of a function."""


def files_of(only: list[str]) -> list[str]:
    """The modules of the table, those that begin with one of `only` if there are any."""
    paths = [
        str(path.relative_to(ROOT)) for room in ("crypto", "protocols", "node") for path in (ROOT / room).rglob("*.py")
    ]
    return sorted(
        path
        for path in paths
        if any(fnmatch.fnmatch(path, pattern) for pattern in TESTS)
        and not path.endswith(("_pb2.py", "__init__.py"))
        and (not only or path.startswith(tuple(only)))
    )


def tests_of(path: str) -> set[str]:
    """Those of the narrowest pattern: the one with the most before its first wildcard, or of two the longer one."""
    patterns = [pattern for pattern in TESTS if fnmatch.fnmatch(path, pattern)]
    pattern = max(patterns, key=lambda pattern: (len(re.split(r"[*[]", pattern)[0]), len(pattern)))
    return {str(found.relative_to(ROOT)) for test in TESTS[pattern] for found in ROOT.glob(f"tests/{test}.py")}


class Reached:
    """Notes which functions of the mutated files a test calls, in all threads, and those that its fixtures called."""

    def __init__(self, files: set[str]) -> None:
        self._files = {str(ROOT / path): path for path in files}
        self._now: set[Key] = set()
        self._by_fixture: dict[str, set[Key]] = defaultdict(set)
        self.by_test: dict[str, tuple[float, set[Key]]] = {}
        self.failed: set[str] = set()

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (path := self._files.get(frame.f_code.co_filename)) is not None:
            self._now.add((path, frame.f_code.co_qualname.partition(".<locals>")[0]))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        before, self._now = self._now, set()
        try:
            return (yield)
        finally:
            self._by_fixture[fixturedef.argname] |= self._now
            self._now |= before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def run(self, items: list[pytest.Item]) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        for item, following in zip(items, [*items[1:], None], strict=True):
            self._now, begun = set(), time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds = time.process_time() - begun
            fixtures = [self._by_fixture[name] for name in getattr(item, "fixturenames", ())]
            self.by_test[item.nodeid] = seconds, self._now.union(*fixtures)


class StopAtOnce:
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(1)


def code_named(code: CodeType, name: str, line: int) -> CodeType | None:
    if code.co_qualname == name and code.co_firstlineno == line:
        return code
    inner = (code_named(constant, name, line) for constant in code.co_consts if isinstance(constant, CodeType))
    return next((found for found in inner if found is not None), None)


class Driver:
    """The plug-in that runs mutants in the place of tests."""

    def __init__(self, mutants: list[Mutant]) -> None:
        self._mutants = mutants
        self.outcomes: list[tuple[Mutant, str]] = []
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be collected")
        self._items = [item for item in session.items if _PROCESSES.isdisjoint(getattr(item, "fixturenames", ()))]
        for found in gc.get_objects():
            if isinstance(found, FunctionType):
                code = found.__code__
                self._functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(found)
        gc.collect()
        gc.freeze()
        reached = self._reached()
        reaching: dict[Key, list[tuple[float, str]]] = defaultdict(list)
        for name, (seconds, keys) in reached.by_test.items():
            for key in keys:
                if name not in reached.failed:
                    reaching[key].append((seconds, name))
        for number, mutant in enumerate(self._mutants, 1):
            begun = time.monotonic()
            outcome = self._outcome(mutant, sorted(reaching[mutant.path, mutant.function]))
            self.outcomes.append((mutant, outcome))
            print(f"{number:5} {outcome:12} {time.monotonic() - begun:5.1f} s  {mutant}", flush=True)
        return True

    def _reached(self) -> Reached:
        """What each test calls, and how long it takes, found out in a process of its own."""
        reading, writing = os.pipe()
        begun = time.monotonic()
        if not (pid := self._fork()):
            reached = Reached({mutant.path for mutant in self._mutants})
            self._items[0].config.pluginmanager.register(reached)
            reached.run(self._items)
            with open(writing, "wb") as pipe:
                pickle.dump((reached.by_test, reached.failed), pipe)
            os._exit(0)
        os.close(writing)
        found = Reached(set())
        with open(reading, "rb") as pipe:
            found.by_test, found.failed = pickle.load(pipe)
        os.waitpid(pid, 0)
        print(f"{len(found.by_test)} tests without a mutant: {time.monotonic() - begun:.0f} s", flush=True)
        for name in sorted(found.failed):
            print(f"left out, since it fails without a mutant: {name}", flush=True)
        return found

    def _fork(self) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
        return pid

    def _outcome(self, mutant: Mutant, tests: list[tuple[float, str]]) -> str:
        names, seconds = [], 0.0
        for used, name in tests:
            if seconds + used > _SLOWEST:
                break
            names.append(name)
            seconds += used
        if not names:
            return "unreached"
        if not (pid := self._fork()):
            self._run(mutant, names, seconds)
        patience = Patience(_IDLE, pid, working=0.5)
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return (
                    "survived"
                    if code == 0
                    else "timed out"
                    if code in (-signal.SIGXCPU, -signal.SIGKILL)
                    else "noticed"
                )
            if patience.is_over:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _run(self, mutant: Mutant, names: list[str], seconds: float) -> None:
        """Tries one mutant, in a process of its own."""
        try:
            self._put_in(mutant)
            limit = int(3 * seconds) + 5
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
            by_name = {item.nodeid: item for item in self._items}
            items = [by_name[name] for name in names]
            items[0].config.pluginmanager.register(StopAtOnce())
        except BaseException:
            os._exit(_BROKEN)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        os._exit(0)

    def _put_in(self, mutant: Mutant) -> None:
        file = str(ROOT / mutant.path)
        module = compile(mutated((ROOT / mutant.path).read_text(), mutant.index), file, "exec", dont_inherit=True)
        code = code_named(module, mutant.function, mutant.line)
        functions = self._functions[file, mutant.function, mutant.line]
        assert code is not None and functions
        for function in functions:
            function.__code__ = code


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=400, help="how many mutants, taken at random; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="files whose path begins so")
    chosen = parser.parse_args()
    found = [mutant for path in files_of(chosen.only) for mutant in mutants_of(path, (ROOT / path).read_text())]
    total = len(found)
    if 0 < chosen.count < total:
        found = random.Random(chosen.seed).sample(found, chosen.count)
    unknown = [test for tests in TESTS.values() for test in tests if not [*ROOT.glob(f"tests/{test}.py")]]
    if unknown or not found:
        raise SystemExit(f"no such tests: {unknown}" if unknown else f"no such files: {chosen.only}")
    tests = sorted(set().union(*(tests_of(mutant.path) for mutant in found)))
    driver = Driver(found)
    options = [
        "-p",
        "no:terminal",
        "-p",
        "no:timeout",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=1",
    ]
    os.chdir(ROOT)
    pytest.main([*options, "--hypothesis-seed=1", "-o", "addopts=--import-mode=importlib", *tests], plugins=[driver])
    counts = Counter(outcome for _, outcome in driver.outcomes)
    noticed = counts["noticed"] + counts["timed out"]
    print(f"{noticed} of {len(found)} noticed, {noticed / len(found):.1%} (of {total} possible):", dict(counts))
    SURVIVORS.parent.mkdir(exist_ok=True)
    lines = [f"{outcome}: {mutant}" for mutant, outcome in driver.outcomes if outcome in ("survived", "unreached")]
    SURVIVORS.write_text("\n".join([*sorted(lines), ""]))


if __name__ == "__main__":
    main()
