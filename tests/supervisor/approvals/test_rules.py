"""Rules as values: what can be written, what it matches, and that no shell trick gets past one."""

import subprocess

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from retinue.core.errors import ConfigError
from retinue.core.messages import ToolSpec
from retinue.core.rules import (
    Mode,
    Rule,
    Rules,
    concerns_tool,
    derive_rule,
    find_allowing_rule,
    find_stopping_rule,
    parse_rule,
    read_command,
)
from retinue.supervisor.policy import RulePolicy

SHELL = ToolSpec("shell", "", {})


def rules(*texts: str) -> tuple[Rule, ...]:
    return tuple(map(parse_rule, texts))


def judged(command: str, mode: Mode = "ask", **lists: list[str]) -> str:
    policy = RulePolicy(Rules(None, **{kind: rules(*texts) for kind, texts in lists.items()}), mode=mode)
    return policy.judge(SHELL, {"command": command}, primary=True, workspace="/w").what


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("read", Rule("read")),
        ("mcp__*", Rule("mcp__*")),
        ("shell(git status*)", Rule("shell", "git status*")),
        (" edit( src/** ) ", Rule("edit", "src/**")),
        ("deploy(target=staging)", Rule("deploy", "staging", "target")),
        ("fs_edit_file(a.py)", Rule("fs_edit_file", "a.py")),
    ],
)
def test_what_a_rule_says(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize("text", ["", "shell(", "shell()", "a b", "deploy(staging)", "shell(x) y", "edit([z-a])"])
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_rule(text)


@pytest.mark.parametrize(
    ("pattern", "path", "hit"),
    [
        ("src/**", "src/a/b.py", True),
        ("src/**", "srcs/a.py", False),
        ("src/*", "src/a/b.py", False),
        ("src/*.py", "src/a.py", True),
        ("**/secret", "secret", True),
        ("**/secret", "a/b/secret", True),
        ("**/secret", "a/nosecret", False),
        ("a?.py", "a1.py", True),
        ("a?.py", "a/.py", False),
        ("a[0-9].py", "a1.py", True),
        ("a[!0-9].py", "a1.py", False),
        ("a.py", "aXpy", False),
    ],
)
def test_paths(pattern: str, path: str, hit: bool) -> None:
    assert bool(find_allowing_rule(rules(f"edit({pattern})"), "edit", {}, path)) is hit
    assert bool(find_stopping_rule(rules(f"edit({pattern})"), "edit", {}, (path,))) is hit


def test_arguments_of_other_tools() -> None:
    one = rules("deploy(target=stag*)", "deploy(count=3)")
    assert find_allowing_rule(one, "deploy", {"target": "staging"}, None) == "deploy(target=stag*)"
    assert find_allowing_rule(one, "deploy", {"count": 3}, None) == "deploy(count=3)"
    assert find_allowing_rule(one, "deploy", {"target": "production"}, None) == ""
    assert concerns_tool(parse_rule("mcp__*"), "mcp__db__query") and not concerns_tool(parse_rule("mcp__*"), "amcp__x")


@pytest.mark.parametrize(
    ("command", "verdict"),
    [
        ("git status", "allow"),
        ("git status -s", "allow"),
        ("git 'status'   -s", "allow"),
        ("git status | head -3", "allow"),
        ("git status && git status; head x", "allow"),
        ("git status | rm x", "ask"),
        ("git status; rm x", "ask"),
        ("git status & rm x", "ask"),
        ("git status &", "ask"),
        ("git status\nrm x", "ask"),
        ("git status $(rm x)", "ask"),
        ("git status `rm x`", "ask"),
        ('git status "$(rm x)"', "ask"),
        ("git status <(rm x)", "ask"),
        ("git status > x", "ask"),
        ("GIT_DIR=/x git status", "ask"),
        ("'git status'", "ask"),
        ("./git status", "ask"),
        ("git status 'x", "ask"),
        ("git status \\", "ask"),
        ("git status *", "ask"),
        ("git status ~", "ask"),
        ("git status {a,b}", "ask"),
        ("if git status; then head x; fi", "ask"),
        ("! git status", "ask"),
        ("git status\x1b", "ask"),
        ("", "ask"),
    ],
)
def test_a_pattern_is_about_one_simple_command(command: str, verdict: str) -> None:
    assert judged(command, allow=["shell(git status*)", "shell(head*)"]) == verdict


@pytest.mark.parametrize("mode", ["ask", "yes"])
@pytest.mark.parametrize(
    "command",
    [
        "rm x", "r''m x", '"rm" x', "r\\m x", "/bin/rm x", "ls; rm x", "ls | rm x", "ls && rm x", "ls\nrm x", "$(rm x)",
        "`rm x`", "(rm x)", "{ rm x; }", "A=1 rm x", "sudo rm x", "env A=1 rm x", "xargs rm x", "bash -c 'rm x'",
        "if true; then rm x; fi", "echo <(rm x)", "! rm x", "time rm x", "find . -exec rm x",
    ],
)  # fmt: skip
def test_deny_wins_and_sees_through_quotes(command: str, mode: Mode) -> None:
    assert judged(command, mode, allow=["shell", "shell(*)"], deny=["shell(rm *)"]) == "deny"


@pytest.mark.parametrize("command", ["$x -rf", "eval \"r''m x\"", "bash -c \"r''m x\"", "r{m,} x", "ls > x", "a='"])
def test_what_is_not_understood_asks_where_something_is_denied(command: str) -> None:
    assert judged(command, "yes", deny=["shell(rm *)"]) == "ask"
    assert judged(command, "yes") == "allow"


def test_the_order_is_deny_ask_allow_mode() -> None:
    assert judged("a x", "yes", deny=["shell(a*)"], ask=["shell(a*)"], allow=["shell(a*)"]) == "deny"
    assert judged("a x", "yes", ask=["shell(a*)"], allow=["shell(a*)"]) == "ask"
    assert judged("a x", "ask", allow=["shell(a*)"]) == "allow"
    assert judged("b x", "ask", allow=["shell(a*)"]) == "ask"
    assert judged("b x", "yes", ask=["shell(a*)"]) == "allow"


@pytest.mark.parametrize("command", ["git status", "ls 'a b' \"c*\" '[x]'", "echo 'it''s'", "a -x=1 # b"])
def test_a_derived_rule_lets_just_that_command_pass(command: str) -> None:
    rule = derive_rule("shell", command)
    if rule is None:
        assert "#" in command
        return
    assert find_allowing_rule((rule,), "shell", {}, command) == str(rule) == str(parse_rule(str(rule)))
    assert not find_allowing_rule((rule,), "shell", {}, command + " more")
    assert derive_rule("shell", "a | b") is None and derive_rule("edit", "/etc/passwd") is None


@pytest.mark.parametrize(
    ("tool", "subject"), [("*", None), ("do it", None), ("", None), ("edit", " a"), ("edit", "a\nb"), ("edit", " ")]
)
def test_no_rule_is_derived_that_would_say_something_else(tool: str, subject: str | None) -> None:
    assert derive_rule(tool, subject) is None


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_a_derived_rule_is_about_one_file_only(path: str, other: str) -> None:
    rule = derive_rule("edit", path)
    if rule is not None:
        assert find_allowing_rule((rule,), "edit", {}, path)
        assert other == path or not find_allowing_rule((rule,), "edit", {}, other)


SIGNS = [*"'\"\\;|&$`(){},<>\n#!*?~\t\r[]=\u00a0", " ", " ", "||", "&&", "$x", "${x}", "$(", "$'", "\\x62", "\\\n"]
WORDS = [*"ok bad ba d b ad x=1 x=bad eval command exec builtin time if then fi do while -c bash alias".split(" ")]  # noqa: SIM905
PIECES = st.sampled_from([*SIGNS, *WORDS])
# The real thing: a shell in which `bad` tells that it ran.
STAGE = 'ok() { :; }; bad() { printf BAD-RAN >&9; }; ad() { :; }; PATH=; shopt -u expand_aliases; eval "$1"'


def ran_bad(command: str) -> bool:
    done = subprocess.run(
        ["bash", "-c", f"exec 9>&1; {STAGE}", "stage", command],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=100, check=False, cwd="/",
    )  # fmt: skip
    return b"BAD-RAN" in done.stdout


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(PIECES, min_size=1, max_size=10).map("".join))
@example("ok 'x' bad")
@example('ok "x"; ok')
@example("ok ''b''ad")
def test_what_bash_would_run_never_passes_by_quoting(command: str) -> None:
    """Whatever is let pass, by an allow rule or past a deny rule in mode yes, does not run `bad` in a real shell."""
    allowed = judged(command, allow=["shell(ok*)"]) == "allow"
    not_denied = judged(command, "yes", deny=["shell(bad*)"]) == "allow"
    if allowed or not_denied:
        assert not ran_bad(command)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_read_without_a_crash(command: str) -> None:
    line = read_command(command)
    assert all(words for words in line.parts)
    assert judged(command, allow=["shell(ok)"]) == ("allow" if line.plain and set(line.parts) == {("ok",)} else "ask")
