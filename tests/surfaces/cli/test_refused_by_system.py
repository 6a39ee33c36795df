"""Tests of refusals by the system: full outputs and disks, folders of a wrong owner or mode. One sentence, never a
bug."""

import errno
import json
import os
import pwd
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.surfaces.cli.shell import BOUND_BY_MODES, COMMAND, Project, environment, one_line_error
from tests.workspaces.kit import repository, shell

# A full disk; where a user may not write that device, a file that takes no output either.
CAN_FILL = os.access("/dev/full", os.W_OK)
CLOSED = "retinue: cannot write to stdout: it is closed\n"
FULL = f"retinue: cannot write to stdout: {os.strerror(errno.ENOSPC)}\n" if CAN_FILL else CLOSED
RUNTIMES = ("inherited",) if BOUND_BY_MODES else ("inherited", "isolated")  # bound by modes, root has no sandbox
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


@contextmanager
def open_full() -> Iterator[int]:
    """An output that takes nothing."""
    full = os.open("/dev/full", os.O_WRONLY) if CAN_FILL else os.open(os.devnull, os.O_RDONLY)
    try:
        yield full
    finally:
        os.close(full)


def run_full(project: Project, *words: str, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """One command whose stdout is a full disk."""
    with open_full() as full:
        return subprocess.run(
            [*COMMAND, *project.said(words)],
            cwd=project.folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=stderr,
            text=True,
            check=False,
        )


def add_hint(project: Project, error: str) -> str:
    """The error of a command whose run is the newest, with the command that shows its answer."""
    name = project.events()[0]["tree"]
    return f"{error.rstrip()}; `retinue show {name}/0` has the answer\n"


@pytest.mark.finding("R9")
@pytest.mark.parametrize(
    "words",
    [
        ("--help",), ("--version",), ("run", "--help"), ("ps",), ("ps", "--json"), ("show",), ("show", "--markdown"),
        ("tail",), ("tail", "--json"), ("usage",), ("doctor", "--schema"), ("diff",), ("profiles",), ("gc",),
        ("completion", "bash"), ("approvals",), ("replay",), ("continue", "main", "more", "--yes", "--quiet"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_full_stdout_is_one_sentence(project: Project, words: tuple[str, ...]) -> None:
    model = project.script({"main": [shell("echo x > x.txt"), {"text": "the answer"}]})
    made = ("--model", model, "--yes", "--workspace", "copy")
    assert project.retinue("run", "go", *made).returncode == 0
    done = run_full(project, *words)
    last = add_hint(project, FULL) if words[0] == "continue" else FULL
    assert (done.returncode, done.stderr.splitlines(keepends=True)[-1]) == (1, last), done.stderr
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr


@pytest.mark.finding("R9")
@pytest.mark.parametrize("text", ["the answer", "x" * 300_000])
@pytest.mark.parametrize("more", [(), ("--json",), ("--detach",)])
def test_a_run_whose_answer_cannot_be_printed_keeps_it(project: Project, text: str, more: tuple[str, ...]) -> None:
    model = project.script({"main": [{"text": text}]})
    done = run_full(project, "run", "go", "--model", model, "--quiet", *more)
    assert (done.returncode, done.stderr) == (1, FULL if "--detach" in more else add_hint(project, FULL))
    if not more:
        assert project.retinue("show", "--json").stdout.count(text) >= 1


@pytest.mark.finding("R9")
@pytest.mark.parametrize(
    "words", [("run", "go"), ("run", "go", "--json"), ("continue", "main", "more"), ("show",), ("tail",), ("diff",)]
)
def test_a_closed_stdout_is_said_and_no_answer_is_lost_in_silence(project: Project, words: tuple[str, ...]) -> None:
    model = project.script({"main": [shell("echo x > x.txt"), {"text": "the answer"}]})
    options = ("--model", model, "--yes", "--quiet", "--workspace", "copy")
    assert project.retinue("run", "go", *options).returncode == 0
    project.prefix = ["sh", "-c", 'exec "$@" >&-', "sh"]
    is_run = words[0] in ("run", "continue")
    more = {"run": options, "continue": ("--yes", "--quiet")}.get(words[0], ())
    done = project.retinue(*words, *more)
    project.prefix = []
    last = add_hint(project, CLOSED) if is_run else CLOSED
    assert (done.returncode, done.stderr.splitlines(keepends=True)[-1]) == (1, last), done.stderr
    assert "the answer" in project.retinue("show").stdout


@pytest.mark.finding("R9")
def test_an_mcp_server_whose_answers_cannot_be_written_says_so(project: Project) -> None:
    model = project.script({"main": [{"text": "the answer"}]})
    about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
    with open_full() as full:
        process = subprocess.Popen(
            [*COMMAND, "mcp", "serve", "--model", model],
            cwd=project.folder, env=environment(), stdin=-1, stdout=full, stderr=-1, text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        with process.stderr, process.stdin:
            assert (process.wait(), process.stderr.read().splitlines(keepends=True)[-1]) == (1, FULL)


@pytest.mark.finding("R9")
def test_a_full_stderr_costs_nothing_but_the_words_on_it(project: Project) -> None:
    model = project.script({"main": [{"text": "the answer"}]})
    with open_full() as full:
        words = [*COMMAND, *project.said(["run", "go", "--model", model])]
        done = subprocess.run(words, cwd=project.folder, env=environment(), stdout=-1, stderr=full, check=False)
        wrong = subprocess.run([*COMMAND, "nothing"], env=environment(), stdout=-1, stderr=full, check=False)
        both = run_full(project, "ps", stderr=full)
    assert (done.returncode, done.stdout) == (0, b"the answer\n")
    assert (wrong.returncode, wrong.stdout, both.returncode) == (2, b"", 1)


@pytest.mark.finding("R9")
@pytest.mark.parametrize("words", [["ps"], ["--help"], ["tail"], ["tail", "--json"], ["doctor"], ["show"]])
def test_a_reader_that_has_seen_enough_is_no_error(project: Project, words: list[str]) -> None:
    project.run("--yes", agents={"main": [{"text": "x" * 300_000}]})
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, *words], cwd=project.folder, env=environment(), stdout=writing, stderr=-1, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.finding("R9")
def test_a_spill_that_fills_the_disk_costs_the_text_and_not_the_run(project: Project, tmp_path: Path) -> None:
    """On a disk of our own, as large as the log needs and smaller than what the command prints."""
    flood = "head -c 3000000 /dev/zero | tr '\\0' x"
    model = project.script({"main": [shell(flood), shell(flood), {"text": "{{last_result}}"}]})
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"mount -t tmpfs -o size=1500k none '{disk}' && cp -r . '{disk}' && cd '{disk}' && exec "
    words = [*COMMAND, "run", "go", "--model", model, "--yes", "--quiet", "--runtime", "inherited"]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script + '"$@"', "sh", *words],
        cwd=project.folder, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "bytes cut; not kept: No space left on device ...]" in done.stdout
    assert "Traceback" not in done.stderr and "panicked" not in done.stderr


@pytest.mark.finding("R9")
@pytest.mark.parametrize(
    ("failpoint", "left_kib", "words", "error"),
    [
        ("tool.result:1", 0, ("diff",), "the disk is full: git fast-import cannot write to "),
        ("tool.result:1", 50, ("apply", "--yes"), "the disk is full: git fast-import cannot write to "),
        ("", 0, ("apply", "--yes"), "the disk is full: git fast-import cannot write to "),
        ("", 150, ("apply", "--yes"), "nothing was changed: DISK: No space left on device"),
    ],
)
def test_changes_that_a_full_disk_cannot_hold_are_said_to_be_that(
    project: Project, tmp_path: Path, failpoint: str, left_kib: int, words: tuple[str, ...], error: str
) -> None:
    """The run that is killed at `failpoint` leaves its changes for `diff` and `apply` to store."""
    model = project.script({"main": [shell("head -c 200000 /dev/urandom > new.bin"), {"text": "ok"}]})
    disk = tmp_path / "disk"
    disk.mkdir()
    run = [*COMMAND, "run", "go", "--model", model, "--yes", "--quiet", "--runtime", "inherited", "--workspace", "copy"]
    script = f"""
        mount -t tmpfs -o size=6m none '{disk}' && cp -r . '{disk}' && cd '{disk}' || exit 99
        RETINUE_FAILPOINT={failpoint} {shlex.join(run)} >&2
        free=$(df -k . | awk 'END {{print $4}}')
        head -c $(((free - {left_kib}) * 1024)) /dev/zero > fill
        exec "$@" """
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *COMMAND, *words],
        cwd=project.folder, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last.startswith(f"retinue: {error.replace('DISK', str(disk))}")) == (2, True), done.stderr


@pytest.mark.finding("R9")
def test_a_git_that_cannot_write_a_reference_to_a_full_disk_is_said_to_need_space(tmp_path: Path) -> None:
    """Git says so of its objects, but not of its references."""
    said = "error: cannot update ref 'refs/runs/0/end': couldn't write 'end.lock'"
    full, roomy = tmp_path / "full", tmp_path / "roomy"
    full.mkdir()
    roomy.mkdir()
    code = (
        "import sys; from retinue.workspaces.git import describe_failure\n"
        "for folder in sys.argv[2:]:\n"
        "  for writes in (True, False):\n"
        "    print(describe_failure('git fast-import', sys.argv[1].encode(), folder, writes=writes))"
    )
    script = 'mount -t tmpfs -o size=512k none "$3" && mount -t tmpfs -o size=8m none "$4" && exec "$0" -c "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, sys.executable, code, said, str(full), str(roomy)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"the disk is full: git fast-import cannot write to {full}: {said}",
        *[f"git fast-import failed: {said}"] * 3,
    ]


