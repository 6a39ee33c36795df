"""Questions on the live view and on other surfaces at once, each answered once: of our runs, over A2A, through MCP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from retinue.concurrency import TaskOwner
from retinue.config.servers import parse_servers
from retinue.core.approvals import Approval, Deny, QuestionChange, QuestionClosed, describe_closing
from retinue.core.control import Control, RunHandle
from retinue.core.events import ApprovalDecided
from retinue.core.profiles import Profile, Task
from retinue.log.memory import MemoryLog
from retinue.surfaces.cli.conversation import Conversation
from retinue.surfaces.cli.questions import describe_outcome
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.printer.question_panel import list_keys
from retinue.testing import scripted
from tests.control.loopback.kit import WRITE, ServedSupervisor, serve_supervisor
from tests.remote.test_a2a import make_profile
from tests.sandbox.places import make_image, needs_containers
from tests.surfaces.a2a.kit import make_argocd
from tests.surfaces.a2a.kit import serve as serve_a2a
from tests.surfaces.cli.shell import SOURCE, Project
from tests.surfaces.live_terminal import LiveTerminal, open_live_terminal
from tests.surfaces.mcp.kit import serve as serve_mcp
from tests.surfaces.printer.facts import MAIN, Facts

KEYS = "[y]es [n]o"
DEPLOY: dict[str, Any] = {"argocd": [{"tools": [{"name": "deploy", "args": {"target": "prod"}}]}, "{{last_result}}"]}


async def test_a_late_answer_is_told_who_was_first(tmp_path: Path) -> None:
    """The question is answered elsewhere while it is still on this screen."""
    async with serve_supervisor(tmp_path) as h, open_live_terminal() as terminal, TaskOwner() as tasks:
        run = RunHandle(h.supervisor, h.run({"main": [WRITE, "end"]}).ref)
        showing = tasks.start(terminal.show(h.supervisor, run))
        await terminal.sees(KEYS)
        showing.cancel()  # from here on this screen hears nothing
        [question] = await h.client.pending()
        assert await h.client.answer(question.id, Deny("no"), by="anna", surface="her phone") == "taken"
        terminal.type("y")
        await terminal.keeps("somebody else was first: question 1 denied by anna")
        assert "(her phone) at " in "".join(terminal.lasting)
        await run.result()
    assert not (tmp_path / "a.txt").exists()


async def test_a_late_answer_waits_until_the_log_says_who_was_first() -> None:
    facts, log = Facts(), MemoryLog()
    log.append(facts.spawn(MAIN, "main"))
    question = Approval("t1/0/2", "t1", 0, "/main", "main", "shell", {}, "c1")
    async with TaskOwner() as tasks:
        describing = tasks.start(describe_outcome(log, question))
        await asyncio.sleep(0)  # the question is closed, but the first answer is still on its way to the log
        log.append(facts(MAIN, ApprovalDecided(question.id, "c1", allowed=False, by="anna")))
        assert (await describing).startswith("denied by anna")


@pytest.mark.parametrize("workspace", ["shared", "copy"])
async def test_always_is_offered_only_where_a_rule_would_allow_the_call(workspace: Any, tmp_path: Path) -> None:
    """No rule allows a path in a copy of the run's own."""
    profile = Profile("main", model=scripted({"main": [WRITE, "end"]}), workspace=workspace)
    async with serve_supervisor(tmp_path) as h, open_live_terminal() as terminal, TaskOwner() as tasks:
        run = await h.supervisor.spawn(profile, Task("go"))
        showing = tasks.start(terminal.show(h.supervisor, run))
        await terminal.sees(KEYS)
        is_offered = workspace == "shared"
        assert ("[a]lways in this project" in "".join(terminal.bottom)) == is_offered
        terminal.type("?")
        await terminal.sees("u  yes, and to this tool")
        assert ("a  yes, and always in this project" in "".join(terminal.bottom)) == is_offered
        terminal.type("a")
        await terminal.sees("writes to retinue.yaml" if is_offered else "no rule would allow only this call")
        terminal.type("ny" if is_offered else "y")
        await showing


