"""Many at once: answers that race, watchers in a crowd, watchers that do not read."""

import asyncio
from pathlib import Path
from urllib.parse import urlencode

import pytest

from retinue.control import server
from retinue.core.approvals import Allow, Approval, Deny
from retinue.core.errors import ControlUnreachable, NotFound
from retinue.core.events import ApprovalDecided, Event, RunEnded, TurnStarted, encode_event
from tests.control.loopback.kit import GLOB, HANG, WRITE, ServedSupervisor, serve_supervisor
from tests.gates import HeldClock, pass_time, until

ROUNDS = 60


async def test_two_terminals_answer_at_the_same_moment_and_exactly_one_wins(tmp_path: Path) -> None:
    calls = [{"tools": [{"name": "write", "args": {"path": f"{n}.txt", "content": "x"}}]} for n in range(ROUNDS)]
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": [*calls, "end"]})
        expected = []
        for n in range(ROUNDS):
            [question] = await h.questions()
            yes = h.client.answer(question.id, Allow(), by="yes", digest=question.digest)
            no = h.client.answer(question.id, Deny("no"), by="no", digest=question.digest)
            first, second = (yes, no) if n % 2 else (no, yes)
            outcomes = await asyncio.gather(first, second)
            assert sorted(outcomes) == ["stale", "taken"]
            yes_won = outcomes[0 if n % 2 else 1] == "taken"
            expected.append((yes_won, "yes" if yes_won else "no"))
        await run.join()
        events = await h.supervisor.log.read(run.ref.tree)
    decided = [event.body for event in events if isinstance(event.body, ApprovalDecided)]
    assert [(body.allowed, body.by) for body in decided] == expected
    assert [(tmp_path / f"{n}.txt").exists() for n in range(ROUNDS)] == [allowed for allowed, _ in expected]


async def test_a_terminal_and_a_client_answer_at_the_same_moment(tmp_path: Path) -> None:
    asked: asyncio.Queue[asyncio.Future[Allow | Deny]] = asyncio.Queue()

    async def terminal(question: Approval) -> Allow | Deny:
        answer: asyncio.Future[Allow | Deny] = asyncio.get_running_loop().create_future()
        asked.put_nowait(answer)
        return await answer

    async with serve_supervisor(tmp_path, approver=terminal, wait=None) as h:
        run = h.run({"main": [*[WRITE] * 20, "end"]})
        outcomes = []
        for n in range(20):
            answer = await asked.get()
            [question] = await h.questions()
            knocking = asyncio.create_task(h.client.answer(question.id, Deny("control"), by="control"))
            for _ in range(n):
                await asyncio.sleep(0)
            answer.done() or answer.set_result(Allow())
            outcomes.append(await knocking)
        await run.join()
        events = await h.supervisor.log.read(run.ref.tree)
    decided = [event.body.by for event in events if isinstance(event.body, ApprovalDecided)]
    assert decided == ["control" if outcome == "taken" else "function" for outcome in outcomes]


