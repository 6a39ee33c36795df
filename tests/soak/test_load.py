"""Load on two cores: a thousand runs at once, many watchers, floods of events and of questions, deep and wide trees."""

import asyncio
import gc
import os
import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Allow, Approval, Context, Deny, Event, Limits, Profile
from retinue.core.control import RunHandle
from retinue.core.events import ApprovalAsked, ApprovalDecided, Message, RunSpawned
from retinue.core.limits import MAX_TASKS_PER_SPAWN
from retinue.core.messages import Reply, Request
from retinue.testing import scripted
from tests.gates import limit_calls
from tests.soak.checks import by_run, check_calls, check_families, check_folds, check_no_tasks, check_order
from tests.soak.conftest import Note
from tests.supervisor.tree.kit import spawn

MEBIBYTE = 1024 * 1024
CALLS_PER_EVENT = 150  # it takes about 40


class Gate:
    """A model that keeps everybody in its first turn until all are there."""

    name = "gate"

    def __init__(self, script: dict[str, Any], expected: int) -> None:
        self._model = scripted(script)
        self._expected = expected
        self._open = asyncio.Event()
        self.inside = 0
        self.most = 0

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        if request.ref.run and request.turn == 1:
            self.inside += 1
            self.most = max(self.most, self.inside)
            if self.inside == self._expected:
                self._open.set()
            await self._open.wait()
            self.inside -= 1
        return await self._model.complete(request, on_delta)


async def watch(run: RunHandle, *, pause: asyncio.Event | None = None) -> list[Event]:
    """All events of a tree; a slow watcher stops after the third until everything else is over."""
    seen = []
    async for event in run.events():
        seen.append(event)
        if pause is not None and len(seen) == 3:
            await pause.wait()
    return seen


def lead(children: int, kid: Profile) -> Profile:
    """A primary that is a function, with that many children at once."""

    async def work(task: str, ctx: Context) -> str:
        kids = [await ctx.spawn(kid, f"t{n}") for n in range(children)]
        return str(len([await made.result() for made in kids]))

    return Profile("lead", call=work)


async def crowd(folder: Path, *, trees: int, children: int, watchers: int, slow: int) -> int:
    """Trees whose children are all alive at once, watched by some; the number of events, all of them accounted for.

    Up to 32 children come by `spawn_subagents`, which keeps files of each; more are spawned by a function."""
    text = {"usage": {"input_tokens": 3, "output_tokens": 2}, "text": "x" * 500}
    replies = [{"tools": [{"name": "list_agents"}]}, text]
    tasks = [{"task": f"t{n}"} for n in range(children)]
    model = Gate({"main": [spawn(*tasks), {"text": "end"}], "*": replies}, trees * children)
    primary, kid = Profile("main", model=model), Profile("kid", model=model)
    profile = primary if children <= MAX_TASKS_PER_SPAWN else lead(children, kid)
    over = asyncio.Event()
    async with retinue.open(folder / ".retinue", mode="yes", limits=Limits(concurrent=None)) as r:
        runs = [await r.spawn(profile, f"go {n}") for n in range(trees)]
        watched = [runs[n % trees] for n in range(watchers)]
        watching = [asyncio.create_task(watch(run, pause=over if n < slow else None)) for n, run in enumerate(watched)]
        results = await asyncio.gather(*(run.result() for run in runs))
        over.set()
        seen = await asyncio.gather(*watching)
        held = {run.tree: await r.control.log.read(run.tree) for run in runs}
    assert model.most == trees * children
    for result in results:
        assert result.status == "done" and result.total_usage.total_tokens == 5 * children
        check_order(held[result.tree])
        check_calls(held[result.tree])
        check_folds(held[result.tree], result)
    for run, events in zip(watched, seen, strict=True):
        assert [event.seq for event in events] == [event.seq for event in held[run.tree]]
    return sum(len(events) for events in held.values())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def count_threads() -> int:
    """Threads without those of the loop's pool, which starts up to a handful when it needs them and keeps them."""
    return sum(not each.name.startswith("asyncio_") for each in threading.enumerate())


