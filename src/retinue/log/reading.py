"""Ways to read a tree that work with every log: page by page, and following a tree that another process writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TypeVar

import msgspec

from retinue.core.errors import LogError
from retinue.core.events import Event, RunEnded, TurnStarted, decode_event
from retinue.core.ports import LogReader, Receipt, StoredLine
from retinue.log.receipts import ENDED_UNREAD

PAGE = 1000
POLL_SECONDS = 0.1
T = TypeVar("T", Event, StoredLine)


def decode_line(line: bytes, location: object) -> Event:
    """Decode a stored line. Raises LogError with the `location` if it is not an event."""
    try:
        return decode_event(line)
    except msgspec.MsgspecError as error:
        raise LogError(f"{location} holds a line that is not an event: {' '.join(str(error).split())}") from None


async def _iterate_pages(read: Callable[..., Awaitable[list[T]]], tree: str, after: int) -> AsyncIterator[T]:
    """Yield the events or lines of a tree after number `after`, with one page in memory at a time."""
    while page := await read(tree, after=after, limit=PAGE):
        for each in page:
            yield each
        if len(page) < PAGE:
            return
        after = page[-1].seq


def iterate_events(log: LogReader, tree: str) -> AsyncIterator[Event]:
    """Yield the events of a tree, with one page in memory at a time."""
    return _iterate_pages(log.read, tree, 0)


def iterate_lines(log: LogReader, tree: str, *, after: int = 0) -> AsyncIterator[StoredLine]:
    """Yield the stored lines of a tree after number `after`, with one page in memory at a time."""
    return _iterate_pages(log.read_lines, tree, after)


async def follow_lines(log: LogReader, tree: str, *, after: int = 0) -> AsyncGenerator[StoredLine, None]:
    """Yield the lines of a tree after number `after`, then new lines, until the tree has ended or no process writes
    it."""
    while True:
        status = await log.read_status(tree)  # before the lines, so that no line of a writer that exits now is missed
        async for stored in iterate_lines(log, tree, after=after):
            after = stored.seq
            yield stored
        if not status.is_at_work:
            return
        await asyncio.sleep(POLL_SECONDS)


async def follow_events(log: LogReader, tree: str, *, after: int = 0) -> AsyncGenerator[Event, None]:
    """Yield the events of a tree like `follow_lines`."""
    async with aclosing(follow_lines(log, tree, after=after)) as lines:
        async for stored in lines:
            yield decode_line(stored.line, log.location)


async def wait_for_event(
    log: LogReader, tree: str, matches: Callable[[Event], bool], *, after: int = 0, seconds: float
) -> Event | None:
    """Return the first event after number `after` that `matches` accepts, or None if it does not come within `seconds`
    or the tree ends first."""
    async with aclosing(follow_events(log, tree, after=after)) as events:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for event in events:
                    if matches(event):
                        return event
    return None


async def wait_until_read(log: LogReader, tree: str, run: int, receipt: Receipt, *, seconds: float) -> Receipt:
    """Wait until a queued message is read, and return its new receipt: delivered, too late, or still queued after
    `seconds`."""
    if receipt.state != "queued":
        return receipt

    readers = receipt.readers or (run,)

    def is_news(event: Event) -> bool:
        is_read = event.run in readers and isinstance(event.body, TurnStarted)
        return is_read or (event.run == run and isinstance(event.body, RunEnded))

    event = await wait_for_event(log, tree, is_news, after=receipt.seq, seconds=seconds)
    if event is None:
        return receipt
    if isinstance(event.body, TurnStarted):
        return Receipt("delivered", receipt.seq, turn=event.body.turn)
    return Receipt("too_late", receipt.seq, why=ENDED_UNREAD)
