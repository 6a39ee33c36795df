"""Going on where resuming meets other parts: workspaces, the provider's own tools, hosts, prices, large texts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

import retinue
from retinue import Allow, Approval, ConfigError, Limits, Profile
from retinue.control.client import ControlClient
from retinue.control.server import ControlServer
from retinue.core.control import ResumeOverrides
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Event,
    Message,
    RunEnded,
    RunSpawned,
    ToolCall,
    ToolResult,
)
from retinue.core.messages import AssistantTurn, Call, ProviderToolCall, Reply
from retinue.core.network import FULL
from retinue.log.threads import fold_thread
from retinue.testing import FixedPrices, scripted
from tests.crash.test_library import Crash, notes
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import bodies, call, main, spawn
from tests.workspaces.kit import LINES, apply_copy, copied, repository, shell

CODER = Profile("coder", "You code.", workspace="worktree")


class Searching:
    """A model whose provider searches while it answers, and then wants a tool."""

    def __init__(self) -> None:
        self.threads: list[list[Any]] = []

    async def complete(self, request: Any, on_delta: Any) -> Reply:
        self.threads.append(list(request.thread))
        found = ProviderToolCall("s", "web_search", {"query": "x"}, "found", content={"n": 1}, origin="here")
        if request.turn == 1:
            return Reply("looking", (Call("a", "list_agents", {}),), natives=(found,))
        return Reply("end")


class Replies:
    """Says one after the other, whatever run asks."""

    def __init__(self, replies: list[Any]) -> None:
        self._replies = iter(replies)

    async def complete(self, request: Any, on_delta: Any) -> Reply:
        said = next(self._replies)
        if isinstance(said, str):
            return Reply(said)
        [wanted] = said["tools"]
        return Reply("", (Call(f"c{request.turn}", wanted["name"], wanted["args"]),))


async def test_what_the_provider_searched_is_still_in_the_thread() -> None:
    model = Searching()
    crash = Crash(Profile("main", model=model, tools=["list_agents"]))
    whole = await crash.events()
    [_, undisturbed] = model.threads
    for last in (ToolCall, ToolResult):
        model.threads.clear()
        place = [n for n, event in enumerate(whole, 1) if isinstance(event.body, last)][-1]
        await crash.goes_on(whole[:place])
        [said] = [turn for turn in model.threads[-1] if isinstance(turn, AssistantTurn)]
        assert said == undisturbed[1], last


async def test_a_profile_from_the_log_reaches_no_more_hosts_than_it_did(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("agents:\n  solo:\n  - tools: [{name: list_agents, args: {}}]\n  - text: end\n")
    profile = Profile("solo", model=f"scripted:{tmp_path}/s.yaml", tools=["list_agents"], network=())
    crash = Crash(profile)
    options = {"network": ["example.com"]}
    async with retinue.open(mode="yes", **options) as r:
        run = await r.spawn(profile, "go")
        whole = [event async for event in run.events()]
    async with crash.after(whole[:2], **options) as r:
        run = await r.resume(whole[0].tree)
        assert r.control.trees[run.tree].runs[0].plan.network == ()
        await run.result()


async def test_words_for_the_network_are_read_back_from_the_log(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("agents:\n  solo:\n  - tools: [{name: list_agents, args: {}}]\n  - text: end\n")
    for word, hosts in (("none", ()), ("full", FULL)):
        profile = Profile("solo", model=f"scripted:{tmp_path}/s.yaml", tools=["list_agents"], network=word)
        crash = Crash(profile)
        async with retinue.open(mode="yes", network="full") as r:
            whole = [event async for event in (await r.spawn(profile, "go")).events()]
        async with crash.after(whole[:2], network="full") as r:
            run = await r.resume(whole[0].tree)
            assert r.control.trees[run.tree].runs[0].plan.network == hosts
            await run.result()


async def test_a_cost_limit_without_a_price_does_not_go_on() -> None:
    prices = FixedPrices({"known": (Decimal(1), Decimal(1))})
    crash = Crash(main({"main": [call("list_agents"), "end"]}), prices=prices)
    whole = await crash.events()
    async with crash.after(whole[:4]) as r:
        with pytest.raises(ConfigError, match=r"the price of model .* is not known"):
            await r.resume(whole[0].tree, profiles=[crash.profile], limits=Limits(cost=Decimal("0.01")))
        assert (await r.control.log.read(whole[0].tree)) == whole[:4]


async def test_a_long_text_comes_back_as_it_was(tmp_path: Path) -> None:
    said = "a\r\nb\rc\u2028d\x85" * 500_000
    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        run = await r.spawn(main({"main": [said]}), "go")
        events = [event async for event in run.events()]
    [message] = bodies(events, Message)
    assert message.file
    turn = fold_thread(events, 0)[-1]
    assert isinstance(turn, AssistantTurn) and turn.text == said


PARENT = {
    "main": [call("subagent_coder", task="go"), call("apply_subagent", subagent_id="1"), "{{last_result}}"],
    "coder": [shell("sed -i 's/^line 2$/two/' a.txt"), "done"],
}


class Answers:
    def __init__(self) -> None:
        self.asked: list[Approval] = []

    async def __call__(self, question: Approval) -> Allow:
        if question.tool == "apply_subagent":
            self.asked.append(question)
        return Allow()


async def crashed(project: Path, last: type, **options: Any) -> tuple[list[Event], Profile]:
    """Return the events of a parent that applies, up to the given kind, with the parent's changes undone as if it had
    crashed there."""
    profile = Profile("main", "You are main.", model=scripted(PARENT))
    async with retinue.open(project / ".retinue", profiles=[CODER], **options) as r:
        run = await r.spawn(profile, "go")
        whole = [event async for event in run.events()]
    shutil.rmtree(project / ".retinue/logs")
    (project / ".retinue/runs" / whole[0].tree / "1/applied.json").unlink()
    (project / "a.txt").write_text(LINES)
    place = [n for n, e in enumerate(whole, 1) if isinstance(e.body, last) and e.run == 0][-1]
    return whole[:place], profile


async def gone_on(project: Path, events: Sequence[Event], profile: Profile, **options: Any) -> list[Event]:
    async with retinue.open(project / ".retinue") as r:
        for event in events:
            r.control.log.append(event)
    async with retinue.open(project / ".retinue", profiles=[CODER], **options) as r:
        run = await r.resume(events[0].tree, profiles=[profile])
        return [event async for event in run.events()]


@needs_bubblewrap
async def test_a_scratch_workspace_stays_one_in_a_stricter_runtime(tmp_path: Path) -> None:
    """A sandboxed run in a repository would get a worktree, had it begun there."""
    project = repository(tmp_path / "p")
    agents = {
        "main": [call("subagent_coder", task="go"), "end"],
        "coder": [shell("echo 1 > b"), shell("cat b"), "done"],
    }
    coder = Profile("coder", "You code.")
    profile = Profile("main", model=scripted(agents), tools=[coder])
    async with retinue.open(project / ".retinue", mode="yes") as r:
        whole = [event async for event in (await r.spawn(profile, "go")).events()]
    assert [body.workspace_kind for body in bodies(whole, RunSpawned)] == ["shared", "scratch"]
    shutil.rmtree(project / ".retinue/logs")
    place = next(n for n, event in enumerate(whole, 1) if isinstance(event.body, ToolResult))
    events = await gone_on(project, whole[:place], profile, mode="yes", runtime="isolated")
    assert [result.text for result in bodies(events, ToolResult, run=1)] == ["", "1\n"]
    assert events[-1].body.status == "done"


async def test_a_parent_applies_the_changes_of_a_child_that_ended_before_the_crash(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    before, profile = await crashed(project, ToolResult, mode="yes")
    before = before[: next(n for n, e in enumerate(before, 1) if isinstance(e.body, ToolResult) and e.run == 0)]
    events = await gone_on(project, before, profile, mode="yes")
    assert events[-1].body.final_response == "Applied the changes of 1:\nmodified a.txt"
    assert (project / "a.txt").read_text() == LINES.replace("line 2\n", "two\n")


@pytest.mark.parametrize("last", [ToolCall, ApprovalAsked, ApprovalDecided])
async def test_applying_is_asked_again_with_the_diff_as_it_is_now(tmp_path: Path, last: type) -> None:
    project = repository(tmp_path / "p")
    answers = Answers()
    before, profile = await crashed(project, last, mode="ask", approver=answers)
    answers.asked.clear()
    (project / "a.txt").write_text(LINES.replace("line 19\n", "mine\n"))
    events = await gone_on(project, before, profile, mode="ask", approver=answers)
    if last is ToolCall:  # nobody knows whether it was done
        assert not answers.asked and bodies(events, ToolResult, run=0)[-1].outcome == "unknown_after_crash"
        return
    [question] = answers.asked
    assert "-line 2\n+two\n" in question.preview
    assert (project / "a.txt").read_text() == LINES.replace("line 2\n", "two\n").replace("line 19\n", "mine\n")


@pytest.mark.parametrize("emptied", [False, True])
async def test_a_workspace_that_is_gone_is_no_workspace_where_all_was_deleted(tmp_path: Path, emptied: bool) -> None:
    project = repository(tmp_path / "p")
    agents = {"main": [shell("echo 1 > b"), shell("echo 2 > c"), "done"]}
    profile = Profile("main", model=scripted(agents), workspace="worktree")
    async with retinue.open(project / ".retinue", mode="yes") as r:
        run = await r.spawn(profile, "go")
        whole = [event async for event in run.events()]
    shutil.rmtree(project / ".retinue/logs")
    folder = project / ".retinue/runs" / whole[0].tree / "0"
    (folder / "changes.json").unlink()
    shutil.rmtree(folder / "workspace")
    if emptied:
        (folder / "workspace").mkdir()
    place = next(n for n, event in enumerate(whole, 1) if isinstance(event.body, ToolResult))
    events = await gone_on(project, whole[:place], profile, mode="yes")
    ended = events[-1].body
    assert (ended.status, ended.changed_files) == ("failed", ())
    assert ended.error_details.startswith("its workspace is gone: ")


async def test_a_workspace_that_was_made_ready_is_not_made_ready_again(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    config = tmp_path / "retinue.yaml"
    config.write_text("workspace_setup: echo set >> setup.txt\n")
    profile = Profile("main", model=scripted({"main": [shell("cat setup.txt"), "done"]}), workspace="copy")
    async with retinue.open(project / ".retinue", mode="yes", config=config) as r:
        run = await r.spawn(profile, "go")
        whole = [event async for event in run.events()]
    first, second = (n for n, event in enumerate(whole, 1) if isinstance(event.body, ToolCall))
    setup = project / ".retinue/runs" / whole[0].tree / "0/workspace/setup.txt"
    for last, times in ((second, 1), (first, 2)):  # the second time it was broken off, and nobody knows how far it was
        shutil.rmtree(project / ".retinue/logs")
        events = await gone_on(project, whole[:last], profile, mode="yes", config=config)
        assert (events[-1].body.status, setup.read_text()) == ("done", "set\n" * times)


async def test_a_tree_whose_project_was_moved_goes_on_there_and_makes_no_folder_where_it_was(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    profile = main({"main": [shell("echo > here"), "done"]})
    async with retinue.open(old / ".retinue", mode="yes") as r:
        run = await r.spawn(profile, "go")
        whole = [event async for event in run.events()]
    old.rename(new)
    shutil.rmtree(new / ".retinue/logs")
    events = await gone_on(new, whole[:3], profile, mode="yes")
    assert events[-1].body.status == "done" and (new / "here").exists()
    assert not old.exists()


@pytest.mark.finding("X1")
async def test_a_log_names_no_workspace_outside_the_project(tmp_path: Path) -> None:
    """A run never writes in a folder outside the project that only its log names."""
    project, outside = tmp_path / "project", tmp_path / "outside"
    project.mkdir()
    outside.mkdir()
    profile = main({"main": [shell("echo > here"), "done"]})
    async with retinue.open(outside / ".retinue", mode="yes") as r:
        run = await r.spawn(profile, "go")
        whole = [event async for event in run.events()]
    (outside / "here").unlink()
    with pytest.raises(ConfigError, match=f"its workspace {outside} is not part of this project"):
        await gone_on(project, whole[:3], profile, mode="yes")
    assert not (outside / "here").exists()


async def test_a_run_that_goes_on_after_its_ending_is_reminded_again() -> None:
    replies = ["words", call("final_answer", answer="one"), "words", call("final_answer", answer="two")]
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    profile = Profile("main", model=Replies(replies), output=schema)
    async with retinue.open(mode="yes") as r:
        first = await r.run(profile, "go")
        again = await (await r.continue_run(first, "more", profiles=[profile])).result()
    assert (first.structured, again.structured) == ({"answer": "one"}, {"answer": "two"})


async def test_a_rule_that_denies_now_wins_over_a_yes_of_then() -> None:
    said, tools = notes()
    crash = Crash(
        main({"main": [call("note", text="x"), "{{last_result}}"]}, tools=tools), mode="ask", approver=Answers()
    )
    whole = await crash.events()
    place = next(n for n, event in enumerate(whole, 1) if isinstance(event.body, ApprovalDecided))
    said.clear()
    _, events = await crash.goes_on(whole[:place], deny=["note"])
    assert (said, events[-1].body.final_response) == ([], "The user denied this call: the rule note forbids it")


async def test_through_control_a_tree_may_stand_on_one_in_another_file(tmp_path: Path) -> None:
    state, script = tmp_path / ".retinue", tmp_path / "s.yaml"
    script.write_text(msgspec.json.encode({"agents": {"main": [spawn({"task": "a"}), "end"], "*": ["said"]}}).decode())
    profile = Profile("main", model=f"scripted:{script}")
    async with retinue.open(state, mode="yes") as one, retinue.open(state, mode="yes") as other:
        origin = await one.run(profile, "go")
        tree = (await (await other.continue_run(origin, "more", profiles=[profile])).result()).tree
        async with ControlServer(other.control, state) as server:
            begun = await ControlClient(server.address).continue_run(tree, 1, "again", ResumeOverrides(unattended=True))
            assert (begun.tree, begun.number) == (tree, 2)
            async for event in other.control.watch(tree):
                if event.run == 2 and isinstance(event.body, RunEnded):
                    assert event.body.final_response == "said"
                    break


async def test_what_was_applied_before_a_run_went_on_is_not_all_of_it(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    profile = Profile(
        "main", model=scripted({"main": [shell("echo 1 > b"), shell("echo 2 > c"), "done"]}), workspace="copy"
    )
    async with retinue.open(project / ".retinue", mode="yes") as r:
        run = await r.spawn(profile, "go")
        whole = [event async for event in run.events()]
        result = await run.result()
    shutil.rmtree(project / ".retinue/logs")
    (Path(result.workspace) / "c").unlink()
    (Path(result.workspace).parent / "changes.json").unlink()
    apply_copy(result, project)  # of the interrupted run, by a person
    assert (project / "b").exists() and not copied(result).summarize().has_unapplied
    place = next(n for n, event in enumerate(whole, 1) if isinstance(event.body, ToolResult))
    await gone_on(project, whole[:place], profile, mode="yes")
    assert copied(result).summarize().has_unapplied
    apply_copy(result, project)
    assert (project / "c").read_text() == "2\n"
