"""The live view on a pseudo-terminal: what is there at once, what arrives, and many agents and events."""

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from decimal import Decimal
from typing import Any

import pytest

from retinue.core.control import RunHandle
from retinue.core.events import (
    AnswerGiven,
    Delta,
    Event,
    Inbox,
    Message,
    RunEnded,
    RunSpawned,
    RunStarted,
    RunWaiting,
    Thinking,
    ToolCall,
    TurnStarted,
)
from retinue.core.messages import RunRef
from retinue.surfaces.cli.conversation import Conversation
from retinue.surfaces.cli.live_screen import AT_ONCE_SECONDS
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.printer.header import Header
from retinue.surfaces.printer.keys import Key
from retinue.surfaces.printer.markdown import render_markdown
from retinue.surfaces.printer.screen import FRAME_SECONDS
from tests.surfaces.live_terminal import COLUMNS, open_live_terminal
from tests.surfaces.printer.facts import ANNA, MAIN, Facts, make_call_events

AGENTS, CALLS = 100, 50
EVENT_SECONDS = 0.001  # how far an event moves the time on, so that no turn depends on the speed of the machine


@pytest.mark.requirement("P10")
async def test_a_hundred_agents_freeze_nothing_and_lose_no_block() -> None:
    events = make_call_events(agents=AGENTS, calls=CALLS)  # 10,000 and more

    loop, shown, turns = asyncio.get_running_loop(), 0, [0]
    loop.time = lambda: time.monotonic() + shown * EVENT_SECONDS  # type: ignore[method-assign]

    async def give_events() -> AsyncIterator[Event]:
        nonlocal shown
        for event in events:
            yield event
            shown += 1

    async def note_turns() -> None:
        while True:
            turns.append(shown)
            await asyncio.sleep(0)

    async with open_live_terminal() as terminal:
        terminal.live.view.show_tree("t1")
        noting = asyncio.ensure_future(note_turns())
        began = loop.time()
        await terminal.live.show_items(give_events())
        took = loop.time() - began
        terminal.live.view.press_key(Key("x", "x"))
        noting.cancel()
        bottom = terminal.bottom
    assert not terminal.live.is_stuck
    frames = terminal.written.count("\x1b[?7l")
    assert frames <= took / FRAME_SECONDS + 5
    blocks = Counter(line.partition(" →")[0].rstrip() for line in terminal.lasting)
    wanted = {f"✓ [agent {run}] glob({call}.txt)" for run in range(1, AGENTS + 1) for call in range(CALLS)}
    assert {block: blocks[block] for block in wanted} == dict.fromkeys(wanted, 1)
    assert len(bottom) < 24
    assert any("… and 93 more at work" in line for line in bottom)
    assert "Agents: 1 primary, 100 running, 0 finished" in bottom[-1]
    gaps = [after - before for before, after in itertools.pairwise([*turns, shown])]
    assert max(gaps) <= AT_ONCE_SECONDS / EVENT_SECONDS + 1  # others had their turn all the time


def say(text: str, kind: str) -> Delta:
    return Delta("t1", 0, "/main", "main", text, kind, turn=1)


async def test_the_header_is_there_at_once_and_thinking_and_text_as_they_arrive() -> None:
    facts = Facts()
    async with open_live_terminal() as terminal:
        view = terminal.live.view
        view.show_header(Header(model="anthropic:m", runtime="isolated", tokens=5000, cost=Decimal(2), seconds=90.0))
        first = "anthropic:m · tree … · sandbox isolated · works in its own copy"
        assert terminal.bottom[:2] == [first, "budget 5,000 tokens, $2.00, 1m30s"]
        assert re.fullmatch(r"[◐◓◑◒] starting \d+s", terminal.bottom[2])
        view.show_tree("t1")
        view.apply(facts(MAIN, RunSpawned(None, "main", 0, "x", "id", "/w", model="anthropic:m", max_tokens=5000)))
        await terminal.keeps("anthropic:m · tree t1 · sandbox isolated · works in its own copy")
        view.apply(facts(MAIN, RunStarted("isolated")))
        assert not any("tree t1" in line for line in terminal.bottom)
        view.apply(facts(MAIN, TurnStarted(1)))
        assert any("main waits for the model" in line for line in terminal.bottom)
        for text in ("I should ", "look first."):
            view.apply(say(text, "thinking"))
        await terminal.sees("main thinks")
        assert "  │ I should look first." in terminal.bottom
        view.apply(facts(MAIN, Thinking("I should look first.")))
        view.apply(say("It is ", "text"))
        await terminal.sees("main writes")
        assert "  │ It is" in terminal.bottom and not any("I should" in line for line in terminal.bottom)
        view.apply(facts(MAIN, Message("It is here.", final=False)))
        await terminal.keeps("It is here.")
        view.apply(facts(MAIN, Inbox("agent:1 has ended", source="notice", about=1)))  # its own line tells it
        view.apply(facts(MAIN, Inbox("and the tests?", source="user")))
        view.apply(facts(MAIN, ToolCall("c1", "shell", {"command": "true; " * 100})))
        [head] = [line for line in terminal.bottom if "shell(" in line]
        assert re.fullmatch(r"[◐◓◑◒] shell\(true; .* \d+\w+", head) and len(head) <= COLUMNS
        await terminal.keeps("› and the tests?")
    assert "agent:1 has ended" not in "".join(terminal.lasting)
    assert "".join(terminal.lasting).count("anthropic:m") == 1
    assert "I should look" not in "".join(terminal.lasting)  # `--verbose` keeps thoughts


