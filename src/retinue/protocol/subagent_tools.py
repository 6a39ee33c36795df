"""The tools for a caller's existing subagents: their names, arguments, replies and texts.

The models inside a tree and MCP clients share this implementation. `SubagentTools` reads the arguments of a call,
finds the run and makes the structured reply. A `SubagentScope` decides which runs its caller may reach, and carries
out the commands. This module knows neither the supervisor nor a surface.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from retinue.core.errors import ToolError
from retinue.core.messages import Call, RunRef
from retinue.core.ports import STATUS_FILE, Receipt, RunSummary, SpawnedRun
from retinue.protocol.subagents import OPERATION, describe_status, is_float, make_blocking_reply

Reply = dict[str, Any]
Schema = dict[str, Any]

SPAWN, LIST, CONTINUE, SEND = OPERATION, "list_subagents", "continue_subagent", "send_message_to_subagent"
PREFIX = "custom_tool__"
STATUS = f"{PREFIX}get_background_tool_status"
RESULT = f"{PREFIX}get_background_tool_result"
WAIT = f"{PREFIX}wait_for_background_tool"
CANCEL = f"{PREFIX}cancel_background_tool"
BACKGROUND = f"{PREFIX}list_background_tools"
OTHER_PREFIX = "mcp_"
ID_FIELDS = ("subagent_id", "job_id", "agent_id", "agent")
INTERRUPTED = "interrupted"
STILL_RUNNING = f"Still running; nothing is lost. {WAIT} waits for the answers, {CANCEL} stops it."
NONE_RUNNING = "No subagent is running."
UNKNOWN_ARGUMENT = "{tool}: unknown argument '{name}'. Known arguments: {known}"
TASK_CHARACTERS = 100
MESSAGE_CHARACTERS = 500
MAX_LISTED = 100
STILL_ENDING = f"It has been told to stop and has not ended yet; {WAIT} waits for it."
STOP_SECONDS = 20.0
READ_SECONDS = 5.0
MAX_READ_SECONDS = 600.0
_MOST_DIGITS = 9

_ID: Schema = {"type": "string", "description": "The subagent_id (or agent:N, or TREE/N) that a reply named"}


@dataclass(frozen=True)
class ToolText:
    """The texts of a tool for its callers. `reads` says that a call changes nothing."""

    name: str
    title: str
    description: str
    schema: Schema
    reads: bool = True


def _make_schema(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


TOOLS: Mapping[str, ToolText] = {
    tool.name: tool
    for tool in (
        ToolText(
            LIST,
            "List subagents",
            "List your subagents, those that have ended too: id, status, task, workspace, and whether each can be "
            "continued.",
            _make_schema(
                offset={"type": "integer", "description": "How many to pass over: the next_offset of an earlier reply"}
            ),
        ),
        ToolText(
            CONTINUE,
            "Continue a subagent",
            "Send a finished or interrupted subagent a new message. It continues with all it knew, also if it "
            "timed out or was cancelled, and its new answer is returned.",
            _make_schema(
                "subagent_id",
                "message",
                subagent_id=_ID,
                message={"type": "string", "description": "What it is to do now"},
                timeout_seconds={"type": "number", "description": "How many seconds it may take from now on"},
            ),
            reads=False,
        ),
        ToolText(
            SEND,
            "Send a message to a subagent",
            "Tell a running subagent something; it reads it at its next turn. The receipt says whether it was "
            "delivered, is queued, or came too late.",
            _make_schema(
                "subagent_id",
                "message",
                subagent_id=_ID,
                message={"type": "string", "description": "What to tell it"},
                timeout_seconds={
                    "type": "number",
                    "description": f"How many seconds to wait until it was read (default {READ_SECONDS:g})",
                },
            ),
            reads=False,
        ),
        ToolText(
            STATUS,
            "Status of a background subagent",
            "Where a subagent in the background stands: its state, how long it has taken, what it waits for.",
            _make_schema("subagent_id", subagent_id=_ID),
        ),
        ToolText(
            RESULT,
            "Result of a background subagent",
            "The answer of a subagent that has ended. Reading it does not use it up.",
            _make_schema("subagent_id", subagent_id=_ID),
        ),
        ToolText(
            WAIT,
            "Wait for background subagents",
            "Wait until a subagent has ended, or without subagent_id until the next one has. When the time is up, it "
            "says what still runs: then call it again.",
            _make_schema(
                subagent_id=_ID,
                timeout_seconds={"type": "number", "description": "How many seconds to wait at most"},
            ),
        ),
        ToolText(
            CANCEL,
            "Cancel a background subagent",
            "Stop a subagent and everything below it. What it has done so far is kept.",
            _make_schema("subagent_id", subagent_id=_ID),
            reads=False,
        ),
        ToolText(
            BACKGROUND,
            "List background subagents",
            "List the subagents you started that still run; with include_all=true also those that have ended.",
            _make_schema(include_all={"type": "boolean", "description": "Also those that have ended"}),
        ),
    )
}


def list_spellings(name: str) -> tuple[str, ...]:
    """Return the tool names that `name` can mean, itself first: with and without either prefix."""
    plain = name.removeprefix(OTHER_PREFIX)
    return tuple(dict.fromkeys((name, plain, f"{PREFIX}{plain}", plain.removeprefix(PREFIX))))


def check_arguments(tool: str, args: Mapping[str, Any], known: Sequence[str], *, also: Sequence[str] = ()) -> None:
    """Raise ToolError for an argument that the tool does not have. `also` are other spellings of `known` arguments."""
    for name in args:
        if name not in known and name not in also:
            text = ", ".join(known) or "none"
            raise ToolError(UNKNOWN_ARGUMENT.format(tool=tool, name=name[:TASK_CHARACTERS], known=text))


@dataclass(frozen=True)
class KnownRun:
    """One subagent.

    `is_here` is True if the process of the scope made or resumed the run, `is_live` if any process is running it,
    `own_tree` if the run is in the caller's tree, where `agent:N` is its name."""

    tree: str
    row: RunSummary
    is_live: bool
    is_here: bool = False
    own_tree: bool = False

    @property
    def name(self) -> str:
        return f"{self.tree}/{self.row.run}"

    @property
    def has_ended(self) -> bool:
        return self.row.result is not None

    def to_spawned_run(self, folder: str) -> SpawnedRun:
        """Return this run as the spawn tools see runs. `folder` is the run's folder, or '' if it has no status file."""
        row = self.row
        ref = RunRef(
            tree=self.tree,
            run=row.run,
            path=row.path,
            label=row.label,
            agent=row.agent,
            subagent_id=row.subagent_id,
        )
        return SpawnedRun(
            run=row.run,
            ref=ref,
            workspace=row.workspace,
            timeout_seconds=row.timeout_seconds,
            status_file=f"{folder}/{STATUS_FILE}" if folder else "",
        )

    @property
    def status(self) -> str:
        if self.row.result is not None:
            return describe_status(self.row.result)
        return "running" if self.is_live else INTERRUPTED


