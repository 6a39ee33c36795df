"""Tests of the policy that decides which calls need a person: modes, tiers, rules about paths, and children."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Approval, ConfigError, Deny, Profile, tool
from retinue.core.events import ApprovalAsked, ApprovalDecided, ToolResult, Warned
from retinue.core.messages import ToolSpec
from retinue.core.ports import Policy
from retinue.core.rules import ALLOW, Mode, Rules, Verdict, parse_rule
from retinue.supervisor.policy import RulePolicy, find_sandbox_policy, narrow_policy
from retinue.testing import allow_all, scripted
from retinue.tools.subagents import SpawnProfile, SpawnSubagents
from tests.supervisor.tree.kit import bodies, call, main, spawn
from tests.workspaces.kit import repository

OBSERVE, CONFIRM = ToolSpec("look", "", {}, tier="observe"), ToolSpec("page", "", {}, tier="confirm")


def policy(mode: Mode = "ask", **lists: list[str]) -> RulePolicy:
    return RulePolicy(Rules(None, **{kind: tuple(map(parse_rule, texts)) for kind, texts in lists.items()}), mode=mode)


def what(judge: Any, spec: ToolSpec, *, primary: bool = True, workspace: str = "/w", **args: Any) -> str:
    verdict: Verdict = judge.judge(spec, args, primary=primary, workspace=workspace)
    return verdict.what


@pytest.mark.requirement("CODEY-24", "CODEY-26", "P18")
@pytest.mark.parametrize(
    ("mode", "spec", "primary", "verdict"),
    [
        ("ask", OBSERVE, True, "allow"),
        ("ask", OBSERVE, False, "allow"),
        ("ask", CONFIRM, True, "ask"),
        ("ask", CONFIRM, False, "ask"),
        ("strict", OBSERVE, True, "ask"),
        ("strict", OBSERVE, False, "allow"),
        ("strict", CONFIRM, True, "ask"),
        ("strict", CONFIRM, False, "ask"),
        ("yes", CONFIRM, True, "allow"),
    ],
)
def test_modes_and_tiers(mode: Mode, spec: ToolSpec, primary: bool, verdict: str) -> None:
    assert what(policy(mode), spec, primary=primary) == verdict


@pytest.mark.requirement("CODEY-25", "CODEY-5")
@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("name", ["edit", "write", "shell", "mcp_edit_file", "fs_write_file", "box_shell"])
def test_what_changes_things_asks_whoever_calls_and_whatever_it_calls_itself(name: str, primary: bool) -> None:
    for mode in ("ask", "strict"):
        assert what(policy(mode), ToolSpec(name, "", {}, tier="observe"), primary=primary) == "ask"


@pytest.mark.requirement("CODEY-26")
def test_other_tools_of_subagents_pass_unless_a_rule_says_otherwise() -> None:
    assert what(policy("strict"), OBSERVE, primary=False) == "allow"
    assert what(policy(ask=["look"]), OBSERVE, primary=False) == "ask"
    assert what(policy(deny=["lo*"]), OBSERVE, primary=False) == "deny"


@pytest.mark.requirement("SDK-16")
async def test_spawning_is_of_the_confirm_tier_and_strict_asks_about_it() -> None:
    assert SpawnSubagents().spec.tier == SpawnProfile(Profile("kid")).spec.tier == "confirm"
    assert await _spawn_twice("strict") == [("subagent_kid", 0)]


@pytest.mark.finding("U2")
@pytest.mark.parametrize("mode", ["ask", "sandboxed", "yes"])
async def test_spawning_what_the_user_made_available_does_not_ask(mode: Mode) -> None:
    assert await _spawn_twice(mode) == []
    assert await _spawn_twice(mode, ask=["spawn_*"]) == [("spawn_subagents", 1)]


async def _spawn_twice(mode: Mode, ask: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Spawn from a primary and from its child; return the tools that asked and their runs."""
    asked: list[tuple[str, int]] = []

    async def approver(question: Approval) -> retinue.Allow:
        asked.append((question.tool, question.run))
        return retinue.Allow()

    kid = Profile("kid")
    script = {"main": [call("subagent_kid", task="a"), {"text": "x"}], "kid": [spawn({"task": "b"}), {"text": "y"}]}
    async with retinue.open(approver=approver, profiles=[kid], mode=mode, ask=ask) as r:
        result = await r.run(main({**script, "subagent": [{"text": "z"}]}), "go")
    assert (result.status, len(result.children), len(result.children[0].children)) == ("done", 1, 1)
    return asked


