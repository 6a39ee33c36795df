"""Exit codes, what goes where, and the shape of --json, for every ending."""

import json
from typing import Any

import pytest

from tests.surfaces.cli.shell import Project

GLOB = {"name": "glob", "args": {"pattern": "*"}}
ENDINGS: dict[str, tuple[list[Any], list[str], str, int]] = {
    "done": (["fine"], [], "done", 0),
    "refusal": ([{"refuse": "I will not."}], [], "refused", 1),
    "server error": ([{"error": "overloaded", "status": 529}], [], "failed", 1),
    "provider crash": ([{"crash": "boom"}], [], "failed", 1),
    "cut stream": ([{"cut": "half a wo"}], [], "disconnected", 1),
    "max turns": ([{"tools": [GLOB]}] * 3, ["--max-turns", "2"], "limited", 1),
    "no turns": (["fine"], ["--max-turns", "0"], "limited", 1),
    "timeout": ([{"hang": True}], ["--timeout", "0.2"], "timed_out", 124),
    "no time": (["fine"], ["--timeout", "0"], "timed_out", 124),
    "no approver": ([{"tools": [{"name": "shell", "args": {"command": "true"}}]}], [], "failed", 1),
    "empty answer": ([{"text": ""}], [], "done", 0),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_has_its_exit_code(project: Project, ending: str) -> None:
    replies, options, status, code = ENDINGS[ending]
    done = project.run("--json", *options, agents={"main": replies})
    result = json.loads(done.stdout)
    assert (result["status"], done.returncode) == (status, code), done.stderr
    assert result["success"] is (status == "done")
    assert ("error_details" in result) is (status != "done")
    assert project.rows()[0]["status"] == status


@pytest.mark.parametrize("ending", [name for name, (*_, code) in ENDINGS.items() if code])
def test_a_run_that_failed_says_so_on_stderr_and_nothing_on_stdout(project: Project, ending: str) -> None:
    replies, options, status, code = ENDINGS[ending]
    done = project.run(*options, agents={"main": replies})
    assert (done.returncode, done.stdout) == (code, "")
    assert f"\nretinue: {status}: " in done.stderr
    assert "Traceback" not in done.stderr


HELP = "--yes runs tools without asking, --wait-approvals waits for `retinue approve`"


def test_no_approver_says_what_would_help(project: Project) -> None:
    replies, *_ = ENDINGS["no approver"]
    done = project.run(agents={"main": replies})
    error = "Run 'main' requested confirmation for shell, and no approver is attached"
    assert f"\nretinue: failed: {error}; {HELP}\n" in done.stderr


def test_a_run_that_ended_before_its_answer_says_how_to_go_on(project: Project) -> None:
    done = project.run("--yes", agents={"main": [{"error": "no", "status": 400}]})
    command = f"retinue continue {project.rows()[0]['tree']}"
    assert done.stderr.endswith(f'to go on from here: {command} "..."\n')
    model = project.script({"main": ["the answer"]})
    done = project.retinue(*command.split()[1:], "again", "--model", model)
    assert done.stdout == "the answer\n" and "to go on" not in done.stderr
    assert "to go on" not in project.run("--quiet", agents={"main": [{"error": "no"}]}).stderr
    assert "to go on" not in project.run(agents={"main": [{"refuse": "no"}]}).stderr


def test_the_answer_is_raw_when_stdout_is_no_terminal(project: Project) -> None:
    done = project.run(agents={"main": ["a\x1b[31mb\u202ec"]})
    assert done.stdout == "a\x1b[31mb\u202ec\n"


def test_json_is_one_object_with_the_fields_others_rely_on(project: Project) -> None:
    done = project.run(
        "--json", "--yes", agents={"main": [{"tools": [{"name": "subagent_explorer", "args": {"task": "x"}}]}, "end"]}
    )
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    fields = (
        "name final_response total_turns tool_count tool_logs usage success duration_ms status tree run path workspace "
        "structured children"
    )
    assert set(fields.split()) <= result.keys()
    [child] = result["children"]
    assert set(fields.split()) <= child.keys()
    assert (child["path"], child["run"]) == ("/main/explorer-1", 1)
    assert result["workspace"] == str(project.folder)


def test_the_task_comes_from_stdin_or_a_file(project: Project) -> None:
    model = project.script({"main": ["ok"]})
    (project.folder / "task.md").write_text("from a file\nof two lines\n")
    for argument, stdin, task in (
        ("-", "from stdin\n", "from stdin"),
        ("@task.md", None, "from a file\nof two lines"),
        ("@@here", None, "@here"),
    ):
        assert project.retinue("run", argument, "--model", model, stdin=stdin).stdout == "ok\n"
        assert project.rows()[0]["task"] == task


@pytest.mark.requirement("P28")
def test_a_limit_of_zero_means_zero(project: Project) -> None:
    spawn = [{"tools": [{"name": "subagent_explorer", "args": {"task": "x"}}]}, "{{last_result}}"]
    done = project.run("--yes", "--max-depth", "0", agents={"main": spawn})
    assert done.stdout.startswith("Subagent depth limit exceeded (0/0).")
    done = project.run("--yes", "--max-concurrent", "0", agents={"main": spawn})
    assert done.stdout.startswith("Cannot spawn subagent 'explorer': maximum concurrent subagent limit reached.")
    assert (
        project.run("--yes", "--max-concurrent", "none", "--max-turns", "none", agents={"main": spawn}).stdout
        == "done\n"
    )


def test_quiet_is_one_line_a_call_and_verbose_is_everything(project: Project) -> None:
    (project.folder / "long.txt").write_text("\n".join(f"line {n}" for n in range(200)))
    agents = {"main": [{"tools": [{"name": "read", "args": {"path": "long.txt"}}]}, "ok"]}
    quiet = project.run("--quiet", agents=agents)
    assert quiet.stderr.splitlines() == ["read(long.txt) -> 200 lines"]
    normal = project.run(agents=agents)
    assert "line 199" not in normal.stderr
    assert "--verbose shows all" in normal.stderr
    assert "line 199" in project.run("--verbose", agents=agents).stderr


def test_the_model_and_the_limits_can_stand_in_retinue_yaml(project: Project) -> None:
    model = project.script({"main": [{"tools": [GLOB]}] * 3})
    (project.folder / "retinue.yaml").write_text(f"model: {model}\nmax_turns: 1\n")
    assert "limit of 1 turn reached" in project.retinue("run", "x").stderr
    assert project.retinue("run", "x", "--max-turns", "9").stdout == "done\n"
    project.script({"explorer": ["I explore"], "*": ["not I"]})
    assert project.retinue("run", "x", "--profile", "Explorer").stdout == "I explore\n"
