"""Playing a recorded tree again: plans made of records, and a link that gives each run what its record says it got.

The supervisor and the loop are the real ones. What came from outside is played: the model's replies, the tools'
results, people's answers and words. Every run comes to its end by itself, at the latest where its record ends, and no
run waits for another but in the order in which they were spawned, which gives them their numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import msgspec

from retinue.core.approvals import Allow, Answered, Approval, Decision, Deny
from retinue.core.errors import ConfigError, Unconfirmed
from retinue.core.events import Body, Inbox, Message, RunSpawned
from retinue.core.limits import Limits
from retinue.core.messages import Call, Reply, Request, RunRef, ToolSpec, Turn, UserTurn
from retinue.core.plans import Plan, Planner, Runtime
from retinue.core.ports import Link, Maker, Order, Outcome, Row, Ticket
from retinue.core.profiles import Profile, Task
from retinue.core.records import CallRecord, Difference, EndOfRecord, RunRecord, TurnRecord, diff_lines
from retinue.core.results import Ending, Result, ending_texts, unconfirmed_texts
from retinue.core.rules import ALLOW, Verdict
from retinue.models.recorded import ReplayModel
from retinue.tools.replay import RecordedSpec, ReplayTool

STUCK_SECONDS = 15.0
_RULE = "rule: "


class Stage:
    """One replay: the runs that play, and where they depart. It is the Planner, the Policy and the Approver of the
    supervisor that runs it. `now` plans the profiles as they are on disk, in place of what was recorded of them."""

    limits = Limits(depth=10_000, concurrent=None, turns=None)

    def __init__(
        self, records: dict[int, RunRecord], *, now: Planner | None = None, first: Profile | None = None
    ) -> None:
        self.records = records
        self.departures: dict[int, Difference] = {}
        self.notes: list[str] = []
        self.answer: Callable[..., Answered]
        self.runtime: Runtime
        self._now = now
        self._first = first
        self._profiles = {number: _profile(record) for number, record in records.items()}
        self._parts = {number: Part(self, record) for number, record in records.items()}
        self._by_profile = {profile: self._parts[number] for number, profile in self._profiles.items()}
        self._due = sorted(records.keys() - {0})
        self._moved: list[asyncio.Future[None]] = []

    # The supervisor's ports

    def plan(self, profile: Profile | str, *, task: Task, parent: Plan | None, given: bool = False) -> Plan:
        assert isinstance(profile, Profile)
        part = self._by_profile[profile]
        record = part.record
        part.current = self._planned(record)
        system, specs = record.instructions, record.tools
        if part.current is not None:
            system, specs = part.current.system, part.current.specs
        tools = {spec.name: ReplayTool(spec, part) for spec in specs}
        model = ReplayModel(record, self.report) if record.spawned.model else None
        return Plan(
            profile=profile,
            system=system,
            model=model,
            model_name=record.spawned.model,
            tools=tuple(tools.values()),
            specs=specs,
            by_name=tools,
            host={},
            children=(),
            profile_json=_raw(record.spawned.profile),
            tools_json=msgspec.Raw(msgspec.json.encode(specs)),
            runtime=self.runtime,
            floor="inherited",
        )

    def judge(self, spec: ToolSpec, args: dict[str, Any], *, primary: bool, workspace: str) -> Verdict:
        verdict: Verdict = spec.verdict if isinstance(spec, RecordedSpec) else ALLOW
        return verdict

    async def __call__(self, question: Approval) -> Decision:
        """Answers as it was answered, in the name of who did."""
        record = self._parts[question.run].recorded(Call(question.call_id, question.tool, question.args))
        decided = None if record is None else record.decided
        if decided is None:
            return Deny("the record has no answer")
        decision = Allow(args=decided.args) if decided.allowed else Deny(decided.reason)
        self.answer(question.id, decision, by=decided.by)
        return decision

    def report(self, difference: Difference) -> None:
        """Keep the first difference of each run: the others follow from it."""
        self.departures.setdefault(difference.run, difference)

    # The runs

    def primary(self) -> tuple[Profile, Task]:
        return self._profiles[0], _task(self.records[0].spawned)

    def part(self, plan: Plan) -> Part:
        return self._by_profile[plan.profile]

    async def spawn(self, record: RunRecord, link: Link) -> int:
        """Makes the run when it is its turn: when all that were made before it have been made, or never will be."""
        while record.number in self._due and self._due[0] != record.number:
            moved = asyncio.get_running_loop().create_future()
            self._moved.append(moved)
            await moved
        body = record.spawned
        profile = self._profiles[record.number]
        order = Order(
            profile,
            _task(body),
            call_id=body.call_id,
            background=body.background,
            asked_by_model=False,
            continues=body.continues,
        )
        [ticket] = await link.spawn([order])
        self._done_with([record.number])
        return ticket.run

    def left(self, record: RunRecord) -> None:
        """The run has ended: what it has not spawned by now never will be."""
        never = [child for child in record.children if child.number in self._due and child.spawned.continues is None]
        self._done_with([run.number for child in never for run in _walk(child)])

    def continued(self, record: RunRecord) -> list[RunRecord]:
        """What people began from runs that had ended: it is the primary's to begin again, when all else is done."""
        if record.spawned.parent is not None:
            return []
        return [run for run in self.records.values() if run.spawned.continues is not None and run is not record]

    def _done_with(self, numbers: list[int]) -> None:
        self._due = [number for number in self._due if number not in numbers]
        moved, self._moved = self._moved, []
        for future in moved:
            if not future.done():
                future.set_result(None)

    def _planned(self, record: RunRecord) -> Plan | None:
        """What the profile of that name would be now."""
        if self._now is None or not record.spawned.model:
            return None
        above = None if record.spawned.parent is None else self._parts[record.spawned.parent].current
        wanted: Profile | str = record.agent
        if above is not None:
            wanted = next((child for child in above.children if child.name == record.agent), record.agent)
        elif self._first is not None and self._first.name == record.agent:
            wanted = self._first
        try:
            return self._now.plan(wanted, task=Task(record.spawned.task), parent=above)
        except ConfigError as error:
            note = f"{record.agent} is played as recorded: {error}"
            self.notes += [note] if note not in self.notes else []
            return None


