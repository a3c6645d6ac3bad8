"""Someone with a cache of their own, who fetches from the hub."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.swarm import warm_python
from tests.swarm.processes import run_to_end

# huggingface_hub reads its settings when it is imported, so every fetch is a process of its own, as for a person.
SCRIPT = """
import json, sys
from petalnode.node.errors import PetalnodeError
from petalnode.node.models import resolve
from petalnode.node.models.disk_limit import evict_for_download
from petalnode.protocols.ids import Span
model, need, offline, limit = sys.argv[1:]
last = {}
try:
    folder = resolve(model, need=Span.parse(need) if ":" in need else need, offline=offline == "yes",
                     progress=lambda what, done, total: last.update({what: [done, total]}),
                     before_download=evict_for_download(int(limit) if limit else None))
    print(json.dumps({"name": folder.name, "path": str(folder.path), "revision": folder.revision,
                      "files": sorted(file.name for file in folder.path.iterdir()), "progress": last}))
except PetalnodeError as error:
    print(json.dumps({"error": str(error), "exit": int(error.exit_code)}))
"""


@dataclass
class Person:
    """Someone with a cache of their own, who fetches from the hub."""

    home: Path
    endpoint: str

    def fetch(
        self, model: str = "org/tiny", need: str = "all", offline: bool = False, limit: str = "", **settings: str
    ) -> dict[str, Any]:
        hub = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.endpoint, "HF_HUB_OFFLINE": "0", **settings}
        environment = warm_python.environment() | hub | {"PETALNODE_CACHE": str(self.home / "petalnode")}
        command = [sys.executable, "-c", SCRIPT, model, need, "yes" if offline else "no", limit]
        outcome = run_to_end(command, environment)
        assert outcome.code == 0, outcome
        (found,) = outcome.objects
        return found
