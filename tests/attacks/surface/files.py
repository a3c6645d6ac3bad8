"""Files that a stranger may have made, and what else comes over no connection of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .row import FILE, PEER, Row

OWN: Final = "none: a file of the person's own"
CHOSEN: Final = "none: examples that a person has chosen, as many as fit in memory"
BY_TRANSFORMERS: Final = "none: read by transformers, from a model that a person has chosen"
FILES: Final[Mapping[str, Row]] = {
    "config.json": Row(
        FILE,
        "node.models.folder._CONFIG_LIMITS node.models.manifest.MAX_CONFIG_BYTES",
        "node.models.folder._CONFIG_LIMITS",
        "node.models.folder.MAX_BLOCKS",
        ("tests/unit/test_models_sources.py",),
        ("model folder",),
    ),
    "safetensors of a model": Row(
        FILE,
        "node.models.checkpoint._MAX_HEADER_BYTES node.models.checkpoint._INDEX_LIMITS",
        "node.models.checkpoint._MAX_HEADER_BYTES",
        "node.models.checkpoint._MAX_TENSORS",
        ("tests/fuzz/test_fuzzing.py",),
        ("model folder",),
    ),
    "quantised safetensors": Row(
        FILE,
        "node.models.checkpoint._MAX_HEADER_BYTES node.models.folder._CONFIG_LIMITS",
        "node.models.checkpoint._MAX_HEADER_BYTES",
        "node.models.checkpoint._MAX_TENSORS",
        ("tests/parity/test_stored_quantised.py", "tests/fuzz/test_findings.py"),
        ("quantised weights",),
    ),
    "GGUF": Row(
        FILE,
        "node.models.gguf.header._MAX_HEADER_BYTES node.models.gguf.header._MAX_DIMENSIONS",
        "node.models.gguf.header._MAX_HEADER_BYTES node.models.gguf.header._MAX_ENTRIES",
        "node.models.gguf.header._MAX_TENSORS node.models.gguf.header._MAX_KEYS",
        ("tests/unit/test_gguf_header.py", "tests/attacks/test_changed_gguf.py"),
        ("GGUF file", "GGUF weights"),
    ),
    "header by ranges": Row(
        "a hub, or who made the file",
        "node.models.checkpoint._MAX_HEADER_BYTES node.models.gguf.header._MAX_HEADER_BYTES",
        "node.models.checkpoint._MAX_HEADER_BYTES node.models.gguf.header._MAX_ENTRIES",
        "node.models.checkpoint._MAX_TENSORS node.models.gguf.header._MAX_TENSORS",
        ("tests/attacks/test_lying_hub.py",),
        ("header by ranges",),
    ),
    "names of files on a hub": Row(
        "who published the model",
        "none: read by huggingface_hub, of a model that a person has chosen",
        "none: read by huggingface_hub, of a model that a person has chosen",
        "node.models.sources.hub_files._MAX_PARTS",
        ("tests/attacks/test_lying_hub.py",),
        ("GGUF files on a hub",),
    ),
    "tokenizer": Row(
        FILE,
        "node.models.folder.TEXT_FILES",
        BY_TRANSFORMERS,
        BY_TRANSFORMERS,
        ("tests/unit/test_models_sources.py", "tests/unit/test_models_hub.py"),
    ),
    "manifest": Row(
        FILE,
        "node.models.manifest.MAX_FILE_BYTES",
        "node.models.manifest.MAX_FILE_BYTES",
        "node.models.folder.MAX_BLOCKS",
        ("tests/unit/test_manifest.py", "tests/attacks/test_false_versions.py"),
        ("manifest",),
    ),
    "adapter": Row(
        FILE,
        "node.tuning.adapter_files.MAX_FILE_BYTES node.models.checkpoint._MAX_HEADER_BYTES",
        "node.models.adapter.CONFIG_LIMITS",
        "node.models.adapter._MAX_LAYERS protocols.adapter.MAX_ADAPTER_TENSORS",
        ("tests/attacks/test_adapter_patterns.py",),
        ("adapter folder",),
    ),
    "note of an adapter": Row(
        FILE,
        "node.models.adapter_note.MAX_NOTE_BYTES",
        "node.models.adapter_note.MAX_NOTE_BYTES",
        "node.models.adapter_note.MAX_NOTE_BYTES",
        ("tests/unit/test_adapter_folder.py",),
        ("note of an adapter",),
    ),
    "dataset": Row(
        FILE,
        CHOSEN,
        CHOSEN,
        CHOSEN,
        ("tests/unit/test_tuning_data.py",),
        ("dataset",),
    ),
    "bundle of evidence": Row(
        "any peer, or who made the file",
        "node.trust.bundle.BUNDLE.max_bytes node.trust.bundle.BUNDLE.max_statement",
        "node.validator.endorsing.ENDORSING.max_fetches node.validator.endorsing.ENDORSING.max_pending_of_one",
        "node.trust.bundle.BUNDLE.max_tensors node.validator.endorsing.ENDORSING.max_pending",
        ("tests/attacks/test_malformed_evidence.py", "tests/attacks/test_slow_evidence.py"),
        ("evidence file", "evidence of answers", "evidence on disk"),
    ),
    "file of receipts": Row(
        FILE,
        "node.trust.receipt_file.MAX_FILE",
        "node.trust.receipt_file.MAX_KEPT",
        "node.trust.receipt_file.MAX_KEPT",
        ("tests/api/test_receipts.py",),
        ("receipt and pledge",),
    ),
    "machine file": Row(
        FILE,
        "node.placement.planning.machines_file.MACHINES.max_bytes",
        "node.placement.planning.machines_file.MACHINES.max_blocks",
        "node.placement.planning.machines_file.MACHINES.max_machines",
        ("tests/unit/test_machines_file.py",),
        ("machines",),
    ),
    "saved conversation": Row(
        FILE,
        OWN,
        OWN,
        OWN,
        ("tests/swarm/test_kept_conversation.py",),
        ("saved conversation", "conversation of others"),
    ),
    "generation settings": Row(
        FILE,
        "node.models.folder._CONFIG_LIMITS",
        "node.models.folder._CONFIG_LIMITS",
        "none: seven numbers are looked for",
        ("tests/unit/test_terminal_chat.py",),
        ("generation settings",),
    ),
    "identity": Row(
        "the machine's own user",
        "none: of its one length, or refused",
        "none: of its one length, or refused",
        "none: of its one length, or refused",
        ("tests/unit/test_identity.py",),
        ("identity file",),
    ),
    "mDNS": Row(
        "the local network",
        "node.network.mdns._MAX_TEXT",
        "node.network.mdns._MAX_NAMES",
        "node.network.mdns._MAX_ADDRS",
        ("tests/unit/test_mdns.py",),
        ("mDNS record",),
    ),
    "multiaddr": Row(
        PEER,
        "node.network.addresses.MAX_TEXT protocols.nat_traversal.TRAVERSAL.max_addr",
        "node.network.transport.dialing.DIALING.max_direct node.network.transport.connections._MAX_RESOLVED",
        "node.network.transport.address_book._MAX_PEERS node.network.transport.address_book._MAX_PROVEN",
        ("tests/attacks/test_announced_addresses.py",),
        ("address", "binary address"),
    ),
    "remembered peers": Row(
        "peers, through this node's own file",
        "node.swarm.peer_file.PEER_FILE.max_bytes",
        "node.swarm.peer_file.PEER_FILE.max_peers",
        "node.swarm.peer_file.PEER_FILE.max_peers node.swarm.peer_file.PEER_FILE.max_addrs",
        ("tests/unit/test_remembered.py",),
    ),
    "page of packaged models": Row(
        "the package index",
        "node.models.sources.alias._MAX_PAGE_BYTES",
        "node.models.sources.alias._MAX_PAGE_BYTES",
        "node.models.sources.alias._MAX_PAGE_BYTES",
        ("tests/unit/test_models_alias.py",),
    ),
}
