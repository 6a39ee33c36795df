"""The tools as one client calls them. Each tool takes arguments and returns the structured reply.

The client is run 0 of a tree, created with its first subagent. Clients get the same tools as models
(`protocol.subagent_tools`). This module adds the set of runs that a client can name, and the fields that an outside
program needs: the effective timeout, and the commands that watch a run and apply its changes.

`retinue mcp serve --profile` has a single tool instead, the profile itself. Its arguments are `prompt`, `inputs`, and
the `runId` that the parent made. Each call is the primary of a new tree, placed below the caller's run. The `runId`
becomes the subagent's id, and all reports of the run carry it. A call without a `runId` is refused, because its events
would belong to no run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import UNSET, structs

from retinue.concurrency import TaskOwner
from retinue.core.approvals import Approval
from retinue.core.control import ClientHandle, ClientOptions, RunHandle
from retinue.core.errors import LogError, NotFound, ToolError
from retinue.core.limits import Limits
from retinue.core.messages import Call, RunRef
from retinue.core.ports import Outcome, Receipt, SpawnedRun
from retinue.core.profiles import Profile, Task
from retinue.core.results import Result
from retinue.log.blocks import format_count
from retinue.protocol import subagents
from retinue.protocol.inherited_limits import make_run_id
from retinue.protocol.subagent_tools import (
    CONTINUE,
    PREFIX,
    SPAWN,
    STILL_RUNNING,
    WAIT,
    KnownRun,
    Reply,
    SubagentTools,
    check_arguments,
    take_page,
)
from retinue.protocol.subagents import GRANT_HINT, describe_profile
from retinue.surfaces.mcp.backend import LINE_CHARACTERS, Backend, ChangeSignal, TreeProgress
from retinue.surfaces.mcp.texts import make_error_result
from retinue.surfaces.printer import safe

CLIENT_LEFT = "the client has left"
MAX_ID = 200
LABEL_CHARACTERS = 30
_CLIENT_DESCRIPTION = "An MCP client: run 0 of the tree of what it delegates"
_CLIENT_LIMITS = Limits(seconds=None, stall=None)  # a client has no timeout
PROFILE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "prompt": {"type": "string", "description": "The task to delegate, complete in itself"},
        "inputs": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Files or folders of the project that it needs; it can read them",
        },
        "runId": {"type": "string", "description": "An id of this call, made by the caller; another one for each call"},
    },
    "required": ["prompt", "runId"],
}


class ToolHandlers:
    """The tool calls of one client, and the scope of its subagents: its own runs and the runs in the project's logs.
    `about` describes the client."""

    def __init__(self, backend: Backend, about: str) -> None:
        self._backend, self._about = backend, about
        self._client: ClientHandle | None = None
        self._opening = asyncio.Lock()
        self.progress: dict[str, TreeProgress] = {}  # by tree in which the client has runs
        self._callers: dict[str, str] = {}  # by call: the client's tree that made it
        self._primaries: dict[str, RunHandle] = {}  # by call: runs outside the client's own tree
        self._ended: dict[RunRef, KnownRun] = {}  # primaries that are known to have ended
        self._count = 0
        self._has_left = False
        self.changes = ChangeSignal()
        self._tools = SubagentTools(self)

    @property
    def tree(self) -> str | None:
        return None if self._client is None else self._client.tree

    def has_running_subagents(self) -> bool:
        return any(progress.lines.count_runs()[0] for progress in self.progress.values())

    def make_call_id(self) -> str:
        self._count += 1
        return f"call_{self._count}"

    async def list_pending(self) -> list[Approval]:
        """Return the open questions of the client's runs."""
        return [asked for asked in await self._backend.control.pending() if asked.tree in self.progress]

    async def list_run_ids(self, asked: Approval) -> list[str]:
        """Return the ids under which the asking run may be reported to the client's process."""
        row = await self._backend.control.describe_run(asked.tree, asked.run)
        return [make_run_id(asked.tree, asked.run), row.subagent_id]

    async def describe_progress(self) -> str:
        """Return the state of the client's runs as one line for a waiting user."""
        pending = await self.list_pending()
        if pending:
            more = "" if len(pending) == 1 else f" (and {len(pending) - 1} more)"
            first = self._backend.describe_question(pending[0])
            return f"waits for your answer: {first['question']}{more}: {first['answer']}"
        if not self.progress:
            return ""
        every = [progress.lines for progress in self.progress.values()]
        counts = [lines.count_runs() for lines in every]
        running, ended = (sum(numbers) for numbers in zip(*counts, strict=True))
        latest = next((lines.latest for lines in reversed(every) if lines.latest), "")
        line = f"{format_count(running, 'subagent')} running, {ended} ended"
        return f"{line} \u00b7 {_shorten_line(latest)}" if latest else line

    # The client's own runs

    async def get_client(self) -> ClientHandle:
        """Return the client's own run, run 0 of its tree. Open a new tree if that run was cancelled from outside.

        Trees begin only here and in `start_primary`. Both attach the caller's remaining limits and the address for
        reports."""
        async with self._opening:
            if self._has_left:
                raise ToolError(CLIENT_LEFT)
            if self._client is None or not await self._client.is_at_work():
                self._client = await self._backend.control.open_client(
                    ClientOptions(
                        name="mcp-client", task=self._about, description=_CLIENT_DESCRIPTION, limits=_CLIENT_LIMITS
                    )
                )
                self._follow(self._client.tree)
            return self._client

    async def start_primary(self, call_id: str, profile: Profile, task: Task) -> RunHandle:
        """Start the run of a profile call: the primary of a new tree."""
        if self._has_left:
            raise ToolError(CLIENT_LEFT)
        return await self._add_primary(call_id, await self._backend.control.spawn(profile, task))

    def forget_primary(self, call_id: str) -> None:
        """Forget the run of a call that has ended and was answered."""
        run = self._primaries.pop(call_id, None)
        if run is not None:
            self._ended.pop(run.ref, None)

    async def _add_primary(self, call_id: str, run: RunHandle) -> RunHandle:
        if self._has_left:  # the client left while the run was created
            await run.cancel()
            raise ToolError(CLIENT_LEFT)
        self._primaries[call_id] = run
        self._follow(run.tree)
        return run

    def _follow(self, tree: str) -> None:
        if tree not in self.progress:
            on_end = partial(self.progress.pop, tree, None)
            self.progress[tree] = TreeProgress(self._backend.control, tree, self.changes, on_end)
            self.changes.notify()

    async def leave(self) -> None:
        """End all runs that the client has started."""
        self._has_left = True
        for run in list(self._primaries.values()):
            await run.cancel()
        async with self._opening:  # wait for a client that is being opened
            if self._client is not None:
                await self._client.close()
        for run in list(self._primaries.values()):
            await run.result()
        for progress in list(self.progress.values()):
            await progress.close()

    async def _describe_primary(self, run: RunHandle) -> KnownRun:
        known = self._ended.get(run.ref)
        if known is None:
            row = await self._backend.control.describe_run(run.tree, run.number)
            known = KnownRun(run.tree, row, is_live=True, is_here=True, own_tree=run.tree == self.tree)
            if known.has_ended:
                self._ended[run.ref] = known
        return known

    async def _list_own(self) -> list[KnownRun]:
        below = [] if self._client is None else await self._backend.list_below(self._client.tree)
        names = {known.name for known in below}
        primaries = [await self._describe_primary(run) for run in list(self._primaries.values())]
        return below + [known for known in primaries if known.name not in names]

    async def _list_made(self, call_id: str) -> list[KnownRun]:
        if call_id in self._primaries:
            return [await self._describe_primary(self._primaries[call_id])]
        caller = self._callers.get(call_id)
        below = [] if caller is None else await self._backend.list_below(caller)
        return [known for known in below if known.row.parent == 0 and known.row.call_id == call_id]

    async def _make_call(self, call: Call, work: Callable[[], Awaitable[Outcome]] | None = None) -> Outcome:
        """Make a call of the client, under the rules of the spawn tool. If the call is cancelled, cancel the runs it
        made."""
        client = await self.get_client()
        self._callers[call.id] = client.tree
        try:
            return await client.call_tool(call, rules_of=SPAWN, work=work)
        except asyncio.CancelledError:
            for made in await self._list_made(call.id):
                await self._backend.control.cancel(made.tree, made.row.run)
            raise

    async def answer(self, tool: str, call_id: str, args: dict[str, Any]) -> Reply:
        """Answer a call to a tool of the catalog."""
        if tool in (SPAWN, CONTINUE):
            await self._backend.control.prepare()
        if tool == SPAWN:
            reply = await self._spawn(call_id, args)
        else:
            reply = await self._tools.answer(tool, Call(call_id, tool, args))
        return {"success": reply["success"], "operation": tool.removeprefix(PREFIX), **reply}

    async def answer_early(self, tool: str, call_id: str) -> Reply:
        """Answer a call whose client will not wait. The reply lists the runs that the call made or waits for, and how
        to wait for them."""
        if tool == WAIT:
            reply = await self._tools.describe_wait([]) | {"timed_out": True}
        else:
            reply = await self.describe_made(call_id)
        return {**reply, "operation": tool.removeprefix(PREFIX), "note": STILL_RUNNING}

    # Spawning

    async def _spawn(self, call_id: str, args: dict[str, Any]) -> Reply:
        """Call the models' spawn tool as the client's own run."""
        check_arguments(SPAWN, args, tuple(subagents.SPAWN_SCHEMA["properties"]))
        outcome = await self._make_call(Call(call_id, SPAWN, args))
        reply: Reply = outcome.data
        if "error" in reply:
            return reply
        # a tree that was cancelled meanwhile has no runs to describe
        for entry, made in zip(
            reply.get("results") or reply["subagents"], await self._list_made(call_id), strict=False
        ):
            entry.update(self._describe_result(made, entry))
        if "note" in reply:
            reply["note"] = STILL_RUNNING
        return {**reply, "watch": self._backend.make_command(f"tail -f {self._callers[call_id]}")}

    async def describe_made(self, call_id: str) -> Reply:
        """Return the reply about the runs that a call has made so far, in the form for background runs."""
        made = await self._list_made(call_id)
        reply = subagents.make_background_reply([self._backend.make_spawned_run(known) for known in made])
        for entry, known in zip(reply["subagents"], made, strict=True):
            entry["status"] = known.status
            entry.update(self._describe_result(known, entry))
        return reply

    def _describe_result(self, known: KnownRun, entry: Reply) -> Reply:
        """Return the fields that an outside program needs in addition to those of the spawn tool."""
        more = {
            "session_id": known.name,
            "timeout_seconds": known.row.timeout_seconds,
            "watch": self._backend.make_command(f"tail -f {known.name}"),
        }
        if known.tree == self.tree:
            more["agent"] = f"agent:{known.row.run}"
        if "changed_files" in entry:
            more["apply"] = self._backend.make_command(f"apply {known.name}")
        return more

    # The scope of the client's subagents

    async def find(self, name: str) -> KnownRun:
        try:
            described = [await self._describe_primary(run) for run in list(self._primaries.values())]
            primaries = {known.row.subagent_id: known for known in described}
            return await self._backend.find_run(name, self.tree, primaries)
        except (NotFound, LogError) as error:
            raise ToolError(str(error)) from None

    async def find_made(self, call: Call) -> KnownRun | None:
        return None  # a client's calls do not outlive this process

    async def list_all(self, offset: int) -> tuple[list[KnownRun], int]:
        own = {known.name: known for known in await self._list_own()}
        return take_page([*own.values()], await self._backend.list_earlier_runs(set(own)), offset)

    async def list_direct(self) -> list[KnownRun]:
        primaries = {(run.tree, run.number) for run in self._primaries.values()}
        return [
            known
            for known in await self._list_own()
            if known.row.parent == 0 or (known.tree, known.row.run) in primaries
        ]

    async def look_again(self, known: KnownRun) -> KnownRun:
        row = await self._backend.control.describe_run(known.tree, known.row.run)
        return replace(known, row=row)

    async def wait_for_first(self, running: Sequence[KnownRun], seconds: float | None) -> None:
        for known in running:
            if not known.is_here:
                raise ToolError(f"{known.name} is not run by this server, which cannot wait for it")
        async with TaskOwner(on_error=lambda _: None) as tasks:  # the caller looks at each run again for its state
            waiting = [tasks.start(self._backend.control.wait(known.tree, known.row.run)) for known in running]
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    async def cancel(self, known: KnownRun) -> bool:
        self._check_here(known, "cancel {name}")
        return await self._backend.control.cancel(known.tree, known.row.run)

    async def send(self, known: KnownRun, text: str, *, seconds: float) -> Receipt:
        self._check_here(known, "send {name} TEXT")
        return await self._backend.send(known, text, seconds=seconds)

    def _check_here(self, known: KnownRun, command: str) -> None:
        if not known.has_ended and not known.is_here:
            text = self._backend.make_command(command.format(name=known.name))
            raise ToolError(f"{known.name} is not run by this server: {text}")

    async def continue_run(
        self, call: Call, known: KnownRun, message: str, seconds: float | None
    ) -> tuple[KnownRun, Reply]:
        async def run() -> Outcome:
            started = await self._backend.continue_run(known, message, seconds=seconds)
            await self._add_primary(call.id, started)
            result = await started.result()
            child = self._backend.make_spawned_run(await self._describe_primary(started))
            return await (await self.get_client()).make_reply(SPAWN, [(result, child)])

        outcome = await self._make_call(call, run)
        [entry] = outcome.data["results"]
        continued = await self._describe_primary(self._primaries[call.id])
        return continued, entry | self._describe_result(continued, entry)

    async def make_entries(self, ended: Sequence[KnownRun]) -> list[Reply]:
        results: list[tuple[Any, SpawnedRun]] = [
            (known.row.result, self._backend.make_spawned_run(known)) for known in ended
        ]
        if not results:
            return []
        client = await self.get_client()
        entries: list[Reply] = (await client.make_reply(SPAWN, results)).data["results"]
        for entry, known, (result, _) in zip(entries, ended, results, strict=True):
            entry.update(self._describe_result(known, entry))
            if result.structured is not None:
                entry["structured"] = result.structured
        return entries

    def describe_more(self, known: KnownRun) -> Reply:
        more = {"watch": self._backend.make_command(f"tail -f {known.name}")}
        if known.row.result is not None and known.row.result.changed_count:
            more["apply"] = self._backend.make_command(f"apply {known.name}")
        return more

    async def describe_activity(self, known: KnownRun) -> Reply:
        fields: Reply = {"status_file": self._backend.make_spawned_run(known).status_file}
        progress = self.progress.get(known.tree)
        if progress is None:
            return fields
        if known.row.run in progress.lines.by_run:
            fields["doing"] = _shorten_line(progress.lines.by_run[known.row.run])
        questions = [
            self._backend.describe_question(asked)
            for asked in await self.list_pending()
            if (asked.tree, asked.run) == (known.tree, known.row.run)
        ]
        return fields | ({"questions": questions} if questions else {})


