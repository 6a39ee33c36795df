"""The tools that clients get: names, descriptions, schemas and aliases. Contains only values.

Clients hide tools behind a keyword search, so the descriptions use the words that a model would search for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retinue.core.limits import Timeouts
from retinue.core.profiles import Profile
from retinue.protocol import subagent_tools
from retinue.protocol.subagent_tools import (
    BACKGROUND,
    CANCEL,
    CONTINUE,
    LIST,
    RESULT,
    SEND,
    SPAWN,
    STATUS,
    WAIT,
    Schema,
)
from retinue.protocol.subagents import make_spawn_schema

NAMES = (SPAWN, *subagent_tools.TOOLS)
OTHER_NAMES = {"list_agents": LIST, "get_agent": RESULT}

_TEXT: Schema = {"type": "string"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_NUMBER: Schema = {"type": ["number", "null"]}
_ENTRY: Schema = {
    "type": "object",
    "properties": {
        "subagent_id": _TEXT,
        "status": {
            "enum": ["running", "completed", "completed_but_timeout", "partial", "timeout", "error", "cancelled",
                     "interrupted"]
        },
        "success": {"type": "boolean"},
        "answer": {"type": "string", "description": "What the subagent answered, or as far as it came"},
        "error": _MAYBE_TEXT,
        "warning": _MAYBE_TEXT,
        "task": _TEXT,
        "agent": _TEXT,
        "session_id": {"type": "string", "description": "TREE/N: the run in `retinue show`, `tail` and `apply`"},
        "workspace": {"type": "string", "description": "The folder it works in"},
        "state": {"type": "string", "description": "What it does this moment, such as waiting_approval"},
        "doing": {"type": "string", "description": "The last that is known of it"},
        "continuable": {"type": "boolean", "description": "Whether continue_subagent can continue it"},
        "timeout_seconds": _NUMBER,
        "elapsed_seconds": _NUMBER,
        "seconds_remaining": _NUMBER,
        "execution_time_seconds": _NUMBER,
        "token_usage": {"type": "object"},
        "team": {"type": "object", "description": "Of a team: who answered, who voted for what, and which answer won"},
        "log_path": _TEXT,
        "status_file": _TEXT,
        "changed_files": {"type": "array", "items": _TEXT},
        "changed_count": {"type": "integer"},
        "apply": {"type": "string", "description": "The command by which the user applies what it changed"},
        "watch": {"type": "string", "description": "The command that shows everything it does"},
        "questions": {"type": "array", "items": {"type": "object"}, "description": "What waits for the user's answer"},
        "structured": {"description": "The answer as data, where its profile has an output schema"},
    },
    "required": ["subagent_id", "status"],
}  # fmt: skip
_ENTRIES: Schema = {"type": "array", "items": _ENTRY}


def _make_reply_schema(**properties: Schema) -> Schema:
    """Return the schema of a reply: the fields of every reply, and the given `properties`."""
    common = {"success": {"type": "boolean"}, "operation": _TEXT, "error": _TEXT, "watch": _TEXT, "note": _TEXT}
    return {"type": "object", "properties": {**common, **properties}, "required": ["success", "operation"]}


_SPAWNED = _make_reply_schema(
    mode={"enum": ["blocking", "background"]}, results=_ENTRIES, subagents=_ENTRIES, summary={"type": "object"}
)


_GIVEN: dict[str, Schema] = {
    SPAWN: _SPAWNED,
    LIST: _make_reply_schema(subagents=_ENTRIES, left_out={"type": "integer"}, next_offset={"type": "integer"}),
    CONTINUE: _SPAWNED,
    SEND: _make_reply_schema(
        subagent_id=_TEXT,
        session_id=_TEXT,
        state={"enum": ["delivered", "queued", "too_late", "elsewhere"]},
        turn={"type": ["integer", "null"], "description": "The turn at which it was read"},
    ),
    STATUS: _make_reply_schema(subagent=_ENTRY),
    RESULT: _make_reply_schema(result=_ENTRY, status=_TEXT, subagent_id=_TEXT),
    WAIT: _make_reply_schema(
        results=_ENTRIES, running=_ENTRIES, left_out={"type": "integer"}, timed_out={"type": "boolean"}
    ),
    CANCEL: _make_reply_schema(cancelled={"type": "boolean"}, status=_TEXT, subagent_id=_TEXT),
    BACKGROUND: _make_reply_schema(subagents=_ENTRIES, left_out={"type": "integer"}),
}  # schemas of the structured replies
_MORE = {  # descriptions for clients, where they differ from those for models inside a tree
    LIST: "List the subagents of this session and of earlier ones in this project: id, status, task, workspace, and "
    "whether each can be continued.",
    WAIT: "Wait until a subagent has ended, or without subagent_id until the next one has. When the time is up, or "
    "your client would give up, it says what still runs: then call it again.",
}


def _make_tool(name: str, title: str, description: str, takes: Schema, *, reads: bool) -> dict[str, Any]:
    return {
        "name": name,
        "title": title,
        "description": description,
        "inputSchema": takes,
        "outputSchema": _GIVEN[name],
        "annotations": {
            "title": title,
            "readOnlyHint": reads,
            "destructiveHint": False,
            "idempotentHint": reads or name == CANCEL,
            "openWorldHint": False,
        },
    }


def list_tools(profiles: Sequence[Profile] = (), timeouts: Timeouts | None = None) -> list[dict[str, Any]]:
    """Return the nine tools. `profiles` are the profiles that a task may name."""
    takes = make_spawn_schema(profiles)
    fields = takes["properties"]["tasks"]["items"]["properties"]
    timeouts = timeouts or Timeouts()
    bounds = f"default {timeouts.default:g}; between {timeouts.minimum:g} and {timeouts.maximum:g}"
    fields["timeout_seconds"]["description"] = f"How many seconds it may take ({bounds})"
    takes["properties"]["background"]["description"] = f"Return at once; {WAIT} gives the answers later"
    spawn = _make_tool(
        SPAWN,
        "Spawn subagents",
        "Delegate tasks to subagents (sub-agents, workers) that run in parallel, each with a context and a "
        "workspace of its own. Use it for parallel tasks, research, reviews, or work that would fill your context. "
        "A subagent sees only its task, so say everything it needs. Returns every subagent's answer, what it "
        "changed and how to take that over; with background=true it returns at once.",
        takes,
        reads=False,
    )
    others = subagent_tools.TOOLS.values()
    return [
        spawn,
        *(
            _make_tool(each.name, each.title, _MORE.get(each.name, each.description), each.schema, reads=each.reads)
            for each in others
        ),
    ]


def resolve_name(name: str) -> str | None:
    """Return the tool that `name` means in any spelling, or None if there is no such tool."""
    for spelling in subagent_tools.list_spellings(name):
        if spelling in NAMES or spelling in OTHER_NAMES:
            return OTHER_NAMES.get(spelling, spelling)
    return None
