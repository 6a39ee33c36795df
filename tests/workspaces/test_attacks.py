"""A workspace whose run means harm: nothing of it is run, followed, waited for, or written where it must not be."""

import asyncio
import os
import random
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from retinue.core.errors import RetinueError
from retinue.core.events import ToolResult
from retinue.files.trees import remove_tree
from retinue.sandbox import tool_server_session
from retinue.workspaces import atomic_apply, ignores, merge, recording, walk
from retinue.workspaces.git import run_in_project
from retinue.workspaces.store import Import, Store, hash_content
from retinue.workspaces.walk import FolderEntry, Walker, is_reserved_name, open_entry
from tests.sandbox.places import needs_bubblewrap
from tests.soak.conftest import note  # noqa: F401 - a fixture
from tests.supervisor.tree.kit import call
from tests.workspaces.kit import LINES, apply_copy, changes, copied, hashed, into, repository, seen, shell, work

SECRET = "a secret of the user"


def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text(SECRET)
    (folder / "inner").mkdir()
    (folder / "inner/file").write_text(SECRET)
    return folder


@pytest.mark.requirement("P31")
@pytest.mark.parametrize("kind", ["worktree", "copy"])
async def test_nothing_in_a_workspaces_git_is_ever_run(tmp_path: Path, kind: str) -> None:
    project, harm = repository(tmp_path / "p"), tmp_path / "harm"
    evil = tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\necho $0 >> {harm}\ncat\n")
    evil.chmod(0o755)
    commands = f"""
    mkdir -p .git/hooks sub
    for hook in post-checkout pre-commit post-index-change reference-transaction fsmonitor-watchman; do
        cp {evil} .git/hooks/$hook
    done
    cat > .git/config <<X
[core]
    fsmonitor = {evil}
    hooksPath = .git/hooks
    worktree = {project}
    sshCommand = {evil}
    pager = {evil}
    editor = {evil}
    attributesFile = .gitattributes
[filter "evil"]
    clean = {evil}
    smudge = {evil}
    process = {evil}
    required = true
[diff "evil"]
    textconv = {evil}
    command = {evil}
[merge "evil"]
    driver = {evil}
[diff]
    external = {evil}
[alias]
    diff = !{evil}
    ls-tree = !{evil}
[submodule "sub"]
    url = ext::{evil}
[include]
    path = {evil}
X
    printf '* filter=evil diff=evil merge=evil -text ident\\n*.txt -diff\\n' > .gitattributes
    printf '[submodule "sub"]\\npath = sub\\nurl = ext::{evil}\\n' > .gitmodules
    printf garbage > .git/index
    mkdir -p sub/.git/hooks; cp {evil} sub/.git/hooks/post-checkout; cp .git/config sub/.git/config
    echo 'gitdir: {project}/.git' > other.git
    mkdir nested; cp other.git nested/.git; echo n > nested/n
    echo '$Id$' > id.txt; sed -i 's/^line 2$/two/' a.txt; echo s > sub/s
    """
    before = hashed(project)
    result = await work(project, commands, kind=kind)
    diff = copied(result).diff("-p")
    assert b"-line 2\n+two\n" in diff and b"+$Id$\n" in diff  # what -diff and ident say counts for nothing
    found = set(changes(result))
    assert found == {".gitattributes", ".gitmodules", "a.txt", "id.txt", "nested/n", "other.git", "sub/s"}
    assert hashed(project) == before
    git_before = {name: value for name, value in before.items() if name.startswith(".git/")}
    apply_copy(result, project)
    after = hashed(project)
    assert {name: value for name, value in after.items() if name.startswith(".git/")} == git_before
    assert not (project / "sub/.git").exists() and not (project / "nested/.git").exists()
    assert not harm.exists()


