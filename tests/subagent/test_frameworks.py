"""`as_tool` inside real agents of two other frameworks, outside any run of ours and as a run of our tree."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import retinue
from retinue import Context, Profile, Retinue
from retinue.log.runs import Runs
from retinue.testing import scripted
from tests.subagent.agents import calls, echo

pydantic_ai = pytest.importorskip("pydantic_ai")
agents = pytest.importorskip("agents")

from agents.models.interface import Model as OpenAIModel  # noqa: E402
from openai.types.responses import (  # noqa: E402
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart  # noqa: E402
from pydantic_ai.models.function import AgentInfo, FunctionModel  # noqa: E402

HELPER = Profile(
    "helper",
    "Help.",
    model=scripted({"helper": [calls("echo", message="dug up"), {"text": "found: {{last_result}}"}]}),
    tools=[echo],
    description="Digs things up.",
)
Ask = Callable[[Callable[[str], Awaitable[str]], str], Awaitable[str]]


async def ask_pydantic_ai(subagent: Callable[[str], Awaitable[str]], task: str) -> str:
    """Let an agent of pydantic-ai pass its task to its only tool, and return the tool's answer."""

    def think(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        part = messages[-1].parts[-1]
        if isinstance(part, ToolReturnPart):
            return ModelResponse(parts=[TextPart(f"pydantic-ai heard {part.content}")])
        [offered] = info.function_tools
        assert offered.name == "subagent_helper"
        assert offered.description is not None
        assert "Digs things up." in offered.description
        assert offered.parameters_json_schema["required"] == ["task"]
        assert offered.parameters_json_schema["properties"]["task"]["type"] == "string"
        return ModelResponse(parts=[ToolCallPart(offered.name, {"task": task})])

    agent = pydantic_ai.Agent(FunctionModel(think), tools=[subagent])
    return str((await agent.run(task)).output)


class Echoing(OpenAIModel):  # type: ignore[misc]
    """A model of openai-agents that calls its only tool and repeats the tool's answer."""

    async def get_response(
        self, system_instructions: Any, input: Any, model_settings: Any, tools: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        last = input[-1] if isinstance(input, list) else input
        if isinstance(last, dict) and last.get("type") == "function_call_output":
            text = ResponseOutputText(annotations=[], text=f"openai-agents heard {last['output']}", type="output_text")
            output: Any = ResponseOutputMessage(
                id="m1", content=[text], role="assistant", status="completed", type="message"
            )
        else:
            [offered] = tools
            assert (offered.name, offered.params_json_schema["required"]) == ("subagent_helper", ["task"])
            assert "Digs things up." in offered.description
            assert "task or question" in offered.params_json_schema["properties"]["task"]["description"]
            output = ResponseFunctionToolCall(
                arguments='{"task": "dig"}', call_id="c1", name=offered.name, type="function_call"
            )
        return agents.ModelResponse(output=[output], usage=agents.Usage(), response_id=None)

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield


async def ask_openai_agents(subagent: Callable[[str], Awaitable[str]], task: str) -> str:
    agents.set_tracing_disabled(True)
    agent = agents.Agent(name="outer", model=Echoing(), tools=[agents.function_tool(subagent)])
    return str((await agents.Runner.run(agent, task)).final_output)


ASKS = pytest.mark.parametrize("ask", [ask_pydantic_ai, ask_openai_agents], ids=["pydantic-ai", "openai-agents"])


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    for name in [name for name in os.environ if name.endswith("_API_KEY")]:
        monkeypatch.delenv(name)


def framework(ask: Ask) -> str:
    return "pydantic-ai" if ask is ask_pydantic_ai else "openai-agents"


async def logged(r: Retinue) -> Runs:
    [tree] = [each.tree for each in await r.control.log.list_trees()]
    return Runs.of(tree, await r.control.log.read(tree))


@ASKS
async def test_outside_a_run_the_subagent_is_a_tree_of_its_own(ask: Ask) -> None:
    async with retinue.open() as r:
        answer = await ask(r.as_tool(HELPER), "dig")
        runs = await logged(r)
    assert answer == f"{framework(ask)} heard found: dug up"
    assert [(run.path, run.agent, run.spawned.task) for run in runs.runs.values()] == [("/main", "helper", "dig")]
    assert runs.runs[0].tool_count == 1


@ASKS
async def test_an_agent_of_another_framework_is_a_run_and_its_subagent_a_grandchild(ask: Ask) -> None:
    async with retinue.open(mode="yes") as r:
        subagent = r.as_tool(HELPER)

        async def foreign(task: str, ctx: Context) -> str:
            ctx.emit("handing over")
            return await ask(subagent, task)

        model = scripted({"main": [calls("subagent_foreign", task="dig"), {"text": "{{last_result}}"}]})
        outer = Profile("foreign", call=foreign, tools=[echo])
        result = await r.run(Profile("main", model=model, tools=[outer]), "go")
        runs = await logged(r)
    assert result.final_response == f"{framework(ask)} heard found: dug up"
    assert [(run.path, run.spawned.depth, run.status) for run in runs.runs.values()] == [
        ("/main", 0, "done"),
        ("/main/foreign-1", 1, "done"),
        ("/main/foreign-1/helper-2", 2, "done"),
    ]
    assert runs.runs[1].last_message == "handing over"
    [log] = runs.runs[2].tool_logs
    assert (log.name, log.success) == ("echo", True)


@ASKS
async def test_cancelling_the_tree_reaches_through_the_framework(ask: Ask) -> None:
    async with retinue.open() as r:
        subagent = r.as_tool(Profile("helper", model=scripted({"*": [{"hang": True}]}), description="Digs things up."))

        async def foreign(task: str, ctx: Context) -> str:
            return await ask(subagent, task)

        run = await r.spawn(Profile("foreign", call=foreign), "dig")
        async for event in run.events():
            if event.kind == "turn.started":
                await run.cancel()
        result = await run.result()
    assert (result.status, [child.status for child in result.children]) == ("cancelled", ["cancelled"])
