"""A root in a process of its own: gives one server its address and one run id (as JSON on stdout), and shows on stderr
what is reported. Ends when its stdin does.

    root.py FOLDER"""

import asyncio
import json
import sys
from pathlib import Path

from retinue.core.events import Event
from retinue.surfaces.printer.printer import Printer
from tests.remote.collector.kit import CollectorSetup, open_collector


async def show(h: CollectorSetup, printer: Printer) -> None:
    async for event in h.supervisor.watch(h.tree):
        if isinstance(event, Event):
            printer.show_event(event)


async def main() -> None:
    async with open_collector(Path(sys.argv[1]), durable=True) as h:
        server = h.server()
        showing = asyncio.create_task(show(h, Printer(sys.stderr, color=False)))
        print(json.dumps({"environment": dict(server.environment), "run_id": server.call()}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        h.main.stop("cancelled")
        await showing


asyncio.run(main())