@pytest.mark.finding("U2")
async def test_a_child_s_dangerous_call_asks_though_spawning_it_did_not() -> None:
    asked: list[tuple[str, int]] = []

    async def approver(question: Approval) -> retinue.Deny:
        asked.append((question.tool, question.run))
        return retinue.Deny("no")

    script = {
        "main": [call("subagent_kid", task="a"), {"text": "x"}],
        "kid": [call("shell", command="ls"), {"text": "y"}],
    }
    kid = Profile("kid", tools=["shell"])
    async with retinue.open(approver=approver) as r:
        await r.run(Profile("main", model=scripted(script), tools=[kid, "shell"]), "go")
    assert asked == [("shell", 1)]


@pytest.mark.finding("U2")
def test_a_function_with_the_name_of_a_spawning_tool_asks_all_the_same() -> None:
    policy = RulePolicy(Rules(), mode="ask")
    spawning = SpawnProfile(Profile("kid")).spec
    assert what(policy, spawning) == "allow"
    assert what(policy, ToolSpec(spawning.name, "", {}, tier="confirm")) == "ask"


@pytest.mark.finding("U2")
async def test_a_run_that_had_nobody_to_ask_names_the_tool() -> None:
    script = {
        "main": [call("subagent_kid", task="a"), call("shell", command="ls")],
        "kid": [call("shell", command="ls")],
    }
    kid = Profile("kid", tools=["shell"])
    async with retinue.open() as r:
        run = await r.spawn(Profile("main", model=scripted(script), tools=[kid, "shell"]), "go")
        warned = [(e.run, e.body.text) async for e in run.events() if isinstance(e.body, Warned)]
        result = await run.result()
    assert result.error_details == "Run 'main' requested confirmation for shell, and no approver is attached"
    assert warned == [(1, "shell needs a confirmation, and no approver is attached")]


def test_sandboxed_does_not_ask_inside_a_sandbox_unless_a_rule_does() -> None:
    rules = Rules(ask=(parse_rule("shell(git push*)"),), deny=(parse_rule("edit(secret*)"),))
    policy = RulePolicy(rules, mode="sandboxed")
    plain = find_sandbox_policy(RulePolicy(Rules(), mode="sandboxed"))

    def verdicts(policy: Policy) -> list[str]:
        calls = [
            ("shell", {"command": "make"}), ("shell", {"command": "git push"}), ("write", {"path": "a"}),
            ("edit", {"path": "b"}), ("edit", {"path": "secret"}), ("apply_subagent", {}), ("spawn_subagents", {}),
            ("execute_python_code", {"code": "1"}),
        ]  # fmt: skip
        specs = [(ToolSpec(name, "", {}, tier="confirm"), args) for name, args in calls]
        return [policy.judge(spec, args, primary=True, workspace="/tmp").what for spec, args in specs]

    assert verdicts(policy) == ["ask", "ask", "ask", "ask", "deny", "ask", "ask", "ask"]
    assert verdicts(find_sandbox_policy(policy)) == ["allow", "ask", "allow", "allow", "deny", "ask", "ask", "ask"]
    assert verdicts(plain) == ["allow", "allow", "allow", "allow", "allow", "ask", "ask", "allow"]
    stricter = narrow_policy(policy, Rules(mode="ask"), "")
    assert verdicts(find_sandbox_policy(stricter)) == ["ask", "ask", "ask", "ask", "deny", "ask", "ask", "ask"]
    laxer = narrow_policy(RulePolicy(rules, mode="ask"), Rules(mode="sandboxed"), "")
    assert verdicts(find_sandbox_policy(laxer)) == ["ask", "ask", "ask", "ask", "deny", "ask", "ask", "ask"]
    policy.learn(parse_rule("apply_subagent"))
    assert verdicts(find_sandbox_policy(policy))[5] == "allow"


