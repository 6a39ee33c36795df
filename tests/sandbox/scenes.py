"""Scenes that play a tree in any runtime and return its facts as plain values.

A scene knows only the name of the runtime, so that every runtime can be compared with `inherited`. `python -m
tests.sandbox RUNTIME SCENE ...` plays some for another user.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

import retinue
from retinue import Allow, Context, Deny, Event, Limits, Result, tool
from retinue.core.approvals import Approval
from retinue.core.control import RunHandle
from retinue.core.events import ApprovalAsked, Message, RunStarted, ToolCall, ToolResult, TurnStarted, Warned
from retinue.core.messages import Call, Reply
from retinue.testing import ManualClock, scripted
from tests.gates import HeldClock, pass_time
from tests.sandbox.hosts import play_elsewhere
from tests.supervisor.tree.kit import call, main, spawn, until
from tests.tools.code_mode.kit import NAME, TOOLS, report, served

Facts = dict[str, Any]
LABEL = "[as the sandbox shows it]\\n"  # as it stands in JSON
SCENES: dict[str, Callable[[str], Awaitable[Facts]]] = {}
_IN_PROCESS: dict[str, Facts] = {}
# What differs from one tree to the next, whatever its runtime.
PASSING = {"tree", "duration_ms", "subagent_id", "workspace", "children", "runtime", "sandbox"}


def scene(play: Callable[[str], Awaitable[Facts]]) -> Callable[[str], Awaitable[Facts]]:
    SCENES[play.__name__] = play
    return play


async def in_process(scene: str) -> Facts:
    """Play a scene in this process, once, for the comparison with every other place."""
    if scene not in _IN_PROCESS:
        _IN_PROCESS[scene] = await SCENES[scene]("inherited")
    return _IN_PROCESS[scene]


def project() -> Path:
    """A folder of the user's that others may read, as a project mostly is."""
    folder = Path(tempfile.mkdtemp(prefix="retinue-scene-"))
    folder.chmod(0o755)
    (folder / "notes.txt").write_text("one\ntwo\nthree\n")
    return folder


@asynccontextmanager
async def removing(folder: Path) -> AsyncIterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(folder)


def facts(result: Result[Any], events: list[Event]) -> Facts:
    """Everything that should not depend on where a run lives."""
    kinds: dict[str, list[str]] = {}
    said: dict[str, list[Any]] = {}
    for event in events:
        kinds.setdefault(event.path, []).append(event.kind)
        if isinstance(event.body, ToolCall | ToolResult | ApprovalAsked | Warned):
            fields = msgspec.to_builtins(event.body)
            said.setdefault(event.path, []).append({key: fields[key] for key in fields if key not in _CHANGING})
    for path, found in kinds.items():  # calls of one reply run side by side, and which of them is first is chance
        kinds[path] = _sorted(found, lambda kind: kind in ("tool.call", "tool.result"), lambda kind: kind)
        said[path] = _sorted(said.get(path, []), _turn, lambda fields: (fields["kind"], fields.get("call_id", "")))
    plain = json.dumps({"kinds": kinds, "said": said, "result": _plain(result)}, sort_keys=True)
    plain = plain.replace(result.workspace, "PROJECT").replace(result.tree, "TREE")
    plain_facts: Facts = json.loads(_PASSING_TEXT.sub("SOME", plain.replace(LABEL, "")))
    return plain_facts


def _turn(fields: Facts) -> str:
    return str(fields.get("call_id", "")).rpartition("_")[0]


def _sorted(items: list[Any], group: Callable[[Any], Any], key: Callable[[Any], Any]) -> list[Any]:
    """Each stretch of the same group in order; what belongs to none stays where it is."""
    stretches = itertools.groupby(items, group)
    return [item for one, found in stretches for item in (sorted(found, key=key) if one else found)]


_PASSING_TEXT = re.compile(r"subagent_[0-9a-f]{12,}|(?<=execution_time_seconds)[^,]+")
_CHANGING = {"duration_ms", "approval_id", "digest", "file", "sandbox"}


