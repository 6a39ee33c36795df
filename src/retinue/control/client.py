"""Control of the trees of another process, through its door. One connection for each request; holds nothing open."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from retinue.core.approvals import Answered, Approval, Decision
from retinue.core.errors import NotFound, RetinueError
from retinue.core.events import Delta, Event
from retinue.core.ports import Receipt
from retinue.protocol import control as wire

HOST = "127.0.0.1"
ANSWER_SECONDS = 15.0
ATTEMPTS = 2
SILENT_SECONDS = 20.0
BUFFERED = 64 * 1024
T = TypeVar("T")


class DoorGone(RetinueError):
    """The process behind the door is gone, or says nothing any more."""


class AnswerLost(DoorGone):
    """The request went out; what became of it is not known."""


class DoorClient:
    """Made with the address that `door.files` found."""

    def __init__(self, address: wire.Address) -> None:
        self.address = address

    async def cancel(self, tree: str, run: int = 0) -> bool:
        return (await self._ask("POST", wire.CANCEL, wire.Cancelled, wire.Cancel(tree, run))).cancelled

    async def send(self, tree: str, run: int, text: str) -> Receipt:
        return await self._ask("POST", wire.SEND, Receipt, wire.Send(tree, run, text))

    async def pending(self, tree: str | None = None) -> list[Approval]:
        return [question.approval for question in await self.questions(tree)]

    async def questions(self, tree: str | None = None) -> list[wire.Question]:
        """What is pending, with the digests that answers are bound to."""
        path = wire.PENDING if tree is None else f"{wire.PENDING}?{urlencode({'tree': tree})}"
        return await self._ask("GET", path, list[wire.Question])

    async def answer(self, approval_id: str, decision: Decision, *, by: str, digest: str | None = None) -> Answered:
        order = wire.Answer(approval_id, decision, by, digest)
        return (await self._ask("POST", wire.ANSWER, wire.Outcome, order)).outcome

    async def resume(self, tree: str, *, model: str | None = None, unasked: bool = False) -> wire.Begun:
        """Has a dead tree of that process's log go on there; only if `unasked` in one that asks nobody."""
        return await self._ask("POST", wire.RESUME, wire.Begun, wire.Resume(tree, model, unasked))

    async def continue_run(
        self, tree: str, run: int, text: str, *, model: str | None = None, unasked: bool = False
    ) -> wire.Begun:
        return await self._ask("POST", wire.CONTINUE, wire.Begun, wire.Continue(tree, run, text, model, unasked))

    async def process(self) -> wire.Process:
        """Who is there and what lives there."""
        return await self._ask("GET", wire.TREES, wire.Process)

    async def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncIterator[Event | Delta]:
        """As everywhere; DoorGone when it breaks off, after which `after=` the last place seen misses nothing."""
        async with aclosing(self.lines(tree, after=after, deltas=deltas)) as lines:
            async for line in lines:
                yield wire.decode_item(line)

    async def lines(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[bytes, None]:
        """The same as it came: events exactly as they are stored, deltas as `{"delta": ...}`."""
        query = urlencode({"tree": tree, "after": after, "deltas": int(deltas)})
        reader, writer = await self._connect()
        try:
            writer.write(self._request("GET", f"{wire.WATCH}?{query}", b""))
            status = await self._head(reader)
            if status != 200:
                raise _error(status, await self._read(reader.read()))
            rest = b""
            while piece := await self._chunk(reader):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line:
                        yield line
        finally:
            writer.close()

    async def _ask(self, method: str, path: str, shape: type[T], order: object = None) -> T:
        """One answer. A command whose answer did not come is sent again with the same key: it has one effect."""
        key = secrets.token_hex(16)
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._ask_once(method, path, shape, order, key)
            except AnswerLost:
                continue
        return await self._ask_once(method, path, shape, order, key)

    async def _ask_once(self, method: str, path: str, shape: type[T], order: object, key: str) -> T:
        reader, writer = await self._connect()
        try:
            writer.write(self._request(method, path, b"" if order is None else wire.encode(order), key))
            status = await self._head(reader)
            body = await self._read(reader.read())
        finally:
            writer.close()
        if status != 200:
            raise _error(status, body)
        try:
            return msgspec.json.decode(body, type=shape)
        except msgspec.MsgspecError:
            raise AnswerLost(f"process {self.address.pid} broke off its answer") from None

    def _request(self, method: str, path: str, body: bytes, key: str = "") -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {HOST}:{self.address.port}",
            f"Authorization: Bearer {self.address.token}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        if key:
            lines.append(f"{wire.KEY_HEADER}: {key}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.open_connection(HOST, self.address.port, limit=BUFFERED)
        except (OSError, TimeoutError):
            raise DoorGone(f"process {self.address.pid} does not open its door") from None

    async def _head(self, reader: asyncio.StreamReader) -> int:
        head: bytes = await self._read(reader.readuntil(b"\r\n\r\n"))
        words = head.split(b" ", 2)
        if len(words) < 3 or not words[1].isdigit():
            raise DoorGone(f"what answers for process {self.address.pid} is no door")
        return int(words[1])

    async def _chunk(self, reader: asyncio.StreamReader) -> bytes:
        line = await self._read(reader.readuntil(b"\r\n"), SILENT_SECONDS)
        try:
            size = int(line, 16)
        except ValueError:
            raise DoorGone(f"what answers for process {self.address.pid} is no door") from None
        return (await self._read(reader.readexactly(size + 2), SILENT_SECONDS))[:-2]

    async def _read(self, reading: object, seconds: float = ANSWER_SECONDS) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                data: bytes = await reading  # type: ignore[misc]
                return data
        except TimeoutError:
            raise AnswerLost(f"process {self.address.pid} does not answer") from None
        except (OSError, EOFError, asyncio.LimitOverrunError):
            raise AnswerLost(f"process {self.address.pid} is gone") from None


def _error(status: int, body: bytes) -> RetinueError:
    try:
        text = msgspec.json.decode(body, type=wire.Problem).error
    except msgspec.MsgspecError:
        text = f"the door answered with status {status}"
    return NotFound(text) if status == 404 else RetinueError(text)
