"""Tests of hostile peers: what a peer reports about its run settles nothing outside this run."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from retinue import Context, tool
from retinue.core import secrets
from retinue.core.approvals import Allow, Approval, Decision, Deny
from retinue.core.caller import ClientRequest
from retinue.core.control import ResumeOverrides
from retinue.core.errors import ConfigError
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Body,
    Event,
    Gap,
    Message,
    RunEnded,
    RunSpawned,
    RunStarted,
    ToolCall,
    ToolResult,
    ToolStarted,
    Warned,
)
from retinue.core.limits import Limits
from retinue.core.ports import AttachedApprover
from retinue.core.profiles import Profile, Task
from retinue.core.rules import Rules, parse_rule
from retinue.log.activity import Activity, Entries
from retinue.log.blocks import Blocks
from retinue.log.questions import Questions
from retinue.log.runs import Runs
from retinue.log.threads import find_standing_answers, fold_interrupted_runs
from retinue.remote.port import STARTED, Capabilities, Peer, RemoteSpawned, Report, Undelivered
from retinue.supervisor.adoption import ELSEWHERE_SECONDS, MOST_QUESTIONS, TOO_MANY
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.a2a.options import ServerOptions
from retinue.surfaces.a2a.streams import ServedTask, StreamFold
from retinue.surfaces.printer.printer import describe_rule
from retinue.testing import ManualClock, scripted
from tests.gates import until
from tests.remote.adapters import SCRIPTED, make_supervisor
from tests.remote.scripted_peer import PeerRun, ScriptedPeer, ScriptedRun

ASK_PEER = {"tools": [{"name": "subagent_explorer", "args": {"task": "look"}}]}
THEIRS = ApprovalAsked("theirs", "c", "shell", {"command": "ls"})


def over(text: str = "over") -> RunEnded:
    return RunEnded("done", text, 0)


async def ask_once(run: PeerRun) -> None:
    """The script of a peer that asks for `shell` and ends."""
    run.say(RunStarted("theirs"))
    run.say(THEIRS)
    run.say(over((await run.answers.get()).__class__.__name__))


async def ask_silently(run: PeerRun) -> None:
    """The script of a peer that asks for `shell` and says nothing more."""
    run.say(RunStarted("theirs"))
    run.say(THEIRS)


def touch(file: Path) -> dict[str, Any]:
    return {"tools": [{"name": "shell", "args": {"command": f"touch {file}"}}]}


def make_approver(asked: list[Approval], *, at_peer: Decision, here: Decision) -> AttachedApprover:
    """Return an approver that gives one answer for run 1, which is at the peer, and another for our runs."""

    async def ask(question: Approval) -> Decision:
        asked.append(question)
        return at_peer if question.run == 1 else here

    return AttachedApprover(ask)


@pytest.fixture
def answers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted peer takes no answers: it says that somebody is asked there."""
    monkeypatch.setattr(ScriptedRun, "capabilities", Capabilities(send=True, replay=True))


async def events_after(supervisor: Supervisor, tree: str, kind: type[Body], count: int = 1) -> list[Event]:
    """Wait until the log of a tree has so many events of a kind; return all of it."""
    seen: list[Event] = []
    async with aclosing(supervisor.watch(tree)) as events:
        async for event in events:
            if isinstance(event, Event):
                seen.append(event)
                if sum(isinstance(each.body, kind) for each in seen) >= count:
                    break
    return seen


# Answers