def _plain(result: Result[Any]) -> Facts:
    fields = {key: value for key, value in json.loads(json.dumps(result.to_json())).items() if key not in PASSING}
    logs = [{key: log[key] for key in log if key != "duration_ms"} for log in fields["tool_logs"]]
    fields["tool_logs"] = sorted(logs, key=json.dumps)  # those of one reply end in any order; `said` has the order
    return fields | {"children": [_plain(child) for child in result.children]}


async def play(
    runtime: str,
    agents: dict[str, Any],
    *,
    during: Callable[[RunHandle], Awaitable[Any]] | None = None,
    limits: Limits | None = None,
    fields: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Result[Any], list[Event]]:
    """Runs a scripted tree to its end in a project of its own; `during` is what happens meanwhile."""
    if runtime == "delegated":
        return await play_elsewhere(
            replace(main(agents), **(fields or {})), project(), during=during, limits=limits, **options
        )
    folder = project()
    options = {"mode": "yes", "path": folder / ".retinue", "runtime": runtime, **options}
    fields = {"workspace": "shared", **(fields or {})}  # where it works when nobody says depends on the runtime
    async with removing(folder), retinue.open(**options) as r:
        run = await r.spawn(replace(main(agents), **fields), "go", limits=limits)
        meanwhile = None if during is None else asyncio.create_task(during(run))  # type: ignore[arg-type]
        events = [event async for event in run.events()]
        if meanwhile is not None:
            await meanwhile
        for event in events:
            if isinstance(event.body, RunStarted):
                assert event.body.runtime == runtime
                assert bool(event.body.sandbox) is (runtime != "inherited")
        return await run.result(), events


@scene
async def tools(runtime: str) -> Facts:
    """Every tool that touches the machine, and calls that cannot work."""
    worker = [
        call("write", path="a/b.txt", content="alpha\nbeta\n"),
        call("read", path="a/b.txt"),
        call("edit", path="a/b.txt", old_string="beta", new_string="gamma"),
        call("edit", path="a/b.txt", old_string="nowhere", new_string="x"),
        call("glob", pattern="**/*.txt"),
        call("grep", pattern="tw."),
        call("shell", command="cat a/b.txt; exit 3"),
        call("read", path="/etc/shadow"),
        call("nonsense"),
        {"tools": [{"name": "read", "args": {"path": "a/b.txt"}}, {"name": "shell", "args": {"command": "echo two"}}]},
        {"text": "{{last_result}}", "thinking": "hm", "usage": {"input_tokens": 3, "output_tokens": 2}},
    ]
    return facts(*await play(runtime, {"main": [spawn({"task": "work"}), {"text": "over"}], "subagent": worker}))


@tool(tier="observe")
async def where(ctx: Context, word: str) -> str:
    """Says where it was asked from."""
    ctx.emit(f"on the host: {word}")
    return f"{ctx.path} {word}"


@tool
def fails() -> str:
    """Never works."""
    raise ValueError("not today")


@scene
async def host_tools(runtime: str) -> Facts:
    """Functions of the program, asked for at depth 3."""
    deep = {"tools": [{"name": "where", "args": {"word": "x"}}, {"name": "fails", "args": {}}]}
    agents = {
        "main": [spawn({"task": "one"}), {"text": "{{last_result}}"}],
        "/main/subagent-1": [spawn({"task": "two"}), {"text": "2"}],
        "/main/subagent-1/subagent-2": [spawn({"task": "three"}), {"text": "1"}],
        "/main/subagent-1/subagent-2/subagent-3": [deep, call("where", wrong=1), {"text": "{{last_result}}"}],
    }
    names = ["spawn_subagents", "list_agents", "get_agent", where, fails]
    result, events = await play(runtime, agents, fields={"tools": names})
    found = facts(result, events)
    deepest = "/main/subagent-1/subagent-2/subagent-3"
    assert found["result"]["children"][0]["children"][0]["children"][0]["status"] == "done"
    done = [each for each in found["said"][deepest] if each["kind"] == "tool.result"]
    assert [each["text"] for each in done if each.get("success", True)] == [f"{deepest} x"]  # it ran in the program
    return found


