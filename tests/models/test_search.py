"""web_search at the provider: offered where it can be bound to the allowed hosts, seen as events, kept for later."""

from __future__ import annotations

from typing import Any

import retinue
from retinue import Event, Profile, Result
from retinue.build.models import use_cassette
from retinue.core.events import Message, ToolCall, ToolResult, Warned
from retinue.core.messages import AssistantTurn
from retinue.core.usage import Usage
from retinue.log.threads import fold_thread
from retinue.models.cassettes import Cassette
from tests.models import streams
from tests.models.kit import CHAT, CLAUDE, GPT, serving
from tests.models.server import Answer
from tests.supervisor.tree.kit import bodies

FOUND = ("Release notes", "https://docs.a.com/notes")


async def run(model: str, *tools: str, network: list[str]) -> tuple[Result[Any], list[Event]]:
    async with retinue.open(mode="yes", network=network) as r:
        started = await r.spawn(Profile("main", "You look.", model=model, tools=tools or ["web_search", "glob"]), "go")
        return await started.result(), [event async for event in started.events()]


async def test_anthropics_search_is_seen_and_its_results_go_back_to_it() -> None:
    blocks = [
        streams.thinking("look", "s1"),
        *streams.searched("srvtoolu_1", "what is new", FOUND),
        streams.thinking("seen", "s2"),
        streams.text("Let me see."),
        streams.tool("c1", "glob", '{"pattern": "*"}'),
    ]
    async with serving(Answer(streams.anthropic(*blocks, stop="tool_use")), streams.said("All is new.")) as server:
        result, events = await run(CLAUDE, network=["*.a.com", "b.org"])
    assert result.final_response == "All is new."
    searched, _ = bodies(events, ToolCall)
    assert (searched.name, searched.args, searched.tier) == ("web_search", {"query": "what is new"}, "provider")
    assert bodies(events, ToolResult)[0].text == "Release notes https://docs.a.com/notes"
    first, second = server.requests
    [offered] = [tool for tool in first.body["tools"] if tool["name"] == "web_search"]
    assert (offered["type"].startswith("web_search_"), offered["allowed_domains"]) == (True, ["a.com", "b.org"])
    blocks_again = second.body["messages"][1]["content"]
    sent = {block["type"]: block for block in blocks_again}
    kinds = ["thinking", "server_tool_use", "web_search_tool_result", "thinking", "text", "tool_use"]
    assert [block["type"] for block in blocks_again] == kinds
    assert sent["web_search_tool_result"]["content"][0]["encrypted_content"] == "Eo8B=="
    kept = next(turn for turn in fold_thread(events, 0) if isinstance(turn, AssistantTurn)).natives[0]
    assert (kept.origin, kept.args) == ("anthropic", {"query": "what is new"})
    assert kept.content[0]["encrypted_content"] == "Eo8B=="
    assert [body.text for body in bodies(events, Message)] == ["Let me see.", "All is new."]


async def test_a_provider_that_pauses_while_it_searches_is_asked_to_go_on() -> None:
    """Asked anew it would only search, and cost, the same again."""
    paused = streams.anthropic(*streams.searched("srvtoolu_1", "what is new", FOUND), stop="pause_turn")
    async with serving(Answer(paused), streams.said("All is new.")) as server:
        result, events = await run(CLAUDE, network=["*"])
    assert (result.status, result.final_response, len(server.requests)) == ("done", "All is new.", 2)
    assert result.usage == Usage(20, 14)
    assert len({asked.headers["idempotency-key"] for asked in server.requests}) == 2
    last = server.requests[1].body["messages"][-1]
    assert (last["role"], last["content"][0]["type"]) == ("assistant", "server_tool_use")
    assert [(body.name, body.tier) for body in bodies(events, ToolCall)] == [("web_search", "provider")]


async def test_a_search_that_failed_says_so_and_the_run_goes_on() -> None:
    blocks = [*streams.searched("srvtoolu_1", "x", error="max_uses_exceeded"), streams.text("I do not know.")]
    async with serving(Answer(streams.anthropic(*blocks))):
        result, events = await run(CLAUDE, network=["*"])
    assert result.status == "done"
    [told] = bodies(events, ToolResult)
    assert (told.success, told.text) == (False, "failed: max_uses_exceeded")


async def test_openais_search_is_seen_with_its_sources() -> None:
    items = (streams.web_search_call("ws_1", "what is new", "https://docs.a.com/notes"), streams.message("All."))
    async with serving(Answer(streams.responses(*items))) as server:
        result, events = await run(GPT, network=["docs.a.com"])
    assert result.final_response == "All."
    assert bodies(events, ToolCall)[0].args["query"] == "what is new"
    assert bodies(events, ToolResult)[0].text == "https://docs.a.com/notes"
    [offered] = [tool for tool in server.requests[0].body["tools"] if tool["type"] == "web_search"]
    assert offered["filters"] == {"allowed_domains": ["docs.a.com"]}


async def test_where_it_cannot_be_it_is_not_offered_and_who_named_it_is_told() -> None:
    for model, answer, network, says in (
        (CHAT, Answer(streams.chat(content=["ok"])), ["a.com"], "the provider of this model has no search"),
        (CLAUDE, streams.said("ok"), [], "no host may be fetched"),
    ):
        async with serving(answer) as server:
            result, events = await run(model, "web_search", "glob", network=network)
        assert result.status == "done"
        assert "web_search" not in str(server.requests[0].body["tools"])
        [warned] = bodies(events, Warned)
        assert (warned.code, says in warned.text) == ("lacks_tools", True)


async def test_a_cassette_has_the_searches_that_were_recorded() -> None:
    blocks = [*streams.searched("srvtoolu_1", "what is new", FOUND), streams.text("All is new.")]
    recorded = Cassette([], "all", str)
    async with serving(Answer(streams.anthropic(*blocks))):
        with use_cassette(recorded):
            await run(CLAUDE, network=["a.com"])
    played = Cassette(recorded.list_kept(), "none", str)
    with use_cassette(played):
        result, events = await run(CLAUDE, network=["a.com"])
    assert (result.final_response, played.mismatches) == ("All is new.", [])
    assert [body.text for body in bodies(events, ToolResult)] == ["Release notes https://docs.a.com/notes"]