@needs_bubblewrap
@pytest.mark.requirement("P31")
async def test_a_worktree_is_held_by_the_sandbox_whatever_git_or_a_link_is_told(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    project = repository(tmp_path / "p")
    before, at = hashed(project), shlex.quote(str(project))
    there = f"GIT_DIR={at}/.git GIT_WORK_TREE={at}"
    commands = f"""
    git -C {at} -c user.name=t -c user.email=t@t commit --allow-empty -m evil
    {there} git update-ref refs/heads/evil HEAD; {there} git config core.hooksPath /tmp; {there} git gc --prune=now
    git worktree add {at}/evil; git clone -q . {at}/evil; cd / && git -C {at} checkout -f --orphan evil
    cd "$HOME"; ln -s {at} link; echo evil > link/a.txt; ln -s {at}/.git/objects o; rm -rf o/* link/.git
    touch {at}/.git/objects/evil {at}/.git/hooks/post-commit; echo first > mine"""
    tools = [
        call("edit", path=f"{project}/a.txt", old_string="line 1\n", new_string="evil\n"),
        call("write", path="link/a.txt", content="evil"),
        call("write", path=f"{project}/.git/hooks/post-commit", content="evil"),
    ]
    agents = {"main": [shell(commands), *tools, {"text": "done"}]}
    first, _ = await seen(project, agents, kind="worktree", runtime="isolated")
    assert (first.status, first.tool_count, first.runtime) == ("done", 4, "isolated")
    assert hashed(project) == before
    second = await work(project, "ls -A", "git branch --all; git log --oneline", runtime="isolated")
    assert second.workspace != first.workspace and (Path(first.workspace) / "mine").read_text() == "first\n"
    assert changes(second) == {} and "mine" not in os.listdir(second.workspace)
    assert hashed(project) == before


async def test_a_git_that_is_a_file_pointing_elsewhere_is_not_looked_at(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    before = hashed(project)
    result = await work(project, f"rm -rf .git; echo 'gitdir: {project}/.git' > .git; echo 1 > b")
    assert changes(result) == {"b": "added"} and hashed(project) == before


async def test_links_are_never_followed_and_none_that_leads_out_is_applied(tmp_path: Path) -> None:
    project, away = repository(tmp_path / "p", **{"d/f": "1\n"}), outside(tmp_path)
    before = hashed(away)
    result = await work(
        project,
        f"ln -s '{away}' folder; ln -s '{away}/secret' secret; ln -s ../../../outside/secret up; rm -r d;"
        f"ln -s '{away}' d; ln -s .git/hooks hooks;"
        "mkdir n; ln -s ../.retinue n/state; ln -s ../a.txt n/fine; ln -s ../.GIT n/git",
    )
    assert "secret" in changes(result) and not any(path.startswith("folder/") for path in changes(result))
    assert SECRET.encode() not in copied(result).diff("-p")
    conflicts = {conflict.path for conflict in into(project).plan([copied(result)]).conflicts}
    assert conflicts == {"folder", "secret", "up", "d", "hooks", "n/state", "n/git"}
    with pytest.raises(RetinueError, match="leads out of the project"):
        apply_copy(result, project)
    assert hashed(away) == before and not (project / "folder").exists() and (project / "d/f").exists()


async def test_a_folder_of_the_project_that_became_a_link_is_not_written_through(tmp_path: Path) -> None:
    project, away = repository(tmp_path / "p", **{"d/f": "1\n"}), outside(tmp_path)
    result = await work(project, "echo 2 > d/f; echo 3 > d/new")
    made = into(project).plan([copied(result)])
    (project / "d").rename(tmp_path / "moved")
    (project / "d").symlink_to(away)
    before = hashed(away)
    with pytest.raises(RetinueError, match="nothing was changed"):
        into(project).carry_out(made, [copied(result)])
    again = into(project).plan([copied(result)])
    assert {conflict.path for conflict in again.conflicts} == {"d/f", "d/new"}
    assert hashed(away) == before


async def test_hard_links_fifos_and_devices_are_left_out_and_said(tmp_path: Path) -> None:
    project, away = repository(tmp_path / "p"), outside(tmp_path)
    result = await work(
        project,
        f"ln '{away}/secret' hard; ln -f '{away}/inner/file' a.txt; mkfifo fifo .gitattributes sub;"
        "echo 1 > own; ln own too;"
        "rm -f .gitignore; mkfifo .gitignore",
    )
    assert changes(result) == {"own": "added", "too": "added"}
    assert str(result.warning).startswith(
        "not among the changes: .gitignore (a FIFO), .gitattributes (a FIFO), fifo (a"
    )
    assert "hard (also a file elsewhere, by a hard link)" in str(result.warning)
    assert SECRET.encode() not in copied(result).diff("-p")


async def test_what_cannot_be_looked_at_has_not_been_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = repository(tmp_path / "p", **{"d/e/f/g": "1\n", "kept": "2\n"})
    monkeypatch.setattr(walk, "DEEPEST", 2)
    result = await work(project, "rm kept; mkfifo kept; rm a.txt", kind="copy")
    assert changes(result) == {"a.txt": "deleted"}
    assert "kept (a FIFO)" in str(result.warning)
    monkeypatch.setattr(walk, "DEEPEST", 256)
    whole = await work(project, "mkfifo x", kind="copy")
    monkeypatch.setattr(walk, "DEEPEST", 2)
    assert recording.record_changes(copied(whole).workspace)[0].count == 0


@pytest.mark.requirement("P31")
async def test_a_workspace_that_was_replaced_by_a_link_is_not_looked_into(tmp_path: Path) -> None:
    project, away = repository(tmp_path / "p"), outside(tmp_path)
    before = hashed(away)
    result = await work(project, f"cd ..; mv workspace was; ln -s '{away}' workspace")
    assert "cannot look into" in str(result.warning) and result.changed_count == 0
    assert hashed(away) == before


async def test_patterns_made_to_take_for_ever_are_given_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignores, "SECONDS", 0.3)
    project = repository(tmp_path / "p")
    result = await work(project, f"printf '{'*a' * 40}*b\\n' > .gitignore; : > {'a' * 200}; echo 1 > z")
    assert result.status == "done" and "z" in changes(result)


@pytest.mark.parametrize(
    "name",
    [".git", ".GIT", ".Git", "git~1", ".git ", ".git.", ".git::$INDEX", ".g\u200cit", ".ｇit", ".retinue", ".RETINUE"],
)
def test_names_that_are_gits_or_ours_in_any_spelling_are_never_written(name: str, tmp_path: Path) -> None:
    assert is_reserved_name(name)
    store = Store(str(tmp_path / "s")).ensure_created()
    with Import(store) as into:
        held = merge.StoredFile("100644", into.add_bytes(b"x"))
    made = merge.plan_changes(str(tmp_path), [({}, {f"sub/{name}/hooks/x": held})], store)
    assert [conflict.why for conflict in made.conflicts] == ["is a name that no run may write"]


@pytest.mark.finding("X3")
@pytest.mark.parametrize("runtime", ["inherited", pytest.param("isolated", marks=needs_bubblewrap)])
@pytest.mark.parametrize("kind", ["shared", "worktree"])
async def test_no_runtime_and_no_mode_lets_a_file_tool_write_inside_git(
    tmp_path: Path, runtime: str, kind: str
) -> None:
    """`core.fsmonitor` in `.git/config` is a command that git runs at the user's next `git status`."""
    project = repository(tmp_path / "p")
    before = hashed(project)
    harm = "[core]\n\tfsmonitor = harm\n"
    calls = [
        call("write", path=".git/config", content=harm),
        call("edit", path=".git/HEAD", old_string="ref", new_string="x"),
        call("write", path=".GIT/hooks/pre-commit", content="harm"),
        {"text": "done"},
    ]
    _, events = await seen(project, {"main": calls}, kind=kind, runtime=runtime)
    results = [event.body for event in events if isinstance(event.body, ToolResult)]
    assert len(results) == 3 and not any(result.success for result in results)
    assert all("is inside a git folder; no file tool writes there" in result.text for result in results)
    assert hashed(project) == before


@pytest.mark.finding("X3")
@pytest.mark.parametrize("there", [(), ("objects", "refs"), ("HEAD",)])
def test_a_bare_repository_is_never_applied(there: tuple[str, ...], tmp_path: Path) -> None:
    """Its settings would run at the user's next git command in that folder."""
    target = tmp_path / "target"
    for name in there:
        (target / "sub" / name).mkdir(parents=True)
    store = Store(str(tmp_path / "s")).ensure_created()
    with Import(store) as into:
        held = merge.StoredFile("100644", into.add_bytes(b"x"))
    parts = {"HEAD": "HEAD", "objects": "objects/x", "refs": "refs/x"}
    files = {f"sub/{path}": held for name, path in parts.items() if name not in there}
    target.mkdir(exist_ok=True)
    made = merge.plan_changes(str(target), [({}, {"fine": held, "sub/config": held, **files})], store)
    assert {conflict.path for conflict in made.conflicts} == {"sub/config", *files}
    assert {conflict.why for conflict in made.conflicts} == {"is inside a git folder, which no run may write"}


def test_names_that_lead_up_are_never_written(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "s")).ensure_created()
    with Import(store) as into:
        held = merge.StoredFile("100644", into.add_bytes(b"x"))
    for path in ("../x", "a/../../x", "/etc/x", "a//b", "./x", "a\0b"):
        change = merge.Change(path, None, held)
        assert merge._explain_refusal(change, str(tmp_path), store, set()) == "is a name that no run may write"
    gitlink = merge.Change("sub", None, merge.StoredFile("160000", held.oid))
    assert merge._explain_refusal(gitlink, str(tmp_path), store, set()) == "is neither a file nor a link"


