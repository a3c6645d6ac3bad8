"""Errors that reach a person, each with the exit code that the command line gives it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..crypto.receipts import Receipt


class ExitCode(IntEnum):
    """What `petalnode` exits with; scripts rely on these."""

    DONE = 0
    RESULT_SAYS_NO = 1
    BAD_INPUT = 2
    SWARM_CANNOT = 3
    MACHINE_CANNOT = 4
    INTERRUPTED = 130


class PetalnodeError(Exception):
    """Base of every error whose text is meant for a person: what happened, to what, what to do next."""

    exit_code: ExitCode = ExitCode.RESULT_SAYS_NO


class SwarmError(PetalnodeError):
    """The swarm cannot do it: no chain covers the model, no peer answers, every server refused."""

    exit_code = ExitCode.SWARM_CANNOT


class NoChainError(SwarmError):
    """No chain of live servers covers the wanted blocks.

    `missing` lists the blocks that no usable server holds. `gone`: servers were asked, and none could be reached; to
    ask for less does not help.
    """

    def __init__(self, message: str, missing: tuple[int, ...], *, gone: bool = False) -> None:
        super().__init__(message)
        self.missing = missing
        self.gone = gone


class ServerFailed(SwarmError):
    """One server of a chain failed or refused; `peer_id` says which."""

    def __init__(self, message: str, peer_id: str) -> None:
        super().__init__(message)
        self.peer_id = peer_id


class ServerCheated(ServerFailed):
    """A server signed something else than what it was sent and answered, or nothing: it is not used any more.

    `proof`: two receipts that contradict each other, if there are such.
    """

    def __init__(self, message: str, peer_id: str, proof: tuple[Receipt, Receipt] | None = None) -> None:
        super().__init__(message, peer_id)
        self.proof = proof


class BadInput(PetalnodeError, ValueError):
    """Something a person gave (an option, an address, a file, a tensor) cannot be used."""

    exit_code = ExitCode.BAD_INPUT


class ModelError(BadInput):
    """A model folder, file or name that cannot be used as it is."""


class MachineError(PetalnodeError):
    """This machine cannot: port in use, memory, disk, identity locked."""

    exit_code = ExitCode.MACHINE_CANNOT


_NO_MEMORY: Final = re.compile(
    r"out of memory|not enough memory|(cannot|can't|could not|failed to) allocate", re.IGNORECASE
)
"""What torch, whose errors have no kind of their own for this, and safetensors say."""


def reason_of(error: BaseException) -> str:
    """What an error of others says in its first line, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def raise_for_memory(error: Exception, what: str) -> None:
    """
    Raises:
        MachineError: `error` says that there was too little memory for `what`.
    """
    if isinstance(error, PetalnodeError):
        return
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or _NO_MEMORY.search(str(error)):
        raise MachineError(
            f"{what} takes more memory than can be had ({reason_of(error)}): close other programs, take fewer blocks "
            "(--num-blocks), a smaller model, or fewer bits (--quant nf4)"
        ) from error


@contextmanager
def memory_needed(what: str) -> Iterator[None]:
    """Raises `MachineError` in place of an error which says that there is too little memory for `what`."""
    try:
        yield
    except Exception as error:
        raise_for_memory(error, what)
        raise


@contextmanager
def unwrapped(kind: type[Exception]) -> Iterator[None]:
    """Raises the first error of `kind` instead of a nursery's group that holds nothing else.

    If the block was cancelled from outside at the same moment, the cancellation goes on alone. Whoever cancelled waits
    for no error, and would get a group.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        matching, others = group.split(kind)
        if matching is not None and others is not None and others.split(Exception)[0] is None:
            raise others from None
        if matching is None or others is not None:
            raise
        error: BaseException = matching
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
