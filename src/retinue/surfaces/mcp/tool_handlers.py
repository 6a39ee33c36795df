"""The tools as one client calls them: each takes arguments and returns the structured reply.

The client is run 0 of a tree, made with its first subagent. Spawning is the same tool that models have. Added here is
what a program outside needs: the effective timeout, and the commands that watch a run and apply its changes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from retinue.core.approvals import Approval
from retinue.core.errors import LogError, NotFound, ToolError
from retinue.core.messages import Call
from retinue.core.ports import Outcome, Ticket
from retinue.core.profiles import Profile, Task
from retinue.log.styled_text import format_count
from retinue.protocol import subagents
from retinue.surfaces.mcp import catalog
from retinue.surfaces.mcp.backend import Backend, ClientRun, LiveRun
from retinue.surfaces.mcp.progress import ChangeSignal, TreeProgress
from retinue.surfaces.mcp.registry import CommandHints, KnownRun, RunRegistry, describe_run

Reply = dict[str, Any]
ID_FIELDS = ("subagent_id", "job_id", "agent_id", "agent")
STILL_RUNNING = f"Still running; nothing is lost. {catalog.WAIT} waits for the answers, {catalog.CANCEL} stops it."
CLIENT_LEFT = "the client has left"
MESSAGE_CHARACTERS = 500


class ToolHandlers:
    """The tool calls of one client. `about` says who it is."""

    def __init__(self, backend: Backend, registry: RunRegistry, hints: CommandHints, about: str) -> None:
        self._backend, self._registry, self._hints, self._about = backend, registry, hints, about
        self._client: ClientRun | None = None
        self._progress: dict[str, TreeProgress] = {}  # of each tree that it has runs in
        self._callers: dict[str, ClientRun] = {}  # the client's run that made each call
        self._primaries: dict[str, LiveRun] = {}  # by call: runs that are not below the client's own
        self._count = 0
        self._has_left = False
        self.changes = ChangeSignal()

    @property
    def tree(self) -> str | None:
        return None if self._client is None else self._client.tree

    def has_tree(self, tree: str) -> bool:
        return tree in self._progress

    def has_running_subagents(self) -> bool:
        return any(not known.has_ended for known in self._list_own())

    def make_call_id(self) -> str:
        self._count += 1
        return f"call_{self._count}"

    def list_pending(self) -> list[Approval]:
        """Return the open questions of the client's runs."""
        return [asked for asked in self._backend.list_pending() if asked.tree in self._progress]

    def describe_progress(self) -> str:
        """Describe how the client's runs stand, in a line for somebody who waits."""
        pending = self.list_pending()
        if pending:
            more = "" if len(pending) == 1 else f" (and {len(pending) - 1} more)"
            first = self._progress[pending[0].tree].describe_question(pending[0])
            return f"waits for your answer: {first['question']}{more}: {first['answer']}"
        if not self._progress:
            return ""
        counts = [progress.count_runs() for progress in self._progress.values()]
        running, ended = (sum(numbers) for numbers in zip(*counts, strict=True))
        lines = (progress.latest_line for progress in reversed(self._progress.values()))
        latest = next((line for line in lines if line), "")
        line = f"{format_count(running, 'subagent')} running, {ended} ended"
        return f"{line} \u00b7 {latest}" if latest else line

    # The client's own runs

    def get_client(self) -> ClientRun:
        """Return the client's own run; a new one if it was cancelled from elsewhere. What is left to the caller, and
        to whom its runs are reported, is attached where trees begin: here and in `start_primary`."""
        if self._has_left:
            raise ToolError(CLIENT_LEFT)
        if self._client is None or not self._client.is_at_work:
            self._client = self._backend.open_client(self._about)
            self._follow(self._client.tree)
        return self._client

    def start_primary(self, call_id: str, profile: Profile, task: Task) -> LiveRun:
        """Start the run of a call that makes one by itself: the primary of a tree of its own."""
        if self._has_left:
            raise ToolError(CLIENT_LEFT)
        return self._add_primary(call_id, self._backend.spawn(profile, task))

    def forget_primary(self, call_id: str) -> None:
        """Forget the run of a call that has ended and was answered."""
        self._primaries.pop(call_id, None)

    def _add_primary(self, call_id: str, run: LiveRun) -> LiveRun:
        self._primaries[call_id] = run
        self._follow(run.ref.tree)
        return run

    def _follow(self, tree: str) -> None:
        if tree not in self._progress:
            on_end = partial(self._progress.pop, tree, None)
            self._progress[tree] = TreeProgress(self._backend, tree, self._hints, self.changes, on_end)
            self.changes.notify()

    async def leave(self) -> None:
        """End everything that the client has started."""
        self._has_left = True
        for run in self._primaries.values():
            run.cancel()
        if self._client is not None:
            await self._client.leave()
        for run in list(self._primaries.values()):
            await run.wait()
        for progress in list(self._progress.values()):
            await progress.close()

    def _list_own(self) -> list[KnownRun]:
        below = [] if self._client is None else [KnownRun.of(run) for run in self._client.list_runs()]
        names = {known.name for known in below}
        primaries = [KnownRun.of(run) for run in self._primaries.values()]
        return below + [known for known in primaries if known.name not in names]

    def _list_direct(self) -> list[KnownRun]:
        """Return what the client itself has started, without what is below that."""
        refs = {run.ref for run in self._primaries.values()}
        return [
            known
            for known in self._list_own()
            if known.view.spawned.parent == 0 or (known.run is not None and known.run.ref in refs)
        ]

    def _list_made(self, call_id: str) -> list[LiveRun]:
        if call_id in self._primaries:
            return [self._primaries[call_id]]
        caller = self._callers.get(call_id)
        return [] if caller is None else caller.list_made(call_id)

    async def _record_call(self, call: Call, run: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Run a call of the client and log it. If the client gives it up, what it made is cancelled."""
        client = self._callers[call.id] = self.get_client()

        async def run_or_cancel() -> Outcome:
            try:
                return await run()
            except asyncio.CancelledError:
                for made in self._list_made(call.id):
                    made.cancel()
                raise

        return await client.record_call(call, run_or_cancel)

    # Spawning

    async def spawn(self, call_id: str, args: dict[str, Any]) -> Reply:
        """Call the spawn tool that models have, as the client's own run."""
        client = self.get_client()
        client.check_rules(catalog.SPAWN, catalog.SPAWN, args)
        call = Call(call_id, catalog.SPAWN, args)
        outcome = await self._record_call(call, lambda: client.run_spawn_tool(call))
        reply: Reply = outcome.data
        if "error" in reply:
            return reply
        # a tree that was cancelled meanwhile has no runs to describe any more
        for entry, made in zip(reply.get("results") or reply["subagents"], self._list_made(call_id), strict=False):
            entry.update(self._describe_more(KnownRun.of(made), entry))
        if "note" in reply:
            reply["note"] = STILL_RUNNING
        return {**reply, "watch": self._hints.watch(client.tree)}

    def make_early_reply(self, operation: str, call_id: str) -> Reply:
        """Make the reply to a call that its client will not wait for: what it made, and how to wait for that."""
        made = self._list_made(call_id)
        reply = subagents.background_reply([run.ticket for run in made])
        for entry, run in zip(reply["subagents"], made, strict=True):
            known = KnownRun.of(run)
            entry["status"] = known.status
            entry.update(self._describe_more(known, entry))
        return {**reply, "operation": operation, "note": STILL_RUNNING}

    def _describe_more(self, known: KnownRun, entry: Reply) -> Reply:
        """Make the fields that a program outside needs beside those of the spawn tool."""
        more = {
            "session_id": known.name,
            "timeout_seconds": known.view.spawned.timeout_seconds,
            "watch": self._hints.watch(known.name),
        }
        if known.tree == self.tree:
            more["agent"] = f"agent:{known.view.number}"
        if "changed_files" in entry:
            more["apply"] = self._hints.apply(known.name)
        return more

    # Continuing

    async def continue_subagent(self, call_id: str, args: dict[str, Any]) -> Reply:
        known = await self._find(args)
        message = args.get("message")
        if not isinstance(message, str) or not message.strip():
            raise ToolError("Missing required 'message' field")
        seconds = _read_seconds(args, "timeout_seconds")
        if not known.has_ended and known.is_live:
            raise ToolError(f"'{known.view.spawned.subagent_id}' is still running: wait for it, or cancel it first")
        self.get_client().check_rules(catalog.CONTINUE, catalog.SPAWN, args)

        async def run() -> Outcome:
            started = await self._backend.continue_run(known.tree, known.view.number, message, seconds=seconds)
            self._add_primary(call_id, started)
            await started.wait()
            return self.get_client().make_reply(catalog.SPAWN, [(started.result(), started.ticket)])

        outcome = await self._record_call(Call(call_id, catalog.CONTINUE, args), run)
        reply: Reply = outcome.data
        continued = KnownRun.of(self._primaries[call_id])
        reply["results"][0] |= self._describe_more(continued, reply["results"][0])
        timeout = continued.view.spawned.timeout_seconds
        return {**reply, "operation": catalog.CONTINUE, "timeout_seconds": timeout}

    # Looking

    async def list_subagents(self, call_id: str, args: dict[str, Any]) -> Reply:
        own = {known.name: known for known in self._list_own()}
        earlier, left_out = await self._registry.list_earlier_runs(set(own))
        entries = [
            describe_run(known, self._hints, own_tree=known.tree == self.tree) for known in (*own.values(), *earlier)
        ]
        return {"success": True, "subagents": entries, "left_out": left_out}

    async def get_status(self, call_id: str, args: dict[str, Any]) -> Reply:
        return {"success": True, "subagent": self._describe_status(await self._find(args))}

    def _describe_status(self, known: KnownRun) -> Reply:
        """Describe all that is known of a run, while it runs or after."""
        view = known.view
        fields = describe_run(known, self._hints, own_tree=known.tree == self.tree)
        fields |= {"state": view.state, "turns": view.turns, "tool_count": view.tool_count}
        fields |= {
            "timeout_seconds": view.spawned.timeout_seconds,
            "doing": view.last_message[:MESSAGE_CHARACTERS],
            "status_file": known.make_ticket(self._backend.state).status_file,
        }
        progress = self._progress.get(known.tree)
        if progress is not None:
            fields["doing"] = progress.last_line_of(view.number) or fields["doing"]
            questions = [
                progress.describe_question(asked)
                for asked in self.list_pending()
                if (asked.tree, asked.run) == (known.tree, view.number)
            ]
            if questions:
                fields["questions"] = questions
        return fields

    async def get_result(self, call_id: str, args: dict[str, Any]) -> Reply:
        known = await self._find(args)
        about = {"subagent_id": known.view.spawned.subagent_id, "status": known.status}
        if not known.has_ended:
            text = f"'{about['subagent_id']}' has not ended: it is {known.status} ({known.view.state})"
            return {"success": False, **about, "error": text}
        return {"success": True, **about, "result": self._describe_results([known])[0]}

    def _describe_results(self, ended: Sequence[KnownRun]) -> list[Reply]:
        results: list[tuple[Any, Ticket]] = [
            (known.view.result(known.tree), known.make_ticket(self._backend.state)) for known in ended
        ]
        if not results:
            return []
        entries: list[Reply] = self.get_client().make_reply(catalog.SPAWN, results).data["results"]
        for entry, known, (result, _) in zip(entries, ended, results, strict=True):
            entry.update(self._describe_more(known, entry))
            if result.structured is not None:
                entry["structured"] = result.structured
        return entries

    # Waiting and cancelling

    async def wait(self, call_id: str, args: dict[str, Any]) -> Reply:
        """Wait for the run that is named, or for the next of all to end. Time that is over is no error."""
        seconds = _read_seconds(args, "timeout_seconds")
        if any(args.get(key) is not None for key in ID_FIELDS):
            wanted = [await self._find(args)]
        else:
            wanted = [known for known in self._list_direct() if not known.has_ended]
        running = [known for known in wanted if not known.has_ended]
        runs = [known.run for known in running if known.run is not None]
        for known in running:
            if known.run is None:
                raise ToolError(f"{known.name} is not run by this server, which cannot wait for it")
        if runs:
            waiting = [run.wait() for run in runs]
            try:
                await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for future in waiting:
                    future.cancel()
        ended = [known for known in wanted if known.has_ended]
        results = self._describe_results(ended)
        reply: Reply = {"success": True, "results": results, "running": self._list_running(), "timed_out": False}
        if runs and not ended:
            reply |= {"timed_out": True, "note": STILL_RUNNING}
        elif not wanted:
            reply["note"] = "No subagent is running."
        return reply

    def make_early_wait_reply(self) -> Reply:
        """Make the reply to a wait that its client will not wait for."""
        running = self._list_running()
        return {"success": True, "results": [], "running": running, "timed_out": True, "note": STILL_RUNNING}

    async def cancel(self, call_id: str, args: dict[str, Any]) -> Reply:
        known = await self._find(args)
        about = {"subagent_id": known.view.spawned.subagent_id, "status": known.status}
        if not known.has_ended and known.run is None:
            raise ToolError(f"{known.name} is not run by this server: {self._hints.cancel(known.name)}")
        is_cancelled = known.run is not None and known.run.cancel()
        return {"success": True, **about, "cancelled": is_cancelled}

    async def list_background(self, call_id: str, args: dict[str, Any]) -> Reply:
        if args.get("include_all") is not True:
            return {"success": True, "subagents": self._list_running()}
        return {"success": True, "subagents": [self._describe_status(known) for known in self._list_direct()]}

    def _list_running(self) -> list[Reply]:
        return [self._describe_status(known) for known in self._list_direct() if not known.has_ended]

    async def _find(self, args: dict[str, Any]) -> KnownRun:
        given = next((args[key] for key in ID_FIELDS if args.get(key) is not None), None)
        name = f"agent:{given}" if isinstance(given, int) and not isinstance(given, bool) else given
        if not isinstance(name, str) or not name.strip():
            raise ToolError("Missing required 'subagent_id' field")
        primaries = {run.ref.subagent_id: run for run in self._primaries.values()}
        try:
            return await self._registry.find_run(name, self._client, primaries)
        except (NotFound, LogError) as error:
            raise ToolError(str(error)) from None


def _read_seconds(args: dict[str, Any], key: str) -> float | None:
    value = args.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"Invalid '{key}' type: expected number, got {type(value).__name__}")
    if not math.isfinite(value) or value < 0:
        raise ToolError(f"Invalid '{key}': must be 0 or more, got {value}")
    return float(value)