# Swapping while it is looked at


@contextmanager
def swapping_paths(base: Path, away: Path, seed: int) -> Iterator[list[int]]:
    """Replace a file, a folder and the way to them as fast as possible. Yield the number of replacements."""
    over, rng, swaps = threading.Event(), random.Random(seed), [0]

    def swap() -> None:
        while not over.is_set():
            name = rng.choice(("f", "d", "d/inner", "a.txt"))
            link, old = base / f".swap{rng.random()}", base / f".old{rng.random()}"
            try:
                os.symlink(away / ("secret" if name in ("f", "a.txt") else "inner"), link)
                os.rename(base / name, old)
                os.rename(link, base / name)
                swaps[0] += 1
                os.unlink(base / name)
                os.rename(old, base / name)
            except OSError:
                pass

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield swaps
    finally:
        over.set()
        thread.join()


def looked_at(tmp_path: Path, *, swaps: int, seed: int) -> dict[str, int]:
    """Looks at a workspace and applies to a project until both were swapped so often meanwhile; how often."""
    away = outside(tmp_path)
    space = tmp_path / "space/runs/t/0/workspace"
    target = tmp_path / "target"
    for folder in (space, target):
        (folder / "d/inner").mkdir(parents=True)
        (folder / "a.txt").write_text(LINES)
        (folder / "f").write_text("own\n")
        (folder / "d/inner/file").write_text("own\n")
    store = Store(str(tmp_path / "space/runs/t/workspaces.git")).ensure_created()
    begun = recording.Workspace("copy", "t", 0, str(space.parent), str(space), str(target), str(target))
    base, _ = recording.record_files(begun, store, {}, ref=begun.base)
    outside_before, number, worked = hashed(away), 0, 0
    forbidden_content = hash_content(len(SECRET), iter((SECRET.encode(),)))
    with swapping_paths(space, away, seed) as first, swapping_paths(target, away, seed + 1) as second:
        while min(first[0], second[0]) < swaps:
            number += 1
            for entry in Walker(str(space), foreign=True).walk_entries():
                assert SECRET.encode() not in content_of(entry)
            end, _ = recording.record_files(begun, store, base, ref=begun.end)
            assert forbidden_content not in {held.oid for held in end.values()}
            with Import(store) as into:
                new = merge.StoredFile("100644", into.add_bytes(b"%d\n" % number))
            wanted = {**base, "d/inner/file": new, "a.txt": new, f"d/inner/new{number}": new}
            made = merge.plan_changes(str(target), [(base, wanted)], store)
            try:
                if not made.conflicts:
                    atomic_apply.apply_changes(str(target), made.changes, store, aside=str(tmp_path / "aside"))
                    worked += 1
            except RetinueError:
                pass
            assert hashed(away) == outside_before
    return {"looks": number, "applied": worked, "swaps": first[0] + second[0]}


