"""The commands about retinue itself: help, version, profiles, doctor, completion."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import retinue
from retinue.build.parts import Parts
from retinue.config.settings import settings_schema
from retinue.control.address_files import AddressFile
from retinue.files.state_owner import name_user
from retinue.log.schema import VERSION
from retinue.protocol.control import Address
from retinue.surfaces.cli.doctor import CheckedProject, check_control
from retinue.surfaces.cli.main import COMMANDS
from tests.surfaces.cli.shell import COMMAND, SOURCE, Project, environment, find_quick_command, one_line_error, until

LIGHT = {"argparse", "asyncio", "apsw", "json", "msgspec", "yaml", "dataclasses", "subprocess"}


def bash(script: str, project: Project) -> str:
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=project.folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def completed(project: Project, *words: str) -> list[str]:
    """Return the completions that bash offers for the last word, by the script in completion.sh."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = (
        f'retinue() {{ {shlex.join(find_quick_command())} "$@"; }}; '
        f"source completion.sh; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
        f"_retinue_complete retinue '{words[-1]}' '{words[-2]}'; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return bash(script, project).split()


def test_help_names_every_command(project: Project) -> None:
    done = project.retinue("--help")
    assert done.returncode == 0
    for name, text in COMMANDS.items():
        assert name in done.stdout
        assert text in done.stdout
    nothing = project.retinue()
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert nothing.stderr == done.stdout


@pytest.mark.parametrize("command", [*COMMANDS, "mcp serve", "mcp install", "a2a serve", "a2a call", "a2a add"])
def test_every_command_has_help_with_examples_at_its_end(project: Project, command: str) -> None:
    done = project.retinue(*command.split(), "--help", COLUMNS="120")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: retinue {command}")
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 120
    examples = lines[lines.index("examples:") + 1 :]
    assert examples and all(line.startswith("  ") for line in examples)


def test_version(project: Project) -> None:
    assert project.retinue("--version").stdout == f"retinue {retinue.__version__}\n"


def test_help_loads_next_to_nothing(project: Project) -> None:
    code = (
        "import sys; from retinue.surfaces.cli.main import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert LIGHT & set(done.stderr.split()) == {"argparse"}


def test_a_command_that_lists_loads_no_description_of_packages(project: Project) -> None:
    code = "import sys; from retinue.surfaces.cli.main import main; main(['ps']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project.folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    loaded = set(done.stderr.split())
    assert "retinue.config.models" in loaded and not {"importlib.metadata", "email.message"} & loaded


def test_profiles(project: Project) -> None:
    own = project.folder / ".agent/subagent_types/poet/SUBAGENT.md"
    own.parent.mkdir(parents=True)
    own.write_text("---\nname: poet\ndescription: Writes \\u202everse.\n---\nYou write verse.\n")
    lines = project.retinue("profiles").stdout.splitlines()
    assert lines[0].split() == ["NAME", "ACTIVE", "SOURCE", "DESCRIPTION"]
    names = [line.split()[0] for line in lines[1:]]
    assert names == ["evaluator", "explorer", "researcher", "critic", "poet"]
    assert "poet        yes     .agent/subagent_types/poet/SUBAGENT.md" in lines[-1]
    everyone = {row["name"]: row for row in json.loads(project.retinue("profiles", "--all", "--json").stdout)}
    assert everyone["novelty"]["active"] is False
    assert everyone["poet"]["source"] == ".agent/subagent_types/poet/SUBAGENT.md"
    (project.folder / "retinue.yaml").write_text("orchestrator: {coordination: {subagent_types: [poet, nobody]}}\n")
    done = project.retinue("profiles")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["poet"]
    assert done.stderr.startswith("retinue: warning: unknown subagent type 'nobody'")


TEAM = """\
model: anthropic:primary
subagent_agents: [{model: "openai:local"}]
orchestrator:
  coordination:
    subagent_types: [explorer, critic, round_evaluator]
    subagent_orchestrator:
      enabled: true
      agents: [{id: careful, backend: {type: anthropic, model: big}}, {model: "openai:small", profile: critic}]
      shared_child_team_types: [round_evaluator]
"""


@pytest.mark.requirement("MASS-25", "MASS-26")
def test_profiles_shows_the_members_of_each_type_and_why(project: Project) -> None:
    (project.folder / "team.yaml").write_text(TEAM)
    lines = project.retinue("profiles", "--teams", "--config", "team.yaml").stdout.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["TYPE", "SPAWNED", "BY", "MEMBERS", "STRATEGY", "STEP"],
        ["explorer", "primary", "openai:local", "-", "2"],
        ["explorer", "MCP", "client", "careful=anthropic:big", "synthesize", "5"],
        ["openai:small", "(critic)"],
    ]
    assert ["round_evaluator", "both", "careful=anthropic:big", "synthesize", "1"] in [line.split() for line in lines]
    assert lines[-3:] == [
        "step 1: the shared pool, which shared_child_team_types gives to this type",
        "step 2: the subagent_agents of the spawner",
        "step 5: the shared pool, because the spawner has no model",
    ]
    (project.folder / "team.yaml").write_text(
        TEAM.replace("subagent_agents: [", "# [") + "profiles: {critic: {model: own}}"
    )
    rows = json.loads(project.retinue("profiles", "--teams", "--json", "--config", "team.yaml").stdout)
    found = {(row["type"], row["spawned_by"]): row for row in rows}
    assert len(found) == 8 and found["critic", "primary"] == {
        "type": "critic",
        "spawned_by": "primary",
        "members": [{"id": "agent1", "model": "own", "profile": None}],
        "strategy": None,
        "step": 3,
        "reason": "the model that the profile itself has",
    }
    assert found["subagent", "primary"]["members"] == [{"id": "agent1", "model": "anthropic:primary", "profile": None}]
    (project.folder / "team.yaml").write_text(
        TEAM.replace("subagent_agents: [", "# [").replace("model: anthropic", "# ")
    )
    rows = json.loads(project.retinue("profiles", "--teams", "--json", "--config", "team.yaml").stdout)
    found = {(row["type"], row["spawned_by"]): row for row in rows}  # a primary has a model, whichever
    assert (found["critic", "primary"]["step"], found["critic", "MCP client"]["step"]) == (3, 5)
    assert found["critic", "primary"]["members"][0]["model"] == "its own model"
    assert project.retinue("profiles", "--teams").stdout.startswith("No subagent is a team. `subagent_orchestrator: ")


