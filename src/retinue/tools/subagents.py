"""The tools with which a model spawns, lists, gets and applies subagents.

The tools for existing subagents (continue, send, wait, cancel and so on) are those of an MCP client, from
`protocol.subagent_tools`. A model reaches only the runs below its own. The supervisor does the work.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from retinue.core.errors import SpawnRefused, ToolError
from retinue.core.limits import INLINE_BYTES
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome, Receipt, RunSummary, SpawnedRun, SpawnOrder
from retinue.core.profiles import Profile, Task
from retinue.core.results import Result
from retinue.core.team_members import UNTYPED
from retinue.core.unseen import reveal_text
from retinue.protocol import subagents as words
from retinue.protocol.subagent_tools import (
    CONTINUE,
    PREFIX,
    SEND,
    TOOLS,
    WAIT,
    KnownRun,
    Reply,
    SubagentTools,
    find_known,
    take_page,
)
from retinue.tools.arguments import read_argument, show_arguments
from retinue.tools.paths import OutsideRoots, find_visible_path
from retinue.tools.truncate import truncate_text

SHORTEST_ANSWER = 512
GENERIC = Profile(
    UNTYPED,
    "You are a subagent. Do the task you are given, on your own, and end with a short, complete answer: "
    "it is all that the agent who asked you will see.",
)
NOT_BELOW = "There is no subagent '{name}' below this run; list_subagents says which there are."


class SpawnProfile:
    """`subagent_{name}`: spawns one child per call. Refused at once when the tree is full."""

    queues = False

    def __init__(self, profile: Profile, spec: ToolSpec | None = None) -> None:
        self.profile = profile
        self.spec = spec or words.make_subagent_spec(profile)

    async def preview(self, call: Call, folders: Folders) -> str:
        return show_arguments(call.args, "task", "task_context")

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        task = call.args.get("task")
        if not isinstance(task, str):
            raise ToolError("Missing 'task' parameter")
        context = read_argument(call, "task_context", str, "")
        background = read_argument(call, "background", bool, default=False)
        order = SpawnOrder(self.profile, Task(task, context=context), call.id, background, queue=self.queues)
        try:
            [child] = await (children := link.children).spawn_runs([order])
        except SpawnRefused as refused:
            return Outcome(str(refused), success=False)
        if background:
            return Outcome(f"agent:{child.run}")
        [result] = await children.wait_for([child.run])
        return Outcome(result.final_response, result.success, data=result)


class SpawnAgent(SpawnProfile):
    """`spawn_agent`: spawns one child without a profile of its own. Queued when the tree is full."""

    queues = True

    def __init__(self) -> None:
        spec = words.make_spawn_spec(
            words.SPAWN_ONE,
            "Spawn a general subagent to handle one task. It works independently and returns only its final response.",
            words.SUBAGENT_SCHEMA,
            "Spawn agent",
        )
        super().__init__(GENERIC, spec)


class SpawnSubagents:
    """`spawn_subagents`: spawns many children at once, queued when the tree is full. Its schema lists `profiles`, but
    not those in `reserved`, which the supervisor refuses."""

    def __init__(self, profiles: Sequence[Profile] = (), *, reserved: Sequence[Profile] = ()) -> None:
        self._profiles = (*profiles, *reserved)
        self.spec = words.make_spawn_spec(
            words.OPERATION,
            "Delegate tasks to subagents that work in parallel, each on its own and in its own workspace. "
            "Returns every subagent's answer, or with background=true at once.",
            words.make_spawn_schema(profiles),
            "Spawn subagents",
        )

    async def preview(self, call: Call, folders: Folders) -> str:
        try:
            tasks = words.read_tasks(call.args)
        except ToolError as error:
            raise ToolError(encode_reply(words.make_error_reply(str(error))).text) from None
        shown = [
            f"{kind or 'subagent'}: {show_arguments({**raw, 'subagent_type': None}, 'task')}"
            for (kind, _), raw in zip(tasks, call.args["tasks"], strict=True)
        ]
        rest = show_arguments({**call.args, "tasks": None})
        return "\n".join([*shown, *([rest] if rest else [])])

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        background = bool(call.args.get("background", False))
        try:
            orders = self._make_orders(call, folders, link, background)
            children = await link.children.spawn_runs(orders)
        except (ToolError, SpawnRefused) as error:
            return encode_reply(words.make_error_reply(str(error)), success=False)
        if background:
            return encode_reply(words.make_background_reply(children))
        results = await link.children.wait_for([child.run for child in children])
        return self.reply(list(zip(results, children, strict=True)), folders)

    @staticmethod
    def names_paths(call: Call) -> bool:
        """Return True if a valid call names paths for its children to read. The call looks for them on disk."""
        try:
            return any(task.context_paths for _, task in words.read_tasks(call.args))
        except ToolError:
            return False

    @staticmethod
    def reply(results: list[tuple[Result[Any], SpawnedRun]], folders: Folders) -> Outcome:
        """Make the reply for runs that have ended. Cut the answers until the whole reply fits inline."""
        limit = INLINE_BYTES
        while True:
            entries = [_make_entry(result, child, folders, limit) for result, child in results]
            reply = words.make_blocking_reply(entries)
            outcome = encode_reply(reply, success=reply["success"])
            if len(outcome.text.encode()) <= INLINE_BYTES or limit < SHORTEST_ANSWER:
                return outcome
            limit //= 2

    def _make_orders(self, call: Call, folders: Folders, link: Link, background: bool) -> list[SpawnOrder]:
        """Make the orders of a call. All are checked before the first child is spawned."""
        known = {profile.name.lower(): profile for profile in self._profiles}
        mine = link.ref.run, call.id  # children that this same call made before a crash do not count as running
        running = {
            row.subagent_id
            for row in link.children.list_runs()
            if row.status is None and (row.parent, row.call_id) != mine
        }
        orders = []
        tasks = words.read_tasks(call.args)
        busy = sorted(task.subagent_id for _, task in tasks if task.subagent_id in running and task.subagent_id)
        if busy:
            raise ToolError(f"Cannot spawn subagent_id already running: {', '.join(busy)}")
        for index, (kind, task) in enumerate(tasks):
            if kind is not None and kind.lower() not in known:
                types = ", ".join(profile.name for profile in known.values()) or "none"
                raise ToolError(
                    f"Unknown subagent_type '{kind}' for task '{task.text}'. Available subagent types: {types}"
                )
            paths = tuple(_check_path(index, path, folders) for path in task.context_paths)
            checked = msgspec.structs.replace(task, context_paths=paths)
            profile = "subagent" if kind is None else known[kind.lower()]
            orders.append(SpawnOrder(profile, checked, call_id=call.id, background=background, files=True))
        return orders


def _check_path(index: int, path: str, folders: Folders) -> str:
    """Return a context path made absolute. Raises ToolError unless the path exists and the parent may read it."""
    refused = f"Task at index {index} has a context_path it may not have"
    try:
        found = find_visible_path(folders, path)
    except OutsideRoots as error:
        raise ToolError(f"{refused}: {error}. {words.GRANT_HINT}") from None
    except ToolError as error:
        raise ToolError(f"{refused}: {error}") from None
    if found is None:
        raise ToolError(f"Task at index {index} has non-existent context_path: '{path}'")
    return str(found)


def _make_entry(result: Result[Any], child: SpawnedRun, folders: Folders, limit: int) -> dict[str, Any]:
    answer = result.final_response if result.success or not result.partial else result.partial
    answer, _ = truncate_text(answer, limit, spill=lambda: folders.spill(f"answer-{child.run}.txt"))
    return words.make_result_entry(result, child, answer=answer)


def encode_reply(reply: dict[str, Any], *, success: bool = True, gives: tuple[int, ...] = ()) -> Outcome:
    """Return the outcome of a call with a structured reply. The model gets the reply as JSON."""
    return Outcome(msgspec.json.encode(reply).decode(), success, data=reply, gives=gives)


class ListAgents:
    """`list_agents`: lists the runs spawned below this run."""

    spec = ToolSpec(
        "list_agents",
        "List all spawned sub-agents and their status",
        {"type": "object", "properties": {}},
        tier="observe",
        display_name="List agents",
        repeatable=True,
    )

    async def preview(self, call: Call, folders: Folders) -> str:
        return ""

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        rows = link.children.list_runs()
        return Outcome("\n".join(_format_line(row) for row in rows) or "No sub-agents have been spawned.", data=rows)


def _format_line(row: RunSummary) -> str:
    age = max(0, round(time.time() - row.created_at))
    origin = f"({row.agent}, spawned {age}s ago by agent:{row.parent})"
    return f"agent:{row.run} [{row.label}] {describe_agent_state(row)} {origin}"


def describe_agent_state(row: RunSummary) -> str:
    """Return Running, Finished or Error, with the live state or the reason."""
    if row.status is None:
        return f"Running ({row.state})"
    if row.status == "done" or row.result is None:
        return "Finished"
    return f"Error({row.status}: {row.result.error_details})"


class GetAgent:
    """`get_agent`: returns the result of one finished run. The result can be read again."""

    spec = ToolSpec(
        "get_agent",
        "Get the result from a finished sub-agent",
        {
            "type": "object",
            "properties": {"agent_id": {"type": "integer", "description": "The agent ID returned when it was spawned"}},
            "required": ["agent_id"],
        },
        tier="observe",
        display_name="Get agent",
        repeatable=True,
    )

    async def preview(self, call: Call, folders: Folders) -> str:
        return ""

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        wanted = call.args.get("agent_id")
        if isinstance(wanted, bool) or not isinstance(wanted, int):
            raise ToolError("get_agent: 'agent_id' must be an integer")
        row = next((row for row in link.children.list_runs() if row.run == wanted), None)
        if row is None:
            raise ToolError(f"There is no agent:{wanted} below this run.")
        if row.result is None:
            return Outcome(f"agent:{wanted} is still running ({row.state}).", success=False)
        gives = () if row.result.partial else (wanted,)  # the text does not have a partial answer
        return Outcome(row.result.final_response, row.result.success, data=row.result, gives=gives)


class ApplySubagent:
    """`apply_subagent`: applies a subagent's changes. The host makes the diff, and one approval covers all of it."""

    spec = ToolSpec(
        "apply_subagent",
        "Apply the files that a finished subagent changed in its own copy or worktree to your workspace: all of "
        "them, or, where they conflict with yours, none. 'subagent_id' is its id, its label, or the N of agent:N.",
        {
            "type": "object",
            "properties": {"subagent_id": {"type": "string"}},
            "required": ["subagent_id"],
        },
        tier="confirm",
        display_name="Apply subagent",
    )

    async def preview(self, call: Call, folders: Folders) -> str:
        return reveal_text(read_argument(call, "subagent_id", str))

    def __call__(self, call: Call, folders: Folders, link: Link) -> Awaitable[Outcome]:
        return link.run_host_tool(call)


