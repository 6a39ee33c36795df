"""diff, apply, gc and run --workspace as a user types them."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from retinue.workspaces.atomic_apply import Journal, write_journal
from tests.sandbox.places import needs_bubblewrap
from tests.surfaces.cli.shell import Project, one_line_error, read_until
from tests.surfaces.cli.test_terminal import HOSTILE, UNSEEN, Terminal
from tests.workspaces.kit import LINES, git, hashed, repository, shell

EDIT = [shell("sed -i 's/^line 2$/two/' a.txt; echo new > b.txt; rm c.txt; printf '\\0' > bin"), {"text": "the answer"}]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(repository(tmp_path / "p", **{"c.txt": "c\n", "retinue.yaml": "", ".gitignore": "script.yaml\n"}))


def edited(project: Project, *arguments: str, agents: Any = None) -> str:
    """The tree of a run that changed four files in a worktree."""
    done = project.run("--yes", "--workspace", "worktree", "--json", *arguments, agents=agents or {"main": EDIT})
    assert done.returncode == 0, done.stderr
    tree: str = json.loads(done.stdout)["tree"]
    return tree


def test_a_worktree_outside_git_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    project = Project(tmp_path / "plain")
    said = project.run("--yes", "--workspace", "worktree", agents={"main": ["the answer"]})
    assert one_line_error(said) == (
        f"workspace 'worktree' needs a git repository, and {project.folder} is in none: use copy"
    )
    assert project.rows() == []
    done = project.run("--yes", "--workspace", "copy", agents={"main": ["the answer"]})
    assert done.returncode == 0, done.stderr


def test_run_diff_apply_and_apply_again(project: Project) -> None:
    before = hashed(project.folder)
    done = project.run("--yes", "--workspace", "worktree", agents={"main": EDIT})
    assert done.stdout == "the answer\n"
    tree = project.rows()[0]["tree"]
    last = done.stderr.rstrip().splitlines()[-1]
    assert last == f"4 files changed, not applied: retinue diff {tree}/0 · retinue apply {tree}/0"
    assert {name: value for name, value in hashed(project.folder).items() if name != "script.yaml"} == before
    diff = project.retinue("diff").stdout
    assert "-line 2\n+two\n" in diff and "Binary files /dev/null and b/bin differ" in diff and "\x1b" not in diff
    assert "\x1b[32m+two\x1b[0m" in project.retinue("diff", FORCE_COLOR="1", NO_COLOR="").stdout
    assert project.retinue("diff", "--stat").stdout.endswith(" 4 files changed, 2 insertions(+), 2 deletions(-)\n")
    files = json.loads(project.retinue("diff", "--json").stdout)
    assert [(file["status"], file["path"], file["binary"]) for file in files] == [
        ("modified", "a.txt", False), ("added", "b.txt", False), ("added", "bin", True), ("deleted", "c.txt", False)
    ]  # fmt: skip
    result = json.loads(project.retinue("show", "--json").stdout)
    assert result["changed_count"] == 4
    assert result["changed_files"][0] == {"status": "modified", "path": "a.txt"}
    assert "changed files\n  modified a.txt\n" in project.retinue("show").stdout
    why = one_line_error(project.retinue("apply"))
    assert why == "there is no terminal to ask on: look with `retinue diff`, then give --yes"
    assert project.retinue("apply", "--yes").stdout == f"Applied 4 files from {tree}/0.\n"
    assert (project.folder / "b.txt").read_text() == "new\n" and not (project.folder / "c.txt").exists()
    assert git(project.folder, "diff", "--cached") == ""
    again = project.retinue("apply", "--yes")
    assert again.returncode == 0 and f"all changes of {tree}/0 were already applied to" in again.stderr
    assert f"\n  changes     applied to {project.folder}, " in project.retinue("show").stdout


def test_conflicts_are_told_by_file(project: Project) -> None:
    edited(project)
    (project.folder / "a.txt").write_text("mine\n")
    (project.folder / "b.txt").write_text("mine\n")
    before = hashed(project.folder)
    done = project.retinue("apply", "--yes")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "retinue: nothing was changed: 2 of the files cannot be applied:",
        "  a.txt: was changed here and by the run, in the same lines",
        "  b.txt: was added here and by the run, with different content",
    ]
    assert hashed(project.folder) == before


def test_a_tree_whose_primary_is_in_the_project(project: Project) -> None:
    (project.folder / "retinue.yaml").write_text(
        "profiles:\n  coder: {description: codes, instructions: code, workspace: worktree}\n"
        "orchestrator: {coordination: {subagent_types: [coder]}}\n"
    )
    agents = {
        "main": [
            {"tools": [{"name": "subagent_coder", "args": {"task": name}} for name in ("one", "two")]},
            {"text": "done"},
        ],
        "one": [shell("echo 1 > one"), {"text": "done"}],
        "two": [shell("echo 2 > two"), {"text": "done"}],
    }
    done = project.run("--yes", agents=agents)
    tree = project.rows()[0]["tree"]
    assert f"1 file changed, not applied: retinue diff {tree}/2 · retinue apply {tree}/2" in done.stderr
    assert "+1\n" in project.retinue("diff").stdout and "+2\n" in project.retinue("diff").stdout
    assert project.retinue("apply", f"{tree}/1", "--yes").stdout == f"Applied 1 file from {tree}/1.\n"
    rest = project.retinue("apply", tree, "--yes")
    assert rest.stdout == f"Applied 1 file from {tree}/2.\n" and f"{tree}/1 were already applied" in rest.stderr
    assert (project.folder / "one").exists() and (project.folder / "two").exists()


def test_what_worked_in_no_copy_and_what_is_wrong(project: Project) -> None:
    project.run("--yes", agents={"main": [{"text": "done"}]})
    tree = project.rows()[0]["tree"]
    for command in ("diff", "apply"):
        assert one_line_error(project.retinue(command)).startswith(f"{tree}/0 worked in no copy, so there is nothing")
        assert one_line_error(project.retinue(command, "nobody")).startswith("no run is called 'nobody'")
    edited(project, agents={"main": [{"text": "done"}]})
    assert project.retinue("diff").stderr.endswith("/0 changed no files\n")
    assert project.retinue("apply").returncode == 0
    assert "invalid choice" in one_line_error(project.retinue("run", "x", "--workspace", "elsewhere"))


def test_at_a_terminal_it_shows_the_diff_and_asks(project: Project) -> None:
    name = json.dumps(HOSTILE.replace("\r", "").replace("/", ""))
    agents = {"main": [shell(f"python3 -c 'import sys; open({name}, \"w\").write({name})'"), {"text": "done"}]}
    edited(project, agents=agents)
    for answer, code in (("n", 1), ("y", 0)):
        terminal = Terminal(project, "apply")
        terminal.read_until("apply these changes? [y/N] ")
        terminal.type(f"{answer}\n")
        screen = terminal.read_until(None)
        assert terminal.end() == code
        assert "evil" in screen and not UNSEEN & set(screen)
        assert ("Nothing was changed." in screen) == (code == 1)
    assert any("evil" in entry for entry in os.listdir(project.folder))


def test_keys_typed_before_the_diff_was_shown_answer_nothing(project: Project) -> None:
    edited(project)
    terminal = Terminal(project, "apply", typed="y\n")
    terminal.read_until("apply these changes? [y/N] ")
    terminal.type("\n")
    screen = terminal.read_until(None)
    assert terminal.end() == 1 and "Nothing was changed." in screen
    assert not (project.folder / "b.txt").exists()


def test_a_run_that_was_killed_can_still_be_applied_and_a_live_one_looked_at(project: Project) -> None:
    model = project.script({"main": [shell("echo 1 > b.txt; echo shown"), {"hang": True}]})
    with project.running("run", "x", "--yes", "--workspace", "worktree", "--model", model) as process:
        assert process.stderr is not None
        read_until(process.stderr, "shown\n")
        assert "+1\n" in project.retinue("diff").stdout
        assert "has not ended yet" in one_line_error(project.retinue("apply", "--yes"))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert project.retinue("diff", "--stat").stdout.startswith(" b.txt | 1 +")
    assert project.retinue("apply", "--yes").returncode == 0
    assert (project.folder / "b.txt").read_text() == "1\n"


def test_a_cancelled_run_says_what_it_had_changed(project: Project) -> None:
    model = project.script({"main": [shell("echo 1 > b.txt; echo shown"), {"hang": True}]})
    with project.running("run", "x", "--yes", "--workspace", "copy", "--json", "--model", model) as process:
        assert process.stderr is not None and process.stdout is not None
        read_until(process.stderr, "shown\n")
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        result = json.loads(process.stdout.read())
    assert result["status"] == "cancelled" and result["changed_files"] == [{"status": "added", "path": "b.txt"}]
    assert "1 file changed, not applied" in rest


def test_gc_keeps_what_nobody_took_over_until_forced(project: Project) -> None:
    first, second = edited(project), edited(project, agents={"main": [{"text": "done"}]})
    workspace = project.folder / ".retinue/runs" / first / "0/workspace"
    done = project.retinue("gc", "--older-than", "0s", "--json")
    report = json.loads(done.stdout)
    assert report["removed"] == [second] and report["kept"] == {first: [f"{first}/0"]}
    assert f"kept, because its changes were not applied: {first}/0" in done.stderr
    assert workspace.exists()
    assert project.retinue("gc", "--older-than", "0s").stdout == "Nothing more here is older than 0.00 s.\n"
    assert project.retinue("apply", first, "--yes").returncode == 0
    assert json.loads(project.retinue("gc", "--older-than", "0s", "--json").stdout)["removed"] == [first]
    third = edited(project)
    assert project.retinue("gc", "--older-than", "0s", "--dry-run", "--force").stdout.endswith(f"{third}\n")
    assert json.loads(project.retinue("gc", "--older-than", "0s", "--force", "--json").stdout)["removed"] == [third]
    assert not workspace.parent.parent.exists()


def test_an_apply_that_died_is_undone_first(project: Project) -> None:
    edited(project)
    staging = project.folder / ".retinue/applying/0123"
    staging.mkdir(parents=True)
    (staging / "new-0").write_text("half\n")
    os.link(staging / "new-0", project.folder / "b.txt")
    journal = Journal(root=str(project.folder), paths=("b.txt",), removed=(), folders=())
    write_journal(staging, journal)
    done = project.retinue("apply", "--yes")
    assert "an earlier apply was interrupted: what it had done is undone" in done.stderr
    assert done.returncode == 0 and (project.folder / "b.txt").read_text() == "new\n"
    assert (project.folder / "a.txt").read_text() == LINES.replace("line 2\n", "two\n")


def test_a_copy_stays_a_copy_when_a_run_goes_on(project: Project) -> None:
    before = hashed(project.folder)
    agents = {"main": [shell("echo 1 > one"), shell("echo 2 > two"), {"text": "end"}]}
    died = project.run("--yes", "--workspace", "worktree", agents=agents, RETINUE_FAILPOINT="turn.started:2")
    assert died.returncode == -signal.SIGKILL
    result = json.loads(project.retinue("resume", "--yes", "--json").stdout)
    assert [file["path"] for file in result["changed_files"]][:1] == ["one"]
    done = project.retinue("continue", result["tree"], "more", "--yes", "--json")
    again = json.loads(done.stdout)
    assert again["workspace"] != result["workspace"] and again["changed_count"] == 2
    assert {name: value for name, value in hashed(project.folder).items() if name != "script.yaml"} == before


@pytest.mark.finding("U3")
@pytest.mark.parametrize("kind", ["worktree", "copy"])
def test_a_continued_run_goes_on_with_the_files_of_the_old_one(project: Project, kind: str) -> None:
    first = [shell("echo one > one.txt; rm c.txt"), {"text": "first"}]
    done = project.run("--yes", "--workspace", kind, "--json", agents={"main": first})
    tree = json.loads(done.stdout)["tree"]
    second = [shell("cat one.txt; ls c.txt; echo two > two.txt"), {"text": "{{last_result}}"}]
    project.script({"main": second})
    done = project.retinue("continue", tree, "more", "--yes", "--json")
    again = json.loads(done.stdout)
    assert again["final_response"].startswith("one\n"), done.stderr
    assert again["changed_count"] == 3
    diff = project.retinue("diff").stdout
    assert "+one" in diff and "+two" in diff and "-c" in diff
    assert project.retinue("apply", "--yes").returncode == 0
    texts = [(project.folder / name).read_text() for name in ("one.txt", "two.txt")]
    assert (texts, (project.folder / "c.txt").exists()) == (["one\n", "two\n"], False)


@pytest.mark.finding("U3")
def test_a_continued_run_that_only_talks_keeps_the_changes_and_applied_ones_are_not_shown_again(
    project: Project,
) -> None:
    tree = edited(project)
    project.script({"main": [{"text": "only words"}]})
    talked = json.loads(project.retinue("continue", tree, "explain", "--yes", "--json").stdout)
    assert talked["changed_count"] == 4
    assert project.retinue("apply", "--yes").returncode == 0
    assert (project.folder / "b.txt").read_text() == "new\n"
    project.script({"main": [shell("cat b.txt; echo more > d.txt"), {"text": "{{last_result}}"}]})
    again = json.loads(project.retinue("continue", talked["tree"], "more", "--yes", "--json").stdout)
    assert (again["final_response"].strip(), again["changed_count"]) == ("new", 1)
    assert "+more" in project.retinue("diff").stdout


COMMIT = "git -c user.name=t -c user.email=t@t commit -qam kept"


def continued(project: Project, name: str, *commands: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """The result of a run that continues another one with these commands."""
    project.script({"main": [*map(shell, commands), {"text": "{{last_result}}" if commands else "only words"}]})
    done = project.retinue("continue", name, "more", "--yes", "--json", *options)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.finding("U3")
def test_a_chain_of_continued_runs_keeps_commits_ignored_files_and_every_change(project: Project) -> None:
    first = [shell(f"echo one > one.txt; git add one.txt; {COMMIT}; echo mine > script.yaml"), {"text": "first"}]
    tree = edited(project, agents={"main": first})
    second = continued(project, tree, "cat one.txt script.yaml; git status --short; echo two >> one.txt")
    assert second["final_response"].split("\n")[:3] == ["one", "mine", "?? one.txt"]  # the commit's files, uncommitted
    third = continued(project, second["tree"])
    fourth = continued(project, third["tree"], "cat one.txt script.yaml; echo four > four.txt")
    assert fourth["final_response"].split() == ["one", "two", "mine"]
    assert [file["path"] for file in fourth["changed_files"]] == ["four.txt", "one.txt"]
    diff = project.retinue("diff").stdout
    assert "+one\n+two\n" in diff and "+four\n" in diff
    other = continued(project, tree, "cat one.txt")  # the first run again, in another direction
    assert other["final_response"] == "one\n"
    assert project.retinue("apply", f"{tree}/0", "--yes").returncode == 0
    assert project.retinue("apply", f"{fourth['tree']}/0", "--yes").returncode == 0
    texts = [(project.folder / name).read_text() for name in ("one.txt", "four.txt")]
    assert texts == ["one\ntwo\n", "four\n"]
    assert (project.folder / "script.yaml").read_text() != "mine\n"


@pytest.mark.finding("U3")
def test_a_continued_run_in_a_scratch_folder_finds_the_files_of_the_old_one(project: Project) -> None:
    first = [shell("mkdir d; echo one > d/one.txt; ln -s d/one.txt link"), {"text": "first"}]
    done = project.run("--yes", "--workspace", "scratch", "--json", agents={"main": first})
    second = continued(project, json.loads(done.stdout)["tree"])
    third = continued(project, second["tree"], "cat link; echo two > two.txt")
    assert third["final_response"] == "one\n"
    fourth = continued(project, third["tree"], "cat d/one.txt two.txt")
    assert fourth["final_response"] == "one\ntwo\n"
    assert len({each["workspace"] for each in (second, third, fourth)}) == 3


@pytest.mark.finding("U3")
@pytest.mark.parametrize("kind", ["scratch", "copy"])
def test_a_subagent_continues_with_its_files_too(project: Project, kind: str) -> None:
    (project.folder / "retinue.yaml").write_text(f"profiles:\n  kid: {{description: k, workspace: {kind}}}\n")
    spawning = {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "x", "subagent_type": "kid"}]}}]}
    agents = {"main": [spawning, {"text": "end"}], "kid": [shell("echo one > one.txt"), {"text": "kid done"}]}
    tree = json.loads(project.run("--yes", "--json", agents=agents).stdout)["tree"]
    project.script({"kid": [shell("cat one.txt; echo two > two.txt"), {"text": "{{last_result}}"}]})
    again = json.loads(project.retinue("continue", f"{tree}/1", "more", "--yes", "--json").stdout)
    assert (again["run"], again["final_response"]) == (2, "one\n")
    project.script({"kid": [shell("cat one.txt two.txt"), {"text": "{{last_result}}"}]})
    last = json.loads(project.retinue("continue", f"{tree}/2", "more", "--yes", "--json").stdout)
    assert last["final_response"] == "one\ntwo\n"
    assert last["changed_count"] == (2 if kind == "copy" else 0)


@pytest.mark.finding("U3")
def test_a_run_that_left_no_workspace_passes_on_that_of_the_run_before_it(project: Project) -> None:
    tree = edited(project)
    second = continued(project, tree)
    shutil.rmtree(project.folder / ".retinue/runs" / second["tree"])
    third = continued(project, second["tree"], "cat b.txt")
    assert (third["final_response"], third["changed_count"]) == ("new\n", 4)
    shutil.rmtree(Path(third["workspace"]))
    project.script({"main": [shell("ls"), {"text": "end"}]})
    lost = project.retinue("continue", third["tree"], "more", "--yes")
    assert lost.returncode == 1 and f"apply its changes (`retinue apply {third['tree']}/0`)" in lost.stderr
    assert project.retinue("apply", third["tree"], "--yes").returncode == 0


@needs_bubblewrap
@pytest.mark.finding("U3")
def test_a_run_that_continues_in_another_runtime_has_the_files_too(project: Project) -> None:
    done = project.run("--yes", "--json", "--runtime", "isolated", agents={"main": EDIT})
    second = continued(project, json.loads(done.stdout)["tree"], "cat b.txt", options=("--runtime", "inherited"))
    assert (second["final_response"], second["changed_count"]) == ("new\n", 4)
    third = continued(project, second["tree"], "cat b.txt", options=("--runtime", "isolated"))
    assert (third["final_response"], third["changed_count"]) == ("new\n", 4)
    assert not (project.folder / "b.txt").exists()


@pytest.mark.finding("U3")
def test_after_gc_a_run_that_is_left_can_be_continued_and_one_that_is_gone_is_said(project: Project) -> None:
    tree = edited(project)
    second = continued(project, tree)
    assert project.retinue("apply", "--yes").returncode == 0
    gone = json.loads(project.retinue("gc", "--older-than", "0s", "--json").stdout)
    assert gone["removed"] == [second["tree"]]  # nobody applied the changes of the first
    third = continued(project, tree, "cat b.txt")
    assert (third["final_response"], third["changed_count"]) == ("new\n", 4)
    project.retinue("gc", "--older-than", "0s", "--force")
    assert "there are no runs" in one_line_error(project.retinue("continue", third["tree"], "more", "--yes"))
