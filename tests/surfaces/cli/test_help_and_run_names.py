"""Tests of the command line's convenience: synonyms of commands, short names of runs, tables and help that fit."""

import json
import re

import pytest

from retinue.supervisor.tree import new_tree_id
from retinue.surfaces.cli.main import COMMANDS, HEADINGS, SYNONYMS, wrap_text
from tests.surfaces.cli.shell import Project, one_line_error, until
from tests.surfaces.cli.test_terminal import HOSTILE, UNSEEN, Terminal

TASK = {"task": "find out where the discount is computed", "subagent_type": "explorer"}
SPAWN = {"name": "spawn_subagents", "args": {"tasks": [TASK]}}
AGENTS = {"main": [{"tools": [SPAWN]}, "done"], "explorer": ["here"]}
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def show_on_terminal(project: Project, *words: str, **more: str) -> list[str]:
    terminal = Terminal(project, *words, **more)
    lines = terminal.read_until(None).splitlines()
    assert terminal.end() == 0, lines
    return lines


def test_other_words_for_commands_name_the_command(project: Project) -> None:
    for word, meant in (
        ("status", "ps"),
        ("list", "ps"),
        ("top", "ps"),
        ("logs", "tail"),
        ("attach", "tail -f"),
        ("kill", "cancel"),
        ("stop", "cancel"),
        ("inbox", "approvals"),
    ):
        about = COMMANDS[meant.split()[0]]
        said = one_line_error(project.retinue(word))
        assert said == f"there is no command '{word}'; use `retinue {meant}` to {about}"
    assert not SYNONYMS.keys() & COMMANDS.keys()
    assert {meant.split()[0] for meant in SYNONYMS.values() if meant} <= {*COMMANDS, "--version"}
    assert one_line_error(project.retinue("chat")).endswith("use `retinue` without a command to talk to an agent")


def test_help_is_a_command_too(project: Project) -> None:
    shown = project.retinue("help").stdout
    assert shown == project.retinue("--help").stdout
    assert HEADINGS.keys() <= COMMANDS.keys() and all(f"\n  {heading}\n    " in shown for heading in HEADINGS.values())
    assert project.retinue("help", "run").stdout == project.retinue("run", "--help").stdout
    served = project.retinue("help", "mcp", "serve")
    assert (served.returncode, served.stderr) == (0, "")
    assert served.stdout.startswith("usage: retinue mcp serve [OPTIONS]\n")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_is_as_wide_as_the_terminal(project: Project, columns: int) -> None:
    for command in ("", "run", "ps", "approve", "doctor"):
        done = project.retinue("help", *command.split(), COLUMNS=str(columns))
        prose, _, examples = done.stdout.partition("examples:\n")
        assert examples.startswith("  retinue ")
        wide = [line for line in prose.splitlines() if len(line) > min(columns, 100)]
        assert [line for line in wide if not line.startswith("  ")] == [], "only words that stand together may be wider"
        assert columns == 40 or wide == []
    assert "\n  retinue run" in project.retinue("help", COLUMNS="40").stdout


@pytest.mark.parametrize(("command", "has_it"), [("run", True), ("watch", False), ("a2a serve", False)])
def test_the_help_names_the_live_view_where_there_is_one(project: Project, command: str, has_it: bool) -> None:
    assert ("the live view" in project.retinue(*command.split(), "--help", COLUMNS="200").stdout) == has_it


@pytest.mark.parametrize(
    ("command", "default"),
    [("run", "no limit"), ("a2a serve", "no limit"), ("mcp serve", "1800"), ("watch", "1800"), ("resume", "as before")],
)
def test_help_says_how_long_a_run_may_take_without_the_option(project: Project, command: str, default: str) -> None:
    words = " ".join(project.retinue("help", *command.split()).stdout.split())
    assert re.search(r"--timeout SECONDS seconds that .*? may take \(default: (.*?)\)", words)[1] == default  # type: ignore[index]


def test_c_runs_a_command_in_another_folder(project: Project) -> None:
    model = project.script({"main": ["from there"]})
    (project.folder / "sub").mkdir()
    above = Project(project.folder.parent)
    (above.folder / "retinue.yaml").unlink()
    ran = above.retinue("-C", project.folder.name, "run", "x", "--model", model, "--runtime", "inherited")
    assert (ran.returncode, ran.stdout) == (0, "from there\n"), ran.stderr
    for words in (["-C", str(project.folder)], [f"-C{project.folder.name}"], ["-C", project.folder.name, "-C", "sub"]):
        [row] = json.loads(above.retinue(*words, "ps", "--json").stdout)
        assert row["task"] == "x"
    assert above.retinue("ps", "--json").stdout == "[]\n"
    assert above.retinue("--version", "-C", project.folder.name).returncode == 0, "the folder is no command"


