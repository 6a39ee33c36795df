"""Applying: three-way, all or nothing, also when it is stopped in the middle."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Allow, Approval, Deny, Profile
from retinue.core.errors import RetinueError
from retinue.core.events import ApprovalAsked, RunSpawned, ToolResult
from retinue.testing import scripted
from retinue.workspaces import atomic_apply, copies
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import bodies, call
from tests.surfaces.cli.shell import SOURCE
from tests.workspaces.kit import LINES, apply_copy, changes, copied, hashed, into, repository, seen, shell, work

CODER = Profile("coder", "You code.", workspace="worktree")


def plan(result: retinue.Result[Any], project: Path) -> Any:
    return into(project).plan([copied(result)])


async def test_all_kinds_of_changes_arrive(tmp_path: Path) -> None:
    project = repository(
        tmp_path / "p",
        **{"dir/x": "1\n", "dir/deep/y": "2\n", "swap": "file\n", "folder/f": "3\n", "run": "#!/bin/sh\n"},
    )
    (project / "a.txt").chmod(0o640)
    result = await work(
        project,
        "mv a.txt renamed.txt; echo more >> renamed.txt; rm -r dir; rm swap; mkdir swap; echo in > swap/inner;"
        "rm -r folder; echo now > folder; chmod +x run; ln -s run link; printf '\\0\\377' > binary; : > empty;"
        r"printf x > $'new\nline'; printf y > -- -dash; printf z > $'by\377te'; mkdir -p n/e/w; echo 1 > n/e/w/f",
    )
    apply_copy(result, project)
    made = Path(result.workspace)
    names = [line for line in hashed(made) if not line.startswith(".git")]
    assert sorted(names) == sorted(line for line in hashed(project) if not line.startswith(".git"))
    assert all(
        hashed(made)[name].split()[1] == hashed(project)[name].split()[1] for name in names if (made / name).is_file()
    )
    assert os.access(project / "run", os.X_OK) and os.readlink(project / "link") == "run"
    assert not (project / "dir").exists()
    assert sorted(os.listdir(project / ".retinue/applying")) == ["lock"]


async def test_what_both_changed_is_merged_by_lines_and_modes_are_kept(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", same="1\n", moved="m\n")
    (project / "a.txt").chmod(0o640)
    result = await work(project, "sed -i 's/^line 2$/line two/' a.txt; chmod +x a.txt; echo 2 > same; echo new > n")
    (project / "a.txt").write_text(LINES.replace("line 19\n", "line nineteen\n"))
    (project / "same").write_text("2\n")
    (project / "unrelated").write_text("mine\n")
    (project / "moved").unlink()
    made = plan(result, project)
    assert not made.conflicts and b"+line two" in made.diff and b"same" not in made.diff
    apply_copy(result, project)
    text = LINES.replace("line 19\n", "line nineteen\n").replace("line 2\n", "line two\n")
    assert (project / "a.txt").read_text() == text
    assert (project / "a.txt").stat().st_mode & 0o777 == 0o750
    assert not (project / "moved").exists() and (project / "unrelated").read_text() == "mine\n"
    one = copied(result)
    assert "were already applied" in one.explain_nothing_to_apply()


async def test_conflicts_are_named_one_by_one_and_nothing_is_changed(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", gone="g\n", edited="e\n", dir="d\n", link="l\n", up="u\n", **{"bin": "\0b"})
    result = await work(
        project,
        "echo x > a.txt; echo x >> gone; rm edited; echo x > added; echo x >> dir; mkdir sub; echo x > sub/f;"
        "rm link; ln -s a.txt link; printf '\\0x' > bin; echo fine > fine; mkdir thing; echo 1 > thing/f",
    )
    (project / "a.txt").write_text("y\n")
    (project / "gone").unlink()
    (project / "edited").write_text("y\n")
    (project / "added").write_text("y\n")
    (project / "dir").unlink()
    (project / "dir").mkdir()
    (project / "dir/keep").write_text("k")
    (project / "sub").write_text("a file")
    (project / "link").write_text("y\n")
    (project / "bin").write_text("\0y")
    os.mkfifo(project / "thing")
    before = hashed(project)
    found = {conflict.path: conflict.why for conflict in plan(result, project).conflicts}
    assert found == {
        "a.txt": "was changed here and by the run, in the same lines",
        "gone": "was deleted here and changed by the run",
        "edited": "was changed here and deleted by the run",
        "added": "was added here and by the run, with different content",
        "dir": "is a folder here",
        "sub/f": "cannot be reached: Not a directory",
        "link": "is a link, and both changed it",
        "bin": "was changed here and by the run, and is binary or too large to merge",
        "thing/f": "cannot be reached: Not a directory",
    }
    with pytest.raises(RetinueError, match=r"nothing was changed: .* of the files cannot be applied"):
        apply_copy(result, project)
    assert hashed(project) == before and copied(result).applied is None


async def test_a_file_that_changes_meanwhile_puts_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = repository(tmp_path / "p", b="b\n", c="c\n")
    result = await work(project, "echo 1 > b; echo 1 > c; rm a.txt; echo n > new/../n || echo n > n")
    made = plan(result, project)
    (project / "c").write_text("the user was faster\n")
    before = hashed(project)
    with pytest.raises(RetinueError, match="c was changed while it was being replaced"):
        into(project).carry_out(made, [copied(result)])
    assert hashed(project) == before and copied(result).applied is None
    (project / "c").write_text("c\n")
    (project / "n").write_text("in the way\n")
    before = hashed(project)
    with pytest.raises(RetinueError, match="File exists"):
        into(project).carry_out(made, [copied(result)])
    assert hashed(project) == before
    late = made.changes[1]
    assert late.path == "b"
    verify = atomic_apply._verify_old

    def meddle(kept: Path, change: Any) -> None:
        verify(kept, change)
        if change.path == "c":  # a write into the old file, after it was looked at and before it is replaced
            kept.write_text("in the last moment\n")

    (project / "n").unlink()
    monkeypatch.setattr(atomic_apply, "_verify_old", meddle)
    with pytest.raises(RetinueError, match="was changed while"):
        into(project).carry_out(made, [copied(result)])
    assert (project / "c").read_text() == "in the last moment\n" and (project / "b").read_text() == "b\n"


CRASH = """
import os, sys
from retinue.workspaces import atomic_apply as swapping
from retinue.workspaces import copies
state, tree, project, after = sys.argv[1:5]
left = [int(after)]
def counted(real):
    def call(*args, **more):
        if left[0] == 0:
            os._exit(9)
        left[0] -= 1
        return real(*args, **more)
    return call