@pytest.mark.parametrize("columns", [30, 50, 80])
def test_the_keys_fit_the_screen_with_and_without_always(columns: int) -> None:
    about = Approval("i", "t", 0, "/main", "main", "write", {}, "c")
    without, offered = (list_keys(each, columns) for each in (about, replace(about, rule="write(a)")))
    assert "[a]" in offered and "[a]" not in without and max(len(offered), len(without)) <= columns


@pytest.mark.parametrize(("key", "told"), [("p", "yes to 3 questions"), ("d", "no to 3 questions")])
async def test_one_answer_for_all_that_an_agent_asks_is_confirmed(key: str, told: str, tmp_path: Path) -> None:
    calls = [{"name": "write", "args": {"path": f"{name}.txt", "content": "x"}} for name in "abc"]
    async with serve_supervisor(tmp_path) as h, open_live_terminal() as terminal, TaskOwner() as tasks:
        run = RunHandle(h.supervisor, h.run({"main": [{"tools": calls}, "end"]}).ref)
        showing = tasks.start(terminal.show(h.supervisor, run))
        await terminal.sees("question 1, 2 more wait")
        await terminal.sees(KEYS)
        terminal.type("\t")
        await terminal.sees("question 2, 2 more wait")
        await terminal.sees(KEYS)
        terminal.type(key)
        await terminal.sees("sure? [y]es [n]o")
        assert [line for line in terminal.bottom if told in line]
        terminal.type("y")
        await showing
        events = await h.supervisor.log.read(run.tree)
    decided = [event.body.allowed for event in events if isinstance(event.body, ApprovalDecided)]
    assert decided == [key == "p"] * 3
    assert len(list(tmp_path.glob("*.txt"))) == (3 if key == "p" else 0)


@pytest.mark.finding("U9")
async def test_the_first_message_is_taken_at_once_while_its_model_is_loaded(tmp_path: Path) -> None:
    loaded = asyncio.Event()

    async def begin(control: Control, text: str) -> RunHandle:
        await loaded.wait()
        return await control.spawn(Profile("main", model=scripted({"main": ["Hello."]})), Task(text, conversation=True))

    async with serve_supervisor(tmp_path) as h, open_live_terminal(talks=True) as terminal, TaskOwner() as tasks:
        terminal.live.view.show_starting(is_starting=False)
        talk = Conversation(terminal.live, h.supervisor, Signals(), begin=begin)
        holding = tasks.start(talk.hold())
        terminal.type("go\rand then")
        await terminal.sees("starting 0s")
        await terminal.sees("> and then")
        loaded.set()
        await terminal.keeps("Hello.")
        terminal.type("\x15/exit\r")
        await holding


async def test_the_inbox_of_a_conversation_lists_shows_and_answers(tmp_path: Path) -> None:
    calls = [{"name": "write", "args": {"path": f"{name}.txt", "content": "x"}} for name in "abc"]
    profile = Profile("main", "You are main.", model=scripted({"main": [{"tools": calls}, "All is said."]}))

    async def begin(control: Control, text: str) -> RunHandle:
        return await control.spawn(profile, Task(text, conversation=True))

    async with serve_supervisor(tmp_path) as h, open_live_terminal(talks=True) as terminal, TaskOwner() as tasks:
        talk = Conversation(terminal.live, h.supervisor, Signals(), begin=begin)
        holding = tasks.start(talk.hold())
        terminal.type("go\r")
        await terminal.sees("question 1, 2 more wait")
        await terminal.sees(KEYS)
        terminal.type("  ")  # turns pages, of which there is one
        terminal.type("yes, nearly all")  # a message that begins like an answer
        await terminal.sees("> yes, nearly all")
        terminal.type("\x15\x1b[200~, pasted\x1b[201~")
        await terminal.sees("> , pasted")
        terminal.type("\x15")
        await terminal.wait_until(lambda: terminal.bottom[-3].rstrip() == ">")
        terminal.type("/inbox\r")
        await terminal.keeps("1. write(a.txt)\n2. write(b.txt)\n3. write(c.txt)\nKeys answer the pinned one.")
        terminal.type("/inbox 3\r")
        await terminal.sees("◐ write(c.txt)")
        await terminal.sees(KEYS)
        terminal.type("y")
        await terminal.keeps("✓ write(c.txt)")
        terminal.type("/inbox 2 n not this one\r")
        await terminal.keeps("✗ denied write(b.txt): not this one")
        terminal.type("/inbox 2\r")
        await terminal.keeps("no question 2 is waiting: /inbox lists them")
        terminal.type("/inbox 1 maybe\r")
        await terminal.keeps("/inbox N y says yes, /inbox N n REASON says no")
        terminal.type("/inbox 1 y\r")
        await terminal.keeps("All is said.")
        terminal.type("/exit\r")
        await holding
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == ["a.txt", "c.txt"]


