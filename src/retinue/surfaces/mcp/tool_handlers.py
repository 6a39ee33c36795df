"""The tools as one client calls them: each takes arguments and gives the structured reply.

The client is run 0 of a tree, made with its first subagent. Spawning is the same tool that models have; what is added
here is what somebody outside needs: the effective timeout, and the commands that watch a run and take over its changes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from retinue.core.approvals import Approval
from retinue.core.control import ResumeOverrides
from retinue.core.errors import LogError, NotFound, ToolError
from retinue.core.limits import Limits, Timeouts, clamp_asked
from retinue.core.messages import Call
from retinue.core.ports import Ticket
from retinue.core.profiles import Profile, Task
from retinue.log.styled_text import counted
from retinue.protocol import subagents as words
from retinue.supervisor.client_run import Client
from retinue.supervisor.run import Run
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.mcp import catalog
from retinue.surfaces.mcp.progress import Bell, News
from retinue.surfaces.mcp.registry import Known, Registry, Words, entry, own_runs

Reply = dict[str, Any]
IDS = ("subagent_id", "job_id", "agent_id", "agent")
GOES_ON = f"Still running; nothing is lost. {catalog.WAIT} waits for the answers, {catalog.CANCEL} stops it."


@dataclass(frozen=True)
class Ground:
    """What all clients of one server share. `given` is for going on with runs of the log; `reach` sees to it that the
    supervisor has the log a tree is in."""

    supervisor: Supervisor
    registry: Registry
    words: Words
    state: Path
    limits: Limits
    timeouts: Timeouts
    given: Callable[..., ResumeOverrides]
    reach: Callable[[str], None]


class Calls:
    """One client's calls. `about` says who it is."""

    def __init__(self, ground: Ground, about: str) -> None:
        self._ground, self._about = ground, about
        self._client: Client | None = None
        self._news: dict[str, News] = {}  # of each tree that it has runs in
        self._callers: dict[str, Run] = {}  # the client's run that made each call
        self._elsewhere: dict[str, Run] = {}  # what its calls continued, in whatever tree
        self._count = 0
        self._left = False
        self.bell = Bell()

    @property
    def tree(self) -> str | None:
        return None if self._client is None else self._client.run.ref.tree

    def pending(self) -> list[Approval]:
        """The questions of its runs that wait for an answer."""
        return [asked for asked in self._ground.supervisor.pending() if asked.tree in self._news]

    def has(self, tree: str) -> bool:
        return tree in self._news

    def line(self) -> str:
        """How it stands, for somebody who waits."""
        pending = self.pending()
        if pending:
            more = "" if len(pending) == 1 else f" (and {len(pending) - 1} more)"
            first = self._news[pending[0].tree].question(pending[0])
            return f"waits for your answer: {first['question']}{more}: {first['answer']}"
        if not self._news:
            return ""
        counts = [news.counts() for news in self._news.values()]
        running, ended = (sum(numbers) for numbers in zip(*counts, strict=True))
        latest = next((news.latest for news in reversed(self._news.values()) if news.latest), "")
        said = f"{counted(running, 'subagent')} running, {ended} ended"
        return f"{said} · {latest}" if latest else said

    def _follow(self, tree: str) -> None:
        if tree not in self._news:
            ground, over = self._ground, partial(self._news.pop, tree, None)
            self._news[tree] = News(ground.supervisor, tree, ground.words, self.bell, over)
            self.bell.ring()

    def client(self) -> Client:
        """The client's own run; another one when it was cancelled from elsewhere. What travels down to this server and
        who its runs are reported to is attached where trees begin: here, and in `begin`."""
        if self._left:
            raise ToolError("the client has left")
        if self._client is None or not self._client.is_here:
            ground = self._ground
            self._client = Client(ground.supervisor, self._about, ground.limits)
            self._follow(self._client.run.ref.tree)
        return self._client

    def begin(self, call_id: str, profile: Profile, task: Task) -> Run:
        """A run that a call makes by itself: the primary of a tree of its own."""
        if self._left:
            raise ToolError("the client has left")
        return self._beside(call_id, self._ground.supervisor.spawn(profile, task))

    def done(self, call_id: str) -> None:
        """The run that a call made by itself has ended, and its result is given."""
        self._elsewhere.pop(call_id, None)

    def _beside(self, call_id: str, node: Run) -> Run:
        self._elsewhere[call_id] = node
        self._follow(node.ref.tree)
        return node

    async def leave(self) -> None:
        """Everything it began ends."""
        self._left = True
        for node in self._elsewhere.values():
            node.stop("cancelled")
        if self._client is not None:
            await self._client.leave()
        for node in list(self._elsewhere.values()):
            await node.join()
        for news in list(self._news.values()):
            await news.close()

    def at_work(self) -> bool:
        return any(known.view.ended is None for known in self._own())

    def new_id(self) -> str:
        self._count += 1
        return f"call_{self._count}"

    # Spawning

    async def spawn(self, call_id: str, args: dict[str, Any]) -> Reply:
        """The tool that models have, called by the client's own run."""
        client = self.client()
        node = client.run
        self._allowed(catalog.SPAWN, args)
        outcome = await self._cancel_if_given_up(call_id, client.call_tool(Call(call_id, catalog.SPAWN, args)))
        reply: Reply = outcome.data
        if "error" in reply:
            return reply
        # of a tree that was cancelled meanwhile there is nothing more to say
        for each, child in zip(reply.get("results") or reply["subagents"], self._made(call_id), strict=False):
            each.update(self._more(_of(child), each))
        if "note" in reply:
            reply["note"] = GOES_ON
        return {**reply, "watch": self._ground.words.watch(node.ref.tree)}

    def _allowed(self, name: str, args: dict[str, Any]) -> None:
        """The client has asked its user, so nobody is asked again; what rules forbid stays forbidden."""
        node = self.client().run
        spec = node.plan.by_name[catalog.SPAWN].spec
        verdict = node.policy.judge(spec, args, primary=True, workspace=node.folders.path)
        if verdict.what == "deny":
            raise ToolError(f"the rule {verdict.rule} forbids {name}")

    async def _cancel_if_given_up(self, call_id: str, work: Awaitable[Any]) -> Any:
        """Wait for the outcome of a call. If the client gives the call up, cancel what it made."""
        self._callers[call_id] = self.client().run
        try:
            return await work
        except asyncio.CancelledError:
            self.cancel_made(call_id)
            raise

    def _made(self, call_id: str) -> list[Run]:
        if call_id in self._elsewhere:
            return [self._elsewhere[call_id]]
        caller = self._callers.get(call_id)
        return [] if caller is None else [one for one in caller.children if one.view.spawned.call_id == call_id]

    def cancel_made(self, call_id: str) -> None:
        for child in self._made(call_id):
            child.stop("cancelled")

    def handles(self, operation: str, call_id: str) -> Reply:
        """For a call that its client will not wait for to the end: what it made, and how to wait for it."""
        made = self._made(call_id)
        reply = words.background_reply([child.ticket() for child in made])
        for each, child in zip(reply["subagents"], made, strict=True):
            each["status"] = _of(child).status
            each.update(self._more(_of(child), each))
        return {**reply, "operation": operation, "note": GOES_ON}

    def _more(self, known: Known, said: Reply) -> Reply:
        commands = self._ground.words
        more = {
            "session_id": known.name,
            "timeout_seconds": known.view.spawned.timeout_seconds,
            "watch": commands.watch(known.name),
        }
        if known.tree == self.tree:
            more["agent"] = f"agent:{known.view.number}"
        if "changed_files" in said:
            more["apply"] = commands.apply(known.name)
        return more

    # Continuing

    async def go_on(self, call_id: str, args: dict[str, Any]) -> Reply:
        known = await self._find(args)
        message = args.get("message")
        if not isinstance(message, str) or not message.strip():
            raise ToolError("Missing required 'message' field")
        seconds = _seconds(args, "timeout_seconds")
        if known.view.ended is None and known.live:
            raise ToolError(f"'{known.view.spawned.subagent_id}' is still running: wait for it, or cancel it first")
        self._allowed(catalog.CONTINUE, args)
        call = Call(call_id, catalog.CONTINUE, args)

        async def run() -> Any:
            node = self._beside(call_id, self._continued(known, message, seconds))
            await node.join()
            return self._reply_tool().reply([(node.result(), node.ticket())], self.client().run.folders)

        outcome = await self._cancel_if_given_up(call_id, self.client().record_call(call, run))
        reply: Reply = outcome.data
        node = self._elsewhere[call_id]
        reply["results"][0] |= self._more(_of(node), reply["results"][0])
        timeout = node.view.spawned.timeout_seconds
        return {**reply, "operation": catalog.CONTINUE, "timeout_seconds": timeout}

    def _continued(self, known: Known, message: str, seconds: float | None) -> Run:
        ground, run = self._ground, known.view.number
        if run != 0:  # a primary goes on in a tree of its own
            ground.reach(known.tree)
        if seconds is not None:
            seconds = clamp_asked(seconds, (ground.timeouts.minimum, ground.timeouts.maximum))
        given = ground.given(seconds=seconds, files=True)
        return ground.supervisor.continue_run(known.tree, run, message, given)

    def _reply_tool(self) -> Any:
        return self.client().run.plan.by_name[catalog.SPAWN]

    # Looking

    async def listed(self, call_id: str, args: dict[str, Any]) -> Reply:
        own = {known.name: known for known in self._own()}
        earlier, left_out = await self._ground.registry.earlier(set(own))
        entries = [entry(known, self._ground.words, own=known.tree == self.tree) for known in (*own.values(), *earlier)]
        return {"success": True, "subagents": entries, "left_out": left_out}

    async def status(self, call_id: str, args: dict[str, Any]) -> Reply:
        return {"success": True, "subagent": self._standing(await self._find(args))}

    def _standing(self, known: Known) -> Reply:
        """All that is known of one, while it runs or after."""
        view = known.view
        fields = entry(known, self._ground.words, own=known.tree == self.tree)
        fields |= {"state": view.state, "turns": view.turns, "tool_count": view.tool_count}
        fields |= {"timeout_seconds": view.spawned.timeout_seconds, "doing": view.last_message[:500]}
        fields["status_file"] = known.ticket(self._ground.state).status_file
        news = self._news.get(known.tree)
        if news is not None:
            fields["doing"] = news.doing(view.number) or fields["doing"]
            asked = [
                news.question(each) for each in self.pending() if (each.tree, each.run) == (known.tree, view.number)
            ]
            if asked:
                fields["questions"] = asked
        return fields

    async def result(self, call_id: str, args: dict[str, Any]) -> Reply:
        known = await self._find(args)
        about = {"subagent_id": known.view.spawned.subagent_id, "status": known.status}
        if known.view.ended is None:
            text = f"'{about['subagent_id']}' has not ended: it is {known.status} ({known.view.state})"
            return {"success": False, **about, "error": text}
        return {"success": True, **about, "result": self._ended([known])[0]}

    def _ended(self, found: Sequence[Known]) -> list[Reply]:
        """The results of runs that have ended."""
        pairs: list[tuple[Any, Ticket]] = [
            (each.view.result(each.tree), each.ticket(self._ground.state)) for each in found
        ]
        if not pairs:
            return []
        entries: list[Reply] = self._reply_tool().reply(pairs, self.client().run.folders).data["results"]
        for said, known, (result, _) in zip(entries, found, pairs, strict=True):
            said.update(self._more(known, said))
            if result.structured is not None:
                said["structured"] = result.structured
        return entries

    async def wait(self, call_id: str, args: dict[str, Any]) -> Reply:
        """One that is named, or the next to end of all that run. Time that is up is no error."""
        seconds = _seconds(args, "timeout_seconds")
        if any(args.get(key) is not None for key in IDS):
            wanted = [await self._find(args)]
        else:
            wanted = [known for known in self._direct() if known.view.ended is None]
        nodes = [known.node for known in wanted if known.node is not None and known.view.ended is None]
        foreign = [known.name for known in wanted if known.node is None and known.view.ended is None]
        if foreign:
            raise ToolError(f"{foreign[0]} is not run by this server, which cannot wait for it")
        if nodes:
            joining = [node.join() for node in nodes]
            try:
                await asyncio.wait(joining, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiting in joining:
                    waiting.cancel()
        ended = [known for known in wanted if known.view.ended is not None]
        reply: Reply = {"success": True, "results": self._ended(ended), "running": self._running(), "timed_out": False}
        if nodes and not ended:
            reply |= {"timed_out": True, "note": GOES_ON}
        elif not wanted:
            reply["note"] = "No subagent is running."
        return reply

    def waiting(self) -> Reply:
        """For a wait that its client will not wait for to the end."""
        running = self._running()
        return {"success": True, "results": [], "running": running, "timed_out": True, "note": GOES_ON}

    async def cancel(self, call_id: str, args: dict[str, Any]) -> Reply:
        known = await self._find(args)
        about = {"subagent_id": known.view.spawned.subagent_id, "status": known.status}
        if known.view.ended is None and known.node is None:
            raise ToolError(f"{known.name} is not run by this server: {self._ground.words.cancel(known.name)}")
        stopped = known.node is not None and known.node.stop("cancelled")
        return {"success": True, **about, "cancelled": stopped}

    async def background(self, call_id: str, args: dict[str, Any]) -> Reply:
        if args.get("include_all") is not True:
            return {"success": True, "subagents": self._running()}
        return {"success": True, "subagents": [self._standing(known) for known in self._direct()]}

    def _running(self) -> list[Reply]:
        return [self._standing(known) for known in self._direct() if known.view.ended is None]

    def _direct(self) -> list[Known]:
        """What the client itself has begun, without what is below that."""
        begun = {node.ref for node in self._elsewhere.values()}
        return [each for each in self._own() if each.view.spawned.parent == 0 or (each.node and each.node.ref in begun)]

    def _own(self) -> list[Known]:
        below = [] if self._client is None else list(own_runs(self._client))
        own = {known.name for known in below}
        return below + [_of(node) for node in self._elsewhere.values() if _of(node).name not in own]

    async def _find(self, args: dict[str, Any]) -> Known:
        given = next((args[key] for key in IDS if args.get(key) is not None), None)
        name = f"agent:{given}" if isinstance(given, int) and not isinstance(given, bool) else given
        if not isinstance(name, str) or not name.strip():
            raise ToolError("Missing required 'subagent_id' field")
        top = self._client
        others = {node.ref.subagent_id: node for node in self._elsewhere.values()}
        try:
            return await self._ground.registry.find(name, top, others)
        except (NotFound, LogError) as error:
            raise ToolError(str(error)) from None


def _of(node: Run) -> Known:
    return Known(node.ref.tree, node.view, not node.finished, node)


def _seconds(args: dict[str, Any], key: str) -> float | None:
    value = args.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"Invalid '{key}' type: expected number, got {type(value).__name__}")
    if not math.isfinite(value) or value < 0:
        raise ToolError(f"Invalid '{key}': must be 0 or more, got {value}")
    return float(value)
