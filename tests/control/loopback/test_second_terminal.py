"""Tests of a second terminal that works on a tree of the first: real commands, real processes."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from retinue.control.client import ControlClient
from retinue.core.approvals import Approval
from retinue.protocol.control import Address
from retinue.surfaces.cli.questions import PendingQuestion, match_questions
from tests.surfaces.cli.shell import Project, interrupt, one_line_error, read_until, until
from tests.surfaces.cli.test_terminal import Terminal

GLOB = {"name": "glob", "args": {"pattern": "*"}}
HELD = {
    "name": "shell",
    "args": {"command": "until [ -e gate ]; do sleep 0.05; done"},
}  # runs until `release` is called
CHILD = {"name": "subagent_explorer", "args": {"task": "dig"}}


def write(name: str) -> dict[str, object]:
    return {"name": "write", "args": {"path": name, "content": "x"}}


@contextmanager
def first(
    project: Project, agents: dict[str, object], *options: str, quick: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """A tree at work in another process, seen as far as its first tool result."""
    model = project.script(agents, name="first.yaml")
    with project.running("run", "work", "--model", model, *options, quick=quick) as process:
        assert process.stderr is not None
        read_until(process.stderr, 'Tool "glob" result')
        yield process


def release(project: Project) -> None:
    """Let the run go on that waits in `HELD`."""
    (project.folder / "gate").touch()


def waiting(project: Project, count: int = 1) -> list[dict[str, object]]:
    """The questions that wait, when there are so many."""
    found: list[dict[str, object]] = []

    def asked() -> bool:
        nonlocal found
        found = json.loads(project.retinue("approvals", "--json").stdout)
        return len(found) >= count

    until(asked)
    return found


@pytest.mark.requirement("CPE-65")
def test_what_is_seen_early_can_be_cancelled_before_it_ends(project: Project) -> None:
    agents = {
        "main": [{"tools": [GLOB]}, {"tools": [CHILD]}, "the end"],
        "explorer": [{"text": "I am going the wrong way", "tools": [GLOB]}, {"hang": True}],
    }
    with first(project, agents, "--yes") as process:
        with project.running("tail", "-f") as tail:
            assert tail.stdout is not None
            read_until(tail.stdout, "I am going the wrong way")
            assert process.poll() is None
            tree = project.rows()[0]["tree"]
            done = project.retinue("cancel", "/main/explorer-1")
            assert (done.returncode, done.stdout, done.stderr) == (0, f"{tree}/1 cancelled\n", "")
            assert tail.wait() == 0
        out, _ = process.communicate()
    assert (process.returncode, out) == (0, "the end\n")  # its parent goes on
    again = project.retinue("cancel", f"{tree}/1")
    assert (again.returncode, again.stderr) == (1, f"retinue: {tree}/1 had ended already: cancelled\n")


def test_cancelling_the_primary_ends_the_first_terminals_command(project: Project) -> None:
    with first(project, {"main": [{"tools": [GLOB]}, {"hang": True}]}, quick=False) as process:
        [row] = project.rows()
        assert row["pid"] == process.pid
        assert (
            f"{row['tree']} runs in process {process.pid}; its control server is running"
            in project.retinue("ps").stdout
        )
        assert project.retinue("cancel", "main").stdout == f"{row['tree']}/0 cancelled\n"
        process.communicate()
        assert process.returncode == 130
    assert project.rows()[0]["pid"] is None
    assert list(project.folder.glob(".retinue/control/*")) == []


def test_a_steer_and_its_receipts(project: Project) -> None:
    agents = {"main": [{"tools": [GLOB]}, {"tools": [HELD]}, {"hang": True}]}
    project.run(agents={"main": ["another main, which has ended"]})
    with first(project, agents, "--yes") as process:
        with project.running("send", "main", "look at the tests", "--wait", "100") as sending:
            until(lambda: any(event["kind"] == "inbox" for event in project.events()))
            release(project)
            assert (sending.communicate()[0], sending.returncode) == ("delivered at turn 3\n", 0)
        queued = project.retinue("send", "main", "-", "--wait", "0.2", "--json", stdin="and then stop\n")
        assert json.loads(queued.stdout)["state"] == "queued"
        assert "#### inbox\nlook at the tests\n" in project.retinue("tail").stdout
        interrupt(process)
        process.communicate()
    assert "'main' could be any of" in project.retinue("send", "main", "hello?").stderr
    late = project.retinue("send", project.rows()[0]["tree"], "hello?")
    assert (late.returncode, late.stdout) == (1, "")
    assert late.stderr == "retinue: too late: the run has ended: cancelled\n"
    assert "no run is called 'nobody'" in one_line_error(project.retinue("send", "nobody", "x"))
    inbox = [(e["text"], e["source"]) for e in project.events() if e["kind"] == "inbox"]
    assert inbox == [("look at the tests", "user"), ("and then stop", "user")]


def test_questions_are_listed_numbered_and_answered(project: Project) -> None:
    both = {"tools": [write("a.txt"), write("b.txt")]}
    with first(project, {"main": [{"tools": [GLOB]}, both, "end"]}, "--wait-approvals", "600") as process:
        questions = waiting(project, 2)
        tree = questions[0]["tree"]
        assert [(q["number"], q["tool"], q["call_id"]) for q in questions] == [
            (1, "write", "call_2_1"),
            (2, "write", "call_2_2"),
        ]
        assert all(q["id"].startswith(f"{tree}/0/") for q in questions)
        lines = project.retinue("approvals").stdout.splitlines()
        assert lines[0].split() == ["NO", "RUN", "AGENT", "QUESTION", "ID"]
        assert lines[1].split()[:4] == ["1", f"{tree}/0", "main", "write(a.txt)"]
        assert lines[3:] == ["", "retinue approve 1 · retinue deny 1 REASON"]
        assert "no question '7' is waiting; there is 1 (" in one_line_error(project.retinue("approve", "--yes", "7"))
        assert f"retinue: '{tree}' could be any of:\n" in project.retinue("approve", "--yes", tree).stderr
        denied = project.retinue("deny", "1", "not here")
        assert (denied.returncode, denied.stdout) == (0, f"denied write(a.txt) of {tree}/0\n")
        assert "there is 2 (" in one_line_error(project.retinue("approve", "--yes", "1"))  # it never means another one
        approved = project.retinue("approve", "--yes", questions[1]["id"])
        assert (approved.returncode, approved.stdout) == (0, f"approved write(b.txt) of {tree}/0\n")
        out, err = process.communicate()
    assert (process.returncode, out) == (0, "end\n")
    assert "✗ denied write(a.txt) by user in process" in err
    assert [(project.folder / name).exists() for name in ("a.txt", "b.txt")] == [False, True]
    results = {e["call_id"]: e["text"] for e in project.events() if e["kind"] == "tool.result"}
    assert results["call_2_1"] == "The user denied this call: not here"
    assert project.retinue("approvals").stdout == "Nothing waits for an answer.\n"


def test_a_number_is_never_the_beginning_of_an_id() -> None:
    asked = Approval("7bs9/0/12", "7bs9", 0, "/main", "main", "write", {}, "call_1_1", number=2)
    waits = [PendingQuestion(asked, 1, ControlClient(Address(version=1, pid=1, port=9, token="t", writer="1")))]
    assert match_questions(waits, "7b") == match_questions(waits, "2") == waits
    assert match_questions(waits, "7") == match_questions(waits, "1") == []


def test_approvals_watch_shows_questions_as_they_come_and_what_came_of_them(project: Project) -> None:
    agents = {"main": [{"tools": [GLOB]}, {"tools": [write("a.txt")]}, {"tools": [write("b.txt")]}, "end"]}
    with (
        first(project, agents, "--wait-approvals", "600") as process,
        project.running("approvals", "--watch") as watch,
    ):
        assert watch.stdout is not None
        shown = read_until(watch.stdout, "retinue approve 1 ·")
        header = f"◐ write(a.txt)  main · question 1 of {waiting(project)[0]['tree']}/0\n"
        assert header in shown and header in project.retinue("approvals", "1").stdout
        asking = Terminal(project, "approve", "1")
        assert header in asking.read_until("approve this? [y/N]").replace("\r", "")
        asking.type("n\n")
        asking.read_until(None)
        assert asking.end() == 2
        assert "\n│ +x" in shown  # the whole preview, as at the terminal
        assert project.retinue("approve", "--yes", "1").returncode == 0
        rest = read_until(watch.stdout, "retinue approve 2 ·")
        rest += "" if "/0: approved by user" in rest else read_until(watch.stdout, "/0: approved by user")
        assert "1  write(a.txt) of " in rest
        assert project.retinue("deny", "2").returncode == 0
        assert process.wait() == 0
        assert "2  write(b.txt) of " in read_until(watch.stdout, "/0: denied by user")
        interrupt(watch)
        assert watch.wait() == 130


def test_two_real_terminals_answer_at_once_and_one_is_told_that_it_was_late(project: Project) -> None:
    rounds = 5
    agents = {"main": [{"tools": [GLOB]}, *({"tools": [write(f"{n}.txt")]} for n in range(rounds)), "end"]}
    with first(project, agents, "--wait-approvals", "600") as process:
        for number in range(1, rounds + 1):
            [question] = waiting(project)
            assert question["number"] == number
            words = (["approve", "--yes", str(question["id"])], ["deny", str(question["id"]), "no"])
            with ThreadPoolExecutor(2) as terminals:
                done = list(terminals.map(lambda w: project.retinue(*w), words))
            assert sorted(each.returncode == 0 for each in done) == [False, True]
            [late] = [each.stderr for each in done if each.returncode]
            assert "somebody else was first" in late or "is waiting" in late
        assert process.wait() == 0
    decided = [e for e in project.events() if e["kind"] == "approval.decided"]
    assert len(decided) == rounds
    assert [e.get("allowed") for e in decided] == [(project.folder / f"{n}.txt").exists() for n in range(rounds)]


def test_a_question_open_at_the_first_terminal_is_answered_at_the_second(project: Project) -> None:
    model = project.script({"main": [{"tools": [write("a.txt")]}, {"tools": [write("b.txt")]}, "end"]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    terminal.read_until("[y]es [n]o > ")
    waiting(project)
    assert project.retinue("approve", "--yes", "1").returncode == 0
    terminal.read_until("(no longer needed)")
    terminal.read_until("approved write(a.txt)")
    terminal.text = terminal.read_until("◐ write(b.txt)").partition("◐ write(b.txt)")[2]
    terminal.read_until("[y]es [n]o > ")  # what is typed before it answers nothing
    terminal.type("n\n")
    terminal.read_until(None)
    assert terminal.end() == 0
    assert [(project.folder / name).exists() for name in ("a.txt", "b.txt")] == [True, False]


def test_tail_f_has_the_pieces_of_text_while_they_are_said(project: Project) -> None:
    spoken = {"tools": [GLOB], "text": "one two three", "chunks": 3}
    with (
        first(project, {"main": [{"tools": [GLOB]}, {"tools": [HELD]}, spoken, "end"]}, "--yes"),
        project.running("tail", "-f", "--json", "--deltas") as tail,
    ):
        assert tail.stdout is not None
        read = read_until(tail.stdout, "-e gate")
        release(project)
        out, err = tail.communicate()
    assert (tail.returncode, err) == (0, "")
    lines = [json.loads(line) for line in (read + out).splitlines()]
    events = [line for line in lines if "delta" not in line]
    said = "".join(line["delta"]["text"] for line in lines if "delta" in line)
    assert said.startswith("one two three")
    assert events == project.events()
    text = next(n for n, line in enumerate(lines) if line.get("text") == "one two three")
    assert any("delta" in line for line in lines[:text])


def test_a_terminal_shows_what_is_being_said_on_its_last_line(project: Project) -> None:
    spoken = {"tools": [GLOB], "text": "spoken \x1b[31mslowly", "chunks": 2}
    with first(project, {"main": [{"tools": [GLOB]}, {"tools": [HELD]}, spoken, "end"]}, "--yes"):
        terminal = Terminal(project, "tail", "-f", "--plain", NO_COLOR="")
        terminal.read_until("-e gate")
        release(project)
        shown = terminal.read_until(None)
        assert terminal.end() == 0
    assert "\r\x1b[K" in shown
    assert "main: spoken" in shown
    assert "\x1b[31mslowly" not in shown


def test_the_first_terminal_shows_what_is_being_said_too(project: Project) -> None:
    spoken = {"tools": [write("a.txt")], "text": "spoken \x1b[31mslowly", "chunks": 2, "thinking": "hm"}
    model = project.script({"main": [spoken, "the end"]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model, NO_COLOR="")
    terminal.read_until("[y]es [n]o > ")
    terminal.type("y\n")
    shown = terminal.read_until(None)
    assert terminal.end() == 0
    assert "\r\x1b[K\x1b[2mmain: spoken" in shown
    assert "main: hm" not in shown.partition("main: spoken")[2]
    assert "\x1b[31mslowly" not in shown
    plain = project.retinue("run", "x", "--yes", "--model", model, FORCE_COLOR="1", NO_COLOR="")
    assert "main: spoken" not in plain.stderr  # a file keeps what was said, not how


@pytest.mark.requirement("P23")
def test_when_the_first_is_killed_the_second_is_told_and_nothing_stays_running(project: Project) -> None:
    agents = {"main": [{"tools": [GLOB]}, {"tools": [write("a.txt")]}, "end"]}
    with first(project, agents, "--wait-approvals", "600", quick=False) as process:
        waiting(project)
        with project.running("tail", "-f") as tail:
            assert tail.stdout is not None
            read_until(tail.stdout, "◐ write(a.txt)")
            [left] = project.folder.glob(".retinue/control/*.json")
            process.kill()
            process.wait()
            _, said = tail.communicate()
        [row] = project.rows()
        tree = row["tree"]
        assert (row["state"], row["pid"]) == ("interrupted", None)
        assert said == f"retinue: warning: the process that ran {tree} is gone; to continue: retinue resume {tree}\n"
        for command in (["send", tree, "hello"], ["cancel", tree]):
            said = one_line_error(project.retinue(*command))
            assert said == f"{tree}/0 was interrupted, its process is gone: retinue resume {tree}"
        assert left.exists()
        assert project.retinue("approvals").stdout == "Nothing waits for an answer.\n"
        assert not left.exists()
        assert "no question '1' is waiting; there is none" in one_line_error(project.retinue("approve", "--yes", "1"))


def test_without_a_control_server_nobody_comes_in(project: Project) -> None:
    with first(project, {"main": [{"tools": [GLOB]}, {"hang": True}]}, "--no-control", quick=False) as process:
        said = one_line_error(project.retinue("cancel", "main"))
        assert f"process {process.pid} runs" in said
        assert "has no control server" in said
        assert "it has no control server" in project.retinue("ps").stdout
        assert not (project.folder / ".retinue/control").exists()
        with project.running("tail", "-f", "--json") as tail:  # reads the file then
            assert tail.stdout is not None
            read_until(tail.stdout, '"turn.started","turn":2')
            interrupt(process)
            assert tail.wait() == 0


def test_questions_that_nobody_answers_expire(project: Project) -> None:
    done = project.run("--wait-approvals", "0.2", agents={"main": [{"tools": [write("a.txt")]}, "went on"]})
    assert (done.returncode, done.stdout) == (1, "")
    assert not (project.folder / "a.txt").exists()
    assert "nobody was there to answer within 0.2 s" in done.stderr


def test_detached_goes_on_alone(project: Project) -> None:
    model = project.script({"main": [{"tools": [GLOB]}, {"tools": [write("a.txt")]}, "at last"]})
    before = os.umask(0)
    try:
        done = project.retinue("run", "x", "--detach", "--model", model)  # its output ends though the run goes on
    finally:
        os.umask(before)
    tree = done.stdout.strip()
    assert (done.returncode, done.stderr, len(tree)) == (0, "", 12)
    [question] = waiting(project)
    pid = int(str(question["pid"]))
    assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)
    [row] = project.rows()
    assert (row["tree"], row["state"], row["pid"]) == (tree, "waiting_approval", pid)
    folder = project.folder / ".retinue"
    private = [
        folder / "control",
        folder / f"runs/{tree}/0",
        *(folder / "control").glob(f"{pid}-*.json"),
        folder / f"runs/{tree}/0/stderr.txt",
    ]
    assert [path.stat().st_mode & 0o777 for path in private] == [0o700, 0o700, 0o600, 0o600]
    with project.running("tail", "-f", tree) as tail:
        assert project.retinue("approve", "--yes", "1").returncode == 0
        out, _ = tail.communicate()
    assert "✓ approved write(a.txt)" in out
    until(lambda: not list((folder / "control").iterdir()))
    assert (project.folder / "a.txt").read_text() == "x"
    until(lambda: (folder / f"runs/{tree}/0/stdout.txt").read_text() == "at last\n")
    assert '#### Tool "glob" result' in (folder / f"runs/{tree}/0/stderr.txt").read_text()
    assert project.rows()[0]["state"] == "done"


def test_detached_reads_its_task_first_and_can_be_cancelled(project: Project) -> None:
    model = project.script({"main": [{"hang": True}]})
    done = project.retinue("run", "-", "--detach", "--yes", "--model", model, stdin="the long task\n")
    tree = done.stdout.strip()
    [row] = project.rows()
    assert (row["task"], row["tree"]) == ("the long task", tree)
    assert project.retinue("cancel", tree).stdout == f"{tree}/0 cancelled\n"


def test_what_is_wrong_is_said_before_detaching(project: Project) -> None:
    said = one_line_error(project.retinue("run", "x", "--detach", "--model", "scripted:nowhere.yaml"))
    assert "nowhere.yaml" in said
    model = project.script({"main": ["ok"]})
    assert "unknown profile" in one_line_error(
        project.retinue("run", "x", "--detach", "--profile", "nobody", "--model", model)
    )
    assert "--no-control" in one_line_error(project.retinue("run", "x", "--detach", "--no-control", "--model", model))
    shutil.rmtree(project.folder / ".retinue")
    (project.folder / ".retinue").write_text("in the way")
    assert str(project.folder) in one_line_error(project.retinue("run", "x", "--detach", "--model", model))


def test_a_number_that_two_trees_have_is_no_answer_to_either(project: Project) -> None:
    model = project.script({"main": [{"tools": [write("a.txt")]}, "end"]})
    trees = [project.retinue("run", task, "--detach", "--model", model).stdout.strip() for task in ("this", "that")]
    assert [question["number"] for question in waiting(project, 2)] == [1, 1]
    refused = project.retinue("approve", "--yes", "1")
    assert (refused.returncode, refused.stdout) == (2, "")
    said, *candidates = sorted(refused.stderr.splitlines(), key=len)
    assert said == "retinue: '1' could be any of:"
    assert all(re.search(r"/0/\d+ \(write\(a\.txt\)\) of \d{4}-\d\d-\d\d \d\d:\d\d: ", line) for line in candidates)
    for tree, task in zip(trees, ("this", "that"), strict=True):
        assert any(line.startswith(f"  {tree}/0/") and line.endswith(f": {task}") for line in candidates)
    for tree in trees:
        assert project.retinue("deny", tree).returncode == 0
    until(lambda: not list((project.folder / ".retinue/control").iterdir()))


def test_an_answer_can_reach_further_than_one_call(project: Project) -> None:
    agents = {"main": [{"tools": [GLOB]}, {"tools": [write("a.txt")]}, {"tools": [write("b.txt")]}, "end"]}
    with first(project, agents, "--wait-approvals", "600") as process:
        [question] = waiting(project, 1)
        assert project.retinue("approve", "--yes", question["id"], "--run").returncode == 0
        out, _ = process.communicate()
    assert (process.returncode, out) == (0, "end\n")
    decided = [
        (e["by"].split(":")[0], e.get("scope", "call")) for e in project.events() if e["kind"] == "approval.decided"
    ]
    assert decided[0][1] == "run"
    assert decided[1][0] == "rule"


def test_an_answer_for_all_that_a_run_asks_and_one_for_the_project(project: Project) -> None:
    def shell(command: str) -> dict[str, object]:
        return {"name": "shell", "args": {"command": command}}

    asks = ([write("a.txt"), write("b.txt")], [shell("echo 1")], [shell("echo $(echo 2)"), shell("echo 3")])
    with first(project, {"main": [{"tools": [GLOB]}, *({"tools": a} for a in asks)]}, "--wait-approvals", "600") as run:
        tree = waiting(project, 2)[0]["tree"]
        both = project.retinue("approve", "--yes", "1", "--pending")
        assert both.stdout == f"approved write(a.txt) of {tree}/0\napproved write(b.txt) of {tree}/0\n"
        waiting(project)
        always = project.retinue("approve", "--yes", "3", "--project")
        assert always.stdout.splitlines()[1:] == [
            "allowed in this project from now on, by the rule in retinue.yaml: shell(echo 1)"
        ]
        assert "shell(echo 1)" in (project.folder / "retinue.yaml").read_text()
        waiting(project, 2)
        said = one_line_error(project.retinue("approve", "--yes", "4", "--project"))
        assert "no rule would allow only shell(echo $(echo 2)), because " in said and "answer without --project" in said
        for far in ("--pending", "--project"):
            assert "--set is about one call" in one_line_error(
                project.retinue("approve", "--yes", "4", far, "--set", "a=1")
            )
        assert len(project.retinue("deny", "4", "enough", "--pending").stdout.splitlines()) == 2
        assert run.communicate()[0] == "done\n"
    texts = [e["text"] for e in project.events() if e["kind"] == "tool.result"]
    assert texts[-2:] == ["The user denied this call: enough"] * 2


@pytest.mark.finding("X4")
def test_a_question_is_shown_whole_before_a_yes_from_another_terminal(project: Project) -> None:
    command = "true\n" + "# harmless\n" * 600 + "echo evil"
    agents = {"main": [{"tools": [GLOB]}, {"tools": [{"name": "shell", "args": {"command": command}}]}, "end"]}
    with first(project, agents, "--wait-approvals", "600") as process:
        waiting(project, 1)
        assert "evil" not in project.retinue("approvals").stdout  # a list; each can be seen whole
        shown = project.retinue("approvals", "1").stdout
        assert "evil" in shown and shown.count("harmless") >= 600
        assert all(line.startswith("│ ") for line in shown.rstrip("\n").split("\n")[1:])
        why = one_line_error(project.retinue("approve", "1"))
        assert why == "there is no terminal to ask on: look with `retinue approvals ID`, then give --yes"
        assert len(waiting(project, 1)) == 1
        assert project.retinue("approve", "1", "--yes").returncode == 0
        assert process.wait(100) == 0
