"""`retinue` alone: a conversation in a real terminal, with everything a person does in it."""

import json
import os
import shlex
import signal
import sys
from typing import Any

import pytest

from retinue.core.messages import INTERRUPTED_TURN
from tests.gates import Gate
from tests.surfaces.cli.shell import COMMAND, Project, one_line_error, until
from tests.surfaces.cli.test_live import KEYS, Open, open_tmux  # noqa: F401 - a fixture
from tests.surfaces.tmux import Tmux

WRITE = {"tools": [{"name": "write", "args": {"path": "a.txt", "content": "one\n"}}]}
SPAWN = {"tasks": [{"task": "slow", "subagent_id": "slow"}], "background": True}
START = {"tools": [{"name": "spawn_subagents", "args": SPAWN}]}
# The command, but the second Ctrl-C may come as late as a slow machine wants.
PATIENT = (
    "import sys; from retinue.surfaces.cli import conversation; from retinue.surfaces.cli.main import main\n"
    "conversation.AGAIN_SECONDS = 200.0; sys.exit(main())"
)
CHANGE = {"tools": [{"name": "write", "args": {"path": "a.txt", "content": "two\n"}}]}


def start(open_tmux: Open, project: Project, agents: dict[str, Any], *options: str, **more: Any) -> Tmux:  # noqa: F811
    model = project.script(agents)
    given = ["--runtime", "inherited"] if "--runtime" not in options else []
    terminal = open_tmux("--model", model, *given, *options, **more)
    terminal.read_until("Type a message.")
    return terminal


def say(terminal: Tmux, text: str) -> None:
    terminal.type(text)
    terminal.press("Enter")


def words(project: Project) -> list[str]:
    """Return the user's texts from the log of the project's one tree."""
    events = project.events()
    said = [event["text"] for event in events if event["kind"] == "inbox" and event["source"] == "user"]
    return [events[0]["task"], *said]


def kinds(project: Project) -> list[str]:
    return [event["kind"] for event in project.events() if event["run"] == 0]


def test_it_answers_message_after_message_and_ends_once(project: Project, open_tmux: Open) -> None:  # noqa: F811
    terminal = start(open_tmux, project, {"main": ["I am **here**.", "Two lines, I see.", "As before."]})
    say(terminal, "hello")
    terminal.read_until("I am here.")
    terminal.type("first")
    terminal.press("C-j")
    terminal.paste("second\nthird")
    assert words(project) == ["hello"], "a pasted newline sends nothing"
    terminal.press("Enter")
    terminal.read_until("Two lines, I see.")
    terminal.press("Up")
    terminal.read_until(lambda text: "> first" in text and "  third" in text)
    terminal.press("Enter")
    terminal.read_until("As before.")
    assert words(project) == ["hello", *(["first\nsecond\nthird"] * 2)]
    [row] = project.rows()
    assert (row["state"], row["turns"]) == ("waiting", 3)
    say(terminal, "/exit")
    assert terminal.wait_for_end() == 0
    assert f"Come back: retinue resume {row['tree']}" in terminal.text
    assert kinds(project).count("run.ended") == 1
    assert project.rows()[0]["status"] == "done"
    for after in ("0", "1"):  # the first event says that this is a conversation
        assert project.retinue("tail", "--after", after).stdout.count("As before.") == 1


def test_a_message_sent_while_it_starts_is_its_first_message(project: Project, open_tmux: Open) -> None:  # noqa: F811
    gate = Gate(project.folder / "gate")
    server = {"command": "sh", "args": ["-c", f"{gate.command}; exit 1"]}
    (project.folder / "late.yaml").write_text(json.dumps({"mcp_servers": {"late": server}}))
    model = project.script({"main": ["I am here."]})
    terminal = open_tmux("--model", model, "--runtime", "inherited", "--config", "late.yaml")
    held = gate.hold()
    terminal.read_until("\n>")
    say(terminal, "hello")
    terminal.read_until(lambda text: "> hello" not in text)
    os.close(held)
    terminal.read_until("I am here.")
    assert words(project) == ["hello"]


