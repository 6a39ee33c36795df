"""Questions of subagents, put to the user of an MCP client, or answered from a second terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import mcp_types as types
import pytest

from retinue import Allow, Approval, Deny
from tests.surfaces.cli.shell import SOURCE, Project
from tests.surfaces.mcp.kit import BOTH, connected, listening, piped, serve
from tests.tools.mcp.kit import call, run, turns

WRITE = {"tools": [{"name": "write", "args": {"path": "notes.txt", "content": "first line\n"}}]}
ASKS: dict[str, Any] = {"*": [WRITE, "wrote: {{last_result}}"]}
TASKS = {"tasks": [{"task": "take a note", "subagent_id": "noter"}]}


def answering(
    shown: list[types.ElicitRequestParams], **content: str
) -> Callable[[Any, types.ElicitRequestParams], Any]:
    """A user who always says the same, and what was shown to them."""

    async def answer(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        shown.append(params)
        return (
            types.ElicitResult(action="accept", content=dict(content))
            if content
            else types.ElicitResult(action="decline")
        )

    return answer


def written(project: Project) -> bool:
    return any(
        path.read_text() == "first line\n" for path in project.folder.glob(".retinue/runs/*/1/workspace/notes.txt")
    )


def decided(project: Project) -> list[tuple[bool, str]]:
    lines = project.retinue("tail", "--json").stdout.splitlines()
    events = [json.loads(line) for line in lines]
    return [(event["allowed"], event["by"]) for event in events if event["kind"] == "approval.decided"]


@pytest.mark.parametrize("mode", BOTH)
async def test_the_users_yes_in_the_client_lets_the_tool_run(project: Project, mode: str) -> None:
    shown: list[types.ElicitRequestParams] = []
    options = {"mode": mode, "elicitation_callback": answering(shown, answer="yes")}
    async with connected(project, "--wait-approvals", "0", agents=ASKS, **options) as client:
        result = await client.call_tool("spawn_subagents", TASKS)
    assert result.structured_content["results"][0]["status"] == "completed"
    [asked] = shown
    assert "Subagent 'noter'" in asked.message and "write(notes.txt)" in asked.message
    assert "+first line" in asked.message  # the diff, as we render it
    assert list(asked.requested_schema["properties"]) == ["answer"]
    assert written(project)
    assert decided(project) == [(True, "mcp client")]


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("content", [{}, {"answer": "no"}, {"answer": "maybe"}])
async def test_all_that_is_not_a_yes_is_a_no(project: Project, mode: str, content: dict[str, str]) -> None:
    options = {"mode": mode, "elicitation_callback": answering([], **content)}
    async with connected(project, agents=ASKS, **options) as client:
        result = await client.call_tool("spawn_subagents", TASKS)
    answer = result.structured_content["results"][0]["answer"]
    assert "denied" in answer
    assert not written(project)
    assert decided(project) == [(False, "mcp client")]


@pytest.mark.finding("M2")
@pytest.mark.parametrize("modern", [False, True])
def test_the_form_has_one_field_and_yes_is_chosen_already(modern: bool) -> None:
    """Enter in a client that shows the form sends what is chosen; nothing else has to be filled in."""
    from retinue.surfaces.mcp.host import make_form, read_decision

    asked = Approval("t/1/2", "t", 1, "/main/x-1", "x", "shell", {"command": "ls"}, "c", label="x", preview="$ ls")
    schema = make_form(asked, modern=modern)["requestedSchema"]
    [(name, field)] = schema["properties"].items()
    choices = [each["const"] for each in field["oneOf"]] if modern else field["enum"]
    assert schema["required"] == [name] and choices[0] == field["default"]
    assert read_decision({"action": "accept", "content": {name: field["default"]}}) == Allow()


@pytest.mark.finding("M3")
@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("answer", ["cancel", "error"])
async def test_a_form_that_nobody_has_seen_leaves_the_question_to_another_terminal(
    project: Project, mode: str, answer: str
) -> None:
    """Headless clients cancel every form at once, or answer with an error. Neither is a person's no."""
    shown: list[str] = []
    told: list[str] = []

    async def dismiss(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult | types.ErrorData:
        shown.append(params.message)
        if answer == "error" and mode == "legacy":
            return types.ErrorData(code=types.INVALID_REQUEST, message="no terminal")
        return types.ElicitResult(action="cancel")

    async def progress(value: float, total: float | None, message: str | None) -> None:
        if shown and "approve 1" in (message or "") and not told:
            told.append(message or "")
            assert (await asyncio.to_thread(project.retinue, "approve", "--yes", "1")).returncode == 0

    async with connected(project, agents=ASKS, mode=mode, elicitation_callback=dismiss) as client:
        result = await client.call_tool("spawn_subagents", TASKS, progress_callback=progress)
    assert result.structured_content["results"][0]["status"] == "completed"
    assert len(shown) == 1 and told and written(project)
    assert [allowed for allowed, _ in decided(project)] == [True]


@pytest.mark.finding("M3")
@pytest.mark.parametrize("mode", BOTH)
async def test_without_a_wait_for_other_terminals_a_dismissed_form_is_a_no(project: Project, mode: str) -> None:
    async def dismiss(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        return types.ElicitResult(action="cancel")

    options = {"mode": mode, "elicitation_callback": dismiss}
    async with connected(project, "--wait-approvals", "0", agents=ASKS, **options) as client:
        result = await client.call_tool("spawn_subagents", TASKS)
    assert "denied" in result.structured_content["results"][0]["answer"] and not written(project)


async def test_one_yes_can_be_for_the_whole_session(project: Project) -> None:
    agents = {"*": [WRITE, {"tools": [{"name": "write", "args": {"path": "more.txt", "content": "x"}}]}, "done"]}
    for mode in BOTH:
        shown: list[types.ElicitRequestParams] = []
        options = {"mode": mode, "elicitation_callback": answering(shown, answer="tree")}
        async with connected(project, agents=agents, **options) as client:
            tasks = [{"task": "a"}, {"task": "b"}]
            said = (await client.call_tool("spawn_subagents", {"tasks": tasks})).structured_content
        assert said["summary"]["completed"] == 2
        assert 1 <= len(shown) <= 2  # both may have asked before the first answer


async def test_a_background_subagent_asks_while_its_client_does_something_else(project: Project) -> None:
    shown: list[types.ElicitRequestParams] = []
    async with connected(project, agents=ASKS, elicitation_callback=answering(shown, answer="yes")) as client:
        await client.call_tool("spawn_subagents", {**TASKS, "background": True})
        while not shown:
            await client.call_tool("list_subagents", {})
        said = (await client.call_tool("wait_for_background_tool", {"subagent_id": "noter"})).structured_content
    assert said["results"][0]["status"] == "completed"


async def test_a_subagent_of_an_earlier_session_that_goes_on_asks_the_user_too(project: Project) -> None:
    agents = {"/main/subagent-1": ["first"], "/main/subagent-2": [WRITE, "wrote"]}
    async with connected(project, agents=agents) as client:
        await client.call_tool("spawn_subagents", TASKS)
    shown: list[types.ElicitRequestParams] = []
    async with connected(project, agents=agents, elicitation_callback=answering(shown, answer="yes")) as client:
        call = {"subagent_id": "noter", "message": "write it down"}
        said = (await client.call_tool("continue_subagent", call)).structured_content
    assert said["results"][0]["answer"] == "wrote" and len(shown) == 1


async def test_a_client_that_cannot_be_asked_is_told_the_command_that_answers(project: Project) -> None:
    told: list[str] = []
    answered = asyncio.Event()

    async def progress(value: float, total: float | None, message: str | None) -> None:
        told.append(message or "")
        if "approve" in told[-1] and not answered.is_set():
            answered.set()
            assert told[-1].startswith("waits for your answer: [noter] write(notes.txt): cd ")
            assert told[-1].endswith(" approve 1")
            done = await asyncio.to_thread(project.retinue, "approve", "--yes", "1")
            assert done.returncode == 0, done.stderr

    async with connected(project, agents=ASKS) as client:
        result = await client.call_tool("spawn_subagents", TASKS, progress_callback=progress)
    assert answered.is_set()
    assert result.structured_content["results"][0]["status"] == "completed"
    assert written(project)


async def test_what_a_background_subagent_waits_for_is_in_its_status(project: Project) -> None:
    async with piped(project, agents=ASKS) as client:
        await client.hello()
        await client.call("spawn_subagents", **TASKS, background=True)
        answer = ""
        while not answer.endswith(" approve 1"):
            status = (await client.call("get_background_tool_status", subagent_id="noter"))["structuredContent"][
                "subagent"
            ]
            answer = status.get("questions", [{"answer": ""}])[0]["answer"]
        assert status["state"] == "waiting_approval"
        assert [each["question"] for each in status["questions"]] == ["[noter] write(notes.txt)"]


async def test_zero_seconds_deny_at_once_and_end_the_run(project: Project) -> None:
    async with connected(project, "--wait-approvals", "0", agents=ASKS) as client:
        result = await client.call_tool("spawn_subagents", TASKS)
    [ended] = result.structured_content["results"]
    assert ended["status"] == "error" and "requested confirmation" in ended["error"]


async def test_after_the_wait_it_ends_as_with_nobody(project: Project) -> None:
    async with connected(project, "--wait-approvals", "0.3", agents=ASKS) as client:
        result = await client.call_tool("spawn_subagents", TASKS)
    [ended] = result.structured_content["results"]
    assert ended["status"] == "error" and "requested confirmation" in ended["error"]


async def test_the_second_terminal_may_be_first(project: Project) -> None:
    async with piped(project, agents=ASKS) as client:
        await client.hello(elicitation={})
        name = await client.begin("tools/call", name="spawn_subagents", arguments=TASKS)
        asked = await client.read()
        assert asked["method"] == "elicitation/create"
        assert (await asyncio.to_thread(project.retinue, "deny", "1", "not today")).returncode == 0
        cancelled = await client.read()
        assert (cancelled["method"], cancelled["params"]["requestId"]) == ("notifications/cancelled", asked["id"])
        late = {"action": "accept", "content": {"answer": "yes"}}
        await client.send(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": late}).encode() + b"\n")
        answer = (await client.answer(name))["result"]["structuredContent"]
        assert "not today" in answer["results"][0]["answer"]
    assert not written(project)
    assert [allowed for allowed, _ in decided(project)] == [False]


async def test_a_call_is_taken_up_only_by_the_state_it_was_given(project: Project) -> None:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}},
    }
    async with piped(project, agents=ASKS) as client:
        first = await client.ask("tools/call", name="spawn_subagents", arguments=TASKS, _meta=meta)
        result = first["result"]
        assert result["resultType"] == "input_required"
        [key] = result["inputRequests"]
        yes = {key: {"action": "accept", "content": {"answer": "yes"}}}
        again = {"name": "spawn_subagents", "_meta": meta, "inputResponses": yes}
        forged = await client.ask("tools/call", **again, arguments=TASKS, requestState=result["requestState"] + "x")
        assert forged["error"]["code"] == -32602
        assert not written(project)
        done = await client.ask("tools/call", **again, arguments=TASKS, requestState=result["requestState"])
        assert done["result"]["structuredContent"]["results"][0]["status"] == "completed"
        twice = await client.ask("tools/call", **again, arguments=TASKS, requestState=result["requestState"])
        assert twice["error"]["code"] == -32602
    assert written(project)