def test_a_server_of_subagents_that_are_disabled_does_not_start(project: Project) -> None:
    (project.folder / "off.yaml").write_text("orchestrator: {coordination: {enable_subagents: false}}\n")
    done = project.retinue("mcp", "serve", "--http", "--config", "off.yaml", "--model", "scripted:script.yaml")
    assert "'enable_subagents' is false in off.yaml: set it to true, or offer one agent" in one_line_error(done)


def test_doctor(project: Project) -> None:
    done = project.retinue("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "authority" not in done.stdout  # every run here has a sandbox
    assert f"ok    project   {project.folder}" in done.stdout
    checks = {check["name"]: check for check in json.loads(project.retinue("doctor", "--json").stdout)}
    assert {"python", "retinue", "sqlite", "git", "project", "state", "profiles", "model"} <= checks.keys()
    assert "scripted:FILE" in checks["model"]["text"]
    assert "web_fetch and web_search are off" in checks["tools"]["text"]
    names = "evaluator, explorer, researcher, critic; not active: novelty, round_evaluator"
    assert sorted(re.split(r"\W+", checks["profiles"]["text"])) == sorted(re.split(r"\W+", names))
    assert not (project.folder / ".retinue").exists()
    (project.folder / "retinue.yaml").write_text(
        "model: scripted:nowhere.yaml\nprofiles: {critic: {tools: [web_fetch]}}"
    )
    sick = project.doctor()
    assert sick.returncode == 1
    assert "warn  tools     profile 'critic' names web_fetch, which cannot work" in sick.stdout
    assert f"fail  model     {project.folder}/nowhere.yaml: no such file" in sick.stdout


def test_doctor_says_which_runs_work_with_the_user_s_own_authority(project: Project) -> None:
    """Only settings in force count, because the user can remove them."""
    file = project.folder / "retinue.yaml"
    file.write_text(
        "orchestrator: {coordination: {subagent_runtime_mode: inherited, subagent_orchestrator: "
        "{enabled: true, agents: [{model: 'scripted:absent.yaml'}]}}}\nprofiles: {explorer: {runtime: inherited}}\n"
    )
    member = f"fail  model     {project.folder}/absent.yaml: no such file"
    untrusted = project.doctor().stdout
    assert "warn  authority" not in untrusted and member not in untrusted  # what is not trusted does not count
    assert project.retinue("trust", "--yes").returncode == 0
    trusted = project.doctor().stdout
    assert member in trusted
    assert (
        "warn  authority runs without a sandbox work as you: a shell command that you allow can do whatever you can, "
        "also answer questions and change files outside the project "
        "(`orchestrator.coordination.subagent_runtime_mode: inherited`, "
        f"`profiles.explorer.runtime: inherited`)\n                -> take that out of {file}, or read what you allow"
    ) in trusted


def test_doctor_says_what_to_do_about_each_problem(project: Project) -> None:
    """The environment, a cost limit on a model without a price, an address file of a dead process, a damaged log."""
    key = {"ANTHROPIC_API_KEY": "sk-ant-secret-0123456789"}
    (project.folder / "retinue.yaml").write_text("model: anthropic:claude-sonnet-5-5\n")
    without = project.doctor("--json")
    assert without.returncode == 1
    [failed] = [check for check in json.loads(without.stdout) if check["state"] == "fail"]
    assert (failed["section"], failed["name"], failed["do"]) == ("models", "model", "export ANTHROPIC_API_KEY=...")
    (project.folder / "retinue.yaml").write_text("model: anthropic:claude-nobody-knows\nmax_cost: 5\n")
    priceless = project.doctor(**key, ANTHROPIC_BASE_URL="http://ann:secret@127.0.0.1:9/v1?key=secret")
    said = "ANTHROPIC_API_KEY is set; ANTHROPIC_BASE_URL is set, so requests go to http://127.0.0.1:9/v1"
    assert said in priceless.stdout and "secret" not in priceless.stdout and "BASE_URL" not in without.stdout
    assert priceless.returncode == 1
    assert "fail  price     a cost limit is set, and the price of anthropic:claude-nobody-knows" in priceless.stdout
    assert key["ANTHROPIC_API_KEY"] not in priceless.stdout + priceless.stderr
    (project.folder / "retinue.yaml").write_text("")
    project.run(agents={"main": ["ok"]})
    stale = project.folder / ".retinue/control/4194305.json"
    stale.parent.mkdir(exist_ok=True)
    stale.write_text("{}")
    said = project.doctor().stdout
    assert f"logs      1 tree in 1 file, all of them whole, version {VERSION}" in said
    assert f"1 address file of dead processes, removed at the next use: {stale}" in said
    assert stale.exists()
    [log] = (project.folder / ".retinue/logs").glob("*.db")
    data = bytearray(log.read_bytes())
    data[8192:8200] = b"\xff" * 8  # the head of its third page: the file opens, and is not whole
    log.write_bytes(data)
    damaged = project.doctor()
    assert damaged.returncode == 1
    assert "fail  logs      " in damaged.stdout and str(log) in damaged.stdout
    assert f"-> move it out of {log.parent}" in damaged.stdout


def test_doctor_says_that_telemetry_needs_packages_and_not_that_their_installation_failed(
    project: Project, tmp_path: Path
) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry/__init__.py").touch()
    said = project.doctor("--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}").stdout
    [text] = [check["text"] for check in json.loads(said) if check["name"] == "telemetry"]
    assert text.startswith("not installed, and needed only to send spans and metrics; to add it: ")


def test_doctor_works_without_the_library_of_the_log(project: Project, tmp_path: Path) -> None:
    project.run(agents={"main": ["ok"]})
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "apsw.py").write_text("raise ImportError('it is broken')\n")
    done = project.doctor(PYTHONPATH=f"{broken}{os.pathsep}{SOURCE}")
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        "fail  sqlite    apsw cannot be loaded: it is broken\n                -> install Retinue again" in done.stdout
    )


