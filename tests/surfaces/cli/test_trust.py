"""Tests of a retinue.yaml from a clone: settings that narrow take effect, settings that loosen wait for the user's
yes."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from retinue.config import trust
from retinue.config.project import load_project
from retinue.config.settings import Settings, parse_settings, restrict
from retinue.core.limits import MIB, ResourceLimits
from retinue.core.network import parse_hosts
from tests.surfaces.cli.shell import Project, one_line_error
from tests.surfaces.cli.test_terminal import Terminal

LOOSE = "approvals: {mode: yes, allow: [shell(echo *)], deny: [shell(rm *)]}\nmax_turns: 500\nmax_cost: 1\n"
SHELL = {"tools": [{"name": "shell", "args": {"command": "echo 1"}}]}


@pytest.fixture
def clone(project: Project) -> Project:
    (project.folder / "retinue.yaml").write_text(LOOSE)
    project.script({"main": [SHELL, "end"]})
    return project


def run(project: Project, *arguments: str) -> tuple[str, ...]:
    return ("run", "x", "--model", "scripted:script.yaml", "--max-cost", "none", *arguments)


def allowed(project: Project, *arguments: str) -> bool:
    """Return True if the shell ran without a question."""
    return project.retinue(*run(project, *arguments)).returncode == 0


def test_without_a_yes_the_loose_part_is_ignored_and_said_in_one_line(clone: Project) -> None:
    done = clone.retinue(*run(clone, "--plain"))
    assert done.returncode == 1
    file = clone.folder / "retinue.yaml"
    assert done.stderr.splitlines()[0] == (
        f"retinue: warning: {file} is not trusted, so this part of it is ignored: approvals.mode: yes, "
        "approvals.allow: shell(echo *), max_turns: 500; `retinue trust` shows and allows it"
    )
    settings = load_project(clone.folder).settings
    assert (settings.approvals.mode, settings.approvals.allow, settings.limits.turns) == (None, (), 100)
    assert [str(rule) for rule in settings.approvals.deny] == ["shell(rm *)"]
    assert settings.limits.cost == 1
    doctor = clone.doctor().stdout
    assert "warn  trust     retinue.yaml is not trusted; ignored: approvals.mode: yes," in doctor


def test_hosts_and_a_setup_command_wait_for_the_yes_too(project: Project) -> None:
    text = "network: {allow: [docs.python.org]}\nworkspace_setup: make it\n"
    (project.folder / "retinue.yaml").write_text(text)
    given = load_project(project.folder)
    assert (given.settings.network, given.settings.workspace_setup) == ((), None)
    assert "network: docs.python.org, workspace_setup: make it" in given.warnings[0]
    assert project.retinue("trust", "--yes").returncode == 0
    trusted = load_project(project.folder).settings
    assert (trusted.network, trusted.workspace_setup) == (("docs.python.org",), "make it")


def test_a_run_may_use_less_of_the_machine_and_more_after_the_yes(project: Project) -> None:
    text = "resource_limits: {memory_mib: 8192, processes: 64, open_files: 8192, file_mib: 10, workspace_mib: null}\n"
    (project.folder / "retinue.yaml").write_text(text)
    given = load_project(project.folder)
    assert [*map(str, given.ignored)] == ["resource_limits.memory_mib: 8192", "resource_limits.open_files: 8192"]
    assert given.settings.resource_limits == ResourceLimits(processes=64, file_bytes=10 * MIB)
    assert project.retinue("trust", "--yes").returncode == 0
    trusted = load_project(project.folder).settings.resource_limits
    assert trusted == ResourceLimits(memory=8192 * MIB, processes=64, open_files=8192, file_bytes=10 * MIB)


@pytest.mark.parametrize(
    ("said", "in_force", "held", "after"),
    [
        ("full", (), "network: full", "full"),
        ("none", "none", "", "none"),
        ("['*']", (), "network: *", ("*",)),
        ("[]", (), "", ()),
    ],
)
def test_a_wider_network_waits_for_the_yes_and_a_narrower_one_does_not(
    project: Project, said: str, in_force: object, held: str, after: object
) -> None:
    (project.folder / "retinue.yaml").write_text(f"network: {said}\nprofiles: {{explorer: {{network: full}}}}\n")
    given = load_project(project.folder)
    assert (given.settings.network, ", ".join(map(str, given.ignored))) == (in_force, held)
    network = given.settings.network
    assert network is not None and parse_hosts(network) == ()
    assert project.retinue("trust", "--yes").returncode == 0
    assert load_project(project.folder).settings.network == after


def test_doctor_says_which_network_is_in_force(project: Project) -> None:
    (project.folder / "retinue.yaml").write_text("network: full\n")
    assert "ok    network   none: sandboxed commands reach nothing" in project.doctor().stdout
    assert project.retinue("trust", "--yes").returncode == 0
    assert "warn  network   full" in project.doctor().stdout


def test_trust_holds_until_the_file_changes_and_can_be_taken_back(clone: Project) -> None:
    assert "give --yes" in one_line_error(clone.retinue("trust"))
    done = clone.retinue("trust", "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert allowed(clone)
    assert load_project(clone.folder).warnings == ()
    file = clone.folder / "retinue.yaml"
    file.write_text(LOOSE.replace(", deny: [shell(rm *)]", ""))  # a deny less is a wider file
    assert not allowed(clone)
    file.write_text(LOOSE.replace("\n", "\r\n"))  # the same text
    assert allowed(clone)
    assert clone.retinue("trust", "--revoke").returncode == 0
    assert not allowed(clone)


def test_trust_that_a_file_has_is_not_asked_for_again(clone: Project) -> None:
    file = clone.folder / "retinue.yaml"
    assert clone.retinue("trust", "--yes").returncode == 0
    again = clone.retinue("trust")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == (
        f"{file} is trusted already, until it changes: approvals.mode: yes, approvals.allow: shell(echo *), "
        "max_turns: 500; --revoke withdraws your trust\n"
    )
    made = Project(clone.folder.parent / "made")
    (made.folder / "retinue.yaml").unlink()
    (made.folder / "Makefile").write_text("test:\n\ttrue\n")
    assert made.retinue("init", "--yes").returncode == 0
    assert "is trusted already" in made.retinue("trust").stdout
    clone.retinue("trust", "--revoke")
    assert "give --yes" in one_line_error(clone.retinue("trust"))


def test_a_file_with_an_error_is_not_asked_about(project: Project) -> None:
    (project.folder / "retinue.yaml").write_text("max_turns: 500\nprofiles: {r: {tools: [read]}}\n")
    project.script({"main": ["end"]})
    terminal = Terminal(project, *run(project, "--plain"))
    screen = terminal.read_until(None)
    assert terminal.end() == 2
    assert "key 'profiles.r': no SUBAGENT.md has this name" in " ".join(screen.split())
    assert "Trust it" not in screen
    assert "no SUBAGENT.md has this name" in one_line_error(project.retinue("trust", "--yes"))


def test_a_file_that_is_named_is_trusted_and_a_copy_elsewhere_is_not(clone: Project, tmp_path: Path) -> None:
    assert allowed(clone, "--config", "retinue.yaml")
    clone.retinue("trust", "--yes")
    other = Project(tmp_path / "other")
    (other.folder / "retinue.yaml").write_text(LOOSE)
    other.script({"main": [SHELL, "end"]})
    assert not allowed(other)


def test_at_a_terminal_it_is_shown_and_asked_once(clone: Project) -> None:
    terminal = Terminal(clone, *run(clone, "--plain"))
    screen = terminal.read_until("Trust it, until it changes? [y/N] ")
    assert "loosens what agents may do here:\r\n  approvals.mode: yes\r\n  approvals.allow: shell(echo *)\r\n" in screen
    terminal.type("\n")
    terminal.read_until("[y]es [n]o > ")  # so the tool asks
    terminal.type("n\n")
    terminal.read_until(None)
    assert terminal.end() == 0
    again = Terminal(clone, *run(clone, "--plain"))
    assert "Trust it" not in again.read_until("[y]es [n]o > ")
    assert "is not trusted, so this part of it is ignored" in again.text
    again.type("n\n")
    again.read_until(None)
    assert again.end() == 0
    (clone.folder / "retinue.yaml").write_text(LOOSE + "# changed\n")
    changed = Terminal(clone, *run(clone, "--plain"))
    changed.read_until("Trust it, until it changes? [y/N] ")
    changed.type("y\n")
    screen = changed.read_until(None)
    assert changed.end() == 0
    assert "[y]es [n]o" not in screen
    assert allowed(clone)


def test_nothing_is_asked_of_a_file_that_loosens_nothing(project: Project) -> None:
    (project.folder / "retinue.yaml").write_text("approvals: {mode: strict, deny: [shell]}\nmax_turns: 5\n")
    project.script({"main": ["end"]})
    terminal = Terminal(project, *run(project, "--plain"))
    assert "rust" not in terminal.read_until(None)
    assert terminal.end() == 0
    assert "loosens nothing" in project.retinue("trust").stdout


def test_always_keeps_the_trust_a_file_has_and_gives_none(clone: Project) -> None:
    (clone.folder / "retinue.yaml").write_text("max_turns: 9\n")
    trusted = _answered_always(clone)
    assert "allow" in trusted.read_text()
    assert allowed(clone)
    trusted.write_text("max_turns: 500\n")  # somebody else's, and loose
    _answered_always(clone, trust=False)
    assert "shell(echo 1)" in trusted.read_text()
    assert not allowed(clone)


def _answered_always(project: Project, *, trust: bool = True) -> Path:
    terminal = Terminal(project, *run(project, "--plain"))
    if not trust:
        terminal.read_until("Trust it, until it changes? [y/N] ")
        terminal.type("n\n")
    for prompt, key in (("[y]es [n]o > ", "a\n"), ("sure? [y]es [n]o > ", "y\n")):
        terminal.read_until(prompt)
        terminal.type(key)
    terminal.read_until(None)
    assert terminal.end() == 0
    return project.folder / "retinue.yaml"


def test_what_counts_as_loose() -> None:
    def loose(text: str) -> list[str]:
        return [str(each) for each in restrict(parse_settings(text, Path("retinue.yaml")))[1]]

    def narrowed(text: str) -> Settings:
        return restrict(parse_settings(text, Path("retinue.yaml")))[0]

    assert loose("max_concurrent: null\nmax_depth: 4\nmax_turns: 100\nstall: null\ntimeout: null\n") == [
        "max_depth: 4",
        "max_concurrent: null",
    ]
    assert loose("orchestrator: {coordination: {subagent_default_timeout: 1801, subagent_min_timeout: 1}}") == [
        "orchestrator.coordination.subagent_default_timeout: 1801"
    ]
    assert loose("profiles: {Poet: {limits: {turns: 101, depth: 3}, approvals: {mode: yes, allow: [shell]}}}") == [
        "profiles.Poet.limits.turns: 101"
    ]
    sandboxes = (
        "orchestrator: {coordination: {subagent_runtime_mode: inherited, subagent_runtime_fallback_mode: inherited, "
        "subagent_host_launch_prefix: [nice, -n, '5']}}\nexpose_paths: [/opt]\nprofiles: {poet: {runtime: inherited}, "
        "boxed: {runtime: isolated}}\n"
    )
    assert loose(sandboxes) == [
        "expose_paths: /opt",
        "orchestrator.coordination.subagent_runtime_mode: inherited",
        "orchestrator.coordination.subagent_runtime_fallback_mode: inherited",
        "orchestrator.coordination.subagent_host_launch_prefix: nice -n 5",
        "profiles.poet.runtime: inherited",
    ]
    narrow = narrowed(sandboxes)
    assert (narrow.expose_paths, narrow.profiles["poet"]) == ((), {})
    assert narrow.coordination == Settings().coordination
    assert not loose("orchestrator: {coordination: {subagent_runtime_mode: isolated}}")
    image = "container_image: evil\ncontainer_flags: [--privileged]\n"
    assert loose(image) == ["container_image: evil", "container_flags: --privileged"]
    narrow = narrowed(image)
    assert (narrow.container_image, narrow.container_flags) == (None, ())
    assert loose(
        "profiles: {a: {limits: {seconds: null}}, b: {limits: {seconds: 1801}}, c: {limits: {seconds: 9}}}"
    ) == [
        "profiles.a.limits.seconds: null",
        "profiles.b.limits.seconds: 1801",
    ]
    asks = "orchestrator: {coordination: {subagent_runtime_mode: delegated, subagent_delegation_directory: box}}"
    assert loose(asks) == [
        "orchestrator.coordination.subagent_runtime_mode: delegated",
        "orchestrator.coordination.subagent_delegation_directory: box",
    ]
    narrow = narrowed(asks)
    assert narrow.coordination == Settings().coordination
    assert loose("retention_days: 29.5") == ["retention_days: 29.5"] and loose("retention_days: 31") == []
    assert narrowed("retention_days: 0").retention_days == 30
    assert loose("workspace_max_mib: 2049") == ["workspace_max_mib: 2049"]
    assert loose("workspace_max_mib: 2048") == []


@pytest.mark.parametrize("spoil", ["text", "mode", "owner", "link", "folder"])
def test_an_answer_that_others_could_have_written_is_none(
    spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file = tmp_path / "retinue.yaml"
    trust.keep_answer(file, LOOSE)
    [kept] = (tmp_path / "config/retinue/trusted").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert trust.read_answer(file, LOOSE) is True
    assert trust.read_answer(file, LOOSE + " ") is None
    actions: dict[str, Any] = {
        "text": lambda: kept.write_text("{" * 100),
        "mode": lambda: kept.chmod(0o666),
        "owner": lambda: os.chown(kept, 65534, -1) if os.geteuid() == 0 else kept.unlink(),
        "link": lambda: (kept.rename(tmp_path / "x"), kept.symlink_to(tmp_path / "x")),
        "folder": lambda: (kept.unlink(), kept.mkdir()),
    }
    actions[spoil]()
    assert trust.read_answer(file, LOOSE) is None


def test_without_a_home_nothing_is_trusted(clone: Project) -> None:
    nowhere = {"XDG_CONFIG_HOME": "/dev/null/x", "HOME": "/dev/null"}
    assert "cannot be written" in one_line_error(clone.retinue("trust", "--yes", **nowhere))
    assert clone.retinue(*run(clone), **nowhere).returncode == 1
