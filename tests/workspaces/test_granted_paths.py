"""A path that one run grants to another is the file or folder that was granted, whatever replaces it meanwhile."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Event, Profile
from retinue.core.errors import ConfigError
from retinue.core.events import RunSpawned, ToolResult
from retinue.core.limits import ResourceLimits
from retinue.core.messages import Reply, RunRef, SystemPrompt
from retinue.core.plans import Job, Plan
from retinue.core.profiles import Task
from retinue.files.opening import RefusedFile, open_real_folder, stat_real
from retinue.sandbox.box import Box, make_box
from retinue.sandbox.bubblewrap import Bubblewrap
from retinue.sandbox.container import Containers
from retinue.sandbox.in_process import IN_PROCESS
from retinue.sandbox.process import PreparedSandbox
from retinue.testing import scripted
from retinue.tools.paths import OutsideRoots, find_visible_path
from retinue.workspaces.run_folders import RunFolders, resolve_context_paths, resolve_remaining_paths
from tests.sandbox.places import make_image, needs_bubblewrap, needs_containers
from tests.supervisor.tree.kit import bodies, call, spawn
from tests.workspaces.kit import repository, shell

SECRET = "a secret of the user"


def make_secret(tmp_path: Path) -> Path:
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "s.txt").write_text(SECRET)
    for place in (tmp_path, folder):
        place.chmod(0o755)
    return folder


class HeldModel:
    """A scripted model whose subagents wait until they are released."""

    def __init__(self, agents: dict[str, Any]) -> None:
        self._inner, self.released = scripted(agents), asyncio.Event()

    async def complete(self, request: Any, on_delta: Any, /) -> Reply:
        if request.ref.run:
            await self.released.wait()
        return await self._inner.complete(request, on_delta)


async def play(project: Path, runtime: str, planted: str) -> list[Event]:
    """A sandboxed primary grants its folder `d` to a child and runs the command `planted`. Then the child looks."""
    order = {"task": "look", "subagent_id": "k", "context_paths": ["d"], "include_parent_workspace": False}
    search = call("grep", pattern="public|secret")
    model = HeldModel({"main": [spawn(order, background=True), shell(planted), "end"], "subagent": [search, "end"]})
    async with retinue.open(project / ".retinue", mode="yes", runtime=runtime) as r:  # type: ignore[arg-type]
        run = await r.spawn(Profile("main", "You are main.", model=model, workspace="copy"), "go")
        events = []
        async for event in run.events():
            events.append(event)
            if event.run == 0 and isinstance(event.body, ToolResult) and event.body.name == "shell":
                model.released.set()
        return events


def list_texts(events: list[Event]) -> str:
    return "\n".join(body.text for body in bodies(events, ToolResult, run=1))


@needs_bubblewrap
async def test_a_child_sees_the_granted_folder(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", **{"d/s.txt": "public"})
    events = await play(project, "isolated", "true")
    assert "s.txt:1:public" in list_texts(events)


@needs_bubblewrap
async def test_a_link_planted_after_the_grant_shows_nothing(tmp_path: Path) -> None:
    """The sandbox of the child is made by its first call, when the parent has put a link in place of the folder."""
    secret, project = make_secret(tmp_path), repository(tmp_path / "p", **{"d/s.txt": "public"})
    events = await play(project, "isolated", f"mv d e; ln -s '{secret}' d")
    [spawned] = bodies(events, RunSpawned, run=1)
    assert os.path.realpath(spawned.context_paths[0]) == str(secret)  # the link is there
    assert bodies(events, ToolResult, run=1) and SECRET not in list_texts(events)


@pytest.mark.parametrize(
    "runtime",
    [pytest.param("isolated", marks=needs_bubblewrap), pytest.param("container", marks=needs_containers)],
)
async def test_a_folder_replaced_while_the_sandbox_is_made_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    """The replacement comes after the last check of the host: the tool server sees it before any call."""
    secret, project = make_secret(tmp_path), repository(tmp_path / "p", **{"d/s.txt": "public"})
    replaced: list[str] = []

    def prepare_and_replace(builder: Any, box: Box) -> PreparedSandbox:
        prepared = prepare(builder, box)
        for pin in box.pinned:
            d = Path(pin.path)
            if not d.is_symlink():
                d.rename(d.with_name(f"e{len(replaced)}"))
                d.symlink_to(secret)
                replaced.append(pin.path)
        return prepared

    builder_class = {"isolated": Bubblewrap, "container": Containers}[runtime]
    prepare = builder_class.prepare
    monkeypatch.setattr(builder_class, "prepare", prepare_and_replace)
    if runtime == "container":
        make_image()
    events = await play(project, runtime, "true")
    assert len(replaced) == 1 and SECRET not in list_texts(events)


@pytest.mark.parametrize("runtime", [pytest.param("container", marks=needs_containers)])
async def test_a_container_sees_the_granted_folder(tmp_path: Path, runtime: str) -> None:
    make_image()
    events = await play(repository(tmp_path / "p", **{"d/s.txt": "public"}), runtime, "true")
    assert "s.txt:1:public" in list_texts(events)


@needs_bubblewrap
@pytest.mark.parametrize("options", [{}, {"timeout_seconds": 60.0}], ids=["plain", "with a timeout"])
async def test_a_continued_child_follows_no_link_planted_since(tmp_path: Path, options: dict[str, Any]) -> None:
    secret, project = make_secret(tmp_path), repository(tmp_path / "p", **{"d/s.txt": "public"})
    order = {"task": "look", "subagent_id": "k", "context_paths": ["d"], "include_parent_workspace": False}
    search, again = call("grep", pattern="public|secret"), call("continue_subagent", subagent_id="k", message="again")
    again["tools"][0]["args"] |= options
    agents = {
        "main": [spawn(order), shell(f"mv d e; ln -s '{secret}' d"), again, "end"],
        "subagent": [search, "end", search, "end"],
    }
    async with retinue.open(project / ".retinue", mode="yes", runtime="isolated") as r:
        profile = Profile("main", "You are main.", model=scripted(agents), workspace="copy")
        run = await r.spawn(profile, "go")
        events = [event async for event in run.events()]
        with pytest.raises(ConfigError, match="leads over a symlink"):
            await r.continue_run(f"{run.tree}/1", "again", profiles=[profile])
    texts = "\n".join(event.body.text for event in events if isinstance(event.body, ToolResult))
    assert "s.txt:1:public" in texts and SECRET not in texts


def test_a_grant_inside_a_visible_folder_is_no_mount_of_its_own(tmp_path: Path) -> None:
    """Both the source and the place of such a mount lead through a folder that another run writes."""
    run = tmp_path / ".retinue/runs/t"
    for name in ("0/workspace/a/d", "1", "2"):
        (run / name).mkdir(parents=True)
    above, a, d = (str(run / name) for name in ("0/workspace", "0/workspace/a", "0/workspace/a/d"))

    def list_mounts(*readable: str, granted: list[str]) -> tuple[tuple[str, ...], list[str]]:
        folders = RunFolders(str(run / "1"), str(run / "1/workspace"), readable, granted_paths=granted)
        job = Job(
            ref=RunRef("t", 1, "/main/k-1", "k", "k", "s"),
            plan=Plan(profile=Profile("k"), runtime=IN_PROCESS),
            task=Task("x"),
            system=SystemPrompt(""),
            max_turns=None,
            thread=(),
            folders=folders,
            context=None,
        )
        box = make_box(job, folders, ResourceLimits(), user=None)
        return box.readable, [pin.path for pin in box.pinned]

    assert list_mounts(above, a, d, granted=[a, d]) == ((above,), [])
    assert list_mounts(a, d, granted=[a, d]) == ((a,), [a])
    assert list_mounts(d, granted=[d]) == ((d,), [d])
    # The mask over our state lies between the project and the workspaces in it.
    assert list_mounts(str(tmp_path), a, granted=[str(tmp_path), a]) == ((str(tmp_path), a), [str(tmp_path), a])


def test_a_granted_path_is_never_resolved_again(tmp_path: Path) -> None:
    secret, work = make_secret(tmp_path), tmp_path / "work"
    (work / "d").mkdir(parents=True)
    [granted] = resolve_context_paths(["d"], base=str(work), follow=False)
    folders = RunFolders(f"{tmp_path}/own", f"{tmp_path}/ws", [granted], granted_paths=[granted])
    assert folders.find_readable_paths() == [granted] and find_visible_path(folders, granted) == Path(granted)
    (work / "d").rmdir()
    (work / "d").symlink_to(secret)
    assert folders.find_readable_paths() == []
    assert resolve_remaining_paths(["d"], base=str(work)) == []
    with pytest.raises(ConfigError, match=r"context_paths\[0\] leads over a symlink: 'd'"):
        resolve_context_paths(["d"], base=str(work), follow=False)
    with pytest.raises(OutsideRoots):  # the target of the link is no root of the run
        find_visible_path(folders, str(secret / "s.txt"))
    # A person may name a path over a link.
    assert resolve_context_paths(["d"], base=str(work)) == [str(secret)]


def test_no_link_on_the_way_from_the_root_is_followed(tmp_path: Path) -> None:
    secret = make_secret(tmp_path)
    (tmp_path / "link").symlink_to(secret)
    assert stat_real(secret / "s.txt").st_size == len(SECRET) and stat_real("/")
    os.close(open_real_folder(secret))
    for path in (tmp_path / "link", tmp_path / "link/s.txt"):
        with pytest.raises(RefusedFile):
            stat_real(path)
    with pytest.raises(OSError):
        open_real_folder(tmp_path / "link")
