"""Approval rules, parsed and matched: `shell(git status*)`, `edit(src/**)`, `read`, `mcp__*`.

A rule is a tool's name and, in brackets, a pattern for the argument that matters: the command of a shell, the path of
a file tool, or `name=pattern` for an argument of any other tool. `mcp__files__move@SEAL` allows a tool of an MCP
server only while the tool is the same as when a person approved it. Pure: code with access to the disk resolves the
path of a call (links, `..`) and passes it in as the call's `subject`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal, get_args

import msgspec

from retinue.core.commands import (
    conceals_command,
    evaluates_text,
    join_exact_words,
    list_inner_commands,
    list_possible_readings,
    list_readings,
    may_hold,
    read_command,
)
from retinue.core.errors import ConfigError
from retinue.core.globs import GLOB_CHARACTERS, compile_glob
from retinue.core.servers import PREFIX

Mode = Literal["ask", "strict", "sandboxed", "yes"]
MODES: tuple[Mode, ...] = get_args(Mode)
DEFAULT_MODE: Mode = "ask"
SHELLS = ("shell", "_shell")
FILES = ("read", "write", "edit", "glob", "grep", "_read_file", "_write_file", "_edit_file")
CODE_MODE = "execute_python_code"
READERS = ("read", "grep", "glob", "_read_file")
WRITERS = ("write", "edit", "_write_file", "_edit_file")
ALWAYS_ASK = ("edit", "write", "shell", CODE_MODE, "_edit_file", "_write_file", "_shell")
_RULE = re.compile(r"([A-Za-z0-9_*?.-]+)(?:@([0-9a-f]{32}))?(?:\((.*)\))?", re.DOTALL)
_SEAL = "(?:@[0-9a-f]{32})?"
_WITH_SUBJECT = "|".join(f"[A-Za-z0-9_*?.-]*{kind}" if kind[0] == "_" else kind for kind in (*SHELLS, *FILES))
# The syntax of `parse_rule` for a JSON schema. It also accepts invalid ranges in [...].
RULE_PATTERN = (
    rf"^\s*(?:[A-Za-z0-9_*?.-]+{_SEAL}|(?:{_WITH_SUBJECT}){_SEAL}\(\s*\S[\s\S]*\)"
    rf"|[A-Za-z0-9_*?.-]+{_SEAL}\([A-Za-z_][A-Za-z0-9_-]*=[\s\S]*\))\s*$"
)
MAX_COMMANDS = 256  # in a line, and again in their arguments; a line with more asks
MAX_READ_CHARACTERS = 200_000
MAX_DERIVED = 8  # the most commands of one line that get a rule each
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)=(.*)", re.DOTALL)
SHOWN_CHARACTERS = 200


class Rule(msgspec.Struct, frozen=True, gc=False):
    """A rule about calls of `tool`. `pattern` is None for a rule about every call. `argument` names the argument to
    match the pattern against. A rule with a `seal` allows the tool only while the tool has this seal, but denies it in
    any case."""

    tool: str
    pattern: str | None = None
    argument: str = ""
    seal: str = ""

    def __str__(self) -> str:
        named = f"{self.argument}=" if self.argument else ""
        tool = join_seal(self.tool, self.seal)
        return tool if self.pattern is None else f"{tool}({named}{self.pattern})"


class Rules(msgspec.Struct, frozen=True, gc=False):
    """The approval rules of a file or a profile. Deny goes before ask, ask before allow, allow before the mode."""

    mode: Mode | None = None
    allow: tuple[Rule, ...] = ()
    ask: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The verdict on a call: allow, ask or deny. `rule` is the reason, unless mode and tier alone decided. A `firm`
    ask cannot be settled by answers about other calls. `changed` means a rule would allow the tool as it was before it
    changed."""

    what: Literal["allow", "ask", "deny"]
    rule: str = ""
    firm: bool = False
    changed: bool = False


ALLOW, ASK = Verdict("allow"), Verdict("ask")


def is_a(tool: str, kinds: tuple[str, ...]) -> bool:
    """Return True if `tool` is one of `kinds`. A kind that begins with `_` matches the end of the tool's name."""
    return tool in kinds or tool.endswith(tuple(kind for kind in kinds if kind[0] == "_"))


