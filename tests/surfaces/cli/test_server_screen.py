"""The screen of a server: which task a line is about, and the warnings of telemetry on it."""

import argparse
import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from retinue.build.parts import Parts
from retinue.core.control import RunHandle
from retinue.core.events import Event
from retinue.core.messages import RunRef
from retinue.surfaces.cli.a2a import _A2aHost
from retinue.surfaces.cli.live import catch_telemetry_warnings
from retinue.surfaces.printer.printer import Printer
from tests.surfaces.printer.facts import ANNA, MAIN, Facts, Recorder


async def test_the_last_lines_of_a_task_carry_its_label_however_slow_the_terminal_is(tmp_path: Path) -> None:
    terminal, nothing = Recorder(), argparse.Namespace()
    options: Any = None  # of the server, which is not started
    host = _A2aHost(nothing, Parts(tmp_path, state=tmp_path / ".retinue"), options, Printer(terminal))
    slow = threading.Event()
    host._thread.submit(slow.wait)

    def begin(tree: str, client: str) -> None:
        control: Any = None
        host._begin(RunHandle(control, RunRef(tree, 0, "/main", "main", "main", "id")), client, "hello")

    def show(tree: str, event: Event) -> None:
        host._show(msgspec.structs.replace(event, tree=tree))

    facts = Facts()
    begin("t1", "alice")
    begin("t2", "bob")
    show("t1", facts.spawn(ANNA, "look"))
    show("t1", facts.end(ANNA))
    show("t2", facts.spawn(ANNA, "look"))
    show("t1", facts.end(MAIN))
    show("t2", facts.end(MAIN))
    slow.set()
    await asyncio.wait_for(host._thread.drain(), 60)
    host._thread.close()
    labels = [line for line in terminal.text.splitlines() if line.startswith("-- ")]
    assert labels == ["-- alice: hello", "-- bob: hello"]


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
