"""ps, show and tail: what the log says, of trees that live, have ended, or lost their process."""

import json
import shlex
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.surfaces.cli.shell import COMMAND, Project, environment, interrupt, one_line_error, read_until, until

GLOB = {"name": "glob", "args": {"pattern": "*"}}
HANGING = {"main": [{"tools": [GLOB]}, {"hang": True}]}


@pytest.fixture
def hanging(project: Project) -> Iterator[subprocess.Popen[str]]:
    with project.running("run", "wait", "--model", project.script(HANGING, name="hang.yaml"), quick=False) as process:
        assert process.stderr is not None
        read_until(process.stderr, 'Tool "glob" result')
        yield process


def test_nothing_there_is_a_friendly_line(project: Project) -> None:
    done = project.retinue("ps")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("No runs here yet.")
    assert project.rows() == []
    assert not (project.folder / ".retinue").exists()


def test_show_tells_which_messages_were_not_read(project: Project, hanging: subprocess.Popen[str]) -> None:
    assert project.retinue("send", "last", "leave the\ntests alone", "--wait", "0").returncode == 0
    asked = "\nmessage, queued: the run reads it at its next turn\n  leave the\n  tests alone\n"
    assert asked in project.retinue("show").stdout
    assert project.retinue("cancel", "last").returncode == 0
    unread = "\nmessage, too late: the run ended before it read the message\n  leave the\n  tests alone\n"
    assert unread in project.retinue("show").stdout


def test_ps_lists_runs_below_one_another(project: Project) -> None:
    agents = {
        "main": [
            {"tools": [{"name": "subagent_critic", "args": {"task": "judge it"}}], "usage": {"input_tokens": 1500}},
            "end",
        ]
    }
    project.run("--yes", agents=agents)
    lines = project.retinue("ps").stdout.splitlines()
    tree = project.rows()[0]["tree"]
    assert lines[0].split() == ["RUN", "LABEL", "AGENT", "STATE", "TURNS", "TOOLS", "TOKENS", "TIME", "STARTED", "TASK"]
    assert lines[1].startswith(f"{tree}/0  main        main    done")
    assert "1,500" in lines[1]
    assert lines[1].endswith("just now  the task")
    assert lines[2].startswith(f"{tree}/1    judge it  critic  done")
    fields = (
        "tree run parent depth path label agent subagent_id state queue_position status turns tool_count usage cost "
        "spawned_at started_at ended_at duration_ms task workspace pid continues"
    )
    assert [set(row) for row in project.rows()] == [set(fields.split())] * 2


def test_ps_shows_the_latest_trees_and_all_when_asked(project: Project) -> None:
    model = project.script({"main": ["ok"]})
    for number in range(12):
        project.retinue("run", f"task {number}", "--model", model)
    assert [row["task"] for row in project.rows()] == [f"task {n}" for n in range(11, 1, -1)]
    assert "2 older trees are not shown: retinue ps --all" in project.retinue("ps").stdout
    assert len(project.rows("--all")) == 12


def test_show_says_everything_about_a_run(project: Project) -> None:
    agents = {
        "main": [{"tools": [{"name": "subagent_critic", "args": {"task": "judge it"}}]}, "end"],
        "critic": [
            {
                "tools": [GLOB, {"name": "read", "args": {"path": "nowhere"}}],
                "usage": {"input_tokens": 5, "output_tokens": 2},
            },
            "it is bad",
        ],
    }
    project.run("--yes", agents=agents)
    tree = project.rows()[0]["tree"]
    page = project.retinue("show", f"{tree}/1").stdout
    assert page.startswith(f"{tree}/1  /main/critic-1  [judge it]\n")
    for part in (
        "state       done, ",
        "2 turns, 2 tool calls",
        "7 tokens (5 in, 2 out)",
        f"parent      {tree}/0",
        "\ntask\n  judge it\n",
        "✓ glob(*) -> ",
        "✗ read(nowhere) -> ",
        "\nresult\n  it is bad\n",
    ):
        assert part in page
    page = project.retinue("show").stdout
    assert "✓ subagent_critic -> 1 line  (" in page
    assert f"children\n  {tree}/1  done          critic  [judge it]\n" in page
    assert "and 7 below it" in page
    result = json.loads(project.retinue("show", "--json", f"{tree}/1").stdout)
    assert (result["final_response"], result["status"], result["total_turns"]) == ("it is bad", "done", 2)


