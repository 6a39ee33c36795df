"""`retinue run` as a user types it: in a sandbox, in a copy of the project, until the changes are applied."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from retinue.core.limits import MIB
from retinue.sandbox.builder import find_system_program
from retinue.sandbox.container import find_engine
from tests.sandbox.places import make_image, needs_bubblewrap, needs_containers
from tests.sandbox.test_placement import WITHOUT, without_bubblewrap
from tests.surfaces.cli.shell import Project, one_line_error
from tests.surfaces.cli.test_terminal import Terminal
from tests.workspaces.kit import repository, shell

CACHE = "echo 1 > m.py; python3 -c 'import m'; mkdir -p $XDG_CACHE_HOME/x; touch $XDG_CACHE_HOME/x/y; rm m.py; "
CHANGE = [
    shell(CACHE + "echo more >> a.txt; echo new > b.txt; git log --oneline | wc -l"),
    {"text": "said {{last_result}}"},
]
POINTS = ("run.started:1", "turn.started:2", "usage:1", "tool.call:2", "tool.result:1", "before-tool.result:2")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(repository(tmp_path / "p", **{"retinue.yaml": "", ".gitignore": "script.yaml\n"}))
    made.runtime = ""
    return made


def engine_name() -> str:
    return Path(find_engine().argv[0]).name


def result_of(project: Project, *arguments: str, agents: Any, **more: str) -> dict[str, Any]:
    done = project.run("--json", *arguments, agents=agents, **more)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@needs_bubblewrap
@pytest.mark.requirement("CODEY-6")
def test_a_run_works_in_a_sandboxed_worktree_and_names_what_takes_it_over(project: Project) -> None:
    before = (project.folder / "a.txt").read_text()
    done = project.run("--yes", agents={"main": CHANGE})
    assert done.stdout == "said 1\n\n", done.stderr  # the history is there
    tree = project.rows()[0]["tree"]
    assert f"2 files changed, not applied: retinue diff {tree}/0 · retinue apply {tree}/0" in done.stderr
    assert (project.folder / "a.txt").read_text() == before and not (project.folder / "b.txt").exists()
    result = json.loads(project.retinue("show", "--json").stdout)
    assert result["runtime"] == "isolated" and {"mount", "net", "pid"} <= set(result["sandbox"])
    applied = project.retinue("apply", "--yes")
    assert applied.returncode == 0, applied.stderr
    assert (project.folder / "a.txt").read_text() == before + "more\n"
    assert (project.folder / "b.txt").read_text() == "new\n"


@needs_bubblewrap
def test_a_tree_that_goes_on_without_its_sandbox_says_so(project: Project) -> None:
    died = project.run("--yes", agents={"main": CHANGE}, RETINUE_FAILPOINT="turn.started:2")
    assert died.returncode == -signal.SIGKILL
    done = project.retinue("resume", "--yes", "--json", "--runtime", "inherited")
    result = json.loads(done.stdout)
    assert (result["status"], result["runtime"], result["sandbox"]) == ("done", "inherited", []), done.stderr


@needs_bubblewrap
def test_a_resumed_tree_still_names_the_sandbox_that_stood_before(project: Project) -> None:
    agents = {"main": [shell("pwd"), {"text": "over"}]}
    died = project.run("--yes", agents=agents, RETINUE_FAILPOINT="turn.started:2")
    assert died.returncode == -signal.SIGKILL
    result = json.loads(project.retinue("resume", "--yes", "--json").stdout)
    assert (result["status"], result["runtime"]) == ("done", "isolated") and "net" in result["sandbox"]


@needs_bubblewrap
def test_a_tree_that_may_reach_less_than_it_did_says_which_setting_that_is(project: Project) -> None:
    file = project.folder / "narrower.yaml"
    file.write_text("network: [a.com]\n")
    died = project.run("--yes", "--config", str(file), agents={"main": CHANGE}, RETINUE_FAILPOINT="turn.started:2")
    assert died.returncode == -signal.SIGKILL
    file.write_text("network: none\n")
    done = project.retinue("resume", "--yes", "--config", str(file))
    assert done.returncode == 2
    assert "'main' has no tool web_fetch here: no host may be reached any more (`network:`" in done.stderr


@needs_bubblewrap
def test_outside_a_repository_it_is_a_copy(tmp_path: Path) -> None:
    project = Project(tmp_path / "plain")
    project.runtime = ""
    (project.folder / "a.txt").write_text("one\n")
    result = result_of(project, "--yes", agents={"main": [shell("cat a.txt; echo two >> a.txt"), {"text": "x"}]})
    assert [file["path"] for file in result["changed_files"]] == ["a.txt"]
    assert (project.folder / "a.txt").read_text() == "one\n"


@needs_bubblewrap
def test_a_sandboxed_parent_applies_what_its_child_did_and_works_on_it(project: Project) -> None:
    task = {"task": "work", "subagent_id": "kid"}
    main = [
        {"tools": [{"name": "spawn_subagents", "args": {"tasks": [task]}}]},
        shell("ls b.txt; cat /proc/self/mounts | grep -c snapshots; find / -name b.txt -readable 2>/dev/null | wc -l"),
        {"tools": [{"name": "apply_subagent", "args": {"subagent_id": "kid"}}]},
        {"tools": [{"name": "edit", "args": {"path": "b.txt", "old_string": "new", "new_string": "newer"}}]},
        shell("echo appended >> a.txt; cat b.txt"),
        {"text": "{{last_result}}"},
    ]
    result = result_of(project, "--yes", agents={"main": main, "subagent": CHANGE})
    assert result["final_response"] == "newer\n", result
    [child] = result["children"]
    assert child["runtime"] == "isolated" and child["changed_count"] == 2
    assert sorted(file["path"] for file in result["changed_files"]) == ["a.txt", "b.txt"]
    looked = next(event for event in project.events() if event["kind"] == "tool.result" and event["name"] == "shell"
                  and event["run"] == 0)  # fmt: skip
    assert looked["text"].split()[-1] != "0", looked["text"]  # the child's snapshot can be read by its parent


@needs_bubblewrap
def test_the_setup_runs_in_the_sandbox_and_a_failed_one_ends_the_run(project: Project) -> None:
    config = project.folder / "retinue.yaml"
    config.write_text("workspace_setup: 'id -u; echo ready > made.txt'\n")
    result = result_of(
        project, "--yes", "--config", str(config), agents={"main": [shell("cat made.txt"), {"text": "x"}]}
    )
    assert [log["name"] for log in result["tool_logs"]] == ["shell"]
    said = {event["name"]: event["text"] for event in project.events() if event["kind"] == "tool.result"}
    assert said["shell"].startswith("ready") and "workspace_setup" in said
    assert not (project.folder / "made.txt").exists()
    config.write_text("workspace_setup: 'echo no >&2; exit 3'\n")
    done = project.run("--yes", "--config", str(config), agents={"main": [{"text": "never"}]})
    assert done.returncode == 1 and "workspace_setup failed, so the run did not begin" in done.stderr
    assert "panicked" not in done.stderr


@pytest.mark.parametrize(
    "runtime", [pytest.param("isolated", marks=needs_bubblewrap), pytest.param("container", marks=needs_containers)]
)
def test_what_a_run_may_use_of_the_machine_is_a_setting(project: Project, runtime: str) -> None:
    if runtime == "container":
        make_image()
    resource_limits = (
        "{memory_mib: 300, processes: 40, cpu_seconds: 77, file_mib: 3, open_files: 100, workspace_mib: 5}"
    )
    config = project.folder / "retinue.yaml"
    config.write_text(f"resource_limits: {resource_limits}\n")
    asks = shell("ulimit -u; ulimit -t; ulimit -f; ulimit -n; head -c 4000000 /dev/zero > big; wc -c < big")
    takes = "head -c {0} /dev/zero | tail -c {0} 2>/dev/null | wc -c"  # tail keeps all of it in memory
    memory = shell(f"set -o pipefail; {takes.format(50 * MIB)}; {takes.format(400 * MIB)}")
    agents = {"main": [asks, memory, {"text": "{{last_result}}"}]}
    result = result_of(project, "--yes", "--runtime", runtime, "--config", str(config), agents=agents)
    asked, taken = [event["text"].split() for event in project.events() if event["kind"] == "tool.result"]
    assert asked[:4] == ["40", "77", str(3 * 1024), "100"] and asked[-1] == str(3 * 1024**2)  # bash counts files in KiB
    assert taken[:2] == [str(50 * MIB), "0"] and "[exit" in taken, taken
    counted = runtime == "isolated" and "cgroup" in result["sandbox"]  # of a container the engine counts
    assert ("memory ran out: this run may use 300 MiB;" in " ".join(taken)) is counted
    fills = shell("head -c 3000000 /dev/zero > one; head -c 3000000 /dev/zero > two; sleep 30")
    done = project.run("--yes", "--runtime", runtime, "--config", str(config), agents={"main": [fills, {"text": "x"}]})
    assert done.returncode == 1 and "more than the 5242880 it may have" in done.stderr
    config.write_text("resource_limits: {processes: 1}\n")
    assert "retinue.yaml:1: key 'resource_limits.processes': must be 16 or more, got 1" in one_line_error(
        project.run(agents=agents)
    )


@needs_bubblewrap
def test_in_mode_sandboxed_work_inside_does_not_ask_and_taking_it_over_does(project: Project) -> None:
    config = project.folder / "retinue.yaml"
    config.write_text("approvals: {mode: sandboxed, deny: [shell(git push*)]}\n")
    main = [shell("touch b.txt"), shell("git push"), {"text": "{{last_result}}"}]
    done = project.run("--config", str(config), agents={"main": main})  # there is nobody to ask
    assert done.returncode == 0 and "denied" in done.stdout.lower(), done.stderr
    spawn = {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "work"}]}}]}
    apply = {"tools": [{"name": "apply_subagent", "args": {"subagent_id": "1"}}]}
    agents = {"main": [spawn, apply, {"text": "x"}], "subagent": [shell("touch c.txt"), {"text": "y"}]}
    done = project.run("--config", str(config), agents=agents)
    assert done.returncode == 1 and "requested confirmation for apply_subagent" in done.stderr
    done = project.run("--config", str(config), "--runtime", "inherited", agents={"main": main})
    assert done.returncode == 1 and "requested confirmation" in done.stderr


@needs_bubblewrap
def test_in_mode_sandboxed_a_program_asks_as_little_as_a_shell(project: Project) -> None:
    config = project.folder / "retinue.yaml"
    config.write_text(
        "approvals: {mode: sandboxed}\nprofiles: {coder: {description: x, tools: [execute_python_code]}}\n"
    )
    code = "open('b.txt', 'w').write('x')\nimport os\nprint(os.listdir('.'), os.path.exists('/etc/shadow'))"
    program = {"tools": [{"name": "execute_python_code", "args": {"code": code, "executionTimeout": 20}}]}
    agents, given = {"coder": [program, {"text": "{{last_result}}"}]}, ("--config", str(config), "--profile", "coder")
    done = project.run(*given, agents=agents)  # there is nobody to ask
    assert done.returncode == 0 and "b.txt" in done.stdout and "False" in done.stdout, done.stderr
    assert f"#### [tool call] (timeout: 20s)\nexecute_python_code\n{code}\n" in done.stderr
    assert "#### Code execution output:\n" in done.stderr
    done = project.run(*given, "--runtime", "inherited", agents=agents)
    assert done.returncode == 1 and "requested confirmation" in done.stderr


@without_bubblewrap
@pytest.mark.requirement("MASS-4")
def test_where_no_sandbox_can_be_built_the_user_chooses_and_the_choice_is_kept(project: Project) -> None:
    project.prefix = WITHOUT
    model = project.script({"main": [{"text": "the answer"}]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    terminal.read_until("Which? [q] ")
    terminal.type("q\n")
    assert "apt-get install bubblewrap" in terminal.read_until(None)
    assert terminal.end() == 2
    assert not (project.folder / ".retinue/logs").exists()
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    terminal.read_until("Which? [q] ")
    terminal.type("i\n")
    assert "the answer" in terminal.read_until(None)
    assert terminal.end() == 0
    written = (project.folder / "retinue.yaml").read_text()
    assert written == "orchestrator:\n  coordination:\n    subagent_runtime_mode: inherited\n"
    done = project.retinue("run", "x", "--model", model)
    assert (done.returncode, done.stdout) == (0, "the answer\n"), done.stderr


@without_bubblewrap
@needs_containers
@pytest.mark.requirement("MASS-4")
def test_where_no_sandbox_can_be_built_a_container_can_be_chosen_for_the_project(project: Project) -> None:
    make_image()
    project.prefix = WITHOUT
    model = project.script({"main": [shell("echo $((6 * 7)) > b.txt; cat b.txt"), {"text": "said {{last_result}}"}]})
    terminal = Terminal(project, "run", "x", "--plain", "--yes", "--model", model)
    screen = terminal.read_until("Which? [q] ")
    file = project.folder / "retinue.yaml"
    assert f"c  run it in a container of {engine_name()}, in this project from now on (written to {file})" in screen
    terminal.type("c\n")
    assert "said 42" in terminal.read_until(None)
    assert terminal.end() == 0
    assert file.read_text() == "orchestrator:\n  coordination:\n    subagent_runtime_mode: container\n"
    again = result_of(project, "--yes", agents={"main": [shell("pwd"), {"text": "x"}]})
    assert (again["runtime"], "net" in again["sandbox"]) == ("container", True)


@without_bubblewrap
def test_where_there_is_no_engine_a_container_is_not_offered(project: Project) -> None:
    hidden = [
        word
        for name in ("podman", "docker")
        if (path := find_system_program(name))
        for word in ("--ro-bind", "/dev/null", path)
    ]
    project.prefix = [*WITHOUT[:-1], *hidden, "--"]
    terminal = Terminal(project, "run", "x", "--plain", "--model", project.script({"main": [{"text": "the answer"}]}))
    assert "container" not in terminal.read_until("Which? [q] ")
    terminal.type("c\n")
    assert "nothing was run" in terminal.read_until(None)
    assert terminal.end() == 2
    assert (project.folder / "retinue.yaml").read_text() == ""


@needs_bubblewrap
@pytest.mark.requirement("P23")
@pytest.mark.parametrize(
    "point",
    ["run.started:1", "turn.started:2", "usage:1", "tool.call:2", "tool.result:1", "before-tool.result:2"],
)
def test_a_sandboxed_run_goes_on_after_a_crash(project: Project, point: str) -> None:
    """Nothing is done twice that may have been done, and what was spilled before the crash is still there."""
    main = [
        shell("echo one >> marks; seq 20000"),
        {"tools": [{"name": "shell", "args": {"command": "echo two >> marks; seq 20000"}},
                   {"name": "read", "args": {"path": "a.txt"}}]},
        shell("cat marks"),
        {"text": "{{last_result}}"},
    ]  # fmt: skip
    died = project.run("--yes", agents={"main": main}, RETINUE_FAILPOINT=point)
    assert died.returncode == -signal.SIGKILL, died.stderr
    done = project.retinue("resume", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["status"], result["runtime"]) == ("done", "isolated")
    events = project.events()
    unknown = [event for event in events if event["kind"] == "tool.result" and event.get("outcome")]
    marks = result["final_response"].split()
    assert len(marks) == len(set(marks)) and len(marks) + len(unknown) >= 2, (marks, unknown)
    turns = [event["turn"] for event in events if event["kind"] == "turn.ended"]
    assert turns == [1, 2, 3, 4]
