"""Every way a run can end, in a primary, in a child and through seed 001's tool: exact texts, and all that was done."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import retinue
from retinue import Limits, Profile, Result
from retinue.core.events import Event, RunEnded
from retinue.log.runs import Runs
from retinue.testing import MemoryLog, deny_all, scripted
from tests.subagent.agents import Play, as_child, as_primary, as_tool, calls, launch
from tests.subagent.events import spawned, stream

FIRST = {"text": "working", **calls("echo", message="one"), "usage": {"input_tokens": 5, "output_tokens": 3}}
SPENT = {"input_tokens": 2, "output_tokens": 1}
UNTITLED = {key: value for key, value in FIRST.items() if key != "text"}


async def cancel_in_turn_two(play: Play, cancel: Callable[[], Awaitable[object]]) -> None:
    await play.model.reached["worker", 2].wait()
    await cancel()


async def let_ten_ms_pass(play: Play, cancel: Callable[[], Awaitable[object]]) -> None:
    await play.model.reached["worker", 2].wait()
    await play.clock.advance(0.01)


@dataclass(frozen=True)
class Case:
    """An ending of a run and its expected consequences; `{who}` is Run or Subagent."""

    status: str
    text: str
    details: str | None
    second: dict[str, Any]
    first: dict[str, Any] = field(default_factory=lambda: FIRST)
    usage: tuple[int, int] = (5, 3)
    turns: int = 2
    tools: int = 1
    logs: int = 1
    partial: str = "working"
    play: dict[str, Any] = field(default_factory=dict)


PANIC = "model provider panicked: RuntimeError: panic provider should not disconnect"
HANG = {"hang": True}
CASES = {
    "done": Case("done", "all good", None, {"text": "all good", "usage": SPENT}, usage=(7, 4), partial=""),
    "empty answer": Case("done", "", None, {"text": "", "usage": SPENT}, first=UNTITLED, usage=(7, 4), partial=""),
    "refusal": Case("refused", "Not that", "Not that", {"refuse": "Not that", "usage": SPENT}, usage=(7, 4)),
    "refusal without words": Case("refused", "{who} refused the request", "{who} refused the request", {"refuse": ""}),
    "provider crash": Case("failed", PANIC, PANIC, {"crash": "panic provider should not disconnect"}),
    "server error": Case(
        "failed",
        "Server error (500): llm transport failed",
        "Server error (500): llm transport failed",
        {"error": "llm transport failed", "status": 500, "usage": SPENT},
        usage=(7, 4),
    ),
    "agent error": Case("failed", "no such model", "no such model", {"error": "no such model"}),
    "cut stream": Case(
        "disconnected",
        "{who} ended unexpectedly",
        "{who} 'worker' ended before returning a final state",
        {"cut": "half an ans", "usage": SPENT},
        usage=(7, 4),
        partial="half an ans",
    ),
    "timeout": Case(
        "timed_out",
        "{who} timed out",
        "{who} 'worker' timed out after 10ms",
        HANG,
        play={"limits": Limits(seconds=0.01), "act": let_ten_ms_pass},
    ),
    "cancelled before": Case(
        "cancelled",
        "{who} cancelled",
        "{who} 'worker' was cancelled",
        {"text": "too late"},
        usage=(0, 0),
        turns=0,
        tools=0,
        logs=0,
        partial="",
        play={"cancel_before": True},
    ),
    "cancelled during": Case(
        "cancelled", "{who} cancelled", "{who} 'worker' was cancelled", HANG, play={"act": cancel_in_turn_two}
    ),
    "max turns": Case(
        "limited",
        "{who} reached its limit",
        "{who} 'worker' stopped: limit of 1 turn reached",
        {"text": "too late"},
        turns=1,
        play={"limits": Limits(turns=1)},
    ),
    "no approver": Case(
        "failed",
        "{who} requires confirmation",
        "{who} 'worker' requested confirmation{why}",
        {**calls("launch"), "usage": SPENT},
        usage=(7, 4),
        tools=2,
        play={},
    ),
}


class UnreadableLog(MemoryLog):
    """A log that takes and shows events; reading it again is a mistake."""

    def read(self, tree: str, *, after: int = 0) -> list[Event]:
        raise AssertionError("the log was read again")


@pytest.mark.requirement(
    "SDK-2",
    "SDK-12",
    "SDK-30",
    "SDK-31",
    "SDK-32",
    "SDK-34",
    "SDK-36",
    "SDK-37",
    "SDK-42",
    "SDK-53",
    "SDK-54",
    "SDK-58",
)
@pytest.mark.parametrize("way", [as_primary, as_child, as_tool], ids=["primary", "child", "tool"])
@pytest.mark.parametrize("name", CASES)
async def test_every_ending(name: str, way: Callable[..., Awaitable[Any]]) -> None:
    case = CASES[name]
    play = Play([case.first, case.second], **case.play)
    async with retinue.open(clock=play.clock) as r:
        r.control.trees.log = UnreadableLog()
        ended = await way(play, r)
    result = ended if isinstance(ended, dict) else ended.to_json()

    primary = way is as_primary
    why = " for launch, and no approver is attached" if primary else ", which is not supported in nested runs"
    words = {"who": "Run" if primary else "Subagent", "why": why}
    assert result["final_response"] == case.text.format(**words)
    assert result.get("error_details") == (None if case.details is None else case.details.format(**words))
    assert result["success"] is (case.status == "done")
    assert (result["usage"]["input_tokens"], result["usage"]["output_tokens"]) == case.usage
    assert (result["total_turns"], result["tool_count"], len(result["tool_logs"])) == (
        case.turns,
        case.tools,
        case.logs,
    )
    for log in result["tool_logs"]:
        assert (log["name"], log["display_name"], log["result"], log["success"]) == ("echo", "Echo", "1 lines", True)
    assert "failed_tool" not in result
    if isinstance(ended, Result):
        assert (ended.status, ended.partial) == (case.status, case.partial)
        warnings = {
            "empty answer": "the run ended without any text",
            "no approver": None if primary else "launch needs a confirmation, and no approver is attached",
        }
        assert ended.warning == warnings.get(name)


async def vanish(task: str, ctx: retinue.Context) -> str:
    raise asyncio.CancelledError


@pytest.mark.requirement("SDK-31")
async def test_a_run_that_vanishes_has_not_succeeded() -> None:
    async def boss(task: str, ctx: retinue.Context) -> str:
        child = await ctx.spawn(Profile("ghost", call=vanish), "go")
        return (await child.result()).error_details or ""

    async with retinue.open() as r:
        primary = await r.run(Profile("ghost", call=vanish), "go")
        child = await r.run(Profile("boss", call=boss), "go")
    assert (primary.status, primary.final_response) == ("disconnected", "Run ended unexpectedly")
    assert primary.error_details == "Run 'ghost' ended before returning a final state"
    assert child.final_response == "Subagent 'ghost' ended before returning a final state"


@pytest.mark.requirement("SDK-36")
@pytest.mark.parametrize("primary", [True, False], ids=["primary", "child"])
async def test_an_ending_aborts_what_the_run_still_does(primary: bool) -> None:
    started, aborted = asyncio.Event(), asyncio.Event()

    @retinue.tool(tier="observe")
    async def dig() -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            aborted.set()
        return "never"

    model = scripted({"worker": [{"tools": [{"name": "dig"}, {"name": "launch"}]}]})
    worker = Profile("worker", model=model, tools=[dig, launch])

    async def boss(task: str, ctx: retinue.Context) -> str:
        return (await (await ctx.spawn(worker, "go")).result()).final_response

    async with retinue.open() as r:
        result = await r.run(worker if primary else Profile("boss", call=boss, tools=[dig, launch]), "go")
    assert result.final_response == f"{'Run' if primary else 'Subagent'} requires confirmation"
    assert started.is_set()
    assert aborted.is_set()


async def test_a_denial_is_a_tool_result_and_the_run_goes_on() -> None:
    play = Play([calls("launch"), {"text": "heard: {{last_result}}"}])
    async with retinue.open(approver=deny_all) as r:
        result = await as_child(play, r)
    assert result.final_response == "heard: The user denied this call: denied by the test"
    assert [log.success for log in result.tool_logs] == [False]


@pytest.mark.requirement("SDK-35")
@pytest.mark.parametrize("status", ["finished", "", "Done", "running"])
def test_an_unknown_run_state_is_an_error(status: str) -> None:
    runs = Runs.of("t", stream(spawned(run=1), RunEnded(status, "looks fine", 5), run=1))
    result = runs.runs[1].result("t")
    assert (result.success, result.status) == (False, "failed")
    assert result.final_response == result.error_details == "subagent returned an unrecognized run state"