def test_show_says_once_how_a_run_ended(project: Project) -> None:
    """The text for the parent of a run only repeats its status."""
    project.run("--yes", "--max-turns", "1", agents={"main": [{"tools": [GLOB]}, "end"]})
    assert project.retinue("show").stdout.endswith("\nlimited\n  Run 'main' stopped: limit of 1 turn reached\n")


@pytest.mark.finding("U7")
def test_a_run_is_found_by_everything_it_is_called(project: Project) -> None:
    spawn = {
        "name": "spawn_subagents",
        "args": {"tasks": [{"task": "dig", "subagent_id": "digger", "subagent_type": "explorer"}]},
    }
    project.run("--yes", agents={"main": [{"tools": [spawn]}, "end"]})
    main, child = project.rows()
    tree = main["tree"]
    for name in (f"{tree}/1", f"{tree[:8]}/1", "/main/explorer-1", "/main/exp", "digger", "dig", child["subagent_id"]):
        assert json.loads(project.retinue("show", "--json", name).stdout)["run"] == 1, name
    for name in (tree, tree[:8], f"{tree}/0", "/main", "main"):
        assert json.loads(project.retinue("show", "--json", name).stdout)["run"] == 0, name
    assert "no run is called 'diggr'; similar names: 'digger'" in one_line_error(project.retinue("show", "diggr"))
    assert "no run is called" in one_line_error(project.retinue("show", f"{tree}/7"))
    project.run("--yes", agents={"main": [{"tools": [spawn]}, "end"]})
    done = project.retinue("show", "digger")
    said, *candidates = done.stderr.splitlines()
    assert (done.returncode, done.stdout, said) == (2, "", "retinue: 'digger' could be any of:")
    began = time.strftime("%Y-%m-%d %H:", time.localtime(project.events(tree)[0]["at"]))
    assert candidates[1].startswith(f"  {tree}/1 (/main/explorer-1, 'digger') of {began}")
    assert [line.endswith(": dig") for line in candidates] == [True, True]


def test_tail_prints_the_blocks_again_and_resumes_after_a_number(project: Project) -> None:
    live = project.run("--yes", agents={"main": [{"thinking": "hm", "tools": [GLOB]}, "end"]})
    again = project.retinue("tail")
    blocks, _, answer = again.stdout.partition("● main done\n")
    assert blocks.rstrip("\n") in live.stderr
    assert answer == "end\n\n"  # who started it may be gone
    assert "#### thought trace\nhm\n" in again.stdout
    everything = project.events()
    assert project.events("--after", "3") == everything[3:]
    assert project.events("--after", str(len(everything))) == []
    assert project.retinue("tail", "-f", "--after", "999").returncode == 0


@pytest.mark.requirement("P5")
def test_tail_f_of_another_process_sees_what_happens_and_ends_with_it(
    project: Project, hanging: subprocess.Popen[str]
) -> None:
    with project.running("tail", "-f", "--json") as tail, project.running("tail", "-f") as blocks:
        assert tail.stdout is not None
        early = read_until(tail.stdout, '"turn.started","turn":2')
        assert hanging.poll() is None
        assert tail.poll() is None
        [row] = project.rows()
        assert (row["state"], row["status"], row["tool_count"]) == ("running", None, 1)
        shown = json.loads(project.retinue("show", "--json").stdout)
        assert (shown["state"], shown["status"], shown["total_turns"]) == ("running", None, 2)
        seen = len(early.splitlines())
        with project.running("tail", "-f", "--json", "--after", str(seen)) as later:
            interrupt(hanging)
            rest, _ = later.communicate()
        late, problems = tail.communicate()
        assert (tail.returncode, problems) == (0, "")
        shown_blocks = blocks.communicate()[0]
        assert '#### Tool "glob" result:' in shown_blocks
        assert shown_blocks.endswith("● main cancelled: Run 'main' was cancelled\n")
    assert late == rest
    lines = (early + late).splitlines()
    assert lines == project.retinue("tail", "--json").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == list(range(1, len(lines) + 1))


