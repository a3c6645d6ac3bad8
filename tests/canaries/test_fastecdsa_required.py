"""py-libp2p: it requires fastecdsa 2.3, which has to be compiled on most platforms, for P-256 keys."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

CURED = "py-libp2p has cured it: docs/decisions/libp2p-in-the-wheel.md says what can be thrown away"


def test_libp2p_requires_library_that_has_to_be_compiled() -> None:
    required = {entry.name: entry for entry in map(Requirement, metadata.requires("libp2p") or ())}
    assert "fastecdsa" in required and not required["fastecdsa"].specifier.contains("3.0.0"), CURED