PROGRAM = """
import asyncio, os
from tools import ToolError, weather

reports = await asyncio.gather(*(weather.forecast(city) for city in ("Rome", "Oslo", "Bern")))
print(sum(each["degrees"] for each in reports), await weather.report(city="Rome"))
try:
    await weather.broken("Rome")
except ToolError as error:
    print("failed:", error)
open("made.txt", "w").write("by the program")
os.path.exists("made.txt")
"""


@scene
async def programs(runtime: str) -> Facts:
    """Code mode at depth 2: a program with five calls, and programs that fail."""
    worker = [
        call(NAME, code=PROGRAM, executionTimeout=30),
        call(NAME, code="from tools import weather\nawait weather.forecast()"),
        call(NAME, code="raise SystemExit(3)"),
        call(NAME, code="x ="),
        call(NAME, code="while True: pass", executionTimeout=1),
        call(NAME, code=""),
        call("read", path="made.txt"),
        {"text": "{{last_result}}"},
    ]
    agents = {"main": [spawn({"task": "work"}), {"text": "over"}], "subagent": worker}
    names = ["spawn_subagents", "read", NAME, *TOOLS]
    return facts(*await play(runtime, agents, fields={"tools": names}))


@scene
async def programs_that_ask(runtime: str) -> Facts:
    """The calls of a program need approval like any other: one is allowed, one denied, one changed. The program's clock
    stands meanwhile."""
    asked: list[tuple[str, str, str]] = []

    async def person(question: Approval) -> Allow | Deny:
        asked.append((question.tool, json.dumps(question.args), question.preview))
        await pass_time(40)  # a slow person: three answers take longer than the program may
        match question.args.get("city"):
            case "Oslo":
                return Deny("not there")
            case "Bern":
                return Allow(args={"city": "Roma"})
        return Allow()

    code = """
from tools import ToolError, sky
for city in ("Rome", "Oslo", "Bern"):
    try:
        print(await sky.report(city))
    except ToolError as error:
        print("no:", error)
"""
    agents = {"main": [call(NAME, code=code, executionTimeout=100), {"text": "{{last_result}}"}]}
    tools = [NAME, served(report, server="sky", tier="confirm")]
    found = facts(*await play(runtime, agents, fields={"tools": tools}, mode="ask", approver=person))
    return found | {"asked": [list(question) for question in asked]}


@scene
async def programs_that_leave(runtime: str) -> Facts:
    """A program that ends before its calls do: they are given up, in the log before its own result."""

    async def never(city: str) -> str:
        await asyncio.get_running_loop().create_future()
        return city

    code = """
import asyncio
from tools import weather
waiting = asyncio.create_task(weather.never("Rome"))
await weather.report("Rome")
raise SystemExit(0)
"""
    agents = {"main": [call(NAME, code=code), call("list_agents"), {"text": "over"}]}
    tools = [NAME, "list_agents", served(report), served(never)]
    result, events = await play(runtime, agents, fields={"tools": tools})
    order = [event.body.name for event in events if isinstance(event.body, ToolResult)]
    assert order == ["mcp__weather__report", "mcp__weather__never", NAME, "list_agents"]
    return facts(result, events)


@scene
async def approvals_at_depth_3(runtime: str) -> Facts:
    """The same person allows a call, denies another and changes a third."""
    asked: list[tuple[str, str | None, str, str]] = []

    async def person(question: Approval) -> Allow | Deny:
        shown = question.preview.removeprefix("[as the sandbox shows it]\n")
        asked.append((question.path, question.label, question.tool, shown))
        match question.args.get("command"):
            case "echo no":
                return Deny("not now")
            case "echo change":
                return Allow(args={"command": "echo changed"})
        return Allow()

    deep = [call("shell", command=f"echo {word}") for word in ("yes", "no", "change")]
    agents = {
        "main": [spawn({"task": "one"}), {"text": "over"}],
        "/main/subagent-1": [spawn({"task": "two"}), {"text": "2"}],
        "/main/subagent-1/subagent-2": [spawn({"task": "three"}), {"text": "1"}],
        "/main/subagent-1/subagent-2/subagent-3": [*deep, call("write", path="f", content="x\n"), {"text": "done"}],
    }
    found = facts(*await play(runtime, agents, mode="ask", approver=person))
    assert [tool for path, _, tool, _ in asked if path.endswith("subagent-3")] == ["shell", "shell", "shell", "write"]
    return found | {"asked": [list(question) for question in asked]}