def find_known(runs: Sequence[KnownRun], tree: str, name: str) -> KnownRun | None:
    """Return the newest run of a tree whose id, label, path or number is `name`, or None."""
    number = name.removeprefix("agent:").removeprefix(f"{tree}/")
    if number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS:
        return next((run for run in runs if run.row.run == int(number)), None)
    for run in reversed(runs):
        if name in (run.row.subagent_id, run.row.label, run.row.path):
            return run
    return None


def take_page(own: Sequence[KnownRun], others: Sequence[KnownRun], offset: int) -> tuple[list[KnownRun], int]:
    """Return one page of a list, and how many runs come after the page.

    The newest of the caller's `own` runs come first, in the order they were made, then older ones, then `others`."""
    end, begin = max(0, len(own) - offset), max(0, offset - len(own))
    kept = own[max(0, end - MAX_LISTED) : end]
    page = [*kept, *others[begin : begin + MAX_LISTED - len(kept)]]
    return page, max(0, len(own) + len(others) - offset - len(page))


class SubagentScope(Protocol):
    """The subagents that a caller may reach, and the commands to them. Raises ToolError with a text for the caller."""

    async def find(self, name: str) -> KnownRun: ...

    async def find_made(self, call: Call) -> KnownRun | None:
        """Return the run that this same call made before its process died, or None."""

    async def list_all(self, offset: int) -> tuple[list[KnownRun], int]:
        """Return a page of the runs that the caller can name, its own first, and how many runs come after the page."""

    async def list_direct(self) -> list[KnownRun]:
        """Return the runs started by the caller itself, in the order of their starts."""

    async def look_again(self, known: KnownRun) -> KnownRun: ...

    async def wait_for_first(self, running: Sequence[KnownRun], seconds: float | None) -> None:
        """Wait until one of the `running` runs has ended, at most `seconds`."""

    async def cancel(self, known: KnownRun) -> bool: ...

    async def send(self, known: KnownRun, text: str, *, seconds: float) -> Receipt:
        """Send a message, and wait at most `seconds` until the run has read it."""

    async def continue_run(
        self, call: Call, known: KnownRun, message: str, seconds: float | None
    ) -> tuple[KnownRun, Reply]:
        """Start a run from the conversation of the ended run `known`, or take the run that this call made before.

        Return the run and its entry when it has ended."""

    async def make_entries(self, ended: Sequence[KnownRun]) -> list[Reply]:
        """Make the result entries of `ended` runs, with as much of each answer as fits inline."""

    def describe_more(self, known: KnownRun) -> Reply:
        """Return the fields of a list entry that only this kind of caller needs."""

    async def describe_activity(self, known: KnownRun) -> Reply:
        """Return the fields of a status that only this kind of caller needs."""


