"""Redaction before append: a tree whose events are rid of known secrets before they are folded, written and shown.

All that is ever said of a run goes through `Tree.open` or `Tree.write`, so log, results, screens and files are
clean alike. Where no secret is known a tree is a plain one, and nothing is paid."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from retinue.core import events, secrets
from retinue.core.events import Body
from retinue.core.ports import Clock, Log
from retinue.supervisor.nodes import Node
from retinue.supervisor.trees import Tree

# The fields of each kind that hold words of users, models, tools or peers; other kinds hold none. A profile and its
# tools were cleaned when the plan was made, once for all its runs.
_TEXTS: dict[type[Body], tuple[str, ...]] = {
    events.RunSpawned: ("label", "task", "subagent_id", "task_context", "context_paths"),
    events.Thinking: ("text",),
    events.Message: ("text",),
    events.ToolCall: ("args", "raw", "name", "display_name", "call_id"),
    events.ToolResult: ("text", "content", "name", "call_id"),
    events.ApprovalAsked: ("args", "preview", "label", "rule", "tool", "call_id"),
    events.ApprovalDecided: ("reason", "by", "args", "tool", "call_id"),
    events.Inbox: ("text",),
    events.Warned: ("text",),
    events.RunEnded: ("final_response", "error_details", "partial", "structured", "changed_files"),
}


B = TypeVar("B", bound=Body)


class ScrubbedTree(Tree):
    __slots__ = ()

    def open(self, node: Node, body: events.RunSpawned) -> Awaitable[None] | None:
        return super().open(node, scrubbed(body))

    def write(self, node: Node, body: Body, wait: bool = False, /) -> Awaitable[None] | None:
        return super().write(node, scrubbed(body), wait)


def tree_for(log: Log, clock: Clock, concurrent: int | None, trace: Callable[[], str] | None, name: str = "") -> Tree:
    return (ScrubbedTree if secrets.known() else Tree)(log, clock, concurrent, trace, name)


def scrubbed(body: B) -> B:
    """The body, or one like it without what must not be seen."""
    names = _TEXTS.get(type(body))
    if names is None:
        return body
    changes = None
    for name in names:
        value = getattr(body, name)
        if value:
            cleaned = secrets.clean(value) if type(value) is str else secrets.clean_value(value)
            if cleaned is not value:
                changes = {**(changes or {}), name: cleaned}
    return body if changes is None else msgspec.structs.replace(body, **changes)
