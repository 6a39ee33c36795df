"""Control of the trees of another process, through its control server.

Values that exist in only one process (profiles, approver functions, typed outputs) cannot be sent. The client refuses
them with a ConfigError before it sends anything. Each request uses a separate connection, and no connection stays
open. If the reply to a command is lost or late, the client sends the command once more with the same key.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from retinue.core.approvals import Answered, Approval, Decision, QuestionChange
from retinue.core.caller import Caller
from retinue.core.changes import ApplyPlan, ChangedLines, Changes, RunCopy
from retinue.core.control import (
    INTERRUPTED,
    NO_OVERRIDES,
    ONLY_IN_PROCESS,
    ClientHandle,
    ClientOptions,
    ResumeOverrides,
    RunHandle,
    SpawnBelow,
    TreeInfo,
)
from retinue.core.errors import ConfigError, ControlUnreachable, ReplyTimeout, RetinueError
from retinue.core.events import Delta, Event, RunEnded
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.ports import Receipt, RunSummary
from retinue.core.profiles import Profile, Task
from retinue.core.results import ChangedFile, Result
from retinue.http.client import ClientConnection, HttpResponse, IncompleteResponse, NoResponse, ResponseError
from retinue.http.listener import HOST
from retinue.protocol import control as protocol
from retinue.protocol.control import Address, Arguments, Command, StreamCommand, decode_item
from retinue.protocol.strict_json import encode_body

SILENT_SECONDS = 20.0
REPLY_BYTES = 256 * 1024 * 1024
ATTEMPTS = 2
KEPT_VALUES = {
    "profiles": "profiles made in Python; it uses its own",
    "limits": "limits for runs of its log; they keep those they have",
    "runtime": "a runtime for runs of its log; they live where they did",
}
REPLACING_LIMITS = "limits that replace its own; `narrow` sends limits that hold in addition"
R = TypeVar("R")
T = TypeVar("T")
MAY_TAKE_EFFECT = "{error}; the command was sent, and may still take effect when it goes on"


class ControlClient:
    """The commands of Control, sent to another process. `address` comes from `address_files`."""

    def __init__(self, address: Address) -> None:
        self.address, self.writer = address, address.writer
        self._channel = ControlChannel(address)

    # Starting runs

    async def prepare(self, profile: Profile | str | None = None, say: Callable[[str], object] | None = None) -> None:
        if say is not None:
            raise self._refuse("a function to call; it tells its own user which MCP servers it awaits")
        name = None if profile is None else self._name_of(profile)
        await self._channel.call(protocol.PREPARE, profile=name)

    async def spawn(
        self,
        profile: Profile | str,
        task: Task,
        *,
        limits: Limits | None = None,
        narrow: Limits | None = None,
        below: SpawnBelow | None = None,
        caller: Caller | None = None,
        starts_from: str = "",
    ) -> RunHandle:
        if limits is not None:
            raise self._refuse(REPLACING_LIMITS)
        if starts_from:
            raise self._refuse("a folder that becomes the workspace of a run")
        name = self._name_of(profile)
        ref = await self._channel.call(
            protocol.SPAWN, profile=name, task=task, narrow=narrow, below=below, caller=caller
        )
        return RunHandle(self, ref)

    async def open_client(self, options: ClientOptions) -> ClientHandle:
        if any(not isinstance(tool, str) for tool in options.tools or ()):
            raise self._refuse("tools made in Python; name its own")
        if options.limits != Limits():
            raise self._refuse(REPLACING_LIMITS)
        lines = self._channel.stream(
            protocol.OPEN_CLIENT,
            name=options.name,
            task=options.task,
            description=options.description,
            tools=options.tools,
            narrow=options.narrow,
            caller=options.caller,
        )
        ref = msgspec.json.decode(await anext(lines), type=RunRef)

        async def leave() -> None:
            await lines.aclose()
            await self.wait(ref.tree, ref.run)

        return ClientHandle(self, ref, leave=leave)

    def serve_caller(self, caller: Caller) -> AbstractContextManager[None]:
        raise ConfigError(ONLY_IN_PROCESS.format(what="serving a caller"))

    async def resume(self, tree: str, overrides: ResumeOverrides = NO_OVERRIDES) -> RunHandle:
        sent = self._select_overrides(overrides, protocol.RESUME)
        return RunHandle(self, await self._channel.call(protocol.RESUME, tree=tree, **sent))

    async def continue_run(
        self, tree: str, run: int, text: str, overrides: ResumeOverrides = NO_OVERRIDES
    ) -> RunHandle:
        sent = self._select_overrides(overrides, protocol.CONTINUE)
        return RunHandle(self, await self._channel.call(protocol.CONTINUE, tree=tree, run=run, text=text, **sent))

    def _name_of(self, profile: Profile | str) -> str:
        if isinstance(profile, Profile):
            raise self._refuse("a profile made in Python; name one of its own")
        return profile

    def _select_overrides(self, overrides: ResumeOverrides, command: Command[Any]) -> dict[str, Any]:
        """Return the given overrides as arguments of `command`. Raises ConfigError for the first override that its
        request has no field for."""
        fields = msgspec.structs.asdict(overrides).items()
        given = {name: value for name, value in fields if value not in ([], getattr(NO_OVERRIDES, name))}
        for name in given:
            if name not in command.request.__struct_fields__:
                raise self._refuse(KEPT_VALUES.get(name, f"the override `{name}`"))
        return given

    def _refuse(self, what: str) -> ConfigError:
        return ConfigError(f"process {self.address.pid} cannot be sent {what}")

    # Steering runs

    async def cancel(self, tree: str, run: int = 0) -> bool:
        return await self._channel.call(protocol.CANCEL, tree=tree, run=run)

    async def interrupt_turn(self, tree: str, run: int = 0) -> bool:
        return await self._channel.call(protocol.INTERRUPT, tree=tree, run=run)

    async def end_conversation(self, tree: str, run: int = 0) -> bool:
        return await self._channel.call(protocol.END_CONVERSATION, tree=tree, run=run)

    async def change_model(self, tree: str, run: int, model: str) -> str:
        return await self._channel.call(protocol.CHANGE_MODEL, tree=tree, run=run, model=model)

    async def kill(self, tree: str) -> None:
        await self._channel.call(protocol.KILL, tree=tree)

    async def send(self, tree: str, run: int, text: str, *, source: str = "user", message_id: str = "") -> Receipt:
        if source != "user" or message_id:
            raise ConfigError("over loopback only the user sends messages")
        return await self._channel.call(protocol.SEND, tree=tree, run=run, text=text)

    async def pending(self, tree: str | None = None) -> list[Approval]:
        return await self._channel.call(protocol.PENDING, tree=tree)

    async def watch_questions(self, tree: str | None = None) -> AsyncGenerator[QuestionChange]:
        """Watch the questions of the other process. Raises ControlUnreachable when the process is gone."""
        async with aclosing(self._channel.stream(protocol.WATCH_QUESTIONS, tree=tree)) as lines:
            async for line in lines:
                yield protocol.decode_question(line)

    async def answer(
        self, approval_id: str, decision: Decision, *, by: str, digest: str = "", surface: str = "", key: str = ""
    ) -> Answered:
        return await self._channel.call(
            protocol.ANSWER, approval_id=approval_id, decision=decision, by=by, digest=digest, surface=surface, key=key
        )

    @asynccontextmanager
    async def attend(self, tree: str | None = None) -> AsyncIterator[None]:
        async with aclosing(self._channel.stream(protocol.ATTEND, tree=tree)) as lines:
            await anext(lines)
            yield

    async def wait_until_idle(self, tree: str) -> None:
        raise ConfigError(ONLY_IN_PROCESS.format(what="waiting for an idle tree"))

    # Reading

    async def wait(self, tree: str, run: int = 0) -> Result[Any]:
        result = await self.result(tree, run)
        if result is not None:
            return result
        async with aclosing(self.watch(tree)) as events:
            async for event in events:
                if isinstance(event, Event) and event.run == run and isinstance(event.body, RunEnded):
                    break
        result = await self.result(tree, run)
        if result is None:
            raise ConfigError(INTERRUPTED.format(tree=tree, run=run))
        return result

    async def result(self, tree: str, run: int = 0) -> Result[Any] | None:
        return await self._channel.call(protocol.RESULT, tree=tree, run=run)

    async def describe_run(self, tree: str, run: int = 0) -> RunSummary:
        return await self._channel.call(protocol.DESCRIBE, tree=tree, run=run)

    async def list_trees(self, *, live: bool = False) -> list[TreeInfo]:
        return await self._channel.call(protocol.TREES, live=live)

    async def find_run(self, name: str) -> RunRef:
        return await self._channel.call(protocol.FIND, name=name)

    async def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        """Watch a tree. After a ControlUnreachable, call again with `after` set to the last event seen; no event is
        missed."""
        async with aclosing(self.watch_lines(tree, after=after, deltas=deltas)) as lines:
            async for line in lines:
                yield decode_item(line)

    def watch_lines(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[bytes, None]:
        """Watch a tree as raw lines: events exactly as stored, deltas as `{"delta": ...}`."""
        return self._channel.stream(protocol.WATCH, tree=tree, after=after, deltas=deltas)

    # Changes

    async def list_copies(self, tree: str, run: int | None = None) -> list[RunCopy]:
        return await self._channel.call(protocol.COPIES, tree=tree, run=run)

    async def changes(self, tree: str, run: int = 0) -> Changes:
        return await self._channel.call(protocol.CHANGES, tree=tree, run=run)

    async def diff(self, tree: str, run: int = 0, *, stat_columns: int | None = None) -> str:
        return await self._channel.call(protocol.DIFF, tree=tree, run=run, stat_columns=stat_columns)

    async def count_changed_lines(self, tree: str, run: int = 0) -> list[ChangedLines]:
        return await self._channel.call(protocol.CHANGED_LINES, tree=tree, run=run)

    async def plan_apply(self, tree: str, runs: Sequence[int]) -> ApplyPlan:
        return await self._channel.call(protocol.PLAN_APPLY, tree=tree, runs=list(runs))

    async def apply_planned(self, tree: str, runs: Sequence[int], *, digest: str) -> None:
        await self._channel.call(protocol.APPLY_PLANNED, tree=tree, runs=list(runs), digest=digest)

    async def undo_interrupted_apply(self) -> bool:
        return await self._channel.call(protocol.UNDO_APPLY)

    async def apply(self, tree: str, run: int = 0) -> Sequence[ChangedFile]:
        return await self._channel.call(protocol.APPLY, tree=tree, run=run)

    async def close(self) -> None:
        """Do nothing: every command has a separate connection, and the runs belong to the other process."""


class ReplyLost(ControlUnreachable):
    """Raised when the connection broke off before the reply. The request may have taken effect."""


class ControlChannel:
    """The transport to the control server at `address`."""

    def __init__(self, address: Address) -> None:
        self.address = address

    async def call(self, command: Command[R], **arguments: Any) -> R:
        """Send a command and return its reply. Raises the RetinueError that the server replies with."""
        request, key = command.request(**arguments), secrets.token_hex(16) if command.repeated else ""
        for _ in range(ATTEMPTS - 1 if command.repeated else 0):
            try:
                return await self._call_once(command, request, key)
            except (ReplyLost, ReplyTimeout):
                continue
        try:
            return await self._call_once(command, request, key)
        except ReplyTimeout as error:
            if command.reads:
                raise
            raise ReplyTimeout(MAY_TAKE_EFFECT.format(error=error)) from None

    async def stream(self, command: StreamCommand, **arguments: Any) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a stream. Raises ControlUnreachable if the stream breaks off."""
        async with self._request(command, command.request(**arguments)) as (connection, response):
            if response.status != 200:
                raise _read_error(response.status, await self._read(connection.read_body(REPLY_BYTES)))
            rest = b""
            while chunk := await self._read(connection.read_chunk(), SILENT_SECONDS):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield line

    async def _call_once(self, command: Command[R], request: Arguments, key: str) -> R:
        async with self._request(command, request, key) as (connection, response):
            body = await self._read(connection.read_body(REPLY_BYTES))
        if response.status != 200:
            raise _read_error(response.status, body)
        try:
            return msgspec.json.decode(body, type=command.reply)
        except msgspec.MsgspecError:
            raise ReplyLost(f"process {self.address.pid} broke off its reply") from None

    @asynccontextmanager
    async def _request(
        self, command: Command[Any] | StreamCommand, request: Arguments, key: str = ""
    ) -> AsyncIterator[tuple[ClientConnection, HttpResponse]]:
        """Send a request on a new connection, and wait for the head of the response."""
        headers = {
            "Host": f"{HOST}:{self.address.port}",
            "Authorization": f"Bearer {self.address.token}",
            "Content-Type": "application/json",
            "Connection": "close",
        }
        if key and not command.reads:
            headers[protocol.KEY_HEADER] = key
        connection = await self._connect()
        try:
            if command.reads:
                query = urlencode(protocol.encode_query(request))
                connection.send_request("GET", f"{command.path}?{query}" if query else command.path, headers)
            else:
                connection.send_request("POST", command.path, headers, encode_body(request))
            seconds = command.seconds if isinstance(command, Command) else protocol.REPLY_SECONDS
            yield connection, await self._read(connection.read_response(), seconds)
        finally:
            connection.close()

    async def _connect(self) -> ClientConnection:
        try:
            async with asyncio.timeout(protocol.REPLY_SECONDS):
                return ClientConnection(*await asyncio.open_connection(HOST, self.address.port))
        except (OSError, TimeoutError):
            raise ControlUnreachable(f"process {self.address.pid} accepts no control connection") from None

    async def _read(self, reading: Awaitable[T], seconds: float = protocol.REPLY_SECONDS) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await reading
        except TimeoutError:
            raise ReplyTimeout(f"process {self.address.pid} does not answer") from None
        except (OSError, NoResponse, IncompleteResponse):
            raise ReplyLost(f"process {self.address.pid} is gone") from None
        except ResponseError:
            raise ControlUnreachable(f"what answers for process {self.address.pid} is not a control server") from None


def _read_error(status: int, body: bytes) -> RetinueError:
    try:
        return protocol.from_error_reply(msgspec.json.decode(body, type=protocol.ErrorReply))
    except msgspec.MsgspecError:
        return RetinueError(f"the control server answered with status {status}")
