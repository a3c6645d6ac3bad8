"""The panel of `petalnode serve` and the picture of `status --watch` at a real terminal, until Ctrl-C."""

from __future__ import annotations

import re
from pathlib import Path

from tests.swarm.processes import LOOPBACK, environment, petalnode
from tests.swarm.terminals import Terminal, terminal

HIDDEN, VISIBLE = "\x1b[?25l", "\x1b[?25h"


def cursor_is_back(opened: Terminal) -> bool:
    return opened.shown.rfind(VISIBLE) > opened.shown.rfind(HIDDEN) >= 0


def top(width: int) -> str:
    """The first line of the panel."""
    return "╭─ petalnode  tiny-llama ".ljust(width - 1, "─") + "╮"


def test_panel_follows_the_window_and_leaves_the_terminal(tmp_path: Path, models: Path) -> None:
    env = environment(tmp_path, PETALNODE_KERNELS_ISA="none")
    del env["COLUMNS"]  # which would be taken for the width
    serve = (
        "serve",
        "tiny-llama",
        "--new-swarm",
        "--listen",
        LOOPBACK,
        "--cache-tokens",
        "2000",
        "--throughput",
        "100",
    )
    with terminal(*serve, env=env, cwd=models, size=(90, 40)) as server:
        modes = server.modes()
        server.until("a token takes two to four times as long on a CPU; install the wheel")
        found = re.search(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+", server.until(top(90)))
        assert found is not None, server.shown
        assert server.until("of 2000 tokens")  # with bars above it
        status = ("status", "--watch", "0.5", "--peer", found[0])
        with terminal(*status, env=env, cwd=models, size=(100, 30)) as watcher:
            before = watcher.modes()
            watcher.until("until Ctrl-C")
            watcher.until("\x1b[1A")  # the cursor goes up over it
            assert "tiny-llama" in watcher.until("until Ctrl-C")
            assert not cursor_is_back(watcher)
            watcher.resize(40, 12)
            watcher.until("until Ctrl-C")
            watcher.type("\x03")
            assert watcher.exit_code() == 130
            assert cursor_is_back(watcher)
            assert watcher.modes() == before
        server.type("q\n")  # keys mean nothing
        server.resize(50, 20)
        narrow = server.until(top(50)) + server.until("╯")
        assert "of 2000 tokens" in narrow
        server.until(top(50))  # and again
        server.type("\x13")  # Ctrl-S: the terminal takes nothing more, and the panel is drawn every second
        for _ in range(2):
            asked = petalnode("status", "--json", "--peer", found[0], env=env)
            assert [len(each["servers"]) for each in asked.objects] == [1], asked
        server.type("\x03")
        server.until("done: nobody was served any more")
        assert server.exit_code() == 0
        assert cursor_is_back(server)
        assert server.modes() == modes