@scene
async def family(runtime: str) -> Facts:
    """A child reads what its parent has written, and cannot write there."""
    look = 'cd "$(dirname "$PWD")/../0/workspace" && cat note; : >> note'
    agents = {
        "main": [call("write", path="note", content="from above\n"), spawn({"task": "read"}), {"text": "x"}],
        "subagent": [call("read", path="note"), call("write", path="note", content="x"), call("shell", command=look)],
    }
    result, events = await play(runtime, agents, fields={"workspace": "scratch"})
    said = [event.body.text for event in events if isinstance(event.body, ToolResult) and event.run == 1]
    read_only = "from above\n" in said[2] and ("Read-only" in said[2] or "Permission denied" in said[2])
    assert read_only is (runtime != "inherited")
    return {"status": result.status, "said": said[:2]}


@scene
async def nobody_to_ask(runtime: str) -> Facts:
    return facts(*await play(runtime, {"main": [call("shell", command="echo x"), {"text": "never"}]}, mode="ask"))


@scene
async def refusal(runtime: str) -> Facts:
    return facts(*await play(runtime, {"main": [{"refuse": "I will not"}]}))


@scene
async def provider_error(runtime: str) -> Facts:
    return facts(*await play(runtime, {"main": [call("shell", command="echo x"), {"error": "no", "status": 400}]}))


@scene
async def crash(runtime: str) -> Facts:
    return facts(*await play(runtime, {"main": [{"text": "half", **call("list_agents")}, {"crash": "bang"}]}))


@scene
async def cut_stream(runtime: str) -> Facts:
    return facts(*await play(runtime, {"main": [{"cut": "half a tho"}]}))


@scene
async def answer(runtime: str) -> Facts:
    """An output type: a wrong answer first, then a right one."""
    replies = [call("final_answer", count="many"), call("final_answer", count=3)]
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    return facts(*await play(runtime, {"main": replies}, fields={"output": schema}))


@scene
async def no_answer(runtime: str) -> Facts:
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    return facts(*await play(runtime, {"main": [{"text": "a"}, {"text": "b"}]}, fields={"output": schema}))


@scene
async def turns(runtime: str) -> Facts:
    agents = {"main": [call("list_agents")] * 5}
    return facts(*await play(runtime, agents, limits=Limits(turns=2)))


@scene
async def budget(runtime: str) -> Facts:
    reply = {**call("list_agents"), "usage": {"input_tokens": 4000, "output_tokens": 2000}}
    return facts(*await play(runtime, {"main": [reply] * 9}, limits=Limits(tokens=10_000)))


async def play_too_long(runtime: str, agents: dict[str, Any], *, turns: int, seconds: float, limits: Limits) -> Facts:
    """Play a tree whose primary hangs in its last turn, and let so many seconds pass there."""
    clock = ManualClock()

    async def use_up_time(run: RunHandle) -> None:
        async for event in run.events():
            if isinstance(event.body, TurnStarted) and event.body.turn == turns:
                await clock.advance(seconds)

    return facts(*await play(runtime, agents, during=use_up_time, limits=limits, clock=clock))


@scene
async def timeout(runtime: str) -> Facts:
    agents = {"main": [{"text": "so far", **call("list_agents")}, {"hang": True}]}
    return await play_too_long(runtime, agents, turns=2, seconds=5.0, limits=Limits(seconds=5.0))


@scene
async def stall(runtime: str) -> Facts:
    agents = {"main": [{"hang": True}]}
    return await play_too_long(runtime, agents, turns=1, seconds=6.0, limits=Limits(stall=3.0))


