"""Code mode as part of a run: its calls are seen, asked about and limited like all others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

import retinue
from retinue import Allow, Approval, Deny, Event, Limits, Profile
from retinue.core.approvals import PROGRAM_ENDED
from retinue.core.events import ApprovalDecided, RunSpawned, ToolCall, ToolResult
from retinue.core.messages import AssistantTurn, Call, Reply, ToolTurn
from retinue.log.blocks import Blocks
from retinue.log.runs import Runs
from retinue.log.threads import fold_thread
from tests.gates import pass_time, until
from tests.supervisor.tree.kit import bodies, main, spawn
from tests.tools.code_mode.kit import NAME, TOOLS, program, report, run, said, served

ASK = "from tools import sky\nprint(await sky.report('Rome'))\nprint(await sky.report('Oslo'))"
SKY = [served(report, server="sky", tier="confirm")]


# What is seen of it


async def test_inner_calls_are_seen_while_the_program_runs() -> None:
    reached, going_on = asyncio.Event(), asyncio.Event()

    async def slow(city: str) -> str:
        """Waits."""
        reached.set()
        await going_on.wait()
        return city

    code = "from tools import weather\nawait weather.report('Oslo')\nawait weather.slow('Rome')"
    profile = main({"main": [program(code, executionTimeout=30), {"text": "over"}]}, tools=[NAME, *TOOLS, served(slow)])
    async with retinue.open(mode="yes") as r:
        started = await r.spawn(profile, "go")
        seen: list[Event] = []
        async for event in started.events():
            seen.append(event)
            if isinstance(event.body, ToolCall) and event.body.name == "mcp__weather__slow":
                break
        await reached.wait()
        [view] = Runs.of(started.tree, seen).runs.values()
        assert [open_call.name for open_call in view.calls] == [NAME, "mcp__weather__slow"]
        assert view.state == "running"
        going_on.set()
        assert (await started.result()).status == "done"
    calls = bodies(seen, ToolCall)
    assert [(body.call_id, body.within) for body in calls] == [
        ("call_1_1", ""),
        ("call_1_1.1", "call_1_1"),
        ("call_1_1.2", "call_1_1"),
    ]


@pytest.mark.requirement("CPE-12", "CPE-15", "CPE-16")
async def test_a_program_is_shown_as_a_program() -> None:
    code = "from tools import weather\nprint(await weather.report('Rome'))"
    _, _, events = await run(code, timeout=10)
    blocks = Blocks()
    shown = [block for event in events if (block := blocks.apply(event)) is not None]
    assert [(block.header, block.body) for block in shown] == [
        ("#### [tool call] (timeout: 10s)", f"{NAME}\n{code}"),
        ("#### [tool call]", 'mcp__weather__report\n{\n  "city": "Rome"\n}'),
        ('#### Tool "mcp__weather__report" result:', "fine in Rome"),
        ("#### Code execution output:", "fine in Rome\n"),
    ]
    assert "".join(text for _, text in shown[-1].brief) == f"{NAME}(from tools import weather ... 2 lines) -> 1 line"
    assert bodies(events, ToolCall)[0].timeout_seconds == 10


async def test_all_calls_count_and_the_model_sees_one() -> None:
    code = "from tools import weather\nfor city in ('Rome', 'Oslo'):\n    print(await weather.report(city))"
    given, result, events = await run(code)
    assert result.tool_count == 3
    assert [log.name for log in result.tool_logs] == ["mcp__weather__report", "mcp__weather__report", NAME]
    turns = fold_thread(events, 0)
    assert [turn.calls[0].name for turn in turns if isinstance(turn, AssistantTurn) and turn.calls] == [NAME]
    assert [turn.text for turn in turns if isinstance(turn, ToolTurn)] == [given]


async def test_a_call_of_a_program_has_an_id_that_no_other_call_has() -> None:
    """Also when the model gives its own calls such names."""
    code = "from tools import weather\nawait weather.report('Rome')"

    class Naming:
        name = "naming"

        async def complete(self, request: Any, on_delta: Any) -> Reply:
            own = (Call("c", NAME, {"code": code}), Call("c.1", "list_agents", {}))
            return Reply("", own) if request.turn == 1 else Reply("over")

    profile = Profile("main", model=Naming(), tools=[NAME, "list_agents", *TOOLS])
    async with retinue.open(mode="yes") as r:
        started = await r.spawn(profile, "go")
        events = [event async for event in started.events()]
    ids = [body.call_id for body in bodies(events, ToolCall)]
    assert len(ids) == len(set(ids)) == 3


# What it may do


async def test_a_call_is_asked_about_and_a_no_is_the_programs_error() -> None:
    async def person(question: Approval) -> Allow | Deny:
        return Deny("not Oslo") if question.args.get("city") == "Oslo" else Allow()

    given, result, events = await run(ASK, tools=SKY, mode="ask", approver=person)
    assert given.startswith("fine in Rome\nTraceback")
    assert given.endswith("tools.ToolError: The user denied this call: not Oslo\n[exit code 1]")
    assert result.status == "done"
    assert [(body.tool, body.allowed) for body in bodies(events, ApprovalDecided)] == [
        (NAME, True),
        ("mcp__sky__report", True),
        ("mcp__sky__report", False),
    ]


async def test_an_answer_for_the_run_holds_for_the_rest_of_the_program() -> None:
    asked: list[str] = []

    async def person(question: Approval) -> Allow:
        asked.append(question.tool)
        return Allow("run")

    given, _, _ = await run(ASK, tools=SKY, mode="ask", approver=person)
    assert given == "fine in Rome\nfine in Oslo\n"
    assert asked == [NAME, "mcp__sky__report"]


async def test_without_an_approver_the_run_ends_as_with_any_call() -> None:
    rules = {"allow": [NAME]}
    given, result, _ = await outcome_of(ASK, tools=SKY, mode="ask", approvals=rules)
    assert given is None
    assert (result.status, result.final_response) == ("failed", "Run requires confirmation")


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"deny": [NAME]}, f"The user denied this call: the rule {NAME} forbids it"),
        ({"deny": ["shell"]}, "The user denied this call: the rule shell forbids it"),
        ({"deny": ["mcp__sky__*"]}, "the rule mcp__sky__* forbids it"),
        (
            {"allow": [NAME, "mcp__sky__report(city=Rome)", "mcp__sky__report(city=Oslo)"]},
            "fine in Rome\nfine in Oslo\n",
        ),
    ],
)
async def test_rules_name_it_and_what_it_calls(rules: dict[str, list[str]], text: str) -> None:
    mode = "yes" if "deny" in rules else "ask"
    given, _, _ = await outcome_of(ASK, tools=SKY, mode=mode, approvals=rules)
    assert given is not None
    assert text in given


@pytest.mark.parametrize("rules", [{"deny": ["shell(rm *)"]}, {"ask": ["shell"]}, {"ask": [NAME]}])
async def test_where_a_shell_would_ask_a_program_asks_in_every_mode(rules: dict[str, list[str]]) -> None:
    asked: list[tuple[str, str]] = []

    async def person(question: Approval) -> Allow:
        asked.append((question.tool, question.rule))
        return Allow()

    given, _, _ = await outcome_of("print(1)", tools=[], mode="yes", approvals=rules, approver=person)
    assert given == "1\n"
    assert asked == [(NAME, "")]


async def test_a_yes_to_one_program_is_never_a_rule_for_all() -> None:
    asked: list[Approval] = []

    async def person(question: Approval) -> Allow:
        asked.append(question)
        return Allow("project")

    given, result, _ = await run("print(1)", tools=[], mode="ask", approver=person)
    assert given == "1\n"
    assert [(question.rule, question.preview) for question in asked] == [("", "print(1)")]
    assert "holds for this call only" in (result.warning or "")


async def outcome_of(
    code: str, *, tools: list[Any], approvals: dict[str, list[str]], **options: Any
) -> tuple[str | None, Any, list[Event]]:
    """Run the program as `run` does, with rules for approvals."""
    profile = main({"main": [program(code), {"text": "over"}]}, tools=[NAME, *tools])
    async with retinue.open(**options, **approvals) as r:  # type: ignore[arg-type]
        started = await r.spawn(profile, "go")
        events = [event async for event in started.events()]
        result = await started.result()
    texts = [body.text for body in bodies(events, ToolResult)]
    return (texts[-1] if texts else None), result, events


async def test_the_runs_own_time_is_over_for_its_programs_too(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'begun')!r}, 'w').close()\nwhile True: pass"
    profile = main({"main": [program(code, executionTimeout=600)]}, tools=[NAME], limits=Limits(seconds=100.0))
    async with retinue.open(mode="yes") as r:
        started = await r.spawn(profile, "go")
        await until((tmp_path / "begun").exists)
        await pass_time(100)
        result = await started.result()
    assert result.status == "timed_out"


# Who has it


@pytest.mark.parametrize(
    ("tools", "has"),
    [
        (None, False),
        (["read"], False),
        ([NAME], True),
        (TOOLS, False),  # what is listed is what it gets
        ([NAME, *TOOLS], True),
    ],
)
async def test_a_profile_has_it_by_name(tools: list[Any] | None, has: bool) -> None:
    async with retinue.open(mode="yes") as r:
        started = await r.spawn(main({"main": ["x"]}, tools=tools), "go")
        [spawned] = [event.body async for event in started.events() if isinstance(event.body, RunSpawned)]
    assert (NAME in told(spawned)) is has


async def test_a_child_has_it_with_the_tools_it_has_itself() -> None:
    agents = {
        "main": [
            spawn(
                {"task": "x", "subagent_type": "all"},
                {"task": "x", "subagent_type": "own"},
                {"task": "x", "subagent_type": "none"},
            )
        ],
        "*": [{"text": "over"}],
    }
    children = [Profile("all"), Profile("own", tools=[NAME, "read", TOOLS[2]]), Profile("none", tools=[NAME, "read"])]
    names = {}
    for above in ([NAME, "read"], ["read"]):
        profile = main(agents, tools=["spawn_subagents", *above, *TOOLS])
        async with retinue.open(mode="yes", profiles=children) as r:
            started = await r.spawn(profile, "go")
            names[len(above)] = [
                told(body).get(NAME, "no") for body in bodies([e async for e in started.events()], RunSpawned)
            ]
    _, everything, own, none = names[2]
    assert "weather.broken(" in everything
    assert "weather.broken(" not in own
    assert "weather.report(" in own
    assert "no tools for it to call" in none
    assert names[1] == ["no"] * 4


async def test_more_tools_than_a_link_carries_are_left_to_the_model() -> None:
    def large(text: str) -> str:
        return text

    tools = []
    for number in range(5):
        large.__name__ = f"large_{number}"
        tools.append(served(large, description="x" * 600_000))
    given, _, _ = await run("from tools import weather\nweather.__all__", tools=tools)
    assert given == "['large_0', 'large_1', 'large_2']\n"


def told(spawned: RunSpawned) -> dict[str, str]:
    """The tools of a run and how they are described, as the log has them."""
    tools = spawned.tools if isinstance(spawned.tools, list) else msgspec.json.decode(spawned.tools)
    return {tool["name"]: tool["description"] for tool in tools}


async def test_a_child_can_call_only_what_it_has_itself() -> None:
    code = (
        "from tools import weather\nprint(weather.__all__)\nimport tools\nawait tools._call('mcp__weather__broken', {})"
    )
    agents = {
        "main": [spawn({"task": "x", "subagent_type": "child"}), {"text": "over"}],
        "child": [program(code), {"text": "x"}],
    }
    profile = main(agents, tools=["spawn_subagents", NAME, *TOOLS])
    async with retinue.open(mode="yes", profiles=[Profile("child", tools=[NAME, TOOLS[2]])]) as r:
        started = await r.spawn(profile, "go")
        events = [event async for event in started.events()]
    text = said(events)
    assert text.startswith("['report']\n")
    assert "There is no tool 'mcp__weather__broken'" in text


# How it ends


async def test_a_question_that_nobody_waits_for_is_closed_with_the_program() -> None:
    """Its task is given up while the person still thinks: the question goes away, and the run with it does not."""
    asked = asyncio.Event()

    async def person(question: Approval) -> Allow:
        if question.tool == "mcp__sky__report":
            asked.set()
            await asyncio.get_running_loop().create_future()
        return Allow()

    async def meet() -> str:
        """Comes when the question has been asked."""
        await asked.wait()
        return "met"

    code = """
import asyncio
from tools import sky, weather
waiting = asyncio.create_task(sky.report("Rome"))
print(await weather.meet())
"""
    tools = [*SKY, served(meet)]
    given, result, events = await run(code, tools=tools, mode="ask", approver=person)
    assert given == "met\n"
    assert result.status == "done"
    [decided] = [body for body in bodies(events, ApprovalDecided) if body.tool == "mcp__sky__report"]
    assert (decided.allowed, decided.reason) == (False, PROGRAM_ENDED)
    names = [body.name for body in bodies(events, ToolResult)]
    assert names == ["mcp__weather__meet", "mcp__sky__report", NAME]


async def test_cancelling_ends_the_program_and_its_calls() -> None:
    stopped = asyncio.Event()

    async def slow() -> None:
        """Waits for ever."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            stopped.set()

    profile = main({"main": [program("from tools import weather\nawait weather.slow()")]}, tools=[NAME, served(slow)])
    async with retinue.open(mode="yes") as r:
        started = await r.spawn(profile, "go")
        async for event in started.events():
            if isinstance(event.body, ToolCall) and event.body.within:
                break
        assert await started.cancel()
        result = await started.result()
    assert result.status == "cancelled"
    assert stopped.is_set()
