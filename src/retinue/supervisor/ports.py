"""Ports of a supervisor, as `build` passes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from retinue.core.caller import NOBODY, Caller
from retinue.core.limits import Limits, Timeouts
from retinue.core.plans import Planner
from retinue.core.ports import AttachedApprover, Clock, CommitHook, Log, Policy, Prices, ServerStarter
from retinue.core.rounds import Rounds
from retinue.core.traces import FindOrigin
from retinue.supervisor.approvals import ApprovalTerms
from retinue.workspaces.run_folders import StateFolder


@dataclass(frozen=True, kw_only=True)
class SupervisorPorts:
    """The ports and settings of a supervisor.

    - `store_rule`: stores a rule that a person gives for the whole project. The policy follows it from then on. Raises
      ConfigError if it cannot be stored.
    - `caller`: the run in another process that this whole process serves, with its remaining limits.
    - `hook`: takes every event while it is committed.
    - `trace`: gives a new tree its trace.
    - `total`: the budget of all trees of the process together.
    - `context_paths`: paths that every primary may read.
    - `rounds`: the rounds of every primary, except of a conversation.
    - `serves_requests`: True if primaries are delegated by others.
    - `on_close`: closes everything built for the supervisor."""

    log: Log
    planner: Planner
    state: StateFolder
    clock: Clock
    policy: Policy
    approver: AttachedApprover | None
    limits: Limits
    timeouts: Timeouts
    prices: Prices
    total: Limits = Limits()  # noqa: RUF009 - frozen
    terms: ApprovalTerms = ApprovalTerms()  # noqa: RUF009 - frozen
    store_rule: Callable[[str], None] | None = None
    caller: Caller = NOBODY
    context_paths: Sequence[str] = ()
    rounds: Rounds | None = None
    serves_requests: bool = False
    servers: ServerStarter | None = None
    hook: CommitHook | None = None
    trace: FindOrigin | None = None
    on_close: Callable[[], Awaitable[None]] | None = None
