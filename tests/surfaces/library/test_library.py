"""Retinue from Python: profiles, tools, outputs, approvals, callables."""

import asyncio
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

import retinue
from retinue import Allow, Approval, ConfigError, Context, Deny, Limits, Profile, RunFailed, Task, tool
from retinue.core.events import ApprovalAsked, ApprovalDecided, Inbox, Message, RunEnded, Thinking, ToolResult
from retinue.log.threads import fold_thread
from retinue.models import OnDelta, Reply, Request
from retinue.testing import allow_all, deny_all, scripted
from tests.gates import HeldClock
from tests.supervisor.tree.kit import bodies, call, main, spawn

SCRIPT = """
agents:
  auditor:
    - tools: [{name: grep, args: {pattern: TODO}}]
    - tools: [{name: page_oncall, args: {reason: "todo found"}}]
    - tools: [{name: final_answer, args: {file: a.py, risk: 3}}]
"""


class Finding(pydantic.BaseModel):
    file: str
    risk: int


async def test_the_readme_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("# TODO: fix\n")
    (tmp_path / "script.yaml").write_text(SCRIPT)
    paged: list[str] = []

    @tool(tier="confirm", repeatable=False)
    async def page_oncall(reason: str) -> str:
        """Wake the person on call."""
        paged.append(reason)
        return "paged"

    auditor = Profile(
        "auditor",
        "Find the riskiest file.",
        model="scripted:script.yaml",
        tools=["read", "grep", page_oncall],
        output=Finding,
        limits=Limits(turns=30, seconds=900),
        runtime="inherited",
        workspace="scratch",
    )

    async def decide(question: Approval) -> Allow | Deny:
        return Allow() if question.tool == "shell" else Deny("not in CI")

    kinds: list[str] = []
    async with retinue.open(".retinue", approver=decide, limits=Limits(concurrent=4)) as r:
        run = await r.spawn(auditor, "audit src/", context_paths=["src"])
        async for event in run.events():
            assert event.seq == len(kinds) + 1 and event.path == "/main"
            kinds.append(event.kind)
        result = await run.result()
        found = bodies(await r.control.log.read(run.tree), ToolResult)
    assert kinds[0] == "run.spawned" and kinds[-1] == "run.ended"
    assert "src/a.py:1:# TODO: fix" in found[0].text.splitlines()
    assert found[1].text == "The user denied this call: not in CI"
    assert paged == []
    assert (result.status, result.output()) == ("done", Finding(file="a.py", risk=3))
    assert result.structured == {"file": "a.py", "risk": 3}


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Place(msgspec.Struct):
    name: str
    at: Point


class Pair(TypedDict):
    left: str
    right: int


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("kind", "args", "value"),
    [
        (Finding, {"file": "a", "risk": 1}, Finding(file="a", risk=1)),
        (Point, {"x": 1}, Point(1)),
        (Place, {"name": "p", "at": {"x": 1, "y": 2}}, Place("p", Point(1, 2))),
        (Pair, {"left": "l", "right": 2}, {"left": "l", "right": 2}),
        (SCHEMA, {"n": 3}, {"n": 3}),
        (list[int], {"answer": [1, 2]}, [1, 2]),
    ],
)
async def test_every_kind_of_output(kind: Any, args: dict[str, Any], value: Any) -> None:
    profile = Profile("p", model=scripted({"p": [call("final_answer", **args)]}), output=kind)
    async with retinue.open() as r:
        result = await r.run(profile, "go")
    assert result.output() == value
    assert msgspec.json.decode(result.final_response) == result.structured


async def test_an_answer_that_does_not_fit_is_told_and_can_be_given_again() -> None:
    wrong, right = call("final_answer", n=1), call("final_answer", n=5)
    async with retinue.open() as r:
        run = await r.spawn(Profile("p", model=scripted({"p": [wrong, right]}), output=SCHEMA), "go")
        result = await run.result()
        first, _ = bodies(await r.control.log.read(run.tree), ToolResult)
    assert not first.success and "less than the minimum of 3" in first.text
    assert result.output() == {"n": 5}