def test_last_and_numbers_name_the_newest_trees(project: Project) -> None:
    for task in ("first", "second", "third"):
        project.retinue("run", task, "--yes", "--model", project.script(AGENTS))
    trees = {row["task"]: row["tree"] for row in project.rows() if row["run"] == 0}
    named = {
        "last": f"{trees['third']}/0",
        "@1": f"{trees['third']}/0",
        "@2": f"{trees['second']}/0",
        "@3": f"{trees['first']}/0",
        "last/1": f"{trees['third']}/1",
        "@3/1": f"{trees['first']}/1",
    }
    for name, run in named.items():
        assert project.retinue("show", name).stdout.startswith(f"{run}  /main")
    assert {event["tree"] for event in project.events("@2")} == {trees["second"]}
    assert f"{trees['second']}/0 had ended already: done" in project.retinue("cancel", "@2").stderr
    assert project.retinue("send", "last", "hello").stderr == "retinue: too late: the run has ended: done\n"
    assert f"{trees['first']} has ended: done" in one_line_error(project.retinue("resume", "@3"))
    assert project.retinue("replay", "@2", "--quiet").returncode == 0
    assert "this project has only 3 trees" in one_line_error(project.retinue("show", "@4"))
    assert "no run is called" in one_line_error(project.retinue("show", "@3/9"))


def test_no_label_of_a_model_takes_the_word_last(project: Project) -> None:
    """Models choose labels; `retinue cancel last` is a person's word."""
    spawn = {"name": "spawn_subagents", "args": {"tasks": [{**TASK, "subagent_id": "last"}]}}
    project.run("--yes", agents={"main": [{"tools": [spawn]}, "done"], "last": ["here"]})
    main, child = project.rows()
    assert child["label"] == "last"
    assert json.loads(project.retinue("show", "last", "--json").stdout)["run"] == main["run"] == 0


def test_ids_of_trees_differ_from_the_first_letter_on() -> None:
    """People type the beginning of an id: 2,000 ids use every letter first, none much more often than the others."""
    first = [new_tree_id()[0] for _ in range(2000)]
    counts = [first.count(letter) for letter in set(first)]
    assert len(counts) == 32
    assert max(counts) < 2000 / 32 * 2


@pytest.mark.finding("U9")
def test_ps_drops_columns_by_importance_and_the_task_last(project: Project) -> None:
    task = "make the discount of the cart right again, and test it"
    project.retinue("run", task, "--yes", "--model", project.script(AGENTS))
    heads = {}
    for columns in (200, 80, 40):
        lines = show_on_terminal(project, "ps", COLUMNS=str(columns))
        assert all(len(line) <= columns for line in lines)
        heads[columns] = lines[0].split()
        assert lines[1].endswith("test it" if columns == 200 else "…")
        assert "make the d" in lines[1] and "find out" in lines[2]
    assert heads[200] == ["RUN", "LABEL", "AGENT", "STATE", "TURNS", "TOOLS", "TOKENS", "TIME", "STARTED", "TASK"]
    assert heads[80] == ["RUN", "LABEL", "STATE", "TIME", "STARTED", "TASK"]
    assert heads[40] == ["RUN", "STATE", "TASK"]


def test_profiles_drop_columns_before_the_description_is_gone(project: Project) -> None:
    lines = show_on_terminal(project, "profiles", COLUMNS="50")
    assert lines[0].split() == ["NAME", "ACTIVE", "DESCRIPTION"]
    assert all(len(line) <= 50 and len(line.split()) > 3 for line in lines[1:])


def test_ps_says_that_runs_wait_for_an_answer(project: Project) -> None:
    write = {"name": "write", "args": {"path": "a.txt", "content": "x"}}
    model = project.script({"main": [{"tools": [write]}, "end"]})
    with project.running("run", "change a file", "--model", model, "--wait-approvals", "600"):
        until(lambda: [row["state"] for row in project.rows()] == ["waiting_approval"])
        assert "\n1 run waits for your answer: retinue approvals\n" in project.retinue("ps").stdout
        lines = show_on_terminal(project, "ps", COLUMNS="70", NO_COLOR="")
        narrow = [show_on_terminal(project, "approvals", COLUMNS=columns) for columns in ("53", "40")]
    assert [lines[0].split() for lines in narrow] == [["NO", "AGENT", "QUESTION", "ID"], ["NO", "QUESTION", "ID"]]
    assert [lines[1].split()[0] for lines in narrow] == ["1", "1"] and all("write(a" in lines[1] for lines in narrow)
    assert COLOR.sub("", lines[0]).split() == ["RUN", "LABEL", "STATE", "STARTED", "TASK"]
    assert "\x1b[33mwaiting_approval\x1b[0m" in lines[1] and lines[1].endswith("  change a file")


