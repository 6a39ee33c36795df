"""Replies of real provider SDKs, over a real connection, as our model port has them."""

from __future__ import annotations

import json

import pytest

from retinue.core.messages import AssistantTurn, Call, Thought, ToolSpec, ToolTurn, UserTurn
from retinue.core.usage import Usage
from retinue.models.providers import CUT_SHORT
from tests.models import streams
from tests.models.kit import ADD, CHAT, CLAUDE, GPT, ask, request, serving
from tests.models.server import KEY, Answer

SAID = {
    CLAUDE: streams.anthropic(streams.text("Hel", "lo")),
    CHAT: streams.chat(content=["Hel", "lo"]),
    GPT: streams.responses(streams.message("Hel", "lo")),
}
CALLED = {
    CLAUDE: streams.anthropic(
        streams.text("Two."),
        streams.tool("c1", "add", '{"a"', ": 1}"),
        streams.tool("c2", "add", '{"a": 2}'),
        stop="tool_use",
    ),
    CHAT: streams.chat(
        content=["Two."],
        calls=[("c1", "add", ['{"a"', ": 1}"]), ("c2", "add", ['{"a": 2}'])],
        finish="tool_calls",
    ),
    GPT: streams.responses(
        streams.message("Two."),
        streams.function("c1", "add", '{"a"', ": 1}"),
        streams.function("c2", "add", '{"a": 2}'),
    ),
}


@pytest.mark.parametrize("name", [CLAUDE, CHAT, GPT])
async def test_text_streams(name: str) -> None:
    async with serving(Answer(SAID[name])) as server:
        reply, heard = await ask(name)
    assert heard.pieces == [("text", "Hel"), ("text", "lo")]
    assert (reply.text, reply.calls, reply.refused) == ("Hello", (), False)
    assert reply.usage == Usage(10, 7)
    [asked] = server.requests
    assert KEY in (asked.headers.get("x-api-key"), asked.headers.get("authorization", "").removeprefix("Bearer "))
    assert "Be brief." in json.dumps(asked.body) and "hello" in json.dumps(asked.body)


@pytest.mark.parametrize("name", [CLAUDE, CHAT, GPT])
async def test_calls_in_parallel_and_their_results(name: str) -> None:
    thread = [UserTurn("add"), AssistantTurn("Two.", (Call("c1", "add", {"a": 1}), Call("c2", "add", {"a": 2})))]
    async with serving(Answer(CALLED[name]), Answer(SAID[name])) as server:
        reply, _ = await ask(name, request(tools=[ADD]))
        assert reply.text == "Two."
        assert reply.calls == thread[1].calls  # type: ignore[union-attr]
        results = [ToolTurn("c1", "add", "one"), ToolTurn("c2", "add", "no two", success=False)]
        await ask(name, request(*thread, *results, tools=[ADD]))
    first, second = (asked.body for asked in server.requests)
    assert '"add"' in json.dumps(first["tools"]) and '"integer"' in json.dumps(first["tools"])
    sent = json.dumps(second)
    for part in ("c1", "c2", "one", "no two"):
        assert part in sent
    if name == CLAUDE:
        results = second["messages"][-1]["content"]
        assert [(part["tool_use_id"], part.get("is_error", False)) for part in results] == [("c1", False), ("c2", True)]


async def test_a_tool_that_says_nothing_is_no_empty_block() -> None:
    calls = tuple(Call(f"c{n}", "add", {}) for n in range(3))
    results = (ToolTurn("c0", "add", ""), ToolTurn("c1", "add", " \n"), ToolTurn("c2", "add", "", success=False))
    async with serving(Answer(SAID[CLAUDE])) as server:
        await ask(CLAUDE, request(UserTurn("add"), AssistantTurn("", calls), *results, tools=[ADD]))
    sent = server.requests[0].body["messages"][-1]["content"]
    assert [(part["content"][0]["text"], part["is_error"]) for part in sent] == [
        ("(no output)", False), ("(no output)", False), ("(it failed, and said nothing)", True)
    ]  # fmt: skip