async def crowd_and_back(folder: Path, note: Note, *, trees: int, children: int, watchers: int, slow: int) -> None:
    """The crowd twice; what the second leaves behind in memory, descriptors, threads and tasks is nothing."""
    before_tasks = asyncio.all_tasks()
    await crowd(folder / "first", trees=trees, children=children, watchers=watchers, slow=slow)
    gc.collect()
    tracemalloc.start()
    try:
        before, fds, threads = tracemalloc.get_traced_memory()[0], descriptors(), count_threads()
        events = await crowd(folder / "second", trees=trees, children=children, watchers=watchers, slow=slow)
        peak = tracemalloc.get_traced_memory()[1] - before
        await check_no_tasks(before_tasks)
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    runs = trees * (1 + children)
    note(runs=runs, watchers=watchers, events=events, peak_KiB=peak / 1024, left_KiB=left / 1024)
    assert left < max(MEBIBYTE, peak / 10), f"{left} bytes of {peak} are still held"
    assert descriptors() <= fds
    assert count_threads() <= threads


async def flood(folder: Path, note: Note, *, producers: int, events: int) -> None:
    """Play many runs of one tree with as much output as they can make. All of it must arrive, within a limit of
    calls in the thread of the event loop."""

    async def talk(task: str, ctx: Context) -> str:
        for number in range(events):
            ctx.emit(f"{ctx.run}: {number}")
            if number % 10 == 9:
                await asyncio.sleep(0)
        return task

    async with retinue.open(folder / ".retinue", limits=Limits(concurrent=None)) as r:
        with limit_calls(CALLS_PER_EVENT * producers * events):
            run = await r.spawn(lead(producers, Profile("kid", call=talk)), "go")
            seen = [event async for event in run.events()]
        held = await r.control.log.read(run.tree)
    check_order(held)
    assert [event.seq for event in seen] == [event.seq for event in held]
    for number, own in by_run(held).items():
        if number:
            said = [event.body.text for event in own if isinstance(event.body, Message)]
            assert said == [f"{number}: {n}" for n in range(events)]
    note(producers=producers, events=len(held))


async def deep_and_wide(folder: Path, note: Note, *, depth: int, width: int) -> None:
    """A chain of runs, each with `width` children of which one goes on."""
    script: dict[str, Any] = {"leaf": [{"text": "leaf"}]}
    for level in range(depth):
        tasks = [{"task": f"{level} {n}", "subagent_id": f"l{level}-{n}"} for n in range(width)]
        half = width // 2  # one call may not have as many as 50
        both = [spawn(*part)["tools"][0] for part in (tasks[:half], tasks[half:])]
        replies = [{"tools": both}, {"text": f"level {level}", "usage": {"input_tokens": 1}}]
        script["main" if level == 0 else f"l{level - 1}-0"] = replies
    async with retinue.open(folder / ".retinue", mode="yes", limits=Limits(depth=depth, concurrent=16)) as r:
        run = await r.spawn(Profile("main", model=scripted(script)), "go")
        result = await run.result()
        held = await r.control.log.read(run.tree)
    check_order(held)
    check_families(held, depth=depth)
    check_folds(held, result)
    spawned = [event.body for event in held if isinstance(event.body, RunSpawned)]
    assert len(spawned) == 1 + depth * width
    assert max(body.depth for body in spawned) == depth
    assert result.status == "done" and result.total_usage.total_tokens == depth
    note(runs=len(spawned), events=len(held))