def content_of(entry: FolderEntry) -> bytes:
    try:
        fd = open_entry(entry)
    except OSError:
        return b""
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def test_swapping_a_path_while_it_is_looked_at_leads_nowhere(tmp_path: Path) -> None:
    looked_at(tmp_path, swaps=200, seed=1)
    assert hashed(tmp_path / "outside")["secret"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_swapping_workspace_paths(tmp_path: Path, seed: int, note) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    figures = looked_at(tmp_path, swaps=2000, seed=seed)
    assert hashed(tmp_path / "outside")["secret"]
    note(**figures)


# Work without end


DEEP = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nopen('big', 'wb').write(b'x' * {size})"


@needs_bubblewrap
@pytest.mark.finding("X8")
async def test_folders_in_folders_do_not_hide_what_a_run_has_written(tmp_path: Path) -> None:
    project, settings = repository(tmp_path / "p"), tmp_path / "settings.yaml"
    settings.write_text("resource_limits: {workspace_mib: 8}\n")
    tmp_path.chmod(0o755)
    command = f'python3 -c "{DEEP.format(size=20 * 1024**2)}"'
    try:
        result = await work(project, f"{command}; sleep 100", runtime="isolated", config=settings)
    finally:
        removed = remove_tree(project / ".retinue")  # pytest's own way of removing it would not
    assert result.status == "limited" and "its files are" in str(result.error_details)
    assert removed


@needs_bubblewrap
@pytest.mark.finding("X8")
async def test_a_run_whose_watch_has_died_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: object) -> int:
        raise ValueError("a fault in the watch")

    monkeypatch.setattr(tool_server_session, "measure_folder", fail)
    project = repository(tmp_path / "p")
    tmp_path.chmod(0o755)
    result = await work(project, "sleep 100", runtime="isolated")
    assert result.status == "failed" and "could not be watched any more: a fault" in str(result.error_details)