def test_doctor_sees_a_control_server(project: Project) -> None:
    model = project.script({"main": [{"hang": True}]})
    with project.running("run", "x", "--model", model, quick=False) as process:
        until(lambda: any((project.folder / ".retinue/control").glob(f"{process.pid}-*.json")))
        assert f"ok    control   process {process.pid} can be reached from here" in project.doctor().stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the files of other users")
def test_doctor_tells_root_of_the_live_servers_of_another_user(tmp_path: Path) -> None:
    file = AddressFile(tmp_path / ".retinue", Address(version=1, pid=1, port=2, token="y", writer="me"))
    for path in (file.path.parent, file.path):
        os.chown(path, 65534, 65534)
    name = name_user(65534)
    said = [check.text for check in check_control(CheckedProject(tmp_path, Parts(tmp_path), None))]
    assert said[1:] == [f"a process of {name} serves here, and only {name} can reach it: {file.path}"]
    file.remove()


def test_doctor_prints_the_schema(project: Project) -> None:
    done = project.retinue("doctor", "--schema")
    assert (done.returncode, json.loads(done.stdout)) == (0, settings_schema())
    assert "not allowed with" in one_line_error(project.retinue("doctor", "--schema", "--json"))


def test_the_project_is_found_upward(project: Project) -> None:
    project.run(agents={"main": ["ok"]})
    below = Project(project.folder / "a/b")
    (below.folder / "retinue.yaml").unlink()
    assert below.rows() == project.rows() != []
    below.script({"main": ["from below"]}, name="near.yaml")
    assert below.retinue("run", "x", "--model", "scripted:near.yaml").stdout == "from below\n"
    assert not (below.folder / ".retinue").exists()


