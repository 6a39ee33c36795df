"""The tools that clients get: names, descriptions and schemas, and the other names they answer to. Only values.

Clients hide tools behind a keyword search, so the descriptions use the words that a model would search for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from retinue.core.limits import Timeouts
from retinue.protocol.subagents import SPAWN_SCHEMA

SPAWN, LIST, CONTINUE = "spawn_subagents", "list_subagents", "continue_subagent"
PREFIX = "custom_tool__"
STATUS = f"{PREFIX}get_background_tool_status"
RESULT = f"{PREFIX}get_background_tool_result"
WAIT = f"{PREFIX}wait_for_background_tool"
CANCEL = f"{PREFIX}cancel_background_tool"
BACKGROUND = f"{PREFIX}list_background_tools"
NAMES = (SPAWN, LIST, CONTINUE, STATUS, RESULT, WAIT, CANCEL, BACKGROUND)
OTHER_NAMES = {name.removeprefix(PREFIX): name for name in NAMES} | {"list_agents": LIST, "get_agent": RESULT}

Schema = dict[str, Any]
_ID: Schema = {"type": "string", "description": "The subagent_id (or agent:N, or TREE/N) that a reply named"}
_SECONDS: Schema = {"type": "number", "description": "How many seconds it may take from now on"}
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
        "continuable": {"type": "boolean", "description": "Whether continue_subagent can go on with it"},
        "timeout_seconds": _NUMBER,
        "elapsed_seconds": _NUMBER,
        "seconds_remaining": _NUMBER,
        "execution_time_seconds": _NUMBER,
        "token_usage": {"type": "object"},
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
    """Make the schema of a reply: the fields that every reply has, and its own."""
    common = {"success": {"type": "boolean"}, "operation": _TEXT, "error": _TEXT, "watch": _TEXT, "note": _TEXT}
    return {"type": "object", "properties": {**common, **properties}, "required": ["success", "operation"]}


def _make_input_schema(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


_SPAWNED = _make_reply_schema(
    mode={"enum": ["blocking", "background"]}, results=_ENTRIES, subagents=_ENTRIES, summary={"type": "object"}
)


def _make_tool(
    name: str, title: str, description: str, takes: Schema, gives: Schema, *, reads: bool, repeats: bool = False
) -> dict[str, Any]:
    return {
        "name": name,
        "title": title,
        "description": description,
        "inputSchema": takes,
        "outputSchema": gives,
        "annotations": {
            "title": title,
            "readOnlyHint": reads,
            "destructiveHint": False,
            "idempotentHint": reads or repeats,
            "openWorldHint": False,
        },
    }


def list_tools(types: Sequence[tuple[str, str]] = (), timeouts: Timeouts | None = None) -> list[dict[str, Any]]:
    """Return the eight tools. `types` are the profiles that a task may name, with their descriptions."""
    takes = copy.deepcopy(SPAWN_SCHEMA)
    fields = takes["properties"]["tasks"]["items"]["properties"]
    fields["subagent_type"]["description"] = _describe_types(types)
    timeouts = timeouts or Timeouts()
    bounds = f"default {timeouts.default:g}; between {timeouts.minimum:g} and {timeouts.maximum:g}"
    fields["timeout_seconds"]["description"] = f"How many seconds it may take ({bounds})"
    takes["properties"]["background"]["description"] = f"Return at once; {WAIT} gives the answers later"
    takes["properties"]["refine"]["description"] = "Not available"
    return [
        _make_tool(
            SPAWN,
            "Spawn subagents",
            "Delegate tasks to subagents (sub-agents, workers) that run in parallel, each with a context and a "
            "workspace of its own. Use it for parallel tasks, research, reviews, or work that would fill your context. "
            "A subagent sees only its task, so say everything it needs. Returns every subagent's answer, what it "
            "changed and how to take that over; with background=true it returns at once.",
            takes,
            _SPAWNED,
            reads=False,
        ),
        _make_tool(
            LIST,
            "List subagents",
            "List the subagents of this session and of earlier ones in this project: id, status, task, workspace, and "
            "whether each can be continued.",
            _make_input_schema(),
            _make_reply_schema(subagents=_ENTRIES, left_out={"type": "integer"}),
            reads=True,
        ),
        _make_tool(
            CONTINUE,
            "Continue a subagent",
            "Send a finished subagent a new message. It goes on with all it knew, also when it timed out or was "
            "cancelled, and its new answer is returned.",
            _make_input_schema(
                "subagent_id",
                "message",
                subagent_id=_ID,
                message={"type": "string", "description": "What it is to do now"},
                timeout_seconds=_SECONDS,
            ),
            _SPAWNED,
            reads=False,
        ),
        _make_tool(
            STATUS,
            "Status of a background subagent",
            "Where a subagent in the background stands: its state, how long it has taken, what it waits for.",
            _make_input_schema("subagent_id", subagent_id=_ID),
            _make_reply_schema(subagent=_ENTRY),
            reads=True,
        ),
        _make_tool(
            RESULT,
            "Result of a background subagent",
            "The answer of a subagent that has ended. Reading it does not use it up.",
            _make_input_schema("subagent_id", subagent_id=_ID),
            _make_reply_schema(result=_ENTRY, status=_TEXT, subagent_id=_TEXT),
            reads=True,
        ),
        _make_tool(
            WAIT,
            "Wait for background subagents",
            "Wait until a subagent has ended, or without subagent_id until the next one has. When the time is up, or "
            "your client would give up, it says what still runs: then call it again.",
            _make_input_schema(
                subagent_id=_ID,
                timeout_seconds={"type": "number", "description": "How many seconds to wait at most"},
            ),
            _make_reply_schema(results=_ENTRIES, running=_ENTRIES, timed_out={"type": "boolean"}),
            reads=True,
        ),
        _make_tool(
            CANCEL,
            "Cancel a background subagent",
            "Stop a subagent and everything below it. What it has done so far is kept.",
            _make_input_schema("subagent_id", subagent_id=_ID),
            _make_reply_schema(cancelled={"type": "boolean"}, status=_TEXT, subagent_id=_TEXT),
            reads=False,
            repeats=True,
        ),
        _make_tool(
            BACKGROUND,
            "List background subagents",
            "List the subagents of this session that still run; with include_all=true also those that have ended.",
            _make_input_schema(include_all={"type": "boolean", "description": "Also those that have ended"}),
            _make_reply_schema(subagents=_ENTRIES),
            reads=True,
        ),
    ]  # fmt: skip


def _describe_types(types: Sequence[tuple[str, str]]) -> str:
    if not types:
        return "Which kind of subagent (profile); leave it out for a general one"
    listed = "; ".join(f"{name}: {about}" if about else name for name, about in types)
    return f"Which kind of subagent; leave it out for a general one. There is {listed}"


def resolve_name(name: str) -> str | None:
    """Return the tool that a name means, however it is spelled. None if there is none."""
    plain = name.removeprefix("mcp_")
    return plain if plain in NAMES else OTHER_NAMES.get(plain)
