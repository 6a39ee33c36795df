"""Replay of a recorded tree, with plans, tools and a runtime made from run records.

The supervisor and the loop are the real ones. Everything from outside is played from the record: the replies of
models, the results of tools, the answers and messages of people. Every run reaches its end by itself, at the latest
where its record ends. Runs are spawned in the order of the record, which gives them their numbers. Apart from this
order, no run waits for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from retinue.agent.runs import run_agent
from retinue.core.approvals import Allow, Answered, Approval, Decision, Deny, describe_edit
from retinue.core.errors import ConfigError, Unconfirmed
from retinue.core.events import Inbox, Message
from retinue.core.limits import Limits
from retinue.core.messages import REMINDER, Call, Reply, Request, SystemPrompt, ToolSpec, Turn, UserTurn
from retinue.core.plans import Job, Plan, Planner
from retinue.core.ports import (
    Folders,
    Link,
    Outcome,
    Preview,
    SpawnOrder,
    skip_preview,
)
from retinue.core.profiles import Profile, Task
from retinue.core.records import CallRecord, Difference, EndOfRecord, RunRecord, Step, diff_lines
from retinue.core.results import FINAL_ANSWER, Ending, ending_texts
from retinue.core.rules import ALLOW, Verdict
from retinue.models.recorded import ReplayModel
from retinue.protocol import subagent_tools
from retinue.sandbox.in_process import IN_PROCESS

STUCK_SECONDS = 15.0


class Replay:
    """One replay of a recorded tree: the Planner, the Policy and the Approver of the supervisor that runs it.

    `planner` plans profiles as they are on disk, instead of as recorded. `primary_profile` is the profile of the
    primary in this case. Call `attach` before the tree is run."""

    limits = Limits(depth=10_000, concurrent=None, turns=None)

    def __init__(
        self,
        records: dict[int, RunRecord],
        *,
        planner: Planner | None = None,
        primary_profile: Profile | None = None,
    ) -> None:
        self.records = records
        self.differences: dict[int, Difference] = {}
        self.notes: list[str] = []
        self._answer: Callable[..., Awaitable[Answered]]
        self._planner = planner
        self._primary_profile = primary_profile
        self._runs = {number: ReplayedRun(self, record) for number, record in records.items()}
        self._by_profile = {run.profile: run for run in self._runs.values()}
        self._unspawned = sorted(records.keys() - {0})
        self._waiting_for_turn: list[asyncio.Future[None]] = []

    @property
    def primary(self) -> tuple[Profile, Task]:
        return self._runs[0].profile, self._runs[0].task

    def plan(
        self,
        profile: Profile | str,
        *,
        task: Task,
        parent: Plan | None,
        given: bool = False,
        can_spawn: bool = True,
        restored: bool = False,
    ) -> Plan:
        assert isinstance(profile, Profile)
        run = self._by_profile[profile]
        record = run.record
        on_disk = run.plan_on_disk = self._plan_from_disk(record)
        specs = record.tools if on_disk is None else on_disk.specs
        return Plan(
            profile=profile,
            system=record.instructions if on_disk is None else on_disk.system,
            model=ReplayModel(record, self.report) if record.spawned.model else None,
            model_name=record.spawned.model,
            specs=specs,
            tools={spec.name: ReplayTool(spec, run) for spec in specs},
            profile_json=msgspec.Raw(msgspec.json.encode(record.spawned.profile)),
            tools_json=msgspec.Raw(msgspec.json.encode(specs)),
            runtime=IN_PROCESS,
            run_job=run.run_job,
            laxest_runtime="inherited",
        )

    def judge(self, spec: ToolSpec, args: dict[str, Any], *, primary: bool, workspace: str) -> Verdict:
        return spec.verdict if isinstance(spec, _JudgedSpec) else ALLOW

    def attach(self, answer: Callable[..., Awaitable[Answered]]) -> None:
        """Give answers through `answer`, which belongs to the supervisor that runs the tree."""
        self._answer = answer

    async def __call__(self, question: Approval) -> Decision:
        """Give the recorded answer, under the recorded name."""
        record = self._runs[question.run].find_call(question.call_id)
        decided = None if record is None else record.decided
        if decided is None:
            return Deny("the record has no answer")
        decision = Allow(args=decided.args) if decided.allowed else Deny(decided.reason)
        await self._answer(question.id, decision, by=decided.by)
        return decision

    def report(self, difference: Difference) -> None:
        """Keep the first difference of each run. Later differences follow from it."""
        self.differences.setdefault(difference.run, difference)

    async def spawn_run(self, record: RunRecord, link: Link) -> int:
        """Spawn a run after all runs before it in the record were spawned or given up. Return its number."""
        while record.number in self._unspawned and self._unspawned[0] != record.number:
            turn = asyncio.get_running_loop().create_future()
            self._waiting_for_turn.append(turn)
            await turn
        run = self._runs[record.number]
        order = SpawnOrder(
            run.profile,
            run.task,
            call_id=record.spawned.call_id,
            background=record.spawned.background,
            asked_by_model=False,
            continues=record.spawned.continues,
        )
        [child] = await link.children.spawn_runs([order])
        self._mark_spawned({record.number})
        return child.run

    def give_up_children(self, record: RunRecord) -> None:
        """Give up the unspawned children of an ended run, so that no run waits for them."""
        unspawned = [child for child in record.children if child.number in self._unspawned]
        self._mark_spawned(
            {run.number for child in unspawned if child.spawned.continues is None for run in _walk(child)}
        )

    def list_continued(self, record: RunRecord) -> list[RunRecord]:
        """Return the runs that people started by continuing an ended run. The primary spawns them after everything
        else."""
        if record.spawned.parent is not None:
            return []
        return [run for run in self.records.values() if run.spawned.continues is not None and run is not record]

    def _mark_spawned(self, numbers: set[int]) -> None:
        self._unspawned = [number for number in self._unspawned if number not in numbers]
        waiting, self._waiting_for_turn = self._waiting_for_turn, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)

    def _plan_from_disk(self, record: RunRecord) -> Plan | None:
        """Return the plan of the run's profile as it is on disk, or None if the record is to be used."""
        if self._planner is None or not record.spawned.model:
            return None
        parent = None if record.spawned.parent is None else self._runs[record.spawned.parent].plan_on_disk
        profile: Profile | str = record.agent
        if parent is not None:
            profile = next((child for child in parent.children if child.name == record.agent), record.agent)
        elif self._primary_profile is not None and self._primary_profile.name == record.agent:
            profile = self._primary_profile
        try:
            can_spawn = any(spec.name in subagent_tools.TOOLS for spec in record.tools)
            task = Task(record.spawned.task, rounds=record.spawned.rounds)
            return self._planner.plan(profile, task=task, parent=parent, can_spawn=can_spawn, restored=True)
        except ConfigError as error:
            note = f"{record.agent} is played as recorded: {error}"
            self.notes += [note] if note not in self.notes else []
            return None


