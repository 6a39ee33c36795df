"""The arguments, the replies and the exact error texts of `spawn_subagents`.

Shared by the tool that a model calls and by every protocol that offers the same tool.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

from retinue.core.errors import ToolError
from retinue.core.limits import MAX_TASKS_PER_SPAWN
from retinue.core.messages import ToolSpec
from retinue.core.ports import SpawnedRun
from retinue.core.profiles import Profile, Task
from retinue.core.results import Result, TeamReport
from retinue.core.usage import Usage

LISTED_CHANGES = 50
OPERATION = "spawn_subagents"
SPAWN_ONE = "spawn_agent"
GRANT_HINT = "The user can grant it with --context-path, or with context_paths in retinue.yaml."

SUBAGENT_DESCRIPTION = (
    "Spawn a subagent named '{name}' to handle a task. "
    "The subagent will work independently and return only its final response."
)
SUBAGENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "task": {"type": "string", "description": "The task or question for the subagent to handle"},
        "task_context": {"type": "string", "description": "Background the subagent needs, put into its instructions"},
        "background": {"type": "boolean", "description": "Return agent:N at once; a notice comes when it has ended"},
    },
    "required": ["task"],
}

TASK_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "task": {"type": "string", "description": "What the subagent is to do, complete in itself"},
        "task_context": {"type": "string", "description": "Background the subagent needs, put into its instructions"},
        "subagent_type": {"type": "string", "description": "Which profile to use"},
        "subagent_id": {"type": "string", "description": "A short name of your own for this subagent"},
        "context_paths": {
            "type": "array",
            "items": {"type": "string"},
            "description": "More paths it may read",
        },
        "include_parent_workspace": {"type": "boolean", "description": "May read your workspace (default true)"},
        "include_temp_workspace": {"type": "boolean", "description": "May read its siblings' results (default true)"},
        "model": {"type": "string", "description": "Another model for this subagent"},
        "timeout_seconds": {"type": "number", "description": "How long it may take"},
    },
    "required": ["task"],
}
SPAWN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tasks": {"type": "array", "items": TASK_SCHEMA, "description": "One entry per subagent; they run in parallel"},
        "background": {"type": "boolean", "description": "Return at once; a notice comes when each has ended"},
        "refine": {
            "type": "boolean",
            "description": "Only for subagents that are teams: their members see each other's answers, improve on them "
            "and continue until all have voted. Without it each answers once (default false)",
        },
    },
    "required": ["tasks"],
}


def make_spawn_spec(name: str, description: str, schema: dict[str, Any], title: str) -> ToolSpec:
    """Return the spec of a tool that spawns subagents."""
    return ToolSpec(name, description, schema, tier="confirm", display_name=title, waits=True, spawns=True)


def make_subagent_spec(profile: Profile) -> ToolSpec:
    """Return the spec of `subagent_{name}`, the tool that spawns one subagent with a profile."""
    about = describe_profile(profile)
    sentence = SUBAGENT_DESCRIPTION.format(name=profile.name)
    description = f"{sentence} {about}" if about else sentence
    return make_spawn_spec(f"subagent_{profile.name}", description, SUBAGENT_SCHEMA, f"Subagent: {profile.name}")


def describe_profile(profile: Profile) -> str:
    """Return the purpose of a profile and its expected input, for a caller that chooses a profile. May be empty."""
    parts = [" ".join(profile.description.split())]
    if profile.expected_input:
        parts.append(f"Expected input: {'; '.join(' '.join(each.split()) for each in profile.expected_input)}.")
    return " ".join(part for part in parts if part)


def make_spawn_schema(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Return the argument schema of `spawn_subagents`, with the profiles that `subagent_type` may name."""
    schema = copy.deepcopy(SPAWN_SCHEMA)
    kind = schema["properties"]["tasks"]["items"]["properties"]["subagent_type"]
    kind["description"] = "Which kind of subagent (profile); leave it out for a general one"
    listed = [f"{profile.name}: {describe_profile(profile)}".removesuffix(": ") for profile in profiles]
    if listed:
        kind["description"] += ".\n" + "\n".join(f"- {line}" for line in listed)
    return schema


def read_tasks(args: dict[str, Any]) -> list[tuple[str | None, Task]]:
    """Return the tasks of a call, each with its `subagent_type`. Raises ToolError with the exact texts that callers
    rely on."""
    refine = args.get("refine")
    if refine is not None and not isinstance(refine, bool):
        raise ToolError(f"Invalid 'refine' type: expected boolean, got {_name_type(refine)}")
    raw = args.get("tasks")
    if raw is not None and not isinstance(raw, list):
        raise ToolError(f"Invalid 'tasks' type: expected list, got {_name_type(raw)}")
    if not raw:
        raise ToolError("No tasks provided. Must provide at least one task.")
    if len(raw) > MAX_TASKS_PER_SPAWN:
        raise ToolError(f"Too many tasks: {len(raw)} requested but maximum is {MAX_TASKS_PER_SPAWN}")
    tasks = [_read_task(index, value, refine=bool(refine)) for index, value in enumerate(raw)]
    ids = [task.subagent_id for _, task in tasks if task.subagent_id is not None]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ToolError(f"Duplicate subagent_id values: {', '.join(twice)}")
    return tasks


