"""Tests of a person's mistakes: one clear line that names the place, exit code 2, never a traceback."""

import os
from pathlib import Path

import pytest

from retinue.files.state_owner import claim_state_folder
from tests.surfaces.cli.shell import BOUND_BY_MODES, SOURCE, Project, one_line_error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rnu"], "there is no command 'rnu'; use `retinue run` to run an agent"),
        (["zzzz"], "there is no command 'zzzz' (see `retinue --help`)"),
        (["trst"], "there is no command 'trst'; use `retinue trust`"),
        (["trees\x1b[2J"], "there is no command 'trees\\x1b[2J' (see"),
        (["fix the tests"], "there is no command 'fix the tests'; use `retinue run TASK`"),
        (["-C", "nowhere", "ps"], "-C: cannot change to 'nowhere': No such file or directory"),
        (["-C", "retinue.yaml", "ps"], "-C: cannot change to 'retinue.yaml': Not a directory"),
        (["-C"], "argument -C: expected one argument"),
        (["help", "kill"], "there is no command 'kill'; use `retinue cancel`"),
        (["help", "mcp", "kill"], "invalid choice: 'kill'"),
        (["show", "last"], "there are no runs in "),
        (["show", "@1"], "there are no runs in "),
        (["show", "@0"], "there is no '@0': '@1' is the newest tree"),
        (["--nope"], "unrecognized arguments: --nope"),
        (["run"], "arguments are required: TASK (see `retinue run --help`)"),
        (["run", ""], "the task is empty"),
        (["run", " \n"], "the task is empty"),
        (["run", "x", "--verb"], "unrecognized arguments: --verb"),
        (["run", "x", "--modle", "y"], "--modle y; did you mean --model? (see `retinue run --help`)"),
        (["mcp", "serve", "--prt", "1"], "--prt 1; did you mean --port? (see `retinue mcp serve --help`)"),
        (["--versio"], "--versio; did you mean --version? (see `retinue --help`)"),
        (["run", "fix", "the", "tests"], "the tests; TASK is one argument: put quotes around it (see `retinue run"),
        (["send", "x", "not", "now"], "now; TEXT is one argument: put quotes around it (see `retinue send --help`)"),
        (["--modle", "y"], "--modle y; did you mean --model? (see `retinue --help`)"),
        (["continue", "add a test"], "required: TEXT; RUN comes before it: `last` is the newest tree (see `retinue co"),
        (["run", "x", "--model", "claude-sonnet-5-5"], "did you mean 'anthropic:claude-sonnet-5-5'?"),
        (["run", "x", "--quiet", "--verbose"], "not allowed with argument"),
        (["run", "x", "--timeout", "nan"], "argument --timeout: must be a number of seconds, 0 or more, got 'nan'"),
        (["run", "x", "--timeout", "-1"], "--timeout: must be a number of seconds, 0 or more, got '-1'"),
        (["run", "x", "--timeout", "inf"], "--timeout"),
        (["run", "x", "--max-depth", "-1"], "--max-depth: must be a whole number of 0 or more, got '-1'"),
        (["run", "x", "--max-depth", "none"], "--max-depth"),
        (["run", "x", "--max-turns", "1.5"], "--max-turns: must be a whole number"),
        (["run", "x", "--max-concurrent", "-2"], "--max-concurrent"),
        (["run", "@nowhere.md"], "nowhere.md: no such file"),
        (["run", "x"], "no model: give --model MODEL, write 'model: MODEL' in "),
        (["run", "x", "--model", "gpt"], "unknown model 'gpt'"),
        (["run", "x", "--model", "scripted:"], "names no file"),
        (["run", "x", "--model", "scripted:nowhere.yaml"], "nowhere.yaml: no such file"),
        (["run", "x", "--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["run", "x", "--profile", "explorr"], "unknown profile 'explorr'"),
        (["run", "x\x1b[2J", "--model", "\x1b[31mred"], "\\x1b[31mred"),
        (["show"], "there are no runs in "),
        (["tail", "nothing"], "no run is called 'nothing': there are no runs in "),
        (["tail", "--after", "-1"], "--after: must be a whole number of 0 or more"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
    ],
)
def test_wrong_words(project: Project, arguments: list[str], said: str) -> None:
    assert said in one_line_error(project.retinue(*arguments))


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("script.yaml", "agents:\n  main:\n    - txt: hi\n", "script.yaml:3: key 'agents.main[0].txt'"),
        ("script.yaml", "agents: [\n", "script.yaml:2"),
        ("retinue.yaml", "model: x\nmax_depht: 3\n", "retinue.yaml:2: key 'max_depht'"),
        ("retinue.yaml", "max_turns: -1\n", "retinue.yaml:1: key 'max_turns'"),
        (".agent/subagent_types/me/SUBAGENT.md", "---\nname: me\ncolour: red\n---\n", "SUBAGENT.md:3: key 'colour'"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_its_line(project: Project, path: str, text: str, said: str) -> None:
    project.script({"main": ["ok"]})
    place = project.folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    assert said in one_line_error(project.retinue("run", "x", "--model", "scripted:script.yaml"))
    if path != "script.yaml":
        assert said in one_line_error(project.retinue("profiles"))
    if path.endswith(".md"):
        doctor = project.doctor()
        assert doctor.returncode == 1
        assert "fail  profiles" in doctor.stdout


@pytest.mark.parametrize("place", [".retinue", ".retinue/logs", ".retinue/logs/0001.db"])
def test_a_state_folder_that_cannot_be_written(project: Project, place: str) -> None:
    """Something stands in the way; unlike a mode, that stops root too."""
    path = project.folder / place
    if place != ".retinue":
        claim_state_folder(project.folder / ".retinue")
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if place.endswith(".db"):
        path.mkdir()
    else:
        path.write_text("in the way")
    said = one_line_error(project.run(agents={"main": ["ok"]}))
    assert str(path) in said


def test_a_read_only_project(project: Project) -> None:
    model = project.script({"main": ["ok"]})
    project.folder.chmod(0o500)
    project.prefix = BOUND_BY_MODES
    try:
        said = one_line_error(project.retinue("run", "x", "--model", model))
        assert project.doctor().returncode == 1
    finally:
        project.folder.chmod(0o700)
    assert str(project.folder) in said


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    project = Project(tmp_path / os.fsdecode(b"caf\xe9"))
    assert "is not UTF-8" in one_line_error(project.run(agents={"main": ["ok"]}))
    assert "caf\\udce9" in one_line_error(project.retinue("ps"))


def test_a_broken_log_is_named_and_the_others_are_read(project: Project) -> None:
    project.run(agents={"main": ["ok"]})
    broken = project.folder / ".retinue/logs/0002.db"
    broken.write_bytes(b"this is not a database" * 100)
    done = project.retinue("ps")
    assert done.returncode == 0
    assert "done" in done.stdout
    assert done.stderr.count("\n") == 1
    assert str(broken) in done.stderr
    assert project.retinue("show").returncode == 0
    latest = project.retinue("show", "last")
    assert (latest.returncode, latest.stderr) == (0, done.stderr)
    assert f"fail  logs      cannot read the log {broken}" in project.doctor().stdout


@pytest.mark.parametrize("command", [("show", "last"), ("tail", "last"), ("show", "@1"), ("show", "@2/0")])
def test_a_log_of_which_nothing_can_be_read_is_not_called_empty(project: Project, command: tuple[str, str]) -> None:
    project.run(agents={"main": ["ok"]})
    broken = project.folder / ".retinue/logs/0001.db"
    broken.write_bytes(b"this is not a database" * 100)
    done = project.retinue(*command)
    warning, error = done.stderr.splitlines()
    assert done.returncode != 0
    assert str(broken) in warning
    assert "there is no run in" in error and "that can be read" in error


def test_a_bug_is_one_line_too_and_says_how_to_see_more(project: Project, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "sitecustomize.py").write_text(
        "import retinue.surfaces.cli.ps as ps\n"
        "def run(args):\n    raise ValueError('two\\nlines \\x1b[31m')\n"
        "ps.execute_ps = run\n"
    )
    path = f"{trap}{os.pathsep}{SOURCE}"
    done = project.retinue("ps", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "retinue: internal error: ValueError: two\\nlines \\x1b[31m (this is a bug; RETINUE_TRACE"
    )
    assert "Traceback" in project.retinue("ps", PYTHONPATH=path, RETINUE_TRACEBACK="1").stderr


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("file", ".retinue is not a folder"),
        ("logs file", ".retinue/logs is not a folder"),
        ("link", ".retinue is a link, but must be a real folder"),
        ("logs link", ".retinue/logs is a link, but must be a real folder"),
    ],
)
def test_logs_that_cannot_be_there_are_named_and_not_called_none(tmp_path: Path, made: str, said: str) -> None:
    project = Project(tmp_path / "p")
    where = project.folder / ".retinue"
    if made.startswith("logs"):
        where.mkdir()
        where = where / "logs"
    if made.endswith("link"):
        where.symlink_to(tmp_path / "nowhere")
    else:
        where.touch()
    for command in (["ps"], ["tail"], ["gc"]):
        assert said in one_line_error(project.retinue(*command))


def test_logs_are_read_where_nothing_can_be_written(project: Project) -> None:
    """On a full disk or a file system that became read-only, SQLite cannot create the files with which it reads a
    log."""
    project.run("--yes", agents={"main": ["the answer"]})
    logs = project.folder / ".retinue/logs"
    (logs / "0001.db").chmod(0o400)
    logs.chmod(0o500)
    project.prefix = BOUND_BY_MODES
    assert [row["state"] for row in project.rows()] == ["done"]
    shown = project.retinue("show")
    assert (shown.returncode, shown.stderr) == (0, "") and "the answer" in shown.stdout
    logs.chmod(0o700)
    (logs / "0001.db-wal").write_bytes(b"something")  # what it holds cannot be seen
    (logs / "0001.db-wal").chmod(0o400)
    logs.chmod(0o500)
    listed = project.retinue("ps")
    assert (listed.stdout, listed.stderr.count("\n")) == ("No runs that can be read.\n", 1)
    assert "there is no run in" in project.retinue("show").stderr
    logs.chmod(0o700)
