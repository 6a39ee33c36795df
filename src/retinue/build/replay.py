"""The factory of replays: what plays a recorded tree again, and the supervisor that runs it."""

from __future__ import annotations

from pathlib import Path

from retinue.agent.plans import ProfilePlanner
from retinue.agent.replay import Replay, SilentModel
from retinue.build.models import LibraryPrices
from retinue.build.parts import Parts
from retinue.build.project import find_evaluator
from retinue.concurrency import SystemClock
from retinue.core.limits import Timeouts
from retinue.core.network import parse_hosts
from retinue.core.ports import Log
from retinue.core.profiles import RUNTIMES, Profile
from retinue.core.records import RunRecord
from retinue.sandbox.in_process import IN_PROCESS
from retinue.sandbox.placement import Placement
from retinue.supervisor.ports import SupervisorPorts
from retinue.supervisor.supervisor import Supervisor
from retinue.tools.dialer import SystemDialer
from retinue.workspaces.run_folders import StateFolder

__all__ = ["Replay", "make_replay", "make_replay_supervisor"]


def make_replay(
    records: dict[int, RunRecord], parts: Parts | None = None, primary_profile: Profile | None = None
) -> Replay:
    """Return the replay of a recorded tree. With `parts`, the instructions and tools of their profiles (for the primary
    those of `primary_profile`) replace the recorded ones."""
    if parts is None:
        return Replay(records)
    model = SilentModel()
    planner = ProfilePlanner(
        parts.profiles,
        models=lambda _: model,
        runtimes=Placement(dict.fromkeys(RUNTIMES, lambda _: IN_PROCESS), mode="inherited"),
        default_model=model,
        skills=parts.skills,
        network=parse_hosts(parts.network or ()),
        dialer=SystemDialer(),
        teams=parts.teams,
        members=parts.subagent_agents,
        has_subagents=parts.enable_subagents,
        find_evaluator=find_evaluator,
        has_rounds=parts.rounds is not None,
    )
    return Replay(records, planner=planner, primary_profile=primary_profile)


def make_replay_supervisor(replay: Replay, log: Log, project: Path) -> Supervisor:
    """Build the supervisor of a replay, which calls no model and no tool."""
    ports = SupervisorPorts(
        log=log,
        planner=replay,
        state=StateFolder(None, project=project),
        clock=SystemClock(),
        policy=replay,
        approver=replay,
        limits=replay.limits,
        timeouts=Timeouts(),
        prices=LibraryPrices(),
    )
    supervisor = Supervisor(ports)
    replay.answer = supervisor.approvals.answer
    return supervisor