def _read_task(index: int, value: Any, *, refine: bool) -> tuple[str | None, Task]:
    if not isinstance(value, dict):
        raise ToolError(f"Task at index {index} has invalid type: expected object, got {_name_type(value)}")
    text = value.get("task")
    if not isinstance(text, str) or not text.strip():
        raise ToolError(f"Task at index {index} missing required 'task' field")
    known = TASK_SCHEMA["properties"]
    unknown = sorted(value.keys() - known.keys())
    if unknown:
        raise ToolError(f"Task at index {index} has unknown field '{unknown[0]}'. Known fields: {', '.join(known)}")
    timeout = _read_field(index, value, "timeout_seconds", (int, float), "number")
    if timeout is not None and not is_float(timeout):
        raise ToolError(f"Task at index {index} has invalid 'timeout_seconds': must be finite, got {str(timeout)[:50]}")
    paths = _read_field(index, value, "context_paths", (list,), "list") or ()
    for place, path in enumerate(paths):
        if not isinstance(path, str):
            got = _name_type(path)
            raise ToolError(f"Task at index {index} has invalid context_paths[{place}]: expected string, got {got}")
    return _read_field(index, value, "subagent_type", (str,), "string"), Task(
        text,
        context=_read_field(index, value, "task_context", (str,), "string") or "",
        context_paths=tuple(paths),
        include_parent_workspace=_read_flag(index, value, "include_parent_workspace"),
        include_temp_workspace=_read_flag(index, value, "include_temp_workspace"),
        subagent_id=_read_field(index, value, "subagent_id", (str,), "string"),
        model=_read_field(index, value, "model", (str,), "string"),
        timeout_seconds=timeout,
        refine=refine,
    )


def _read_field(index: int, value: dict[str, Any], key: str, kinds: tuple[type, ...], expected: str) -> Any:
    """Return an optional field of a task. A boolean does not count as a number."""
    found = value.get(key)
    if found is not None and type(found) not in kinds:
        raise ToolError(f"Task at index {index} has invalid '{key}' type: expected {expected}, got {_name_type(found)}")
    return found


def _read_flag(index: int, value: dict[str, Any], key: str) -> bool:
    found = value.get(key, True)
    if not isinstance(found, bool):
        raise ToolError(f"Task at index {index} has invalid '{key}' type: expected boolean, got {_name_type(found)}")
    return found


def is_float(number: float) -> bool:
    """Return True for a number in the range of a float. Whole numbers may be larger."""
    return -sys.float_info.max <= number <= sys.float_info.max


def _name_type(value: Any) -> str:
    return type(value).__name__


def describe_status(result: Result[Any]) -> str:
    """Return the status in the words of this tool. A run with a partial answer has its own status."""
    match result.status:
        case "done":
            return "completed"
        case "timed_out":
            return "completed_but_timeout" if result.partial else "timeout"
        case "cancelled":
            return "cancelled"
        case _:
            return "partial" if result.partial else "error"


def make_result_entry(result: Result[Any], child: SpawnedRun, *, answer: str) -> dict[str, Any]:
    """Make the entry of one result in a blocking reply. `answer` is the text as far as it fits inline."""
    usage = result.usage if result.team is None else result.total_usage  # a team itself calls no model
    return {
        "subagent_id": result.subagent_id,
        "status": describe_status(result),
        "success": result.success,
        "answer": answer,
        "workspace": result.workspace,
        "execution_time_seconds": round(result.duration_ms / 1000, 3),
        "error": result.error_details,
        "token_usage": _describe_usage(usage),
        "log_path": child.status_file,
        "warning": result.warning,
        "timeout_seconds": child.timeout_seconds,
        **_describe_changes(result),
        **({} if result.team is None else {"team": _describe_team(result.team)}),
    }


def _describe_team(team: TeamReport) -> dict[str, Any]:
    """Return how a team reached its answer. The answers themselves are in the team's log."""
    return {
        "strategy": team.strategy,
        "winner": team.winner,
        "reason": team.reason,
        "votes": team.votes,
        "members": [
            {
                "agent": each.agent,
                "status": each.status,
                "answers": list(each.answers),
                "vote": each.vote,
                "reason": each.reason,
                "token_usage": _describe_usage(each.usage),
            }
            for each in team.contributions
        ],
    }


def _describe_usage(usage: Usage) -> dict[str, int]:
    return {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}


def _describe_changes(result: Result[Any]) -> dict[str, Any]:
    """Return the fields about files that a subagent changed in its own copy, and that the parent may apply."""
    if not result.changed_count:
        return {}
    listed = [f"{file.status} {file.path}" for file in result.changed_files[:LISTED_CHANGES]]
    return {"changed_files": listed, "changed_count": result.changed_count}


def make_blocking_reply(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Make the reply when all runs have ended. The summary counts every result once."""
    words = [entry["status"] for entry in entries]
    timeout = sum(word in ("timeout", "completed_but_timeout") for word in words)
    completed, cancelled = words.count("completed"), words.count("cancelled")
    return {
        "success": completed == len(entries),
        "operation": OPERATION,
        "mode": "blocking",
        "results": entries,
        "summary": {
            "total": len(entries),
            "completed": completed,
            "failed": len(entries) - completed - timeout - cancelled,
            "timeout": timeout,
            "cancelled": cancelled,
        },
    }


def make_background_reply(children: Sequence[SpawnedRun]) -> dict[str, Any]:
    """Make the reply for runs that continue in the background."""
    return {
        "success": True,
        "operation": OPERATION,
        "mode": "background",
        "subagents": [
            {
                "subagent_id": child.ref.subagent_id,
                "status": "running",
                "workspace": child.workspace,
                "status_file": child.status_file,
                "timeout_seconds": child.timeout_seconds,
                "agent": f"agent:{child.run}",
            }
            for child in children
        ],
        "note": "They run in the background. A notice comes when each has ended; get_agent then gives its result.",
    }


def make_error_reply(text: str) -> dict[str, Any]:
    return {"success": False, "operation": OPERATION, "error": text}