async def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown approval mode"):
        async with retinue.open(mode="lax"):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("approvals:\n  allow: [shell(]", r":2: key 'approvals\.allow\[0\]': 'shell\(' is not a rule"),
        ("approvals:\n  deny:\n    - read\n    - deploy(x)", r":4: key 'approvals\.deny\[1\]': .*argument=pattern"),
        ("approvals:\n  mode: maybe", r":2: key 'approvals\.mode': unknown value 'maybe'"),
        ("approvals:\n  permit: []", r":2: key 'approvals\.permit': unknown key"),
        ("approval_timeout: -1", r":1: key 'approval_timeout': must be 0 or more"),
        ("approvals:\n  allow: read", r":2: key 'approvals\.allow': expected a list of rules"),
    ],
)
async def test_wrong_rules_are_named_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    config = tmp_path / "retinue.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=words):
        async with retinue.open(project=tmp_path, config=config):
            pass


def test_a_path_is_what_it_resolves_to(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "src" / "link").symlink_to(tmp_path / "secret")
    edit, here = ToolSpec("edit", "", {}), str(tmp_path)
    rules = policy(allow=["edit(src/**)"])
    for path in ("src/a.py", "./src/x/../a.py", f"{here}/src/a.py"):
        assert what(rules, edit, workspace=here, path=path) == "allow", path
        assert what(rules, edit, workspace=here, file_path=path) == "allow", path
    for path in ("src/../secret/a", "src/link/a", "../src/a.py", "/src/a.py", "src", "", None, 3, "src/\0"):
        assert what(rules, edit, workspace=here, path=path) == "ask", path
    denied = RulePolicy(Rules(deny=(parse_rule("edit(secret/**)"),)), mode="yes", project=here)
    for path in ("secret/a", "src/link/a", "src/../secret/a", f"{here}/secret/a"):
        assert what(denied, edit, workspace=here, path=path) == "deny", path
    assert what(denied, edit, workspace=here, path="src/a") == "allow"
    assert what(denied, edit, workspace=here) == "ask"  # no path: nobody can tell


@pytest.mark.requirement("P32")
def test_a_child_elsewhere_does_not_get_round_a_rule_about_the_project(tmp_path: Path) -> None:
    project, scratch = tmp_path / "p", tmp_path / "s"
    (project / "secret").mkdir(parents=True)
    scratch.mkdir()
    denied = RulePolicy(Rules(deny=(parse_rule("read(secret/**)"),)), mode="ask", project=str(project))
    read = ToolSpec("read", "", {}, tier="observe")
    for path in (f"{project}/secret/key", "secret/key", "../p/secret/key"):
        assert what(denied, read, primary=False, workspace=str(scratch), path=path) == "deny", path
    assert what(denied, read, primary=False, workspace=str(scratch), path="open/key") == "allow"


async def test_an_agent_cannot_edit_its_own_rules_unasked(tmp_path: Path) -> None:
    config = tmp_path / "retinue.yaml"
    config.write_text('approvals: {allow: ["edit(**)", "write(**)"]}\n')
    asked: list[Approval] = []

    async def approver(question: Approval) -> retinue.Allow | retinue.Deny:
        asked.append(question)
        return retinue.Deny() if len(asked) == 2 else retinue.Allow("tool")

    own = call("write", path="./retinue.yaml", content="approvals: {mode: yes}\n")
    script = [call("write", path="a", content="1"), call("write", path="/x", content=""), own, own, {"text": "x"}]
    async with retinue.open(project=tmp_path, config=config, approver=approver) as r:
        await r.run(main({"main": script}), "go")
    assert (tmp_path / "a").exists()
    # Also after a yes to the tool in the whole tree, it is asked about each time.
    assert [(q.args["path"], q.rule) for q in asked] == [("./retinue.yaml", "")] * 2


STRICTNESS = {"allow": 0, "ask": 1, "deny": 2}


@pytest.mark.requirement("P32")
def test_a_child_s_policy_is_never_laxer() -> None:
    shell = ToolSpec("shell", "", {})
    parents = [policy(mode, **lists) for mode in ("ask", "strict", "yes") for lists in ({}, {"deny": ["page"]})]
    everything = tuple(map(parse_rule, ("shell", "page", "look")))
    owns = [Rules("yes", everything), Rules("ask", (), everything), Rules("strict"), Rules(None, (), (), everything)]
    for parent in parents:
        for own in owns:
            child = narrow_policy(parent, own, project="/w")
            below = narrow_policy(child, Rules("yes", everything), project="/w")
            for spec in (shell, OBSERVE, CONFIRM):
                verdicts = [what(judge, spec, primary=False, command="x") for judge in (parent, child, below)]
                ranks = [STRICTNESS[verdict] for verdict in verdicts]
                assert ranks == sorted(ranks), (own, spec.name, verdicts)
    assert what(narrow_policy(policy("yes"), Rules("strict"), project="/w"), OBSERVE, primary=False) == "ask"


