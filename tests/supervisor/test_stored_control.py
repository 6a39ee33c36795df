"""Control of trees without a living process: it reads and applies as the others do, and starts nothing."""

from pathlib import Path
from typing import Any

import pytest

from retinue.build.logs import open_log
from retinue.core.approvals import Allow
from retinue.core.control import ClientOptions, Control
from retinue.core.errors import ConfigError, NotFound, RetinueError
from retinue.core.events import RunEnded
from retinue.core.profiles import Task
from retinue.supervisor.stored_control import StoredControl
from tests.control.loopback.kit import HANG, WRITE, serve_supervisor

EXPLORER = "explorer"


async def ended_tree(folder: Path, script: list[Any], **options: Any) -> str:
    """Run a tree to its end and close its supervisor; return the id of the tree."""
    async with serve_supervisor(folder, script={EXPLORER: script}, **options) as h:
        run = await h.supervisor.spawn(EXPLORER, Task("look"))
        await run.result()
        return run.tree


async def test_an_ended_tree_is_read_from_the_log(tmp_path: Path) -> None:
    tree = await ended_tree(tmp_path, ["found it"])
    log = open_log(tmp_path / ".retinue")
    try:
        control: Control = StoredControl(log, str(tmp_path / ".retinue"), project=str(tmp_path))
        result = await control.result(tree)
        assert result is not None and result == await control.wait(tree)
        assert (result.status, result.final_response) == ("done", "found it")
        assert (await control.describe_run(tree)).state == "done"
        assert (await control.find_run(tree[:6])).tree == tree
        assert [(info.tree, info.live) for info in await control.list_trees()] == [(tree, False)]
        assert await control.list_trees(live=True) == []
        events = [event async for event in control.watch(tree, after=2)]
        assert events[0].seq == 3 and isinstance(events[-1].body, RunEnded)  # type: ignore[union-attr]
        for name, run in (("nowhere", 0), (tree, 7)):
            with pytest.raises(NotFound):
                await control.result(name, run)
    finally:
        await log.close()


async def test_changes_of_an_ended_run_are_applied(tmp_path: Path) -> None:
    tree = await ended_tree(tmp_path, [WRITE, "end"], workspace="copy", mode="yes")
    log = open_log(tmp_path / ".retinue")
    try:
        control = StoredControl(log, str(tmp_path / ".retinue"), project=str(tmp_path))
        assert [file.path for file in (await control.changes(tree)).files] == ["a.txt"]
        assert "+x" in await control.diff(tree)
        assert [file.path for file in await control.apply(tree)] == ["a.txt"]
        assert (tmp_path / "a.txt").read_text() == "x"
        with pytest.raises(RetinueError, match="already"):
            await control.apply(tree)
    finally:
        await log.close()


async def test_commands_that_need_a_process_are_refused(tmp_path: Path) -> None:
    tree = await ended_tree(tmp_path, ["end"])
    log = open_log(tmp_path / ".retinue")
    try:
        control = StoredControl(log, str(tmp_path / ".retinue"), project=str(tmp_path))
        for refused in (
            control.spawn(EXPLORER, Task("x")),
            control.resume(tree),
            control.continue_run(tree, 0, "more"),
            control.open_client(ClientOptions(name="caller", task="x")),
            control.change_model(tree, 0, "nobody:knows"),
        ):
            with pytest.raises(ConfigError, match="no process is running this tree"):
                await refused
        assert await control.cancel(tree) is False
        assert (await control.send(tree, 0, "x", source="main", message_id="m1")).state == "too_late"
        assert await control.answer("any", Allow(), by="x") == "unknown"
        async with control.attend(tree):
            assert await control.pending() == []
    finally:
        await log.close()


async def test_an_interrupted_run_has_no_result(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path, script={EXPLORER: [HANG]}) as h:
        run = await h.supervisor.spawn(EXPLORER, Task("look"))
        await run.wait_until_logged()
        control = StoredControl(h.supervisor.log, str(tmp_path / ".retinue"), project=str(tmp_path))
        assert await control.result(run.tree) is None
        with pytest.raises(ConfigError, match="was interrupted"):
            await control.wait(run.tree)
