"""Runs that live elsewhere, as runs of our tree: an MCP server reports them, and the collector hands that to us.

What a server says of a run is data: number, path and label are ours, names are cleaned, and the events it reports
become the same typed events that our own runs have, so every screen shows them alike. Such a run holds no slot, no
budget and no tools; nothing that arrives can ask, cancel or spawn. It ends once: when the server says so, when the
call comes back that it was made by, or with the run that made the call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from retinue.core.events import Gap, RunEnded, RunSpawned, RunStarted, Thinking, ToolCall, ToolResult, UsageReported
from retinue.core.limits import EVENT_BYTES
from retinue.core.messages import RunRef
from retinue.core.plans import Job, Plan
from retinue.core.ports import Clock, Link, Outcome
from retinue.core.profiles import RUNTIMES, Profile, Task
from retinue.core.results import STATUSES, Ending, Status, ending_texts
from retinue.protocol.reports import SOMEBODY, Reported, arguments
from retinue.supervisor.nodes import Node, stall_timer
from retinue.supervisor.slots import SlotHolder
from retinue.supervisor.trees import Tree
from retinue.workspaces.run_folders import RunFolders

if TYPE_CHECKING:
    from retinue.supervisor.resume import Ground

FOREIGN = "foreign"
CHARACTERS = 64
NO_JSON = msgspec.Raw(b"null")
TOO_FAR = "{who} is only watched here: it runs in the MCP server '{server}', which words from here do not reach"


class _Elsewhere:
    """The runtime of what does not run here: nothing can be started in it."""

    name = FOREIGN
    grace = 0.0
    started = RunStarted(FOREIGN)

    async def run(self, job: Job, link: Link) -> Ending:
        raise RuntimeError("a foreign run is not started from here")


_PLAN = Plan(
    Profile(FOREIGN), "", None, "", (), (), {}, {}, (), NO_JSON, NO_JSON, cast(Any, _Elsewhere()), RUNTIMES[-1]
)


class ForeignNode(Node, eq=False):
    """One run elsewhere. `calls` are those without a result yet, `seq` is the last number its server gave an event,
    `give_up` ends the call that the run was made by."""

    tree: Tree = None  # type: ignore[assignment]
    clock: Clock = None  # type: ignore[assignment]
    calls: tuple[tuple[str, str, float], ...] = ()
    made: int = 0
    seq: int = 0
    give_up: Callable[[], object] | None = None

    def take(self, event: Reported) -> None:
        """Writes what is reported of the run. What comes twice counts once; what is missing leaves a gap."""
        if self.ending or self._came_before(event.seq):
            return
        usage = event.usage
        if usage is not None:
            self._write(UsageReported(f"mcp:{self.view.spawned.server}", usage, event.spent))
        payload = event.payload or ""
        match event.type:
            case "thought_trace":
                self._write(Thinking(payload, event.reasoning_type or ""))
            case "tool_call":
                self._call(event, payload)
            case "tool_result":
                name = event.tool_name or ""
                call_id, took = self._answered(event.call_id, name)
                self._write(ToolResult(call_id, name, payload, event.success, took))
            case "subagent_end":
                self.end(_ending(event.status, payload))

    def _came_before(self, seq: int | None) -> bool:
        if seq is None:
            return False
        if seq <= self.seq:
            return True
        if seq > self.seq + 1:
            self._write(Gap(seq - self.seq - 1, "the server did not report them"))
        self.seq = seq
        return False

    def _call(self, event: Reported, payload: str) -> None:
        name = event.tool_name or ""
        self.made += 1
        call_id = event.call_id or f"call-{self.made}"
        self.calls += ((call_id, name, self.clock.monotonic()),)
        args, raw = arguments(payload)
        timeout = event.execution_timeout_seconds
        self._write(ToolCall(call_id, name, args, FOREIGN, timeout_seconds=timeout or None, raw=raw))

    def _answered(self, call_id: str | None, name: str) -> tuple[str, int]:
        """The id of the call that a result belongs to (the one that is named, else the oldest open one of the tool),
        and how many milliseconds ago it was made."""
        for made in self.calls:
            if made[0] == call_id or (not call_id and made[1] == name):
                self.calls = tuple(other for other in self.calls if other is not made)
                return made[0], round((self.clock.monotonic() - made[2]) * 1000)
        return call_id or "", 0

    def gap(self, reason: str) -> None:
        self._write(Gap(1, reason))

    def returned(self, outcome: Outcome | None) -> None:
        """The call that the run was made by has come back, or was given up."""
        if outcome is None:
            self.stop("cancelled")
        elif outcome.success:
            self.end(Ending("done", outcome.text[:EVENT_BYTES]))
        else:
            self.end(Ending("failed", outcome.text[:EVENT_BYTES], outcome.text[:EVENT_BYTES]))

    def stop(self, status: Status) -> bool:
        """Ends it here and at once, and its call with it; what it still reports is refused, which ends one below a
        call's own run when it next reports."""
        if self.ending:
            return False
        self.stopping = status
        self.end(Ending(status, *ending_texts(status, name=self.name, primary=False)), below=status)
        if self.give_up is not None:
            self.give_up()
        return True

    def end(self, ending: Ending, *, below: Status = "disconnected") -> None:
        """The one ending. What is still open below it ends first: nobody has said how."""
        if self.ending:
            return
        self.ending = True
        for child in self.children:
            child.stop(below)
        took = round((self.clock.monotonic() - self.started) * 1000)
        self._write(RunEnded(ending.status, ending.text, took, ending.error))
        self.finish()

    def let_go(self) -> None:
        Node.let_go(self)
        self.tree = self.give_up = None  # type: ignore[assignment]

    def _write(self, body: Any) -> None:
        self.tree.write(self, body)


