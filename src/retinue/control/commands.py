"""The commands of other processes, carried out on this process's supervisor. Knows no HTTP."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from retinue.core.errors import ConfigError, NotFound
from retinue.core.events import Delta, Event, encode
from retinue.core.ports import Receipt
from retinue.log.archive import Archive
from retinue.protocol import control as protocol
from retinue.protocol.control import Command, StreamCommand
from retinue.supervisor.nodes import Node
from retinue.supervisor.resume import Given
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.trees import Tree

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
        return "GET" if path in self.streams else None


class CommandHandlers:
    """The handlers of one supervisor, whose state folder is `state`. An error is a RetinueError."""

    def __init__(self, supervisor: Supervisor, state: Path) -> None:
        self._supervisor = supervisor
        self._state = state

    def make_routes(self) -> Routes:
        routes = Routes()
        routes.add(protocol.TREES, self.list_trees)
        routes.add(protocol.PENDING, self.list_pending)
        routes.add(protocol.CANCEL, self.cancel_run)
        routes.add(protocol.SEND, self.send_text)
        routes.add(protocol.ANSWER, self.answer_question)
        routes.add(protocol.RESUME, self.resume_tree)
        routes.add(protocol.CONTINUE, self.continue_run)
        routes.add_stream(protocol.WATCH, self.watch_tree)
        return routes

    async def list_trees(self, request: protocol.TreesRequest) -> protocol.ProcessInfo:
        trees = [_describe_tree(tree) for tree in self._supervisor.trees.values()]
        return protocol.ProcessInfo(version=protocol.VERSION, pid=os.getpid(), trees=trees)

    async def list_pending(self, request: protocol.PendingRequest) -> list[protocol.PendingQuestion]:
        pending = self._supervisor.pending(request.tree)
        return [protocol.PendingQuestion(approval=asked, digest=asked.digest) for asked in pending]

    async def cancel_run(self, request: protocol.CancelRequest) -> protocol.CancelReply:
        return protocol.CancelReply(cancelled=await self._supervisor.cancel(request.tree, request.run))

    async def send_text(self, request: protocol.SendRequest) -> Receipt:
        return await self._supervisor.send(request.tree, request.run, request.text)

    async def answer_question(self, request: protocol.AnswerRequest) -> protocol.AnswerReply:
        if request.digest is not None:
            for asked in self._supervisor.pending():
                if asked.id == request.approval_id and asked.digest != request.digest:
                    return protocol.AnswerReply(outcome="stale")  # the question is not the one that was shown
        by = request.by[: protocol.MAX_NAME] or DEFAULT_ANSWERER
        return protocol.AnswerReply(outcome=self._supervisor.answer(request.approval_id, request.decision, by=by))

    async def resume_tree(self, request: protocol.ResumeRequest) -> protocol.RunAddress:
        overrides = self._make_overrides(request)
        await self._supervisor.prepare()
        return await self._wait_until_logged(self._supervisor.resume(request.tree, overrides))

    async def continue_run(self, request: protocol.ContinueRequest) -> protocol.RunAddress:
        overrides = self._make_overrides(request)
        await self._supervisor.prepare()
        node = self._supervisor.continue_run(request.tree, request.run, request.text, overrides)
        return await self._wait_until_logged(node)

    def _make_overrides(self, request: protocol.ResumeRequest | protocol.ContinueRequest) -> Given:
        if not request.unattended and getattr(self._supervisor.policy, "mode", "") == "yes":
            raise ConfigError(UNATTENDED.format(pid=os.getpid(), tree=request.tree))
        archive = Archive(self._state)  # the run that a tree continues may be in another file than its own

        def read(tree: str) -> list[Event]:
            return self._supervisor.log_of(tree).read(tree) or archive.read(tree)

        return Given(model=request.model, read=read)

    async def _wait_until_logged(self, node: Node) -> protocol.RunAddress:
        """Reply when the run is in the log, so that a reader of the log finds it."""
        ref = node.ref
        async with aclosing(self._supervisor.watch(ref.tree, after=node.link.tree.seq - 1)) as events:
            async for _ in events:
                break
        return protocol.RunAddress(tree=ref.tree, run=ref.run)

    async def watch_tree(self, request: protocol.WatchRequest) -> AsyncIterator[bytes]:
        supervisor, tree = self._supervisor, request.tree
        if tree in supervisor.trees:
            return _encode_items(supervisor.watch(tree, after=request.after, deltas=request.deltas))
        if tree in supervisor.log_of(tree).trees():
            return self._read_stored(tree, request.after)
        raise NotFound("there is no such tree here")

    async def _read_stored(self, tree: str, after: int) -> AsyncIterator[bytes]:
        """Yield the events of a tree that does not run here, so that there will be no further ones."""
        for event in self._supervisor.log_of(tree).read(tree, after=after):
            yield encode(event)


async def _encode_items(items: AsyncIterator[Event | Delta]) -> AsyncIterator[bytes]:
    async with aclosing(items):  # type: ignore[type-var]
        async for item in items:
            yield protocol.encode_delta(item) if isinstance(item, Delta) else encode(item)


def _describe_tree(tree: Tree) -> protocol.LiveTree:
    runs = [
        protocol.LiveRun(
            run=view.number,
            parent=view.spawned.parent,
            path=view.path,
            label=view.label,
            agent=view.agent,
            state=view.state,
        )
        for view in tree.runs.runs.values()
    ]
    return protocol.LiveTree(tree=tree.id, runs=runs)