@asynccontextmanager
async def ask_here(folder: Path, project: Project) -> AsyncIterator[tuple[ServedSupervisor, RunHandle, list[Control]]]:
    async with serve_supervisor(folder) as h:
        yield h, RunHandle(h.supervisor, h.run({"main": [WRITE, "end"]}).ref), []


@asynccontextmanager
async def ask_in_container(
    folder: Path, project: Project
) -> AsyncIterator[tuple[ServedSupervisor, RunHandle, list[Control]]]:
    make_image()
    async with serve_supervisor(folder, runtime="container") as h:
        yield h, RunHandle(h.supervisor, h.run({"main": [WRITE, "end"]}).ref), []


@asynccontextmanager
async def ask_over_a2a(
    folder: Path, project: Project
) -> AsyncIterator[tuple[ServedSupervisor, RunHandle, list[Control]]]:
    """Let an agent of another server ask a question that this server's user could answer too."""
    agent = make_argocd(DEPLOY)
    async with serve_a2a(folder / "there", agent, asks_client=True) as server, serve_supervisor(folder / "here") as h:
        yield h, await h.supervisor.spawn(make_profile(server.url), Task("deploy")), [server.control]


@asynccontextmanager
async def ask_through_mcp(
    folder: Path, project: Project
) -> AsyncIterator[tuple[ServedSupervisor, RunHandle, list[Control]]]:
    """A subagent behind an MCP server asks."""
    command, *words = serve_mcp(project, "--profile", "researcher", agents={"*": [WRITE, "wrote"]})
    server = {"command": command, "args": words, "env": {"PYTHONPATH": SOURCE}, "cwd": str(project.folder)}
    call = {"name": "mcp__next__researcher", "args": {"prompt": "take a note"}}
    model = scripted({"main": [{"tools": [call]}, "end"]})
    async with serve_supervisor(folder, mcp_servers=parse_servers({"next": server}), mode="yes") as h:
        yield h, await h.supervisor.spawn(Profile("main", "You are main.", model=model), Task("go")), []


@pytest.mark.parametrize(
    ("ask", "shown"),
    [
        (ask_here, "write(a.txt)"),
        pytest.param(ask_in_container, "write(a.txt)", marks=needs_containers),
        (ask_over_a2a, "deploy("),
        (ask_through_mcp, "wants to run: write(a.txt)"),
    ],
)
async def test_a_question_of_any_kind_is_on_all_surfaces_and_answered_once(
    ask: Any, shown: str, project: Project, tmp_path: Path
) -> None:
    folder = tmp_path / "root"
    folder.mkdir()
    async with AsyncExitStack() as stack:
        h, run, others = await stack.enter_async_context(ask(folder, project))
        terminal: LiveTerminal = await stack.enter_async_context(open_live_terminal())
        tasks = await stack.enter_async_context(TaskOwner())
        surfaces = [h.client, h.client, *others]
        watched = [await stack.enter_async_context(aclosing(each.watch_questions())) for each in surfaces]
        showing = tasks.start(terminal.show(h.supervisor, run))
        asked = [await anext(changes) for changes in watched]
        await terminal.sees(shown)
        await terminal.sees(KEYS)
        assert all(isinstance(question, Approval) for question in asked)
        terminal.type("y")
        closed: list[QuestionChange] = [await anext(changes) for changes in watched]
        for question, change, control in zip(asked, closed, surfaces, strict=True):
            assert isinstance(change, QuestionClosed) and change.id == question.id
            assert await control.answer(question.id, Deny("too late"), by="bert") != "taken"
            assert describe_closing(change).startswith("approved by ")
        assert (await run.result()).status == "done"
        await showing
        events = await h.supervisor.log.read(run.tree)
    decided = [event.body for event in events if isinstance(event.body, ApprovalDecided) and event.body.by == "user"]
    assert [(each.allowed, each.surface) for each in decided] == [(True, "terminal")]