async def questions(seed: int, folder: Path, note: Note, *, runs: int, each: int) -> None:
    """All questions are open at once, answered in any order; each answer takes effect once, on its own call."""
    dice = random.Random(f"questions {seed}")
    open_questions: dict[str, asyncio.Future[bool]] = {}
    asked: Counter[str] = Counter()
    effects: Counter[tuple[int, int]] = Counter()
    all_there = asyncio.Event()

    async def decide(question: Approval) -> Allow | Deny:
        asked[question.id] += 1
        answer = open_questions[question.id] = asyncio.get_running_loop().create_future()
        if len(open_questions) == runs * each:
            all_there.set()
        return Allow() if await answer else Deny("no")

    @retinue.tool(tier="confirm")
    async def act(ctx: Context, number: int) -> str:
        """Has an effect."""
        effects[ctx.run, number] += 1
        return "acted"

    calls = [{"name": "act", "args": {"number": n}} for n in range(each)]
    kid = Profile("kid", model=scripted({"kid": [{"tools": calls}, {"text": "end"}]}), tools=[act])
    async with retinue.open(folder / ".retinue", approver=decide, limits=Limits(concurrent=None)) as r:
        run = await r.spawn(lead(runs, kid), "go")
        await all_there.wait()
        pending = list(open_questions)
        dice.shuffle(pending)
        answers = {question: dice.random() < 0.5 for question in pending}
        for place, question in enumerate(pending):
            open_questions[question].set_result(answers[question])
            if place % 7 == 0:
                await asyncio.sleep(0)
        result = await run.result()
        held = await r.control.log.read(run.tree)
    check_order(held)
    check_calls(held)
    assert result.status == "done" and len(result.children) == runs
    assert set(asked.values()) == {1} and len(asked) == runs * each
    put = {event.body.approval_id: event for event in held if isinstance(event.body, ApprovalAsked)}
    decided = {e.body.approval_id: e.body.allowed for e in held if isinstance(e.body, ApprovalDecided)}
    assert decided == answers
    allowed = Counter((put[name].run, put[name].body.args["number"]) for name, yes in answers.items() if yes)  # type: ignore[union-attr]
    assert effects == allowed
    note(questions=len(asked), allowed=sum(answers.values()), events=len(held))


async def test_a_crowd_is_watched_and_leaves_nothing_behind(tmp_path: Path, note: Note) -> None:
    await crowd_and_back(tmp_path, note, trees=6, children=5, watchers=12, slow=3)


@pytest.mark.soak
async def test_a_thousand_runs_at_once_lose_nothing_and_leave_nothing(tmp_path: Path, note: Note) -> None:
    await crowd_and_back(tmp_path, note, trees=100, children=9, watchers=100, slow=10)


@pytest.mark.soak
async def test_a_thousand_runs_in_one_tree_lose_nothing_and_leave_nothing(tmp_path: Path, note: Note) -> None:
    await crowd_and_back(tmp_path, note, trees=1, children=1000, watchers=20, slow=4)


async def test_events_cost_few_steps_and_none_is_lost(tmp_path: Path, note: Note) -> None:
    await flood(tmp_path, note, producers=40, events=100)


@pytest.mark.soak
async def test_a_flood_of_events_loses_none(tmp_path: Path, note: Note) -> None:
    await flood(tmp_path, note, producers=200, events=500)


async def test_a_deep_tree_works(tmp_path: Path, note: Note) -> None:
    await deep_and_wide(tmp_path, note, depth=10, width=4)


@pytest.mark.soak
async def test_depth_10_and_fan_out_50_work(tmp_path: Path, note: Note) -> None:
    await deep_and_wide(tmp_path, note, depth=10, width=50)


@pytest.mark.parametrize("seed", range(2))
async def test_many_questions_at_once_take_effect_once(seed: int, tmp_path: Path, note: Note) -> None:
    await questions(seed, tmp_path, note, runs=10, each=5)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1010))
async def test_500_questions_at_once_take_effect_once(seed: int, tmp_path: Path, note: Note) -> None:
    await questions(seed, tmp_path, note, runs=100, each=5)
