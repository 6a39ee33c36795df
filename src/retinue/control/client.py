"""Control of the trees of another process, through its control server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from retinue.control.channel import ControlChannel
from retinue.core.approvals import Answered, Approval, Decision
from retinue.core.events import Delta, Event
from retinue.core.ports import Receipt
from retinue.protocol import control as protocol
from retinue.protocol.control import Address, PendingQuestion, ProcessInfo, RunAddress, decode_item


class ControlClient:
    """The commands, by the names they have on the supervisor. `address` comes from `address_files`."""

    def __init__(self, address: Address) -> None:
        self._channel = ControlChannel(address)

    @property
    def address(self) -> Address:
        return self._channel.address

    async def cancel(self, tree: str, run: int = 0) -> bool:
        request = protocol.CancelRequest(tree=tree, run=run)
        return (await self._channel.call(protocol.CANCEL, request)).cancelled

    async def send(self, tree: str, run: int, text: str) -> Receipt:
        return await self._channel.call(protocol.SEND, protocol.SendRequest(tree=tree, run=run, text=text))

    async def pending(self, tree: str | None = None) -> list[Approval]:
        return [question.approval for question in await self.list_questions(tree)]

    async def list_questions(self, tree: str | None = None) -> list[PendingQuestion]:
        """List the open questions with the digests that answers are bound to."""
        return await self._channel.call(protocol.PENDING, protocol.PendingRequest(tree=tree))

    async def answer(self, approval_id: str, decision: Decision, *, by: str, digest: str | None = None) -> Answered:
        request = protocol.AnswerRequest(approval_id=approval_id, decision=decision, by=by, digest=digest)
        return (await self._channel.call(protocol.ANSWER, request)).outcome

    async def resume(self, tree: str, *, model: str | None = None, unattended: bool = False) -> RunAddress:
        """Resume a tree of that process's log there. A process that asks nobody does it only if `unattended`."""
        request = protocol.ResumeRequest(tree=tree, model=model, unattended=unattended)
        return await self._channel.call(protocol.RESUME, request)

    async def continue_run(
        self, tree: str, run: int, text: str, *, model: str | None = None, unattended: bool = False
    ) -> RunAddress:
        request = protocol.ContinueRequest(tree=tree, run=run, text=text, model=model, unattended=unattended)
        return await self._channel.call(protocol.CONTINUE, request)

    async def describe_process(self) -> ProcessInfo:
        return await self._channel.call(protocol.TREES, protocol.TreesRequest())

    async def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncIterator[Event | Delta]:
        """Watch a tree. If it breaks off with ControlUnreachable, `after=` the last event seen misses nothing."""
        async with aclosing(self.watch_lines(tree, after=after, deltas=deltas)) as lines:
            async for line in lines:
                yield decode_item(line)

    def watch_lines(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[bytes, None]:
        """Watch a tree as the lines that came: events exactly as they are stored, deltas as `{"delta": ...}`."""
        return self._channel.stream(protocol.WATCH, protocol.WatchRequest(tree=tree, after=after, deltas=deltas))