async def test_thinking_keeps_its_signature_over_turns() -> None:
    blocks = (streams.thinking("hm", "sig=="), streams.redacted("blob"), streams.tool("c1", "add", '{"a": 1}'))
    async with serving(Answer(streams.anthropic(*blocks, stop="tool_use")), streams.said("3")) as server:
        reply, heard = await ask(CLAUDE, request(tools=[ADD]))
        assert heard.of("thinking") == ["hm"]
        assert reply.thoughts == (
            Thought("hm", "thinking", "sig==", "", "anthropic"),
            Thought("", "redacted_thinking", "blob", "redacted_thinking", "anthropic"),
        )
        answer = AssistantTurn(reply.text, reply.calls, reply.thoughts)
        await ask(CLAUDE, request(UserTurn("add"), answer, ToolTurn("c1", "add", "1"), tools=[ADD]))
    sent = server.requests[1].body["messages"][1]["content"]
    assert [part["type"] for part in sent] == ["thinking", "redacted_thinking", "tool_use"]
    assert (sent[0]["thinking"], sent[0]["signature"], sent[1]["data"]) == ("hm", "sig==", "blob")


async def test_encrypted_reasoning_goes_back_to_openai() -> None:
    items = (streams.reasoning("rs_1", "enc==", "hm"), streams.function("c1", "add", '{"a": 1}'))
    async with serving(Answer(streams.responses(*items)), Answer(SAID[GPT])) as server:
        reply, heard = await ask(GPT, request(tools=[ADD]))
        assert heard.of("thinking") == ["hm"]
        assert reply.thoughts == (Thought("hm", "thinking", "enc==", "rs_1", "openai"),)
        answer = AssistantTurn(reply.text, reply.calls, reply.thoughts)
        await ask(GPT, request(UserTurn("add"), answer, ToolTurn("c1", "add", "1"), tools=[ADD]))
    [sent] = [item for item in server.requests[1].body["input"] if item.get("type") == "reasoning"]
    assert (sent["id"], sent["encrypted_content"]) == ("rs_1", "enc==")
    assert server.requests[0].body["store"] is False
    assert "reasoning.encrypted_content" in server.requests[0].body["include"]


async def test_reasoning_that_only_the_server_has_is_not_named_again() -> None:
    """We let nothing be stored there, so a name without its content would be an error."""
    answer = AssistantTurn("ok", (), (Thought("hm", "thinking", "", "rs_1", "openai"),))
    async with serving(Answer(SAID[GPT])) as server:
        await ask(GPT, request(UserTurn("a"), answer, UserTurn("b")))
    sent = json.dumps(server.requests[0].body["input"])
    assert "rs_1" not in sent and "hm" not in sent


async def test_thoughts_of_another_provider_stay_behind() -> None:
    answer = AssistantTurn("ok", (), (Thought("secret", "thinking", "sig==", "", "anthropic"),))
    async with serving(Answer(SAID[CHAT])) as server:
        await ask(CHAT, request(UserTurn("a"), answer, UserTurn("b")))
    assert "secret" not in json.dumps(server.requests[0].body)
    assert "sig==" not in json.dumps(server.requests[0].body)


async def test_usage_counts_the_cache() -> None:
    claude = {"input_tokens": 10, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20}
    gpt = {
        "input_tokens": 130, "input_tokens_details": {"cached_tokens": 100},
        "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 137,
    }  # fmt: skip
    chat = {
        "prompt_tokens": 130, "completion_tokens": 7, "total_tokens": 137,
        "prompt_tokens_details": {"cached_tokens": 100},
    }  # fmt: skip
    answers = (
        streams.said("a", usage=claude),
        Answer(streams.responses(streams.message("a"), usage=gpt)),
        Answer(streams.chat(content=["a"], usage=chat)),
    )
    async with serving(*answers) as server:
        spent = [(await ask(name))[0].usage for name in (CLAUDE, GPT, CHAT)]
    assert spent == [Usage(130, 7, 100, 20), Usage(130, 7, 100, 0), Usage(130, 7, 100, 0)]
    assert "cache_control" in json.dumps(server.requests[0].body)


