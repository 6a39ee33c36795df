"""Tests of the scope of an answer: a call, a run, a tool, the project, everything that waits; and with edited
arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Allow, Approval, Context, Deny, Profile, tool
from retinue.core import secrets
from retinue.core.context import NOT_AS_ASKED
from retinue.core.events import ApprovalAsked, ApprovalDecided, ToolCall, ToolResult, Warned
from retinue.core.messages import Call
from retinue.supervisor.approvals import _derive_rule
from tests.control.loopback.kit import serve_supervisor
from tests.supervisor.approvals.test_pending import WAIT, Pages, decided, pages, waiting
from tests.supervisor.tree.kit import bodies, call, main, spawn

KIDS = spawn({"task": "a", "subagent_type": "kid"}, {"task": "b", "subagent_type": "kid"})


def family(made: Pages) -> dict[str, Any]:
    """A primary and two children; each child asks for two at once and then for one more."""
    return {"main": [KIDS, {"text": "end"}], "kid": [pages("one", "two"), pages("three"), {"text": "paged"}]}


@pytest.mark.requirement("P17", "CODEY-40")
async def test_yes_to_this_run_is_for_this_tool_and_run_and_for_what_waits() -> None:
    made = Pages()
    kid = Profile("kid", tools=[made.tool])
    async with retinue.open(wait_approvals=WAIT, profiles=[kid], allow=["spawn_subagents"]) as r:
        run = await r.spawn(main(family(made), tools=["spawn_subagents", made.tool]), "go")
        four = await waiting(r, 4)
        mine = next(q for q in four if q.run == 1)
        assert r.control.approvals.answer(mine.id, Allow("run"), by="user") == "taken"
        assert {q.run for q in r.control.approvals.pending()} == {2}
        for question in r.control.approvals.pending():
            r.control.approvals.answer(question.id, Allow(), by="user")
        [last] = await waiting(r, 1)
        assert (last.run, last.args) == (2, {"who": "three"})
        r.control.approvals.answer(last.id, Deny(), by="user")
        await run.result()
        events = await r.control.log.read(run.tree)
    first, *rest = bodies(events, ApprovalDecided, run=1)
    assert (first.by, first.scope) == ("user", "run")
    assert [d.by for d in rest] == ["rule: page in this run, said by user"] * 2
    assert len(bodies(events, ApprovalAsked, run=1)) == 2


@pytest.mark.requirement("P17")
async def test_yes_to_this_tool_is_for_the_tree_and_ends_with_it() -> None:
    made = Pages()
    kid = Profile("kid", tools=[made.tool])
    async with retinue.open(wait_approvals=WAIT, profiles=[kid], allow=["spawn_subagents"]) as r:
        run = await r.spawn(main(family(made), tools=["spawn_subagents", made.tool]), "go")
        four = await waiting(r, 4)
        assert r.control.approvals.answer(four[0].id, Allow("tool"), by="user") == "taken"
        assert r.control.approvals.pending() == []
        assert all(r.control.approvals.answer(q.id, Deny(), by="user") == "stale" for q in four)
        await run.result()
        assert len(made.made) == 6
        again = await r.spawn(main({"main": [pages("x"), {"text": "y"}]}, tools=[made.tool]), "go")
        await waiting(r, 1)  # another tree knows nothing of it
        await again.cancel()


@pytest.mark.requirement("CODEY-40")
@pytest.mark.parametrize("decision", [Deny("stop it", all_pending_of_run=True), Allow(all_pending_of_run=True)])
async def test_one_answer_for_all_that_a_run_asks_now(decision: Allow | Deny) -> None:
    made = Pages()
    kid = Profile("kid", tools=[made.tool])
    async with retinue.open(wait_approvals=WAIT, profiles=[kid], allow=["spawn_subagents"]) as r:
        run = await r.spawn(main(family(made), tools=["spawn_subagents", made.tool]), "go")
        four = await waiting(r, 4)
        mine = next(q for q in four if q.run == 2)
        assert r.control.approvals.answer(mine.id, decision, by="user") == "taken"
        assert [q.run for q in r.control.approvals.pending()] == [1, 1]
        [later] = [q for q in await waiting(r, 3) if q.run == 2]  # what it asks next is asked
        assert later.args == {"who": "three"}
        both = [d for d in await decided(r, run) if d.approval_id in {q.id for q in four}]
        await run.cancel()
    assert [(d.by, d.scope, d.allowed) for d in both] == [
        ("user", "call", isinstance(decision, Allow)), ("user", "pending", isinstance(decision, Allow))
    ]  # fmt: skip
    assert {d.reason for d in both} == {"" if isinstance(decision, Allow) else "stop it"}


YAML = "# my rules\napprovals:\n  # careful\n  mode: ask\n  allow:\n    - shell(ls*)  # fine\nmax_turns: 9\n"


async def test_always_writes_the_shown_rule_and_it_holds_at_once_and_next_time(tmp_path: Path) -> None:
    config = tmp_path / "retinue.yaml"
    config.write_text(YAML)
    shell = [call("shell", command=command) for command in ("echo 'hi'  there", "echo hi there", "echo other")]
    asked: list[Approval] = []

    async def approver(question: Approval) -> Allow | Deny:
        asked.append(question)
        return Allow("project") if len(asked) == 1 else Deny()

    for _ in range(2):
        async with retinue.open(project=tmp_path, config=config, approver=approver) as r:
            run = await r.spawn(main({"main": [*shell, {"text": "x"}]}), "go")
            await run.result()
            written = await decided(r, run)
    assert [q.args["command"] for q in asked] == ["echo 'hi'  there", "echo other", "echo other"]
    assert asked[0].rule == "shell(echo hi there)"
    assert [d.by for d in written] == ["rule: shell(echo hi there)"] * 2 + ["function"]
    assert config.read_text() == YAML.replace("# fine\n", '# fine\n    - "shell(echo hi there)"\n')


async def test_always_holds_for_what_waits_in_every_tree(tmp_path: Path) -> None:
    made = Pages()
    config = tmp_path / "retinue.yaml"
    async with retinue.open(project=tmp_path, config=None, wait_approvals=WAIT) as r:  # without a file nothing is kept
        run = await r.spawn(main({"main": [pages("x"), {"text": "y"}]}, tools=[made.tool]), "go")
        [question] = await waiting(r, 1)
        r.control.approvals.answer(question.id, Allow("project"), by="user")
        result = await run.result()
        assert [d.scope for d in await decided(r, run)] == ["call"]
        assert "holds for this call only" in (result.warning or "")
    config.write_text("")
    async with retinue.open(project=tmp_path, config=config, wait_approvals=WAIT) as r:
        runs = [await r.spawn(main({"main": [pages("x"), {"text": "y"}]}, tools=[made.tool]), "go") for _ in range(3)]
        questions = await waiting(r, 3)
        r.control.approvals.answer(questions[0].id, Allow("project"), by="user")
        results = [await run.result() for run in runs]
        assert {result.status for result in results} == {"done"}
        assert [(await decided(r, run))[0].by for run in runs] == ["user", "rule: page", "rule: page"]
    assert len(made.made) == 4


async def test_a_rule_that_cannot_be_written_is_a_yes_to_this_call_and_a_warning(tmp_path: Path) -> None:
    made = Pages()
    config = tmp_path / "retinue.yaml"
    config.write_text("max_turns: 9\n")
    async with retinue.open(project=tmp_path, config=config, wait_approvals=WAIT) as r:
        config.write_text("approvals: 3\n")
        run = await r.spawn(main({"main": [pages("x"), pages("y"), {"text": "y"}]}, tools=[made.tool]), "go")
        for _ in range(2):
            [question] = await waiting(r, 1)
            assert r.control.approvals.answer(question.id, Allow("project"), by="user") == "taken"
        await run.result()
        warned = bodies(await r.control.log.read(run.tree), Warned)
    assert len(warned) == 2 and "by hand: page" in warned[0].text
    assert config.read_text() == "approvals: 3\n"
    assert made.made == ["x", "y"]


async def test_a_yes_to_a_changed_call_makes_no_rule_of_what_was_asked(tmp_path: Path) -> None:
    made = Pages()
    config = tmp_path / "retinue.yaml"
    config.write_text("max_turns: 9\n")
    async with retinue.open(project=tmp_path, config=config, wait_approvals=WAIT) as r:
        run = await r.spawn(main({"main": [pages("boss"), pages("boss"), {"text": "x"}]}, tools=[made.tool]), "go")
        [question] = await waiting(r, 1)
        assert r.control.approvals.answer(question.id, Allow("project", {"who": "bert"}), by="user") == "taken"
        [again] = await waiting(r, 1)
        assert r.control.approvals.answer(again.id, Deny(), by="user") == "taken"
        await run.result()
        [warned] = bodies(await r.control.log.read(run.tree), Warned)
    assert "its arguments were changed" in warned.text
    assert (config.read_text(), made.made) == ("max_turns: 9\n", ["bert"])


async def test_no_rule_is_made_of_what_it_would_not_say(tmp_path: Path) -> None:
    """No rule comes from a nested command, a file outside the project, or a call that an `ask` rule covers."""
    kid = Profile("kid", tools=["write"])
    config = tmp_path / "retinue.yaml"
    config.write_text("approvals: {ask: [page], allow: [subagent_kid]}\n")
    seen: list[tuple[str, str]] = []

    async def approver(question: Approval) -> Allow:
        seen.append((question.tool, question.rule))
        return Allow()

    made = Pages()
    script = {
        "main": [
            call("shell", command="echo $(cat)"), pages("x"), call("write", path="b.txt", content="x"),
            call("subagent_kid", task="t"), {"text": "x"},
        ],
        "kid": [call("write", path="b.txt", content="x"), {"text": "y"}],
    }  # fmt: skip
    async with retinue.open(project=tmp_path, config=config, approver=approver) as r:
        await r.run(main(script, tools=["shell", "write", made.tool, kid]), "go")
    assert seen == [("shell", ""), ("page", ""), ("write", "write(b.txt)"), ("write", "")]


async def test_no_rule_is_kept_for_a_command_with_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the secret replaced, `[secret]` in the rule would stand for any one of these letters."""
    monkeypatch.setattr(secrets, "known", ("planted-0123456789",))
    config = tmp_path / "retinue.yaml"
    config.write_text("max_turns: 9\n")
    command = """echo --token plan'ted-0123456789'"""  # what a model says has no secret in one piece
    async with retinue.open(project=tmp_path, config=config, wait_approvals=WAIT) as r:
        run = await r.spawn(main({"main": [call("shell", command=command), "end"]}, tools=["shell"]), "go")
        [question] = await waiting(r, 1)
        assert question.rule == ""
        r.control.approvals.answer(question.id, Allow("project"), by="user")
        await run.result()
        assert [body.scope for body in await decided(r, run)] == ["call"]
    assert config.read_text() == "max_turns: 9\n"


