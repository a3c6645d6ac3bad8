"""What comes of errors that a nursery has put into a group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from petalnode.node.errors import ServerFailed, SwarmError, unwrapped

FAILURE = ServerFailed("it is gone", "a")


async def fail_beside(other: Callable[[], Awaitable[None]]) -> None:
    with unwrapped(ServerFailed):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            raise FAILURE


async def test_error_among_tasks_is_raised_as_it_is() -> None:
    with pytest.raises(ServerFailed) as caught:
        await fail_beside(trio.sleep_forever)
    assert caught.value is FAILURE


async def test_two_kinds_of_errors_stay_a_group() -> None:
    async def fail() -> None:
        raise SwarmError("another")

    with pytest.raises(ExceptionGroup):
        await fail_beside(fail)


async def test_who_cancels_in_an_error_gets_no_group() -> None:
    """As a person who presses Ctrl-C, or another chain that has won, just when a server fails."""
    with trio.CancelScope() as scope, unwrapped(ServerFailed):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            scope.cancel()
            raise FAILURE
    assert scope.cancelled_caught