async def test_refusals() -> None:
    answers = (
        streams.said("I will not.", stop="refusal"),
        Answer(streams.anthropic(stop="refusal")),
        Answer(streams.chat(refused="I cannot.")),
        Answer(streams.chat(content=["x"], finish="content_filter")),
        Answer(streams.responses(streams.message("I must not.", refused=True))),
    )
    async with serving(*answers):
        replies = [(await ask(name))[0] for name in (CLAUDE, CLAUDE, CHAT, CHAT, GPT)]
    assert [(reply.text, reply.refused) for reply in replies] == [
        ("I will not.", True),
        ("", True),
        ("I cannot.", True),
        ("x", True),
        ("I must not.", True),
    ]


@pytest.mark.parametrize("args", ['{"a": 1', "[1]", '"a"', "nope"])
async def test_arguments_that_are_no_object_are_told_to_the_model(args: str) -> None:
    answers = (
        Answer(streams.anthropic(streams.tool("c1", "add", args), stop="tool_use")),
        Answer(streams.chat(calls=[("c1", "add", [args])], finish="tool_calls")),
        Answer(streams.responses(streams.function("c1", "add", args))),
    )
    async with serving(*answers):
        for name in (CLAUDE, CHAT, GPT):
            [call] = (await ask(name, request(tools=[ADD])))[0].calls
            assert "not a JSON object" in call.problem
            assert call.args == {"INVALID_JSON": args}


@pytest.mark.parametrize("pieces", [(), ('{"a": 1',), ('{"a": 1}',)])
async def test_a_call_at_the_token_limit_never_runs(pieces: tuple[str, ...]) -> None:
    """Even when what came happens to be whole: nobody knows what was to follow."""
    blocks = (streams.tool("c0", "add", '{"a": 0}'), streams.tool("c1", "add", *pieces))
    async with serving(Answer(streams.anthropic(*blocks, stop="max_tokens"))):
        first, last = (await ask(CLAUDE, request(tools=[ADD])))[0].calls
    assert (first.args, first.problem) == ({"a": 0}, "")
    assert "token limit" in last.problem


async def test_openai_at_the_token_limit() -> None:
    answers = (
        Answer(streams.responses(streams.message("Hel"), status="incomplete")),
        Answer(streams.responses(streams.function("c1", "add", '{"a"'), status="incomplete")),
        Answer(streams.chat(calls=[("c1", "add", ['{"a"'])], finish="length")),
    )
    async with serving(*answers):
        assert (await ask(GPT))[0].text == f"Hel\n{CUT_SHORT}"  # nobody takes it for the whole
        for name in (GPT, CHAT):
            [call] = (await ask(name, request(tools=[ADD])))[0].calls
            assert "token limit" in call.problem


async def test_no_arguments_are_an_empty_object() -> None:
    async with serving(Answer(streams.anthropic(streams.tool("c1", "add"), stop="tool_use"))):
        assert (await ask(CLAUDE, request(tools=[ADD])))[0].calls == (Call("c1", "add", {}),)


@pytest.mark.parametrize("name", SAID)
async def test_schemas_go_out_as_they_are(name: str) -> None:
    """No strict mode that a provider's library finds fitting changes what a tool takes."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 1, "description": "how many"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    async with serving(Answer(SAID[name])) as server:
        await ask(name, request(tools=[ToolSpec("add", "Adds.", schema)]))
    [sent] = server.requests[0].body["tools"]
    sent = sent.get("function", sent)
    assert sent.get("parameters", sent.get("input_schema")) == schema
    assert not sent.get("strict")