@pytest.mark.parametrize("secret", ["planted-0123456789", "planted*0123456789"])
async def test_no_rule_has_a_secret_of_a_program_s_call(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "known", (secret,))
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": ["end"]})
        for command, has_rule in ((f"echo '{secret}'", False), ("echo 'plain'", True)):
            rule = _derive_rule(run, Call("c", "shell", {"command": command}), str(tmp_path), "")
            assert bool(rule) is has_rule
        await run.wait_for_result()


@pytest.mark.requirement("CODEY-40")
async def test_edited_arguments_are_what_runs_and_what_is_logged() -> None:
    made = Pages()
    async with retinue.open(wait_approvals=WAIT, deny=["page(who=boss)"]) as r:
        script = {"main": [pages("anna"), {"text": "{{last_result}}"}]}
        run = await r.spawn(main(script, tools=[made.tool]), "go")
        [question] = await waiting(r, 1)
        assert r.control.approvals.answer(question.id, Allow(args={"who": "bert"}), by="user") == "taken"
        result = await run.result()
        events = await r.control.log.read(run.tree)
        [asked], [said], [made_call] = (bodies(events, kind) for kind in (ApprovalAsked, ApprovalDecided, ToolCall))
        assert (asked.args, said.args, made_call.args) == ({"who": "anna"}, {"who": "bert"}, {"who": "anna"})
        assert made.made == ["bert"]
        told = '[The user changed the arguments of this call to {"who":"bert"}]\npaged bert'
        assert result.final_response == bodies(events, ToolResult)[0].text == told
        wrong = await r.spawn(main(script, tools=[made.tool]), "go")
        [question] = await waiting(r, 1)
        r.control.approvals.answer(question.id, Allow(args={"whom": "bert"}), by="user")
        said_of_it = (await wrong.result()).final_response
        assert said_of_it.startswith('[The user changed the arguments of this call to {"whom":"bert"}]\n')
        assert "who" in said_of_it.splitlines()[1]  # else the model would wonder whose mistake that is
        again = await r.spawn(main(script, tools=[made.tool]), "go")
        [question] = await waiting(r, 1)
        r.control.approvals.answer(question.id, Allow(args={"who": "boss"}), by="user")
        assert "forbids the edited call" in (await again.result()).final_response
    assert made.made == ["bert"]


