"""A profile made ready to run (Plan), one run of it (Job), and the ports that make the one and run the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec

from retinue.core.context import Context
from retinue.core.events import RunStarted, Warned
from retinue.core.messages import Model, Reply, RunRef, ToolSpec, Turn
from retinue.core.network import Hosts
from retinue.core.ports import Folders, Link, Outcome, RunSession, Tool
from retinue.core.profiles import RUNTIMES, Profile, RuntimeName, Task
from retinue.core.results import Ending
from retinue.core.rounds import Rounds
from retinue.core.teams import Member, TeamPlan

HostTool = Callable[[dict[str, Any], Context], Awaitable[Outcome]]


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundsPlan:
    """The rounds of a run, and the profile that judges its answers. `has_novelty` says that it can spawn a `novelty`
    subagent."""

    rounds: Rounds
    evaluator: Profile
    has_novelty: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """`host` are the tools that run with the supervisor; `profile_json` and `tools_json` stand in `run.spawned`.
    `floor` is the laxest runtime a child may have; `notes` are what a person should know when it is spawned. `run_job`
    replaces loop and sandbox in a replay. `explain_missing` says why a tool of a server is not there. With a `team` the
    run is one, and `children` are the profiles of its members. `members` are the `subagent_agents` that hold for what
    it spawns; `primary_model` is the model of its tree's primary and its name. With `rounds` it answers several times;
    in a tree that has rounds no model may spawn the evaluator (`reserves_evaluator`). `handed_files` are names of files
    in its own workspace that it is run for, so that nobody is asked before it writes them. A plan with nothing but a
    profile is that of a run that does nothing here."""

    profile: Profile
    runtime: Runtime
    system: str = ""
    model: Model | None = None
    model_name: str = ""
    specs: tuple[ToolSpec, ...] = ()
    tools: Mapping[str, Tool] = field(default_factory=dict)
    host: Mapping[str, HostTool] = field(default_factory=dict)
    children: Sequence[Profile] = ()
    profile_json: msgspec.Raw = field(default_factory=partial(msgspec.Raw, b"null"))
    tools_json: msgspec.Raw = field(default_factory=partial(msgspec.Raw, b"null"))
    floor: RuntimeName = RUNTIMES[-1]
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


class Past(msgspec.Struct, frozen=True, gc=False):
    """The history of a run that is resumed or continues another: the thread up to the turn it stopped in, and of that
    turn what is known.

    Without a `reply` the turn is begun again. With one, the calls that have no outcome are run, and the turn `ended`
    or ends then. One that `waits` is a conversation that begins with waiting for a message; the `uncounted` turns
    before the message it works on do not count for its limit. `seconds` is how long the run has been at work; `set_up`
    says that its workspace was made ready; `reference` is that of a run at a peer which this one continues."""

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
    """One run as the loop, or whoever runs it elsewhere, gets it. Its calls are bound to the `session` that its sandbox
    has opened, if it needs one."""

    ref: RunRef
    plan: Plan
    task: Task
    system: str
    max_turns: int | None
    thread: tuple[Turn, ...]
    folders: Folders
    context: Context | None
    past: Past | None = None
    session: RunSession | None = None


class Runtime(Protocol):
    """The place of a run: a sandbox for the tools of a run whose loop is ours, or the peer that has a remote one.

    `started` is what `run.started` says; None where the peer says when the run has started. Cancelling a run stops
    everything it started there within `grace` seconds."""

    @property
    def name(self) -> str: ...

    @property
    def grace(self) -> float: ...

    @property
    def started(self) -> RunStarted | None: ...


class Sandbox(Runtime, Protocol):
    """The place where the file, shell and code tools of local runs execute: in this process, behind bubblewrap, in a
    container."""

    @property
    def started(self) -> RunStarted: ...

    def open(self, job: Job, link: Link) -> RunSession | None:
        """Return the session of one run, in which nothing is started yet; None if the plan's tools need none."""


class Planner(Protocol):
    """Resolves a profile for a run below `parent` (None for a primary); raises ConfigError for what cannot be.

    `given` says that a program, not a model, chose the profile: one it passes by value keeps its own tools. A run that
    is as deep as it may be (not `can_spawn`) gets no tools for subagents that it cannot have. One that is `restored`
    from the log stays the one run that it was, on the model it had: the settings of now do not make it a team."""

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
