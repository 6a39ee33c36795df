"""A tree of depth 3 whose runs leave marks that must not be left twice, and what must hold after crashes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from retinue.build.logs import open_log_reader
from retinue.core.events import Event, RunEnded, RunSpawned, ToolCall, ToolResult, TurnEnded
from retinue.log.runs import Runs
from tests.surfaces.cli.shell import Project

ANSWER = "the whole is done"
LEAVES = ("leaf-a", "leaf-b", "leaf-c", "leaf-d")
MARKS = "marks.txt"


def _spawn(*tasks: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"name": "spawn_subagents", "args": {"tasks": list(tasks), **more}}


def _leaf(name: str) -> dict[str, str]:
    return {"task": f"do {name}", "subagent_id": name}


def agents(folder: Path, *, delay: float = 0.0) -> dict[str, Any]:
    """Return the script of the tree. Between two turns a leaf appends its name to a file through the shell."""

    def mark(name: str) -> dict[str, Any]:
        return {"name": "shell", "args": {"command": f"echo {name} >> '{folder / MARKS}'; echo marked"}}

    usage = {"input_tokens": 100, "output_tokens": 10}
    leads = {"task": "left half", "subagent_id": "left"}, {"task": "right half", "subagent_id": "right"}
    script: dict[str, Any] = {
        "main": [
            {"thinking": "I ask a lead.", "tools": [_spawn({"task": "lead", "subagent_id": "lead"})]},
            {"tools": [mark("main")]},
            {"text": ANSWER},
        ],
        "lead": [{"tools": [_spawn(*leads)]}, {"text": "both halves are done"}],
        "left": [{"text": "I ask two.", "tools": [_spawn(_leaf("leaf-a"), _leaf("leaf-b"))]}, {"text": "left done"}],
        "right": [
            {"tools": [_spawn(_leaf("leaf-c"), background=True), _spawn(_leaf("leaf-d"))]},
            {"text": "waiting"},
            {"text": "right done"},
        ],
    }
    for leaf in LEAVES:
        script[leaf] = [{"text": f"{leaf} begins", "tools": [mark(leaf)]}, {"text": f"{leaf} is done"}]
    for replies in script.values():
        for reply in replies:
            reply |= {"usage": usage, "delay": delay}
    return script


def events(project: Project) -> list[Event]:
    """All of the one tree there is, whatever happened to its process."""
    log = open_log_reader(project.folder / ".retinue")
    found = asyncio.run(log.list_trees())
    assert len(found) == 1, "there should be one tree"
    return asyncio.run(log.read(found[0].tree))


def marks(project: Project) -> Counter[str]:
    """Count the marks in the project and in the workspaces of its runs."""
    files = [*project.folder.glob(MARKS), *project.folder.glob(f".retinue/runs/*/[0-9]*/workspace/{MARKS}")]
    return Counter(word for file in files for word in file.read_text().split())


def check(project: Project, before: list[Event]) -> list[Event]:
    """Check the log of a tree that was resumed to its end after a crash, which left the events `before`."""
    now = events(project)
    assert now[: len(before)] == before, "what was written must stay as it was"
    assert [event.seq for event in now] == list(range(1, len(now) + 1)), "the order has a gap"
    assert Counter(marks(project).values()).keys() <= {1}, f"a side effect happened twice: {marks(project)}"
    for run in {event.run for event in now}:
        own = [event for event in now if event.run == run]
        assert isinstance(own[0].body, RunSpawned)
        assert [isinstance(event.body, RunEnded) for event in own].count(True) == 1
        assert isinstance(own[-1].body, RunEnded)
        calls = Counter(event.body.call_id for event in own if isinstance(event.body, ToolCall))
        results = Counter(event.body.call_id for event in own if isinstance(event.body, ToolResult))
        assert calls == results and set(calls.values()) <= {1}, "every call has one result"
        turns = [event.body.turn for event in own if isinstance(event.body, TurnEnded)]
        assert turns == list(range(1, len(turns) + 1)), "turns go on where they were"
    runs = Runs.of(now[0].tree, now).runs
    assert {view.status for view in runs.values()} == {"done"}
    assert len(runs) == 8, "children were lost, or made twice"
    unknown = {event.run for event in now if isinstance(event.body, ToolResult) and event.body.outcome}
    for view in runs.values():  # a mark is missing only where the model was told that nobody knows
        who = "main" if view.number == 0 else view.spawned.subagent_id
        if who in ("main", *LEAVES):
            assert marks(project)[who] == 1 or view.number in unknown, who
    return now
