"""The tools by which a model has its subagents after it has spawned them: list, continue, send, wait, cancel and so on.

The same as those of an MCP client (`protocol.subagent_tools`). A model reaches the runs below its own, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retinue.core.errors import ToolError
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome, Receipt, Ticket
from retinue.core.results import Result
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
from retinue.tools.spawn import SpawnSubagents, encode_reply

NOT_BELOW = "There is no subagent '{name}' below this run; list_subagents says which there are."


class SubagentControlTool:
    """One of `protocol.subagent_tools.TOOLS`, for a model."""

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
        return str(call.args.get("message") or "")

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        operation, scope = self.spec.name.removeprefix(PREFIX), LinkScope(folders, link)
        try:
            reply = await SubagentTools(scope).answer(self.spec.name, call)
        except ToolError as error:
            reply = {"success": False, "error": str(error)}
        whole = {"success": reply["success"], "operation": operation, **reply}
        return encode_reply(whole, success=reply["success"], gives=scope.given)


class LinkScope:
    """The runs below the one that has this link. A SubagentScope. `given` are the runs whose answers it has given."""

    def __init__(self, folders: Folders, link: Link) -> None:
        self._folders, self._link = folders, link
        self.given: tuple[int, ...] = ()

    def _list_below(self) -> list[KnownRun]:
        tree = self._link.ref.tree
        return [KnownRun(tree, row, is_live=True, is_here=True, own_tree=True) for row in self._link.agents()]

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
        await self._link.wait_for_any([known.row.run for known in running], seconds)

    async def cancel(self, known: KnownRun) -> bool:
        return await self._link.cancel_run(known.row.run)

    async def send(self, known: KnownRun, text: str, *, seconds: float) -> Receipt:
        return await self._link.send_message(known.row.run, text, seconds=seconds)

    async def continue_run(
        self, call: Call, known: KnownRun, message: str, seconds: float | None
    ) -> tuple[KnownRun, Reply]:
        number = known.row.run
        if (known.row.parent, known.row.call_id) != (self._link.ref.run, call.id):
            number = (await self._link.continue_run(number, message, seconds=seconds, call_id=call.id)).run
        await self._link.wait([number])
        continued = next(each for each in self._list_below() if each.row.run == number)
        [entry] = await self.make_entries([continued])
        return continued, entry

    async def make_entries(self, ended: Sequence[KnownRun]) -> list[Reply]:
        results: list[tuple[Result[Any], Ticket]] = [
            (known.row.result, self._link.ticket(known.row.run)) for known in ended if known.row.result is not None
        ]
        entries: list[Reply] = SpawnSubagents.reply(results, self._folders).data["results"] if results else []
        self.given += tuple(ticket.run for _, ticket in results)
        for entry, (result, ticket) in zip(entries, results, strict=True):
            entry["agent"] = f"agent:{ticket.run}"
            if result.structured is not None:
                entry["structured"] = result.structured
        return entries

    def describe_more(self, known: KnownRun) -> Reply:
        return {}

    async def describe_activity(self, known: KnownRun) -> Reply:
        return {"status_file": self._link.ticket(known.row.run).status_file}