@pytest.mark.requirement("P15", "P16")
@pytest.mark.parametrize("can_answer", [False, True])
@pytest.mark.parametrize("scope", ["run", "tool"])
async def test_an_answer_that_a_peer_reports_is_about_one_call_there_and_nobody_here_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str, can_answer: bool
) -> None:
    """After the tree has ended, a run of ours is continued, which reads all standing answers of the log."""
    monkeypatch.setattr(ScriptedRun, "capabilities", Capabilities(answer=can_answer))
    asked: list[Approval] = []

    async def script(run: PeerRun) -> None:
        run.say(RunStarted("theirs"))
        run.say(THEIRS)
        if can_answer:
            await until(lambda: len(asked) == 1)
        run.say(ApprovalDecided("theirs", "c", True, by="user", tool="shell", scope=scope, surface="terminal"))
        run.say(over())

    async def ask(question: Approval) -> Decision:
        asked.append(question)
        if question.run == 1:
            await asyncio.Event().wait()
        return Deny("no")

    agents = {"main": [ASK_PEER, {"tools": [{"name": "subagent_helper", "args": {"task": "go"}}]}, {"text": "end"}],
              "helper": [{"text": "ok"}]}  # fmt: skip
    model = scripted(agents)
    helper = Profile("helper", model=model, tools=["shell"])
    main = Profile("main", model=model, tools=["shell", SCRIPTED, helper])
    supervisor = make_supervisor(
        tmp_path, ScriptedPeer(script), mode="ask", profiles=[SCRIPTED, helper], approver=AttachedApprover(ask)
    )
    run = supervisor.spawner.spawn_primary(main, Task("go"))
    await run.join()
    [decided] = [e.body for e in await supervisor.log.read(run.ref.tree) if isinstance(e.body, ApprovalDecided)]
    assert (decided.by, decided.scope, decided.rule, decided.surface) == ("peer", "call", "", "")
    asked.clear()
    model = scripted({"helper": [touch(tmp_path / "made"), {"text": "end"}]})
    helper = Profile("helper", model=model, tools=["shell"])
    profiles = [Profile("main", model=model, tools=["shell", SCRIPTED, helper]), SCRIPTED, helper]
    again = await supervisor.continue_run(run.ref.tree, 2, "now touch", ResumeOverrides(profiles=profiles))
    await again.result()
    assert [question.tool for question in asked] == ["shell"]
    assert not (tmp_path / "made").exists()
    await supervisor.close()


@pytest.mark.requirement("P16")
async def test_standing_answers_of_a_log_do_not_come_from_runs_of_peers(tmp_path: Path) -> None:
    """Also in a log from before such answers were reduced to one call, and for answers that our person gave."""
    supervisor = make_supervisor(
        tmp_path, ScriptedPeer(ask_once), approver=make_approver([], at_peer=Deny(), here=Allow("run"))
    )
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await run.join()
    events = await supervisor.log.read(run.ref.tree)
    [decided] = [event.body for event in events if isinstance(event.body, ApprovalDecided)]
    assert decided.allowed and decided.scope == "run"
    assert list(find_standing_answers(events)) == []
    await supervisor.close()


@pytest.mark.requirement("P15", "P32")
async def test_a_yes_to_a_tool_of_a_peer_covers_no_tool_of_ours_and_the_other_way_round(tmp_path: Path) -> None:
    async def script(run: PeerRun) -> None:
        run.say(RunStarted("theirs"))
        run.say(RemoteSpawned(parent=STARTED, agent="below"), "below")
        for of in (STARTED, STARTED, "below"):
            run.say(THEIRS, of)
            await run.answers.get()
        run.say(over())

    asked: list[Approval] = []
    agents = {"main": [ASK_PEER, touch(tmp_path / "one"), touch(tmp_path / "two"), ASK_PEER, {"text": "end"}]}
    main = Profile("main", model=scripted(agents), tools=["shell", SCRIPTED])
    supervisor = make_supervisor(
        tmp_path,
        ScriptedPeer(script),
        mode="ask",
        profiles=[SCRIPTED],
        approver=make_approver(asked, at_peer=Allow("tool"), here=Allow("tool")),
    )
    run = supervisor.spawner.spawn_primary(main, Task("go"))
    await run.join()
    # Run 1 is asked about once, for the run below it too. Ours is asked about once. The next run at a peer asks anew.
    assert [question.run for question in asked] == [1, 0, 3]
    assert (tmp_path / "one").exists() and (tmp_path / "two").exists()
    by = [e.body.by for e in await supervisor.log.read(run.ref.tree) if isinstance(e.body, ApprovalDecided)]
    assert "rule: shell in run 1 and the runs below it, said by function" in by
    await supervisor.close()


