"""`retinue a2a add`, `retinue a2a call` and what `doctor` says of agents elsewhere."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from a2a.server.agent_execution import RequestContext
from a2a.server.tasks import TaskUpdater
from a2a.types import Part

from retinue.build.project import load_project_parts
from retinue.concurrency import TaskOwner
from retinue.core.errors import ConfigError
from retinue.surfaces.cli.doctor import Check, CheckedProject, check_agents
from tests.remote.a2a_kit import answer_as_seed, bind, serve_agent
from tests.surfaces.cli.shell import A2A, Project, environment, find_quick_command


async def run(project: Project, *words: str, **env: str) -> tuple[int, str, str]:
    """A command in a process of its own: the agent it calls is served in this one."""
    process = await asyncio.create_subprocess_exec(
        *find_quick_command(*A2A), *words, cwd=project.folder, env=environment(**env), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_an_agent_is_called_added_checked_and_delegated_to(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    call = {"name": "subagent_argocd", "args": {"task": "show version"}}
    project.script({"main": [{"tools": [call]}, {"text": "{{last_result}}"}]})
    (project.folder / "retinue.yaml").write_text("# mine\nmodel: scripted:script.yaml\n")
    async with serve_agent(answer_as_seed) as (url, agent):
        code, out, err = await run(project, "a2a", "call", url, "show version")
        assert (code, out) == (0, "ArgoCD runs v2.9.3.\n"), err
        assert "version_service__version" in err
        shown = project.retinue("show").stdout
        assert "version_service__version" in shown and "workspace" not in shown, shown
        code, out, err = await run(project, "continue", "--runtime", "inherited", "--", *latest(project), "and now?")
        assert (code, out) == (0, "ArgoCD runs v2.9.3.\n"), err
        assert agent.asked == ["show version", "and now?"] and len(set(agent.contexts)) == 1
        code, out, err = await run(project, "a2a", "add", url)
        assert code == 0 and "speaks JSONRPC 1.0" in out and "as 'argocd'" in out, err
        yaml = (project.folder / "retinue.yaml").read_text()
        assert yaml.startswith("# mine\n") and f"url: {url}" in yaml
        [check] = await examine(project)
        assert (check.state, "argocd: an A2A agent" in check.text) == ("ok", True)
        code, out, err = await run(project, "run", "which version?", "--yes", "--runtime", "inherited")
        assert (code, out) == (0, "ArgoCD runs v2.9.3.\n"), err
    assert agent.asked == ["show version", "and now?", "show version"]
    [check] = await examine(project)
    assert check.state == "fail" and "cannot be reached" in check.text and "retinue a2a call" in check.do
    assert (await run(project, "a2a", "call", url, "show version"))[0] == 1
    shown = project.retinue("show").stdout
    assert "cannot be reached" in shown and "workspace" not in shown, shown


async def test_a_question_of_an_agent_is_answered_with_words_from_another_terminal(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        if context.get_user_input() == "deploy":
            await updater.requires_input(updater.new_agent_message([Part(text="Which cluster?")]))
            asked.set()
        else:
            await updater.add_artifact([Part(text=f"deployed to {context.get_user_input()}")])
            await updater.complete()

    project = Project(tmp_path / "p")
    async with serve_agent(act) as (url, _), TaskOwner() as owner:
        calling = owner.start(run(project, "a2a", "call", url, "deploy", "--wait-approvals", "600"))
        await asked.wait()
        while (await run(project, "approve", "1", "--yes", "--set", "answer=blue"))[0] != 0:
            assert not calling.done()  # the question is on its way
        code, out, err = await calling
    assert (code, out) == (0, "deployed to blue\n"), err


def latest(project: Project) -> list[str]:
    return [json.loads(project.retinue("ps", "--json").stdout)[0]["tree"]]


async def examine(project: Project) -> list[Check]:
    """Return the checks of `doctor` for the remote agents of a project whose settings are trusted."""
    checked = CheckedProject(
        project.folder, *load_project_parts(project.folder, config=project.folder / "retinue.yaml")
    )
    return await asyncio.to_thread(lambda: list(check_agents(checked)))


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("a2a", "add", "ftp://x"), "'ftp://x' is not an http or https URL"),
    (("a2a", "add", "http://me:secret@x/"), "a URL may not contain a user name"),
    (("a2a", "call", "http://x", ""), "the task is empty"),
    (("a2a", "add", "http://x", "--bearer-env", "A", "--api-key-env", "B"), "not both"),
]


def test_wrong_words_are_one_line(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    for words, said in WRONG:
        done = project.retinue(*words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert said in done.stderr


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"argocd": {}}, "give it a 'url'"),
    ({"argocd": {"url": "nowhere"}}, "is not an http or https URL"),
    ({"argocd": {"url": "http://x", "auth": {"bearer_env": "A", "api_key_env": "B"}}}, "may have only one of"),
    ({"argocd": {"url": "http://x", "auth": {"client_id_env": "A"}}}, "go together"),
    ({"argocd": {"url": "http://x", "auth": {"bearer_env": "not a name"}}}, "is not the name of a variable"),
    ({"argocd": {"url": "http://x", "allowed_hosts": ["http://y"]}}, "is not a host"),
    ({"argocd": {"url": "http://x", "timeout": 0}}, "timeout"),
    ({"argocd": {"url": "http://x", "token": "secret"}}, "token"),
]


def test_wrong_settings_name_their_place(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    for agents, said in BAD_SETTINGS:
        (project.folder / "retinue.yaml").write_text(json.dumps({"a2a_agents": agents}))
        done = project.retinue("profiles")
        assert done.returncode == 2 and said in done.stderr and "retinue.yaml:1" in done.stderr, done.stderr


def test_an_agent_of_a_cloned_project_needs_trust(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    agents = {"argocd": {"url": "http://x", "auth": {"bearer_env": "MY_TOKEN"}}}
    (project.folder / "retinue.yaml").write_text(json.dumps({"a2a_agents": agents}))
    done = project.retinue("profiles", "--all")
    assert "argocd" not in done.stdout
    assert "a2a_agents.argocd: http://x (gets MY_TOKEN)" in done.stderr


def test_an_agent_has_a_name_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "retinue.yaml"
    file.write_text("a2a_agents: {explorer: {url: 'http://x'}}")
    with pytest.raises(ConfigError, match="'explorer' is the name of an agent of this project"):
        load_project_parts(tmp_path, config=file)


async def test_nobody_there(tmp_path: Path) -> None:
    bound, url = bind()
    bound.close()
    code, out, err = await run(Project(tmp_path / "p"), "a2a", "add", url)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot be reached" in err
