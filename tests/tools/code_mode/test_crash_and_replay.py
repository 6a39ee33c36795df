"""Tests of a program in the log: after a crash, and in a replay."""

from __future__ import annotations

import retinue
from retinue import Allow, Approval, Deny
from retinue.core.events import UNKNOWN_AFTER_CRASH, RunEnded, ToolCall, ToolResult
from retinue.core.messages import ToolTurn
from retinue.log.threads import fold_thread
from tests.agent.test_replay import replay
from tests.crash.test_library import Crash
from tests.supervisor.tree.kit import bodies, call, main
from tests.tools.code_mode.kit import NAME, TOOLS, program, report, served

ASK = "from tools import sky\nprint(await sky.report('Rome'))\nprint(await sky.report('Oslo'))"
SKY = [served(report, server="sky", tier="confirm")]
TWO = """
import asyncio
from tools import weather
print(await asyncio.gather(weather.report("Rome"), weather.report("Oslo")))
"""


async def test_after_a_crash_nobody_knows_and_nothing_is_done_twice() -> None:
    made: list[str] = []

    def note(city: str) -> str:
        """Writes it down, for good."""
        made.append(city)
        return city

    code = "from tools import weather\nawait weather.note('Rome')\nprint(await weather.note('Oslo'))"
    profile = main({"main": [program(code), {"text": "{{last_result}}"}]}, tools=[NAME, served(note)])
    crash = Crash(profile)
    events = await crash.events()
    assert made == ["Rome", "Oslo"]
    [last] = [n for n, event in enumerate(events) if getattr(event.body, "call_id", "") == "call_1_1.2"][:1]
    _, after = await crash.goes_on(events[: last + 1])
    assert made == ["Rome", "Oslo"]
    results = {body.call_id: body.outcome for body in bodies(after, ToolResult)}
    assert results == {"call_1_1.1": "", "call_1_1.2": UNKNOWN_AFTER_CRASH, "call_1_1": UNKNOWN_AFTER_CRASH}
    [ended] = bodies(after, RunEnded)
    assert ended.status == "done"
    assert ended.final_response.startswith(UNKNOWN_AFTER_CRASH)
    assert [turn.call_id for turn in fold_thread(after, 0) if isinstance(turn, ToolTurn)] == ["call_1_1"]


async def test_after_a_crash_at_any_place_the_run_comes_to_its_end() -> None:
    profile = main({"main": [program(TWO), call("list_agents"), {"text": "over"}]}, tools=[NAME, "list_agents", *TOOLS])
    crash = Crash(profile)
    events = await crash.events()
    for place in range(1, len(events)):
        _, after = await crash.goes_on(events[:place])
        assert bodies(after, RunEnded)[0].status == "done"
        open_calls = {body.call_id for body in bodies(after, ToolCall)} - {
            body.call_id for body in bodies(after, ToolResult)
        }
        assert not open_calls


async def test_it_is_played_again_without_running() -> None:
    async def person(question: Approval) -> Allow | Deny:
        return Deny("no") if question.args.get("city") == "Oslo" else Allow()

    both = {"tools": [{"name": NAME, "args": {"code": TWO}}, {"name": NAME, "args": {"code": ASK}}]}
    profile = main({"main": [both, {"text": "over"}]}, tools=[NAME, *TOOLS, *SKY])
    async with retinue.open(mode="ask", approver=person) as r:
        started = await r.spawn(profile, "go")
        events = [event async for event in started.events()]
    differences, _, again = await replay(events)
    assert differences == []
    assert sorted((body.call_id, body.within) for body in bodies(again, ToolCall)) == sorted(
        (body.call_id, body.within) for body in bodies(events, ToolCall)
    )


async def test_a_record_that_ends_in_a_program_is_played_up_to_there() -> None:
    profile = main({"main": [program(TWO), {"text": "over"}]}, tools=[NAME, *TOOLS])
    events = await Crash(profile).events()
    for place in range(2, len(events)):
        differences, _, _ = await replay(events[:place])
        assert differences == []