for name in ("link", "rename", "replace", "unlink", "mkdir", "rmdir", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
one = copies.find_copy(state, tree, 0)
target = copies.TargetFolder(project, state=state)
target.carry_out(target.plan([one]), [one])
"""


async def test_a_crash_at_any_step_is_put_back_by_the_next_one(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", b="b\n", **{"d/e": "e\n"})
    changing = r"echo 1 > b; rm -r d; mkdir -p n/m; echo 1 > n/m/f; echo 2 >> a.txt; printf z > $'by\377te'"
    result = await work(project, changing)
    before, after = hashed(project), None
    state = project / ".retinue"
    steps = 0
    while after is None:
        done = subprocess.run(
            [sys.executable, "-c", CRASH, str(state), result.tree, str(project), str(steps)],
            env={**os.environ, "PYTHONPATH": SOURCE},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            after = hashed(project)
            break
        assert done.returncode == 9, done.stderr
        atomic_apply.recover_folder(str(state / "applying"), str(project))
        now = hashed(project)
        if now != before:  # it had got so far that only the tidying was left
            assert (
                (project / "n/m/f").exists() and (project / "b").read_text() == "1\n" and not (project / "d").exists()
            )
            assert copied(result).applied is None
            break
        steps += 1
    assert steps >= 10
    assert sorted(os.listdir(state / "applying")) == ["lock"]


async def test_a_crash_while_tidying_up_undoes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of the staged files is removed first."""
    project = repository(tmp_path / "p", b="b\n")
    result = await work(project, "echo 1 > b")
    aside = project / ".retinue/applying"

    def keep_two_and_die(kept: tuple[int, ...], staging: Path) -> None:
        for place, name in enumerate(sorted(os.listdir(staging))):
            if place not in kept:
                (staging / name).unlink()
        raise SystemExit

    for kept in combinations(range(4), 2):
        (project / "b").write_text("b\n")
        with monkeypatch.context() as crash, pytest.raises(SystemExit):
            crash.setattr(atomic_apply, "remove_tree", partial(keep_two_and_die, kept))
            apply_copy(result, project)
        atomic_apply.recover_folder(str(aside), str(project))
        assert (project / "b").exists() and (project / "b").read_text() == "1\n"
    assert os.listdir(aside) == ["lock"]


async def test_two_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    result = await work(project, "echo 1 > b")
    aside = f"{project}/.retinue/applying"
    with atomic_apply._hold_lock(aside), pytest.raises(RetinueError, match="another process is applying"):
        apply_copy(result, project)
    apply_copy(result, project)
    assert (project / "b").read_text() == "1\n"


async def test_the_changes_of_several_runs_are_put_together(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    agents = {
        "main": [{"tools": [{"name": "subagent_coder", "args": {"task": name}} for name in ("one", "two", "three")]},
                 {"text": "done"}],
        "one": [shell("sed -i 's/^line 2$/two/' a.txt"), {"text": "done"}],
        "two": [shell("sed -i 's/^line 10$/ten/' a.txt; echo 2 > b"), {"text": "done"}],
        "three": [shell("sed -i 's/^line 19$/nineteen/' a.txt"), {"text": "done"}],
    }  # fmt: skip
    result, _ = await seen(project, agents, profiles=[CODER])
    runs = copies.list_copies(f"{project}/.retinue", result.tree)
    assert len(runs) == 3
    made = into(project).plan(runs)
    into(project).carry_out(made, runs)
    expected = LINES.replace("line 2\n", "two\n").replace("line 10\n", "ten\n").replace("line 19\n", "nineteen\n")
    assert (project / "a.txt").read_text() == expected and (project / "b").read_text() == "2\n"


# The parent model's own


class Asked:
    """Answers every question, and keeps what was asked."""

    def __init__(self, *answers: Allow | Deny, before: Callable[[], None] = lambda: None) -> None:
        self.questions: list[Approval] = []
        self._answers = list(answers)
        self._before = before

    async def __call__(self, question: Approval) -> Allow | Deny:
        if question.tool != "apply_subagent":
            return Allow()
        self.questions.append(question)
        self._before()
        return self._answers.pop(0)


def parent(*ids: str) -> dict[str, Any]:
    return {
        "main": [call("subagent_coder", task="go"), *(call("apply_subagent", subagent_id=name) for name in ids),
                 {"text": "done"}],
        "coder": [shell("sed -i 's/^line 2$/two/' a.txt; echo new > b.txt"), {"text": "done"}],
    }  # fmt: skip


async def test_a_parent_applies_after_one_question_with_the_whole_diff(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    asked = Asked(Allow())
    _, events = await seen(project, parent("agent:1", "go"), profiles=[CODER], mode="ask", approver=asked)
    [question] = asked.questions
    assert "-line 2\n+two\n" in question.preview and "+++ b/b.txt\n" in question.preview
    assert bodies(events, ApprovalAsked)[-1].preview == question.preview
    first, second = [body for body in bodies(events, ToolResult, run=0) if body.name == "apply_subagent"]
    assert first.text == "Applied the changes of agent:1:\nmodified a.txt\nadded    b.txt"
    assert not second.success and "were already applied" in second.text
    assert (project / "a.txt").read_text() == LINES.replace("line 2\n", "two\n")


async def test_a_no_changes_nothing_and_what_cannot_be_is_not_asked(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    before = hashed(project)
    asked = Asked(Deny("not yet"))
    _, events = await seen(project, parent("1", "nobody"), profiles=[CODER], mode="ask", approver=asked)
    results = [body.text for body in bodies(events, ToolResult, run=0) if body.name == "apply_subagent"]
    assert results == [
        "The user denied this call: not yet",
        "apply_subagent: there is no subagent 'nobody' of this run",
    ]
    assert len(asked.questions) == 1 and hashed(project) == before


async def test_a_yes_is_to_what_was_shown(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")

    def meddle() -> None:
        (project / "a.txt").write_text(LINES.replace("line 19\n", "mine\n"))

    asked = Asked(Allow(), before=meddle)
    _, events = await seen(project, parent("1"), profiles=[CODER], mode="ask", approver=asked)
    assert "the files changed after the question was asked" in bodies(events, ToolResult, run=0)[-1].text
    assert (project / "a.txt").read_text() == LINES.replace("line 19\n", "mine\n")


async def test_a_child_that_conflicts_or_has_no_copy_is_said_without_a_question(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    plain = Profile("plain", "You write.", workspace="scratch")
    agents = parent("1", "agent:2")
    agents["main"].insert(1, shell("echo other > a.txt"))
    agents["main"].insert(2, call("subagent_plain", task="go"))
    agents["plain"] = [shell("echo note > note.txt"), {"text": "done"}]  # a workspace is made by the first call
    asked = Asked()
    _, events = await seen(project, agents, profiles=[CODER, plain], mode="ask", approver=asked)
    first, second = [body for body in bodies(events, ToolResult, run=0) if body.name == "apply_subagent"]
    assert "a.txt: was changed here and by the run, in the same lines" in first.text
    assert second.text.startswith("apply_subagent: agent:2 worked in no copy, so there is nothing to apply")
    assert not asked.questions and (project / "a.txt").read_text() == "other\n"


async def test_a_rule_that_denies_is_not_passed_by(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    before = hashed(project)
    asked = Asked()
    _, events = await seen(
        project, parent("1", "nobody"), profiles=[CODER], mode="ask", approver=asked, deny=["apply_subagent"]
    )
    results = [body.text for body in bodies(events, ToolResult, run=0) if body.name == "apply_subagent"]
    assert all("the rule apply_subagent forbids it" in text for text in results) and len(results) == 2
    assert not asked.questions and hashed(project) == before


async def test_a_grandchilds_changes_go_up_step_by_step(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    inner = Profile("inner", "You code too.", workspace="copy")
    agents = {
        "main": [call("subagent_coder", task="go"), {"text": "done"}],
        "coder": [shell("echo mine > mine.txt"), call("subagent_inner", task="go"),
                  call("apply_subagent", subagent_id="agent:2"), {"text": "done"}],
        "inner": [shell("echo theirs > theirs.txt; echo both >> mine.txt"), {"text": "done"}],
    }  # fmt: skip
    before = hashed(project)
    result, _ = await seen(project, agents, profiles=[CODER, inner])
    [coder] = result.children
    assert changes(coder) == {"mine.txt": "added", "theirs.txt": "added"}
    assert hashed(project) == before
    apply_copy(coder, project)
    assert (project / "mine.txt").read_text() == "mine\nboth\n" and (project / "theirs.txt").exists()


async def test_the_library_shows_and_applies(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    model = scripted({"main": [shell("echo 1 > b"), {"text": "done"}]})
    async with retinue.open(project=project, mode="yes") as r:
        run = await r.spawn(Profile("main", model=model, workspace="worktree"), "go")
        with pytest.raises(RetinueError, match="has not ended yet"):
            await run.apply()
        await run.result()
        assert "+++ b/b\n" in await run.diff()
        assert [(file.status, file.path) for file in await run.apply()] == [("added", "b")]
        with pytest.raises(RetinueError, match="were already applied"):
            await run.apply()
        plain = await r.spawn(Profile("main", model=model), "go")
        await plain.result()
        with pytest.raises(RetinueError, match="worked in no copy"):
            await plain.diff()
    assert (project / "b").read_text() == "1\n"
    assert not (project / ".retinue").exists()


@needs_bubblewrap
async def test_a_sandboxed_run_without_a_repository_works_in_no_copy(tmp_path: Path) -> None:
    """Only in a repository, a subagent whose profile names no workspace gets a copy."""
    model = scripted({"main": [call("subagent_helper", task="go"), "done"], "helper": ["fine"]})
    profile = Profile("main", model=model, tools=[Profile("helper", runtime="isolated")], runtime="isolated")
    async with retinue.open(project=tmp_path, mode="yes") as r:
        run = await r.spawn(profile, "go")
        first, second = bodies([event async for event in run.events()], RunSpawned)
    assert copies.is_unmade(first) and not copies.is_unmade(second)
