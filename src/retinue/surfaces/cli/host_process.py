"""The process of a command that runs agents: its Control, its control server and its signal handlers.

`open_process` opens and closes them, for one tree, for a conversation and for `retinue watch`. The MCP and A2A servers
open their Control themselves, because they also work without a command line. Knows no command line options.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from retinue.build.parts import Parts
from retinue.core.control import Control
from retinue.core.profiles import Profile
from retinue.surfaces.cli.signals import Signals


def load_control(parts: Parts) -> Control:
    """Open a Control of this process. Imports most of retinue, while the header is already on screen."""
    from retinue.build.supervisor import open_control

    return open_control(parts)


@asynccontextmanager
async def open_process(
    parts: Parts,
    say: Callable[[str], object],
    *,
    serves: bool = True,
    prepares: bool = True,
    profile: Profile | None = None,
    make: Callable[[Parts], Control] = load_control,
) -> AsyncIterator[tuple[Control, Signals]]:
    """Open the Control that `make` returns, and handle signals until the Control is closed. `say` shows messages.

    `serves` starts a control server for other processes, unless `parts` have no state folder. `prepares` connects to
    the MCP servers of `profile` first, or to all of them without a profile. Before the block begins, and after
    `Signals.stop`, Ctrl-C interrupts as in any program."""
    control = make(parts)
    signals = Signals()
    try:
        async with AsyncExitStack() as servers:
            servers.push_async_callback(control.close)
            if prepares:
                await control.prepare(profile, say)
            if serves and parts.state is not None:
                from retinue.build.servers import serve_control

                await serve_control(servers, control, parts, say)
            signals.start()
            yield control, signals
    finally:
        signals.stop()


async def kill_trees(control: Control) -> None:
    """Kill every tree that runs in this process."""
    for tree in await control.list_trees(live=True):
        await control.kill(tree.tree)