def _shorten_line(line: str) -> str:
    return safe.escape_line(line)[:LINE_CHARACTERS]


def describe_profile_tool(profile: Profile) -> dict[str, Any]:
    """Return the profile as a tool for `tools/list`."""
    said = describe_profile(profile)
    about = f" {said}" if said else ""
    gives = {} if profile.output is None else {"outputSchema": profile.output}
    return {
        "name": profile.name,
        "title": f"Subagent: {profile.name}",
        "description": f"Delegate a task to the subagent '{profile.name}', which works on it on its own and returns "
        f"its answer.{about}",
        "inputSchema": PROFILE_SCHEMA,
        **gives,
        "annotations": {"title": f"Subagent: {profile.name}", "readOnlyHint": False, "destructiveHint": False},
    }


async def run_profile(
    handlers: ToolHandlers, backend: Backend, profile: Profile, call_id: str, args: dict[str, Any]
) -> dict[str, Any]:
    """Run the profile once, to its end. If the call is cancelled, cancel the run."""
    parts = backend.parts
    task = _read_task(args, parts.project, parts.context_paths)
    if profile.limits.seconds is UNSET:
        task = structs.replace(task, timeout_seconds=parts.timeouts.default)
    run = await handlers.start_primary(call_id, profile, task)
    try:
        result = await run.result()
    except asyncio.CancelledError:
        await run.cancel()
        raise
    handlers.forget_primary(call_id)
    return _make_result(result, profile)