class SubagentControlTool:
    """One of `protocol.subagent_tools.TOOLS`, as a tool for a model."""

    def __init__(self, name: str) -> None:
        text = TOOLS[name]
        self.spec = ToolSpec(
            name,
            text.description,
            text.schema,
            tier="confirm" if name == CONTINUE else "observe",
            display_name=text.title,
            repeatable=name not in (CONTINUE, SEND),
            waits=name in (CONTINUE, WAIT),
            spawns=name == CONTINUE,
        )

    async def preview(self, call: Call, folders: Folders) -> str:
        return show_arguments(call.args, "message")

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        operation, scope = self.spec.name.removeprefix(PREFIX), LinkScope(folders, link)
        try:
            reply = await SubagentTools(scope).answer(self.spec.name, call)
        except ToolError as error:
            reply = {"success": False, "error": str(error)}
        whole = {"success": reply["success"], "operation": operation, **reply}
        return encode_reply(whole, success=reply["success"], gives=scope.given)


class LinkScope:
    """The runs below the run of `link`. Implements SubagentScope. `given` are the runs whose answers were returned."""

    def __init__(self, folders: Folders, link: Link) -> None:
        self._folders, self._link = folders, link
        self.given: tuple[int, ...] = ()

    def _list_below(self) -> list[KnownRun]:
        tree = self._link.ref.tree
        return [
            KnownRun(tree, row, is_live=True, is_here=True, own_tree=True) for row in self._link.children.list_runs()
        ]

    async def find(self, name: str) -> KnownRun:
        found = find_known(self._list_below(), self._link.ref.tree, name)
        if found is None:
            raise ToolError(NOT_BELOW.format(name=name))
        return found

    async def find_made(self, call: Call) -> KnownRun | None:
        made = self._link.ref.run, call.id
        return next((known for known in self._list_below() if (known.row.parent, known.row.call_id) == made), None)

    async def list_all(self, offset: int) -> tuple[list[KnownRun], int]:
        return take_page(self._list_below(), (), offset)

    async def list_direct(self) -> list[KnownRun]:
        return [known for known in self._list_below() if known.row.parent == self._link.ref.run]

    async def look_again(self, known: KnownRun) -> KnownRun:
        return next(each for each in self._list_below() if each.row.run == known.row.run)

    async def wait_for_first(self, running: Sequence[KnownRun], seconds: float | None) -> None:
        await self._link.children.wait_for([known.row.run for known in running], any=True, seconds=seconds)

    async def cancel(self, known: KnownRun) -> bool:
        return self._link.commands.cancel_run(known.row.run)

    async def send(self, known: KnownRun, text: str, *, seconds: float) -> Receipt:
        return await self._link.commands.send_message(known.row.run, text, seconds=seconds)

    async def continue_run(
        self, call: Call, known: KnownRun, message: str, seconds: float | None
    ) -> tuple[KnownRun, Reply]:
        number = known.row.run
        if (known.row.parent, known.row.call_id) != (self._link.ref.run, call.id):
            number = await self._link.commands.continue_run(number, message, seconds=seconds, call_id=call.id)
        await self._link.children.wait_for([number])
        continued = next(each for each in self._list_below() if each.row.run == number)
        [entry] = await self.make_entries([continued])
        return continued, entry

    async def make_entries(self, ended: Sequence[KnownRun]) -> list[Reply]:
        results: list[tuple[Result[Any], SpawnedRun]] = [
            (known.row.result, self._make_spawned_run(known)) for known in ended if known.row.result is not None
        ]
        entries: list[Reply] = SpawnSubagents.reply(results, self._folders).data["results"] if results else []
        self.given += tuple(child.run for _, child in results)
        for entry, (result, child) in zip(entries, results, strict=True):
            entry["agent"] = f"agent:{child.run}"
            if result.structured is not None:
                entry["structured"] = result.structured
        return entries

    def describe_more(self, known: KnownRun) -> Reply:
        return {}

    async def describe_activity(self, known: KnownRun) -> Reply:
        return {"status_file": self._make_spawned_run(known).status_file}

    def _make_spawned_run(self, known: KnownRun) -> SpawnedRun:
        return known.to_spawned_run(f"{self._link.state.runs_folder}/{known.row.run}")
