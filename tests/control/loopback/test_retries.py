"""Tests of commands whose answer was lost: repeated with the same key, a command takes effect once."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from retinue.control import client
from retinue.control.client import ControlChannel, ControlClient
from retinue.core.approvals import Allow, Answered, Approval, Decision, Deny
from retinue.core.changes import ApplyPlan
from retinue.core.errors import ControlUnreachable, ReplyTimeout
from retinue.core.events import ApprovalDecided, Inbox
from retinue.core.profiles import Task
from retinue.protocol import control
from retinue.protocol.strict_json import encode_body
from retinue.surfaces.cli.control_clients import report_silence
from retinue.surfaces.cli.main import report_error
from retinue.surfaces.cli.output import ProjectLog
from retinue.surfaces.cli.questions import PendingQuestion, list_questions, send_answer
from tests.control.loopback.kit import HANG, WRITE, ServedSupervisor, request, serve_supervisor
from tests.supervisor.tree.kit import bodies


@asynccontextmanager
async def losing(h: ServedSupervisor, *, answers: int) -> AsyncIterator[ControlClient]:
    """A client behind a connection that lets every request through and loses that many answers."""
    left, passing = answers, set[asyncio.Task[None] | None]()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        passing.add(asyncio.current_task())
        there, out = await asyncio.open_connection("127.0.0.1", h.client.address.port)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        body = await reader.readexactly(length)
        out.write(head.replace(str(port).encode(), str(h.client.address.port).encode()) + body)
        answer = await there.read()
        left -= 1
        if left < 0:
            writer.write(answer)
        out.close()
        writer.close()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield ControlClient(msgspec.structs.replace(h.client.address, port=port))
        await asyncio.gather(*(task for task in passing if task is not None), return_exceptions=True)


async def test_an_answer_that_was_lost_comes_again_and_the_command_took_effect_once(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": [WRITE, HANG]})
        [question] = await h.questions()
        async with losing(h, answers=1) as lossy:
            assert await lossy.answer(question.id, Allow(), by="me", digest=question.digest) == "taken"
        async with losing(h, answers=1) as lossy:
            assert (await lossy.send(run.ref.tree, 0, "hello")).state == "queued"
        async with losing(h, answers=1) as lossy:
            assert await lossy.cancel(run.ref.tree)
        await run.join()
        events = await h.supervisor.log.read(run.ref.tree)
    assert len(bodies(events, ApprovalDecided)) == 1
    assert [body.text for body in bodies(events, Inbox)] == ["hello"]


async def test_after_two_lost_answers_it_is_said_that_there_is_none(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": [HANG]})
        async with losing(h, answers=client.ATTEMPTS) as lossy:
            with pytest.raises(ControlUnreachable):
                await lossy.cancel(run.ref.tree)
        await run.join()
        assert run.result().status == "cancelled"


async def test_a_plan_to_apply_is_asked_for_once_and_not_kept_by_the_server(tmp_path: Path) -> None:
    """A plan holds a whole diff, and a person can ask for it again."""
    async with serve_supervisor(tmp_path, script={"explorer": [WRITE, "end"]}, workspace="copy", mode="yes") as h:
        run = await h.supervisor.spawn("explorer", Task("write"))
        await run.result()
        async with losing(h, answers=1) as lossy:
            with pytest.raises(ControlUnreachable):
                await lossy.plan_apply(run.tree, [0])
        for _ in range(5):
            assert (await h.client.plan_apply(run.tree, [0])).count == 1
        gc.collect()
        kept = [each for each in gc.get_objects() if isinstance(each, ApplyPlan) and each.tree == run.tree]
        assert len(kept) <= 1, "the newest may still be on its way"


async def test_a_stopped_process_may_still_carry_out_what_was_sent(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h, stopped(h) as address:
        channel = ControlChannel(address)
        with pytest.raises(ReplyTimeout, match="does not answer; the command was sent, and may still take effect"):
            await channel.call(replace(control.CANCEL, seconds=0.01), tree="x", run=0)
        with pytest.raises(ReplyTimeout, match=r"does not answer$") as raised:
            await channel.call(replace(control.PENDING, seconds=0.01))
    assert report_error(raised.value) == 1, "the command was used rightly"


@asynccontextmanager
async def stopped(h: ServedSupervisor) -> AsyncIterator[control.Address]:
    """The address of a process that is stopped: the system takes its connections, and nobody reads them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield msgspec.structs.replace(h.client.address, port=listening.getsockname()[1])


class StoppedControl:
    """The Control of a process that is stopped."""

    async def pending(self, tree: str | None = None) -> list[Approval]:
        raise ReplyTimeout("process 1 does not answer")


async def test_the_questions_of_a_stopped_process_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent: Any = StoppedControl()
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": [WRITE, HANG]})
        [question] = await h.questions()
        with pytest.raises(ReplyTimeout, match="process 1 does not answer, so it is not known what it asks"):
            await list_questions([(1, silent)])
        [found] = await list_questions([(1, silent), (2, h.client)])
        assert (found.approval.id, found.pid) == (question.id, 2)
        assert "warning: process 1 does not answer, so it is not known what it asks" in capsys.readouterr().err
        await h.client.cancel(run.ref.tree)
        await run.join()


async def test_a_long_silence_is_said_and_a_short_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with report_silence("process 1"):
        await asyncio.sleep(0)
    assert not capsys.readouterr().err
    with report_silence("process 1", seconds=0):
        await asyncio.to_thread(lambda: None)
    assert capsys.readouterr().err == "process 1 does not answer yet ...\n"


class EndingControl:
    """The Control of a process that writes each answer to its log, and ends before it replies."""

    def __init__(self, h: ServedSupervisor) -> None:
        self._h = h

    async def answer(self, approval_id: str, decision: Decision, **options: str) -> Answered:
        await self._h.client.answer(approval_id, decision, **options)
        await self._h.supervisor.log.flush()
        raise ControlUnreachable("the process is gone")


async def test_an_answer_without_a_reply_is_told_from_another_answer_of_the_same_terminal(tmp_path: Path) -> None:
    async def send(h: ServedSupervisor, question: Approval, decision: Decision, control: Any) -> Answered:
        project = ProjectLog(h.state, h.supervisor.log)
        return await send_answer(project, PendingQuestion(question, 1, control), decision, surface="here")

    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": [{"tools": WRITE["tools"] * 2}, HANG]})
        one, other = await h.questions(2)
        assert await send(h, one, Allow(), EndingControl(h)) == "taken"
        assert await send(h, other, Allow(), h.client) == "taken"
        assert await send(h, other, Deny(), EndingControl(h)) == "stale"
        await h.client.cancel(run.ref.tree)
        await run.join()


async def test_the_same_command_while_the_first_is_at_work_gets_the_same_answer(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": [WRITE, HANG]})
        [question] = await h.questions()
        outcomes = await asyncio.gather(*(_answer(h, question.id, "same") for _ in range(10)))
        assert outcomes == [b'"taken"'] * 10
        assert await _answer(h, question.id, "another") == b'"stale"'
        assert b"belongs to another command" in await _answer(h, "x/0/1", "same")
        await h.client.cancel(run.ref.tree)
        await run.join()


async def _answer(h: ServedSupervisor, approval: str, key: str) -> bytes:
    """The body of the response to a request with a key of our choice."""
    order = encode_body(control.AnswerRequest(approval, Allow(), "me", ""))
    return (await request(h.server, "POST", control.ANSWER.path, order, Idempotency_Key=key)).body
