"""Help on a terminal: texts wrapped to its width, and the command that a person means by another word."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

WIDEST = 100  # longer lines of prose are hard to read
MOST_OPTIONS = 9  # of a command whose usage line lists all of them
LEAST_COLUMN = 26  # of the second column of a table that stands beside the first
BELOW = "      "
_TWO_COLUMNS = re.compile(r"(\s+\S.*?)\s{2,}(\S.*)")
# What groups of commands are for, by the first command of each.
HEADINGS = {
    "init": "run agents",
    "ps": "see what they do",
    "send": "steer them and answer their questions",
    "diff": "take over their changes",
    "mcp": "work with other programs",
    "usage": "look after the project",
}
# Words of other tools, and the command of ours that does it. Only words whose meaning is plain.
SYNONYMS = {
    **dict.fromkeys(("start", "exec", "execute", "spawn", "ask", "do", "new", "launch", "task", "prompt"), "run"),
    **dict.fromkeys(("status", "list", "ls", "runs", "trees", "tree", "jobs", "top", "sessions"), "ps"),
    "history": "ps --all",
    **dict.fromkeys(("logs", "log", "events", "trace", "cat"), "tail"),
    **dict.fromkeys(("attach", "follow", "wait", "monitor", "join"), "tail -f"),
    **dict.fromkeys(("inspect", "describe", "info", "view", "get", "result", "results"), "show"),
    **dict.fromkeys(("kill", "stop", "abort", "terminate", "interrupt", "end"), "cancel"),
    **dict.fromkeys(("inbox", "pending", "questions", "question", "approval", "requests"), "approvals"),
    **dict.fromkeys(("allow", "accept", "yes", "confirm", "permit"), "approve"),
    **dict.fromkeys(("reject", "refuse", "disallow", "no", "decline"), "deny"),
    **dict.fromkeys(("message", "msg", "tell", "say", "steer", "notify"), "send"),
    **dict.fromkeys(("reply", "followup", "follow-up"), "continue"),
    **dict.fromkeys(("restart", "recover", "reopen", "restore"), "resume"),
    **dict.fromkeys(("rerun", "reproduce"), "replay"),
    **dict.fromkeys(("changes", "patch", "changed"), "diff"),
    **dict.fromkeys(("merge", "commit", "land"), "apply"),
    **dict.fromkeys(("cost", "costs", "tokens", "spend", "stats", "budget", "bill"), "usage"),
    **dict.fromkeys(("rm", "remove", "delete", "clean", "cleanup", "prune", "purge"), "gc"),
    **dict.fromkeys(("agents", "agent", "subagents", "subagent", "profile", "types"), "profiles"),
    **dict.fromkeys(("setup", "configure", "config", "create"), "init"),
    **dict.fromkeys(("check", "diagnose", "health", "verify", "selftest", "test"), "doctor"),
    **dict.fromkeys(("example", "tutorial", "sample"), "demo"),
    **dict.fromkeys(("completions", "complete", "autocomplete"), "completion"),
    **dict.fromkeys(("man", "docs", "usage-help", "commands"), "help"),
    **dict.fromkeys(("install", "add"), "mcp install"),
    **dict.fromkeys(("serve", "server"), "mcp serve"),
    "call": "a2a call",
    "version": "--version",
    **dict.fromkeys(("chat", "talk", "conversation", "repl", "interactive"), ""),
}


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal. Prose is wrapped; lines that begin with a space stay lines of their own."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(shutil.get_terminal_size().columns, WIDEST) - 2)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        """Write `[OPTIONS]` for the options of a command that has many."""
        actions = list(actions)
        if sum(bool(action.option_strings) for action in actions) > MOST_OPTIONS:
            actions = [action for action in actions if action.required or not action.option_strings]
            groups, self._prog = [], f"{self._prog} [OPTIONS]"
        super().add_usage(usage, actions, groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment  # below the heading of a group

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        parts = []
        for command in action._get_subactions():  # they say all; a line for the action itself says nothing
            heading = HEADINGS.get(command.dest) if action.dest == "command" else None
            if heading is not None:
                parts.append(f"{' ' * self._current_indent}{heading}\n")
            self._indent()
            parts.append(super()._format_action(command))
            self._dedent()
        return "".join(parts)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join((indent + line).rstrip() for line in wrap_text(text, width))


def wrap_text(text: str, width: int) -> Iterator[str]:
    """Wrap a text: its prose as paragraphs, and lines that begin with a space as tables of one or two columns."""
    for is_table, group in groupby(text.splitlines(), key=lambda line: line[:1].isspace()):
        if is_table:
            yield from _wrap_table(list(group), width)
            continue
        for is_blank, lines in groupby(group, key=lambda line: not line):
            paragraph = list(lines)
            yield from paragraph if is_blank else _wrap_line(" ".join(paragraph), width)


def _wrap_table(lines: list[str], width: int) -> Iterator[str]:
    """Yield the lines of a table as they are if they fit; else with the second column closer to the first one, or below
    it where that is too long. A line without a second column is a command, and can be copied as it is."""
    if all(len(line) <= width for line in lines):
        yield from lines
        return
    rows = [_TWO_COLUMNS.fullmatch(line) for line in lines]
    lefts = [len(row[1]) for row in rows if row is not None and len(row[1]) <= width - LEAST_COLUMN]
    column = max(lefts, default=0) + 2
    for line, row in zip(lines, rows, strict=True):
        if row is not None and len(row[1]) < column:
            first, *more = _wrap_line(row[2], width - column)
            yield row[1].ljust(column) + first
            yield from (" " * column + rest for rest in more)
        elif row is not None:
            yield row[1]
            yield from (BELOW + rest for rest in _wrap_line(row[2], width - len(BELOW)))
        elif line.startswith(BELOW):  # it continues the second column of the line above
            text = line.lstrip()
            yield (" " * column if column + len(text) <= width else BELOW) + text
        else:
            yield line


def _wrap_line(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def explain_unknown_command(word: str, commands: Mapping[str, str]) -> str:
    """Say that there is no such command, and which one is meant if that is known."""
    text = f"there is no command '{word}'"
    meant = _find_meant(word, commands)
    if meant is None:
        return f"{text} (see `retinue --help`)"
    if not meant:
        return f"{text}; use `retinue` without a command to talk to an agent"
    about = commands.get(meant.split()[0], "")
    return f"{text}; use `retinue {meant}`{f' to {about}' if about else ''}"


def _find_meant(word: str, commands: Mapping[str, str]) -> str | None:
    lower = word.casefold()
    if lower in SYNONYMS:
        return SYNONYMS[lower]
    if lower in commands:
        return lower
    if len(word.split()) > 1:
        return "run TASK"
    slips = [command for command in commands if _is_slip(lower, command)]
    return slips[0] if len(slips) == 1 else None


def _is_slip(word: str, command: str) -> bool:
    """Tell whether a word is a command but for one letter too many, too few or wrong, or two that are swapped."""
    if len(word) < 3:
        return False
    same = 0
    while same < min(len(word), len(command)) and word[same] == command[same]:
        same += 1
    rest, wanted = word[same:], command[same:]
    swapped = len(wanted) > 1 and rest == wanted[1] + wanted[0] + wanted[2:]
    return swapped or rest[1:] == wanted or rest == wanted[1:] or rest[1:] == wanted[1:]