@scene
async def background(runtime: str) -> Facts:
    """A child in the background: its notice comes as a turn of its parent."""
    agents = {
        "main": [spawn({"task": "slow", "subagent_id": "slow"}, background=True), {"text": "waiting"}, {"text": "end"}],
        "slow": [call("shell", command="echo x"), {"text": "slow is done", "delay": 1}],
    }
    clock = HeldClock()

    async def let_child_end(run: RunHandle) -> None:
        await until(run, Message, number=0)
        clock.release()

    fields = {"model": scripted(agents, clock=clock)}
    result, events = await play(runtime, agents, during=let_child_end, fields=fields)
    inbox = [event.body.text for event in events if event.kind == "inbox" and event.run == 0]  # type: ignore[union-attr]
    found = facts(result, events)
    del found["said"]["/main"]  # the first reply of a background spawn has times in it
    return {"result": found["result"]["final_response"], "kinds": found["kinds"]["/main/subagent-1"], "inbox": inbox}


@scene
async def steering(runtime: str) -> Facts:
    """Words sent while a tool runs are read at the next turn, and are in the log before it."""
    heard: list[str] = []
    receipts: list[str] = []
    go = asyncio.Event()

    @tool(tier="observe")
    async def hold() -> str:
        """Waits until it may go on."""
        await go.wait()
        return "held"

    class Listening:
        name = "listening"

        async def complete(self, request: Any, on_delta: Any) -> Any:
            heard.extend(turn.text for turn in request.thread if getattr(turn, "source", "") in {"user", "asker"})
            return Reply("", (Call("c1", "hold", {}),)) if request.turn == 1 else Reply("thanks")

    async def steer(run: RunHandle) -> None:
        await until(run, ToolCall)
        receipts.append((await run.send("left, not right")).state)
        go.set()

    result, events = await play(runtime, {}, during=steer, fields={"model": Listening(), "tools": [hold]})
    kinds = [event.kind for event in events if event.kind in {"inbox", "turn.started"}]
    return {"heard": heard, "receipts": receipts, "kinds": kinds, "text": result.final_response}


@scene
async def long_output(runtime: str) -> Facts:
    """Text that does not fit inline is in a file, which the run can read."""

    class Reading:
        name = "reading"

        async def complete(self, request: Any, on_delta: Any) -> Reply:
            match request.turn:
                case 1:
                    return Reply("", (Call("c1", "shell", {"command": "seq 20000"}),))
                case 2:
                    [path] = re.findall(r"whole text in (\S+)", request.thread[-1].text)
                    return Reply("", (Call("c2", "read", {"path": path, "offset": 19999}),))
            return Reply(request.thread[-1].text)

    result, _ = await play(runtime, {}, fields={"model": Reading()})
    return {"status": result.status, "text": result.final_response}


STAGES: dict[str, tuple[dict[str, Any], type[Any]]] = {
    "at once": ({"main": [{"hang": True}]}, RunStarted),
    "in a model call": ({"main": [{"hang": True}]}, TurnStarted),
    "in a tool": ({"main": [call("shell", command="sleep 60")]}, ToolCall),
    "in a question": ({"main": [call("shell", command="sleep 60")]}, ApprovalAsked),
    "in a child": ({"main": [spawn({"task": "x"})], "subagent": [call("shell", command="sleep 60")]}, ToolCall),
}


@scene
async def cancel_at_each_stage(runtime: str) -> Facts:
    async def nobody(question: Approval) -> Allow:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    found: Facts = {}
    for stage, (agents, kind) in STAGES.items():

        async def cancel(run: RunHandle, kind: type[Any] = kind, stage: str = stage) -> None:
            await until(run, kind, number=1 if stage == "in a child" and kind is ToolCall else None)
            assert await run.cancel()
            assert not await run.cancel()

        asks = stage == "in a question"
        result, events = await play(
            runtime, agents, during=cancel, mode="ask" if asks else "yes", approver=nobody if asks else None
        )
        found[stage] = {"result": _plain(result) | {"total_turns": None}, "last": events[-1].kind}
    return found