async def test_no_rule_is_offered_for_a_tool_of_a_peer_and_none_is_written(tmp_path: Path) -> None:
    settings = tmp_path / "retinue.yaml"
    settings.write_text("")
    asked: list[Approval] = []
    supervisor = make_supervisor(
        tmp_path,
        ScriptedPeer(ask_once),
        mode="ask",
        approver=make_approver(asked, at_peer=Deny(), here=Allow("project")),
        rules_file=settings,
    )
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await run.join()
    [question] = asked
    assert question.rule == "" and "a remote agent asks" in describe_rule(question)
    assert settings.read_text() == ""
    assert "holds for this call only" in (run.result().warning or "")
    await supervisor.close()


@pytest.mark.requirement("P32")
@pytest.mark.parametrize(
    ("rules", "mode", "answer", "is_asked"),
    [
        (Rules(allow=(parse_rule("shell"),)), "ask", "Deny", True),  # a rule for our own shell
        (Rules(allow=(parse_rule("shell(ls*)"),)), "ask", "Deny", True),
        (Rules(deny=(parse_rule("shell(ls*)"),)), "ask", "Deny", False),
        (Rules(ask=(parse_rule("shell(ls*)"),)), "yes", "Deny", True),
        (Rules(), "yes", "Allow", False),  # no questions at all, for one run
    ],
)
async def test_rules_may_stop_a_call_at_a_peer_but_none_allows_it(
    tmp_path: Path, rules: Rules, mode: str, answer: str, is_asked: bool
) -> None:
    asked: list[Approval] = []
    approver = make_approver(asked, at_peer=Deny("no"), here=Deny("no"))
    supervisor = make_supervisor(tmp_path, ScriptedPeer(ask_once), mode=mode, rules=rules, approver=approver)
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await run.join()
    assert (run.result().final_response, bool(asked)) == (answer, is_asked)
    await supervisor.close()


@pytest.mark.parametrize("preview", ["", "- old\n+ new"])
async def test_a_question_says_that_its_call_runs_at_a_remote_agent(tmp_path: Path, preview: str) -> None:
    async def script(run: PeerRun) -> None:
        run.say(ApprovalAsked("theirs", "c", "shell", {"command": "ls"}, preview=preview))
        run.say(over(str(await run.answers.get())))

    asked: list[Approval] = []
    approver = make_approver(asked, at_peer=Deny(), here=Deny())
    supervisor = make_supervisor(tmp_path, ScriptedPeer(script), approver=approver)
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await run.join()
    mark, _, shown = asked[0].preview.partition("\n")
    assert mark == "[as the remote agent shows it, where it runs]"
    assert shown == (preview or '{\n  "command": "ls"\n}')
    await supervisor.close()


# Clocks


@pytest.mark.requirement("P21")
@pytest.mark.usefixtures("answers_itself")
async def test_a_decision_about_a_question_that_was_not_asked_moves_no_clock(tmp_path: Path) -> None:
    async def script(run: PeerRun) -> None:
        run.say(RunStarted("theirs"))
        run.say(ApprovalDecided("never asked", "c", True))
        run.say(THEIRS)
        run.say(ApprovalDecided("theirs", "c", True))
        run.say(Message("said"))

    clock = ManualClock()
    supervisor = make_supervisor(tmp_path, ScriptedPeer(script), clock=clock)
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look", timeout_seconds=60))
    events = await events_after(supervisor, run.ref.tree, Message)
    assert [event.kind for event in events if "approval" in event.kind] == ["approval.asked", "approval.decided"]
    await clock.advance(61)
    await run.join()
    assert run.view.status == "timed_out"
    await supervisor.close()