@pytest.mark.finding("R6")
def test_a_current_folder_that_is_gone_is_said(project: Project) -> None:
    gone = project.folder / "gone"
    gone.mkdir()
    for words in (["ps"], ["run", "x"], ["doctor"], ["init"]):
        remove = f"import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, {[*COMMAND, *words]!r})"
        gone.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", remove], cwd=gone, env=environment(), capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (1, "retinue: the current folder is gone: change to one that exists\n")


@pytest.mark.finding("R6")
def test_folders_that_cannot_be_used_are_said_by_the_run_and_by_doctor(project: Project, tmp_path: Path) -> None:
    """A folder on PATH, a home and a temporary folder that this user may not read or write."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    project.prefix = BOUND_BY_MODES
    model = project.script({"main": [shell("echo hi"), {"text": "{{last_result}}"}]})
    words = ("run", "go", "--model", model, "--yes", "--quiet")
    try:
        path = f"{locked}:{os.environ['PATH']}"
        for runtime in RUNTIMES:
            done = project.retinue(*words, "--runtime", runtime, PATH=path, TMPDIR=str(locked))
            assert (done.returncode, done.stdout) == (0, "hi\n\n"), done.stderr
        healthy = project.retinue("doctor", PATH=path)
        assert healthy.returncode == 0 and "fail " not in healthy.stdout, healthy.stdout
        (project.folder / "other").mkdir()
        fresh = Project(project.folder / "other")
        fresh.prefix = BOUND_BY_MODES
        for home in (str(locked), "/nonexistent/home" if os.geteuid() else str(locked / "x"), "relative"):
            given = {"HOME": home, "XDG_STATE_HOME": "", "XDG_CONFIG_HOME": ""}
            said = one_line_error(
                fresh.retinue("run", "go", "--model", f"scripted:{project.folder}/script.yaml", **given)
            )
            assert "set XDG_STATE_HOME" in said
            checked = fresh.retinue("doctor", **given)
            assert checked.returncode == 1 and "fail  key       " in checked.stdout
    finally:
        locked.chmod(0o700)


@pytest.mark.finding("R6")
@pytest.mark.parametrize("name", ["", "logs", "runs"])
def test_a_state_folder_that_cannot_be_written_is_said(project: Project, name: str) -> None:
    model = project.script({"main": [shell("echo hi"), {"text": "ok"}]})
    words = ("run", "go", "--model", model, "--yes", "--quiet", "--workspace", "copy")
    if name:
        assert project.retinue(*words).returncode == 0
    folder = project.folder / ".retinue" / name if name else project.folder
    project.prefix = BOUND_BY_MODES
    folder.chmod(0o500)
    try:
        done, checked = project.retinue(*words), project.doctor()
    finally:
        folder.chmod(0o700)
    last = done.stderr.splitlines()[-1]
    assert done.returncode in (1, 2) and str(folder) in last and "internal error" not in done.stderr
    assert "Permission denied" in last or "readonly" in last
    assert checked.returncode == 1 and f"fail  state     {folder} cannot be written" in checked.stdout


@needs_root
@pytest.mark.finding("R6")
def test_state_that_root_left_in_a_user_s_project_is_said_by_every_command(project: Project) -> None:
    project.run("--yes", agents={"main": ["ok"]})
    state = project.folder / ".retinue"
    nobody = pwd.getpwnam("nobody")
    os.chown(state, nobody.pw_uid, nobody.pw_gid)
    sentence = f"{state} belongs to nobody, and you are root, so nothing in it is used: run this as nobody, or take it"
    model = project.script({"main": ["ok"]})
    for words in (["ps"], ["show"], ["tail"], ["usage"], ["gc"], ["diff"], ["run", "x", "--model", model], ["init"]):
        assert one_line_error(project.retinue(*words)).startswith(sentence), words
    assert f"fail  state     {sentence}" in project.doctor().stdout


@needs_root
@pytest.mark.finding("R6")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_root_in_a_closed_project_is_refused_before_its_model_is_called(tmp_path: Path) -> None:
    project = Project(
        repository(tmp_path / "p", **{"retinue.yaml": "profiles:\n  kid: {description: k, workspace: shared}\n"})
    )
    project.folder.chmod(0o700)
    task = {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "x", "subagent_type": "kid"}]}}]}
    agents = {"main": [shell("cat a.txt"), task, {"text": "end"}], "kid": [shell("cat a.txt"), {"text": "kid"}]}
    refused = project.run("--yes", "--runtime", "isolated", "--workspace", "shared", agents=agents)
    assert refused.returncode == 1
    assert f"may not read {project.folder}: use workspace worktree or copy, or `chmod o+rx" in refused.stderr
    assert "usage" not in [event["kind"] for event in project.events()]
    done = project.run("--yes", "--runtime", "isolated", agents=agents)
    assert (done.returncode, done.stdout) == (0, "end\n")
    results = [event for event in project.events() if event["kind"] == "tool.result" and event["name"] == "shell"]
    assert [(each["path"].count("/"), each.get("success", True)) for each in results] == [(1, True), (2, True)]
    assert stat.S_IMODE(project.folder.stat().st_mode) == 0o700