async def test_the_header_claims_no_sandbox_and_no_copy_for_a_run_at_an_a2a_agent() -> None:
    facts = Facts()
    async with open_live_terminal() as terminal:
        terminal.live.view.show_tree("t1")
        terminal.live.view.apply(facts(MAIN, RunSpawned(None, "main", 0, "x", "id", "/w")))
        terminal.live.view.apply(facts(MAIN, RunStarted("a2a")))
        await terminal.keeps("main · tree t1 · works at an A2A agent · no budget")


async def test_the_header_names_the_workspace_of_the_run_also_in_a_stricter_runtime() -> None:
    """After a resume in a sandbox, the run still works where it began."""
    facts = Facts()
    async with open_live_terminal() as terminal:
        terminal.live.view.show_tree("t1")
        spawned = RunSpawned(None, "main", 0, "x", "id", "/w", workspace_kind="shared")
        terminal.live.view.apply(facts(MAIN, spawned))
        terminal.live.view.apply(facts(MAIN, RunStarted("isolated")))
        await terminal.keeps("main · tree t1 · sandbox isolated · works in the project itself · no budget")


@pytest.mark.parametrize("knows_runtime", [True, False])
async def test_the_first_message_of_a_conversation_is_below_the_header_once(knows_runtime: bool) -> None:
    facts = Facts()
    async with open_live_terminal() as terminal:
        view = terminal.live.view
        if knows_runtime:  # the terminal that starts the run; others learn the runtime from the log
            view.show_header(Header(model="anthropic:m", runtime="isolated"))
        view.show_tree("t1")
        spawned = RunSpawned(None, "main", 0, "first words", "id", "/w", model="anthropic:m", conversation=True)
        view.apply(facts(MAIN, spawned))
        view.apply(facts(MAIN, RunStarted("isolated")))
        view.apply(facts(MAIN, RunWaiting()))
        view.apply(facts(MAIN, RunEnded("done", "", 0)))
        await terminal.keeps("› first words")
    lines = [line.partition(" · ")[0] for line in terminal.lasting]
    shown = [line for line in lines if line in ("anthropic:m", "› first words")]
    assert shown == ["anthropic:m", "› first words"]


async def test_verbose_keeps_thoughts_and_what_was_spawned() -> None:
    facts = Facts()
    async with open_live_terminal(level="verbose") as terminal:
        for event in (
            facts.spawn(MAIN, "main"),
            facts(MAIN, RunStarted()),
            facts(MAIN, Thinking("I should look first.")),
            facts.spawn(ANNA, "research codebase"),
        ):
            terminal.live.view.apply(event)
        await terminal.keeps("I should look first.")
        await terminal.keeps("○ anna [research codebase] spawned")


async def test_a_receipt_repeats_sixty_characters_of_its_message() -> None:
    facts = Facts()
    async with open_live_terminal() as terminal:
        for event in (
            facts.spawn(MAIN, "main"),
            facts(MAIN, RunStarted()),
            facts(MAIN, TurnStarted(1)),
            facts(MAIN, Inbox("a" * 100, source="user")),
            facts(MAIN, TurnStarted(2)),
        ):
            terminal.live.view.apply(event)
        await terminal.keeps("delivered at turn 2")
    [words] = re.findall(r"a+\.\.\.", "".join(terminal.lasting))
    assert len(words) == 60