async def test_a_run_that_gives_no_answer_is_reminded_once_and_then_fails() -> None:
    profile = Profile("p", model=scripted({"p": [{"text": "hm"}, {"text": "still hm"}]}), output=Point)
    async with retinue.open() as r:
        run = await r.spawn(profile, "go")
        result = await run.result()
        notices = bodies(await r.control.log.read(run.tree), Inbox)
    assert len(notices) == 1
    assert (result.status, result.error_details) == ("failed", "Run 'p' ended without calling final_answer")
    with pytest.raises(RunFailed, match="without calling final_answer"):
        result.output()


@pytest.mark.parametrize("wrong", [{"type": "nonsense"}, lambda: None])
async def test_an_output_that_is_no_type_is_a_config_error(wrong: Any) -> None:
    async with retinue.open() as r:
        with pytest.raises(ConfigError, match="output"):
            await r.spawn(Profile("p", model=scripted({}), output=wrong), "go")


async def test_own_functions_are_tools_sync_or_async_with_or_without_context() -> None:
    @tool(tier="observe")
    def add(a: int, b: int = 2) -> int:
        """Add."""
        return a + b

    @tool(tier="observe")
    async def where(ctx: Context) -> dict[str, Any]:
        """Tell the path and the metadata of the run."""
        return {"path": ctx.path, **ctx.metadata}

    @tool(tier="observe", name="broken_thing")
    def broken() -> None:
        """Break."""
        raise KeyError("lost")

    calls = [("add", {"a": 1}), ("add", {"a": "x"}), ("add", {"a": 1, "c": 2}), ("where", {}), ("broken_thing", {})]
    script = {"p": [{"tools": [{"name": n, "args": a} for n, a in calls]}, {"text": "end"}]}
    async with retinue.open() as r:
        run = await r.spawn(Profile("p", model=scripted(script), tools=[add, where, broken]), "go")
        await run.result()
        results = {body.call_id: body for body in bodies(await r.control.log.read(run.tree), ToolResult)}
    texts = [results[f"call_1_{n}"].text for n in range(1, 6)]
    assert texts[0] == "3"
    assert texts[1] == "add: Expected `int`, got `str` - at `$.a`"
    assert texts[2].startswith("add: unknown argument 'c'. Known arguments: a, b")
    assert msgspec.json.decode(texts[3]) == {"path": "/main", "subagent_depth": 0, "max_subagent_depth": 3}
    assert texts[4] == "KeyError: 'lost'"
    assert add(2, 3) == 5  # still a plain function


