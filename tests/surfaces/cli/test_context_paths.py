"""Folders outside the project that a person lets a run read, and what models make of them."""

import json
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import ConfigError
from retinue.core.events import RunSpawned, ToolResult
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import bodies, call, main, spawn
from tests.surfaces.cli.shell import Project, one_line_error
from tests.surfaces.mcp.kit import connected
from tests.workspaces.kit import shell

pytestmark = [pytest.mark.finding("S4"), pytest.mark.requirement("MASS-21")]

NOT_ITS_OWN = (
    "Task at index 0 has a context_path it may not have: read: '{path}' is outside this run's folders. "
    "The user can grant it with --context-path, or with context_paths in retinue.yaml."
)


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """A folder beside the project that any user may read."""
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "api.md").write_text("GET /orders")
    for each in (tmp_path, folder):
        each.chmod(0o755)
    return folder


def pass_on(specs: Path) -> dict[str, Any]:
    """A script whose primary reads the folder and gives it to one of two subagents."""
    file = str(specs / "api.md")
    tasks = [{"task": "a", "subagent_id": "a", "context_paths": [str(specs)]}, {"task": "b", "subagent_id": "b"}]
    tries = [call("read", path=file), call("write", path=file, content="x"), "end"]
    return {"main": [call("read", path=file), spawn(*tasks), "end"], "a": tries, "b": tries}


async def reply(client: Any, **arguments: Any) -> dict[str, Any]:
    content: dict[str, Any] = (await client.call_tool("spawn_subagents", arguments)).structured_content
    return content


def read_outcomes(events: list[dict[str, Any]]) -> dict[str, list[tuple[bool, str]]]:
    """Return the outcomes of each agent's file tools."""
    found: dict[str, list[tuple[bool, str]]] = {}
    for event in events:
        if event["kind"] == "tool.result" and not event["text"].startswith("{"):  # no reply about subagents
            found.setdefault(event["path"], []).append((event.get("success", True), event["text"]))
    return found


@pytest.mark.parametrize("runtime", ["inherited", "isolated"])
@pytest.mark.parametrize("way", ["option", "relative option", "config"])
def test_a_person_grants_a_folder_and_the_model_passes_it_on(
    project: Project, specs: Path, way: str, runtime: str
) -> None:
    project.runtime = runtime
    options = {"option": str(specs), "relative option": "../specs"}
    if way == "config":
        (project.folder / "retinue.yaml").write_text("context_paths: [../specs]\n")
        assert project.retinue("trust", "--yes").returncode == 0
    granted = ["--context-path", options[way]] if way in options else []
    done = project.run("--yes", *granted, agents=pass_on(specs))
    assert done.returncode == 0, done.stderr
    outcomes = read_outcomes(project.events())
    assert outcomes["/main"] == [(True, "GET /orders")]
    [given] = [found for path, found in outcomes.items() if path.endswith("-1")]
    [other] = [found for path, found in outcomes.items() if path.endswith("-2")]
    assert given[0] == (True, "GET /orders")
    assert [success for success, _ in (given[1], *other)] == [False, False, False]  # read only, and not for all
    assert (specs / "api.md").read_text() == "GET /orders"


def test_a_continued_run_still_has_the_folder(project: Project, specs: Path) -> None:
    file = str(specs / "api.md")
    project.run("--yes", "--context-path", str(specs), agents={"main": ["first"]})
    model = project.script({"main": [call("read", path=file), "end"]}, name="again.yaml")
    done = project.retinue("continue", project.rows()[0]["tree"], "once more", "--yes", "--model", model)
    assert done.returncode == 0, done.stderr
    assert (True, "GET /orders") in read_outcomes(project.events())["/main"]


def test_a_cloned_project_grants_nothing_by_itself(project: Project, specs: Path) -> None:
    (project.folder / "retinue.yaml").write_text("context_paths: [../specs]\n")
    done = project.run("--yes", agents=pass_on(specs))
    assert "context_paths: ../specs" in done.stderr
    [(success, text)] = read_outcomes(project.events())["/main"]
    assert not success and "outside this run's folders" in text


@pytest.mark.parametrize(
    ("path", "error"),
    [("../nowhere", "--context-path: '../nowhere' does not exist"), ("/", "which has everything in it: name a folder")],
)
def test_a_wrong_option_is_said_before_anything_runs(project: Project, path: str, error: str) -> None:
    assert error in one_line_error(project.run("--context-path", path, agents={"main": ["x"]}))


