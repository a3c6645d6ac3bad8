"""Local search: small changes of a cycle, the best of them each time, until none makes it cheaper."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .cycle import Floats, Ints
from .labels import TOLERANCE, Found, split
from .relaxation import Machines


def improved(machines: Machines, found: Found, home: int | None) -> Found:
    """`found`, or a cheaper cycle by leaving out, adding, replacing, moving or swapping machines or by turning a part
    round. A home stays first."""
    fixed = 0 if home is None else 1
    holds = np.flatnonzero(machines.capacity > 0)
    while True:
        path = np.array(found.machines)
        others = np.setdiff1d(holds, path)
        better = found
        for template in _templates(len(path), fixed):
            # A template's -1 stands for each of the others.
            if (template < 0).any():
                paths = np.append(path, -1)[np.repeat(template, len(others), axis=0)]
                paths = np.where(paths < 0, np.tile(others, len(template))[:, None], paths)
            else:
                paths = path[template]
            if not len(paths):
                continue
            seconds = cycles_seconds(machines, paths)
            least = int(seconds.argmin())
            if seconds[least] < better.seconds - TOLERANCE:
                better = Found(tuple(paths[least].tolist()), float(seconds[least]))
        if better is found:
            return found
        found = better


def cycles_seconds(machines: Machines, paths: Ints) -> Floats:
    """Time per token of cycles [P, length] with their blocks split as well as can be; infinite if that cannot be."""
    passed = np.zeros((len(paths), len(machines.capacity)), np.intp)
    np.put_along_axis(passed, paths, 1, axis=1)
    blocks, left = split(machines, passed)
    ways = machines.way[paths, np.roll(paths, -1, axis=1)].sum(1)
    return np.where(left == 0, ways + blocks @ machines.seconds, np.inf)


@lru_cache(maxsize=256)
def _templates(length: int, fixed: int) -> tuple[Ints, ...]:
    """All changes of a cycle of `length` machines as the positions of which the new one consists, by length [.., new
    length]; -1 is a machine from elsewhere. The first `fixed` machines stay where they are."""
    path = list(range(length))
    free = path[fixed:]
    shorter = [path[:at] + path[at + 1 :] for at in free if length - fixed > 1]
    same = [path]
    for one in free:
        for other in free:
            if one < other:
                same.append([*path[:one], other, *path[one + 1 : other], one, *path[other + 1 :]])
                same.append(path[:one] + path[one : other + 1][::-1] + path[other + 1 :])
            if one != other:
                moved = path[:one] + path[one + 1 :]
                same.append([*moved[:other], one, *moved[other:]])
    replaced = [[*path[:at], -1, *path[at + 1 :]] for at in free]
    longer = [[*path[:at], -1, *path[at:]] for at in range(max(fixed, 1), length + 1)]
    return tuple(np.array(each, np.intp).reshape(len(each), -1) for each in (shorter, same, replaced, longer) if each)
