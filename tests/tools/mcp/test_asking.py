"""Tests of approvals for tools of MCP servers, of the scope of a yes, and of questions from servers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Allow, Approval, Deny, Profile, tool
from retinue.core.approvals import Decision, QuestionClosed
from retinue.core.context import Context
from retinue.core.errors import ToolError
from retinue.core.events import ApprovalAsked, ApprovalDecided
from retinue.core.messages import Call
from retinue.core.ports import Outcome
from retinue.core.rules import parse_rule
from tests.gates import until
from tests.supervisor.tree.kit import bodies
from tests.tools.mcp.kit import call, main, offered, program, quick_program, results, run, turns

READ = call("mcp__odd__read", path="notes.txt")
MORPH = call("mcp__odd__morph")
SETTLE = call("settle")


def settling(opened: list[Any]) -> list[Any]:
    """Tools for a primary of the odd server, with one that waits until we have heard of the change."""

    @tool(tier="observe")
    async def settle() -> str:
        """Waits."""
        found = opened[-1].control.servers.find("mcp__odd__read")["mcp__odd__read"]
        await until(lambda: "sends" in found.spec.description)
        return "settled"

    return ["mcp__odd", settle]


class Person:
    """An approver that answers by the tool's name, and records the questions."""

    def __init__(self, answers: Callable[[Approval], Decision]) -> None:
        self.asked: list[Approval] = []
        self._answers = answers

    async def __call__(self, question: Approval) -> Decision:
        self.asked.append(question)
        return self._answers(question)


def odd_server() -> dict[str, Any]:
    """A server whose tools change."""
    return {"odd": quick_program("changing")}


async def test_the_primary_asks_and_its_children_do_not(tmp_path: Path) -> None:
    bad = {"bad": program("bad", "lame", str(tmp_path))}
    script = {
        "main": [{"tools": [call("mcp__bad__one"), call("subagent_child", task="go")]}, {"text": "done"}],
        "child": turns(call("mcp__bad__one")),
    }
    person = Person(lambda _: Allow())
    fields = {"tools": ["mcp__bad__one", Profile("child", "You are a child.", tools=["mcp__bad__one"])]}
    await run(bad, script, mode="ask", approver=person, fields=fields)
    assert [(asked.run, asked.tool) for asked in person.asked] == [(0, "mcp__bad__one")]  # spawning does not ask
    # A rule can name them, by pattern too; what forbids wins.
    person.asked.clear()
    _, events = await run(bad, script, ask=["mcp__bad__*"], approver=person, fields=fields)
    assert {asked.run for asked in person.asked} == {0, 1}
    for rule in ("mcp__*", "mcp__bad"):
        _, events = await run(bad, script, deny=[rule], allow=["mcp__bad__one"], fields=fields)
        denied = [body.text for body in results(events) if body.name == "mcp__bad__one"]
        assert denied == [f"The user denied this call: the rule {rule} forbids it"] * 2
    _, events = await run(bad, script, deny=["mcp__ba", "mcp__bad__on"], fields=fields)
    assert all(body.success for body in results(events))


async def test_what_a_server_says_of_a_tool_is_no_reason_not_to_ask() -> None:
    person = Person(lambda _: Deny("no"))
    _, events = await run(
        {"calm": quick_program("calm")}, turns(call("mcp__calm__add", a=1, b=1)), mode="ask", approver=person
    )
    assert [asked.tool for asked in person.asked] == ["mcp__calm__add"]
    assert results(events)[0].text == "The user denied this call: no"


@pytest.mark.finding("M8")
async def test_a_yes_for_the_tool_is_asked_again_when_the_tool_has_changed() -> None:
    person, opened = Person(lambda asked: Allow(scope="tool")), list[Any]()
    script = turns(READ, READ, MORPH, SETTLE, READ, READ)
    given: dict[str, Any] = {"opened": opened, "fields": {"tools": settling(opened)}}
    _, events = await run(odd_server(), script, mode="ask", approver=person, **given)
    assert [asked.tool.rpartition("__")[2] for asked in person.asked] == ["read", "morph", "read"]
    texts = [body.text for body in results(events)]
    assert texts == ["read notes.txt", "read notes.txt", "changed", "settled", "sent notes.txt", "sent notes.txt"]
    assert person.asked[0].preview == ""
    preview = person.asked[2].preview
    assert preview.startswith(
        "It was allowed before, but its server describes it differently now.\n"
        "- Reads a file.\n+ Reads a file, and sends it away. [2J\n"
    )
    assert preview.endswith('\n\n{\n  "path": "notes.txt"\n}')