@pytest.mark.requirement("P21")
@pytest.mark.usefixtures("answers_itself")
async def test_a_peer_that_says_a_person_is_asked_stops_the_clocks_above_it_for_a_bounded_time(
    tmp_path: Path,
) -> None:
    async def script(run: PeerRun) -> None:
        run.say(RunStarted("theirs"))
        run.say(RemoteSpawned(parent=STARTED, agent="below"), "below")
        for number in range(3):
            run.say(ApprovalAsked(f"q{number}", "c", "shell", {}), "below")
            run.say(ApprovalAsked(f"q{number}", "c", "shell", {}))
        run.say(ApprovalDecided("q0", "c", True))

    clock = ManualClock()
    main = Profile("main", model=scripted({"main": [ASK_PEER]}), tools=[SCRIPTED], limits=Limits(stall=60))
    supervisor = make_supervisor(tmp_path, ScriptedPeer(script), mode="yes", profiles=[SCRIPTED], clock=clock)
    run = supervisor.spawner.spawn_primary(main, Task("go", timeout_seconds=60))
    await events_after(supervisor, run.ref.tree, ApprovalDecided)
    await clock.advance(ELSEWHERE_SECONDS - 1)
    assert run.view.status is None
    await clock.advance(62)
    await run.join()
    assert run.view.status == "timed_out"
    await supervisor.close()


@pytest.mark.usefixtures("answers_itself")
async def test_the_time_that_a_peer_may_stop_clocks_is_not_given_twice(tmp_path: Path) -> None:
    def ask(number: int) -> None:
        peer.runs[0].say(ApprovalAsked(f"q{number}", "c", "shell", {}))

    peer, clock = ScriptedPeer(ask_silently), ManualClock()
    supervisor = make_supervisor(tmp_path, peer, clock=clock)
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look", timeout_seconds=60))
    await events_after(supervisor, run.ref.tree, ApprovalAsked)
    await clock.advance(ELSEWHERE_SECONDS / 2)
    peer.runs[0].say(ApprovalDecided("theirs", "c", True))
    await events_after(supervisor, run.ref.tree, ApprovalDecided)
    await clock.advance(30)  # counts
    ask(1)
    await events_after(supervisor, run.ref.tree, ApprovalAsked, 2)
    await clock.advance(ELSEWHERE_SECONDS / 2 - 1)
    assert run.view.status is None
    ask(2)
    await events_after(supervisor, run.ref.tree, ApprovalAsked, 3)
    await clock.advance(32)
    await run.join()
    assert run.view.status == "timed_out"
    await supervisor.close()


@pytest.mark.usefixtures("answers_itself")
async def test_after_a_crash_a_claim_that_a_person_was_asked_has_stopped_no_clock(tmp_path: Path) -> None:
    """Nor does the clock of a run at a peer wait for the peer to say that it has started."""

    async def script(run: PeerRun) -> None:
        run.say(THEIRS)

    clock = ManualClock()
    main = Profile("main", model=scripted({"main": [ASK_PEER]}), tools=[SCRIPTED])
    peer = ScriptedPeer(script)
    supervisor = make_supervisor(tmp_path, peer, mode="yes", profiles=[SCRIPTED], clock=clock)
    run = supervisor.spawner.spawn_primary(main, Task("go"))
    await events_after(supervisor, run.ref.tree, ApprovalAsked)
    await clock.advance(50)
    peer.runs[0].say(Message("said"))
    events = await events_after(supervisor, run.ref.tree, Message)
    runs = fold_interrupted_runs(events, before={})
    assert (runs[0].seconds, runs[1].seconds) == (50, 50)
    await supervisor.close()


# Numbers and ids of our tree


async def test_a_peer_cannot_say_that_our_log_is_damaged(tmp_path: Path) -> None:
    async def script(run: PeerRun) -> None:
        run.say(Gap(1, "lost", code="damaged"))
        run.say(over())

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script), state=tmp_path / ".retinue")
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await run.join()
    events = await supervisor.log.read(run.ref.tree)
    assert [event.body for event in events if isinstance(event.body, Gap)] == [Gap(1, "lost")]
    again = await supervisor.continue_run(run.ref.tree, 0, "go on", ResumeOverrides(profiles=[SCRIPTED]))
    assert (await again.result()).status == "done"
    await supervisor.close()