def test_typing_while_it_works_steers_and_escape_interrupts(project: Project, open_tmux: Open) -> None:  # noqa: F811
    gate, hang = Gate(project.folder / "gate"), Gate(project.folder / "hang")
    agents = {"main": [gate.reply, "It is done.", hang.reply, "As you like."]}
    terminal = start(open_tmux, project, agents, "--yes")
    say(terminal, "work")
    terminal.read_until(lambda text: "◐ shell(" in text.replace("◓", "◐").replace("◑", "◐").replace("◒", "◐"))
    terminal.read_until("Esc interrupts.")
    say(terminal, "quickly")
    terminal.read_until("queued: the run reads it at its next turn")
    gate.open()
    terminal.read_until("It is done.")
    assert "delivered at turn 2" in terminal.text
    say(terminal, "more")
    held = hang.hold()
    terminal.press("Escape")
    terminal.read_until("interrupted")
    os.close(held)
    until(lambda: project.rows()[0]["state"] == "waiting")
    say(terminal, "leave it")
    terminal.read_until("As you like.")
    outcomes = [event.get("outcome", "") for event in project.events() if event["kind"] == "tool.result"]
    assert outcomes == ["", "interrupted"]
    terminal.press("C-d")
    assert terminal.wait_for_end() == 0
    assert INTERRUPTED_TURN not in terminal.history


def test_a_question_is_answered_beside_the_input_line(project: Project, open_tmux: Open) -> None:  # noqa: F811
    gate = Gate(project.folder / "gate")
    (project.folder / "retinue.yaml").write_text("approvals: {mode: ask, allow: [shell]}\n")
    project.retinue("trust", "--yes")
    terminal = start(open_tmux, project, {"main": [gate.reply, WRITE, "Written."]}, "--workspace", "shared")
    say(terminal, "write")
    held = gate.hold()
    terminal.type("yes, and")  # a line that is being typed answers nothing
    terminal.read_until("> yes, and")
    os.close(held)
    terminal.read_until("write(a.txt)")
    terminal.type(" more")
    terminal.read_until("> yes, and more")
    assert not (project.folder / "a.txt").exists()
    terminal.press("C-u")
    terminal.read_until(KEYS)
    terminal.type("y")
    terminal.read_until("Written.")
    assert (project.folder / "a.txt").read_text() == "one\n"
    assert words(project) == ["write"]


def test_commands(project: Project, open_tmux: Open) -> None:  # noqa: F811
    gate = Gate(project.folder / "gate")
    agents = {
        "main": [
            WRITE,
            "One.",
            CHANGE,
            "Two.",
            START,
            "Three.",
            "Four.",
        ],
        "slow": [gate.reply, "never"],
    }
    other = project.script({"main": ["The other one."] * 9}, name="other.json")
    terminal = start(open_tmux, project, agents, "--yes", "--workspace", "copy", rows=60, columns=120)
    say(terminal, "/tree")
    terminal.read_until("nothing was said yet")
    say(terminal, "/nonsense")
    terminal.read_until("there is no command /nonsense; /help lists them")
    terminal.type("/he")
    terminal.press("Tab")
    terminal.press("Enter")
    terminal.read_until("/send N TEXT")
    say(terminal, "write")
    terminal.read_until("One.")
    for text, content in (("", "one\n"), ("again", "two\n")):
        if text:
            say(terminal, text)
            terminal.read_until("Two.")
        say(terminal, "/apply")
        terminal.read_until("apply these changes? [y]es [n]o")
        terminal.type("y")
        until(
            lambda content=content: (
                (project.folder / "a.txt").exists() and (project.folder / "a.txt").read_text() == content
            )
        )
    say(terminal, "/diff")
    terminal.read_until("nothing has changed")
    say(terminal, "start")
    terminal.read_until("Three.")
    held = gate.hold()
    say(terminal, "/tree")
    terminal.read_until("1  └─ subagent [slow]  running")
    say(terminal, "/send slow hurry up")
    terminal.read_until("queued: the run reads it at its next turn")
    say(terminal, "/inbox")
    terminal.read_until("nothing waits for an answer")
    say(terminal, "/cancel 1")
    terminal.read_until("Four.")
    os.close(held)
    say(terminal, "/cost")
    terminal.read_until("2 agents · ")
    say(terminal, f"/model scripted:{project.folder}/other.json")
    terminal.read_until("answers from the next turn on")
    assert other
    say(terminal, "who are you?")
    terminal.read_until("The other one.")
    say(terminal, "/exit")
    assert terminal.wait_for_end() == 0


def test_changes_that_the_project_already_has_are_applied_without_a_question(
    project: Project,
    open_tmux: Open,  # noqa: F811
) -> None:
    terminal = start(open_tmux, project, {"main": [WRITE, "One."]}, "--yes", "--workspace", "copy")
    say(terminal, "write")
    terminal.read_until("One.")
    (project.folder / "a.txt").write_text("one\n")
    say(terminal, "/apply")
    terminal.read_until("the project already has these changes")
    assert "apply these changes?" not in terminal.text
    say(terminal, "/apply")
    terminal.read_until("were already applied")