@pytest.mark.requirement("P32")
async def test_delegating_gains_nothing(tmp_path: Path) -> None:
    kid = Profile("kid", approvals=Rules("yes", (parse_rule("shell"), parse_rule("write"))))
    careful = Profile("careful", approvals=Rules(deny=(parse_rule("write"),)))
    script = {
        "main": [call("subagent_careful", task="c"), {"text": "{{last_result}}"}],
        "careful": [
            call("write", path="own", content="x"), call("subagent_kid", task="you do it"), {"text": "{{last_result}}"}
        ],
        "kid": [call("write", path="mine", content="x"), {"text": "{{last_result}}"}],
    }  # fmt: skip
    async with retinue.open(approver=allow_all, profiles=[kid, careful], project=tmp_path, deny=["shell"]) as r:
        run = await r.spawn(main(script), "go")
        result = await run.result()
        events = await r.control.log.read(run.tree)
    assert "the rule write forbids it" in result.final_response
    by = [(event.run, event.body.by) for event in events if isinstance(event.body, ApprovalDecided)]
    assert (1, "rule: write") in by and (2, "rule: write") in by


async def test_profiles_in_a_file_have_rules_of_their_own(tmp_path: Path) -> None:
    config = tmp_path / "retinue.yaml"
    config.write_text(
        "approvals:\n  mode: yes\nprofiles:\n  kid:\n    description: d\n    approvals: {deny: ['shell(rm *)']}\n"
        "orchestrator: {coordination: {subagent_types: [kid]}}\n"
    )
    script = {
        "main": [call("subagent_kid", task="t"), {"text": "{{last_result}}"}],
        "kid": [call("shell", command="r''m x"), {"text": "{{last_result}}"}],
    }
    async with retinue.open(project=tmp_path, config=config) as r:
        result = await r.run(main(script), "go")
    assert result.final_response == "The user denied this call: the rule shell(rm *) forbids it"


async def test_a_rule_decides_and_the_log_says_which(tmp_path: Path) -> None:
    @tool(tier="confirm")
    def deploy(target: str) -> str:
        """Deploy."""
        return f"deployed {target}"

    calls = [call("deploy", target=where) for where in ("staging", "production")]
    async with retinue.open(allow=["deploy(target=staging)"], deny=["deploy(target=prod*)"]) as r:
        run = await r.spawn(main({"main": [*calls, {"text": "x"}]}, tools=[deploy]), "go")
        await run.result()
        events = await r.control.log.read(run.tree)
    assert not bodies(events, ApprovalAsked)
    decided = bodies(events, ApprovalDecided)
    assert [(d.allowed, d.by, d.tool) for d in decided] == [
        (True, "rule: deploy(target=staging)", "deploy"),
        (False, "rule: deploy(target=prod*)", "deploy"),
    ]
    assert [result.success for result in bodies(events, ToolResult)] == [True, False]


async def test_a_call_that_cannot_work_is_asked_about_in_no_mode(tmp_path: Path) -> None:
    async def nobody(question: Approval) -> retinue.Allow:
        raise AssertionError("asked")

    calls = [call("edit", path="none", old_string="a", new_string="b"), call("nosuch"), {"text": "x"}]
    async with retinue.open(mode="strict", approver=nobody, project=tmp_path) as r:
        run = await r.spawn(main({"main": calls}), "go")
        await run.result()
        events = await r.control.log.read(run.tree)
    assert not bodies(events, ApprovalAsked) + bodies(events, ApprovalDecided)
    assert "No such file" in bodies(events, ToolResult)[0].text