@pytest.mark.parametrize(("said", "kept"), [
    (Gap(1, "lost: planted-0123456789"), Gap(1, "lost: [secret]")),
    (ToolStarted("planted-0123456789"), ToolStarted("[secret]")),
])  # fmt: skip
async def test_a_secret_that_a_peer_says_is_hidden(tmp_path: Path, said: Body, kept: Body) -> None:
    async def script(run: PeerRun) -> None:
        run.say(said)
        run.say(over())

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    secrets.hide_secret("planted-0123456789")
    try:
        run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
        await run.join()
    finally:
        secrets.forget_secret("planted-0123456789")
    events = await supervisor.log.read(run.ref.tree)
    assert [event.body for event in events if isinstance(event.body, type(said))] == [kept]
    await supervisor.close()


@pytest.mark.parametrize("gives", [(), (1,)])
async def test_a_result_at_a_peer_does_not_hide_the_answer_of_our_own_background_run(
    tmp_path: Path, gives: tuple[int, ...]
) -> None:
    async def script(run: PeerRun) -> None:
        await events_after(supervisor, run.request.ref.tree, RunEnded)
        run.say(ToolCall("c", "t", {}))
        run.say(ToolResult("c", "t", "ok", gives=gives))
        run.say(over())

    agents = {
        "main": [
            {"tools": [{"name": "spawn_agent", "args": {"task": "bg", "background": True}}]},
            ASK_PEER,
            {"text": "main is done"},
        ],
        "bg": [{"text": "the background answer"}],
    }
    main = Profile("main", model=scripted(agents), tools=["spawn_agent", SCRIPTED])
    supervisor = make_supervisor(tmp_path, ScriptedPeer(script), mode="yes", profiles=[SCRIPTED])
    run = supervisor.spawner.spawn_primary(main, Task("go"))
    blocks = Blocks()
    shown = [block.body for e in await events_of(supervisor, run.ref.tree) if (block := blocks.apply(e)) is not None]
    assert any("the background answer" in body for body in shown)
    await supervisor.close()


async def events_of(supervisor: Supervisor, tree: str) -> list[Event]:
    """Wait until a tree has ended; return its events."""
    return [event async for event in supervisor.watch(tree) if isinstance(event, Event)]


@pytest.mark.requirement("P12", "P16")
@pytest.mark.usefixtures("answers_itself")
async def test_a_question_that_is_answered_at_a_peer_has_an_id_of_ours_and_closes_no_other(tmp_path: Path) -> None:
    taken: list[str] = []

    async def script(run: PeerRun) -> None:
        run.say(RemoteSpawned(parent=STARTED, agent="below"), "below")
        run.say(THEIRS)
        await until(lambda: bool(taken))
        for of in (STARTED, "below"):
            run.say(ApprovalDecided(taken[0], "c", True), of)
        run.say(ApprovalDecided("theirs", "c", True), "below")
        run.say(Message("said"))

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    asked = (await events_after(supervisor, run.ref.tree, ApprovalAsked))[-1]
    assert isinstance(asked.body, ApprovalAsked)
    assert asked.body.approval_id.startswith(f"{run.ref.tree}/0/")
    taken.append(asked.body.approval_id)
    runs = Runs.of(run.ref.tree, await events_after(supervisor, run.ref.tree, Message)).runs
    assert [[asked.approval_id for asked in view.approvals] for view in runs.values()] == [taken, []]
    await supervisor.close()


@pytest.mark.requirement("P16")
@pytest.mark.usefixtures("answers_itself")
async def test_a_question_that_nobody_here_can_answer_is_shown_but_asks_nobody_here(tmp_path: Path) -> None:
    peer = ScriptedPeer(ask_silently)
    supervisor = make_supervisor(tmp_path, peer)
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    events = await events_after(supervisor, run.ref.tree, ApprovalAsked)
    entries, activity = Entries(), Activity(run.ref.tree)
    shown = [entry for event in events if (entry := entries.apply(event)) is not None]
    for event in events:
        activity.apply(event)
    assert "".join(text for _, text in shown[-1].spans) == "◐ shell(ls)  asked and answered at the peer"
    assert dict(activity.questions) == {} and supervisor.approvals.pending() == []
    assert run.view.state == "waiting_approval"
    options = ServerOptions(
        profile=SCRIPTED, profiles=(), host="", port=0, public_url="", tokens={}, pattern="subagent", asks_client=True,
        on_disconnect="cancel", most_tasks=1, certificate=None, key=None, version="",
    )  # fmt: skip
    fold = StreamFold(ServedTask(run.ref.tree, ClientRequest("a2a", "client", "context", "message")), options)
    assert [update for event in events for update in fold.apply(event)] == []
    await supervisor.close()


