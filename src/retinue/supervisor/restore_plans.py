"""Plans of restored runs, made from the log. The log cannot keep functions, models and types made in Python: they have
to be given again. If one is missing, a ConfigError says so. No run continues with less than it had."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from retinue.core.context import Context
from retinue.core.control import ResumeOverrides
from retinue.core.errors import ConfigError, NotFound
from retinue.core.events import RunSpawned
from retinue.core.limits import Limits
from retinue.core.plans import Plan, Planner
from retinue.core.profiles import COPIES, RUNTIMES, Profile, Task, Team, make_team
from retinue.core.remote_agents import A2aAgent
from retinue.core.rounds import GET_TASK_PLAN, PROPOSE_IMPROVEMENTS, SUBMIT_CHECKLIST
from retinue.core.rules import CODE_MODE, Rules
from retinue.core.servers import PREFIX
from retinue.core.teams import MAX_NEW_ANSWERS, NEW_ANSWER, VOTE, Member, Strategy
from retinue.log.runs import RunView
from retinue.protocol.subagent_tools import TOOLS

PYTHON = "python"
DELEGATED = "delegated"
AGAIN = "give it again, from Python: r.resume(tree, profiles=[...])"
WEB = frozenset(("web_fetch", "web_search"))
UNREACHED = "no host may be reached any more (`network:` in retinue.yaml)"
GIVEN_TOOLS = frozenset((NEW_ANSWER, VOTE, GET_TASK_PLAN, SUBMIT_CHECKLIST, PROPOSE_IMPROVEMENTS))
T = TypeVar("T")


async def end_client(task: str, ctx: Context) -> str:
    """End the run of a client that is gone when its tree is resumed. Wait for its subagents and return their answers,
    which nobody else reads. Safe to call again, because it only waits."""
    answers: dict[int, str] = {}
    while True:
        children = [row for row in ctx.list_children() if row.parent == ctx.run and row.result is None]
        if not children:
            return "\n\n".join(answers.values()) or CLIENT_LEFT
        results = await ctx.wait_for_children([row.run for row in children])
        for row, result in zip(children, results, strict=True):
            answers[row.run] = f"{row.label}: {result.final_response or result.error_details or result.status}"


CLIENT_LEFT = "The client has left."


class _KeptMember(msgspec.Struct, frozen=True):
    """A member of a team in the profile of `run.spawned`. `by_value` says that the profile of the member was made in
    Python."""

    id: str = ""
    model: str = ""
    profile: str | None = None
    by_value: bool = False


class _KeptTeam(msgspec.Struct, frozen=True):
    """The team part of a kept profile."""

    members: tuple[_KeptMember, ...]
    strategy: Strategy | None = None
    refine: bool = False
    max_new_answers: int = MAX_NEW_ANSWERS


class _StoredProfile(msgspec.Struct, frozen=True):
    """A profile as `run.spawned` keeps it."""

    name: str
    instructions: str = ""
    description: str = ""
    runtime: Any = "inherited"
    workspace: Any = None
    limits: Limits = Limits()
    skills: tuple[str, ...] = ()
    leaf: bool = False
    nickname: str | None = None
    source: str = PYTHON
    approvals: Rules | None = None
    network: tuple[str, ...] | str | None = None
    a2a: A2aAgent | None = None
    team: _KeptTeam | None = None


class _Tool(msgspec.Struct, frozen=True):
    name: str


class PlanRestorer:
    """The plans of the runs of one tree. `overrides` gives profiles, a model to replace the primary's, and the runtime
    of the runs from now on."""

    def __init__(
        self,
        planner: Planner,
        tree: str,
        primary: RunSpawned,
        overrides: ResumeOverrides,
    ) -> None:
        self._planner = planner
        self._tree = tree
        self._profiles: tuple[Profile, ...] = tuple(overrides.profiles)
        self._model = primary.model, overrides.model
        self._runtime = overrides.runtime

    def add_members(self, team: Plan) -> None:
        """Add the profiles of a team's members: one of them may continue without the team."""
        self._profiles += tuple(team.children)

    def restore(self, view: RunView, parent: Plan | None) -> Plan:
        """Return the plan of a run that is resumed or continued. Raises ConfigError if something has to be given
        again."""
        spawned = view.spawned
        try:
            return self._plan_with_tools(self._find_profile(spawned, parent), spawned, parent)
        except ConfigError as error:
            raise ConfigError(f"{self._tree}/{view.number} cannot be resumed or continued: {error}") from None

    def _find_profile(self, spawned: RunSpawned, parent: Plan | None) -> Profile:
        """Return the profile of a run: found by name among the parent's children, the given profiles and those of the
        project, or else made from the log."""
        kept = _decode(spawned.profile, _StoredProfile)
        known = {profile.name.casefold(): profile for profile in self._profiles}
        known |= {child.name.casefold(): child for child in (parent.children if parent else ())}
        if parent is not None and parent.rounds is not None:
            known[parent.rounds.evaluator.name.casefold()] = parent.rounds.evaluator
        found = known.get(kept.name.casefold())
        if spawned.client:
            return self._override_runtime(_make_gone_client(kept, spawned, found), primary=True)
        if found is None:
            try:
                task = self._make_task(spawned, named=True)
                found = self._planner.plan(kept.name, task=task, parent=parent, restored=True).profile
            except NotFound:
                found = None
        if kept.team is not None:
            return self._override_runtime(_restore_team(kept, found), primary=parent is None)
        if found is not None and (found.source == PYTHON) == (kept.source == PYTHON):
            if kept.workspace in COPIES and found.workspace not in COPIES:  # as was asked for that run
                found = replace(found, workspace=kept.workspace)
            if found.network is None and kept.network is not None:  # a container asked for it
                found = replace(found, network=kept.network)
            return self._override_runtime(found, primary=parent is None)
        if not spawned.model and kept.a2a is None:
            raise ConfigError(f"'{kept.name}' is a Python function; {AGAIN}")
        return self._override_runtime(_make_profile(kept, _list_tools(spawned)), primary=parent is None)

    def _override_runtime(self, profile: Profile, *, primary: bool) -> Profile:
        """Return the profile with the runtime of the overrides, if they name one. The primary cannot be delegated: it
        asks for the delegated runs itself."""
        said = None if primary and self._runtime == DELEGATED else self._runtime
        return profile if said is None else replace(profile, runtime=said)

    def _plan_with_tools(self, profile: Profile, spawned: RunSpawned, parent: Plan | None) -> Plan:
        """Return the narrowest plan that has all the tools the run had."""
        # Tools of MCP servers come and go: the plan itself reports those that are missing.
        wanted = {name for name in _list_tools(spawned) if not name.startswith(PREFIX) and name != CODE_MODE}
        missing: set[str] = set()
        for given in (False, True):
            try:
                plan = self._plan_with_model(profile, spawned, parent, given=given)
            except NotFound as error:
                raise ConfigError(f"{error}; what is made in Python has to be given again: {AGAIN}") from None
            missing = wanted - set(plan.tools)
            if not missing:
                return plan
        tools = ", ".join(sorted(missing))
        if missing <= WEB:
            raise ConfigError(f"'{profile.name}' has no tool {tools} here: {UNREACHED}")
        raise ConfigError(f"'{profile.name}' has no tool {tools} here; if it is a Python function, {AGAIN}")

    def _plan_with_model(self, profile: Profile, spawned: RunSpawned, parent: Plan | None, *, given: bool) -> Plan:
        if bool(spawned.model) != profile.has_model and (spawned.model or profile.a2a is None):
            was, now = ("none", "one") if spawned.model else ("a Python function", "none")
            raise ConfigError(f"'{profile.name}' was {was} and is {now}; {AGAIN}")
        wanted = self._choose_model(spawned)
        plan = self._replan(profile, spawned, parent, named=parent is None, given=given)
        if plan.model is not None and plan.model_name != wanted:
            if ":" not in wanted:
                raise ConfigError(f"its model was '{wanted}', made in Python; {AGAIN}")
            plan = self._replan(profile, spawned, parent, named=True, given=given)
        return plan

    def _replan(self, profile: Profile, spawned: RunSpawned, parent: Plan | None, *, named: bool, given: bool) -> Plan:
        """Return a plan as for a new run. The runtime in the log counts only if it is stricter: a log never loosens
        the current settings."""
        task, logged = self._make_task(spawned, named=named), _decode(spawned.profile, _StoredProfile).runtime
        can_spawn = any(tool.name in TOOLS for tool in _decode(spawned.tools, list[_Tool]))  # as before
        make_plan = partial(
            self._planner.plan, task=task, parent=parent, given=given, can_spawn=can_spawn, restored=True
        )
        plan = make_plan(profile)
        is_open = self._runtime is None or (parent is None and self._runtime == DELEGATED)
        if is_open and logged in RUNTIMES and RUNTIMES.index(logged) > RUNTIMES.index(plan.laxest_runtime):
            plan = make_plan(replace(profile, runtime=logged))
        return plan

    def _choose_model(self, spawned: RunSpawned) -> str:
        primary, instead = self._model
        return instead if instead is not None and spawned.model == primary else spawned.model

    def _make_task(self, spawned: RunSpawned, *, named: bool) -> Task:
        """Return the task as far as a plan needs it, with the name of the model if the name can be looked up."""
        wanted = self._choose_model(spawned)
        return Task(spawned.task, model=wanted if named and ":" in wanted else None, rounds=spawned.rounds)