@pytest.mark.parametrize("level", [True, 1.0])
async def test_an_edit_of_the_type_alone_is_told_to_the_model(level: object) -> None:
    @tool
    def tune(level: Any) -> str:
        """Tunes."""
        return repr(level)

    async def approver(question: Approval) -> Allow:
        return Allow(args={"level": level})

    async with retinue.open(approver=approver, mode="ask") as r:
        run = await r.spawn(main({"main": [call("tune", level=1), "end"]}, tools=[tune]), "x")
        await run.result()
        [result] = bodies(await r.control.log.read(run.tree), ToolResult)
    told = f'[The user changed the arguments of this call to {{"level":{json.dumps(level)}}}]'
    assert result.text == f"{told}\n{level!r}"


async def test_arguments_that_come_back_as_they_were_are_no_edit() -> None:
    async def agent(task: str, ctx: Context) -> str:
        return str(await ctx.approve("deploy", target="staging"))

    async def approver(question: Approval) -> Allow:
        return Allow(args={"target": "staging"})

    async with retinue.open(approver=approver) as r:
        run = await r.spawn(Profile("agent", call=agent), "x")
        assert (await run.result()).final_response == "True"
        [result] = bodies(await r.control.log.read(run.tree), ToolResult)
    assert (result.text, result.success) == ("allowed", True)


async def test_a_callable_does_not_take_an_edited_yes_for_its_own() -> None:
    async def agent(task: str, ctx: Context) -> str:
        return str(await ctx.approve("deploy", target="staging"))

    async def approver(question: Approval) -> Allow:
        return Allow(args={"target": "nowhere"})

    async with retinue.open(approver=approver) as r:
        run = await r.spawn(Profile("agent", call=agent), "x")
        assert (await run.result()).final_response == "False"
        [result] = bodies(await r.control.log.read(run.tree), ToolResult)
    changed = '[The user changed the arguments of this call to {"target":"nowhere"}]'
    assert (result.text, result.success) == (f"{changed}\n{NOT_AS_ASKED}", False)