def test_ps_is_in_colour_on_a_terminal_that_wants_it(project: Project) -> None:
    project.run("--yes", agents={"main": ["ok"]})
    project.run("--yes", agents={"main": [{"error": "no"}]})
    plain = show_on_terminal(project, "ps", COLUMNS="120")
    painted = show_on_terminal(project, "ps", COLUMNS="120", NO_COLOR="")
    assert [COLOR.sub("", line) for line in painted] == plain
    assert "\x1b[31mfailed\x1b[0m" in painted[1] and "\x1b[32mdone\x1b[0m" in painted[2]
    assert "\x1b" not in project.retinue("ps", NO_COLOR="").stdout
    assert "\x1b" not in "".join(show_on_terminal(project, "ps", NO_COLOR="", TERM="dumb"))


def show_in_pager(project: Project, *words: str, **more: str) -> list[str]:
    """Run a command on a terminal of ten lines, whose pager marks every line that it shows."""
    project.prefix = ["sh", "-c", 'stty rows 10 cols 80; exec "$@"', "sh"]
    try:
        return show_on_terminal(project, *words, **{"PAGER": "sed 's/^/paged: /'", **more})
    finally:
        project.prefix = []


def test_a_long_show_and_diff_go_through_the_pager(project: Project) -> None:
    lines = "\n".join(f"line {n} {HOSTILE}" for n in range(30))
    write = {"name": "write", "args": {"path": "new.txt", "content": lines}}
    project.run("--yes", "--workspace", "copy", agents={"main": [{"tools": [write]}, lines]})
    for words in (["show"], ["show", "--markdown"], ["diff"]):
        seen = show_in_pager(project, *words)
        assert len(seen) > 30 and all(line.startswith("paged: ") for line in seen), words
        assert not UNSEEN & set("".join(seen)) and "\\x1b[31mred" in "".join(seen)
    painted = show_in_pager(project, "diff", NO_COLOR="")
    assert any(line.startswith("paged: \x1b[32m+line 29") for line in painted)
    for words in (["show", "--json"], ["diff", "--stat"]):  # for programs, or short
        assert not any(line.startswith("paged: ") for line in show_in_pager(project, *words)), words
    assert "paged" not in project.retinue("show", PAGER="sed 's/^/paged: /'").stdout
    for other in ("", "cat", "no-such-pager", "'"):
        assert show_in_pager(project, "show", PAGER=other)[-1].startswith("  line 29")


def test_a_reader_may_leave_the_pager_early(project: Project) -> None:
    project.run(agents={"main": ["a line\n" * 50_000]})
    assert len(show_in_pager(project, "show", PAGER="head -n 3")) == 3


def test_show_and_diff_print_paths_relative_to_the_current_folder(project: Project) -> None:
    write = {"name": "write", "args": {"path": "new.txt", "content": "x"}}
    project.run("--yes", "--workspace", "copy", agents={"main": [{"tools": [write]}, "ok"]})
    tree = project.rows()[0]["tree"]
    [line] = [line for line in project.retinue("show").stdout.splitlines() if line.startswith("  workspace ")]
    workspace = line.split()[1]
    assert workspace.startswith(f".retinue/runs/{tree}/") and (project.folder / workspace / "new.txt").exists()
    (project.folder / "sub").mkdir()
    below = project.retinue("-C", "sub", "show").stdout
    assert f"workspace   ../{workspace}\n" in below
    assert "model       scripted:../script.yaml\n" in below
    assert str(project.folder) not in below
    assert json.loads(project.retinue("ps", "--json").stdout)[0]["workspace"] == str(project.folder / workspace)
    project.run("--workspace", "shared", agents={"main": ["ok"]})
    assert "workspace   . (the project itself)\n" in project.retinue("show").stdout


def test_a_table_of_the_help_keeps_its_columns_while_there_is_room() -> None:
    table = (
        "examples:\n"
        "  retinue a --long     read all about it, and about it\n"
        "  retinue b            c\n"
        "  retinue d | jq .x"
    )
    assert "\n".join(wrap_text(table, 60)) == table
    assert [*wrap_text(table, 46)] == [
        "examples:",
        "  retinue a --long  read all about it, and",
        "                    about it",
        "  retinue b         c",
        "  retinue d | jq .x",
    ]
    assert [*wrap_text(table, 30)][1:3] == ["  retinue a --long", "      read all about it, and"]
    assert [*wrap_text("one two\nthree\n\n\nfour", 8)] == ["one two", "three", "", "", "four"]
