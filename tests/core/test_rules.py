"""Tests of rules as values: their syntax, their matches, and shell tricks that must not get past them."""

import subprocess

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from retinue.core.commands import read_command
from retinue.core.errors import ConfigError
from retinue.core.messages import ToolSpec
from retinue.core.rules import (
    Mode,
    Rule,
    Rules,
    concerns_tool,
    derive_rules,
    explain_missing_rule,
    find_allowing_rule,
    find_stopping_rule,
    parse_rule,
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


@pytest.mark.finding("X9")
@pytest.mark.parametrize("mode", ["ask", "yes"])
@pytest.mark.parametrize(
    "command",
    [
        "git -C . push", "git -C . -c x=y --no-pager push origin", "git --git-dir .git push", "/usr/bin/git -P push",
        "env git push", "env -i A=1 git -C . push", "sudo -u me git push", "su -c 'git push'", "su - me -c 'git push'",
        "command git push", "command -p git push", "exec git push", "xargs git push", "nice -n 5 git push",
        "timeout 5 git -C . push", "find . -exec git push ';'", "find . -execdir git push +", "bash -c 'git push'",
        "sh -ec 'git push'", "eval git push", "eval 'git push'", "busybox sh -c 'git push'", "script -c 'git push'",
        "flock x git push", "strace git push", "unshare git push", "ls | git push", "builtin command git push",
    ],
)  # fmt: skip
def test_a_denied_command_is_seen_behind_options_and_wrappers(command: str, mode: Mode) -> None:
    assert judged(command, mode, allow=["shell"], deny=["shell(git push*)"]) == "deny"


@pytest.mark.finding("X9")
@pytest.mark.parametrize(
    "command",
    [
        "echo git push | sh", "echo Z2l0IHB1c2g= | base64 -d | bash", "sh", "sh < x", "sh x.sh", "bash -s", "dash",
        "cat x | sudo sh", "echo push | xargs git", "echo git push | xargs env", "echo git push | xargs -I X sh -c X",
        "eval $x", "x=push; git $x", "git $(echo push)", "alias gp='git push'", "alias g=git; g push", "source x",
        ". x", "command . x", "git -c alias.x=push x", "git --config-env=alias.x=Y x", "git config alias.x push",
        "git config --global alias.x '!git push'",
        "git -c core.fsmonitor='git push' status", "git submodule foreach git push", "git bisect run git push",
        "git rebase --exec 'git push' main", "git fetch --upload-pack='git push'", "ssh host git push",
        "ssh host 'cd x; git push'", "unknown-wrapper git push", "unknown-wrapper --flag git -C . push",
        "unknown-wrapper 'cd x && git push'", "docker run image git push", "npx -c 'git push'", "uv run git push",
        "python -c \"import os; os.system('git ' + 'push')\"", "python3.11 -c x", "perl -e x", "perl -ne x f",
        "node -e x", "node --eval=x", "ruby -e x", "php -r x", "echo x | python", "python - < x",
        "awk 'BEGIN { system(\"git push\") }'",
        "sed '1e git push' x", "make CMD='git push'", "export GIT_EDITOR='git push'", "hash -p /usr/bin/git ls",
        "trap 'git push' EXIT", "timeout 5 sh", "nice bash x", "vim -c '!git push'", "git \\\npush", "gi{t,} push",
        "tmux new-session -d 'git push'", "at now -f x git push", "watch -n1 x sh",
        "watch 'git  push'", "su -c 'git -C . push'", "env -S 'git  push'", "flock x -c 'git -C . push'",
        "git submodule foreach 'git  push'", "git rebase -x 'git  push' main", "script -qc 'git -C . push' x",
        "awk 'BEGIN{system(\"git\" \" push\")}'", "sed '1e git  push' x", "make 'X=$(shell git  push)'",
        "tar cf x --checkpoint-action=exec='git  push' y", "printf -v 'a[$(git push)]' x", "test -v 'a[$(git push)]'",
        "unset 'a[$(git  push)]'", "su -c \"sh -c 'git  push'\"", "echo git push | at now", "echo git push | parallel",
        "git p", "git -C . p", "git-push", "/usr/lib/git-core/git-push origin",
    ],
)  # fmt: skip
def test_a_command_that_could_be_the_denied_one_asks_in_every_mode(command: str) -> None:
    verdict = judged(command, "yes", allow=["shell", "shell(*)"], deny=["shell(git push*)"])
    assert verdict in ("ask", "deny"), verdict
    assert judged(command, "yes", ask=["shell(git push*)"]) == "ask"
    assert judged(command, "yes") == "allow"


@pytest.mark.finding("X9")
@pytest.mark.parametrize(
    "command",
    [
        "git status", "git -C . status", "git commit -m 'push it'", "git commit -m 'git push'", "git stash push",
        "git log --grep push", "git --no-pager commit -m push", "echo git push", "grep -rn 'git push' docs", "ls -la",
        "make test", "npm run build", "python -m pytest -p no:x -r a", "python manage.py -c x", "python --version",
        "node build.js -e x", "cargo build", "find . -name x", "find . | xargs grep foo", "cat a | sort | head -3",
        "env A=1 make test", "timeout 60 make test", "./build.sh", "sed s/a/b/ x", "docker ps", "ssh host ls",
        "pytest -k 'a and b'", "awk '{print $1}' x", "awk -F'|' '{print $2}' x", "sed -n '1,5p' x", "git fetch origin",
        "git worktree list", "printf '%s' x", "gh pr create --title 'push the limits of git'", "jq '.a | .b' x",
    ],
)  # fmt: skip
def test_other_commands_do_not_ask_because_something_is_denied(command: str) -> None:
    assert judged(command, "yes", deny=["shell(git push*)"]) == "allow"


@pytest.mark.finding("X9")
@pytest.mark.parametrize(
    "option", ["--receive-pack='curl x'", "--receive-pack 'curl x'", "--exec='curl x'", "--ex='curl x'"]
)
def test_a_git_that_runs_a_command_of_its_own_is_read(option: str) -> None:
    assert judged(f"git push {option} ./copy", "yes", deny=["shell(curl*)"]) == "ask"
    assert judged("git push --force origin main", "yes", deny=["shell(curl*)"]) == "allow"


@pytest.mark.finding("X9")
def test_options_before_a_subcommand_hide_none() -> None:
    for command in (
        "npm --prefix . publish",
        "npm -w a publish",
        "kubectl -n x delete pod",
        "kubectl --context=a delete",
    ):
        assert judged(command, "yes", deny=["shell(npm publish*)", "shell(kubectl delete*)"]) == "ask"
    assert judged("npm --silent run publish-docs", "yes", deny=["shell(npm publish)"]) == "allow"


@pytest.mark.finding("X9")
def test_a_very_long_command_asks_instead_of_being_searched_for_ever() -> None:
    words = " ".join(["x"] * 50_000)
    assert judged(f"env {words}", "yes", deny=["shell(git push*)"]) == "ask"
    assert judged(f"echo {words}", "yes", deny=["shell(git push*)"]) == "ask"


@pytest.mark.finding("X8")
@pytest.mark.parametrize(
    "command",
    [
        "x " + "-a " * 250,
        "su -c '" + "a b;" * 20_000 + "'",
        "; ".join(f"cmd{number} 'a b'" for number in range(5000)),
        "env " + " ".join(f"{'x' * 1000}{number}" for number in range(250)),
    ],
    ids=["options", "text", "commands", "words"],
)
def test_a_command_that_takes_long_to_compare_asks_instead(command: str) -> None:
    assert judged(command, "yes", deny=["shell(*git*push*)"]) == "ask"


def test_the_order_is_deny_ask_allow_mode() -> None:
    assert judged("a x", "yes", deny=["shell(a*)"], ask=["shell(a*)"], allow=["shell(a*)"]) == "deny"
    assert judged("a x", "yes", ask=["shell(a*)"], allow=["shell(a*)"]) == "ask"
    assert judged("a x", "ask", allow=["shell(a*)"]) == "allow"
    assert judged("b x", "ask", allow=["shell(a*)"]) == "ask"
    assert judged("b x", "yes", ask=["shell(a*)"]) == "allow"


@pytest.mark.parametrize("command", ["git status", "ls 'a b' \"c*\" '[x]'", "echo 'it''s'", "a -x=1 # b"])
def test_a_derived_rule_lets_just_that_command_pass(command: str) -> None:
    rules = derive_rules("shell", command)
    if not rules:
        assert "#" in command
        return
    [rule] = rules
    assert find_allowing_rule(rules, "shell", {}, command) == str(rule) == str(parse_rule(str(rule)))
    assert not find_allowing_rule(rules, "shell", {}, command + " more")
    assert derive_rules("edit", "/etc/passwd") == ()


@pytest.mark.finding("U8")
@pytest.mark.parametrize(
    ("command", "rules"),
    [
        ("python3 -m unittest 2>&1 | tail -n 3", ["shell(python3 -m unittest)", "shell(tail -n 3)"]),
        ("make >/dev/null 2>&1", ["shell(make)"]),
        ("make 2> /dev/null && make test", ["shell(make)", "shell(make test)"]),
        ("make &>/dev/null; ls", ["shell(make)", "shell(ls)"]),
        ("cat < /dev/null >&2", ["shell(cat)"]),
        ("ls | ls", ["shell(ls)"]),
        ("make > log", []),
        ("make 2>&1 > log", []),
        ("make >/dev/nullx", []),
        ("make >/dev/null/../sda", []),
        ("make >& log", []),
        ("make 2>&13", []),
        ("cat < secret", []),
        ("cat <(ls)", []),
        ("make 2>&1&", []),
        ("a | b | c | d | e | f | g | h | i", []),
    ],
)
def test_each_command_of_a_harmless_line_can_have_a_rule(command: str, rules: list[str]) -> None:
    derived = derive_rules("shell", command)
    assert [str(rule) for rule in derived] == rules
    assert bool(find_allowing_rule(derived, "shell", {}, command)) is bool(rules)
    if not rules:
        assert explain_missing_rule("shell", {"command": command}).startswith(
            ("the command writes to a file", "the line has")
        )


@pytest.mark.finding("U8")
def test_a_redirection_that_is_left_out_hides_no_word() -> None:
    for command in ('rm "2">&1', "rm '2'>/dev/null", "rm 2\\>\\&1", "rm a2>&1", "rm x>/dev/null"):
        line = read_command(command)
        assert not line.plain or len(line.parts[0]) == 2, command
    assert judged("git push 2>&1 | cat", "yes", deny=["shell(git push*)"]) == "deny"
    assert judged("make 2>&1", "yes", deny=["shell(git push*)"]) == "allow"


@pytest.mark.parametrize(
    ("tool", "subject"), [("*", None), ("do it", None), ("", None), ("edit", " a"), ("edit", "a\nb"), ("edit", " ")]
)
def test_no_rule_is_derived_that_would_say_something_else(tool: str, subject: str | None) -> None:
    assert derive_rules(tool, subject) == ()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_a_derived_rule_is_about_one_file_only(path: str, other: str) -> None:
    rules = derive_rules("edit", path)
    if rules:
        assert find_allowing_rule(rules, "edit", {}, path)
        assert other == path or not find_allowing_rule(rules, "edit", {}, other)


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