def test_a_function_that_cannot_be_a_tool_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="parameter 'args' must be passable by name"):
        tool(lambda *args: None) if False else tool(name="x")(lambda *args: None)
    with pytest.raises(ConfigError, match="tool tier"):
        tool(tier="maybe")(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tool name"):
        tool(name="no spaces")(lambda: None)


async def test_a_callable_is_a_run_like_any_other() -> None:
    async def agent(task: str, ctx: Context) -> str:
        ctx.emit(f"working on {task}")
        if not await ctx.approve("deploy", target="staging"):
            return "not deployed"
        child = await ctx.spawn("helper", "help me")
        return f"deployed, {(await child.result()).final_response}"

    asked: list[Approval] = []

    async def approver(question: Approval) -> Allow:
        asked.append(question)
        return Allow()

    helper = Profile("helper", model=scripted({"helper": [{"text": "helped"}]}))
    async with retinue.open(approver=approver, profiles=[helper]) as r:
        run = await r.spawn(Profile("agent", call=agent), "the release")
        events = [event async for event in run.events()]
        result = await run.result()
    assert result.final_response == "deployed, helped"
    assert [child.name for child in result.children] == ["helper"]
    assert (asked[0].tool, asked[0].args, asked[0].label) == ("deploy", {"target": "staging"}, None)
    assert "message" in [event.kind for event in events]
    async with retinue.open(approver=deny_all, profiles=[helper]) as r:
        assert (await r.run(Profile("agent", call=agent), "x")).final_response == "not deployed"


async def test_a_callable_that_raises_is_a_failed_run() -> None:
    async def agent(task: str, ctx: Context) -> str:
        raise ValueError("wrong turn")

    async with retinue.open() as r:
        result = await r.run(Profile("agent", call=agent), "x")
    assert (result.status, result.error_details) == ("failed", "agent panicked: ValueError: wrong turn")


async def test_as_tool_is_a_plain_function() -> None:
    kid = Profile("kid", model=scripted({"kid": [{"text": "done it"}]}), description="Does things.")
    async with retinue.open() as r:
        function = r.as_tool(kid)
        assert (function.__name__, function.__annotations__) == ("subagent_kid", {"task": str, "return": str})
        assert (function.__doc__ or "").startswith("Does things.")
        assert await function("x") == "done it"

        async def agent(task: str, ctx: Context) -> str:
            return await function("inside")

        result = await r.run(Profile("agent", call=agent), "x")
        assert [child.path for child in result.children] == ["/main/kid-1"]


async def test_run_sync_works_inside_a_running_loop() -> None:
    result = retinue.run_sync(Profile("p", model=scripted({"p": [{"text": "sync"}]})), "go", mode="yes")
    assert result.output() == "sync"
    with pytest.raises(ConfigError, match="unknown model"):
        retinue.run_sync(Profile("p", model="nosuch:model"), "go")


def test_run_sync_works_without_a_loop(tmp_path: Path) -> None:
    result = retinue.run_sync(Profile("p", model=scripted({"p": [{"text": "sync"}]})), "go", path=tmp_path / "s")
    assert result.output() == "sync"
    assert (tmp_path / "s" / ".gitignore").read_text() == "*\n"


async def test_a_question_carries_who_asks_and_what_would_happen(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old\n")
    asked: list[Approval] = []

    async def approver(question: Approval) -> Allow:
        asked.append(question)
        return Allow()

    fixer = Profile("fixer", workspace="shared")
    script = {
        "main": [call("subagent_fixer", task="fix it"), {"text": "end"}],
        "fixer": [call("edit", path="a.txt", old_string="old", new_string="new"), {"text": "fixed"}],
    }
    async with retinue.open(approver=approver, profiles=[fixer], project=tmp_path) as r:
        run = await r.spawn(main(script), "go")
        await run.result()
        events = await r.control.log.read(run.tree)
    [edit] = asked
    assert (edit.tool, edit.label, edit.run, edit.path) == ("edit", "fix it", 1, "/main/fixer-1")
    assert "-old" in edit.preview and "+new" in edit.preview
    assert (tmp_path / "a.txt").read_text() == "new\n"
    assert [b.approval_id for b in bodies(events, ApprovalAsked)] == [
        b.approval_id for b in bodies(events, ApprovalDecided)
    ]


@pytest.mark.finding("U5")
@pytest.mark.parametrize("answer", ["yes", None, True, Allow("ever"), ValueError("broken approver")])  # type: ignore[arg-type]
async def test_an_approver_that_breaks_fails_the_run_and_nothing_ran(answer: Any, tmp_path: Path) -> None:
    async def approver(question: Approval) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    script = {"main": [call("write", path="x", content="y"), {"text": "{{last_result}}"}]}
    async with retinue.open(approver=approver, project=tmp_path) as r:
        result = await r.run(main(script), "go")
    assert result.status == "failed"
    assert "denied" not in result.final_response
    said = "the approver failed: ValueError: broken" if isinstance(answer, Exception) else "the approver answered "
    assert (result.error_details or "").startswith(said)
    assert not (tmp_path / "x").exists()


class AsyncApprover:
    async def __call__(self, question: Approval) -> Allow:
        return Allow()


async def _decide(anything: Approval, more: int = 0) -> Allow | Deny:
    return Allow()


async def _two_parameters(question: Approval, more: int) -> Allow:
    return Allow()


async def _no_parameters() -> Allow:
    return Allow()


async def _returns_bool(question: Approval) -> bool:
    return True


def _sync(question: Approval) -> Allow:
    return Allow()


@pytest.mark.finding("U5")
def test_a_wrong_approver_raises_where_it_is_given() -> None:
    for right in (_decide, AsyncApprover(), AsyncApprover().__call__, partial(_decide, more=1)):
        retinue.open(approver=right)
    wrong: list[tuple[Any, str]] = [
        (_sync, "the approver _sync is not async: write `async def decide"),
        (lambda question: True, "is not async"),
        (_two_parameters, "cannot be called with a question .*'more'"),
        (_no_parameters, "cannot be called with a question"),
        (_returns_bool, "returns bool"),
        (AsyncApprover, "is not a function"),
        ("yes", "is not a function"),
    ]
    for approver, said in wrong:
        with pytest.raises(ConfigError, match=said):
            retinue.open(approver=approver)
        with pytest.raises(ConfigError, match=said):
            retinue.run_sync(main({"main": [{"text": "x"}]}), "go", approver=approver)


async def test_without_an_approver_the_run_ends_and_nothing_ran(tmp_path: Path) -> None:
    script = {"main": [call("write", path="x", content="y"), {"text": "never said"}]}
    async with retinue.open(project=tmp_path) as r:
        result = await r.run(main(script), "go")
    assert (result.status, result.final_response) == ("failed", "Run requires confirmation")
    assert not (tmp_path / "x").exists()


async def test_without_an_approver_parallel_calls_are_stopped_too(tmp_path: Path) -> None:
    both = {
        "tools": [{"name": "write", "args": {"path": "x", "content": "y"}}, {"name": "glob", "args": {"pattern": "*"}}]
    }
    async with retinue.open(project=tmp_path) as r:
        result = await r.run(main({"main": [both]}), "go")
    assert result.final_response == "Run requires confirmation"


async def test_the_thread_is_what_the_model_saw() -> None:
    seen: list[list[Any]] = []

    class Listening:
        inner = scripted(
            {
                "main": [
                    {"thinking": "hm", "text": "start", **call("subagent_kid", task="k", background=True)},
                    spawn({"task": "x"}, {"task": "y"}),
                    {"tools": [call("list_agents")["tools"][0], call("nosuch")["tools"][0]]},
                    {"text": "end"},
                ],
                "*": [{"text": "fine"}],
            }
        )

        async def complete(self, request: Any, on_delta: Any) -> Any:
            if request.ref.run == 0:
                seen.append(list(request.thread))
            return await self.inner.complete(request, on_delta)

    async with retinue.open(approver=allow_all, profiles=[Profile("kid")]) as r:
        run = await r.spawn(Profile("main", model=Listening()), Task("go"))
        await run.result()
        events = await r.control.log.read(run.tree)
    folded = fold_thread(events, 0)
    assert folded[: len(seen[-1])] == seen[-1]
    assert len(folded) == len(seen[-1]) + 1


async def test_one_retinue_holds_many_trees(tmp_path: Path) -> None:
    async with retinue.open(tmp_path / ".retinue") as r:
        profile = main({"main": [{"text": "x"}]})
        runs = [await r.spawn(profile, f"task {n}") for n in range(20)]
        results = [await run.result() for run in runs]
        assert len({result.tree for result in results}) == 20
        assert r.control.trees == {}
        assert sorted([each.tree for each in await r.control.log.list_trees()]) == sorted(
            result.tree for result in results
        )
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_wrong_names_are_config_errors_and_make_no_run(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("agents:\n  main:\n    - txet: hi\n")
    cases = [
        (Profile("p"), "has no model"),
        (Profile("p", model="scripted:"), "names no file"),
        (Profile("p", model="scripted:bad.yaml"), r"bad\.yaml:3: .*txet"),
        (Profile("p", model="scripted:none.yaml"), r"none\.yaml"),
        (Profile("p", model=scripted({}), tools=["hammer"]), "unknown tool 'hammer'"),
        (Profile("p", model=scripted({}), tools=[3]), "must be a name"),
        ("nosuch", "unknown profile 'nosuch'"),
    ]
    async with retinue.open(project=tmp_path) as r:
        for profile, words in cases:
            with pytest.raises(ConfigError, match=words):
                await r.spawn(profile, "go")
        assert [each.tree for each in await r.control.log.list_trees()] == []
    with pytest.raises(ConfigError, match="profile name"):
        Profile("../up")
    with pytest.raises(ConfigError, match="unknown runtime"):
        Profile("p", runtime="moon")  # type: ignore[arg-type]
    with pytest.raises(retinue.RetinueError, match="not open"):
        await retinue.open().spawn("p", "x")


async def test_config_is_read_only_when_given(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("agents: {'*': [hello]}\n")
    (tmp_path / "retinue.yaml").write_text("model: scripted:s.yaml\n")
    async with retinue.open(project=tmp_path) as r:
        with pytest.raises(ConfigError, match="has no model"):
            await r.spawn(Profile("p"), "go")
    async with retinue.open(project=tmp_path, config=tmp_path / "retinue.yaml") as r:
        assert (await r.run(Profile("p"), "go")).output() == "hello"
        assert (await r.run("explorer", "go")).output() == "hello"


@pytest.mark.finding("U6")
async def test_built_in_profiles_by_name() -> None:
    for name in ("critic", "evaluator", "explorer", "novelty", "researcher", "round_evaluator"):
        profile = retinue.load_profile(name)
        assert (profile.name, profile.source) == (name, "built in")
        assert profile.instructions and profile.description
    with pytest.raises(ConfigError, match=r"unknown built-in profile 'explorr'; available: critic, .*explorer"):
        retinue.load_profile("explorr")
    seen: list[str] = []

    class Listening:
        async def complete(self, request: Request, on_delta: OnDelta) -> Reply:
            seen.append(request.system)
            return Reply("found")

    with pytest.raises(ConfigError, match="'explorer' is not a Profile; load_profile"):
        retinue.open(profiles=["explorer"])  # type: ignore[list-item]
    own = Profile("critic", "My own critic.")
    async with retinue.open(model=Listening(), profiles=[own]) as r:
        assert (await r.run("explorer", "go")).output() == "found"
        assert (await r.run("critic", "go")).output() == "found"
        assert (await r.run(retinue.load_profile("researcher"), "go")).output() == "found"
        with pytest.raises(ConfigError, match="unknown skill 'cooking'"):
            await r.spawn(Profile("p", skills=["cooking"]), "go")
    assert seen[0].startswith(retinue.load_profile("explorer").instructions)
    assert seen[1].startswith("My own critic.")
    assert "- report-writing: " in seen[2]


@pytest.mark.parametrize("options", [{"runtime": "bogus"}, {"runtime": "isolated", "fallback": "bogus"}])
async def test_an_unknown_runtime_is_an_error_that_names_the_option(options: dict[str, Any]) -> None:
    known = "inherited, isolated, container, delegated"
    with pytest.raises(ConfigError, match=f"^{[*options][-1]}: unknown runtime 'bogus'; available: {known}$"):
        async with retinue.open(model=scripted({"main": ["hi"]}), **options) as r:
            await r.run(Profile("main"), "go")


async def test_a_huge_function_result_is_cut_and_kept(tmp_path: Path) -> None:
    @tool(tier="observe")
    def huge() -> str:
        """A lot."""
        return "x" * 5_000_000

    script = {"main": [call("huge"), {"text": "end"}]}
    async with retinue.open(tmp_path / ".retinue") as r:
        run = await r.spawn(main(script, tools=[huge]), "go")
        await run.result()
        [given] = bodies(await r.control.log.read(run.tree), ToolResult)
    assert len(given.text) < 60_000 and "bytes cut" in given.text
    assert Path(given.file).stat().st_size == 5_000_000


async def test_a_text_too_large_for_an_event_is_whole_in_a_file(tmp_path: Path) -> None:
    words = "äbc " * 1_200_000
    script = {"main": [{"thinking": words, "text": words, **call("list_agents")}, {"text": words}]}
    async with retinue.open(tmp_path / ".retinue") as r:
        run = await r.spawn(main(script), "go")
        result = await run.result()
        events = await r.control.log.read(run.tree)
    for body in (*bodies(events, Message), *bodies(events, Thinking), bodies(events, RunEnded)[0]):
        said = body.final_response if isinstance(body, RunEnded) else body.text
        assert len(said.encode()) <= 4 * 1024 * 1024 and "whole text in" in said
        assert Path(body.file).read_text() == words
    assert result.status == "done"
    [_, first, _, last] = fold_thread(events, 0)
    assert (first.text, first.thoughts[0].text, last.text) == (words, words, words)


async def test_a_run_is_told_something_while_it_works() -> None:
    async with retinue.open() as r:
        clock = HeldClock()
        look = {"tools": [{"name": "glob", "args": {"pattern": "*"}}], "delay": 1}
        run = await r.spawn(Profile("main", "x", model=scripted({"main": [look, "end"]}, clock=clock)), "go")
        assert (await run.send("look here")).state == "queued"
        clock.release()
        await run.result()
        assert (await run.send("and here")).state == "too_late"
        assert [e.body.text async for e in run.events() if e.kind == "inbox"] == ["look here"]
