"""Factories of supervisors, also for replays. Closing a supervisor closes everything that was built for it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from retinue.agent.plans import Models, ProfilePlanner, Runtimes
from retinue.build.logs import open_observed_log
from retinue.build.models import LibraryPrices, ModelSource, find_cassette_wrapper
from retinue.build.parts import Parts
from retinue.build.project import find_evaluator
from retinue.build.remote_agents import RemoteAgents, refuse_remote
from retinue.build.sandboxes import make_placement
from retinue.build.servers import make_reporting, make_tool_servers
from retinue.concurrency import SystemClock
from retinue.core import secrets
from retinue.core.approvals import Approval
from retinue.core.control import Control
from retinue.core.errors import ConfigError, RetinueError
from retinue.core.limits import WORKSPACE_MIB, Timeouts
from retinue.core.messages import Model, RunRef
from retinue.core.network import Hosts, parse_hosts
from retinue.core.ports import AttachedApprover, Log, Policy
from retinue.core.profiles import Profile
from retinue.core.rules import DEFAULT_MODE, MODES, parse_rule
from retinue.files.reserved import find_git_programs
from retinue.protocol.inherited_limits import read_process_limits
from retinue.sandbox.in_process import IN_PROCESS
from retinue.sandbox.placement import Placement
from retinue.sandbox.process_privacy import hide_process
from retinue.supervisor.approvals import ApprovalTerms
from retinue.supervisor.policy import RulePolicy
from retinue.supervisor.ports import SupervisorPorts
from retinue.supervisor.supervisor import Supervisor
from retinue.tools.dialer import SystemDialer
from retinue.workspaces.create import Workspaces
from retinue.workspaces.run_folders import StateFolder

if TYPE_CHECKING:
    from retinue.agent.replay import Replay
    from retinue.control.notifications import Notifier
    from retinue.core.records import ReplayableTree, RunRecord
    from retinue.tools.mcp.servers import McpServers


def make_supervisor(parts: Parts, agents: RemoteAgents | None = None) -> Supervisor:
    """Build a supervisor, which closes `agents`. Must be called in the event loop of its runs."""
    secrets.learn_secrets(os.environ)
    with suppress(OSError):  # if the system refuses: runs without a sandbox have the user's authority anyway
        hide_process()
    clock = parts.clock or SystemClock()
    state = StateFolder(parts.state, project=parts.project)

    def name_run(ref: RunRef) -> str:
        return supervisor.find_lasting_path(ref)

    wrap = find_cassette_wrapper(name_run=name_run, project=state.project, state=str(state.folder))
    models = ModelSource(parts.project, clock, wrap)
    policy, store_rule = _make_policy(parts)
    log, trace = open_observed_log(parts)
    caller = read_process_limits(os.environ)
    reporting = make_reporting(
        collects=bool(parts.mcp_servers),
        serves=parts.is_mcp_server,
        strict=not parts.best_effort,
        limits=parts.limits,
        caller=caller,
    )
    agents = agents or RemoteAgents()
    workspaces = Workspaces(max_mib=parts.workspace_max_mib or WORKSPACE_MIB)
    collector = None if reporting is None else reporting.collector
    servers = make_tool_servers(parts.mcp_servers, parts.project, parts.state, collector)

    notifier: Notifier | None = None

    async def close() -> None:
        for each in (notifier, servers, agents, reporting, workspaces, models):
            if each is not None:
                await each.close()

    ports = SupervisorPorts(
        log=log if reporting is None else reporting.hook_log(log),
        planner=_make_planner(
            parts,
            models=models,
            runtimes=make_placement(parts, workspaces, agents),
            default_model=parts.model,
            network=None if parts.network is None else parse_hosts(parts.network),
            servers=servers,
        ),
        state=state,
        clock=clock,
        policy=policy,
        approver=parts.approver,
        terms=ApprovalTerms(parts.approval_timeout, parts.wait_approvals),
        store_rule=store_rule,
        context_paths=parts.context_paths,
        rounds=parts.rounds,
        serves_requests=parts.serves_requests,
        limits=parts.limits,
        total=parts.total,
        timeouts=parts.timeouts,
        prices=parts.prices or LibraryPrices(),
        caller=caller,
        servers=servers,
        hook=None if reporting is None else reporting.publisher,
        trace=trace,
        on_close=close,
    )
    supervisor = Supervisor(ports)
    if reporting is not None:
        reporting.attach(supervisor, supervisor)
    if parts.notify_command:
        notifier = _start_notifier(parts.notify_command, parts.project, supervisor)
    return supervisor


def _start_notifier(command: Sequence[str], project: Path, supervisor: Supervisor) -> Notifier:
    """Run `command` for every open question of the supervisor from now on."""
    from retinue.control.notifications import Notifier  # a run without it loads nothing of control/

    def warn(question: Approval, text: str) -> None:
        supervisor.warn_run(question.tree, question.run, text, code="notify")

    notifier = Notifier(command, project, warn)
    notifier.follow_questions(supervisor.watch_questions())
    return notifier


open_control: Callable[[Parts], Control] = make_supervisor  # surfaces know no more of a supervisor than its Control


@asynccontextmanager
async def open_served_control(
    parts: Parts,
    say: Callable[[str], object],
    *,
    serves: bool = True,
    make: Callable[[Parts], Control] = open_control,
) -> AsyncIterator[Control]:
    """Open the Control that `make` returns, and close it after the block. `say` shows messages.

    `serves` starts a control server for other processes, unless `parts` have no state folder. If that fails, `say` gets
    a warning, because runs work without it. The server is closed before the Control, so that no command reaches a
    Control that is closing."""
    control = make(parts)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(control.close)
        if serves and parts.state is not None:
            from retinue.control.server import ControlServer

            try:
                await stack.enter_async_context(ControlServer(control, parts.state, unattended=parts.is_unattended))
            except RetinueError as error:
                say(f"warning: no control server for other terminals: {error}")
        yield control


def make_replay(
    records: dict[int, RunRecord], parts: Parts | None = None, primary_profile: Profile | None = None
) -> ReplayableTree:
    """Return a recorded tree to run once more.

    With `parts`, the instructions and tools of their profiles replace the recorded ones. For the primary, those of
    `primary_profile` do."""
    from retinue.agent.replay import Replay, SilentModel
    from retinue.core.records import ReplayableTree

    model = SilentModel()
    planner = None
    if parts is not None:
        planner = _make_planner(
            parts,
            models=lambda _: model,
            runtimes=Placement(lambda *_: IN_PROCESS, mode="inherited", find_remote=refuse_remote),
            default_model=model,
            network=parse_hosts(parts.network or ()),
        )
    replay = Replay(records, planner=planner, primary_profile=primary_profile)
    return ReplayableTree(replay.primary, partial(_open_replay_control, replay), replay.differences, replay.notes)


def _open_replay_control(replay: Replay, log: Log, project: Path) -> Control:
    ports = SupervisorPorts(
        log=log,
        planner=replay,
        state=StateFolder(None, project=project),
        clock=SystemClock(),
        policy=replay,
        approver=AttachedApprover(replay),
        limits=replay.limits,
        timeouts=Timeouts(),
        prices=LibraryPrices(),
    )
    supervisor = Supervisor(ports)
    replay.attach(supervisor.answer)
    return supervisor


def _make_planner(
    parts: Parts,
    *,
    models: Models,
    runtimes: Runtimes,
    default_model: Model | str | None,
    network: Hosts | None,
    servers: McpServers | None = None,
) -> ProfilePlanner:
    return ProfilePlanner(
        parts.profiles,
        models=models,
        runtimes=runtimes,
        default_model=default_model,
        skills=parts.skills,
        network=network,
        dialer=parts.dialer or SystemDialer(),
        servers=servers,
        explain_missing=None if servers is None else servers.explain_missing,
        teams=parts.teams,
        members=parts.subagent_agents,
        has_subagents=parts.enable_subagents,
        find_evaluator=find_evaluator,
        has_rounds=parts.rounds is not None,
    )


def _make_policy(parts: Parts) -> tuple[Policy, Callable[[str], None] | None]:
    """Return the policy, and the function that stores a rule for the project in its retinue.yaml, in force at once."""
    mode = parts.mode or parts.rules.mode or DEFAULT_MODE
    if mode not in MODES:
        raise ConfigError(f"unknown approval mode {mode!r}; available: {', '.join(MODES)}")
    file = parts.rules_file
    project = str(parts.project)
    policy = RulePolicy(
        parts.rules, mode=mode, project=project, config=str(file or ""), git_programs=find_git_programs(project)
    )
    if file is None:
        return parts.policy or policy, None

    def store_rule(rule: str) -> None:
        from retinue.config.edit import add_allowed
        from retinue.config.trust import carry_answer

        before, after = add_allowed(file, rule)
        policy.learn(parse_rule(rule))
        if parts.keeps_trust:
            carry_answer(file, before, after)

    return parts.policy or policy, store_rule