def test_leaving_asks_whether_children_go_on_and_resume_comes_back(project: Project, open_tmux: Open) -> None:  # noqa: F811
    gate, turn = Gate(project.folder / "gate"), Gate(project.folder / "turn")
    agents = {
        "main": [
            START,
            "Started.",
            "I hear.",
            turn.reply,
            "It has ended.",
            "Bye.",
        ],
        "slow": [gate.reply, "slow is done"],
    }
    terminal = start(open_tmux, project, agents, "--yes")
    say(terminal, "start")
    terminal.read_until("Started.")
    held = gate.hold()
    terminal.press("C-d")
    terminal.read_until("1 subagent is at work: [g]o on in the background")
    terminal.press("Escape")
    terminal.read_until(lambda text: "[g]o on" not in text)
    say(terminal, "/exit")
    terminal.read_until("[g]o on")
    terminal.type("g")
    assert terminal.wait_for_end() == 0
    assert "Come back: retinue resume" in terminal.text
    assert [row["state"] for row in project.rows()] == ["waiting", "running"]
    pid = project.rows()[0]["pid"]
    back = open_tmux("resume", "--yes")
    back.read_until(lambda text: "Started." in text and "1 running" in text)
    say(back, "are you there?")
    back.read_until("I hear.")
    os.close(held)
    turn_held = turn.hold()  # it reads that its last subagent has ended, and has its turn
    assert project.retinue("send", "last", "take your time", "--wait", "0").returncode == 0, "its process stays"
    os.close(turn_held)
    back.read_until("It has ended.")
    assert back.history.count("slow is done") == 1
    assert project.rows()[0]["pid"] == pid, "the process stays while a terminal is attached"
    os.kill(pid, signal.SIGKILL)
    until(lambda: project.rows()[0]["pid"] not in (None, pid))  # this terminal takes over
    back.read_until(lambda text: text.split("\n")[-2].startswith(">"))
    say(back, "bye")
    back.read_until("Bye.")
    say(back, "/exit")
    assert back.wait_for_end() == 0
    assert kinds(project).count("run.ended") == 1


def test_what_is_typed_before_it_has_the_terminal_is_the_first_message(project: Project, open_tmux: Open) -> None:  # noqa: F811
    model = project.script({"main": ["One."]})
    terminal = open_tmux("--model", model, "--runtime", "inherited")
    say(terminal, "hello")
    terminal.read_until("One.")
    assert words(project) == ["hello"]