def _read_task(args: dict[str, Any], project: Path, granted: Sequence[str]) -> Task:
    prompt, inputs, run_id = args.get("prompt"), args.get("inputs"), args.get("runId")
    if not isinstance(run_id, str) or not run_id.strip():
        raise ToolError("'runId' is required: a string that is not blank, made by the caller for this call")
    if len(run_id) > MAX_ID or not run_id.isprintable():
        raise ToolError(f"'runId' must be at most {MAX_ID} printable characters")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ToolError("'prompt' is required: a string that is not blank")
    if inputs is None:
        inputs = []
    if not isinstance(inputs, list):
        raise ToolError(f"'inputs' must be a list of strings, got {type(inputs).__name__}")
    paths = [_read_path(index, each, project, granted) for index, each in enumerate(inputs)]
    context = "Your inputs, which you can read: " + ", ".join(paths) if paths else ""
    label = " ".join(prompt.split())[:LABEL_CHARACTERS]
    return Task(prompt, context=context, context_paths=paths, subagent_id=run_id.strip(), label=label)


def _read_path(index: int, value: Any, project: Path, granted: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise ToolError(f"inputs[{index}] must be a string, got {type(value).__name__}")
    try:
        found = (project / value).resolve()
        roots = (project.resolve(), *(Path(path).resolve() for path in granted))
        inside, there = any(map(found.is_relative_to, roots)), found.exists()
    except (OSError, ValueError):
        inside, there = True, False
    if not inside:
        raise ToolError(f"inputs[{index}] is outside the project: '{value[:200]}'. {GRANT_HINT}")
    if not there:
        raise ToolError(f"inputs[{index}] does not exist: '{value[:200]}'")
    return str(found)


def _make_result(result: Result[Any], profile: Profile) -> dict[str, Any]:
    if not result.success:
        parts = [result.error_details or result.final_response, result.partial]
        return make_error_result("\n\n".join(part for part in parts if part))
    content = [{"type": "text", "text": result.final_response}]
    if profile.output is None:
        return {"content": content, "isError": False}
    return {"content": content, "structuredContent": result.structured, "isError": False}


async def make_early_answer(handlers: ToolHandlers, call_id: str) -> dict[str, Any]:
    """Return the reply for a caller that will not wait until the end. The caller has no other tool, so the reply says
    where the answer will be."""
    reply = await handlers.describe_made(call_id)
    watch = ", ".join(each["watch"] for each in reply["subagents"])
    return make_error_result(
        f"Still running: nothing is lost. Give this call more time in your client, or see: {watch}"
    )
