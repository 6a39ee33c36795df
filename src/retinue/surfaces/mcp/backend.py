"""The Control that serves MCP clients, the subagents that a client can name, and the progress of its trees.

A client can name the runs of its own tree, the runs it continued in other trees, and the project's earlier runs. The
progress of a tree is its latest event on one line, and its numbered questions, for calls that wait.

Knows Control and the readable side of the log, but nothing of the supervisor.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from retinue.build.logs import open_log_reader
from retinue.build.parts import MAIN, Parts
from retinue.concurrency import TaskOwner
from retinue.core.approvals import Approval
from retinue.core.control import Control, ResumeOverrides, RunHandle
from retinue.core.errors import NotFound
from retinue.core.events import Delta
from retinue.core.messages import ASKER
from retinue.core.ports import STATUS_FILE, Receipt, RunSummary, SpawnedRun
from retinue.core.profiles import Profile
from retinue.files.state_folder import name_run_folder
from retinue.log.activity import ProgressLines
from retinue.log.listing import load_listing, load_listings
from retinue.log.reading import wait_until_read
from retinue.log.runs import describe_view
from retinue.protocol.subagent_tools import KnownRun, find_known
from retinue.surfaces.printer.printer import format_question

LINE_CHARACTERS = 200


class Backend:
    """One Control and the parts it was built from. The log reader also sees the trees of other processes.
    `profiles` are the profiles that a continued run may have had. `command` is the command line by which the user
    calls Retinue."""

    def __init__(self, control: Control, parts: Parts, profiles: Sequence[Profile], command: str) -> None:
        assert parts.state is not None
        self.parts, self.state = parts, parts.state
        self._profiles = (MAIN, *profiles)
        self._command = f"cd {shlex.quote(str(parts.project))} && {command}"
        self.control = control
        self._log = open_log_reader(parts.state)
        self._resumed: dict[str, RunHandle] = {}  # by tree resumed here: the run of its client

    async def continue_run(self, known: KnownRun, text: str, *, seconds: float | None) -> RunHandle:
        """Start a run from the conversation of an earlier run. `seconds` is clamped like a timeout that a model asks
        for.

        If the process of the run's tree was killed, resume the tree here first. A run that was still running then goes
        on and gets `text` as a message."""
        if seconds is not None:
            seconds = self.parts.timeouts.clamp(seconds)
        overrides = ResumeOverrides(profiles=self._profiles, seconds=seconds, files=True)
        if not known.is_live and not (await load_listing(self._log, known.tree)).ended:
            self._resumed[known.tree] = await self.control.resume(known.tree, ResumeOverrides(profiles=self._profiles))
            if not known.has_ended:
                receipt = await self.control.send(known.tree, known.row.run, text)
                if receipt.state == "queued":
                    return RunHandle(self.control, self.make_spawned_run(known).ref)
        await self._wait_for_resumed(known.tree)
        return await self.control.continue_run(known.tree, known.row.run, text, overrides)

    async def _wait_for_resumed(self, tree: str) -> None:
        """Wait for the end of a tree that was resumed here and has no running subagents. Its client is gone, so the
        tree is about to end, and until then it accepts no new run."""
        client = self._resumed.get(tree)
        if client is None or any(row.run != 0 and row.result is None for row in await self._list_live_rows(tree)):
            return
        await client.result()
        self._resumed.pop(tree, None)

    def make_command(self, words: str) -> str:
        """Return a shell command for the user that works in any terminal."""
        return f"{self._command} {words}"

    def describe_question(self, asked: Approval) -> dict[str, str]:
        """Return an open question and the command for its answer."""
        return {
            "question": format_question(asked)[:LINE_CHARACTERS],
            "answer": self.make_command(f"approve {asked.number}"),
        }

    async def send(self, known: KnownRun, text: str, *, seconds: float) -> Receipt:
        """Send a client's message to a run, and wait up to `seconds` until the run has read it."""
        receipt = await self.control.send(known.tree, known.row.run, text, source=ASKER)
        return await wait_until_read(self._log, known.tree, known.row.run, receipt, seconds=seconds)

    # Subagents

    def make_spawned_run(self, known: KnownRun) -> SpawnedRun:
        folder = Path(name_run_folder(self.state, known.tree, known.row.run))
        return known.to_spawned_run(str(folder) if known.is_here or (folder / STATUS_FILE).exists() else "")

    async def find_run(self, name: str, client: str | None, others: Mapping[str, KnownRun]) -> KnownRun:
        """Return the subagent `name` from the tree of `client`, from `others` or from the project's logs. Raises
        NotFound."""
        if client is not None:
            own = find_known(await self.list_below(client), client, name)
            if own is not None:
                return own
        if name in others:
            return others[name]
        found = await self.control.find_run(name)
        for row in await self._list_live_rows(found.tree):
            if row.run == found.run:
                return KnownRun(found.tree, row, is_live=True, is_here=True)
        stored = await load_listing(self._log, found.tree)
        view = stored.runs.runs[found.run]
        if view.spawned.client:
            raise NotFound(f"'{name}' is a client, no subagent; list_subagents says what there is")
        return KnownRun(stored.tree, describe_view(view, stored.tree), stored.live)

    async def list_below(self, client: str) -> list[KnownRun]:
        """Return all runs of a client's tree except the client's own, in order of creation. Empty after the client has
        left."""
        rows = await self._list_live_rows(client)
        return [KnownRun(client, row, is_live=True, is_here=True, own_tree=True) for row in rows if row.run != 0]

    async def _list_live_rows(self, tree: str) -> list[RunSummary]:
        """Return the runs of a tree in this process, in order of creation. Empty once the tree has ended."""
        return next((info.runs for info in await self.control.list_trees(live=True) if info.tree == tree), [])

    async def list_earlier_runs(self, known: set[str]) -> list[KnownRun]:
        """Return the project's runs except the runs in `known`, newest tree first."""
        trees, _ = await load_listings(self._log)
        return [
            KnownRun(tree.tree, describe_view(view, tree.tree), tree.live)
            for tree in trees
            for view in tree.list_runs()
            if f"{tree.tree}/{view.number}" not in known and not view.spawned.client
        ]


class ChangeSignal:
    """A signal to wake all waiting tasks on each change. The future `next` completes at the next change. All waiting
    tasks share the future, so never cancel it."""

    def __init__(self) -> None:
        self.next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def notify(self) -> None:
        self.next.set_result(None)
        self.next = asyncio.get_running_loop().create_future()


class TreeProgress:
    """A watcher that follows one tree from its first event until the tree has ended or `close` is called. Then it
    calls `on_end`."""

    def __init__(self, control: Control, tree: str, changes: ChangeSignal, on_end: Callable[[], object]) -> None:
        self._control, self._tree = control, tree
        self.lines = ProgressLines(tree)
        self._changes = changes
        self._tasks = TaskOwner(on_error=lambda _: None)  # a tree that cannot be followed has no progress
        self._tasks.start(self._follow()).add_done_callback(lambda _: on_end())

    async def _follow(self) -> None:
        async with aclosing(self._control.watch(self._tree)) as events:
            async for event in events:
                if not isinstance(event, Delta):
                    self.lines.apply(event)
                    self._changes.notify()

    async def close(self) -> None:
        await self._tasks.close(None)
