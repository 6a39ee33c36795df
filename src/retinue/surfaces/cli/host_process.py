"""The process of a command that runs agents: its Control, its control server and its signal handlers.

`open_process` opens and closes them, for one tree, for a conversation, and for a server (`server_process.py`).
`retinue mcp serve` handles signals before it has a Control. Knows no command line options.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from retinue.build.parts import Parts
from retinue.core.control import Control
from retinue.core.profiles import Profile
from retinue.surfaces.cli.signals import Signals


@asynccontextmanager
async def open_process(
    parts: Parts,
    say: Callable[[str], object],
    *,
    serves: bool = True,
    prepares: bool = True,
    profile: Profile | None = None,
    make: Callable[[Parts], Control] | None = None,
) -> AsyncIterator[tuple[Control, Signals]]:
    """Open a served Control, and handle signals until the Control is closed. `serves`, `make` and `say` are those of
    `open_served_control`.

    `prepares` connects to the MCP servers of `profile` first, or to all of them without a profile. Before the block
    begins, and after `Signals.stop`, Ctrl-C interrupts as in any program."""
    # Imports most of retinue, while the header is already on screen.
    from retinue.build.supervisor import open_control, open_served_control

    signals = Signals()
    try:
        async with open_served_control(parts, say, serves=serves, make=make or open_control) as control:
            if prepares:
                await control.prepare(profile, say)
            signals.start()
            yield control, signals
    finally:
        signals.stop()


async def kill_trees(control: Control) -> None:
    """Kill every tree that runs in this process."""
    for tree in await control.list_trees(live=True):
        await control.kill(tree.tree)