@pytest.mark.parametrize("mode", BOTH)
async def test_over_http_the_user_is_asked_too(project: Project, mode: str) -> None:
    from mcp import Client

    shown: list[types.ElicitRequestParams] = []
    options = {"mode": mode, "elicitation_callback": answering(shown, answer="yes")}
    async with listening(project, "--no-token", agents=ASKS) as server, Client(server.url, **options) as client:
        result = await client.call_tool("spawn_subagents", TASKS)
    assert result.structured_content["results"][0]["status"] == "completed"
    assert len(shown) == 1


async def test_a_client_that_does_not_come_back_is_waited_for_no_longer_than_its_call(project: Project) -> None:
    from mcp import Client

    asked = asyncio.Event()

    async def silent(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    modern = BOTH[1]
    async with listening(project, "--no-token", "--wait-approvals", "0", agents=ASKS) as server:
        async with Client(server.url, mode=modern, elicitation_callback=silent) as first:
            calling = asyncio.create_task(first.call_tool("spawn_subagents", TASKS))
            await asked.wait()
            calling.cancel()
        async with Client(server.url, mode=modern) as second:  # whose user cannot be asked
            await second.call_tool("cancel_background_tool", {"subagent_id": "noter"})
            async with asyncio.timeout(150):
                await second.call_tool("wait_for_background_tool", {"subagent_id": "noter"})
                result = await second.call_tool("spawn_subagents", TASKS)
    assert "requires confirmation" in result.structured_content["results"][0]["answer"], result


def test_what_is_shown_harms_no_terminal() -> None:
    from retinue.core.approvals import Approval
    from retinue.surfaces.mcp.host import make_form

    args = {"command": "echo \x1b[2J\u202e"}
    asked = Approval(
        "t/1/2", "t", 1, "/main/x-1", "x", "shell", args, "c", label="a\x1b[1m\nb", preview="$ \x1b[2J\n$ b"
    )
    message = make_form(asked, modern=True)["message"]
    assert "\x1b" not in message and "\u202e" not in message
    assert message.count("\n") == 3
    long = make_form(
        Approval("t/1/2", "t", 1, "/p", "x", "write", {}, "c", label="l", preview="y" * 10_000), modern=False
    )["message"]
    assert len(long) < 5000 and "6000 more characters" in long


class Person:
    """Says yes or no at the root, and changes nothing of what is shown."""

    def __init__(self, said: Allow | Deny) -> None:
        self.asked: list[Approval] = []
        self._said = said

    async def __call__(self, question: Approval) -> Allow | Deny:
        self.asked.append(question)
        return self._said


@pytest.mark.finding("S7")
@pytest.mark.requirement("CODEY-27", "CODEY-36")
@pytest.mark.parametrize(("said", "done"), [(Allow(), True), (Deny("not now"), False)])
async def test_a_plain_answer_at_the_root_settles_what_a_subagent_in_a_server_asks(
    project: Project, said: Allow | Deny, done: bool
) -> None:
    command, *words = serve(project, "--profile", "researcher", agents=ASKS)
    server = {"command": command, "args": words, "env": {"PYTHONPATH": SOURCE}, "cwd": str(project.folder)}
    person = Person(said)
    calls = turns(call("mcp__next__researcher", prompt="take a note"))
    await run({"next": server}, calls, approver=person)
    [asked] = person.asked
    assert asked.tool == "mcp__next" and "wants to run: write(notes.txt)" in asked.preview
    assert asked.args["answer"] == "yes"  # what a yes means is shown
    # the question is the subagent's, which is a run of this tree, and not its caller's
    assert (asked.run, asked.agent, asked.path) == (1, "researcher", "/main/researcher-1")
    assert asked.label is not None and asked.label.startswith("researcher")
    notes = list(project.folder.glob("**/notes.txt"))
    assert bool(notes) == done
