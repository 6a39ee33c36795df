"""Tests of content that cannot be stored or sent: it never reaches a run's thread, and the run goes on."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from pydantic_ai.messages import ModelResponse, ToolCallPart

import retinue
from retinue import Allow, Approval, Profile, Task, tool
from retinue.core.events import ToolResult
from retinue.core.messages import Call, Reply, Request, ToolTurn
from retinue.core.sendable import DEEPEST, find_problem, repair_reply
from retinue.core.usage import Usage
from retinue.models.providers import parse_model_response
from tests.supervisor.tree.kit import bodies, call, main

HALF = "\ud83d"


def nest(levels: int) -> dict[str, Any]:
    value: Any = "x"
    for _ in range(levels):
        value = {"a": [value]}
    return {"word": value}


BAD = {
    "half": ({"word": f"x{HALF}"}, "half of a surrogate pair"),
    "half key": ({f"{HALF}": 1}, "half of a surrogate pair"),
    "nan": ({"word": float("nan")}, "NaN and Infinity are not JSON"),
    "infinity": ({"word": [1.5, {"x": float("-inf")}]}, "NaN and Infinity are not JSON"),
    "deep": (nest(5000), f"nested more than {DEEPEST} levels deep"),
    "long": ({"word": 2**70}, "longer than 64 bits"),
}


class OneBadCall:
    """A model that makes one call beside a text with half a character, and records its requests."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args, self.requests = args, list[Request]()

    async def complete(self, request: Request, on_delta: Any) -> Reply:
        self.requests.append(request)
        json.dumps(msgspec.to_builtins(request.thread), allow_nan=False).encode()
        json.dumps([request.system, str(msgspec.json.encode(request.thread))], ensure_ascii=False).encode()
        if request.turn == 1:
            return Reply(f"I say {HALF}", (Call(f"id{HALF}", "speak", self.args),), usage=Usage(10, 5))
        return Reply("end", usage=Usage(20, 5))


@pytest.mark.finding("R2")
@pytest.mark.parametrize("name", BAD)
async def test_a_call_that_cannot_be_stored_is_refused_and_the_model_told(name: str) -> None:
    args, why = BAD[name]
    spoken: list[object] = []

    @tool(tier="observe")
    def speak(word: Any) -> str:
        """Speak."""
        spoken.append(word)
        return "spoken"

    model = OneBadCall(args)
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", model=model, tools=[speak]), f"go {HALF}")
        result = await run.result()
        events = await r.control.log.read(run.tree)
    assert (result.status, result.final_response, result.usage.total_tokens, spoken) == ("done", "end", 40, [])
    [told] = [turn for turn in model.requests[1].thread if isinstance(turn, ToolTurn)]
    assert why in told.text and "Nothing was run" in told.text and not told.success
    assert [body.text for body in bodies(events, ToolResult)] == [told.text]
    assert "gap" not in {event.kind for event in events}


@pytest.mark.finding("R2")
async def test_every_text_that_enters_a_run_can_be_sent() -> None:
    @tool(tier="observe")
    def speak(word: str) -> str:
        """Speak."""
        return f"said {HALF}"

    model = OneBadCall({"word": "x"})
    async with retinue.open(mode="yes") as r:
        task = Task(f"go {HALF}", context=f"about {HALF}", label=HALF)
        result = await r.run(Profile("main", model=model, tools=[speak]), task)
    assert result.status == "done"
    texts = [turn.text for turn in model.requests[1].thread][:3]
    assert texts == ["go ?", "I say ?", "said ?"]


@pytest.mark.finding("R2")
def test_arguments_that_a_provider_sends_as_text_are_checked_the_same_way() -> None:
    sent = ["[" * 100_000, '{"a": NaN}', '{"a": "\\ud83d"}', '{"a": ' + "[" * 500 + "]" * 500 + "}"]
    parts = [ToolCallPart("speak", text, f"c{number}") for number, text in enumerate(sent)]
    reply = repair_reply(parse_model_response(ModelResponse(parts=parts)))
    assert all(call.problem for call in reply.calls)
    assert not any(find_problem(call.args) for call in reply.calls)
    assert max(len(msgspec.json.encode(call)) for call in reply.calls) < 110_000


@pytest.mark.finding("R2")
@pytest.mark.parametrize("name", BAD)
async def test_arguments_of_an_approver_that_cannot_be_stored_fail_loudly(name: str) -> None:
    args, why = BAD[name]

    @tool
    def speak(word: str) -> str:
        """Speak."""
        raise AssertionError("it was run")

    async def decide(question: Approval) -> Allow:
        return Allow(args=args)

    async with retinue.open(approver=decide) as r:
        result = await r.run(main({"main": [call("speak", word="x")]}, tools=[speak]), "go")
    assert (result.status, why in result.final_response) == ("failed", True)
    assert result.final_response.startswith("the approver answered with arguments that cannot be used: ")


@pytest.mark.finding("R2")
async def test_a_function_that_raises_stop_iteration_fails_like_any_other() -> None:
    @tool(tier="observe")
    def first(words: list[str]) -> str:
        """Return the first word."""
        return next(iter(words))

    async with retinue.open() as r:
        script = {"main": [call("first", words=[]), {"text": "{{last_result}}"}]}
        result = await r.run(main(script, tools=[first]), "go")
    assert result.final_response == "RuntimeError: function raised StopIteration"


class TrueHooks:
    """Hooks that answer as an approver must not: neither None nor a text."""

    async def before_tool(self, name: str, args: Mapping[str, Any], /) -> Any:
        return True

    async def after_tool(self, name: str, args: Mapping[str, Any], text: str, success: bool, /) -> None: ...


@pytest.mark.finding("R2", "S8")
async def test_a_hook_that_returns_something_else_refuses_the_call() -> None:
    async with retinue.open() as r:
        script = {"main": [call("glob", pattern="*"), {"text": "{{last_result}}"}]}
        result = await r.run(main(script, tools=["glob"], hooks=TrueHooks()), "go")
    assert result.final_response == "the hook before glob returned bool, neither None nor a text: nothing was run"