async def test_an_answer_to_an_action_that_was_not_shown_is_refused(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": [WRITE, "end"]})
        [question] = await h.questions()
        assert await h.client.answer(question.id, Allow(), by="x", digest="another") == "stale"
        assert h.supervisor.approvals.pending() == [question]
        assert await h.client.answer(question.id, Allow(), by="x", digest=question.digest) == "taken"
        await run.join()
        assert await h.client.answer(question.id, Allow(), by="x", digest=question.digest) == "stale"


async def test_fifty_watchers_see_the_same(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        clock, begun = HeldClock(), 0
        run = h.run({"main": [{**GLOB, "delay": 1}, *[GLOB] * 50, "end"]}, clock=clock)

        async def watch() -> list[bytes]:
            nonlocal begun
            seen = []
            async for item in h.client.watch(run.ref.tree):
                if isinstance(item, Event):
                    begun += not seen
                    if begun == 50:
                        clock.release()
                    seen.append(encode_event(item))
            return seen

        everything = await asyncio.gather(*(watch() for _ in range(50)))
        assert everything == [everything[0]] * 50
        assert everything[0] == [encode_event(event) for event in await h.supervisor.log.read(run.ref.tree)]
        assert len(everything[0]) > 250


async def stuck_watcher(
    h: ServedSupervisor, tree: str, *, limit: int = 1024
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for everything and read nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", h.server.address.port, limit=limit)
    query = urlencode({"tree": tree, "deltas": 1})
    lines = [f"GET /v1/watch?{query} HTTP/1.1", f"Host: 127.0.0.1:{h.server.address.port}"]
    writer.write("\r\n".join([*lines, f"Authorization: Bearer {h.server.address.token}", "", ""]).encode())
    return reader, writer


@pytest.mark.requirement("P5")
async def test_a_watcher_that_does_not_read_holds_up_nobody_and_misses_nothing(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 40_000)
    read = {"tools": [{"name": "read", "args": {"path": "long.txt"}}] * 30}  # more than the kernel holds for a reader
    async with serve_supervisor(tmp_path) as h:
        clock = HeldClock()
        run = h.run({"main": [{**GLOB, "delay": 1}, *[read] * 10, HANG]}, clock=clock)
        tree = run.ref.tree
        _, writer = await stuck_watcher(h, tree)
        await until(lambda: h.server._connections)
        clock.release()
        last = 0
        async for item in h.client.watch(tree):  # a reader beside it has everything, at once
            last = item.seq if isinstance(item, Event) else last
            if isinstance(item, Event) and item.body == TurnStarted(12):
                break
        assert last > 600
        await pass_time(server.STUCK_SECONDS)
        await until(lambda: not h.server._connections)  # the stuck one is dropped
        writer.close()
        h.supervisor.trees[tree].kill()
        seen = [item.seq async for item in h.client.watch(tree, after=300) if isinstance(item, Event)]
        assert seen == list(range(301, seen[-1] + 1))
        assert seen[-1] >= last


async def test_a_watch_beats_while_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEARTBEAT_SECONDS", 0.05)
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": [HANG]})
        reader, writer = await stuck_watcher(h, run.ref.tree, limit=1 << 20)
        beat = b"1\r\n\n\r\n"
        await reader.readuntil(b'"kind":"turn.started"')  # the last event: a slow machine beats between those before it
        beats = [await reader.readuntil(b"\r\n" + beat) for _ in range(3)]
        assert beats[1:] == [beat * 2] * 2  # and nothing else
        assert len(h.server._connections) == 1
        writer.close()
        await until(lambda: not h.server._connections)  # hanging up is noticed


async def test_a_closing_server_cuts_no_last_words_and_leaves_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_SECONDS", 100.0)

    async def use_up_grace() -> None:
        await asyncio.wait([watchers[0]])
        await pass_time(100)

    async with serve_supervisor(tmp_path) as h:
        clock = HeldClock()
        ending, hanging = h.run({"main": [{**GLOB, "delay": 1}, "end"]}, clock=clock), h.run({"main": [HANG]})
        begun = {ending.ref.tree: asyncio.Event(), hanging.ref.tree: asyncio.Event()}

        async def watch(tree: str) -> list[Event]:
            items: list[Event] = []
            try:
                async for item in h.client.watch(tree):
                    assert isinstance(item, Event)
                    items.append(item)
                    begun[tree].set()
            except ControlUnreachable:
                pass
            return items

        watchers = [asyncio.create_task(watch(run.ref.tree)) for run in (ending, hanging)]
        for watching in begun.values():
            await watching.wait()
        clock.release()
        await ending.join()
        grace = asyncio.create_task(use_up_grace())
    await grace
    assert isinstance((await watchers[0])[-1].body, RunEnded)
    assert not isinstance((await watchers[1])[-1].body, RunEnded)


async def test_the_past_of_a_tree_that_nobody_runs_is_told_and_ends(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": ["end"]})
        await run.join()
    async with serve_supervisor(tmp_path) as h:
        items = [item async for item in h.client.watch(run.ref.tree)]
        assert isinstance(items[-1], Event)
        assert isinstance(items[-1].body, RunEnded)
        with pytest.raises(NotFound):
            [item async for item in h.client.watch("nowhere")]
