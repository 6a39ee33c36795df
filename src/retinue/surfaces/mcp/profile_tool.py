"""One profile as one tool, for parents that call it by MCP: `prompt`, `inputs`, and the `runId` that the parent made.

Each call is the primary of a tree of its own, below the caller's run wherever that is. The subagent's id is the
caller's `runId`, which all reports of the run carry. A call without one is refused, because its events would belong to
nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET, structs

from retinue.core.errors import ToolError
from retinue.core.profiles import Profile, Task
from retinue.core.results import Result
from retinue.protocol.subagents import GRANT_HINT, describe_profile
from retinue.surfaces.mcp.backend import Backend
from retinue.surfaces.mcp.texts import make_error_result
from retinue.surfaces.mcp.tool_handlers import ToolHandlers

MAX_ID = 200
LABEL_CHARACTERS = 30
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


def describe_tool(profile: Profile) -> dict[str, Any]:
    said = describe_profile(profile)
    about = f" {said}" if said else ""
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


async def run_profile(
    handlers: ToolHandlers, backend: Backend, profile: Profile, call_id: str, args: dict[str, Any]
) -> dict[str, Any]:
    """Run the profile once, to its end. If the call is given up, the run is cancelled."""
    task = _read_task(args, backend.project, backend.context_paths)
    if profile.limits.seconds is UNSET:
        task = structs.replace(task, timeout_seconds=backend.timeouts.default)
    run = await handlers.start_primary(call_id, profile, task)
    try:
        result = await run.result()
    except asyncio.CancelledError:
        await run.cancel()
        raise
    handlers.forget_primary(call_id)
    return _make_result(result, profile)


def _read_task(args: dict[str, Any], project: Path, granted: Sequence[str]) -> Task:
    prompt, inputs, run_id = args.get("prompt"), args.get("inputs"), args.get("runId")
    if not isinstance(run_id, str) or not run_id.strip():
        raise ToolError("'runId' is required: a string that is not blank, made by the caller for this call")
    if len(run_id) > MAX_ID or not run_id.isprintable():
        raise ToolError(f"'runId' must be at most {MAX_ID} printable characters")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ToolError("'prompt' is required: a string that is not blank")
    if inputs is None:
        inputs = []
    if not isinstance(inputs, list):
        raise ToolError(f"'inputs' must be a list of strings, got {type(inputs).__name__}")
    paths = [_read_path(index, each, project, granted) for index, each in enumerate(inputs)]
    context = "Your inputs, which you can read: " + ", ".join(paths) if paths else ""
    label = " ".join(prompt.split())[:LABEL_CHARACTERS]
    return Task(prompt, context=context, context_paths=paths, subagent_id=run_id.strip(), label=label)


def _read_path(index: int, value: Any, project: Path, granted: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise ToolError(f"inputs[{index}] must be a string, got {type(value).__name__}")
    try:
        found = (project / value).resolve()
        roots = (project.resolve(), *(Path(path).resolve() for path in granted))
        inside, there = any(map(found.is_relative_to, roots)), found.exists()
    except (OSError, ValueError):
        inside, there = True, False
    if not inside:
        raise ToolError(f"inputs[{index}] is outside the project: '{value[:200]}'. {GRANT_HINT}")
    if not there:
        raise ToolError(f"inputs[{index}] does not exist: '{value[:200]}'")
    return str(found)


def _make_result(result: Result[Any], profile: Profile) -> dict[str, Any]:
    if not result.success:
        parts = [result.error_details or result.final_response, result.partial]
        return make_error_result("\n\n".join(part for part in parts if part))
    content = [{"type": "text", "text": result.final_response}]
    if profile.output is None:
        return {"content": content, "isError": False}
    return {"content": content, "structuredContent": result.structured, "isError": False}


async def make_early_reply(handlers: ToolHandlers, call_id: str) -> dict[str, Any]:
    """Make the reply for a caller that will not wait to the end. It has no other tool: say where the answer will be."""
    reply = await handlers.make_early_reply("", call_id)
    watch = ", ".join(each["watch"] for each in reply["subagents"])
    return make_error_result(
        f"Still running: nothing is lost. Give this call more time in your client, or see: {watch}"
    )