def test_a_process_that_died_leaves_nothing_running(project: Project, hanging: subprocess.Popen[str]) -> None:
    with project.running("tail", "-f") as tail:
        assert tail.stdout is not None
        read_until(tail.stdout, 'Tool "glob" result')
        hanging.kill()
        hanging.wait()
        _, said = tail.communicate()
    [row] = project.rows()
    assert (row["state"], row["status"]) == ("interrupted", None)
    assert (
        said
        == f"retinue: warning: the process that ran {row['tree']} is gone; to continue: retinue resume {row['tree']}\n"
    )
    assert "the process that ran it is gone" in project.retinue("show").stdout
    model = project.script(HANGING, name="hang.yaml")
    with project.running("run", "again", "--model", model) as process:  # takes the same file
        assert process.stderr is not None
        read_until(process.stderr, 'Tool "glob" result')
        assert [row["state"] for row in project.rows()] == ["running", "interrupted"]
        assert len(list(project.folder.glob(".retinue/logs/*.db"))) == 1


def test_two_processes_write_in_one_project(project: Project, hanging: subprocess.Popen[str]) -> None:
    model = project.script(HANGING, name="other.yaml")
    with project.running("run", "second", "--model", model) as second:
        assert second.stderr is not None
        read_until(second.stderr, 'Tool "glob" result')
        assert [(row["task"], row["state"]) for row in project.rows()] == [("second", "running"), ("wait", "running")]
        assert len(list(project.folder.glob(".retinue/logs/*.db"))) == 2
        for process in (second, hanging):
            interrupt(process)
            assert process.wait() == 130
    trees = [row["tree"] for row in project.rows()]
    for tree in trees:
        events = project.events(tree)
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert {event["tree"] for event in events} == {tree}
        assert events[-1]["kind"] == "run.ended"


def test_whoever_stops_reading_is_no_error(project: Project) -> None:
    project.run(agents={"main": [*({"tools": [GLOB]} for _ in range(30)), "end"]})
    pipe = f"set -o pipefail; {shlex.join(COMMAND)} tail --json | head -n 1"
    done = subprocess.run(
        ["bash", "-c", pipe],
        cwd=project.folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert json.loads(done.stdout)["seq"] == 1
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # 0 when all of it fitted into the pipe


def test_a_screen_that_takes_no_text_holds_up_no_run(project: Project) -> None:
    (project.folder / "long.txt").write_text("x" * 40_000)
    read = {"name": "read", "args": {"path": "long.txt"}}
    model = project.script({"main": [*({"tools": [read]} for _ in range(10)), "end"]})
    with project.running("run", "x", "--verbose", "--model", model) as process:  # its stderr is a full pipe soon
        until(lambda: bool(project.rows()) and project.rows()[0]["state"] == "done")
        out, err = process.communicate()
    assert (process.returncode, out) == (0, "end\n")
    assert err.count('#### Tool "read" result:') == 10


@pytest.mark.finding("S12")
@pytest.mark.parametrize("types", ["[]", "[nosuch]"])
def test_profiles_says_what_left_none_active(project: Project, types: str) -> None:
    (project.folder / "retinue.yaml").write_text(f"orchestrator: {{coordination: {{subagent_types: {types}}}}}\n")
    said = project.retinue("profiles").stdout
    assert said.startswith("No profile is active, because of `subagent_types` in retinue.yaml.")