def test_markdown_is_rendered_without_links_images_or_markup_of_ours() -> None:
    text = "# Title\n\n**bold** [a](http://b) ![i](http://c)\nList<int> [red]x[/red] \x1b]8;;http://e\x07"
    shown = render_markdown(text, width=60, color=True)
    assert "\x1b]" not in shown and "\x07" not in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain.split("\n") == [
        "Title", "", "bold a (http://b) !i (http://c)", "List<int> [red]x[/red] \\x1b]8;;http://e\\x07",
    ]  # fmt: skip
    assert render_markdown("plain words", width=60, color=True) == "plain words"
    assert "\x1b" not in render_markdown(text, width=60, color=False)
    many = "*é*\n" * 40_000  # its time would grow with the square of its lines
    assert render_markdown(many, width=60, color=True) == many.rstrip()


def read_work(bottom: list[str]) -> list[str]:
    """The lines about what goes on, without the spinner and the time."""
    return [re.sub(r"[◐◓◑◒] | \S+$", "", line) for line in bottom if "[look" in line]


async def test_a_team_is_one_node_with_its_members_below_it() -> None:
    facts = Facts()
    team, one, two = (
        (1, "/main/team-1", "team"),
        (2, "/main/team-1/agent1-2", "agent1"),
        (3, "/main/team-1/agent2-3", "agent2"),
    )
    async with open_live_terminal() as terminal:
        view = terminal.live.view
        view.show_tree("t1")
        view.apply(facts(MAIN, RunSpawned(None, "main", 0, "x", "id", "/w", model="m")))
        view.apply(facts(team, RunSpawned(0, "look", 1, "x", "id1", "/w")))
        view.apply(facts(team, RunStarted()))
        for who in (one, two):
            view.apply(facts(who, RunSpawned(1, f"look {who[2]}", 1, "x", who[2], "/w", model="m")))
            view.apply(facts(who, RunStarted()))
        assert read_work(terminal.bottom) == [
            "[look] team of 2: 0 answered, 2 at work",
            "  [look agent1] agent1 waits for the model",
            "  [look agent2] agent2 waits for the model",
        ]
        view.apply(facts(one, ToolCall("c1", "new_answer", {"content": "A"}, waits=True)))
        view.apply(facts(team, AnswerGiven("agent1", "agent1.1", 2, "c1", "A")))
        await terminal.keeps("◇ [look] agent1 answers (agent1.1): A")
        assert read_work(terminal.bottom) == [
            "[look] team of 2: 1 answered, 1 at work",
            "  [look agent2] agent2 waits for the model",
        ]


class Told:
    """A process whose tree happened already: all its events come at once."""

    def __init__(self, events: list[Event], on_shown: Callable[[], None]) -> None:
        self._events, self._on_shown = events, on_shown

    async def watch(self, tree: str, *, deltas: bool = False) -> AsyncGenerator[Event]:
        for event in self._events:
            yield event
            self._on_shown()

    async def cancel(self, tree: str, run: int) -> None:
        """Nothing is left to cancel."""

    kill = cancel


@pytest.mark.requirement("P10")
async def test_a_hundred_agents_do_not_freeze_a_conversation() -> None:
    loop, shown, turns = asyncio.get_running_loop(), 0, [0]
    loop.time = lambda: time.monotonic() + shown * EVENT_SECONDS  # type: ignore[method-assign]

    def count_shown() -> None:
        nonlocal shown
        shown += 1

    async def note_turns() -> None:
        while True:
            turns.append(shown)
            await asyncio.sleep(0)

    events = make_call_events(agents=AGENTS, calls=5)
    control: Any = Told([*events, Facts().end(MAIN)], count_shown)
    async with open_live_terminal(talks=True) as terminal:
        conversation = Conversation(terminal.live, control, Signals(), hosts=False)
        noting = asyncio.ensure_future(note_turns())
        await conversation.hold(RunHandle(control, RunRef("t1", 0, "/main", "main", "main", "id")))
        noting.cancel()
    assert conversation.parting == "ended"
    gaps = [after - before for before, after in itertools.pairwise([*turns, shown])]
    assert max(gaps) <= AT_ONCE_SECONDS / EVENT_SECONDS + 1