def join_seal(tool: str, seal: str) -> str:
    """Return the name of a tool, with its seal if any."""
    return f"{tool}@{seal}" if seal else tool


def parse_rule(text: str) -> Rule:
    """Parse a rule. Raises ConfigError with the reason if it is invalid."""
    found = _RULE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"'{text}' is not a rule: write a tool, or tool(pattern), such as shell(git status*)")
    tool, seal, pattern = found[1], found[2] or "", found[3]
    try:
        compile_glob(pattern or "", paths=True)
    except ConfigError as error:
        raise ConfigError(f"'{text[:SHOWN_CHARACTERS]}' {error}") from None
    if pattern is None:
        return Rule(tool, seal=seal)
    if not pattern.strip():
        raise ConfigError(f"'{text}' has an empty pattern: leave the brackets out to mean every call")
    if is_a(tool, SHELLS) or is_a(tool, FILES):
        return Rule(tool, pattern.strip(), seal=seal)
    named = _NAMED.fullmatch(pattern)
    if named is None:
        raise ConfigError(f"'{text}' must name the argument: {tool}(argument=pattern)")
    return Rule(tool, named[2], named[1], seal)


def concerns_tool(rule: Rule, tool: str) -> bool:
    """Return True if the rule is about this tool. A rule `mcp__SERVER` is about all tools of the server."""
    server = rule.tool.removeprefix(PREFIX)
    if server != rule.tool and "__" not in server and tool.startswith(f"{rule.tool}__"):
        return True
    return rule.tool == tool or compile_glob(rule.tool, paths=False).matches(tool)


def is_about_path(rule: Rule, tool: str) -> bool:
    """Return True if the rule is about paths read or written by `tool`, even if the rule names another tool. A rule
    for `read` or `grep` is about all reading tools, a rule for `write` or `edit` about all writing tools."""
    if rule.pattern is None or rule.argument:
        return False
    return any(
        is_a(tool, kinds) and any(concerns_tool(rule, name) for name in kinds[:2]) for kinds in (READERS, WRITERS)
    )


def matches_path(pattern: str, path: str) -> bool:
    """Return True if `path` matches the pattern of a rule about files."""
    return compile_glob(pattern, paths=True).matches(path)


def find_allowing_rule(rules: tuple[Rule, ...], tool: str, args: dict[str, Any], subject: str | None) -> str:
    """Return the rule that allows the call, or several for a line of several commands; empty if the call is not
    allowed."""
    if is_a(tool, SHELLS):
        return _allows_command(rules, subject)
    return next((str(rule) for rule in rules if rule.pattern is None or _matches_call(rule, tool, args, subject)), "")


def find_stopping_rule(rules: tuple[Rule, ...], tool: str, args: dict[str, Any], subjects: Sequence[str]) -> str:
    """Return the rule that denies the call or asks about it, for any of its subjects; empty if no rule matches for
    certain."""
    readings: list[str] | None = None
    for rule in rules:
        if rule.pattern is None:
            return str(rule)
        if is_a(tool, SHELLS):
            if readings is None:
                commands = [words for subject in subjects for words in read_command(subject).parts][:MAX_COMMANDS]
                readings, _ = _take_readings(reading for words in commands for reading in list_readings(words))
            pattern = compile_glob(rule.pattern, paths=False)
            if any(map(pattern.matches, readings)):
                return str(rule)
        elif any(_matches_call(rule, tool, args, subject) for subject in subjects or (None,)):
            return str(rule)
    return ""


def is_unclear(rules: tuple[Rule, ...], tool: str, subjects: Sequence[str]) -> bool:
    """Return True if the call might fall under these rules, but nobody can tell for certain. Such a call is asked
    about in every mode."""
    patterns = [rule.pattern for rule in rules if rule.pattern is not None and not rule.argument]
    if not patterns:
        return False
    if not subjects or not is_a(tool, SHELLS):
        return not subjects
    lines = [read_command(subject) for subject in subjects]
    if not all(line.plain for line in lines):
        return True
    commands = [words for line in lines for words in line.parts]
    if len(commands) > MAX_COMMANDS or any(map(conceals_command, commands)):
        return True
    inner = list(islice((words for each in commands for words in list_inner_commands(each)), MAX_COMMANDS + 1))
    if len(inner) > MAX_COMMANDS or any(map(evaluates_text, inner)):
        return True
    commands += inner
    readings, are_all = _take_readings(reading for words in commands for reading in list_possible_readings(words))
    return not are_all or any(_may_be_meant(pattern, commands, readings) for pattern in patterns)