def test_judging_costs_next_to_nothing() -> None:
    """A call that no rule mentions is decided by a lookup, without calling another function."""
    judge, called = policy(deny=["shell(rm *)"]), list[str]()
    assert judge.judge(OBSERVE, {}, primary=True, workspace="/w") is ALLOW
    sys.setprofile(lambda frame, what, _: called.append(frame.f_code.co_name) if what == "call" else None)
    try:
        judge.judge(OBSERVE, {}, primary=True, workspace="/w")
    finally:
        sys.setprofile(None)
    assert called == ["judge"]


@pytest.mark.finding("X3")
@pytest.mark.parametrize("mode", ["ask", "strict", "sandboxed", "yes"])
@pytest.mark.parametrize("path", [".git/config", "sub/.GIT/hooks/pre-commit", "link/config", "/w/x/../.git./HEAD"])
def test_file_tools_of_servers_do_not_write_inside_git_in_any_mode(mode: Mode, path: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "link").symlink_to(".git")
    write = ToolSpec("mcp__fs__our_write_file", "", {}, server="fs", seal="s")
    rules = policy(mode, allow=["*_write_file"])
    for _ in range(2):  # the second time from what is remembered
        assert what(rules, write, workspace=str(tmp_path), path="a.txt") == "allow"
        assert what(rules, write, workspace=str(tmp_path), path=path) == "deny"


@pytest.mark.finding("X3")
@pytest.mark.parametrize("mode", ["ask", "yes"])
def test_other_tools_of_servers_ask_before_they_get_a_path_inside_git(mode: Mode, tmp_path: Path) -> None:
    move = ToolSpec("mcp__fs__move_file", "", {}, server="fs", seal="s")
    allowing, denying = policy(mode, allow=["mcp__fs"]), policy(mode, deny=["mcp__fs"])
    for target in (".git/config", "sub/.Git", "x/.git./hooks/pre-commit"):
        assert what(allowing, move, workspace=str(tmp_path), source="a", destination=target) == "ask"
        assert what(denying, move, workspace=str(tmp_path), source="a", destination=target) == "deny"
    for other in ("a.git/b", "**/.git/**", "https://example.com/.git/config"):
        assert what(allowing, move, workspace=str(tmp_path), source="a", destination=other) == "allow"
    read = ToolSpec("mcp__fs__read_file", "", {}, server="fs", seal="s")
    assert what(allowing, read, workspace=str(tmp_path), path=".git/HEAD") == "allow"


@pytest.mark.finding("X3", "X5")
def test_a_path_under_a_second_name_is_a_path_too(tmp_path: Path) -> None:
    write = ToolSpec("mcp__fs__write_file", "", {}, server="fs", seal="s")
    both = {"path": "a.txt", "file_path": ".git/config"}
    assert what(policy("yes"), write, workspace=str(tmp_path), **both) == "deny"
    both = {"path": "a.txt", "file_path": ".env"}
    assert what(policy("yes", deny=["edit(.env)"]), write, workspace=str(tmp_path), **both) == "deny"
    assert what(policy("ask", allow=["mcp__fs__write_file(a.txt)"]), write, workspace=str(tmp_path), **both) == "ask"


@pytest.mark.finding("X3")
@pytest.mark.parametrize("mode", ["ask", "sandboxed", "yes"])
async def test_hooks_and_settings_of_git_outside_its_folder_are_not_written_unasked(mode: Mode, tmp_path: Path) -> None:
    project = repository(tmp_path / "p", **{"hooks/pre-commit": "true\n", "sub/a.txt": "a\n"})
    settings = project / ".git/config"
    settings.write_text(f'{settings.read_text()}[core] hooksPath = "hooks"\n[Include]\n\tpath = ../shared.conf\n')
    asked: list[str] = []

    async def refuse(question: Approval) -> Deny:
        asked.append(question.args["path"])
        return Deny("no")

    paths = ["hooks/pre-commit", "./sub/../shared.conf", "hooks/new", "sub/b.txt"]
    calls = [call("write", path=path, content="x") for path in paths]
    writer = Profile("main", model=scripted({"main": [*calls, "done"]}), workspace="shared")
    options: Any = {"approver": refuse, "runtime": "inherited", "project": project, "allow": ["write(**)"]}
    async with retinue.open(project / ".retinue", mode=mode, **options) as r:
        await (await r.spawn(writer, "go")).result()
    assert sorted(asked) == sorted(paths[:3]) and (project / "sub/b.txt").exists()
    assert not (project / "shared.conf").exists()
