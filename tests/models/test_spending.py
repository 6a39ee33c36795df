"""Tests of the cost of real models, and of the reservation that no reply exceeds."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import ConfigError, Limits, Profile
from retinue.core.errors import ModelError
from retinue.core.events import UsageReported, Warned
from retinue.core.limits import OUTPUT_TOKENS
from retinue.core.messages import Call, Reply, Request
from retinue.core.usage import Usage
from tests.models import streams
from tests.models.kit import CHAT, CLAUDE, GPT, ask, serving
from tests.models.server import Answer
from tests.models.test_providers import SAID
from tests.models.test_trees import run
from tests.supervisor.tree.kit import bodies

PRICED = "anthropic:claude-opus-4-6"
KEYS = {CLAUDE: "max_tokens", CHAT: "max_completion_tokens", GPT: "max_output_tokens"}


@pytest.mark.parametrize("name", KEYS)
async def test_no_reply_is_longer_than_was_reserved(name: str) -> None:
    async with serving(Answer(SAID[name])) as server:
        await ask(name)
    assert server.requests[0].body[KEYS[name]] == OUTPUT_TOKENS


async def test_a_real_model_has_a_cost_and_a_cost_limit_holds() -> None:
    profile = Profile("main", model=PRICED, tools=[])
    async with serving(streams.said("Hello.")), retinue.open() as r:
        result = await r.run(profile, "go", limits=Limits(cost=Decimal("0.01")))
        none = await r.run(profile, "go", limits=Limits(cost=Decimal(0)))
    assert (result.error_details, result.final_response) == (None, "Hello.")
    assert result.cost is not None and 0 < result.cost < Decimal("0.01")
    assert none.status == "limited"
    async with serving(), retinue.open() as r:
        with pytest.raises(ConfigError, match="the price of model 'anthropic:claude-x' is not known"):
            await r.run(Profile("main", model=CLAUDE), "go", limits=Limits(cost=Decimal(1)))


@pytest.mark.parametrize("limits", [Limits(tokens=1500), Limits(cost=Decimal("0.006"))])
async def test_a_call_is_made_once_more_only_while_the_budget_lasts(limits: Limits) -> None:
    """A cut stream has its cost: six attempts must not be six calls over the budget."""
    cut = Answer(streams.anthropic(streams.text("I was"), usage={"input_tokens": 999})[:4], ending="cut")
    async with serving(*[cut] * 20) as server:
        result, events = await run(Profile("main", model=PRICED, tools=[], limits=limits))
    assert (result.status, len(server.requests)) == ("limited", 2)
    assert [body.usage for body in bodies(events, UsageReported)] == [Usage(1998, 2)]
    assert result.error_details is not None and "of the tree is spent (" in result.error_details


@pytest.mark.finding("R3")
async def test_the_message_of_a_spent_budget_says_when_a_part_is_estimated() -> None:
    """Also when a later attempt of the call, or a later call, was reported in full."""
    cut = Answer(streams.anthropic(streams.text(WORDS), usage={"input_tokens": 999})[:5], ending="cut")
    async with serving(*[cut] * 20):
        result, events = await run(Profile("main", model=PRICED, tools=[], limits=Limits(tokens=1500)))
    [reported] = bodies(events, UsageReported)
    assert reported.estimated
    used = f"({reported.usage.total_tokens:,} used, part of it estimated)"
    assert result.error_details == f"Run 'main' stopped: the budget of 1,500 tokens of the tree is spent {used}"
    async with serving(cut, streams.said("ok", usage={"input_tokens": 50_000})):
        result, events = await run(Profile("main", model=PRICED, tools=[], limits=Limits(cost=Decimal("0.1"))))
    [reported], [warned] = (
        bodies(events, UsageReported),
        [one for one in bodies(events, Warned) if one.code == "budget"],
    )
    assert (result.status, reported.estimated) == ("done", True)
    assert warned.text == f"the budget of $0.1 of the tree was exceeded: ${reported.cost} used, part of it estimated"


async def test_what_attempts_spent_is_counted_once_whoever_waits_beside_them() -> None:
    """The second attempt of one child waits for the room that the others hold, like a call of its own."""
    spawning = streams.called(
        "c1", "spawn_subagents", {"tasks": [{"task": f"{n}", "subagent_type": "kid"} for n in "ab"]}
    )
    cut = Answer(streams.anthropic(streams.text("I was"), usage={"input_tokens": 20_000})[:4], ending="cut")
    said = streams.said("ok", usage={"input_tokens": 20_000})
    kids = [Profile("kid", tools=[])]
    async with serving(spawning, cut, cut, *[said] * 5) as server:
        main = Profile("main", tools=["spawn_subagents"], limits=Limits(tokens=50_000))
        result, events = await run(main, profiles=kids, model=CLAUDE)
    spent = sum(body.usage.total_tokens for body in bodies(events, UsageReported))
    assert spent == result.total_usage.total_tokens < 50_000 + 20_008
    assert (result.status, len(server.requests)) == ("limited", 4)


async def test_nothing_of_what_an_attempt_spent_comes_back_when_the_next_one_breaks() -> None:
    class Breaking:
        async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
            if request.again is None:
                raise AssertionError("a run with a budget pays for each attempt")
            await request.again(Usage(700, 0))
            raise ZeroDivisionError

    async with retinue.open() as r:
        run = await r.spawn(Profile("main", model=Breaking(), tools=[]), "go", limits=Limits(tokens=10_000))
        account = r.control.trees[run.tree].runs[0].account
        assert (await run.result()).status == "failed"
    assert account is not None and (account.spent.tokens, account.in_flight) == (700, 0)


WORDS = "a word and another " * 100


def without_usage() -> list[bytes]:
    """Return a reply as a gateway sends it that reports no usage."""
    return [event for event in streams.chat(content=[WORDS]) if b"prompt_tokens" not in event]


@pytest.mark.finding("R3")
async def test_the_usage_that_a_gateway_does_not_report_is_estimated() -> None:
    async with serving(Answer(without_usage())):
        reply, _ = await ask(CHAT)
    assert reply.estimated and reply.usage.input_tokens > 0
    assert reply.usage.output_tokens >= len(WORDS) // 5
    async with serving(Answer(streams.chat(content=[WORDS]))):
        reply, _ = await ask(CHAT)
    assert (reply.estimated, reply.usage.total_tokens) == (False, 17)


@pytest.mark.finding("R3")
async def test_a_budget_holds_where_no_usage_is_reported() -> None:
    async with serving(Answer(without_usage())), retinue.open() as r:
        result = await r.run(Profile("main", model=CHAT, tools=[]), "go", limits=Limits(tokens=100_000))
        events = await r.control.log.read(result.tree)
    [reported] = bodies(events, UsageReported)
    assert reported.estimated and result.usage == reported.usage and result.usage.output_tokens >= len(WORDS) // 5


@pytest.mark.finding("R3")
async def test_a_stream_that_is_cut_counts_an_estimate_of_what_came() -> None:
    async with serving(Answer(streams.chat(content=[WORDS], finish=None))):
        with pytest.raises(ModelError) as raised:
            await ask(CHAT)
    assert raised.value.estimated and raised.value.usage.output_tokens >= len(WORDS) // 5


class Reporting:
    """A model class of a user's own that replies as it is told to."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        return self.reply


