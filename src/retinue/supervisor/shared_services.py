"""The services that all runs of a supervisor share. Spawning and continuing runs come from above, as callables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from retinue.core.control import ResumeOverrides, RunHandle
from retinue.core.ports import Prices, SpawnedRun, SpawnOrder
from retinue.supervisor.approvals import Approvals
from retinue.supervisor.run import Run
from retinue.supervisor.runfiles import RunFiles
from retinue.supervisor.tree import Tree

SpawnChildren = Callable[[Tree, Run, Sequence[SpawnOrder]], list[SpawnedRun]]
ContinueRun = Callable[[str, int, str, ResumeOverrides], Awaitable[RunHandle[Any]]]


class SharedServices(msgspec.Struct, frozen=True, eq=False):
    """The parts of the supervisor that the services of its runs use."""

    approvals: Approvals
    prices: Prices
    files: RunFiles
    spawn_children: SpawnChildren
    continue_run: ContinueRun
