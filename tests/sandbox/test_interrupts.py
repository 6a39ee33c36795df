"""An interrupted turn of a conversation ends the calls in its sandbox, but does not count as the loss of a sandbox."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.core.approvals import Approval, Deny
from retinue.core.events import RunEnded, RunWaiting, ToolCall, ToolResult
from retinue.core.ports import AttachedApprover
from retinue.core.profiles import Profile, Task
from retinue.sandbox.box import Box
from retinue.sandbox.process import PreparedSandbox, Process
from retinue.sandbox.tool_server_session import RESTARTS, ToolServerSandbox
from retinue.supervisor.supervisor import Supervisor
from retinue.testing import scripted
from tests.gates import Gate, pass_time, until
from tests.sandbox.test_hostile import CALLED, ECHO, HELLO, SERVES, NoProtection, use_sandbox
from tests.supervisor.tree.kit import Talk, bodies, call

WRITE = call("write", path="a", content="x\n")


async def start_talk(owner: Supervisor, *replies: Any) -> Talk:
    profile = Profile("main", model=scripted({"main": [*replies]}), runtime="isolated", workspace="scratch")
    return Talk(await owner.spawn(profile, Task("hello", conversation=True)))


async def test_an_interrupted_command_does_not_count_as_a_lost_sandbox(tmp_path: Path) -> None:
    gate, builder = Gate(tmp_path / "gate"), NoProtection(SERVES)
    interrupts = RESTARTS + 2
    owner = make_supervisor(Parts(Path.cwd(), mode="yes"))
    with use_sandbox(ToolServerSandbox(builder)):
        talk = await start_talk(owner, *[gate.reply] * interrupts, ECHO, "over")
        for _ in range(interrupts):
            waiting = await gate.wait_for_arrival()
            assert await talk.interrupt() == RunWaiting("interrupted")
            os.close(waiting)
            await talk.run.send("again")
        assert await talk.next(RunWaiting) == RunWaiting()
        results = bodies(await talk.end(), ToolResult)
        await owner.close()
    assert [body.outcome for body in results] == ["interrupted"] * interrupts + [""]
    assert (results[-1].text, builder.starts) == ("here\n", interrupts + 1)


class Slow(NoProtection):
    """Prepares its first sandbox when the test lets it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SERVES)
        self.begun, self.gate, self.at_once = 0, Gate(folder / "gate"), 0
        self._folder = folder

    def prepare(self, box: Box) -> PreparedSandbox:
        self.begun += 1
        self.at_once = max(self.at_once, self.begun - self.starts)
        if self.begun == 1:
            (self._folder / "gate").read_bytes()
        return super().prepare(box)


async def test_only_one_thread_at_a_time_prepares_the_sandbox_of_a_run(tmp_path: Path) -> None:
    builder = Slow(tmp_path)
    owner = make_supervisor(Parts(Path.cwd(), mode="yes"))
    with use_sandbox(ToolServerSandbox(builder)):
        talk = await start_talk(owner, ECHO, ECHO, "over")
        preparing = await builder.gate.wait_for_arrival()
        assert await talk.interrupt() == RunWaiting("interrupted")
        await talk.run.send("again")
        await talk.next(ToolCall)
        await pass_time(1.0)
        os.close(preparing)
        assert await talk.next(RunWaiting) == RunWaiting()
        results = bodies(await talk.end(), ToolResult)
        await owner.close()
    assert [body.text for body in results[1:]] == ["here\n"]
    assert (builder.begun, builder.at_once) == (2, 1)


class Lingering(Process):
    """A process that ends when the test lets it."""

    stops = 0
    released: asyncio.Event

    async def stop(self, answer: asyncio.Future[Any] | None = None) -> None:
        Lingering.stops += 1
        try:
            await self.released.wait()
        finally:
            await super().stop(answer)


async def test_an_interrupt_while_a_lying_tool_server_is_ended_does_not_start_another_one(tmp_path: Path) -> None:
    lies = "say(Accepted(call.id), ResultFrame(call.id, 'fine'), Hello(VERSION)); rest()"
    builder = NoProtection(CALLED + lies, SERVES)
    builder.process, Lingering.released = Lingering, asyncio.Event()
    owner = make_supervisor(Parts(Path.cwd(), mode="yes"))
    with use_sandbox(ToolServerSandbox(builder)):
        talk = await start_talk(owner, ECHO, "fine", ECHO, ECHO, "never")
        assert await talk.next(RunWaiting) == RunWaiting()
        await talk.run.send("again")
        await until(lambda: Lingering.stops == 2)  # for the lie, and for the call that found it
        assert await talk.interrupt() == RunWaiting("interrupted")
        Lingering.released.set()
        await talk.run.send("once more")
        first: Any = (RunEnded, RunWaiting)
        ended = await talk.next(first)
        await owner.close()
    assert builder.starts == 1
    assert "the tool server broke the protocol: a second hello" in ended.error_details


async def test_a_late_answer_to_an_interrupted_preview_does_not_break_the_protocol(tmp_path: Path) -> None:
    gate, asked = Gate(tmp_path / "gate"), []

    async def sees(question: Approval) -> Deny:
        asked.append(question.preview)
        return Deny()

    late = f"late = hear(Preview); os.close(os.open({str(tmp_path / 'gate')!r}, os.O_RDONLY)); "
    answers = "say(Previewed(late.id, '+late')); say(Previewed(hear(Preview).id, '+new')); rest()"
    builder = NoProtection(HELLO + late + answers)
    owner = make_supervisor(Parts(Path.cwd(), mode="ask", approver=AttachedApprover(sees)))
    with use_sandbox(ToolServerSandbox(builder)):
        talk = await start_talk(owner, WRITE, WRITE, "over")
        waiting = await gate.wait_for_arrival()
        assert await talk.interrupt() == RunWaiting("interrupted")
        os.close(waiting)
        assert await talk.say("again") == RunWaiting()
        await talk.end()
        await owner.close()
    assert (asked, builder.starts) == (["[as the sandbox shows it]\n+new"], 1)
