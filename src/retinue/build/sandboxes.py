"""Factories of runtimes and sandboxes, and functions for the CLI: images, escape attempts, paths to expose."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from retinue.build.parts import Parts
from retinue.build.remote_agents import RemoteAgents, refuse_remote
from retinue.core.errors import ConfigError
from retinue.core.plans import Runtime, Sandbox
from retinue.core.profiles import RuntimeName
from retinue.remote.port import RemoteRuntime
from retinue.sandbox.in_process import IN_PROCESS
from retinue.sandbox.placement import Placement, Reach
from retinue.sandbox.workspace_sandbox import WorkspaceSandbox
from retinue.tools.dialer import SystemDialer
from retinue.workspaces.create import Workspaces

if TYPE_CHECKING:
    from retinue.sandbox.builder import SandboxBuilder
    from retinue.sandbox.escapes import Attempts

NO_OUTBOX = (
    "'delegated' needs the folder shared with the host: --delegation-directory, RETINUE_DELEGATION_DIRECTORY, or "
    "subagent_delegation_directory in retinue.yaml"
)


def make_placement(parts: Parts, workspaces: Workspaces | None = None, agents: RemoteAgents | None = None) -> Placement:
    """Return the runtimes that runs can be placed in. `agents` are the agents that are elsewhere.

    A sandbox is probed when the first run needs it, before any model is called."""
    workspaces = workspaces or Workspaces()

    def make_runtime(name: RuntimeName, reach: Reach) -> Runtime:
        if name == "delegated":
            from retinue.remote.outbox import OutboxAdapter

            if parts.outbox is None:
                raise ConfigError(NO_OUTBOX)
            return RemoteRuntime(adapter=OutboxAdapter(parts.outbox), prepare=workspaces.make_for_peer)
        sandbox = IN_PROCESS if name == "inherited" else _make_sandbox(parts, name, reach)
        return WorkspaceSandbox(sandbox, setup=parts.setup, workspaces=workspaces)

    return Placement(
        make_runtime,
        mode=parts.runtime,
        fallback=parts.fallback,
        find_remote=refuse_remote if agents is None else agents.find_runtime,
    )


def _make_sandbox(parts: Parts, runtime: RuntimeName, reach: Reach) -> Sandbox:
    """Probe bubblewrap, or for `container` podman or docker, and return the sandbox.

    `reach` is the network access of its runs: none, some hosts through a proxy, or the full network. Raises
    ConfigError, which says what to install or set."""
    from retinue.sandbox.tool_server_session import ToolServerSandbox

    expose, full_network = tuple(parts.expose), reach == "full"
    builder: SandboxBuilder
    if runtime == "container":
        from retinue.sandbox.container import probe_containers
        from retinue.sandbox.container_image import NAME

        image, flags = parts.image or NAME, tuple(parts.container_flags)
        builder = probe_containers(image=image, flags=flags, expose=expose, full_network=full_network)
    else:
        from retinue.sandbox.bubblewrap import probe_bubblewrap

        builder = probe_bubblewrap(prefix=tuple(parts.launch_prefix), expose=expose, full_network=full_network)
    make_proxy = None
    if reach == "hosts":
        from retinue.sandbox.network_proxy import RunProxy

        make_proxy = partial(RunProxy, dialer=parts.dialer or SystemDialer())
    return ToolServerSandbox(builder, resource_limits=parts.resource_limits, make_proxy=make_proxy)


@contextmanager
def plant_escape_attempts(runtime: RuntimeName) -> Iterator[tuple[Attempts, Parts]]:
    """Prepare the escape attempts of `retinue doctor --escape`. Yield them and the parts of the run that makes them."""
    from retinue.sandbox.escapes import RESOURCE_LIMITS, plant_targets

    with plant_targets(runtime) as attempts:
        yield (
            attempts,
            Parts(
                project=attempts.folder,
                state=attempts.folder / ".retinue",
                mode="yes",
                runtime=runtime,
                resource_limits=RESOURCE_LIMITS,
                network=attempts.network,
                dialer=attempts.dialer,
            ),
        )


def probe_runtime(parts: Parts, runtime: RuntimeName, *, proxied: bool = False) -> Sequence[str]:
    """Check that a runtime works here, a sandbox from inside, and return the parts of the sandbox that work. With
    `proxied`, its runs reach some hosts through a proxy. Raises ConfigError, which says what to install or set."""
    started = make_placement(parts).runtime(runtime, "hosts" if proxied else "none").started
    return () if started is None else started.sandbox


def needs_new_image(error: ConfigError) -> bool:
    """Return True if the `error` of `probe_runtime` says that the image is missing or does not fit this machine."""
    from retinue.sandbox.container import ImageUnusable

    return isinstance(error, ImageUnusable)


def run_as_ordinary_user(argv: Sequence[str], *, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command of root as an ordinary user. Raises OSError or SubprocessError."""
    from retinue.sandbox.escapes import run_as_user

    return run_as_user(argv, seconds=seconds)


def find_container_engine() -> str | None:
    """Return "podman" or "docker", whichever is installed, or None."""
    from retinue.sandbox.container import find_engine

    try:
        return Path(find_engine().argv[0]).name
    except ConfigError:
        return None


def find_exposed_paths(programs: Sequence[str], folder: Path, environ: Mapping[str, str]) -> list[str]:
    """Return the paths that these programs need in a sandbox. `retinue init` proposes to expose them."""
    from retinue.sandbox.exposed_paths import find_needed_paths

    return find_needed_paths(programs, folder, environ)


def build_sandbox_image() -> str:
    """Build the default image of runtime `container` and describe it. Raises ConfigError."""
    from retinue.sandbox.container import find_engine
    from retinue.sandbox.container_image import build_image

    return build_image(find_engine().argv)