async def test_a_peer_withdraws_only_the_question_that_it_names(tmp_path: Path) -> None:
    async def script(run: PeerRun) -> None:
        run.say(THEIRS)
        run.say(ApprovalAsked("other", "c2", "shell", {}))
        await until(lambda: len(supervisor.approvals.pending()) == 2)
        run.say(ApprovalDecided("theirs", "c2", True))  # the call of the other question

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    questions = Questions()
    for event in await events_after(supervisor, run.ref.tree, ApprovalDecided):
        questions.apply(event)
    await until(lambda: len(supervisor.approvals.pending()) == 1)
    [pending] = supervisor.approvals.pending()
    assert (pending.call_id, list(questions.open)) == ("c2", [pending.id])
    await supervisor.close()


async def test_an_answer_is_not_sent_to_a_question_that_reuses_the_id_of_the_one_answered(tmp_path: Path) -> None:
    """The peer takes back its question, and asks another one with the same id, while the answer is being written."""

    async def script(run: PeerRun) -> None:
        run.say(THEIRS)
        await is_answered.wait()
        run.say(ApprovalDecided(THEIRS.approval_id, THEIRS.call_id, False))
        run.say(ApprovalAsked(THEIRS.approval_id, THEIRS.call_id, "shell", {"command": "rm -r /"}))
        run.say(over((await run.answers.get()).__class__.__name__))

    is_answered, is_written = asyncio.Event(), asyncio.Event()
    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await until(lambda: bool(supervisor.approvals.pending()))
    [first] = supervisor.approvals.pending()
    [question] = supervisor.approvals._questions.values()
    assert await supervisor.answer(first.id, Allow(), by="user") == "taken"
    question.written = asyncio.ensure_future(is_written.wait())  # the disk is slow
    is_answered.set()
    await until(lambda: bool(supervisor.approvals.pending()))
    [second] = supervisor.approvals.pending()
    is_written.set()
    assert second.args == {"command": "rm -r /"}
    assert await supervisor.answer(second.id, Deny(), by="user") == "taken"
    await run.join()
    assert run.result().final_response == "Deny"
    await supervisor.close()


async def test_questions_about_one_call_are_answered_one_by_one(tmp_path: Path) -> None:
    """The peer takes back the first of two questions with the same call id. The answer to the second one arrives."""

    async def script(run: PeerRun) -> None:
        run.say(THEIRS)
        run.say(ApprovalAsked("other", THEIRS.call_id, "shell", {"command": "rm -r /"}))
        await until(lambda: len(supervisor.approvals.pending()) == 2)
        run.say(ApprovalDecided(THEIRS.approval_id, THEIRS.call_id, True))
        run.say(over((await run.answers.get()).__class__.__name__))

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    questions = Questions()
    for event in await events_after(supervisor, run.ref.tree, ApprovalDecided):
        questions.apply(event)
    await until(lambda: len(supervisor.approvals.pending()) == 1)
    [pending] = supervisor.approvals.pending()
    assert (pending.args, list(questions.open)) == ({"command": "rm -r /"}, [pending.id])
    assert await supervisor.answer(pending.id, Deny(), by="user") == "taken"
    await run.join()
    assert run.result().final_response == "Deny"
    decided = [event.body for event in await events_after(supervisor, run.ref.tree, RunEnded)]
    assert [(each.allowed, each.by) for each in decided if isinstance(each, ApprovalDecided)] == [
        (True, "peer"),
        (False, "user"),
    ]
    await supervisor.close()


