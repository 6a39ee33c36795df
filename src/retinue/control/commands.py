"""The commands of other processes, carried out on this process's Control. Knows no HTTP and no supervisor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from retinue.core.control import Changes, ClientOptions, Control, ResumeOverrides, RunHandle, TreeInfo
from retinue.core.errors import ConfigError
from retinue.core.events import Delta, Event, encode_event
from retinue.core.messages import RunRef
from retinue.core.ports import Receipt, Row
from retinue.protocol import control as protocol
from retinue.protocol.control import Command, StreamCommand
from retinue.protocol.strict_json import encode_body

UNATTENDED = (
    "process {pid} writes the log of {tree} and asks nobody, since it was started with --yes: "
    "add --yes to go on there all the same, or wait until it has ended"
)
DEFAULT_ANSWERER = "control"
Q = TypeVar("Q")
R = TypeVar("R")


class Routes:
    """The handlers by route, each checked against the types of its command."""

    def __init__(self) -> None:
        self.commands: dict[str, tuple[Command[Any, Any], Callable[[Any], Awaitable[Any]]]] = {}
        self.streams: dict[str, tuple[StreamCommand[Any], Callable[[Any], Awaitable[AsyncIterator[bytes]]]]] = {}

    def add(self, command: Command[Q, R], handler: Callable[[Q], Awaitable[R]]) -> None:
        self.commands[command.path] = command, handler

    def add_stream(self, command: StreamCommand[Q], handler: Callable[[Q], Awaitable[AsyncIterator[bytes]]]) -> None:
        """Add a handler that returns lines. What is wrong with its request it raises before it returns."""
        self.streams[command.path] = command, handler

    def method_of(self, path: str) -> str | None:
        """Return the HTTP method of a route; None if there is no such route."""
        if path in self.commands:
            return "GET" if self.commands[path][0].reads else "POST"
        if path in self.streams:
            return "GET" if self.streams[path][0].reads else "POST"
        return None


class CommandHandlers:
    """The handlers on one Control. A process that asks nobody is `unattended`: it starts runs only for a client that
    accepts this. An error is a RetinueError."""

    def __init__(self, control: Control, *, unattended: bool) -> None:
        self._control = control
        self._unattended = unattended

    def make_routes(self) -> Routes:
        routes = Routes()
        routes.add(protocol.TREES, self.describe_process)
        routes.add(protocol.PENDING, self.list_pending)
        routes.add(protocol.CANCEL, self.cancel_run)
        routes.add(protocol.KILL, self.kill_tree)
        routes.add(protocol.SEND, self.send_text)
        routes.add(protocol.ANSWER, self.answer_question)
        routes.add(protocol.PREPARE, self.prepare)
        routes.add(protocol.SPAWN, self.spawn_run)
        routes.add(protocol.RESUME, self.resume_tree)
        routes.add(protocol.CONTINUE, self.continue_run)
        routes.add(protocol.RESULT, self.get_result)
        routes.add(protocol.DESCRIBE, self.describe_run)
        routes.add(protocol.LIST, self.list_trees)
        routes.add(protocol.FIND, self.find_run)
        routes.add(protocol.CHANGES, self.list_changes)
        routes.add(protocol.DIFF, self.show_diff)
        routes.add(protocol.APPLY, self.apply_changes)
        routes.add_stream(protocol.WATCH, self.watch_tree)
        routes.add_stream(protocol.OPEN_CLIENT, self.open_client)
        routes.add_stream(protocol.ATTEND, self.attend)
        return routes

    async def describe_process(self, request: protocol.TreesRequest) -> protocol.ProcessInfo:
        trees = [_describe_tree(tree) for tree in await self._control.list_trees(live=True)]
        return protocol.ProcessInfo(version=protocol.VERSION, pid=os.getpid(), trees=trees)

    async def list_pending(self, request: protocol.PendingRequest) -> list[protocol.PendingQuestion]:
        pending = await self._control.pending(request.tree)
        return [protocol.PendingQuestion(approval=asked, digest=asked.digest) for asked in pending]

    async def cancel_run(self, request: protocol.CancelRequest) -> protocol.CancelReply:
        return protocol.CancelReply(cancelled=await self._control.cancel(request.tree, request.run))

    async def kill_tree(self, request: protocol.TreeRequest) -> protocol.DoneReply:
        await self._control.kill(request.tree)
        return protocol.DoneReply()

    async def send_text(self, request: protocol.SendRequest) -> Receipt:
        return await self._control.send(request.tree, request.run, request.text)

    async def answer_question(self, request: protocol.AnswerRequest) -> protocol.AnswerReply:
        by = request.by[: protocol.MAX_NAME] or DEFAULT_ANSWERER
        outcome = await self._control.answer(request.approval_id, request.decision, by=by, digest=request.digest or "")
        return protocol.AnswerReply(outcome=outcome)

    # Starting runs

    async def prepare(self, request: protocol.PrepareRequest) -> protocol.DoneReply:
        await self._control.prepare(request.profile)
        return protocol.DoneReply()

    async def spawn_run(self, request: protocol.SpawnRequest) -> RunRef:
        handle = await self._control.spawn(
            request.profile, request.task, narrow=request.limits, below=request.below, caller=request.caller
        )
        return await _wait_until_logged(handle)

    async def resume_tree(self, request: protocol.ResumeRequest) -> RunRef:
        self._check_attended(request)
        overrides = ResumeOverrides(model=request.model)
        return await _wait_until_logged(await self._control.resume(request.tree, overrides))

    async def continue_run(self, request: protocol.ContinueRequest) -> RunRef:
        self._check_attended(request)
        overrides = ResumeOverrides(model=request.model, seconds=request.seconds, files=request.files)
        handle = await self._control.continue_run(request.tree, request.run, request.text, overrides)
        return await _wait_until_logged(handle)

    def _check_attended(self, request: protocol.ResumeRequest | protocol.ContinueRequest) -> None:
        if self._unattended and not request.unattended:
            raise ConfigError(UNATTENDED.format(pid=os.getpid(), tree=request.tree))

    async def open_client(self, request: protocol.ClientRequest) -> AsyncIterator[bytes]:
        options = ClientOptions(
            name=request.name,
            task=request.task,
            description=request.description,
            tools=request.tools,
            limits=request.limits,
            caller=request.caller,
        )
        client = await self._control.open_client(options)

        async def lines() -> AsyncIterator[bytes]:
            async with client:
                yield encode_body(client.ref)
                await client.result()

        return lines()

    async def attend(self, request: protocol.AttendRequest) -> AsyncIterator[bytes]:
        async def lines() -> AsyncIterator[bytes]:
            async with self._control.attend(request.tree):
                yield encode_body(protocol.DoneReply())
                await asyncio.Event().wait()  # until the client leaves

        return lines()

    # Looking

    async def get_result(self, request: protocol.RunRequest) -> protocol.ResultReply:
        result = await self._control.result(request.tree, request.run)
        if result is not None:  # the parser of a typed output is a function of this process
            result = msgspec.structs.replace(result, parse=msgspec.UNSET)
        return protocol.ResultReply(result=result)

    async def describe_run(self, request: protocol.RunRequest) -> Row:
        return await self._control.describe_run(request.tree, request.run)

    async def list_trees(self, request: protocol.ListRequest) -> list[TreeInfo]:
        return await self._control.list_trees(live=request.live)

    async def find_run(self, request: protocol.FindRequest) -> RunRef:
        return await self._control.find_run(request.name)

    async def list_changes(self, request: protocol.RunRequest) -> Changes:
        return await self._control.changes(request.tree, request.run)

    async def show_diff(self, request: protocol.RunRequest) -> protocol.DiffReply:
        return protocol.DiffReply(diff=await self._control.diff(request.tree, request.run))

    async def apply_changes(self, request: protocol.RunRequest) -> protocol.ApplyReply:
        return protocol.ApplyReply(files=list(await self._control.apply(request.tree, request.run)))

    async def watch_tree(self, request: protocol.WatchRequest) -> AsyncIterator[bytes]:
        await self._control.describe_run(request.tree)  # raises NotFound before the response begins
        return _encode_items(self._control.watch(request.tree, after=request.after, deltas=request.deltas))


async def _wait_until_logged(handle: RunHandle) -> RunRef:
    await handle.wait_until_logged()
    return handle.ref


async def _encode_items(items: AsyncIterator[Event | Delta]) -> AsyncIterator[bytes]:
    async with aclosing(items):  # type: ignore[type-var]
        async for item in items:
            yield protocol.encode_delta(item) if isinstance(item, Delta) else encode_event(item)


def _describe_tree(tree: TreeInfo) -> protocol.LiveTree:
    runs = [
        protocol.LiveRun(
            run=row.run, parent=row.parent, path=row.path, label=row.label, agent=row.agent, state=row.state
        )
        for row in tree.runs
    ]
    return protocol.LiveTree(tree=tree.tree, runs=runs)
