"""Tests of `retinue init`: its findings, questions, files and refusals."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from retinue.config.project import load_project
from tests.sandbox.places import needs_bubblewrap
from tests.surfaces.cli.shell import BOUND_BY_MODES, Project, one_line_error
from tests.surfaces.cli.test_terminal import Terminal

KEY = "sk-ant-secret-0123456789"


@pytest.fixture
def empty(tmp_path: Path) -> Project:
    made = Project(tmp_path / "empty")
    (made.folder / "retinue.yaml").unlink()
    return made


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_an_empty_folder(empty: Project) -> None:
    done = empty.retinue("init")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert files(empty.folder) == {"retinue.yaml", ".agent/subagent_types/reviewer/SUBAGENT.md"}
    assert "not in a git repository" in done.stdout
    assert "model    none (no key is set: set ANTHROPIC_API_KEY or OPENAI_API_KEY, or give --model)" in done.stdout
    assert "Next: " in done.stdout and "--profile reviewer --model MODEL" in done.stdout
    project = load_project(empty.folder)
    assert project.warnings == ()
    assert project.settings.model is None
    assert "reviewer" in [profile.name for profile in project.profiles]
    assert empty.retinue("doctor").returncode == 0


def test_what_it_finds_is_chosen_and_said_and_no_key_is_shown(empty: Project) -> None:
    (empty.folder / ".git").mkdir()
    (empty.folder / "Makefile").write_text("test:\n\techo tested\n")
    (empty.folder / "Cargo.toml").touch()
    below = empty.folder / "src"
    below.mkdir()
    path = empty.folder.parent / "bin"
    path.mkdir()
    (path / "make").symlink_to(shutil.which("make") or "")
    inside = Project(below)
    (below / "retinue.yaml").unlink()
    done = inside.retinue("init", "--yes", ANTHROPIC_API_KEY=KEY, PATH=str(path))
    assert done.returncode == 0, done.stderr
    assert KEY not in done.stdout + "".join(path.read_text() for path in empty.folder.rglob("*") if path.is_file())
    assert f"folder   {empty.folder} (in a git repository: runs work in a worktree of it)" in done.stdout
    assert "anthropic:claude" in done.stdout and "(ANTHROPIC_API_KEY is set)" in done.stdout
    assert "`make test` (Makefile) may run without asking" in done.stdout
    assert "`cargo test` (Cargo.toml) is not allowed: cargo is not on your PATH" in done.stdout
    assert files(below) == set()
    project = load_project(empty.folder)
    assert project.warnings == () == project.ignored  # what it wrote is trusted
    assert [str(rule) for rule in project.settings.approvals.allow] == ["shell(make test)"]
    reviewer = next(profile for profile in project.profiles if profile.name == "reviewer")
    assert (reviewer.tools, reviewer.workspace) == (("read", "glob", "grep", "shell"), None)


@pytest.mark.parametrize("git", [False, True])
@pytest.mark.parametrize("runtime", ["inherited", pytest.param("", marks=needs_bubblewrap, id="isolated")])
def test_the_command_it_allows_runs_unasked_where_the_tests_are(empty: Project, runtime: str, git: bool) -> None:
    """With a tool of its own that stands outside the system and outside the project."""
    tool = empty.folder.parent / "toolchain/bin/check-it"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho checked > made; cat made\n")
    tool.chmod(0o755)
    (empty.folder / "Makefile").write_text("test:\n\t@check-it && echo tested\n")
    if git:
        subprocess.run(["git", "init", "-q", str(empty.folder)], check=True)
    path = {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    assert empty.retinue("init", **path).returncode == 0
    file = empty.folder / "retinue.yaml"
    file.write_text(f"{file.read_text()}expose_paths: [{tool.parents[1]}]\n")
    assert empty.retinue("trust", "--yes").returncode == 0
    empty.runtime = runtime
    shell = {"tools": [{"name": "shell", "args": {"command": "make test"}}]}
    model = empty.script({"reviewer": [shell, {"text": "{{last_result}}"}]})
    done = empty.retinue("run", "go", "--profile", "reviewer", "--model", model, **path)
    assert (done.returncode, done.stdout.split()) == (0, ["checked", "tested"]), done.stderr
    assert (empty.folder / "made").exists() is (runtime == "inherited")


@needs_bubblewrap
def test_the_tools_that_the_tests_need_are_shown_in_the_sandbox(empty: Project) -> None:
    """With rustup, the cargo on the PATH is a proxy for the real program."""
    home = empty.folder.parent / "home"
    real, shim = home / ".rustup/toolchains/one/bin/cargo", home / ".cargo/bin/rustup"
    for file, text in ((real, "#!/bin/sh\necho cargo of one\n"), (shim, "#!/bin/sh\nexit 9\n")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    (shim.parent / "cargo").symlink_to("rustup")
    (home / ".rustup/settings.toml").write_text('version = "12"\ndefault_toolchain = "one"\n')
    (empty.folder / "Cargo.toml").touch()
    env = {"PATH": f"{shim.parent}:{os.environ['PATH']}", "HOME": str(home)}
    terminal = Terminal(empty, "init", "--model", "scripted:script.yaml", **env)
    terminal.read_until("in their sandbox without asking? [Y/n] ")
    terminal.type("\n")
    terminal.read_until("May agents run `cargo test` without asking? [Y/n] ")
    terminal.type("\n")
    screen = terminal.read_until("May they read that? [Y/n] ")
    assert f"  {home}/.rustup/toolchains/one\r\n" in screen
    terminal.type("\n")
    assert f"shown    {home}/.rustup/toolchains/one can be read in the sandbox" in terminal.read_until(None)
    assert terminal.end() == 0
    assert load_project(empty.folder).settings.expose_paths == (f"{home}/.rustup/toolchains/one",)
    empty.runtime = ""
    shell = {"tools": [{"name": "shell", "args": {"command": "cargo test"}}]}
    empty.script({"reviewer": [shell, {"text": "{{last_result}}"}]})
    done = empty.retinue("run", "go", "--profile", "reviewer", **env)
    assert (done.returncode, done.stdout) == (0, "cargo of one\n\n"), done.stderr


def test_at_a_terminal_it_asks(empty: Project) -> None:
    (empty.folder / "Makefile").write_text("test:\n\techo tested\n")
    terminal = Terminal(empty, "init", "--profile", "scout")
    terminal.read_until("[none for now] ")
    terminal.type("openai:gpt-x\n")
    terminal.read_until("May agents edit files and run commands in their sandbox without asking? [Y/n] ")
    terminal.type("n\n")
    terminal.read_until("May agents run `make test` without asking? [Y/n] ")
    terminal.type("what?\n")
    terminal.read_until("[Y/n] what?\r\nMay agents run `make test` without asking? [Y/n] ")
    terminal.type("n\n")
    screen = terminal.read_until(None)
    assert terminal.end() == 0, screen
    assert "model    openai:gpt-x (as you said)" in screen
    assert "`make test` (Makefile) asks first" in screen
    settings = load_project(empty.folder).settings
    assert (settings.model, settings.approvals.mode, settings.approvals.allow) == ("openai:gpt-x", "ask", ())
    assert files(empty.folder) >= {".agent/subagent_types/scout/SUBAGENT.md"}


@pytest.mark.finding("U2")
@needs_bubblewrap
@pytest.mark.parametrize("answer", ["Enter", "--yes"])
def test_after_init_neither_spawning_nor_sandboxed_edits_ask(empty: Project, answer: str) -> None:
    """The first offer of `init` makes `run` work without a terminal, and changes no file of the project."""
    if answer == "--yes":
        assert empty.retinue("init", "--yes", "--model", "scripted:script.yaml").returncode == 0
    else:
        terminal = Terminal(empty, "init", "--model", "scripted:script.yaml")
        terminal.read_until("in their sandbox without asking? [Y/n] ")
        terminal.type("\n")
        terminal.read_until(None)
        assert terminal.end() == 0
    file = empty.folder / "retinue.yaml"
    assert "  mode: sandboxed  #" in file.read_text()
    assert len(file.read_text().splitlines()) <= 12
    empty.runtime = ""
    write = {"tools": [{"name": "write", "args": {"path": "made", "content": "x"}}]}
    spawn = {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "a"}]}}]}
    empty.script({"main": [spawn, {"text": "all done"}], "subagent": [write, {"text": "made it"}]})
    done = empty.retinue("run", "go")
    assert (done.returncode, done.stdout) == (0, "all done\n"), done.stderr
    assert not (empty.folder / "made").exists()


def test_without_a_terminal_and_without_yes_the_mode_is_ask(empty: Project) -> None:
    done = empty.retinue("init")
    assert "mode     ask (a question before each edit and command" in done.stdout
    assert load_project(empty.folder).settings.approvals.mode == "ask"


def test_who_ends_the_input_or_interrupts_has_written_nothing(empty: Project) -> None:
    for stop, code in ((lambda one: one.type("\x04"), 2), (lambda one: one.process.send_signal(signal.SIGINT), 130)):
        terminal = Terminal(empty, "init")
        terminal.read_until("[none for now] ")
        stop(terminal)
        screen = terminal.read_until(None)
        assert terminal.end() == code, screen
        assert screen.endswith("\n")  # where the shell's prompt comes next
        assert files(empty.folder) == set()


@pytest.mark.parametrize("there", ["retinue.yaml", ".agent/subagent_types/reviewer/SUBAGENT.md"])
def test_nothing_is_overwritten(empty: Project, there: str) -> None:
    path = empty.folder / there
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    said = one_line_error(empty.retinue("init", "--yes"))
    assert said.startswith(f"{path} already exists")
    assert files(empty.folder) == {there}
    path.unlink()
    path.symlink_to(empty.folder / "nowhere")
    assert str(path) in one_line_error(empty.retinue("init", "--yes"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt"], "'gpt' is not a model"),
        (["--profile", "../x"], "profile name '../x'"),
        (["nowhere"], "nowhere is not a folder"),
    ],
)
def test_wrong_words(empty: Project, arguments: list[str], said: str) -> None:
    assert said in one_line_error(empty.retinue("init", *arguments))
    assert files(empty.folder) == set()


def test_a_read_only_folder_is_one_line(empty: Project) -> None:
    empty.folder.chmod(0o500)
    empty.prefix = BOUND_BY_MODES
    try:
        said = one_line_error(empty.retinue("init"))
    finally:
        empty.folder.chmod(0o700)
    assert said == f"cannot write {empty.folder}/.agent: Permission denied"


def test_half_of_it_is_never_left(empty: Project) -> None:
    """The agent's folder can be made, retinue.yaml cannot."""
    (empty.folder / ".agent").mkdir()
    empty.folder.chmod(0o500)
    empty.prefix = BOUND_BY_MODES
    try:
        said = one_line_error(empty.retinue("init"))
    finally:
        empty.folder.chmod(0o700)
    assert "retinue.yaml: Permission denied" in said
    assert list((empty.folder / ".agent").iterdir()) == []
