"""What plays recorded trees again, built as `build` builds what runs; loaded by who replays."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from retinue import build
from retinue.agent.plans import ProfilePlanner
from retinue.build.models import LatePrices
from retinue.core.limits import Timeouts
from retinue.core.network import parse_hosts
from retinue.core.profiles import RUNTIMES, Profile
from retinue.core.records import RunRecord
from retinue.sandbox.inherited import Inherited
from retinue.sandbox.placement import Placement
from retinue.supervisor.approvals import ApprovalTerms
from retinue.supervisor.local_control import LocalControl
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.timers import SystemClock
from retinue.tools.dialer import SystemDialer
from retinue.workspaces.run_folders import StateFolder


def stage(records: dict[int, RunRecord], parts: build.Parts | None = None, first: Profile | None = None) -> Any:
    """What plays a recorded tree. With `parts`, the words and tools of their profiles (for the primary, of `first`)
    take the place of the recorded ones."""
    room = importlib.import_module("retinue.agent.replay")
    now = None
    if parts is not None:
        silent = room.Unasked()
        now = ProfilePlanner(
            parts.profiles,
            models=lambda _: silent,
            runtimes=Placement(dict.fromkeys(RUNTIMES, lambda *_: Inherited()), mode="inherited"),
            default_model=silent,
            skills=parts.skills,
            network=parse_hosts(parts.network or ()),
            dialer=SystemDialer(),
        )
    return room.Stage(records, now=now, first=first)


def replayer(played: Any, project: Path) -> Supervisor:
    """A supervisor of what is played: its log is in memory, and it calls no model and no tool."""
    played.runtime = importlib.import_module("retinue.sandbox.replayed").Replayed(played)
    made = Supervisor(
        build.open_log(None),
        planner=played,
        state=StateFolder(None, project=project),
        clock=SystemClock(),
        policy=played,
        approver=played,
        terms=ApprovalTerms(),
        book=None,
        limits=played.limits,
        timeouts=Timeouts(),
        prices=LatePrices(),
    )
    LocalControl(made)
    played.answer = made.answer
    return made
