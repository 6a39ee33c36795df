"""The screen of a server: which task a line is about, and the warnings of telemetry on it."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest

from retinue.core.approvals import Approval
from retinue.core.errors import LogError
from retinue.core.events import Event, RunEnded
from retinue.surfaces.cli.live import catch_telemetry_warnings
from retinue.surfaces.cli.server_process import ServerScreen
from retinue.surfaces.printer.printer import AHEAD, Printer
from tests.surfaces.printer.facts import ANNA, MAIN, Facts, Recorder


class Trees:
    """A Control whose watchers get the events that the test gives them."""

    def __init__(self) -> None:
        self.events: dict[str, asyncio.Queue[Event]] = {"t1": asyncio.Queue(), "t2": asyncio.Queue()}

    async def watch(self, tree: str) -> AsyncIterator[Event]:
        ended = False
        while not ended:
            event = await self.events[tree].get()
            yield event
            ended = event.run == 0 and isinstance(event.body, RunEnded)
            self.events[tree].task_done()

    async def show(self, tree: str, event: Event) -> None:
        """Give an event to the watcher of a tree, and wait until it has passed it on."""
        self.events[tree].put_nowait(msgspec.structs.replace(event, tree=tree))
        await self.events[tree].join()


async def test_the_last_lines_of_a_task_carry_its_label_however_slow_the_terminal_is() -> None:
    terminal, trees, facts = Recorder(), Trees(), Facts()
    control: Any = trees
    screen = ServerScreen(Printer(terminal))
    slow = threading.Event()
    screen._thread.submit(slow.wait)
    screen.show_tree(control, "t1", label="alice: hello", line="client 'alice' asks (t1): hello")
    screen.show_tree(control, "t2", label="bob: hello", line="client 'bob' asks (t2): hello")
    await trees.show("t1", facts.spawn(ANNA, "look"))
    await trees.show("t1", facts.end(ANNA))
    await trees.show("t2", facts.spawn(ANNA, "look"))
    await trees.show("t1", facts.end(MAIN))
    await trees.show("t2", facts.end(MAIN))
    slow.set()
    await asyncio.wait_for(screen._trees.wait(), 60)
    await screen.close()
    lines = terminal.text.splitlines()
    assert [line for line in lines if line.startswith("-- ")] == ["-- alice: hello", "-- bob: hello"]
    assert [line for line in lines if "has the answer" in line] == [
        f"{tree} done; `retinue show {tree}` has the answer" for tree in ("t1", "t2")
    ]


async def test_the_label_of_a_tree_comes_again_below_a_question_of_another_one() -> None:
    terminal, trees, facts = Recorder(), Trees(), Facts()
    control: Any = trees
    printer = Printer(terminal)
    screen = ServerScreen(printer, in_thread=False)
    screen.show_tree(control, "t1", label="alice", line="alice asks")
    await trees.show("t1", facts.spawn(ANNA, "look"))
    printer.show_question(Approval("q", "t2", 0, "/main", "main", "glob", {}, "c", number=1), asker=True)
    await trees.show("t1", facts.end(ANNA))
    await trees.show("t1", facts.end(MAIN))
    await screen.close()
    lines = terminal.text.splitlines()
    asked = lines.index("◐ glob()  main · question 1 of t2/0")
    assert "-- alice" not in lines[:asked] and lines[asked:].count("-- alice") == 1


async def test_the_answer_is_said_below_the_last_event_of_its_tree_and_the_end_only_there() -> None:
    terminal, trees, facts = Recorder(), Trees(), Facts()
    control: Any = trees
    screen = ServerScreen(Printer(terminal), in_thread=False)
    screen.show_tree(control, "t1", label="a-1", line="a-1 runs as t1", tells_end=False)
    screen.say_after("t1", "a-1: done")
    await trees.show("t1", facts.spawn(ANNA, "look"))
    await trees.show("t1", facts.end(ANNA))
    await trees.show("t1", facts.end(MAIN))
    await screen.close()
    lines = terminal.text.splitlines()
    assert lines[0] == "a-1 runs as t1" and lines[-2].startswith("● anna") and lines[-1] == "a-1: done"


async def test_a_server_waits_for_no_terminal() -> None:
    """A stopped terminal costs a task nothing: what it does not take stays in the log."""
    trees, facts = Trees(), Facts()
    control: Any = trees
    screen = ServerScreen(Printer(Recorder()))
    stopped = threading.Event()
    screen._thread.submit(stopped.wait)
    screen.show_tree(control, "t1", label="alice", line="client 'alice' asks")
    for _ in range(AHEAD * 3):
        trees.events["t1"].put_nowait(facts.spawn(ANNA, "look"))
    await asyncio.wait_for(screen.close(), 60)
    assert trees.events["t1"].qsize() >= AHEAD  # not taken from the log
    stopped.set()


async def test_a_server_says_which_log_it_cannot_show() -> None:
    class Failing:
        async def watch(self, tree: str) -> AsyncIterator[Event]:
            raise LogError(f"the log of {tree} is gone")
            yield

    terminal, control = Recorder(), Failing()
    screen = ServerScreen(Printer(terminal), in_thread=False)
    screen.show_tree(cast(Any, control), "t1", label="alice", line="client 'alice' asks")
    await screen.close()
    assert "warning: a tree is not shown any more: the log of t1 is gone" in terminal.text


async def test_a_server_says_one_warning_of_the_telemetry_library_and_all_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said: list[str] = []
    with catch_telemetry_warnings(said.append):
        for number in range(3):
            warn = logging.getLogger("opentelemetry.exporter").warning
            await asyncio.to_thread(warn, "the collector is gone, try %d", number)
        logging.getLogger("retinue.telemetry").warning("not all was sent")
        await asyncio.sleep(0)
    assert said == ["warning: telemetry: the collector is gone, try 0", "warning: telemetry: not all was sent"]
    assert capsys.readouterr().err == ""
