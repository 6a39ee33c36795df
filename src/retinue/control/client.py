"""Control of the trees of another process, through its door. One connection for each request; holds nothing open."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from retinue.core.approvals import Answered, Approval, Decision
from retinue.core.errors import NotFound, RetinueError
from retinue.core.events import Delta, Event
from retinue.core.ports import Receipt
from retinue.http.client import ClientConnection, IncompleteResponse, NoResponse, Response, ResponseError
from retinue.http.listener import HOST
from retinue.protocol import control as wire

ANSWER_SECONDS = 15.0
ATTEMPTS = 2
SILENT_SECONDS = 20.0
ANSWER_BYTES = 256 * 1024 * 1024
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
        connection = await self._connect()
        try:
            response = await self._request(connection, "GET", f"{wire.WATCH}?{query}")
            if response.status != 200:
                raise _error(response.status, await self._read(connection.read_body(ANSWER_BYTES)))
            rest = b""
            while chunk := await self._read(connection.read_chunk(), SILENT_SECONDS):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield line
        finally:
            connection.close()

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
        connection = await self._connect()
        try:
            response = await self._request(connection, method, path, b"" if order is None else wire.encode(order), key)
            body = await self._read(connection.read_body(ANSWER_BYTES))
        finally:
            connection.close()
        if response.status != 200:
            raise _error(response.status, body)
        try:
            return msgspec.json.decode(body, type=shape)
        except msgspec.MsgspecError:
            raise AnswerLost(f"process {self.address.pid} broke off its answer") from None

    async def _request(
        self, connection: ClientConnection, method: str, path: str, body: bytes = b"", key: str = ""
    ) -> Response:
        headers = {
            "Host": f"{HOST}:{self.address.port}",
            "Authorization": f"Bearer {self.address.token}",
            "Content-Type": "application/json",
            "Connection": "close",
        }
        if key:
            headers[wire.KEY_HEADER] = key
        connection.send_request(method, path, headers, body)
        return await self._read(connection.read_response())

    async def _connect(self) -> ClientConnection:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return ClientConnection(*await asyncio.open_connection(HOST, self.address.port))
        except (OSError, TimeoutError):
            raise DoorGone(f"process {self.address.pid} does not open its door") from None

    async def _read(self, reading: Awaitable[T], seconds: float = ANSWER_SECONDS) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await reading
        except TimeoutError:
            raise AnswerLost(f"process {self.address.pid} does not answer") from None
        except (OSError, NoResponse, IncompleteResponse):
            raise AnswerLost(f"process {self.address.pid} is gone") from None
        except ResponseError:
            raise DoorGone(f"what answers for process {self.address.pid} is no door") from None


def _error(status: int, body: bytes) -> RetinueError:
    try:
        text = msgspec.json.decode(body, type=wire.Problem).error
    except msgspec.MsgspecError:
        text = f"the door answered with status {status}"
    return NotFound(text) if status == 404 else RetinueError(text)