class ReplayedRun:
    """One run of a replay. `children` are the runs spawned so far."""

    def __init__(self, replay: Replay, record: RunRecord) -> None:
        limits = Limits(turns=record.spawned.max_turns, seconds=None, stall=STUCK_SECONDS)
        self.replay = replay
        self.record = record
        self.profile = Profile(record.agent, limits=limits)
        spawned = record.spawned
        self.task = Task(
            spawned.task, context=spawned.task_context, subagent_id=spawned.subagent_id, label=spawned.label
        )
        self.plan_on_disk: Plan | None = None
        self.children: list[int] = []

    def find_call(self, call_id: str) -> CallRecord | None:
        """Return the record of a call by the model, or of a question by a function of the host."""
        steps: list[Step] = [*self.record.steps]
        for turn in self.record.turns:
            if call_id in turn.calls:
                return turn.calls[call_id]
            steps += [step for call in turn.calls.values() for step in call.steps]
        return next((step for step in steps if isinstance(step, CallRecord) and step.body.call_id == call_id), None)

    async def run_job(self, job: Job, link: Link) -> Ending:
        """Play the run: the loop in this process, on a link that plays the record. A run without a model, or of
        a peer, repeats only the recorded steps of its callable. Nothing leaves the process or touches a file."""
        replay_link = ReplayLink(link, self)
        try:
            if job.plan.model is None or self.record.is_remote:
                await self.play_steps(self.record.steps, replay_link)
                return self.make_ending()
            return await run_agent(job, replay_link)
        except EndOfRecord:
            return self.make_ending()
        finally:
            await self.finish_children(replay_link)

    async def play_steps(self, steps: Sequence[Step], link: Link) -> None:
        """Repeat the recorded side effects of a call or callable: messages, questions and spawned runs. Wait for every
        run spawned in the foreground."""
        foreground: list[int] = []
        for step in steps:
            if isinstance(step, Message):
                link.emit(step)
            elif isinstance(step, CallRecord):
                await self._play_question(step, link)
            else:
                run = await self._spawn(step, link)
                if not step.spawned.background:
                    foreground.append(run)
        if foreground:
            await link.children.wait_for(foreground)

    async def finish_children(self, link: Link) -> None:
        """Wait for all runs below, so that none is stopped before its record ends."""
        self.replay.give_up_children(self.record)
        for record in self.replay.list_continued(self.record):
            await self._spawn(record, link)
        if self.children:
            with suppress(EndOfRecord):
                await link.children.wait_for(self.children)

    def make_ending(self) -> Ending:
        """Return the recorded ending, or `disconnected` if the record has none."""
        record, ended = self.record, self.record.ended
        if ended is None:
            texts = ending_texts("disconnected", name=record.agent, primary=record.spawned.parent is None)
            return Ending("disconnected", *texts)
        return ended.ending

    def is_last_call(self, call_id: str) -> bool:
        """Return True if a call belongs to the last turn of a run that ended by itself."""
        turns, ended = self.record.turns, self.record.ended
        return ended is not None and ended.status == "done" and bool(turns) and call_id in turns[-1].calls

    async def _spawn(self, record: RunRecord, link: Link) -> int:
        run = await self.replay.spawn_run(record, link)
        self.children.append(run)
        return run

    async def _play_question(self, step: CallRecord, link: Link) -> None:
        body = step.body
        call = Call(body.call_id, body.name, body.args, within=body.within)
        await link.begin(call, ToolSpec(body.name, "", {}, tier=body.tier, host=True), skip_preview)
        if step.result is not None:
            link.finish(call, Outcome(step.result.text, step.result.success), 0)