async def test_a_rule_for_the_project_holds_for_the_tool_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "retinue.yaml").write_text("model: scripted:none.yaml\n")
    opened: list[Any] = []
    given: dict[str, Any] = {"path": tmp_path / ".retinue", "config": tmp_path / "retinue.yaml", "mode": None}
    given |= {"opened": opened, "fields": {"tools": settling(opened)}}
    person = Person(lambda asked: Allow(scope="project") if "read" in asked.tool else Allow())
    await run(odd_server(), turns(READ, READ, MORPH, SETTLE, READ), approver=person, **given)
    rules = re.findall(r"mcp__odd__read@([0-9a-f]{32})", (tmp_path / "retinue.yaml").read_text())
    assert len(rules) == 2 and rules[0] != rules[1]
    assert [asked.tool for asked in person.asked] == ["mcp__odd__read", "mcp__odd__morph", "mcp__odd__read"]
    # Another process: both are known now, and what is not is asked about.
    person.asked.clear()
    await run(odd_server(), turns(READ, MORPH, SETTLE, READ), approver=person, **given)
    assert [asked.tool for asked in person.asked] == ["mcp__odd__morph"]
    (tmp_path / "retinue.yaml").write_text(f"approvals:\n  allow: [mcp__odd__read@{'0' * 32}]\n")
    person.asked.clear()
    await run(odd_server(), turns(READ), approver=person, **given)
    assert person.asked[0].preview.startswith("It was allowed before")
    assert "Its description: Reads a file." in person.asked[0].preview and "notes.txt" in person.asked[0].preview
    assert parse_rule(person.asked[0].rule).seal == rules[0]


async def test_a_yes_that_comes_after_the_tool_has_changed_is_none() -> None:
    """The question was about what the tool was when it was shown."""
    async with retinue.open(mode="ask", wait_approvals=60, mcp_servers=odd_server()) as r:
        first = await r.spawn(main({"main": turns(READ)}), "go")
        await until(lambda: r.control.approvals.pending(first.tree))
        [question] = r.control.approvals.pending(first.tree)
        other = await r.spawn(main({"main": turns(MORPH)}), "go")
        await until(lambda: r.control.approvals.pending(other.tree))
        seal = question.rule.partition("@")[2]
        r.control.approvals.answer(r.control.approvals.pending(other.tree)[0].id, Allow(), by="user")
        await other.result()
        found = r.control.servers.find("mcp__odd__read")["mcp__odd__read"]  # type: ignore[union-attr]
        await until(lambda: found.spec.seal != seal)
        r.control.approvals.answer(question.id, Allow(), by="user")
        events = [event async for event in first.events()]
    [result] = results(events)
    assert result.text == "The user denied this call: the call changed while it was being asked about"


async def test_descriptions_are_plain_words() -> None:
    _, events = await run(odd_server(), turns(MORPH, READ))
    assert offered(events)["mcp__odd__read"]["description"] == "Reads a file."
    servers = dict(odd_server())
    async with retinue.open(mode="yes", mcp_servers=servers) as r:
        await (await r.spawn(main({"main": turns(MORPH)}), "go")).result()
        found = r.control.servers.find("mcp__odd__read")["mcp__odd__read"]  # type: ignore[union-attr]
        await until(lambda: "sends" in found.spec.description)
        assert found.spec.description == "Reads a file, and sends it away. [2J"


@pytest.mark.parametrize(
    ("answer", "came"),
    [
        (Allow(args={"name": "Ann", "age": "41"}), "accept: name='Ann' age=41"),
        (Deny("not now"), "decline: None"),
    ],
)
async def test_a_servers_question_is_asked_in_the_tree(answer: Decision, came: str) -> None:
    person = Person(lambda _: answer)
    _, events = await run({"calm": quick_program("calm", timeout=60)}, turns(call("mcp__calm__ask")), approver=person)
    assert [body.text for body in results(events) if body.name == "mcp__calm__ask"] == [came]
    [asked] = person.asked
    assert (asked.tool, asked.args, asked.run, asked.rule) == ("mcp__calm", {"name": None, "age": 30}, 0, "")
    assert asked.preview == (
        "The MCP server 'calm' asks:\nWho is there?\nname (string, required) who you are\nage (integer) Age"
    )
    [shown], [decided] = bodies(events, ApprovalAsked), bodies(events, ApprovalDecided)
    assert shown.approval_id == decided.approval_id and decided.allowed == isinstance(answer, Allow)


async def test_a_servers_question_is_on_every_surface_and_closed_on_every_one() -> None:
    servers = {"calm": quick_program("calm", timeout=60)}
    async with retinue.open(wait_approvals=600, mcp_servers=servers, allow=["mcp__calm__ask"]) as r:
        watches = [r.control.watch_questions() for _ in range(3)]
        waiting = [asyncio.ensure_future(anext(watch)) for watch in watches]
        started = await r.spawn(main({"main": turns(call("mcp__calm__ask"))}), "go")
        asked = [await each for each in waiting]
        assert asked == [asked[0]] * 3 and isinstance(asked[0], Approval) and asked[0].tool == "mcp__calm"
        assert await r.control.answer(asked[0].id, Deny("no"), by="anna", surface="a test") == "taken"
        closed = [await anext(watch) for watch in watches]
        assert closed == [closed[0]] * 3 and isinstance(closed[0], QuestionClosed)
        assert (closed[0].by, closed[0].surface, closed[0].reason) == ("anna", "a test", "no")
        for watch in watches:
            await watch.aclose()
        await started.result()


