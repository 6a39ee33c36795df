"""Many subagents in some processes that report at a given rate: how long each event takes from post to print."""

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

from retinue.core.events import Delta, Event, Thinking
from retinue.surfaces.printer.printer import Printer, PrintThread
from tests.remote.collector.kit import CollectorSetup, open_collector

CROWD = str(Path(__file__).with_name("crowd.py"))


@dataclass
class Flood:
    """The result of a flood: the number of events posted, the seconds until each was printed, and the prints of each
    run."""

    posted: int
    delays: list[float]
    printed: dict[str, list[int]]

    def at(self, part: float) -> float:
        return sorted(self.delays)[min(len(self.delays) - 1, int(len(self.delays) * part))]


async def flood(folder: Path, *, processes: int, subagents: int, events: int, per_second: float) -> Flood:
    """Post events as subagents do, into a durable log, while a printer in its own thread follows the tree as in
    `retinue run`."""
    screen, share = folder / "screen", subagents // processes
    delays: list[float] = []
    with screen.open("w", encoding="utf-8") as stream:
        printer = Printer(stream, level="verbose", color=False)
        async with open_collector(folder, durable=True) as h:
            printing = asyncio.create_task(_print(h, printer, delays))
            servers = [h.server(f"server-{number}") for number in range(processes)]
            rate = str(per_second / processes)
            started = [
                await server.start(CROWD, str(events), rate, *[server.call() for _ in range(share)])
                for server in servers
            ]
            for process in started:
                assert process.stdout is not None
                assert (await process.stdout.readline()) == b"ready\n"
            said = await asyncio.gather(*[process.communicate(b"\n") for process in started])
            assert [process.returncode for process in started] == [0] * processes, said
            h.main.stop("cancelled")
            await printing
    return Flood(share * processes * events, delays, _blocks(screen.read_text()))


async def _print(h: CollectorSetup, printer: Printer, delays: list[float]) -> None:
    thread = PrintThread()
    async for event in h.supervisor.watch(h.tree):
        if not isinstance(event, Delta):
            await thread.enqueue(_show, printer, event, delays)
    await thread.drain()
    thread.close()


def _show(printer: Printer, event: Event, delays: list[float]) -> None:
    printer.show_event(event)
    if isinstance(event.body, Thinking):
        delays.append(time.time() - json.loads(event.body.text)["at"])


def _blocks(text: str) -> dict[str, list[int]]:
    """The numbers that stand in the blocks, by run. A block that was torn is no JSON."""
    printed: dict[str, list[int]] = {}
    for block in text.split("\n\n"):
        header, _, body = block.strip().partition("\n")
        if header.startswith("#### worker "):
            said = json.loads(body)
            printed.setdefault(said["run"], []).append(said["n"])
    return printed
