"""Tests of the live view of `retinue run` in a real terminal: its screen, its lasting lines and its keys."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gates import Gate
from tests.surfaces.cli.shell import COMMAND, Project, environment, until
from tests.surfaces.cli.test_terminal import HOSTILE, Terminal
from tests.surfaces.tmux import Tmux

KEYS = "[y]es [n]o"
STATUS = "Agents: 1 primary, "
EDIT = {"name": "edit", "args": {"path": "src/lib.rs", "old_string": "old line", "new_string": "new line"}}
Open = Callable[..., Tmux]


@pytest.fixture
def open_tmux(project: Project, tmp_path: Path) -> Iterator[Open]:
    opened: list[Tmux] = []

    def start(
        *arguments: str,
        program: Sequence[str] = COMMAND,
        columns: int = 80,
        rows: int = 24,
        shell: bool = False,
        **more: str,
    ) -> Tmux:
        folder = tmp_path / f"tmux{len(opened)}"
        folder.mkdir()
        words = [*program, *project.said(arguments)] if arguments else []
        env = environment(TERM="tmux-256color", PS1="shell> ", **more)
        command = ["bash", "--norc", "--noprofile", "-i"] if shell else words
        terminal = Tmux(folder, command, env=env, cwd=project.folder, columns=columns, rows=rows)
        opened.append(terminal)
        return terminal

    yield start
    for terminal in opened:
        terminal.close()


@pytest.fixture
def library(project: Project) -> Path:
    """The file that an agent wants to edit."""
    file = project.folder / "src/lib.rs"
    file.parent.mkdir()
    file.write_text("old line\n")
    return file


def spawn(*tasks: str) -> dict[str, Any]:
    listed = [{"task": task, "subagent_type": "worker"} for task in tasks]
    return {"name": "spawn_subagents", "args": {"tasks": listed}}


def list_decisions(project: Project) -> list[dict[str, Any]]:
    return [event for event in project.events() if event["kind"] == "approval.decided" and event.get("by") == "user"]


def make_worker(project: Project) -> None:
    """A profile whose runs work in the project itself."""
    folder = project.folder / ".agent" / "subagent_types" / "worker"
    folder.mkdir(parents=True)
    (folder / "SUBAGENT.md").write_text("---\nname: worker\ndescription: Works\n---\nWork.\n")
    tools = "[read, glob, edit, shell]"
    (project.folder / "retinue.yaml").write_text(f"profiles:\n  worker: {{workspace: shared, tools: {tools}}}\n")


@pytest.mark.requirement("CODEY-24", "CODEY-27", "CODEY-32", "CODEY-33", "CODEY-34", "CODEY-36")
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50), (40, 24)])
def test_a_question_stays_whole_while_others_work(
    project: Project, open_tmux: Open, library: Path, columns: int, rows: int
) -> None:
    make_worker(project)
    noise = [{"tools": [{"name": "glob", "args": {"pattern": f"*.{number}"}}], "delay": 0.01} for number in range(60)]
    model = project.script(
        {
            "main": [{"tools": [spawn("research codebase", "noisy a", "noisy b")]}, "all is done"],
            "research codebase": [{"tools": [EDIT]}, "edited"],
            "noisy a": [*noise, "a has looked"],
            "noisy b": [*noise, "b has looked"],
        }
    )
    terminal = open_tmux("run", "x", "--model", model, columns=columns, rows=rows)
    terminal.read_until(KEYS)
    screen = terminal.read_until(lambda text: "1 running, 2 finished" in text)
    lines = screen.split("\n")
    assert any(line.startswith("◐ [research codebase]") for line in lines), screen
    for piece in ("edit(src/lib.rs)", "│ -old line", "│ +new line", KEYS, f"{STATUS}1 running, 2 finished"):
        assert screen.count(piece) == 1, (piece, screen)
    assert lines[-1].startswith(STATUS) and lines[-2].startswith(KEYS)
    assert library.read_text() == "old line\n"
    terminal.type("y")
    assert terminal.wait_for_end() == 0, terminal.text
    assert library.read_text() == "new line\n"
    history = re.sub(r" ?\n +", " ", terminal.history)  # narrow: lines are broken between words
    for number in range(60):
        assert history.count(f"✓ [noisy a] glob(*.{number}) ") == history.count(f"✓ [noisy b] glob(*.{number}) ") == 1
    assert history.count("✓ [research codebase] edit(src/lib.rs) → edited") == 1
    assert history.count("all is done") == 1
    assert KEYS not in history and STATUS not in history


def test_keys_before_the_question_and_pasted_text_answer_nothing(
    project: Project, open_tmux: Open, library: Path
) -> None:
    gate = Gate(project.folder / "gate")
    (project.folder / "retinue.yaml").write_text("approvals: {mode: ask, allow: [shell]}\n")
    project.retinue("trust", "--yes")
    model = project.script({"main": [gate.reply, {"tools": [EDIT]}, "{{last_result}}"]})
    terminal = open_tmux("run", "x", "--model", model)
    held = gate.hold()
    terminal.read_until("shell(cat ")
    terminal.type("yyyyyyyy")
    os.kill(terminal.pid, signal.SIGINT)  # unlike Ctrl-C, which drops the keys that were not read yet
    terminal.read_until("Cancel what?")
    terminal.press("Escape")  # read after the other keys
    terminal.read_until(lambda text: "Cancel what?" not in text)
    os.close(held)
    terminal.read_until(KEYS)
    terminal.paste("y\ny\n")
    terminal.read_until("pasted text does not answer a question")
    terminal.type("x")
    terminal.read_until("not an answer: press y, n or ?")
    terminal.type("?")
    screen = terminal.read_until("y  yes, this call")
    assert "◐ edit(src/lib.rs)" in screen and "│ +new line" in screen
    assert library.read_text() == "old line\n"
    assert list_decisions(project) == []
    terminal.type("N")
    terminal.read_until("reason >")
    terminal.type("too risky")
    terminal.press("Enter")
    assert terminal.wait_for_end() == 0
    [decided] = list_decisions(project)
    assert (decided["allowed"], decided["reason"]) == (False, "too risky")
    assert library.read_text() == "old line\n"
    assert terminal.history.count("✗ denied edit(src/lib.rs): too risky") == 1


def test_questions_are_numbered_and_answered_in_any_order(project: Project, open_tmux: Open) -> None:
    calls = [{"name": "shell", "args": {"command": f"touch {name}"}} for name in ("one", "two", "three")]
    model = project.script({"main": [{"tools": calls}, "end"]})
    terminal = open_tmux("run", "x", "--model", model)
    terminal.read_until(lambda text: "question 1, 2 more wait" in text and KEYS in text)
    terminal.type("3")
    terminal.read_until(lambda text: "◐ shell(touch three)" in text and KEYS in text)
    terminal.type("y")
    terminal.read_until(lambda text: "question 1, 1 more waits" in text and KEYS in text)
    terminal.type("n")
    terminal.read_until(lambda text: "question 2\n" in text and KEYS in text)
    terminal.type("u")
    assert terminal.wait_for_end() == 0
    assert {path.name for path in project.folder.iterdir()} >= {"two", "three"}
    assert not (project.folder / "one").exists()
    assert [(event["allowed"], event.get("scope", "call")) for event in list_decisions(project)] == [
        (True, "call"), (False, "call"), (True, "run"),
    ]  # fmt: skip


def test_a_long_action_is_paged_and_always_asks_again(project: Project, open_tmux: Open) -> None:
    command = "echo 1\n" + "".join(f"true {number}\n" for number in range(100)) + "touch done"
    plain = {"name": "shell", "args": {"command": "touch kept"}}
    model = project.script({"main": [{"tools": [{"name": "shell", "args": {"command": command}}]}, {"tools": [plain]}]})
    terminal = open_tmux("run", "x", "--model", model)
    screen = terminal.read_until(lambda text: "lines 1-" in text and KEYS in text)
    assert "│ echo 1" in screen and "touch done" not in screen
    for _ in range(12):
        terminal.type(" ")
    screen = terminal.read_until("│ touch done")
    assert "│ true 99" in screen and KEYS in screen
    terminal.type("y")
    terminal.read_until(lambda text: "◐ shell(touch kept)" in text and KEYS in text)
    terminal.type("a")
    terminal.read_until(lambda text: "writes to retinue.yaml" in text and "sure? [y]es [n]o" in text)
    assert "touch kept" not in (project.folder / "retinue.yaml").read_text()
    terminal.type("y")
    terminal.wait_for_end()
    assert "touch kept" in (project.folder / "retinue.yaml").read_text()
    assert (project.folder / "kept").exists()


def test_an_unchanged_edit_is_none_and_a_changed_call_is_shown_again(
    project: Project, open_tmux: Open, tmp_path: Path
) -> None:
    editor = tmp_path / "editor.py"
    editor.write_text(
        "import pathlib, sys\nfile = pathlib.Path(sys.argv[1])\nonce = pathlib.Path(__file__ + '.once')\n"
        "print('IN THE EDITOR')\n"
        "if once.exists():\n    file.write_text(file.read_text().replace('asked', 'edited'))\nonce.touch()\n"
    )
    model = project.script({"main": [{"tools": [{"name": "shell", "args": {"command": "touch asked"}}]}, "end"]})
    terminal = open_tmux("run", "x", "--model", model, EDITOR=f"{sys.executable} {editor}")
    terminal.read_until(KEYS)
    terminal.type("e")
    terminal.read_until("nothing was changed: the question waits as before")
    assert list_decisions(project) == []
    terminal.type("e")
    screen = terminal.read_until("sure? [y]es [n]o")
    assert "◐ shell(touch edited)" in screen and "the call as you changed it" in screen
    assert list_decisions(project) == []
    terminal.type("y")
    assert terminal.wait_for_end() == 0
    assert (project.folder / "edited").exists() and not (project.folder / "asked").exists()


def test_resizing_and_stopping_leave_the_question_whole(project: Project, open_tmux: Open, library: Path) -> None:
    model = project.script({"main": [{"text": "I will edit it.", "tools": [EDIT]}, "end"]})
    terminal = open_tmux(shell=True)
    terminal.read_until("shell>")
    terminal.type(" ".join([*COMMAND, *project.said(["run", "x", "--model", model])]))
    terminal.press("Enter")
    terminal.read_until(KEYS)
    for columns, rows in ((40, 20), (200, 50), (80, 24)):
        terminal.resize(columns, rows)
        screen = terminal.read_until(lambda text: f"{STATUS}0 running, 0 finished" in text and KEYS in text)
        assert screen.count("│ +new line") == screen.count(KEYS) == screen.count(STATUS) == 1, screen
    terminal.press("C-z")
    screen = terminal.read_until("Stopped")
    assert KEYS not in screen
    terminal.type("y; fg")
    terminal.press("Enter")
    terminal.read_until(KEYS)
    assert library.read_text() == "old line\n"
    terminal.type("y")
    terminal.read_until(lambda text: "end\n" in text and text.endswith("shell>"))
    assert library.read_text() == "new line\n"
    assert terminal.history.count("I will edit it.") == 1
    terminal.type("stty -a | grep -c -- '-icanon\\|-echo '")
    terminal.press("Enter")
    terminal.read_until("\n0\nshell>")


def test_ctrl_c_asks_then_cancels_then_kills(project: Project, open_tmux: Open) -> None:
    make_worker(project)
    agents: dict[str, Any] = {
        "main": [{"tools": [spawn("hang here", "hang there")]}, {"hang": True}],
        "hang here": [{"hang": True}],
        "hang there": [{"hang": True}],
    }
    terminal = open_tmux("run", "x", "--model", project.script(agents))
    terminal.read_until("2 running")
    terminal.press("C-c")
    screen = terminal.read_until("Cancel what?")
    assert "[1] [hang here]" in screen and "[2] [hang there]" in screen
    terminal.press("Escape")
    terminal.read_until(lambda text: "Cancel what?" not in text)
    terminal.press("C-c")
    terminal.read_until("Cancel what?")
    terminal.type("2")
    terminal.read_until("1 running, 1 finished")
    terminal.press("C-c")
    terminal.read_until("Cancel what?")
    terminal.press("C-c")
    assert terminal.wait_for_end() == 130
    screen = terminal.text
    assert "cancelling; press Ctrl-C again to kill" in screen
    assert "retinue: cancelled: Run 'main' was cancelled" in screen
    ended = {event["run"]: event["status"] for event in project.events() if event["kind"] == "run.ended"}
    assert ended == {0: "cancelled", 1: "cancelled", 2: "cancelled"}


def test_live_output_is_on_screen_and_ends_folded(project: Project, open_tmux: Open) -> None:
    command = "for i in $(seq 30); do echo line $i; done; sleep 0.3; echo last; while [ ! -e go ]; do sleep 0.1; done"
    model = project.script({"main": [{"tools": [{"name": "shell", "args": {"command": command}}]}, "**end**"]})
    terminal = open_tmux("run", "x", "--yes", "--model", model)
    screen = terminal.read_until("│ last")
    assert re.search(r"[◐◓◑◒] shell\(for i in .* \d+s", screen)
    (project.folder / "go").touch()
    assert terminal.wait_for_end() == 0
    history = terminal.history
    assert "✓ shell(for i in $(seq 30)" in history
    assert "earlier lines]" in history and "line 30" in history and "line 3\n" not in history
    assert history.rstrip().count("end") == 1 and "**" not in history


@pytest.mark.requirement("CODEY-32")
def test_labels_are_cyan_and_no_color_means_none(project: Project, open_tmux: Open, library: Path) -> None:
    make_worker(project)
    model = project.script(
        {"main": [{"tools": [spawn("research codebase")]}, "end"], "research codebase": [{"tools": [EDIT]}]}
    )
    terminal = open_tmux("run", "x", "--model", model, NO_COLOR="")
    terminal.read_until(KEYS)
    assert re.search(r"36m(?:\x1b\[[0-9;]*m)*\[research codebase\]", terminal.painted)
    assert re.search(r"\x1b\[[0-9;]*31m[^\n]*-old line", terminal.painted)
    assert re.search(r"\x1b\[[0-9;]*32m[^\n]*\+new line", terminal.painted)
    plain = open_tmux("run", "x", "--model", model)
    plain.read_until(KEYS)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", plain.painted)


@pytest.mark.parametrize("how", ["--plain", "dumb"])
def test_plain_blocks_where_they_are_wanted(project: Project, open_tmux: Open, library: Path, how: str) -> None:
    model = project.script({"main": [{"tools": [EDIT]}, "the answer"]})
    options = ["--plain"] if how == "--plain" else []
    more = {"TERM": "dumb"} if how == "dumb" else {}
    terminal = Terminal(project, "run", "x", *options, "--model", model, **more)
    screen = terminal.read_until("(? for more) [y]es [n]o > ")
    assert "#### [tool call]\r\nedit\r\n" in screen
    terminal.type("y\n")
    screen = terminal.read_until(None)
    assert terminal.end() == 0
    assert 'Tool "edit" result:\r\n' in screen and "\x1b[" not in screen and STATUS in screen


def test_hostile_text_is_harmless_in_the_live_view(project: Project) -> None:
    imitation = f"\n◐ shell(harmless)\n│ ls\n{KEYS} [a]lways in this project\n{STATUS}0 running"
    hostile = f"{HOSTILE} \x1b]8;;http://evil\x07link\x1b]8;;\x07 \x1b]52;c;ZXZpbA==\x07"
    (project.folder / "evil.txt").write_text(hostile + imitation)
    (project.folder / "long.txt").write_text("x" * 1_000_000)
    calls = [
        {"name": "shell", "args": {"command": f"cat evil.txt # {hostile}{imitation}"}},
        {"name": "shell", "args": {"command": "cat long.txt"}},
    ]
    model = project.script(
        {"main": [{"thinking": hostile, "text": hostile, "tools": calls}, f"answer {hostile}\n\n[a](http://b) ![i](c)"]}
    )
    terminal = Terminal(project, "run", f"task {hostile}", "--yes", "--model", model)
    screen = terminal.read_until(None)
    assert terminal.end() == 0, screen
    ours = re.sub(r"\x1b\[(?:\?(?:2004|25|7)[hl]|[0-9]*[ABCJK]|[0-9;]*m)", "", screen)
    assert not {"\x1b", "\x07", "\u202e", "\u2069", "\x9b", "\x08"} & set(ours)
    assert "\\x1b]52;c;ZXZpbA==\\x07" in ours and "\\u202eevil" in ours
    assert "x" * 5000 not in ours
    lines = ours.replace("\r", "\n").split("\n")
    assert not any(line.startswith(("◐ shell(harmless)", KEYS)) for line in lines)


def test_the_end_names_its_tree_if_a_newer_one_was_begun_meanwhile(
    project: Project, open_tmux: Open, library: Path
) -> None:
    """Commands without a name mean the newest tree: the hint must not lead to the changes of another run."""
    gate = Gate(project.folder / "gate")
    model = project.script({"main": [{"tools": [EDIT]}, gate.reply, "The end."]})
    terminal = open_tmux("run", "first", "--yes", "--workspace", "copy", "--model", model)
    held = gate.hold()
    other = project.script({"main": ["Nothing to do."]}, name="other.json")
    assert project.retinue("run", "second", "--model", other).returncode == 0
    os.close(held)
    assert terminal.wait_for_end() == 0
    [tree] = {row["tree"] for row in project.rows() if row["task"] == "first"}
    name = f"{tree}/0"
    assert f"Review: retinue diff {name}\nApply:  retinue apply {name}  (1 file changed)\n" in terminal.history


def test_the_end_says_how_to_review_and_apply(project: Project, open_tmux: Open, library: Path) -> None:
    model = project.script({"main": [{"tools": [EDIT]}, "# Done\n\nThe *answer*."]})
    terminal = open_tmux("run", "x", "--yes", "--workspace", "copy", "--model", model)
    assert terminal.wait_for_end() == 0
    history = terminal.history
    assert history.count("The answer.") == 1
    assert "Review: retinue diff\nApply:  retinue apply  (1 file changed)\n" in history
    assert re.search(r"\w{12} · 1 agent · 2 turns · 1 tool call · \d+ tokens · \d+\.\ds\n", history + "\n")
    assert history.index("The answer.") < history.index("Review:") < history.index(" · 1 agent")
    out = project.folder / "out.txt"
    terminal = open_tmux(shell=True)
    terminal.read_until("shell>")
    terminal.type(" ".join([*COMMAND, *project.said(["run", "x", "--yes", "--model", model]), ">", str(out)]))
    terminal.press("Enter")
    terminal.read_until(" · 1 agent")
    assert out.read_text() == "# Done\n\nThe *answer*.\n"
    assert "The answer." not in terminal.history


def test_quiet_is_one_line_for_each_call(project: Project, open_tmux: Open, library: Path) -> None:
    missing = {"name": "read", "args": {"path": "not-there"}}
    model = project.script({"main": [{"thinking": "hm", "text": "so", "tools": [EDIT, missing]}, "end"]})
    terminal = open_tmux("run", "x", "--quiet", "--model", model)
    terminal.read_until(KEYS)
    terminal.type("y")
    assert terminal.wait_for_end() == 0
    lines = terminal.history.split("\n")
    assert "✓ edit(src/lib.rs) → edited" in lines
    assert any(re.match(r"✗ read\(not-there\) → \w+", line) for line in lines)
    assert not any("hm" in line or "new line" in line for line in lines)


def test_a_terminal_that_is_gone_ends_the_run(project: Project, open_tmux: Open) -> None:
    terminal = open_tmux("run", "x", "--model", project.script({"main": [{"hang": True}]}))
    terminal.read_until("waits for the model")
    pid = terminal.pid
    terminal.press("C-c")
    os.kill(pid, 1)
    until(lambda: terminal.exit_code is not None)
    assert [row["state"] for row in project.rows()] == ["cancelled"]


def test_tail_follows_in_the_same_view_and_answers_nothing(project: Project, open_tmux: Open, library: Path) -> None:
    command = "while [ ! -e go ]; do echo first line; sleep 0.1; done"
    model = project.script(
        {"main": [{"tools": [{"name": "shell", "args": {"command": command}}]}, {"tools": [EDIT]}, "the *answer*"]}
    )
    (project.folder / "retinue.yaml").write_text("approvals: {mode: ask, allow: [shell]}\n")
    project.retinue("trust", "--yes")
    with project.running("run", "x", "--wait-approvals", "600", "--model", model) as process:
        until(lambda: bool(project.rows()))
        terminal = open_tmux("tail", "-f")
        screen = terminal.read_until("│ first line")
        assert STATUS in screen
        (project.folder / "go").touch()
        terminal.read_until("only watched here: `retinue approve` answers it")
        terminal.type("y")
        assert project.retinue("approve", "--all", "--yes").returncode == 0
        assert terminal.wait_for_end() == 0
        process.communicate()
    history = terminal.history
    assert history.count("✓ edit(src/lib.rs) → edited") == 1 and history.count("the answer") == 1
    assert STATUS not in history
