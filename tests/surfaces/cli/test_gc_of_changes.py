"""`retinue gc` where a tree that stays for its changes stands on others."""

import time
from pathlib import Path

import retinue
from retinue import Profile
from retinue.build.logs import open_log_reader, open_stored_control
from retinue.surfaces.cli.gc import remove_old_trees
from retinue.testing import scripted
from tests.workspaces.kit import repository, shell


async def test_what_a_tree_with_changes_continues_stays_too(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    state = project / ".retinue"
    plain = Profile("main", model=scripted({"main": ["said"]}))
    coder = Profile("main", model=scripted({"main": [shell("echo 1 > b"), "done", "again"]}), workspace="worktree")
    async with retinue.open(state, mode="yes") as r:
        first = await r.run(plain, "go")
        second = await (await r.continue_run(first, "more", profiles=[coder])).result()
    later = time.time() + 60
    report = await remove_old_trees(open_log_reader(state), state, before=later, changes=open_stored_control(state))
    assert (report.removed, report.kept) == ([], {second.tree: [f"{second.tree}/0"]})
    async with retinue.open(state, mode="yes") as r:
        third = await (await r.continue_run(first, "again", profiles=[plain])).result()
        assert third.status == "done"
    (state / "runs" / second.tree / "0/workspace.json").write_text("{")
    report = await remove_old_trees(open_log_reader(state), state, before=later, changes=open_stored_control(state))
    assert (report.removed, report.kept) == ([third.tree], {second.tree: [f"{second.tree}/0"]}), (
        "what is unreadable stays"
    )
    report = await remove_old_trees(open_log_reader(state), state, before=later)
    assert sorted(report.removed) == sorted([first.tree, second.tree])