def _list_tools(spawned: RunSpawned) -> list[str]:
    """Return the tools of the run, without those for members of a team and for rounds."""
    return [tool.name for tool in _decode(spawned.tools, list[_Tool]) if tool.name not in GIVEN_TOOLS]


def _make_profile(kept: _StoredProfile, tools: list[str] | None) -> Profile:
    fields = {name: getattr(kept, name) for name in kept.__struct_fields__ if name not in ("runtime", "team")}
    return Profile(**fields, tools=tools)


def _make_gone_client(kept: _StoredProfile, spawned: RunSpawned, given: Profile | None) -> Profile:
    """Return the profile of a client that is gone. It keeps the client's tools, because its subagents may have no
    others. Python functions come from a Python profile with the client's name, if one is given again."""
    tools = given.tools if given is not None and given.source == PYTHON else _list_tools(spawned)
    return Profile(kept.name, call=end_client, description=kept.description, tools=tools)


def _restore_team(kept: _StoredProfile, found: Profile | None) -> Profile:
    """Return the team as before: the team that is given again, or its profile with the members from the log."""
    assert kept.team is not None
    if isinstance(found, Team):
        return replace(found, refine=kept.team.refine)
    if any(member.by_value or (member.model and ":" not in member.model) for member in kept.team.members):
        raise ConfigError(f"'{kept.name}' is a team made in Python; {AGAIN}")
    members = [Member(id=each.id, model=each.model, profile=each.profile) for each in kept.team.members]
    return make_team(
        found or _make_profile(kept, None),
        members,
        strategy=kept.team.strategy,
        refine=kept.team.refine,
        max_new_answers=kept.team.max_new_answers,
    )


def _decode(kept: msgspec.Raw | Any, shape: type[T]) -> T:
    return msgspec.json.decode(kept, type=shape) if isinstance(kept, msgspec.Raw) else msgspec.convert(kept, shape)
