"""The process of a command: signals are commands until its Control is closed, or until the command gives them up."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import cast

import pytest

from retinue.build.parts import Parts
from retinue.build.supervisor import open_served_control
from retinue.control.address_files import find_addresses
from retinue.core.control import Control
from retinue.core.errors import ConfigError, RetinueError
from retinue.surfaces.cli.host_process import open_process


class FakeControl:
    """A Control that gets SIGTERM while it closes, if `terminated`."""

    writer = "w1"

    def __init__(self, *, terminated: bool = False, error: RetinueError | None = None) -> None:
        self.steps: list[str] = []
        self.cancelled = asyncio.Event()
        self._terminated, self._error = terminated, error

    async def prepare(self, profile: object, say: object) -> None:
        self.steps.append("prepare")
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        if self._terminated:
            os.kill(os.getpid(), signal.SIGTERM)
            await self.cancelled.wait()
        self.steps.append("close")

    def make(self, parts: Parts) -> Control:
        return cast(Control, self)


async def test_signals_are_handled_until_the_control_is_closed(tmp_path: Path) -> None:
    fake, said = FakeControl(terminated=True), []
    async with open_process(Parts(tmp_path), said.append, make=fake.make) as (control, signals):
        assert cast(object, control) is fake and fake.steps == ["prepare"]
        signals.set_actions(fake.cancelled.set, lambda: None, said.append)
    assert fake.steps == ["prepare", "close"] and said == ["cancelling; press Ctrl-C again to kill"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_command_can_give_signals_up_before(tmp_path: Path) -> None:
    fake = FakeControl()
    async with open_process(Parts(tmp_path), print, prepares=False, make=fake.make) as (_, signals):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        signals.stop()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert fake.steps == ["close"]


async def test_a_control_that_cannot_be_prepared_is_closed(tmp_path: Path) -> None:
    fake = FakeControl(error=ConfigError("no"))
    with pytest.raises(ConfigError, match="no"):
        async with open_process(Parts(tmp_path), print, make=fake.make):
            pass
    assert fake.steps == ["prepare", "close"]


async def test_the_control_server_is_closed_before_the_control(tmp_path: Path) -> None:
    state = tmp_path / ".retinue"

    class Closing(FakeControl):
        async def close(self) -> None:
            self.steps.append(f"{len(find_addresses(state))} control servers")

    fake = Closing()
    parts = Parts(tmp_path, state=state)
    async with open_served_control(parts, print, make=fake.make):
        assert len(find_addresses(state)) == 1
    async with open_served_control(parts, print, serves=False, make=fake.make):
        assert not find_addresses(state)
    assert fake.steps == ["0 control servers"] * 2
