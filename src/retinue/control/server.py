"""The door: Control of this process over HTTP on the loopback interface, for other processes of the same user.

Every request is checked before its body is read: its Host and Origin, so that no web page can knock, and the token
that stands in a file only the user can read. GETs change nothing. Opened and closed by the surface that runs trees.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

from retinue.control.address_files import DoorFile
from retinue.control.watch_stream import stream
from retinue.core.errors import ConfigError, RetinueError
from retinue.core.secrets import forget, hide
from retinue.http.listener import Listener
from retinue.http.server import HttpError, Request, ServerConnection
from retinue.log.archive import Archive
from retinue.protocol import control as wire
from retinue.supervisor.nodes import Node
from retinue.supervisor.resume import Given
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.trees import Tree

MOST_CONNECTIONS = 256
LAST_WORDS_SECONDS = 1.0
REMEMBERED = 4096
UNASKED = (
    "process {pid} writes the log of {tree} and asks nobody, since it was started with --yes: "
    "add --yes to go on there all the same, or wait until it has ended"
)
Get = Callable[[dict[str, str]], Any]
Post = Callable[[bytes], Awaitable[Any]]


class DoorServer(Listener):
    """`async with DoorServer(supervisor, state_folder)`: open inside, closed and its file gone after."""

    def __init__(self, supervisor: Supervisor, state: Path) -> None:
        super().__init__("this door", max_connections=MOST_CONNECTIONS)
        self._supervisor = supervisor
        self._folder = state / "doors"
        self._token = secrets.token_urlsafe(32)
        self._commands: dict[str, tuple[str, bytes, asyncio.Future[Any]]] = {}
        self._get: dict[str, Get] = {wire.TREES: self._trees, wire.PENDING: self._pending}
        self._post: dict[str, Post] = {wire.CANCEL: self._cancel, wire.SEND: self._send, wire.ANSWER: self._answer}
        self._post |= {wire.RESUME: self._resume, wire.CONTINUE: self._continue}

    async def __aenter__(self) -> DoorServer:
        port = self.listen()
        hide(self._token)
        self.address = wire.Address(wire.VERSION, os.getpid(), port, self._token)
        try:
            self._file = DoorFile(self._folder, self.address)
        except RetinueError:
            await self.stop_listening()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.remove()
        await self.stop_listening()
        await self.end_connections(LAST_WORDS_SECONDS)  # a watcher of a tree that has ended gets them
        forget(self._token)

    async def respond(self, request: Request, connection: ServerConnection) -> None:
        self._check(request)
        if request.path == wire.WATCH and request.method == "GET":
            await stream(self._supervisor, request.query, connection)
        else:
            connection.send_response(200, wire.encode(await self._do(request, connection)))

    def _check(self, request: Request) -> None:
        """Before anything else of the request is looked at."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self._token.encode()):
            raise HttpError(401, "the token is missing or wrong", **{"WWW-Authenticate": "Bearer"})
        known = wire.WATCH, *self._get, *self._post
        if request.path not in known:
            raise HttpError(404, "there is no such route")
        allowed = "POST" if request.path in self._post else "GET"
        if request.method != allowed:
            raise HttpError(405, f"this route takes {allowed} only", Allow=allowed)

    async def _do(self, request: Request, connection: ServerConnection) -> Any:
        try:
            if request.method == "GET":
                return self._get[request.path](request.query)
            if request.query:
                raise HttpError(400, "this route takes no parameters in its address")
            return await self._once(request, await connection.read_json_body(request))
        except (wire.BadBody, RetinueError) as error:
            raise HttpError(400, str(error)) from None

    async def _once(self, request: Request, body: bytes) -> Any:
        """The answer to a command. One that comes again with the same key, also while the first is still at work, gets
        the first one's answer and has no effect of its own."""
        command, key = self._post[request.path], request.headers.get(wire.KEY_HEADER.lower(), "")
        if not key:
            return await command(body)
        if len(key) > wire.LONGEST_KEY:
            raise HttpError(400, f"{wire.KEY_HEADER} is longer than {wire.LONGEST_KEY} characters")
        known = self._commands.get(key)
        if known is None:
            known = self._commands[key] = (request.path, body, asyncio.ensure_future(command(body)))
            known[2].add_done_callback(lambda done: done.cancelled() or done.exception())
            if len(self._commands) > REMEMBERED:
                del self._commands[next(iter(self._commands))]
        path, asked, answer = known
        if (path, asked) != (request.path, body):
            raise HttpError(409, f"this {wire.KEY_HEADER} belongs to another command")
        return await asyncio.shield(answer)

    # The commands

    def _trees(self, query: dict[str, str]) -> wire.Process:
        _only(query)
        return wire.Process(wire.VERSION, os.getpid(), [_live(tree) for tree in self._supervisor.trees.values()])

    def _pending(self, query: dict[str, str]) -> list[wire.Question]:
        _only(query, "tree")
        return [wire.Question(asked, asked.digest) for asked in self._supervisor.pending(query.get("tree"))]

    async def _cancel(self, body: bytes) -> wire.Cancelled:
        order = wire.read(body, wire.Cancel)
        return wire.Cancelled(await self._supervisor.cancel(order.tree, order.run))

    async def _send(self, body: bytes) -> Any:
        order = wire.read(body, wire.Send)
        return await self._supervisor.send(order.tree, order.run, order.text)

    async def _resume(self, body: bytes) -> wire.Begun:
        order = wire.read(body, wire.Resume)
        given = self._given(order)
        await self._supervisor.prepare()
        return await self._begun(self._supervisor.resume(order.tree, given))

    async def _continue(self, body: bytes) -> wire.Begun:
        order = wire.read(body, wire.Continue)
        given = self._given(order)
        await self._supervisor.prepare()
        return await self._begun(self._supervisor.continue_run(order.tree, order.run, order.text, given))

    def _given(self, order: wire.Resume | wire.Continue) -> Given:
        """What a tree continues may be in another file than its own."""
        if not order.unasked and getattr(self._supervisor.policy, "mode", "") == "yes":
            raise ConfigError(UNASKED.format(pid=os.getpid(), tree=order.tree))
        archive = Archive(self._folder.parent)
        return Given(
            model=order.model, read=lambda tree: self._supervisor.log_of(tree).read(tree) or archive.read(tree)
        )

    async def _begun(self, node: Node) -> wire.Begun:
        """Said when it is in the log, so that whoever reads the log finds it alive."""
        ref = node.ref
        async with aclosing(self._supervisor.watch(ref.tree, after=node.link.tree.seq - 1)) as events:
            async for _ in events:
                break
        return wire.Begun(ref.tree, ref.run)

    async def _answer(self, body: bytes) -> wire.Outcome:
        order = wire.read(body, wire.Answer)
        if order.digest is not None:
            for asked in self._supervisor.pending():
                if asked.id == order.approval_id and asked.digest != order.digest:
                    return wire.Outcome("stale")  # the question is not the one that was shown
        by = order.by[: wire.LONGEST_NAME] or "door"
        return wire.Outcome(self._supervisor.answer(order.approval_id, order.decision, by=by))


def _only(query: dict[str, str], *known: str) -> None:
    for name in query:
        if name not in known:
            raise HttpError(400, f"unknown parameter {name[: wire.LONGEST_NAME]!r}")


def _live(tree: Tree) -> wire.LiveTree:
    views = tree.runs.runs.values()
    runs = [wire.LiveRun(v.number, v.spawned.parent, v.path, v.label, v.agent, v.state) for v in views]
    return wire.LiveTree(tree.id, runs)