def test_completion_of_bash_works_when_sourced(project: Project) -> None:
    (project.folder / "task one.md").touch()
    (project.folder / "config.yaml").touch()
    said = bash(f"source <({shlex.join(COMMAND)} completion bash); complete -p retinue", project)
    assert said == "complete -o bashdefault -F _retinue_complete retinue\n"
    (project.folder / "completion.sh").write_text(project.retinue("completion", "bash").stdout)
    assert completed(project, "retinue", "") == [*COMMANDS]
    assert completed(project, "retinue", "--ver") == ["--version", "--verbose"]
    assert completed(project, "retinue", "--runtime", "is") == ["isolated"]  # of a conversation
    assert completed(project, "retinue", "p") == ["ps", "profiles"]
    assert completed(project, "retinue", "run", "--max-") == [
        "--max-depth",
        "--max-concurrent",
        "--max-turns",
        "--max-tokens",
        "--max-cost",
    ]
    assert completed(project, "retinue", "run", "--config", "conf") == ["config.yaml"]
    assert completed(project, "retinue", "run", "--timeout", "") == []
    assert completed(project, "retinue", "run", "@conf") == ["@config.yaml"]
    assert completed(project, "retinue", "completion", "z") == ["zsh"]


def test_completion_knows_runs_profiles_and_questions(project: Project) -> None:
    (project.folder / "completion.sh").write_text(project.retinue("completion", "bash").stdout)
    assert completed(project, "retinue", "show", "") == []
    (project.folder / "sub").mkdir()
    spawn = {"name": "spawn_subagents", "args": {"tasks": [{"task": "dig", "subagent_type": "explorer"}]}}
    write = [{"name": "write", "args": {"path": name, "content": "x"}} for name in ("a.txt", "b.txt")]
    agents = {"main": [{"tools": [spawn]}, {"tools": write}], "explorer": ["here"]}
    with project.running("run", "x", "--model", project.script(agents), "--wait-approvals", "600"):
        until(lambda: len(json.loads(project.retinue("approvals", "--json").stdout)) == 2)
        tree = project.rows()[0]["tree"]
        assert completed(project, "retinue", "approve", "") == ["1", "2"]
        assert completed(project, "retinue", "deny", f"{tree}/") == [
            question["id"] for question in json.loads(project.retinue("approvals", "--json").stdout)
        ]
    assert completed(project, "retinue", "show", "") == ["last", tree]
    assert completed(project, "retinue", "cancel", tree[:2]) == [tree]
    assert completed(project, "retinue", "-C", "sub", "tail", "-f", f"{tree}/") == [f"{tree}/0", f"{tree}/1"]
    assert completed(project, "retinue", "diff", "/main/") == ["/main/explorer-1"]
    assert completed(project, "retinue", "run", "--profile", "ex") == ["explorer"]
    assert completed(project, "retinue", "run", "--runtime", "i") == ["inherited", "isolated"]
    assert completed(project, "retinue", "run", "--model", "openai", ":", "gpt-6.1-t") == ["gpt-6.1-terra"]
    assert completed(project, "retinue", "help", "app") == ["approvals", "approve", "apply"]
    assert "unknown kind 'x'; available: runs" in one_line_error(project.retinue("completion", "--values", "x", ""))
    assert "name your shell" in one_line_error(project.retinue("completion"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_option(project: Project, shell: str) -> None:
    script = project.retinue("completion", shell).stdout
    for word in (*COMMANDS, "after", "profile", "max-concurrent"):
        assert word in script
    assert "'tcsh'" in one_line_error(project.retinue("completion", "tcsh"))