async def test_a_form_is_asked_again_until_it_fits_and_nobody_is_no_answer() -> None:
    answers = iter([Allow(), Allow(args={"name": "Bo", "age": "many"}), Allow(args={"name": "Bo", "age": 7})])
    person = Person(lambda _: next(answers))
    _, events = await run({"calm": quick_program("calm")}, turns(call("mcp__calm__ask")), approver=person)
    assert "accept: name='Bo' age=7" in [body.text for body in results(events)]
    assert "That answer does not fit: 'name' is a required property." in person.asked[1].preview
    assert "That answer does not fit: age: 'many' is not of type 'integer'." in person.asked[2].preview
    # `yes` is no answer to what only a person knows, and a run does not end because of it.
    result, events = await run({"calm": quick_program("calm")}, turns(call("mcp__calm__ask")), mode="yes")
    assert result.status == "done" and "decline: None" in [body.text for body in results(events)]


async def test_a_call_whose_questions_are_declined_again_and_again_asks_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is written to the log, and a server can ask as fast as nobody answers."""
    monkeypatch.setattr("retinue.tools.mcp.calls.MAX_DECLINED", 100)
    _, events = await run({"odd": program("bad", "nags", str(tmp_path))}, turns(call("mcp__odd__one")))
    *questions, last = results(events)
    assert last.text == "decline"
    assert [question.text for question in questions] == ["Nobody could be asked."] * 100


async def test_an_older_server_asks_and_its_choice_of_a_model_is_refused(tmp_path: Path) -> None:
    person = Person(lambda _: Allow(args={"ok": "yes"}))
    script = turns(call("mcp__bad__one"))
    _, events = await run({"bad": program("bad", "asks", str(tmp_path))}, script, approver=person)
    said, model = json.loads(results(events)[-1].text)
    assert said == {"action": "accept", "content": {"ok": True}}
    assert model["message"] == "Sampling not supported"
    assert person.asked[0].path == "/main"


async def test_who_is_asked_when_a_server_does_not_say_for_which_call(tmp_path: Path) -> None:
    child = Profile("child", "You are a child.", tools=["mcp__bad__one"])
    script = {
        "main": [{"tools": [call("subagent_child", task="one"), call("subagent_child", task="two")]}, {"text": "done"}],
        "child": turns(call("mcp__bad__one")),
    }
    person = Person(lambda _: Deny())
    server = program("bad", "asks", str(tmp_path), env={"CALLS": "2"})
    await run({"bad": server}, script, approver=person, fields={"tools": ["mcp__bad__one", child]})
    [asked] = person.asked
    assert asked.label in ("one", "two")
    assert asked.preview.endswith(
        "It does not say for which of these calls: mcp__bad__one of /main/child-1, mcp__bad__one of /main/child-2."
    )


async def test_a_call_that_was_allowed_runs_only_as_what_it_was() -> None:
    """The tool changes between the yes and the call: then nothing is sent."""

    async def agent(task: str, ctx: Context) -> str:
        tools = r.control.servers.find("mcp__odd")  # type: ignore[union-attr]
        found, spec = tools["mcp__odd__read"], tools["mcp__odd__read"].spec
        allowed = Call("one", spec.name, {"path": "x"})
        assert await ctx._link.begin(allowed, spec, "") == Allow()
        morph = Call("two", "mcp__odd__morph", {})
        await ctx._link.begin(morph, tools["mcp__odd__morph"].spec, "")
        ctx._link.finish(morph, await ctx._link.run_host_tool(morph), 0)
        await until(lambda: found.spec.seal != spec.seal)
        with pytest.raises(ToolError) as raised:
            await ctx._link.run_host_tool(allowed)
        ctx._link.finish(allowed, Outcome(str(raised.value), success=False), 0)
        return str(raised.value)

    async with retinue.open(mode="yes", mcp_servers=odd_server()) as r:
        result = await r.run(Profile("main", call=agent, tools=["mcp__odd"]), "go")
    assert result.final_response == (
        "mcp__odd__read was changed by its server after this call was allowed, so it was not run. Call it again."
    )


@pytest.mark.parametrize("name", ["mcp__it__ask", "mcp__it__one"])
async def test_a_question_goes_with_the_run_that_waits_for_its_answer(name: str, tmp_path: Path) -> None:
    server = quick_program("calm") if name == "mcp__it__ask" else program("bad", "asks", str(tmp_path))
    async with retinue.open(mode="yes", wait_approvals=60, mcp_servers={"it": server}) as r:
        going = await r.spawn(main({"main": turns(call(name))}), "go")
        await until(lambda: r.control.approvals.pending(going.tree))
        [question] = r.control.approvals.pending(going.tree)
        assert await going.cancel()
        assert (await going.result()).status == "cancelled"
        await until(lambda: not r.control.approvals.pending())
        assert r.control.approvals.answer(question.id, Allow(), by="user") == "stale"