@pytest.mark.finding("R3", "U6")
@pytest.mark.parametrize(
    ("reply", "estimated", "usage"),
    [
        (Reply(WORDS), True, Usage(2, len(WORDS) // 4)),
        (Reply(WORDS, usage=Usage(0, 0)), True, Usage(2, len(WORDS) // 4)),
        (Reply(WORDS, usage=Usage(30, 0)), True, Usage(30, len(WORDS) // 4)),
        (Reply(WORDS, usage=Usage(0, 5)), True, Usage(2, 5)),
        (Reply(WORDS, usage=Usage(30, 5)), False, Usage(30, 5)),
        (Reply(WORDS, counted=True), False, Usage(0, 0)),
    ],
)
async def test_the_usage_that_an_own_model_does_not_report_is_estimated(
    reply: Reply, estimated: bool, usage: Usage
) -> None:
    profile = Profile("main", "Work", model=Reporting(reply), tools=[])
    async with retinue.open() as r:
        result = await r.run(profile, "go", limits=Limits(tokens=100_000))
        [reported] = bodies(await r.control.log.read(result.tree), UsageReported)
    assert (reported.estimated, reported.usage, result.usage) == (estimated, usage, usage)


@pytest.mark.finding("R3")
async def test_a_budget_ends_the_run_of_an_own_model_that_reports_nothing() -> None:
    class Endless:
        calls = 0

        async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
            self.calls += 1
            return Reply(WORDS, (Call(f"c{self.calls}", "list_agents", {}),))

    model = Endless()
    profile = Profile("main", model=model, tools=["list_agents"])
    async with retinue.open() as r:
        result = await r.run(profile, "go", limits=Limits(tokens=3000))
    assert (result.status, result.usage.total_tokens > 3000, model.calls < 10) == ("limited", True, True)


@pytest.mark.finding("R3")
@pytest.mark.parametrize("given", [-1000, "10", float("nan"), None])
async def test_counts_that_are_no_numbers_of_tokens_are_estimated(given: Any) -> None:
    """A negative count would give the budget back; a log could not be read with the others."""
    async with retinue.open() as r:
        result = await r.run(Profile("main", model=Counting(given), tools=[]), "go " * 100)
    assert 70 <= result.usage.input_tokens <= 100 and result.usage.output_tokens == 7


@pytest.mark.finding("R3", "R8")
async def test_a_gateway_that_reports_fractions_leaves_a_log_that_can_be_read(tmp_path: Path) -> None:
    where = {"project": tmp_path, "path": tmp_path / ".retinue"}
    async with retinue.open(**where) as r:
        run = await r.spawn(Profile("main", model=Counting(10.5), tools=[]), "go")
        result = await run.result()
    async with retinue.open(**where) as r:
        [body] = bodies(await r.control.log.read(run.tree), UsageReported)
    assert body.usage == result.usage == Usage(11, 7)


class Counting:
    """A model that reports input tokens in its own way."""

    def __init__(self, given: Any) -> None:
        self.given = given

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        return Reply("well", usage=Usage(self.given, 7))
