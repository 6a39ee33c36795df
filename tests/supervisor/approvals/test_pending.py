"""Tests of open questions, which wait for the first answer, whoever gives it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Allow, Approval, Deny, Limits, Profile, Retinue, tool
from retinue.core.approvals import digest_of
from retinue.core.control import RunHandle
from retinue.core.events import ApprovalAsked, ApprovalDecided, ToolCall, ToolResult, TurnStarted
from retinue.testing import ManualClock, deny_all
from tests.supervisor.tree.kit import bodies, call, main, spawn

WAIT = 600.0


class Pages:
    """A tool that needs approval, and the arguments of its calls."""

    def __init__(self) -> None:
        self.made: list[str] = []

        @tool(tier="confirm")
        def page(who: str) -> str:
            """Page somebody."""
            self.made.append(who)
            return f"paged {who}"

        self.tool = page


def pages(*names: str) -> dict[str, Any]:
    return {"tools": [{"name": "page", "args": {"who": name}} for name in names]}


async def waiting(r: Retinue, count: int) -> list[Approval]:
    """The questions, once there are so many."""
    async with asyncio.timeout(100):
        while len(r.control.approvals.pending()) < count:
            await asyncio.sleep(0)
    return r.control.approvals.pending()


async def decided(r: Retinue, run: RunHandle) -> list[ApprovalDecided]:
    return bodies(await r.control.log.read(run.tree), ApprovalDecided)


@pytest.mark.requirement("CODEY-27", "CODEY-28", "P12")
async def test_questions_are_listed_in_order_and_answered_by_id() -> None:
    made = Pages()
    kid = Profile("kid", tools=[made.tool])
    script = {
        "main": [pages("anna"), call("subagent_kid", task="page bert"), {"text": "end"}],
        "kid": [pages("bert", "carl", "dora"), {"text": "paged"}],
    }
    async with retinue.open(wait_approvals=WAIT, profiles=[kid]) as r:
        run = await r.spawn(main(script, tools=[made.tool, kid]), "go")
        [first] = await waiting(r, 1)
        assert (first.run, first.label, first.args) == (0, None, {"who": "anna"})
        assert r.control.approvals.answer(first.id, Allow(), by="user") == "taken"
        three = await waiting(r, 3)
        assert [(q.run, q.label, q.args["who"]) for q in three] == [
            (1, "page bert", name) for name in ("bert", "carl", "dora")
        ]
        assert r.control.approvals.pending(run.tree) == three and r.control.approvals.pending("other") == []
        assert r.control.approvals.answer(three[1].id, Allow(), by="user") == "taken"
        assert [q.args["who"] for q in r.control.approvals.pending()] == ["bert", "dora"]
        assert r.control.approvals.answer(three[2].id, Deny("asleep"), by="user") == "taken"
        assert r.control.approvals.answer(three[0].id, Allow(), by="user") == "taken"
        await run.result()
        results = bodies(await r.control.log.read(run.tree), ToolResult, run=1)
    assert sorted(made.made) == ["anna", "bert", "carl"]
    texts = {result.call_id: result.text for result in results}
    assert texts[three[2].call_id] == "The user denied this call: asleep"


@pytest.mark.requirement("CODEY-1", "CODEY-5", "CODEY-36")
async def test_a_child_s_edit_bubbles_up_runs_on_yes_and_its_result_goes_to_the_child(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old\n")
    fixer = Profile("fixer", workspace="shared")
    edit = call("edit", path="a.txt", old_string="old", new_string="new")
    script = {"main": [call("subagent_fixer", task="fix"), {"text": "end"}], "fixer": [edit, {"text": "fixed"}]}
    async with retinue.open(wait_approvals=WAIT, project=tmp_path, profiles=[fixer], allow=["subagent_*"]) as r:
        run = await r.spawn(main(script), "go")
        [question] = await waiting(r, 1)
        assert (question.label, question.run, question.tool) == ("fix", 1, "edit")
        assert "-old" in question.preview and "+new" in question.preview
        assert (tmp_path / "a.txt").read_text() == "old\n"
        assert r.control.approvals.answer(question.id, Allow(), by="user") == "taken"
        await run.result()
        [result] = bodies(await r.control.log.read(run.tree), ToolResult, run=1)
    assert (tmp_path / "a.txt").read_text() == "new\n"
    assert (result.text, result.success) == ("edited a.txt", True)


@pytest.mark.requirement("P14", "P16")
async def test_an_answer_takes_effect_once_and_late_or_foreign_ones_are_told() -> None:
    made = Pages()
    async with retinue.open(wait_approvals=WAIT) as r:
        run = await r.spawn(main({"main": [pages("anna"), pages("bert"), {"text": "x"}]}, tools=[made.tool]), "go")
        answer = r.control.approvals.answer
        [question] = await waiting(r, 1)
        assert answer(question.call_id, Allow(), by="peer") == "unknown"  # what a model or peer calls it is nothing
        assert answer(f"{run.tree}/0/{question.call_id}", Allow(), by="peer") == "unknown"
        assert answer(question.id, Allow(), by="user") == "taken"
        assert answer(question.id, Deny(), by="user") == "stale"
        [following] = await waiting(r, 1)
        assert following.id != question.id
        assert answer(question.id, Allow(), by="user") == "stale"
        await run.cancel()
        assert answer(following.id, Allow(), by="user") == "stale"  # told to stop, though not yet stopped
        result = await run.result()
        assert answer(following.id, Allow(), by="user") == "stale"
        assert r.control.approvals.pending() == []
    assert (result.status, made.made) == ("cancelled", ["anna"])


async def test_two_answer_at_the_same_moment_and_exactly_one_wins() -> None:
    made = Pages()
    names = [f"n{number}" for number in range(200)]
    won: list[str] = []
    async with retinue.open(wait_approvals=WAIT, limits=Limits(turns=None)) as r:
        run = await r.spawn(main({"main": [*map(pages, names), {"text": "x"}]}, tools=[made.tool]), "go")
        for number in range(200):
            [question] = await waiting(r, 1)
            start = asyncio.Event()

            async def one(decision: Any, by: str, start: asyncio.Event = start, q: Approval = question) -> str:
                await start.wait()
                return r.control.approvals.answer(q.id, decision, by=by, digest=q.digest)

            ways: list[tuple[Allow | Deny, str]] = [(Allow(), "first"), (Deny("second"), "second")]
            tasks = [asyncio.create_task(one(*way)) for way in (ways if number % 2 else reversed(ways))]
            await asyncio.sleep(0)
            start.set()
            answers = await asyncio.gather(*tasks)
            assert sorted(answers) == ["stale", "taken"]
            won.append("first" if (answers[0] == "taken") == bool(number % 2) else "second")
        await run.result()
        written = await decided(r, run)
    assert [d.by for d in written] == won and len(won) == 200
    assert made.made == [name for name, who in zip(names, won, strict=True) if who == "first"]


async def test_the_approver_and_another_answer_the_same_question() -> None:
    made, begun, cancelled = Pages(), asyncio.Event(), asyncio.Event()

    async def hangs(question: Approval) -> Allow:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Allow()

    async with retinue.open(approver=hangs) as r:
        run = await r.spawn(main({"main": [pages("anna"), pages("bert"), {"text": "x"}]}, tools=[made.tool]), "go")
        [question] = await waiting(r, 1)
        await begun.wait()
        assert r.control.approvals.answer(question.id, Allow(), by="user") == "taken"
        await cancelled.wait()
        begun.clear()
        cancelled.clear()
        await begun.wait()
        await run.cancel()
        result = await run.result()
        await cancelled.wait()
        assert (await decided(r, run))[0].by == "user"
    assert (result.status, made.made) == ("cancelled", ["anna"])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_500_at_once_from_100_runs() -> None:
    made = Pages()
    names = [f"n{number}" for number in range(5)]
    kid = Profile("kid", tools=[made.tool])
    orders = [spawn(*({"task": f"t{n} {k}", "subagent_type": "kid"} for k in range(25))) for n in range(4)]
    script = {"main": [{"tools": [order["tools"][0] for order in orders]}, {"text": "end"}], "*": [pages(*names), "ok"]}
    everybody = Limits(concurrent=None)
    async with retinue.open(wait_approvals=WAIT, profiles=[kid], allow=["spawn_subagents"], limits=everybody) as r:
        run = await r.spawn(main(script, tools=["spawn_subagents", made.tool]), "go")
        questions = await waiting(r, 500)
        assert len({q.id for q in questions}) == len({q.digest for q in questions}) == 500
        assert len({q.run for q in questions}) == 100

        async def person(order: list[Approval], decision: Callable[[Approval], Allow | Deny], by: str) -> list[str]:
            answers = []
            for question in order:
                answers.append(
                    r.control.approvals.answer(question.id, decision(question), by=by, digest=question.digest)
                )
                await asyncio.sleep(0)
            return answers

        left, right = await asyncio.gather(
            person(questions, lambda q: Allow(), "left"),
            person(questions[::-1], lambda q: Deny("right"), "right"),
        )
        result = await run.result()
        written = [d for d in await decided(r, run) if not d.by.startswith("rule")]
    assert sorted(left + right) == ["stale"] * 500 + ["taken"] * 500
    assert all({one, other} == {"taken", "stale"} for one, other in zip(left, right[::-1], strict=True))
    assert len(written) == 500 and len({d.approval_id for d in written}) == 500
    assert len(made.made) == left.count("taken") == sum(d.allowed for d in written)
    assert result.status == "done" and {child.status for child in result.children} == {"done"}


@pytest.mark.requirement("P15")
async def test_the_answered_call_goes_on_alone() -> None:
    made, looked = Pages(), list[str]()

    @tool(tier="observe")
    def look(at: str) -> str:
        """Look."""
        looked.append(at)
        return at

    both = {"tools": [*pages("anna", "bert")["tools"], {"name": "look", "args": {"at": "it"}}]}
    async with retinue.open(wait_approvals=WAIT) as r:
        run = await r.spawn(main({"main": [both, {"text": "x"}]}, tools=[made.tool, look]), "go")
        first, second = await waiting(r, 2)
        r.control.approvals.answer(second.id, Allow(), by="user")
        while not made.made:
            await asyncio.sleep(0)
        assert (made.made, looked, r.control.approvals.pending()) == (["bert"], ["it"], [first])
        r.control.approvals.answer(first.id, Allow(), by="user")
        await run.result()
        events = await r.control.log.read(run.tree)
    assert (made.made, looked) == (["bert", "anna"], ["it"])
    assert len(bodies(events, ToolCall)) == len(bodies(events, ToolResult)) == 3


@pytest.mark.requirement("P13")
async def test_a_question_outlives_the_turns_of_the_parent() -> None:
    made = Pages()
    kid = Profile("kid", tools=[made.tool])
    script = {
        "main": [
            call("subagent_kid", task="k", background=True),
            call("list_agents"),
            call("list_agents"),
            "on my way",
        ],
        "kid": [pages("anna"), {"text": "paged"}],
    }
    async with retinue.open(wait_approvals=WAIT, allow=["subagent_*"]) as r:
        run = await r.spawn(main(script, tools=["list_agents", kid]), "go")
        [question] = await waiting(r, 1)
        while len(bodies(await r.control.log.read(run.tree), TurnStarted, run=0)) < 4:
            await asyncio.sleep(0)
        assert r.control.approvals.pending() == [question]
        assert r.control.approvals.answer(question.id, Allow(), by="user") == "taken"
        result = await run.result()
    assert (made.made, result.children[0].status) == (["anna"], "done")


@pytest.mark.requirement("SDK-33", "P11", "P18")
async def test_without_anybody_a_question_waits_only_when_told_to() -> None:
    made, clock = Pages(), ManualClock()
    kid = Profile("kid", tools=[made.tool])
    script = {"main": [call("subagent_kid", task="k"), {"text": "{{last_result}}"}], "kid": [pages("anna"), "x"]}
    details = "Subagent 'kid' requested confirmation, which is not supported in nested runs"
    async with retinue.open(allow=["subagent_*"]) as r:
        at_once = await r.run(main(script, tools=[kid]), "go")
    assert (at_once.final_response, at_once.children[0].error_details) == ("Subagent requires confirmation", details)
    async with retinue.open(allow=["subagent_*"], wait_approvals=30, clock=clock) as r:
        run = await r.spawn(main(script, tools=[kid]), "go")
        await waiting(r, 1)
        await clock.advance(29)
        [question] = r.control.approvals.pending()
        await clock.advance(1)
        result = await run.result()
        assert r.control.approvals.answer(question.id, Allow(), by="user") == "stale"
        last = (await decided(r, run))[-1]
    assert (result.final_response, result.children[0].error_details) == ("Subagent requires confirmation", details)
    assert (last.allowed, last.by, last.reason) == (False, "expiry", "nobody was there to answer within 30 s")
    assert made.made == []


@pytest.mark.requirement("P11")
async def test_a_question_expires_to_a_no_and_the_run_goes_on() -> None:
    made, clock = Pages(), ManualClock()

    async def hangs(question: Approval) -> Allow:
        await asyncio.Event().wait()
        return Allow()

    async with retinue.open(approver=hangs, approval_timeout=60, clock=clock) as r:
        run = await r.spawn(main({"main": [pages("anna"), {"text": "{{last_result}}"}]}, tools=[made.tool]), "go")
        await waiting(r, 1)
        await clock.advance(60)
        result = await run.result()
        [body] = await decided(r, run)
    assert (result.status, result.final_response) == ("done", "The user denied this call: nobody answered within 60 s")
    assert (body.allowed, body.by, made.made) == (False, "expiry", [])


@pytest.mark.requirement("P18")
async def test_deciding_costs_an_agent_nothing_of_its_limits() -> None:
    made, clock = Pages(), ManualClock()
    async with retinue.open(wait_approvals=10_000, clock=clock, limits=Limits(seconds=5, turns=2)) as r:
        run = await r.spawn(main({"main": [pages("anna"), {"text": "in time"}]}, tools=[made.tool]), "go")
        [question] = await waiting(r, 1)
        await clock.advance(3600)
        r.control.approvals.answer(question.id, Allow(), by="user")
        result = await run.result()
    assert (result.status, result.total_turns, result.usage.total_tokens) == ("done", 2, 0)


async def test_an_answer_to_a_changed_action_is_refused() -> None:
    made = Pages()

    async def sly(question: Approval) -> Allow:
        question.args["who"] = "somebody else"
        return Allow()

    async with retinue.open(wait_approvals=WAIT) as r:
        run = await r.spawn(main({"main": [pages("anna"), {"text": "x"}]}, tools=[made.tool]), "go")
        [question] = await waiting(r, 1)
        other = digest_of(run.tree, run=0, call_id=question.call_id, tool="page", args={"who": "bert"})
        assert r.control.approvals.answer(question.id, Allow(), by="user", digest=other) == "stale"
        assert r.control.approvals.pending() == [question]
        assert r.control.approvals.answer(question.id, Allow(), by="user", digest=question.digest) == "taken"
        await run.result()
        [asked] = bodies(await r.control.log.read(run.tree), ApprovalAsked)
    assert (asked.digest, made.made) == (question.digest, ["anna"])
    async with retinue.open(approver=sly) as r:
        result = await r.run(main({"main": [pages("anna"), {"text": "{{last_result}}"}]}, tools=[made.tool]), "go")
    assert result.final_response == "paged anna"  # what an approver does to its copy changes nothing
    assert made.made == ["anna", "anna"]


@pytest.mark.parametrize("decision", [Allow("always"), Allow(args=[1])])  # type: ignore[arg-type]
async def test_an_answer_that_is_none_fails_the_run(decision: Any) -> None:
    made = Pages()

    async def approver(question: Approval) -> Any:
        return decision

    async with retinue.open(approver=approver) as r:
        result = await r.run(main({"main": [pages("anna"), {"text": "{{last_result}}"}]}, tools=[made.tool]), "go")
    assert result.status == "failed"
    assert result.final_response.startswith("the approver answered with")
    assert made.made == []


@pytest.mark.requirement("SDK-33")
async def test_a_denial_is_a_tool_result_and_the_run_goes_on() -> None:
    made = Pages()
    async with retinue.open(approver=deny_all) as r:
        run = await r.spawn(main({"main": [pages("anna"), {"text": "went on"}]}, tools=[made.tool]), "go")
        assert (await run.result()).final_response == "went on"
        assert [(d.by, d.scope) for d in await decided(r, run)] == [("function", "call")]