async def test_the_confirmation_of_an_answer_closes_no_other_question_about_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer confirms the answer before the answer's request has returned."""
    sent: list[str] = []

    async def answer(self: ScriptedRun, run: str, approval_id: str, decision: Decision) -> None:
        self._run.say(ApprovalDecided(approval_id, THEIRS.call_id, isinstance(decision, Allow)))
        self._run.say(Message("confirmed"))
        await events_after(supervisor, primary.ref.tree, Message)
        sent.append(approval_id)

    async def script(run: PeerRun) -> None:
        run.say(THEIRS)
        run.say(ApprovalAsked("other", THEIRS.call_id, "shell", {"command": "rm -r /"}))

    monkeypatch.setattr(ScriptedRun, "answer", answer)
    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    primary = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await until(lambda: len(supervisor.approvals.pending()) == 2)
    first, second = supervisor.approvals.pending()
    assert await supervisor.answer(first.id, Allow(), by="user") == "taken"
    await until(lambda: bool(sent))
    questions = Questions()
    for event in await events_after(supervisor, primary.ref.tree, Message):
        questions.apply(event)
    assert sent == [THEIRS.approval_id] and list(questions.open) == [second.id]
    await supervisor.close()


async def test_an_answer_that_does_not_reach_the_peer_leaves_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(self: ScriptedRun, run: str, approval_id: str, decision: Decision) -> None:
        raise Undelivered("it went on")

    monkeypatch.setattr(ScriptedRun, "answer", answer)
    supervisor = make_supervisor(tmp_path, ScriptedPeer(ask_silently))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await until(lambda: bool(supervisor.approvals.pending()))
    assert await supervisor.answer(supervisor.approvals.pending()[0].id, Allow(), by="user") == "taken"
    *_, last = await events_after(supervisor, run.ref.tree, Warned)
    assert isinstance(last.body, Warned) and last.body.text == "the answer did not reach the agent: it went on"
    await supervisor.close()


@pytest.mark.finding("X8")
async def test_a_question_with_deep_arguments_is_asked_with_the_reason_why_they_are_not_shown(tmp_path: Path) -> None:
    """Such arguments can be neither copied nor written: the question was lost with its task."""

    async def script(run: PeerRun) -> None:
        args: dict[str, Any] = {}
        for _ in range(900):
            args = {"deep": args}
        run.say(ApprovalAsked("theirs", "c", "shell", args))
        run.say(over((await run.answers.get()).__class__.__name__))

    asked: list[Approval] = []
    approver = make_approver(asked, at_peer=Deny(), here=Deny())
    supervisor = make_supervisor(tmp_path, ScriptedPeer(script), approver=approver)
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    async with asyncio.timeout(60):
        await run.join()
    assert run.result().final_response == "Deny"
    assert asked[0].args == {"INVALID_JSON": "they are nested more than 100 levels deep"}
    await supervisor.close()


@pytest.mark.finding("X8")
async def test_a_peer_cannot_ask_a_person_without_end(tmp_path: Path) -> None:
    denied: list[str] = []

    async def script(run: PeerRun) -> None:
        for number in range(MOST_QUESTIONS + 2):
            run.say(ApprovalAsked(f"q{number}", f"c{number}", "shell", {}))
        for _ in range(2):
            answer = await run.answers.get()
            denied.append(answer.reason if isinstance(answer, Deny) else "")
        run.say(Message("said"))

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await events_after(supervisor, run.ref.tree, Message)
    await until(lambda: len(supervisor.approvals.pending()) == MOST_QUESTIONS)
    assert denied == [TOO_MANY] * 2
    await supervisor.close()


@pytest.mark.finding("X8")
@pytest.mark.usefixtures("answers_itself")
async def test_a_peer_cannot_claim_questions_without_end(tmp_path: Path) -> None:
    async def script(run: PeerRun) -> None:
        for number in range(MOST_QUESTIONS + 2):
            run.say(ApprovalAsked(f"q{number}", f"c{number}", "shell", {}))
        run.say(Message("said"))

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    events = await events_after(supervisor, run.ref.tree, Message)
    kinds = [event.kind for event in events]
    assert (kinds.count("approval.asked"), kinds.count("gap")) == (MOST_QUESTIONS, 2)
    await supervisor.close()


