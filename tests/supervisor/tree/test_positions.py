"""Two records are built by position, because so many names take so long: every value is where its name says."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import retinue
from retinue import Limits, Profile, Task
from retinue.core.caller import ClientRequest
from retinue.core.events import RunEnded, RunSpawned, RunStarted
from retinue.core.results import ChangedFile, ToolLog
from retinue.core.usage import Usage
from retinue.log.runs import RunView
from retinue.testing import FixedPrices, scripted
from tests.supervisor.tree.kit import bodies, call


def test_every_field_of_a_result() -> None:
    spawned = RunSpawned(None, "label", 0, "task", "subagent_id", "workspace")
    changed = (ChangedFile("added", "file"),)
    ended = RunEnded("failed", "final_response", 3, "error_details", "partial", "structured", "", changed, 9, "code")
    logs = (ToolLog("read", "Read", "", "1 lines", True, 0),)
    started = RunStarted("isolated", ("uid", "net"))
    view = RunView(
        7, "path", "name", 0.0, spawned, started=started, sandbox=("uid",), ended=ended, turns=1, tool_count=2,
        tool_logs=logs, usage=Usage(5, 6), cost=Decimal(4), warnings=("warning",),
    )  # fmt: skip
    result = view.result("tree")
    found = {name: getattr(result, name) for name in result.__struct_fields__ if name != "parse"}
    texts = "name", "final_response", "error_details", "tree", "path", "label", "subagent_id", "workspace", "code"
    assert {name: found.pop(name) for name in (*texts, "structured", "partial", "warning")} == {
        name: name for name in (*texts, "structured", "partial", "warning")
    }
    assert found == {
        "total_turns": 1, "tool_count": 2, "tool_logs": logs, "usage": Usage(5, 6), "cost": Decimal(4),
        "success": False, "duration_ms": 3, "status": "failed", "run": 7, "changed_files": changed, "changed_count": 9,
        "runtime": "isolated", "sandbox": ("uid",), "children": (), "replies": (), "team": None, "rounds": (),
    }  # fmt: skip


async def test_every_field_of_a_first_event(tmp_path: Path) -> None:
    path = str(tmp_path / "shown")
    Path(path).touch()
    limits = Limits(turns=11, seconds=12.0, tokens=13_000, cost=Decimal(14), stall=15.0)
    child = Profile("child", "Help.", tools=[])
    handing_over = call("subagent_child", task="help", background=True)
    model = scripted({"main": [handing_over, "done", "done"], "child": ["helped"]})
    request = ClientRequest(surface="a2a", client="me", context="c", message="m")
    names = {"subagent_id": "me", "label": "label"}
    task = Task("task", "task_context", [path], include_parent_workspace=False, request=request, **names)
    async with retinue.open(mode="yes", prices=FixedPrices({"*": ("1", "1")})) as r:
        run = await r.spawn(Profile("main", "Work.", model=model, tools=[child]), task, limits=limits)
        await run.result()
        first, second = bodies([event async for event in run.events()], RunSpawned)
    assert re.fullmatch("[0-9a-f]{32} [0-9a-f]{16}", f"{first.trace_id} {first.span_id}")
    assert b"Work." in bytes(first.profile) and b"subagent_child" in bytes(first.tools)
    assert fields(first) == {
        "parent": None, "label": "label", "depth": 0, "task": "task", "subagent_id": "me", "workspace": str(Path.cwd()),
        "task_context": "task_context", "model": "ScriptedModel", "call_id": "", "background": False, "queued": False,
        "timeout_seconds": 12.0, "max_turns": 11, "max_tokens": 13_000, "max_cost": Decimal(14), "stall_seconds": 15.0,
        "limits": limits, "context_paths": (path,), "include_parent_workspace": False, "include_temp_workspace": True,
        "continues": None, "origin": "", "traceparent": "", "baggage": "", "server": "", "reported": "",
        "remote_id": "", "request": request, "files": (), "conversation": False, "rounds": None,
        "workspace_kind": "shared", "client": False,
    }  # fmt: skip
    told = fields(second)
    assert (told["parent"], told["depth"], told["background"], told["queued"]) == (0, 1, True, False)
    assert (told["call_id"], told["max_tokens"], told["max_cost"], told["limits"]) == ("call_1_1", None, None, None)
    assert (told["workspace_kind"], told["client"]) == ("scratch", False)
    assert (second.trace_id, told["include_parent_workspace"]) == (first.trace_id, True)


def fields(spawned: RunSpawned) -> dict[str, Any]:
    """Return the fields that are known before the spawn."""
    minted = "profile", "tools", "trace_id", "span_id"
    return {name: getattr(spawned, name) for name in spawned.__struct_fields__ if name not in minted}
