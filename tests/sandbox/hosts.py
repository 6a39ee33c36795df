"""A host with a watcher beside the one who asks: two supervisors with logs of their own, and a folder between them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import retinue
from retinue import Event, Limits, Profile, Result
from retinue.build.parts import Parts, find_profile
from retinue.build.remote_agents import RemoteAgents
from retinue.build.supervisor import make_supervisor
from retinue.control.delegation_request import WatcherSettings
from retinue.control.outbox_watcher import OutboxWatcher
from retinue.core.control import RunHandle
from retinue.core.events import decode_event, encode_event
from retinue.core.messages import RunRef
from retinue.core.ports import Approver, AttachedApprover
from retinue.log.runs import Runs
from retinue.supervisor.supervisor import Supervisor
from retinue.workspaces.run_folders import RunFolders


@dataclass
class Host:
    """The trusted side of an outbox. `said` is the output for its user, `trees` are the trees it has run."""

    folder: Path
    outbox: Path
    supervisor: Supervisor
    said: list[str]
    trees: list[str]


@asynccontextmanager
async def host(
    *roots: Path,
    profiles: list[Profile],
    limits: Limits | None = None,
    runtime: str = "isolated",
    begun: Callable[[RunFolders], None] = lambda _: None,
    agents: RemoteAgents | None = None,
    approver: Approver | None = None,
    **options: Any,
) -> AsyncIterator[Host]:
    """Watches a new outbox while it is entered. Each run's folders go to `begun`, before the run takes a step."""
    folder = Path(tempfile.mkdtemp(prefix="retinue-host-"))
    folder.chmod(0o755)
    outbox = folder / "outbox"
    outbox.mkdir()
    project = folder / "project"
    project.mkdir()
    attached = None if approver is None else AttachedApprover(approver)
    wanted = {"mode": "yes", "runtime": runtime, "approver": attached, **options}
    parts = Parts(project, project / ".retinue", limits=limits or Limits(), **wanted)
    known = {profile.name: profile for profile in profiles}
    owner = make_supervisor(parts, agents)
    here = Host(folder, outbox, owner, [], [])

    def note(ref: RunRef, _: str) -> None:
        here.trees.append(ref.tree)
        begun(owner.trees[ref.tree].runs[ref.run].folders)

    hosting = WatcherSettings(
        outbox=outbox,
        roots=roots,
        project=project,
        state=project / ".retinue",
        find=lambda name: known.get(name) or find_profile(parts, name),
        limits=parts.limits,
        timeouts=parts.timeouts,
        say=here.said.append,
        begun=note,
    )
    watcher = OutboxWatcher(owner, hosting)
    watching = asyncio.create_task(watcher.watch())
    try:
        yield here
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await watcher.close()
        await owner.close()
        shutil.rmtree(folder)


async def play_elsewhere(
    profile: Profile,
    folder: Path,
    *,
    during: Callable[[RunHandle], Awaitable[Any]] | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> tuple[Result[Any], list[Event]]:
    """Runs the profile as a primary that lives on a host, whose limits, rules and approver these are."""
    try:
        async with host(folder, profiles=[profile], limits=limits, **options) as there:
            state = folder / ".retinue"
            async with retinue.open(path=state, runtime="delegated", outbox=there.outbox, mode="yes") as r:
                run = await r.spawn(replace(profile, runtime="delegated"), "go")
                meanwhile = None if during is None else asyncio.create_task(during(run))  # type: ignore[arg-type]
                events = [event async for event in run.events()]
                if meanwhile is not None:
                    await meanwhile
            assert list(there.outbox.iterdir()) == []
            for event in events:
                if event.kind == "run.started":
                    assert event.body.runtime == "delegated" and "net" in event.body.sandbox  # type: ignore[union-attr]
            runs = f"{there.folder}/project/.retinue/runs"
            return as_here(events, folder, runs, there.trees)
    finally:
        shutil.rmtree(folder)


def as_here(events: list[Event], folder: Path, runs: str, trees: list[str]) -> tuple[Result[Any], list[Event]]:
    """Return the result and the events of a delegated tree with the host's folders renamed to ours and `run.remote`
    left out."""
    tree, here = events[0].tree, str(folder)
    lines = [encode_event(event).decode() for event in events if event.kind != "run.remote"]
    for other in trees:
        swaps = ((f"{runs}/{other}/0/workspace", here), (runs, f"{here}/.retinue/runs"), (other, tree))
        for old, new in swaps:
            lines = [line.replace(old, new) for line in lines]
    found = [decode_event(line.encode()) for line in lines]
    primary = Runs.of(tree, found).primary
    assert primary is not None
    return primary.result(tree), found