class ReplayTool:
    """A tool of a replayed run. It runs nothing and returns the recorded result. Child runs of the call are spawned
    again."""

    def __init__(self, spec: ToolSpec, run: ReplayedRun) -> None:
        self.spec = spec
        self._run = run

    async def preview(self, call: Call, folders: Folders) -> str:
        record = self._run.find_call(call.id)
        return "" if record is None or record.asked is None else record.asked.preview

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        record = self._run.find_call(call.id)
        if record is None or record.result is None:
            raise EndOfRecord  # `ReplayLink.begin` raises it first
        await self._run.play_steps(record.steps, link)
        result, ended = record.result, self._run.record.ended
        text = result.text
        if record.decided is not None and record.decided.args is not None:
            text = text.removeprefix(f"{describe_edit(record.decided.args)}\n")
        data = ended.structured if result.success and ended is not None else None
        ending = None
        if call.name == FINAL_ANSWER and data is not None:
            ending = Ending("done", msgspec.json.encode(data).decode(), structured=data)
        elif self.spec.exclusive and result.success and self._run.is_last_call(call.id):
            ending = self._run.make_ending()
        return Outcome(text, result.success, data=data, file=result.file, ending=ending)


class _JudgedSpec(ToolSpec, frozen=True, gc=False):
    """The spec of a tool for one call, with the recorded verdict of the policy."""

    verdict: Verdict = ALLOW