@pytest.mark.finding("X8")
@pytest.mark.parametrize("kind", ["worktree", "copy"])
@pytest.mark.parametrize("place", [".gitignore", "sub/.gitignore", ".git/info/exclude"])
@pytest.mark.parametrize("what", ["/dev/zero", "/dev/tty", "fifo", "hole"])
async def test_ignore_files_that_have_no_end_are_not_read(tmp_path: Path, kind: str, place: str, what: str) -> None:
    project = repository(tmp_path / "p", **{"sub/b.txt": "b"})
    file = project / place
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    if what == "fifo":
        os.mkfifo(file)
    elif what == "hole":
        file.touch()
        os.truncate(file, 4 * 1024**2)
    else:
        file.symlink_to(what)
    result = await asyncio.wait_for(work(project, "cat sub/b.txt", kind=kind), 100)
    assert result.status == "done", result.error_details


@pytest.mark.finding("X8")
@pytest.mark.parametrize("name", ["HEAD", "config", "index", "packed-refs"])
async def test_a_fifo_in_the_folder_of_git_holds_nobody_up(tmp_path: Path, name: str) -> None:
    project = repository(tmp_path / "p")
    (project / ".git" / name).unlink(missing_ok=True)
    os.mkfifo(project / ".git" / name)
    result = await work(project, "cat a", kind="worktree")
    assert result.status == "failed" and "git cannot use that of" in str(result.error_details)
    assert (await work(project, "cat a", kind="copy")).status == "done"


@pytest.mark.finding("X7")
def test_git_in_the_project_gets_no_key_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", "sk-planted")
    shown = run_in_project(
        "-c", "alias.our-environment=!env", "our-environment", project=str(repository(tmp_path / "p"))
    )
    assert b"PATH=" in shown and b"planted" not in shown
