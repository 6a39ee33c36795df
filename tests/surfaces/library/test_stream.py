"""Text as it comes: `stream_text` and `events(deltas=True)`."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import retinue
from retinue import Context, Profile, tool
from retinue.core.events import Body, Delta, Event, Message, RunEnded, TurnStarted
from retinue.core.replies import SpokenText
from retinue.core.secrets import forget_secret, hide_secret
from retinue.models import Call, Model, OnDelta, Reply, Request
from retinue.testing import ManualClock, allow_all, scripted
from tests.supervisor.tree.kit import call

pytestmark = pytest.mark.finding("U6")


class Halting:
    """A model that sends one word at a time, each on the test's order."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.next = asyncio.Semaphore(0)

    async def complete(self, request: Request, on_delta: OnDelta) -> Reply:
        for word in self.words:
            await self.next.acquire()
            on_delta("text", word)
        await self.next.acquire()
        return Reply("".join(self.words))


class Gated:
    """A model that waits for a watcher."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.is_watched = asyncio.Event()

    async def complete(self, request: Request, on_delta: OnDelta) -> Reply:
        await self.is_watched.wait()
        return await self.model.complete(request, on_delta)


async def test_pieces_come_while_the_model_speaks() -> None:
    model = Halting("Roses ", "are ", "red.")
    async with retinue.open() as r:
        run = await r.spawn(Profile("poet", model=model), "go")
        heard: list[str] = []
        stream = run.stream_text()
        first = asyncio.ensure_future(anext(stream))
        await ManualClock.settle()  # the reader has begun to watch
        model.next.release()
        heard.append(await first)
        model.next.release()
        async for piece in stream:
            assert await run.state() == "running"
            heard.append(piece)
            model.next.release()
        assert heard == ["Roses ", "are ", "red."]
        assert (await run.result()).output() == "Roses are red."


async def test_who_comes_late_gets_everything_once() -> None:
    model = Halting("one ", "two ", "three")
    async with retinue.open() as r:
        run = await r.spawn(Profile("counter", model=model), "go")
        early = run.stream_text()
        first = asyncio.ensure_future(anext(early))
        await ManualClock.settle()  # the reader has begun to watch
        model.next.release()
        assert await first == "one "
        late = run.stream_text()
        first = asyncio.ensure_future(anext(late))
        for _ in range(3):
            model.next.release()
        assert await first == "one two three"
        assert [piece async for piece in late] == []
        assert "".join([piece async for piece in early]) == "two three"
        assert [piece async for piece in run.stream_text()] == ["one two three"]


async def test_replies_are_separate_and_only_those_of_the_run_itself() -> None:
    @tool(tier="observe")
    def look(ctx: Context) -> str:
        """Look."""
        ctx.emit("looking")
        return "seen"

    script = {
        "main": [
            {"thinking": "hm", "text": "I look.", "chunks": 2, **call("look")},
            {"text": "I ask.", **call("subagent_kid", task="k")},
            {"text": "Done."},
        ],
        "kid": [{"text": "kid says"}],
    }
    async with retinue.open(approver=allow_all, profiles=[Profile("kid")]) as r:
        run = await r.spawn(Profile("main", model=scripted(script), tools=[look, "subagent_kid"]), "go")
        said = "".join([piece async for piece in run.stream_text()])
        items = [item async for item in run.events(deltas=True)]
        assert [item for item in items if isinstance(item, Event)] == [event async for event in run.events()]
    assert said == "I look.\n\nI ask.\n\nDone."


async def test_the_deltas_of_the_whole_tree_are_between_its_events() -> None:
    script: dict[str, Any] = {
        "main": [{"thinking": "hm", **call("subagent_kid", task="k")}, {"text": "Done."}],
        "kid": [{"text": "kid says", "chunks": 2}],
    }
    model, items = Gated(scripted(script)), []
    async with retinue.open(approver=allow_all, profiles=[Profile("kid")]) as r:
        run = await r.spawn(Profile("main", model=model, tools=["subagent_kid"]), "go")
        async for item in run.events(deltas=True):
            model.is_watched.set()
            items.append(item)
    deltas = [item for item in items if isinstance(item, Delta) and item.kind == "text"]
    said: dict[tuple[str, int], str] = {}
    for delta in deltas:
        assert delta.offset == len(said.get((delta.path, delta.turn), ""))
        said[delta.path, delta.turn] = said.get((delta.path, delta.turn), "") + delta.text
    assert said == {("/main/kid-1", 1): "kid says", ("/main", 2): "Done."}
    assert len(deltas) >= 3
    ended = [n for n, item in enumerate(items) if isinstance(item, Event) and isinstance(item.body, RunEnded)]
    assert ended[-1] == len(items) - 1 and len(ended) == 2


async def test_a_run_without_a_model_gives_its_answer() -> None:
    async def agent(task: str, ctx: Context) -> str:
        ctx.emit("working")
        return f"did {task}"

    async with retinue.open() as r:
        run = await r.spawn(Profile("agent", call=agent), "it")
        assert [piece async for piece in run.stream_text()] == ["did it"]


@pytest.fixture(params=["", "secret-value-of-nobody"])
def secret(request: pytest.FixtureRequest) -> Iterator[str]:
    """No secret, or one whose beginning is held back at the end of a piece."""
    hide_secret(request.param)
    yield request.param
    forget_secret(request.param)


@pytest.mark.usefixtures("secret")
async def test_what_is_told_before_a_retry_stays_and_the_reply_is_whole() -> None:
    is_watched = asyncio.Event()

    class Retrying:
        async def complete(self, request: Request, on_delta: OnDelta) -> Reply:
            if request.turn == 1:
                return Reply("Start.", (Call("a", "list_agents", {}),))
            await is_watched.wait()
            on_delta("text", "I was")
            on_delta("retry", "the stream was cut; asking again")
            on_delta("text", "I am ")
            on_delta("text", "back.")
            return Reply("I am back.")

    said = ""
    async with retinue.open() as r:
        run = await r.spawn(Profile("main", model=Retrying(), tools=["list_agents"]), "go")
        async for piece in run.stream_text():
            said += piece
            is_watched.set()
    assert said == "Start.\n\nI was\n\nI am back."


def make_event(seq: int, body: Body, run: int = 0) -> Event:
    return Event(seq, "t", run, "/main", "main", 0.0, body)  # type: ignore[arg-type]


def make_delta(text: str, turn: int, offset: int) -> Delta:
    return Delta("t", 0, "/main", "main", text, turn=turn, offset=offset)


def fold(*items: Event | Delta) -> list[str]:
    spoken = SpokenText(0)
    return [piece for item in items for piece in spoken.apply(item)]


def test_deltas_that_were_dropped_come_with_the_event() -> None:
    begin, whole = make_event(1, TurnStarted(1)), make_event(2, Message("one two three", final=True))
    one, two, three = make_delta("one ", 1, 0), make_delta("two ", 1, 4), make_delta("three", 1, 8)
    assert fold(begin, one, two, three, whole) == ["one ", "two ", "three"]
    assert fold(begin, one, three, whole) == ["one ", "two three"]
    assert fold(begin, two, three, whole) == ["one two three"]
    assert fold(begin, whole) == ["one two three"]


def test_deltas_that_overtake_their_events_wait_for_them() -> None:
    first, second = make_event(1, TurnStarted(1)), make_event(3, TurnStarted(2))
    early, whole = make_delta("b", 2, 0), make_event(2, Message("a"))
    last = make_event(4, Message("b", final=True))
    assert fold(make_delta("a", 1, 0), first, early, whole, second, last) == ["a", "\n\n", "b"]
    assert fold(first, whole, second, make_delta("a", 1, 0), last) == ["a", "\n\n", "b"]