class Part:
    """One recorded run being played: what its model, its tools and its link stand on."""

    def __init__(self, stage: Stage, record: RunRecord) -> None:
        self.stage = stage
        self.record = record
        self.current: Plan | None = None
        self.children: list[int] = []
        self.turn: TurnRecord | None = None

    def report(self, turn: int, what: str, line: str) -> None:
        record = self.record
        self.stage.report(Difference(record.number, record.path, turn, what, diff_lines([], [line])))

    def recorded(self, call: Call) -> CallRecord | None:
        found = None if self.turn is None else self.turn.calls.get(call.id)
        return found or self._asides(self.record.steps, call.id)

    def _asides(self, steps: list[Any], call_id: str) -> CallRecord | None:
        """What a host-side function asked about by itself."""
        asides = [*steps]
        for call in self.turn.calls.values() if self.turn is not None else ():
            asides += call.steps
        return next((s for s in asides if isinstance(s, CallRecord) and s.body.call_id == call_id), None)

    def structured(self) -> Any:
        return None if self.record.ended is None else self.record.ended.structured

    async def play(self, steps: list[Any], link: Link) -> None:
        """What a call or a callable did besides its result; every run it made is waited for."""
        made: list[int] = []
        for step in steps:
            if isinstance(step, Message):
                link.emit(step)
            elif isinstance(step, RunRecord):
                run = await self.stage.spawn(step, link)
                made += [] if step.spawned.background else [run]
            elif isinstance(step, CallRecord):
                await self._ask(step, link)
        if made:
            await link.wait(made)

    async def _ask(self, step: CallRecord, link: Link) -> None:
        body = step.body
        call = Call(body.call_id, body.name, body.args, within=body.within)
        await link.begin(call, ToolSpec(body.name, "", {}, tier=body.tier, host=True), "")
        if step.result is not None:
            link.finish(call, Outcome(step.result.text, step.result.success), 0)

    def ending(self) -> Ending:
        """As the record has it, where nothing in the run itself made it."""
        ended, who = self.record.ended, self.record
        if ended is None:
            words = ending_texts("disconnected", name=who.agent, primary=who.spawned.parent is None)
            return Ending("disconnected", *words)
        return Ending(ended.status, ended.final_response, ended.error_details, ended.structured)  # type: ignore[arg-type]


class Unasked:
    """Stands for the model where only words and tools are planned."""

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        raise EndOfRecord


