"""A profile made ready to run (Plan), a single run of a plan (Job), and the ports for making plans and running jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec

from retinue.core.context import Context
from retinue.core.events import RunStarted, Warned
from retinue.core.messages import Model, Reply, RunRef, SystemPrompt, ToolSpec, Turn
from retinue.core.network import Hosts
from retinue.core.ports import Emit, Folders, Link, Outcome, RunSession, Tool
from retinue.core.profiles import RUNTIMES, Profile, RuntimeName, Task
from retinue.core.results import Ending
from retinue.core.rounds import Rounds
from retinue.core.teams import Member, TeamPlan

HostTool = Callable[[dict[str, Any], Context], Awaitable[Outcome]]


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundsPlan:
    """The rounds of a run, and the profile of its evaluator. `has_novelty` means the run can spawn a `novelty`
    subagent."""

    rounds: Rounds
    evaluator: Profile
    has_novelty: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A profile resolved for one run. A plan with nothing but a profile belongs to a run that does no work here.

    `host` are the tools that run in the supervisor's process. `profile_json` and `tools_json` go into `run.spawned`.
    `laxest_runtime` bounds the runtimes of its children. `notes` are warnings for a person when the run is spawned.
    `run_job` replaces loop and sandbox in a replay. `explain_missing` says why a tool of an MCP server is unavailable.
    Programs of code mode can call the `program_tools`. With a `team` the run is a team, and `children` are the profiles
    of its members. `members` are the `subagent_agents` for the runs it spawns. `primary_model` is the model of the
    tree's primary, with its name. With `rounds` the run answers several times. `reserves_evaluator` forbids models to
    spawn the evaluator, as in a tree with rounds. `handed_files` are names of files that the run exists to write into
    its own workspace, so writing them needs no approval. `needs_repository` is True if the run, or a member of its
    team, works here in a git worktree."""

    profile: Profile
    runtime: Runtime
    system: str = ""
    model: Model | None = None
    model_name: str = ""
    specs: tuple[ToolSpec, ...] = ()
    tools: Mapping[str, Tool] = field(default_factory=dict)
    host: Mapping[str, HostTool] = field(default_factory=dict)
    program_tools: tuple[ToolSpec, ...] = ()
    children: Sequence[Profile] = ()
    profile_json: msgspec.Raw = field(default_factory=partial(msgspec.Raw, b"null"))
    tools_json: msgspec.Raw = field(default_factory=partial(msgspec.Raw, b"null"))
    tools_bytes: int = field(init=False)  # the size of `tools_json`; this and `needs_repository` are the same for all
    needs_repository: bool = field(init=False)  # runs of the plan, so they are found out once
    laxest_runtime: RuntimeName = RUNTIMES[-1]
    parse: Callable[[Any], Any] | None = None
    network: Hosts = ()
    notes: tuple[Warned, ...] = ()
    run_job: Callable[[Job, Link], Awaitable[Ending]] | None = None
    explain_missing: Callable[[str], str] | None = None
    team: TeamPlan | None = None
    is_member: bool = False
    members: Sequence[Member] = ()
    primary_model: tuple[Model, str] | None = None
    rounds: RoundsPlan | None = None
    reserves_evaluator: bool = False
    handed_files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        profiles = (self.profile,) if self.team is None else self.children
        needs_repository = any(profile.workspace == "worktree" for profile in profiles)
        object.__setattr__(self, "tools_bytes", memoryview(self.tools_json).nbytes)
        object.__setattr__(self, "needs_repository", needs_repository and self.runtime.started is not None)


class RunHistory(msgspec.Struct, frozen=True, gc=False):
    """The history of a run that is resumed or continues another: the thread up to the turn in which the run stopped,
    and the known part of this turn.

    Without a `reply` the turn begins again. With a reply, the calls without an outcome are run, and then the turn
    ends, unless it has `ended` already. `waits` marks a conversation that begins by waiting for a message. The
    `uncounted` turns, before the current message, do not count toward the turn limit. `seconds` is the working time of
    the run so far. `set_up` means the workspace was set up. `reference` names the peer's run to continue."""

    thread: tuple[Turn, ...]
    turn: int = 1
    reply: Reply | None = None
    outcomes: Mapping[str, Outcome] = {}
    ended: bool = False
    seconds: float = 0.0
    set_up: bool = False
    reference: str = ""
    waits: bool = False
    uncounted: int = 0


SETUP = "workspace_setup"


class Job(msgspec.Struct, frozen=True, gc=False):
    """A run as passed to the loop, or to the runtime of a remote run. `session` is the open session of its sandbox;
    None if no tool needs a sandbox."""

    ref: RunRef
    plan: Plan
    task: Task
    system: SystemPrompt
    max_turns: int | None
    thread: tuple[Turn, ...]
    folders: Folders
    context: Context | None
    past: RunHistory | None = None
    session: RunSession | None = None


class Runtime(Protocol):
    """The place of a run: a sandbox for the tools of a local run, or the peer of a remote run.

    `started` is the body of `run.started`, or None if the peer reports when the run has started. Cancelling a run
    stops everything it started there within `grace` seconds."""

    @property
    def name(self) -> str: ...

    @property
    def grace(self) -> float: ...

    @property
    def started(self) -> RunStarted | None: ...


class Sandbox(Runtime, Protocol):
    """The place where the file, shell and code tools of local runs execute: in this process, in bubblewrap, or in a
    container."""

    @property
    def started(self) -> RunStarted: ...

    def open(self, job: Job, emit: Emit) -> RunSession | None:
        """Return the session of one run, with nothing started yet, or None if the plan's tools need no session. The
        session writes its warnings with `emit`."""


class Planner(Protocol):
    """A resolver of profiles for runs below `parent` (None for a primary). Raises ConfigError for a run that cannot be
    planned.

    `given` means a program, not a model, chose the profile: a profile passed by value keeps its own tools. Without
    `can_spawn` the run is at the maximum depth and gets no tools for subagents. A run `restored` from the log keeps
    its model and stays a single run: current settings do not turn it into a team."""

    def plan(
        self,
        profile: Profile | str,
        *,
        task: Task,
        parent: Plan | None,
        given: bool = False,
        can_spawn: bool = True,
        restored: bool = False,
    ) -> Plan: ...