@pytest.mark.usefixtures("answers_itself")
async def test_a_question_of_a_run_below_a_peer_is_open_once_after_a_crash(tmp_path: Path) -> None:
    async def script(run: PeerRun) -> None:
        run.say(RemoteSpawned(parent=STARTED, agent="below"), "below")
        run.say(THEIRS, "below")

    peer = ScriptedPeer(script)
    first = make_supervisor(tmp_path, peer)
    tree = first.spawner.spawn_primary(SCRIPTED, Task("look")).ref.tree
    before = await events_after(first, tree, ApprovalAsked)
    second = make_supervisor(tmp_path, peer)
    for event in before:
        second.log.append(event)
    run = await second.resume(tree, ResumeOverrides(profiles=[SCRIPTED]))
    runs = Runs.of(tree, await events_after(second, tree, ApprovalAsked, 2)).runs
    assert [len(view.approvals) for view in runs.values()] == [0, 1]
    peer.runs[0].say(over())
    await run.result()
    await second.close()
    await first.close()


async def test_a_run_of_a_peer_takes_no_name_of_a_run_of_ours(tmp_path: Path) -> None:
    names = ("mine", "my-label", "/main", "0", "agent:0")

    async def script(run: PeerRun) -> None:
        for name in names:
            run.say(RemoteSpawned(parent=STARTED, agent="x", subagent_id=name, label=name), f"id of {name}")
        run.say(over())

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look", subagent_id="mine", label="my-label"))
    await run.join()
    spawned = [e.body for e in await supervisor.log.read(run.ref.tree) if isinstance(e.body, RunSpawned)]
    assert (spawned[0].subagent_id, len(spawned)) == ("mine", 1 + len(names))
    for body in spawned[1:]:
        assert not {body.subagent_id, body.label} & {*names, spawned[0].label}
    await supervisor.close()


@pytest.mark.requirement("P32")
async def test_a_run_below_a_peer_cannot_be_continued_here(tmp_path: Path) -> None:
    """A profile of ours would run under the name, the model and the thread that the peer has chosen."""

    async def script(run: PeerRun) -> None:
        run.say(RemoteSpawned(parent=STARTED, agent="helper", task="evil", model="scripted:x"), "below")
        run.say(over(), "below")
        run.say(over())

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await run.join()
    profiles = [SCRIPTED, Profile("helper", model=scripted({"helper": [{"text": "x"}]}))]
    with pytest.raises(ConfigError, match="ran at a remote agent: it cannot be continued from here"):
        await supervisor.continue_run(run.ref.tree, 1, "go on", ResumeOverrides(profiles=profiles))
    await supervisor.close()


class SilentServer:
    """The runs of an MCP server that takes no commands."""

    capabilities = Capabilities()

    def cancel(self, run: str) -> None: ...

    async def send(self, run: str, text: str) -> None: ...

    async def answer(self, run: str, approval_id: str, decision: Decision) -> None: ...


@pytest.mark.requirement("P16")
@pytest.mark.parametrize(("server", "asks"), [("theirs", 1), ("other", 0)])
async def test_a_server_asks_in_the_name_of_its_own_runs_only(tmp_path: Path, server: str, asks: int) -> None:
    @tool(tier="observe")
    async def work(ctx: Context) -> str:
        """Let the server report a run, and ask in its name."""
        peer = Peer(runtime="mcp", who="the server", where="in it", server="theirs")
        adoption = supervisor.adopt_runs(ctx.tree, peer, SilentServer())
        assert adoption is not None
        adoption.adopt(Report("known id", RemoteSpawned(parent="ours", agent="x")), below=ctx.run)
        await ctx.ask_person(f"mcp__{server}", {}, "Which one?", asker=["known id"])
        return "asked"

    asked: list[Approval] = []
    approver = make_approver(asked, at_peer=Deny(), here=Deny())
    supervisor = make_supervisor(tmp_path, approver=approver)
    agents = {"main": [{"tools": [{"name": "work", "args": {}}]}, {"text": "end"}]}
    run = supervisor.spawner.spawn_primary(Profile("main", model=scripted(agents), tools=[work]), Task("go"))
    await run.join()
    assert [question.run for question in asked] == [asks]
    await supervisor.close()