def test_a_wrong_setting_is_said_before_anything_runs(project: Project) -> None:
    for value in ("/", "//", "''", "' '"):
        (project.folder / "retinue.yaml").write_text(f"context_paths: [{value}]\n")
        error = one_line_error(project.run(agents={"main": ["x"]}))
        assert "must be a file or folder other than /" in error
    (project.folder / "retinue.yaml").write_text("context_paths: [nowhere]\n")
    assert project.retinue("trust", "--yes").returncode == 0
    assert "does not exist" in one_line_error(project.run(agents={"main": ["x"]}))


async def test_from_python_for_every_primary_or_for_one(project: Project, specs: Path) -> None:
    async with retinue.open(project.folder / ".retinue", mode="yes", context_paths=["../specs"]) as r:
        run = await r.spawn(main(pass_on(specs)), "go")
        await run.result()
        events = await r.control.log.read(run.tree)
    assert bodies(events, ToolResult, run=0)[0].text == "GET /orders"
    assert [each.text for each in bodies(events, ToolResult, run=1)][:1] == ["GET /orders"]
    assert bodies(events, RunSpawned, run=0)[0].context_paths == (str(specs),)
    async with retinue.open(project.folder / ".retinue", mode="yes", context_paths=["nowhere"]) as r:
        with pytest.raises(ConfigError, match=r"context_paths\[0\] does not exist: '.*nowhere'"):
            await r.spawn(main({}), "go")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/no/such/file", NOT_ITS_OWN),
        ("../../nothing", NOT_ITS_OWN),
        ("{specs}", NOT_ITS_OWN),
        ("{specs}/nothing", NOT_ITS_OWN),
        ("../specs", NOT_ITS_OWN),
        ("nothing", "Task at index 0 has non-existent context_path: '{path}'"),
    ],
)
async def test_a_model_passes_on_only_what_its_run_has(project: Project, specs: Path, path: str, error: str) -> None:
    """The answer about a path outside its folders does not say whether the path exists."""
    path = path.format(specs=specs)
    asked = spawn({"task": "x", "context_paths": [path]})
    async with retinue.open(project.folder / ".retinue", mode="yes") as r:
        run = await r.spawn(main({"main": [asked, "end"]}), "go")
        await run.result()
        events = await r.control.log.read(run.tree)
    refused = bodies(events, ToolResult, run=0)[0]
    assert not refused.success and json.loads(refused.text)["error"] == error.format(path=path)
    assert len(bodies(events, RunSpawned)) == 1


@needs_bubblewrap
def test_a_link_that_a_sandboxed_run_makes_tells_nothing_about_the_machine(project: Project, specs: Path) -> None:
    project.runtime = "isolated"
    links = {"there": specs / "api.md", "missing": specs / "none.md"}
    made = shell("; ".join(f"ln -s '{target}' {name}" for name, target in links.items()))
    asked = [spawn({"task": "x", "context_paths": [name]}) for name in links]
    done = project.run("--yes", "--workspace", "copy", agents={"main": [made, *asked, "end"]})
    assert done.returncode == 0, done.stderr
    replies = [event["text"] for event in project.events() if event["kind"] == "tool.result"][1:]
    errors = [json.loads(text)["error"] for text in replies]
    refused = "Task at index 0 has a context_path it may not have: read: '{}' leads over a symlink: "
    assert [error.removeprefix(refused.format(name)) for error, name in zip(errors, links, strict=True)] == [
        "name what it points to"
    ] * 2


async def test_the_user_of_an_mcp_client_grants_in_its_settings(project: Project, specs: Path) -> None:
    installed = project.retinue("mcp", "install", "--client", "codex", "--context-path", str(specs))
    assert f'"--context-path", "{specs}"' in installed.stdout
    agents = {"subagent": [call("read", path=str(specs / "api.md")), "it says {{last_result}}"]}
    task = {"task": "look", "context_paths": [str(specs)]}
    async with connected(project, "--context-path", str(specs), agents=agents) as client:
        said = await reply(client, tasks=[task])
        assert "GET /orders" in said["results"][0]["answer"]
    async with connected(project, agents=agents) as client:
        said = await reply(client, tasks=[task])
        assert said["error"] == NOT_ITS_OWN.format(path=specs)
        said = await reply(client, tasks=[{**task, "context_paths": ["/no/such"]}])
        assert said["error"] == NOT_ITS_OWN.format(path="/no/such")