class SubagentTools:
    """The tools of one caller. A call returns a structured reply or raises ToolError."""

    def __init__(self, scope: SubagentScope) -> None:
        self._scope = scope
        self._handlers: Mapping[str, Callable[[Call], Coroutine[Any, Any, Reply]]] = {
            LIST: self.list_subagents,
            CONTINUE: self.continue_subagent,
            SEND: self.send_message,
            STATUS: self.get_status,
            RESULT: self.get_result,
            WAIT: self.wait,
            CANCEL: self.cancel,
            BACKGROUND: self.list_background,
        }

    async def answer(self, tool: str, call: Call) -> Reply:
        """Answer a call of one of `TOOLS`."""
        known = tuple(TOOLS[tool].schema["properties"])
        check_arguments(tool.removeprefix(PREFIX), call.args, known, also=ID_FIELDS if "subagent_id" in known else ())
        return await self._handlers[tool](call)

    async def list_subagents(self, call: Call) -> Reply:
        offset = call.args.get("offset") or 0
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise ToolError("'offset' must be a whole number that is not negative")
        found, left_out = await self._scope.list_all(offset)
        reply: Reply = {"success": True, "subagents": [self._describe(known) for known in found], "left_out": left_out}
        return {**reply, "next_offset": offset + len(found)} if left_out else reply

    async def continue_subagent(self, call: Call) -> Reply:
        message, seconds = _read_message(call.args), _read_seconds(call.args)
        known = await self._scope.find_made(call)
        if known is None:
            known = await self._find(call.args)
            if not known.has_ended and known.is_live:
                raise ToolError(f"'{known.row.subagent_id}' is still running: wait for it, or cancel it first")
        continued, entry = await self._scope.continue_run(call, known, message, seconds)
        reply = make_blocking_reply([entry])
        return {**reply, "operation": CONTINUE, "timeout_seconds": continued.row.timeout_seconds}

    async def send_message(self, call: Call) -> Reply:
        """Send a message to a running subagent; the reply is the receipt that `retinue send` gives."""
        known, message = await self._find(call.args), _read_message(call.args)
        seconds = _read_seconds(call.args)
        wait = READ_SECONDS if seconds is None else min(seconds, MAX_READ_SECONDS)
        receipt = await self._scope.send(known, message, seconds=wait)
        about = {"subagent_id": known.row.subagent_id, "session_id": known.name, "state": receipt.state}
        success = receipt.state in ("delivered", "queued")
        says = {"note" if success else "error": receipt.describe()}
        return {"success": success, **about, "turn": receipt.turn, **says}

    async def get_status(self, call: Call) -> Reply:
        return {"success": True, "subagent": await self._describe_status(await self._find(call.args))}

    async def get_result(self, call: Call) -> Reply:
        known = await self._find(call.args)
        about = {"subagent_id": known.row.subagent_id, "status": known.status}
        if not known.has_ended:
            text = f"'{about['subagent_id']}' has not ended: it is {known.status} ({known.row.state})"
            return {"success": False, **about, "error": text}
        [entry] = await self._scope.make_entries([known])
        return {"success": True, **about, "result": entry}

    async def wait(self, call: Call) -> Reply:
        """Wait until the named run, or without a name the next run, has ended. A timeout is not an error."""
        seconds = _read_seconds(call.args)
        if any(call.args.get(key) is not None for key in ID_FIELDS):
            wanted = [await self._find(call.args)]
        else:
            wanted = [known for known in await self._scope.list_direct() if not known.has_ended]
        running = [known for known in wanted if not known.has_ended]
        if running:
            await self._scope.wait_for_first(running, seconds)
            wanted = [await self._scope.look_again(known) for known in wanted]
        ended = [known for known in wanted if known.has_ended]
        reply = await self.describe_wait(await self._scope.make_entries(ended))
        if running and not ended:
            reply |= {"timed_out": True, "note": STILL_RUNNING}
        elif not wanted:
            reply["note"] = NONE_RUNNING
        return reply

    async def describe_wait(self, results: list[Reply]) -> Reply:
        """Make the reply to a wait: the results, and the runs that are still running."""
        running = [known for known in await self._scope.list_direct() if not known.has_ended]
        entries, left_out = await self._describe_newest(running)
        return {"success": True, "results": results, "running": entries, "timed_out": False, **left_out}

    async def cancel(self, call: Call) -> Reply:
        """Cancel a run and wait for its end. Its id can be reused at once."""
        known = await self._find(call.args)
        cancelled = await self._scope.cancel(known)
        if cancelled:
            await self._scope.wait_for_first([known], STOP_SECONDS)
            known = await self._scope.look_again(known)
        about = {"subagent_id": known.row.subagent_id, "status": known.status}
        reply: Reply = {"success": True, **about, "cancelled": cancelled}
        return reply if known.has_ended else {**reply, "note": STILL_ENDING}

    async def list_background(self, call: Call) -> Reply:
        direct = await self._scope.list_direct()
        wanted = direct if call.args.get("include_all") is True else [each for each in direct if not each.has_ended]
        entries, left_out = await self._describe_newest(wanted)
        return {"success": True, "subagents": entries, **left_out}

    async def _describe_newest(self, runs: Sequence[KnownRun]) -> tuple[list[Reply], Reply]:
        """Describe the newest runs, as many as fit on a page. Also return the field that counts the others."""
        page, left_out = take_page(runs, (), 0)
        return [await self._describe_status(known) for known in page], {"left_out": left_out} if left_out else {}

    async def _find(self, args: Mapping[str, Any]) -> KnownRun:
        given = next((args[key] for key in ID_FIELDS if args.get(key) is not None), None)
        name = f"agent:{given}" if isinstance(given, int) and not isinstance(given, bool) else given
        if not isinstance(name, str) or not name.strip():
            raise ToolError("Missing required 'subagent_id' field")
        return await self._scope.find(name)

    def _describe(self, known: KnownRun) -> Reply:
        """Make the list entry of a run."""
        row = known.row
        fields: Reply = {
            "subagent_id": row.subagent_id,
            "status": known.status,
            "task": row.task[:TASK_CHARACTERS],
            "workspace": row.workspace,
            "session_id": known.name,
            "continuable": known.has_ended or not known.is_live,
            "subagent_type": row.agent,
        }
        if known.own_tree:
            fields["agent"] = f"agent:{row.run}"
        if known.status == "running":
            fields |= _describe_times(row)
        if row.result is not None and row.result.changed_count:
            fields["changed_count"] = row.result.changed_count
        return fields | self._scope.describe_more(known)

    async def _describe_status(self, known: KnownRun) -> Reply:
        """Describe everything known about a run, running or ended."""
        row = known.row
        fields = self._describe(known)
        fields |= {"state": row.state, "turns": row.turns, "tool_count": row.tool_count}
        fields |= {"timeout_seconds": row.timeout_seconds, "doing": row.last_message[:MESSAGE_CHARACTERS]}
        return fields | await self._scope.describe_activity(known)


def _describe_times(row: RunSummary) -> Reply:
    elapsed = 0.0 if row.started_at is None else max(0.0, time.time() - row.started_at)
    timeout = row.timeout_seconds
    left = None if timeout is None else round(max(0.0, timeout - elapsed), 1)
    return {"elapsed_seconds": round(elapsed, 1), "timeout_seconds": timeout, "seconds_remaining": left}


def _read_message(args: Mapping[str, Any]) -> str:
    message = args.get("message")
    if not isinstance(message, str) or not message.strip():
        raise ToolError("Missing required 'message' field")
    return message


def _read_seconds(args: Mapping[str, Any]) -> float | None:
    value = args.get("timeout_seconds")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"Invalid 'timeout_seconds' type: expected number, got {type(value).__name__}")
    if not is_float(value) or value < 0:
        raise ToolError(f"Invalid 'timeout_seconds': must be 0 or more, got {str(value)[:50]}")
    return float(value)