def test_kill_9_and_come_back(project: Project, open_tmux: Open) -> None:  # noqa: F811
    terminal = start(open_tmux, project, {"main": ["One.", "Two.", {"hang": True}, "Three."]})
    say(terminal, "hello")
    terminal.read_until("One.")
    pid = project.rows()[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert terminal.wait_for_end() == 137
    assert project.rows()[0]["state"] == "interrupted"
    refused = project.retinue("resume")
    assert (refused.returncode, "is a conversation: resume it at a terminal" in one_line_error(refused)) == (2, True)
    back = open_tmux("resume")
    back.read_until(lambda text: "hello" in text and "One." in text)
    until(lambda: project.rows()[0]["state"] == "waiting")
    back.press("Up")
    back.read_until("> hello")
    back.press("C-u")
    say(back, "and now?")
    back.read_until("Two.")
    say(back, "more")
    back.read_until("waits for the model")
    os.kill(project.rows()[0]["pid"], signal.SIGTERM)
    assert back.wait_for_end() == 0
    assert "The conversation stays open. Come back: retinue resume" in back.text
    again = open_tmux("resume")
    again.read_until("Two.")
    say(again, "still there?")
    again.read_until("Three.")
    assert words(project) == ["hello", "and now?", "more", "still there?"]
    say(again, "/exit")
    assert again.wait_for_end() == 0
    assert kinds(project).count("run.ended") == 1
    onward = open_tmux("resume", project.rows()[0]["tree"])
    onward.read_until("has ended: your next message continues it")
    say(onward, "hello again")
    onward.read_until("One.")


def test_ctrl_c_clears_interrupts_and_leaves(project: Project, open_tmux: Open) -> None:  # noqa: F811
    agents = {"main": ["One.", {"hang": True}, "Three."]}
    terminal = start(open_tmux, project, agents, program=[sys.executable, "-c", PATIENT])
    terminal.type("no")
    terminal.read_until("> no")
    terminal.press("C-c")
    terminal.read_until(lambda text: "> no" not in text)
    say(terminal, "hello")
    terminal.read_until("One.")
    say(terminal, "more")
    terminal.read_until("waits for the model")
    terminal.press("C-c")
    terminal.read_until("interrupted")
    terminal.press("C-c")
    terminal.read_until("press Ctrl-C again to leave")
    terminal.press("C-c")
    assert terminal.wait_for_end() == 0
    assert project.rows()[0]["status"] == "done"


def test_without_a_terminal_it_is_help_and_exit_2(project: Project) -> None:
    alone = project.retinue()
    assert alone.returncode == 2
    assert alone.stderr.startswith("usage: retinue")
    assert not alone.stdout
    given = project.retinue("--model", project.script({"main": ["x"]}))
    assert (given.returncode, one_line_error(given)) == (
        2,
        "a conversation needs a terminal: `retinue run TASK` works without one",
    )


def test_ctrl_z_stops_both_processes_and_fg_goes_on(project: Project, open_tmux: Open) -> None:  # noqa: F811
    model = project.script({"main": ["One.", "Two."]})
    terminal = open_tmux(shell=True)
    terminal.read_until("shell>")
    say(terminal, f"{shlex.join([*COMMAND, '--model', model])} --runtime inherited")
    terminal.read_until("Type a message.")
    say(terminal, "hello")
    terminal.read_until("One.")
    terminal.press("C-z")
    terminal.read_until("Stopped")
    say(terminal, "fg")
    terminal.read_until(lambda text: text.split("\n")[-2].startswith(">"))
    say(terminal, "more")
    terminal.read_until("Two.")
    terminal.press("C-d")
    terminal.read_until(lambda text: text.endswith("shell>"))
    assert project.rows()[0]["status"] == "done"


def test_the_shell_gets_its_terminal_back_after_a_kill(project: Project, open_tmux: Open) -> None:  # noqa: F811
    model = project.script({"main": ["One."]})
    terminal = open_tmux(shell=True)
    terminal.read_until("shell>")
    say(terminal, f"{shlex.join([*COMMAND, '--model', model])} --runtime inherited")
    terminal.read_until("Type a message.")
    say(terminal, "hello")
    terminal.read_until("One.")
    os.kill(project.rows()[0]["pid"], signal.SIGKILL)
    terminal.read_until(lambda text: text.endswith("shell>"))
    say(terminal, "stty -a | grep -wo -e '-icanon' -e 'icanon'")
    terminal.read_until(lambda text: text.endswith("\nicanon\nshell>"))


def test_a_closed_terminal_cancels_subagents_and_leaves_it_open(project: Project, open_tmux: Open) -> None:  # noqa: F811
    gate = Gate(project.folder / "gate")
    agents = {"main": [START, "Started.", "I see.", "Fine."], "slow": [gate.reply, "never"]}
    terminal = start(open_tmux, project, agents, "--yes")
    say(terminal, "start")
    terminal.read_until("Started.")
    held = gate.hold()
    os.kill(project.rows()[0]["pid"], signal.SIGHUP)
    assert terminal.wait_for_end() == 0
    os.close(held)
    assert [row["state"] for row in project.rows()] == ["interrupted", "cancelled"]
    back = open_tmux("resume", "--yes")
    back.read_until("I see.")  # it was told that its subagent was cancelled
    say(back, "go on")
    back.read_until("Fine.")


@pytest.mark.finding("U7")
def test_without_the_key_of_its_model_it_does_not_open(project: Project, open_tmux: Open) -> None:  # noqa: F811
    terminal = open_tmux("--model", "anthropic:claude-x", "--runtime", "inherited")
    assert terminal.wait_for_end() == 2
    assert "model 'anthropic:claude-x': Set the `ANTHROPIC_API_KEY` environment" in terminal.history


def test_a_collector_that_cannot_be_reached_is_one_line_at_the_end(project: Project, open_tmux: Open) -> None:  # noqa: F811
    nobody = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    terminal = start(open_tmux, project, {"main": ["I am here."]}, columns=160, **nobody)
    say(terminal, "hello")
    terminal.read_until("I am here.")
    say(terminal, "/exit")
    assert terminal.wait_for_end() == 0
    after = terminal.text.partition("Come back:")[2].partition("Pane is dead")[0]  # tmux adds that
    lines = [line for line in after.splitlines()[1:] if line]
    where = "the collector at 127.0.0.1:9"
    assert lines == [f"retinue: warning: telemetry: not all was sent: {where} did not take it within 3 s"]
