"""Commands that may run another command than the one they begin with.

Rules that deny or ask compare a pattern with each simple command of a line. A program can run its arguments, its input
or a text as a command: `su -c`, `xargs`, `sh`, `git -c alias.x=push x`, `python -c`. Nobody can list all such programs,
so a program counts as one unless it is known to run none of its arguments (`_HARMLESS`). Knows no rule; says what a
command might be, and `rules.is_unclear` asks where a pattern might be meant. What a script or a build file does is not
read: patterns are no sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from retinue.core.commands import (
    EVALUATING,
    MAX_WORDS,
    SHELLS,
    WRAPPERS,
    drop_git_options,
    join_words,
    read_program_name,
)

_HARMLESS = frozenset((
    "[", "basename", "cat", "cd", "chgrp", "chmod", "chown", "cksum", "cmp", "comm", "cp", "cut", "date", "df", "diff",
    "dirname", "du", "echo", "egrep", "exit", "expr", "false", "fgrep", "file", "fold", "grep", "groups", "head",
    "hostname", "id", "join", "ln", "ls", "md5sum", "mkdir", "mktemp", "mv", "nl", "nproc", "od", "paste", "printf",
    "ps", "pwd", "readlink", "realpath", "rm", "rmdir", "seq", "sha1sum", "sha256sum", "sleep", "stat", "tac", "tail",
    "tee", "test", "touch", "tr", "true", "type", "uname", "uniq", "wc", "which", "whoami",
))  # fmt: skip
_HARMLESS_GIT = frozenset((
    "add", "blame", "branch", "checkout", "cherry-pick", "commit", "diff", "init", "log", "ls-files", "merge", "mv",
    "notes", "push", "reset", "restore", "rev-parse", "revert", "rm", "show", "stash", "status", "switch", "tag",
))  # fmt: skip
_TAKES_INPUT = frozenset(("parallel", "xargs"))
_CHANGES_NAMES = frozenset(("bind", "complete", "enable", "hash"))
_GIT_SETS = ("-c", "--config-env", "--exec-path=")
_INTERPRETER = re.compile(
    r"(?:bun|deno|guile|jshell|julia|lua|luajit|node|nodejs|osascript|perl|php|pwsh|pypy|python|R|Rscript|ruby|scala"
    r"|tclsh|wish)[0-9.]*"
)
_INFORMS = frozenset(("--help", "--version", "-V", "-h"))  # instead of reading code from the input
_CODE_OPTION = re.compile(r"-[A-Za-z0-9]*[cCeErRp]|--?(?:eval|command|print|run|exec)(?:=.*)?", re.DOTALL)


def conceals_command(words: tuple[str, ...]) -> bool:
    """Tell whether the command runs text or input that is not read here: a shell, an interpreter with code, a program
    that changes what a name means."""
    if len(words) > MAX_WORDS:
        return True
    if _is_harmless(words):
        return _evaluates(words, builtins=True)
    calls_builtins = read_program_name(words[0]) in ("builtin", "command")
    ends = range(1, len(words))
    return _evaluates(words, builtins=True) or any(_evaluates(words[at:], builtins=calls_builtins) for at in ends)


def list_possible_readings(words: tuple[str, ...]) -> Iterator[str]:
    """Yield all that the command might run besides itself: each of its ends, if its program could run its arguments,
    and each without the options that stand before a subcommand."""
    for first in range(1 if _is_harmless(words) else min(len(words), MAX_WORDS)):
        rest = words[first:]
        yield from _without_options((read_program_name(rest[0]), *rest[1:]))


def may_hold(words: tuple[str, ...], start: str) -> bool:
    """Tell whether the command could run one that begins with this text: it is inside a word of it, or input could
    complete it."""
    if _is_harmless(words):
        return False
    if any(start.strip() and start.strip() in word for word in words[1:]):
        return True
    names = [read_program_name(word) for word in words[:MAX_WORDS]]
    at = next((at for at, name in enumerate(names) if name in _TAKES_INPUT), None)
    if at is None:
        return False
    ends = (join_words(words[first:]) for first in range(at + 1, len(names)))
    return not WRAPPERS.isdisjoint(names[at + 1 :]) or any(
        end and (start.startswith(end) or end.startswith(start)) for end in ends
    )


def _is_harmless(words: tuple[str, ...]) -> bool:
    """Tell whether the program runs none of its arguments."""
    name = read_program_name(words[0])
    if name != "git":
        return name in _HARMLESS
    plain = drop_git_options(words)
    return not _sets_git(words) and len(plain) > 1 and plain[1] in _HARMLESS_GIT


def _sets_git(words: tuple[str, ...]) -> bool:
    """Tell whether git gets settings with the command: an alias, or a program that it then runs."""
    options = words[1 : len(words) - len(drop_git_options(words)) + 1]
    return any(word.startswith(_GIT_SETS) for word in options) or any("alias." in word for word in words[1:])


def _evaluates(words: tuple[str, ...], *, builtins: bool) -> bool:
    name = read_program_name(words[0])
    if name in SHELLS or (builtins and (name in EVALUATING or name in _CHANGES_NAMES)):
        return True
    if name == "git":
        return _sets_git(words)
    if _INTERPRETER.fullmatch(name) is None:
        return False
    options = list(takewhile(lambda word: word.startswith("-") and word != "-", words[1:]))
    operand = words[len(options) + 1] if len(options) + 1 < len(words) else "-"
    if any(_CODE_OPTION.fullmatch(word) for word in options):
        return True
    return operand == "-" and _INFORMS.isdisjoint(options)


def _without_options(words: tuple[str, ...]) -> Iterator[str]:
    """Yield the command as it is, and without options before its first argument, each with or without a value."""
    yield join_words(words)
    if words[0] == "git":
        yield join_words(drop_git_options(words))
        return
    reached, at = {1}, 1
    while at < min(len(words), MAX_WORDS):
        if at in reached and words[at].startswith("-"):
            reached |= {at + 1, at + 2}
        at += 1
    for first in sorted(reached - {1}):
        if first < len(words):
            yield join_words((words[0], *words[first:]))
