"""Makes docs/demo.svg from the real program: runs `petalnode demo` in a pseudo-terminal and draws what it printed.

python docs/record_demo.py [question]
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 30


def record(command: list[str]) -> str:
    """What `command` writes to a terminal of COLUMNS x ROWS."""
    controller, terminal = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    output = b""
    while True:
        try:
            data = os.read(controller, 65536)
        except OSError:  # the terminal is gone with the program
            break
        if not data:
            break
        output += data
    if process.wait() != 0:
        raise SystemExit(f"the demo failed:\n{output.decode()}")
    return output.decode().replace("\r\n", "\n")


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
    shown = f'$ make demo PROMPT="{question}"\n'
    printed = record([sys.executable, "-m", "petalnode", "demo", "--prompt", question])
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(shown + printed))
    target = Path(__file__).parent / "demo.svg"
    target.write_text(console.export_svg(title="petalnode demo"))
    print(f"wrote {target.name}:\n{shown}{printed}")


if __name__ == "__main__":
    main()