def _take_readings(readings: Iterable[str]) -> tuple[list[str], bool]:
    """Return the readings of a command up to a total length that can be matched quickly, and whether these are all."""
    taken: list[str] = []
    size = 0
    for reading in readings:
        size += len(reading)
        if size > MAX_READ_CHARACTERS:
            return taken, False
        taken.append(reading)
    return taken, True


def _may_be_meant(pattern: str, commands: Sequence[tuple[str, ...]], readings: Sequence[str]) -> bool:
    """Return True if `commands` might run a command that the pattern matches. `readings` are all commands they might
    run."""
    start = pattern[: next((at for at, char in enumerate(pattern) if char in GLOB_CHARACTERS), len(pattern))]
    if any(may_hold(words, start) for words in commands):
        return True
    return any(map(compile_glob(pattern, paths=False).matches, readings))


def derive_rules(tool: str, subject: str | None, seal: str = "") -> tuple[Rule, ...]:
    """Return the narrowest rules that allow exactly this call the next time: one rule, or one for each command of a
    line. Return none if no such rule can be read by a person and stored in a file; `explain_missing_rule` says why."""
    rules: tuple[Rule, ...] = ()
    if is_a(tool, SHELLS):
        line = read_command(subject or "")
        if line.plain and len(line.parts) <= MAX_DERIVED:
            patterns = dict.fromkeys(escape_pattern(join_exact_words(words)) for words in line.parts)
            rules = tuple(Rule(tool, pattern, seal=seal) for pattern in patterns)
    elif is_a(tool, FILES):
        rules = (Rule(tool, escape_pattern(subject), seal=seal),) if subject and not subject.startswith("/") else ()
    elif tool != CODE_MODE:  # approving one program does not approve others
        rules = (Rule(tool, seal=seal),)
    return rules if _PLAIN_NAME.fullmatch(tool) and all(map(_can_be_written, rules)) else ()


def _can_be_written(rule: Rule) -> bool:
    try:
        return str(rule).isprintable() and parse_rule(str(rule)) == rule
    except ConfigError:  # such as a file whose name is a space
        return False


def explain_missing_rule(tool: str, args: dict[str, Any]) -> str:
    """Return why `derive_rules` has no rule for a call, as a text for people."""
    if is_a(tool, SHELLS):
        command = args.get("command", args.get("cmd"))
        line = read_command(command) if isinstance(command, str) else None
        if line is None or not line.plain:
            return "the command writes to a file, or has variables, substitutions, globs, secrets or several lines"
        if len(line.parts) > MAX_DERIVED:
            return f"the line has more than {MAX_DERIVED} commands"
    elif is_a(tool, FILES):
        return "the file is outside the project, in the run's own workspace, or at a remote agent"
    elif tool == CODE_MODE:
        return "approving one program does not approve others"
    return "a rule asks about it, a remote agent asks, or it cannot be written as a rule"


def escape_pattern(text: str) -> str:
    """Return a pattern that matches only this text."""
    return "".join(f"[{char}]" if char in GLOB_CHARACTERS else char for char in text)


def _allows_command(rules: tuple[Rule, ...], command: str | None) -> str:
    everything = next((str(rule) for rule in rules if rule.pattern is None), "")
    if everything or command is None:
        return everything
    line = read_command(command)
    if not line.plain:
        return ""
    used: dict[str, None] = {}
    for words in line.parts:
        text = join_exact_words(words)
        rule = next(
            (r for r in rules if r.pattern is not None and compile_glob(r.pattern, paths=False).matches(text)), None
        )
        if rule is None:
            return ""
        used[str(rule)] = None
    return ", ".join(used)


def _matches_call(rule: Rule, tool: str, args: dict[str, Any], subject: str | None) -> bool:
    assert rule.pattern is not None
    if rule.argument:
        value = args.get(rule.argument)
        text = value if isinstance(value, str) else None if value is None else msgspec.json.encode(value).decode()
        return text is not None and compile_glob(rule.pattern, paths=False).matches(text)
    return subject is not None and compile_glob(rule.pattern, paths=is_a(tool, FILES)).matches(subject)