class ReplayLink:
    """The link of a replayed run. It wraps the real link, but takes messages, verdicts and answers from the record. A
    replayed run is no conversation, and has no team, rounds or sandbox of its own."""

    def __init__(self, link: Link, run: ReplayedRun) -> None:
        self._link = link
        self._run = run
        self._turn = 0
        self._open_calls: set[str] = set()
        self._calls_done = asyncio.Event()

        self.ref, self.state, self.emit = link.ref, link.state, link.emit
        self.run_host_tool, self.give_up = link.run_host_tool, link.give_up
        self.children, self.commands, self.local_calls = link.children, link.commands, link.local_calls
        self.conversation, self.team, self.files = link.conversation, link.team, link.files

    async def complete(self, turn: int, system: SystemPrompt, thread: list[Turn], tools: tuple[ToolSpec, ...]) -> Reply:
        return await self._link.complete(turn, system, thread, tools)

    def write_calls(self, calls: Sequence[tuple[Call, ToolSpec]]) -> None:
        self._link.write_calls([(call, spec) for call, spec in calls if self._run.find_call(call.id) is not None])

    async def begin(self, call: Call, spec: ToolSpec, preview: Preview) -> Decision:
        """Begin a call with the recorded verdict and answer. A call without a recorded result ends the run, after all
        calls of the same reply have finished."""
        run, record = self._run.record, self._run.find_call(call.id)
        if record is None:
            line = f"call {call.name} ({call.id}): {msgspec.json.encode(call.args).decode()}"
            unknown = Difference(
                run=run.number, path=run.path, turn=self._turn, what="call", lines=diff_lines([], [line])
            )
            self._run.replay.report(unknown)
            raise EndOfRecord
        was_judged = record.asked is None or record.decided is not None
        judged = _JudgedSpec(**msgspec.structs.asdict(spec), verdict=_find_verdict(record) if was_judged else ALLOW)
        decision = await self._link.begin(call, judged, preview)
        if record.result is None and not call.within:  # a program's call ends with the program
            if not spec.host:
                await self._run.play_steps(record.steps, self)
            self._close_call(call)
            if self._open_calls:
                await self._calls_done.wait()
            raise Unconfirmed(call.name) if self._run.make_ending().code == "unconfirmed" else EndOfRecord
        return decision

    def finish(self, call: Call, outcome: Outcome, duration_ms: int) -> None:
        self._link.finish(call, outcome, duration_ms)
        self._close_call(call)

    def inbox(self) -> Sequence[UserTurn]:
        """Return the recorded messages before the coming turn. Notices about children are not written here, but when
        the children end."""
        self._link.inbox()
        messages = self._find_messages()
        for message in messages:
            if message.about is None:
                self._link.emit(message)
        self._turn += 1
        turn = self._run.record.find_turn(self._turn)
        self._open_calls = set() if turn is None else set(turn.calls)
        self._calls_done.clear()
        return [UserTurn(message.text, message.source) for message in messages]

    async def children_done(self) -> bool:
        return bool(self._find_messages())

    def _find_messages(self) -> list[Inbox]:
        """Return the recorded messages before the coming turn, without the reminder to call `final_answer`: the loop
        writes that reminder itself."""
        record = self._run.record
        coming = record.find_turn(self._turn + 1)
        messages = [] if coming is None else coming.inbox
        reminds = any(spec.name == FINAL_ANSWER for spec in record.tools)
        return [message for message in messages if message.source != REMINDER or not reminds]

    def _close_call(self, call: Call) -> None:
        self._open_calls.discard(call.id)
        if not self._open_calls:
            self._calls_done.set()


class SilentModel:
    """A model that never replies, for plans of which only the system prompt and the tools are used."""

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        raise EndOfRecord


def _find_verdict(record: CallRecord) -> Verdict:
    decided = record.decided
    if record.asked is not None:
        return Verdict("ask")
    if decided is None:
        return ALLOW
    return Verdict("allow" if decided.allowed else "deny", decided.rule)


def _walk(record: RunRecord) -> list[RunRecord]:
    return [record, *(run for child in record.children for run in _walk(child))]
