"""The same work on other frameworks, when they are installed. None of them records anything durable here."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from bench.table import Row, compare, micros, time_run
from bench.work import bare, ours

COUNT = 100
ROUNDS = 5
AS_LONG = 10  # runs of the reference that take as long as one of ours: what disturbs one disturbs both


def pydantic_ai_work() -> Callable[[], Awaitable[object]]:
    ai = importlib.import_module("pydantic_ai")
    messages = importlib.import_module("pydantic_ai.messages")
    function = importlib.import_module("pydantic_ai.models.function")

    def turns(history: list[Any]) -> int:
        return sum(isinstance(message, messages.ModelResponse) for message in history)

    def reply(tool: str, args: dict[str, str]) -> Any:
        return messages.ModelResponse(parts=[messages.ToolCallPart(tool, args)])

    async def child_model(history: list[Any], info: Any) -> Any:
        await asyncio.sleep(0)
        return (
            reply("look", {"what": "x"})
            if turns(history) < 2
            else messages.ModelResponse(parts=[messages.TextPart("found")])
        )

    async def parent_model(history: list[Any], info: Any) -> Any:
        await asyncio.sleep(0)
        return (
            reply("delegate", {"task": "x"})
            if turns(history) < 1
            else messages.ModelResponse(parts=[messages.TextPart("done")])
        )

    child = ai.Agent(function.FunctionModel(child_model))
    parent = ai.Agent(function.FunctionModel(parent_model))

    @child.tool_plain  # type: ignore[untyped-decorator]
    async def look(what: str) -> str:
        await asyncio.sleep(0)
        return "ok"

    @parent.tool_plain  # type: ignore[untyped-decorator]
    async def delegate(task: str) -> str:
        return str((await child.run(task)).output)

    return lambda: parent.run("go")


def openai_agents_work() -> Callable[[], Awaitable[object]]:
    os.environ.setdefault("OPENAI_API_KEY", "none")
    agents = importlib.import_module("agents")
    responses = importlib.import_module("openai.types.responses")
    agents.set_tracing_disabled(True)

    def message(text: str) -> Any:
        part = responses.ResponseOutputText(text=text, type="output_text", annotations=[])
        return responses.ResponseOutputMessage(
            id="m", type="message", role="assistant", status="completed", content=[part]
        )

    def tool_call(name: str, args: str) -> Any:
        return responses.ResponseFunctionToolCall(
            call_id=f"c{time.time_ns()}", name=name, arguments=args, type="function_call"
        )

    class Scripted(agents.Model):  # type: ignore[misc, name-defined]
        def __init__(self, tool: str, args: str, calls: int) -> None:
            self.tool, self.args, self.calls = tool, args, calls

        async def get_response(self, *rest: Any, **named: Any) -> Any:
            await asyncio.sleep(0)
            items = named["input"] if "input" in named else rest[1]
            done = 0 if isinstance(items, str) else sum(i.get("type") == "function_call" for i in items)
            output = [tool_call(self.tool, self.args)] if done < self.calls else [message("done")]
            return agents.ModelResponse(output=output, usage=agents.Usage(), response_id=None)

        def stream_response(self, *rest: Any, **named: Any) -> Any:
            raise NotImplementedError

    @agents.function_tool  # type: ignore[untyped-decorator]
    async def look(what: str) -> str:
        await asyncio.sleep(0)
        return "ok"

    child = agents.Agent(name="child", model=Scripted("look", '{"what":"x"}', 2), tools=[look])

    @agents.function_tool  # type: ignore[untyped-decorator]
    async def delegate(task: str) -> str:
        return str((await agents.Runner.run(child, task)).final_output)

    parent = agents.Agent(name="parent", model=Scripted("delegate", '{"task":"x"}', 1), tools=[delegate])
    return lambda: agents.Runner.run(parent, "go")


def rows() -> Iterator[Row]:
    reference = partial(time_run, partial(bare, count=COUNT, delay=0, at_once=True), times=AS_LONG)
    own = partial(time_run, partial(ours, None, count=COUNT, delay=0, at_once=True))
    seconds, ratio = compare(own, reference, rounds=ROUNDS)
    yield Row("ours, 100 at once in memory", micros(seconds, COUNT), ratio)
    for name, make in (("pydantic-ai", pydantic_ai_work), ("openai-agents", openai_agents_work)):
        try:
            work = make()
        except ImportError:
            yield Row(f"{name}: not installed", "")
            continue

        async def together(work: Callable[[], Awaitable[object]] = work) -> None:
            await asyncio.gather(*(work() for _ in range(COUNT)))

        seconds, ratio = compare(partial(time_run, together), reference, rounds=ROUNDS)
        yield Row(f"{name}, 100 at once, nothing recorded", micros(seconds, COUNT), ratio)
