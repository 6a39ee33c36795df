"""One subagent as one tool, for parents that call it by MCP: `prompt`, `inputs`, and the `runId` the parent made.

Each call is the primary of a tree of its own, which stands below the caller's run wherever that is. The caller's id is
the subagent's: whatever is reported of the run carries it. A call without one is refused, since nobody could tell whose
events those are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from msgspec import UNSET, structs

from retinue.core.errors import ToolError
from retinue.core.profiles import Profile, Task
from retinue.core.results import Result
from retinue.surfaces.mcp.tool_handlers import Calls, Ground

LONGEST_ID = 200
LABEL = 30
SCHEMA: dict[str, Any] = {
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


def name_of(profile: Profile) -> str:
    return profile.name


def tool(profile: Profile) -> dict[str, Any]:
    about = f" {profile.description}" if profile.description else ""
    gives = {} if profile.output is None else {"outputSchema": profile.output}
    return {
        "name": profile.name,
        "title": f"Subagent: {profile.name}",
        "description": f"Delegate a task to the subagent '{profile.name}', which works on it on its own and returns "
        f"its answer.{about}",
        "inputSchema": SCHEMA,
        **gives,
        "annotations": {"title": f"Subagent: {profile.name}", "readOnlyHint": False, "destructiveHint": False},
    }


async def run(calls: Calls, profile: Profile, call_id: str, args: dict[str, Any], ground: Ground) -> dict[str, Any]:
    """One run of it, to its end; given up, it is cancelled."""
    task = _task(args, ground.words.project)
    if profile.limits.seconds is UNSET:
        task = structs.replace(task, timeout_seconds=ground.timeouts.default)
    await ground.supervisor.prepare(profile)
    node = calls.begin(call_id, profile, task)
    try:
        await node.join()
    except asyncio.CancelledError:
        node.stop("cancelled")
        raise
    calls.done(call_id)
    return _result(node.result(), profile)


def _task(args: dict[str, Any], project: Path) -> Task:
    prompt, inputs, run_id = args.get("prompt"), args.get("inputs"), args.get("runId")
    if not isinstance(run_id, str) or not run_id.strip():
        raise ToolError("'runId' is required: a string that is not blank, made by the caller for this call")
    if len(run_id) > LONGEST_ID or not run_id.isprintable():
        raise ToolError(f"'runId' must be at most {LONGEST_ID} printable characters")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ToolError("'prompt' is required: a string that is not blank")
    if inputs is None:
        inputs = []
    if not isinstance(inputs, list):
        raise ToolError(f"'inputs' must be a list of strings, got {type(inputs).__name__}")
    paths = [_path(index, each, project) for index, each in enumerate(inputs)]
    context = "Your inputs, which you can read: " + ", ".join(paths) if paths else ""
    label = " ".join(prompt.split())[:LABEL]
    return Task(prompt, context=context, context_paths=paths, subagent_id=run_id.strip(), label=label)


def _path(index: int, value: Any, project: Path) -> str:
    if not isinstance(value, str):
        raise ToolError(f"inputs[{index}] must be a string, got {type(value).__name__}")
    try:
        found = (project / value).resolve()
        inside, there = found.is_relative_to(project.resolve()), found.exists()
    except (OSError, ValueError):
        inside, there = True, False
    if not inside:
        raise ToolError(f"inputs[{index}] is outside the project: '{value[:200]}'")
    if not there:
        raise ToolError(f"inputs[{index}] does not exist: '{value[:200]}'")
    return str(found)


def _result(result: Result[Any], profile: Profile) -> dict[str, Any]:
    if not result.success:
        parts = [result.error_details or result.final_response, result.partial]
        return refused("\n\n".join(part for part in parts if part))
    content = [{"type": "text", "text": result.final_response}]
    if profile.output is None:
        return {"content": content, "isError": False}
    return {"content": content, "structuredContent": result.structured, "isError": False}


def refused(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": True}


def handle(calls: Calls, call_id: str) -> dict[str, Any]:
    """For a caller that will not wait to the end, and has no other tool: where the answer will be."""
    reply = calls.handles("", call_id)
    watch = ", ".join(each["watch"] for each in reply["subagents"])
    return refused(f"Still running: nothing is lost. Give this call more time in your client, or see: {watch}")