def adopt(ground: Ground, tree: Tree | None, above: int, event: Reported, server: str) -> ForeignNode | None:
    """The run that is reported for the first time, below run `above`; None when that is not at work (any more)."""
    if tree is None or not 0 <= above < len(tree.nodes):
        return None
    parent = tree.nodes[above]
    if parent.ending or parent.stopping is not None:
        return None
    number = len(tree.nodes)
    agent = word(event.subagent_name) or SOMEBODY
    label = tree.unique_label(word(event.run_id) or agent)
    ref = RunRef(tree.id, number, f"{parent.ref.path}/{agent}-{number}", label, agent, event.run_id)
    task = event.payload or "" if event.type == "subagent_start" else ""
    folders = RunFolders(ground.state.run_folder(tree.id, number), "", ())
    node = ForeignNode(ref, _PLAN, Task(task), parent, folders, parent.policy, SlotHolder(None), depth=parent.depth + 1)
    node.tree, node.clock, node.started = tree, ground.clock, ground.clock.monotonic()
    node.stall = stall_timer(node, None, ground.clock, tree.write)
    tree.nodes.append(node)
    parent.children += (node,)
    tree.open(
        node,
        RunSpawned(
            parent.ref.run,
            label,
            node.depth,
            task,
            event.run_id,
            "",
            profile={"name": agent, "runtime": FOREIGN},
            trace_id=tree.trace_id,
            span_id=f"{random.getrandbits(64):016x}",
            server=server,
        ),
    )
    tree.write(node, _Elsewhere.started)
    return node


def word(text: str) -> str:
    """A peer's name as it can stand in paths and headers: letters, digits, `-`, `_` and `.`, and not too many."""
    kept = "".join(c if c.isalnum() or c in "-_." else "-" for c in text.strip()[:CHARACTERS])
    return kept.strip("-.")


def _ending(status: str | None, payload: str) -> Ending:
    """CPE processes give no status: words at the end are those of an error."""
    if status is None:
        status = "failed" if payload else "done"
    if status == "done":
        return Ending("done", payload)
    if status not in STATUSES:
        return Ending("failed", *ending_texts("failed", name="", primary=False))
    text = payload if status == "failed" else ending_texts(status, name="", primary=False)[0]
    return Ending(status, text, payload or text)


def left_open(write: Callable[[Node, RunEnded], object], node: Node) -> None:
    """The ending of a run elsewhere whose tree goes on in another process: its server is gone with the old one."""
    text, details = ending_texts("disconnected", name=node.name, primary=False)
    write(node, RunEnded("disconnected", text, 0, details))
    node.ending = node.finished = True