class ReplayLink:
    """The link of a run that plays, around the real one."""

    def __init__(self, link: Link, part: Part) -> None:
        self._link = link
        self._part = part
        self._calls: set[str] = set()
        self._all_done = asyncio.Event()
        self.ref: RunRef = link.ref
        self.emit: Callable[[Body], Any] = link.emit

    async def complete(self, turn: int, system: str, thread: list[Turn], tools: tuple[ToolSpec, ...]) -> Reply:
        self._part.turn = self._part.record.find_turn(turn)
        reply = await self._link.complete(turn, system, thread, tools)
        self._calls = {call.id for call in reply.calls}
        self._all_done = asyncio.Event()
        return reply

    async def begin(self, call: Call, spec: ToolSpec, preview: str) -> Decision:
        """With the verdict and the answer of then. A call that has no result ends the run, after all beside it."""
        record = self._part.recorded(call)
        if record is None:
            turn = self._part.turn
            now = f"call {call.name} ({call.id}): {msgspec.json.encode(call.args).decode()}"
            self._part.report(turn.number if turn is not None else 0, "call", now)
            raise EndOfRecord
        asks = record.asked is None or record.decided is not None
        decision = await self._link.begin(call, RecordedSpec.of(spec, _verdict(record) if asks else ALLOW), preview)
        if record.result is None:
            if call.within:
                return decision  # its program has no result either, and ends the run when all beside it are done
            if not spec.host:
                await self._part.play(record.steps, self)
            self._done(call.id)
            if self._calls:
                await self._all_done.wait()
            raise Unconfirmed(call.name) if self._unconfirmed() else EndOfRecord
        return decision

    def finish(self, call: Call, outcome: Outcome, duration_ms: int) -> None:
        self._link.finish(call, outcome, duration_ms)
        self._done(call.id)

    def _done(self, call_id: str) -> None:
        self._calls.discard(call_id)
        if not self._calls:
            self._all_done.set()

    def _unconfirmed(self) -> bool:
        record = self._part.record
        texts = unconfirmed_texts(name=record.agent, primary=record.spawned.parent is None)
        return record.ended is not None and record.ended.error_details == texts[1]

    def lend(self, call: Call) -> Awaitable[Outcome]:
        return self._link.lend(call)

    def program(
        self, call: Call, *, kept: Callable[[Call, Outcome], Outcome], person: Callable[[bool], None]
    ) -> AbstractContextManager[Maker]:
        return self._link.program(call, kept=kept, person=person)

    async def spawn(self, orders: Sequence[Order]) -> list[Ticket]:
        tickets = await self._link.spawn(orders)
        self._part.children += [ticket.run for ticket in tickets]
        return tickets

    def wait(self, runs: Sequence[int]) -> Awaitable[list[Result[Any]]]:
        return self._link.wait(runs)

    def agents(self) -> list[Row]:
        return self._link.agents()

    def profiles(self) -> Sequence[Profile]:
        return self._link.profiles()

    def inbox(self) -> Sequence[UserTurn]:
        """The words that the coming turn was given. Notices of children are written when those end, as ever."""
        self._link.inbox()
        words = self._words()
        for word in words:
            if word.about is None:
                self.emit(word)
        return [UserTurn(word.text, word.source) for word in words]

    async def children_done(self) -> bool:
        return bool(self._words())

    def _words(self) -> list[Inbox]:
        turn = self._part.turn
        coming = self._part.record.find_turn(1 if turn is None else turn.number + 1)
        words = [] if coming is None else coming.inbox
        return [word for word in words if word.about is not None or word.source != "notice"]  # the loop has its own


async def ended(part: Part, link: Link) -> None:
    """Waits for everything below, so that no run is stopped before its record ends."""
    part.stage.left(part.record)
    for run in part.stage.continued(part.record):
        await part.stage.spawn(run, link)
    if part.children:
        with suppress(EndOfRecord):
            await link.wait(part.children)


def _verdict(record: CallRecord) -> Verdict:
    decided = record.decided
    if record.asked is not None:
        return Verdict("ask")
    if decided is None:
        return ALLOW
    return Verdict("allow" if decided.allowed else "deny", decided.by.removeprefix(_RULE))


def _profile(record: RunRecord) -> Profile:
    limits = Limits(turns=record.spawned.max_turns, seconds=None, stall=STUCK_SECONDS)
    return Profile(record.agent, limits=limits)


def _task(body: RunSpawned) -> Task:
    return Task(body.task, context=body.task_context, subagent_id=body.subagent_id, label=body.label)


def _raw(value: Any) -> msgspec.Raw:
    return value if isinstance(value, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(value))


def _walk(record: RunRecord) -> list[RunRecord]:
    below = [run for child in record.children for run in _walk(child)]
    return [record, *below]
