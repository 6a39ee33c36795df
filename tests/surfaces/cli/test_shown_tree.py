"""A tree shown to its end: the changes in it that nobody has applied yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

from retinue.build.parts import Parts
from retinue.core.changes import RunCopy
from retinue.core.control import Control, RunHandle
from retinue.core.errors import LogError
from retinue.core.events import Event
from retinue.core.messages import RunRef
from retinue.core.results import Result
from retinue.core.usage import NO_USAGE
from retinue.surfaces.cli.live import Display, UnappliedChanges, run_and_show
from retinue.surfaces.printer.printer import Printer
from tests.surfaces.printer.facts import MAIN, Facts, Recorder


def make_result(run: int, *, changed: int = 0, children: tuple[Result[Any], ...] = ()) -> Result[Any]:
    return Result(
        name="main", final_response="done", total_turns=1, tool_count=0, tool_logs=(), usage=NO_USAGE, cost=None,
        success=True, duration_ms=1, error_details=None, status="done", tree="t1", run=run, path="/main",
        changed_count=changed, children=children,
    )  # fmt: skip


class FailedLog:
    """A Control whose log failed after the first event: its tree has ended, and the screen never sees a child."""

    writer = "w1"

    def __init__(self) -> None:
        self.first = Facts().spawn(MAIN, "main")
        self.is_seen = asyncio.Event()

    async def prepare(self, profile: object, say: object) -> None:
        """Connect to no server."""

    async def close(self) -> None:
        """End nothing."""

    async def watch(self, tree: str, *, deltas: bool) -> AsyncIterator[Event]:
        yield self.first
        self.is_seen.set()
        await asyncio.Event().wait()

    async def wait(self, tree: str, run: int) -> Result[Any]:
        await self.is_seen.wait()
        return make_result(0, children=(make_result(1, changed=2),))

    async def describe_run(self, tree: str, run: int) -> Any:
        raise LogError("the log failed")

    async def list_copies(self, tree: str) -> list[RunCopy]:
        raise LogError("the log failed")

    def cancel(self, tree: str, run: int) -> None:
        raise AssertionError("nobody cancels")

    def kill(self, tree: str) -> None:
        raise AssertionError("nobody kills")

    async def list_trees(self, *, live: bool) -> list[Any]:
        return []


async def test_changes_of_a_child_that_the_screen_never_saw_can_be_applied(tmp_path: Path) -> None:
    control = cast(Control, FailedLog())

    async def begin(_: Control) -> RunHandle:
        return RunHandle(control, RunRef("t1", 0, "/main", "main", "main", "id_0"))

    parts, display = Parts(tmp_path), Display(printer=Printer(Recorder()))
    shown = await run_and_show(parts, begin, display, serves=False, make=lambda _: control)
    assert list(shown.runs.runs) == [0] and shown.runs.runs[0].spawned.workspace_kind not in ("copy", "worktree")
    assert shown.unapplied == [UnappliedChanges("t1/1", 2)]
