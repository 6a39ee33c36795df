"""Shell command lines as approval rules see them: the simple commands of a line, and the commands these might run.

This is not a shell. The parser understands words, quotes, `; | && ||`, and redirections that write no file (`2>&1`,
`>/dev/null`), which it drops. A line with any other syntax is not `plain`. The commands found in such a line are
returned all the same, so that deny rules can match them.

A program can run its arguments, its input or a text as a command: `su -c`, `xargs`, `sh`, `git -c alias.x=push x`,
`python -c`. No list of such programs can be complete, so every program counts as such unless known to run none of its
arguments (`_HARMLESS_PROGRAMS`). Scripts and build files are not read: patterns are not a sandbox. This module knows no
rules; `rules.is_unclear` uses it to find out where a pattern might apply.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile

import msgspec

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?=")
_CONNECTORS = frozenset((";", "|", "||", "&&"))
_SPECIAL = frozenset("$`\\()<>*?[]{}!~#\n")  # outside quotes, these are shell syntax, not plain words
_BREAKS = frozenset("$`()<>{}\n")  # and after these another command may begin
# Redirections that neither change nor read a file: between stdout and stderr, to and from the null device.
_HARMLESS = re.compile(r"(?:[012]?>&[12]|[12]?>>?[ \t]*/dev/null|&>>?[ \t]*/dev/null|0?<[ \t]*/dev/null)(?=[ \t;|&]|$)")
_IN_DOUBLE = frozenset("$`\\!")
# Words that are not commands themselves: the command follows them.
_RESERVED = frozenset((
    "!", "[[", "case", "coproc", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "in", "select",
    "then", "time", "until", "while", "{", "}",
))  # fmt: skip
WRAPPERS = frozenset((
    "builtin", "busybox", "chroot", "chrt", "command", "doas", "env", "exec", "fakeroot", "find", "flock", "gosu",
    "ionice", "ltrace", "nice", "nohup", "nsenter", "parallel", "pkexec", "prlimit", "runuser", "script", "setpriv",
    "setsid", "sg", "stdbuf", "strace", "su", "sudo", "systemd-run", "taskset", "timeout", "toybox", "trap", "unshare",
    "watch", "xargs",
))  # fmt: skip
SHELLS = frozenset(("ash", "bash", "csh", "dash", "elvish", "fish", "ksh", "mksh", "nu", "rbash", "sh", "tcsh", "zsh"))
EVALUATING = frozenset((".", "alias", "eval", "source"))
MAX_WORDS = 256  # a longer command is not searched for further commands
MAX_INNER = 3  # levels of command lines nested in arguments
_GIT_VALUES = frozenset((
    "-C", "-c", "--attr-source", "--config-env", "--exec-path", "--git-dir", "--list-cmds", "--namespace",
    "--super-prefix", "--work-tree",
))  # fmt: skip
_HARMLESS_PROGRAMS = frozenset((
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
# Git ignores aliases with these names. Any other subcommand may be an alias for an arbitrary command.
_OWN_GIT = _HARMLESS_GIT | frozenset((
    "am", "annotate", "apply", "archive", "bisect", "bugreport", "bundle", "cat-file", "check-attr", "check-ignore",
    "check-mailmap", "check-ref-format", "checkout-index", "cherry", "clean", "clone", "commit-graph", "commit-tree",
    "config", "count-objects", "credential", "describe", "diff-files", "diff-index", "diff-tree", "difftool",
    "fast-export", "fast-import", "fetch", "filter-branch", "for-each-ref", "format-patch", "fsck", "gc", "grep", "gui",
    "hash-object", "help", "index-pack", "init-db", "interpret-trailers", "lfs", "ls-remote", "ls-tree", "maintenance",
    "merge-base", "merge-file", "merge-tree", "mergetool", "mktag", "mktree", "name-rev", "pack-objects", "pack-refs",
    "patch-id", "prune", "pull", "range-diff", "read-tree", "rebase", "reflog", "remote", "repack", "replace",
    "request-pull", "rerere", "rev-list", "send-email", "send-pack", "shortlog", "show-branch", "show-index",
    "show-ref", "sparse-checkout", "stripspace", "submodule", "symbolic-ref", "unpack-objects", "update-index",
    "update-ref", "update-server-info", "var", "verify-commit", "verify-pack", "verify-tag", "version", "whatchanged",
    "worktree", "write-tree",
))  # fmt: skip
_GIT_RUNS = ("--rec", "--e")  # `push --receive-pack=COMMAND` and `--exec=COMMAND`; git accepts shortened options
_SETS_VARIABLE = frozenset(("[", "printf", "test"))  # with -v NAME: the shell evaluates NAME
_TAKES_INPUT = frozenset(("parallel", "xargs"))
# Programs that run commands from their input or from a file.
_RUNS_INPUT = frozenset(("at", "batch", "crontab", "dc", "ed", "ex", "expect", "gdb", "lldb", "m4", "parallel"))
_CHANGES_FOLDER = frozenset(("cd", "pushd"))
_PATH_ENDS = re.compile(r"[\s=:@<>,;|&$`(){}\"']+")
PATH_CHARACTERS = 4096
MAX_STEPS = 8
_LINE_CHARACTERS = frozenset(" \t;|&$`(){}<>\"'")
_CHANGES_NAMES = frozenset(("bind", "complete", "enable", "hash"))
_GIT_SETS = ("-c", "--config-env", "--exec-path=")
_INTERPRETER = re.compile(
    r"(?:bun|deno|guile|jshell|julia|lua|luajit|node|nodejs|osascript|perl|php|pwsh|pypy|python|R|Rscript|ruby|scala"
    r"|tclsh|wish)[0-9.]*"
)
_INFORMS = frozenset(("--help", "--version", "-V", "-h"))  # with these, an interpreter reads no code from its input
_CODE_OPTION = re.compile(r"-[A-Za-z0-9]*[cCeErRp]|--?(?:eval|command|print|run|exec)(?:=.*)?", re.DOTALL)


class CommandLine(msgspec.Struct, frozen=True, gc=False):
    """The simple commands of a shell line. `parts` has the words of each command, without quotes. `plain` is True if
    the line contains nothing else."""

    parts: tuple[tuple[str, ...], ...]
    plain: bool


def read_command(text: str) -> CommandLine:
    """Split a shell line into simple commands. Never raises. An empty line is not plain."""
    reader = _Reader(text)
    reader.read()
    parts, plain = [], reader.plain
    for words in reader.parts:
        rest = list(words)
        while rest and (_ASSIGNMENT.match(rest[0]) or rest[0] in _RESERVED):
            del rest[0]
            plain = False
        plain = plain and bool(rest) and not _evaluates_code(rest)
        if rest:
            parts.append(tuple(rest))
    return CommandLine(tuple(parts), plain and bool(parts))


def join_exact_words(words: tuple[str, ...]) -> str:
    """Return the canonical spelling of this command, for matching with allow patterns."""
    return shlex.join(words)


def list_readings(words: tuple[str, ...]) -> Iterator[str]:
    """Yield all readings of this command, for matching with deny and ask patterns."""
    name = read_program_name(words[0])
    yield join_exact_words(words)
    runs_others = name in WRAPPERS or name in SHELLS or name in EVALUATING
    for first in range(min(len(words), MAX_WORDS) if runs_others else 1):
        rest = words[first:]
        yield join_words(rest)
        named = (read_program_name(rest[0]), *rest[1:])
        yield join_words(named)
        if named[0].startswith("git-"):
            named = ("git", named[0].removeprefix("git-"), *named[1:])
        if named[0] == "git":
            yield join_words(drop_git_options(named))


def join_words(words: tuple[str, ...]) -> str:
    """Return the words of a command as a person would write them, without quotes."""
    return " ".join(words)


def drop_git_options(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return a git command without the options before its subcommand."""
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in _GIT_VALUES else 1
    return (words[0], *words[at:])


def list_named_paths(text: str) -> set[str]:
    """Return the possible paths in a command line: its words and their pieces, as in `if=.env`, `HEAD:.env`, `-f.env`,
    `sh -c 'cat .env'`. If the line changes the folder or has `..` or variables, include the tails of paths."""
    parts = read_command(text).parts
    words = {word for part in parts for word in part[:MAX_WORDS]}
    pieces = words | {piece for word in words for piece in _PATH_ENDS.split(word[:PATH_CHARACTERS])}
    pieces |= {piece[2:] for piece in pieces if piece.startswith("-") and not piece.startswith("--")}
    if "$" in text or ".." in text or any(part[0] in _CHANGES_FOLDER for part in parts):
        steps = [piece.split("/") for piece in pieces if "/" in piece]
        pieces |= {"/".join(each[at:]) for each in steps for at in range(max(1, len(each) - MAX_STEPS), len(each))}
    return pieces - {""}


def read_program_name(word: str) -> str:
    """Return the name of a program without its folder."""
    return word.rpartition("/")[2]


def _evaluates_code(words: list[str]) -> bool:
    """Return True if a word is itself a command line, which is not parsed here."""
    name = read_program_name(words[0])
    given = any(word.startswith("-") and not word.startswith("--") and "c" in word for word in words[1:])
    return name in EVALUATING or (name in SHELLS and given)


class _Reader:
    """The parser behind `read_command`. It reads a line once, character by character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.plain = text.isprintable()
        self.parts: list[list[str]] = [[]]
        self._word: str | None = None
        self._at = 0

    def read(self) -> None:
        while self._at < len(self.text):
            char = self.text[self._at]
            if self._word is None and (harmless := _HARMLESS.match(self.text, self._at)):
                self._at = harmless.end()
                continue
            self._at += 1
            if char in " \t":
                self._end_word()
            elif char in ("'", '"'):
                self._read_quoted(char)
            elif char in ";|&":
                self._read_connector(char)
            elif char in _SPECIAL:
                self._read_special(char)
            else:
                self._word = (self._word or "") + char
        self._end_word()
        self.plain = self.plain and all(self.parts)

    def _read_quoted(self, mark: str) -> None:
        end = self.text.find(mark, self._at)
        inside = self.text[self._at :] if end < 0 else self.text[self._at : end]
        if end < 0 or (mark == '"' and not _IN_DOUBLE.isdisjoint(inside)):
            self.plain = False
        self._word = (self._word or "") + inside
        self._at = len(self.text) if end < 0 else end + 1

    def _read_connector(self, char: str) -> None:
        sign = char
        while self._at < len(self.text) and self.text[self._at] in ";|&":
            sign += self.text[self._at]
            self._at += 1
        self.plain = self.plain and sign in _CONNECTORS
        self._end_part()

    def _read_special(self, char: str) -> None:
        if char == "#" and self._word is not None:  # a comment begins only at the start of a word
            self._word += char
            return
        self.plain = False
        if char == "\\":
            following = self.text[self._at : self._at + 1]
            self._at += 1
            if following != "\n":
                self._word = (self._word or "") + following
        elif char in _BREAKS:
            self._end_part()
        elif char not in "!#":
            self._word = (self._word or "") + char

    def _end_word(self) -> None:
        if self._word is not None:
            self.parts[-1].append(self._word)
            self._word = None

    def _end_part(self) -> None:
        self._end_word()
        self.parts.append([])


def conceals_command(words: tuple[str, ...]) -> bool:
    """Return True if the command runs text or input that is not parsed here: a shell, an interpreter with code, or a
    program that changes the meaning of names."""
    if len(words) > MAX_WORDS:
        return True
    if _is_harmless(words):
        return _evaluates(words, builtins=True)
    calls_builtins = read_program_name(words[0]) in ("builtin", "command")
    ends = range(1, len(words))
    return _evaluates(words, builtins=True) or any(_evaluates(words[at:], builtins=calls_builtins) for at in ends)


def evaluates_text(words: tuple[str, ...]) -> bool:
    """Return True if the program itself runs text or input that is not parsed here. Does not look for programs in the
    arguments."""
    return len(words) > MAX_WORDS or _evaluates(words, builtins=True)


def list_inner_commands(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the commands inside arguments that the program could run as command lines: `su -c`, `awk`,
    `tar --checkpoint-action=exec=...`. Yield nothing for a program that runs none of its arguments."""
    waiting, depth = [words], 0
    while waiting and depth < MAX_INNER:
        inner = [
            tuple(filter(None, map(str.strip, part)))
            for command in waiting
            if not _is_harmless(command)
            for word in command[1:MAX_WORDS]
            if not _LINE_CHARACTERS.isdisjoint(word)
            for part in read_command(word.replace("=", " ")).parts
        ]
        waiting, depth = [part for part in inner if part], depth + 1
        yield from waiting


def list_possible_readings(words: tuple[str, ...]) -> Iterator[str]:
    """Yield the command and the commands it might run: every tail of its words, if its program could run its
    arguments. Yield each also without the options before a subcommand."""
    for first in range(1 if _is_harmless(words) else min(len(words), MAX_WORDS)):
        rest = words[first:]
        yield from _without_options((read_program_name(rest[0]), *rest[1:]))


def may_hold(words: tuple[str, ...], start: str) -> bool:
    """Return True if the command could run another command that begins with `start`: a word contains `start`, or input
    could complete it."""
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
    """Return True if the program runs none of its arguments."""
    name = read_program_name(words[0])
    if name in _SETS_VARIABLE and any(word.startswith("-v") for word in words[1:]):
        return False
    if name != "git":
        return name in _HARMLESS_PROGRAMS
    plain = drop_git_options(words)
    if _sets_git(words) or len(plain) < 2 or plain[1] not in _HARMLESS_GIT:
        return False
    return plain[1] != "push" or not any(word.startswith(_GIT_RUNS) for word in plain[2:])


def _sets_git(words: tuple[str, ...]) -> bool:
    """Return True if the command passes settings to git: an alias, or a program for git to run."""
    options = words[1 : len(words) - len(drop_git_options(words)) + 1]
    return any(word.startswith(_GIT_SETS) for word in options) or any("alias." in word for word in words[1:])


def _evaluates(words: tuple[str, ...], *, builtins: bool) -> bool:
    name = read_program_name(words[0])
    if name in SHELLS or name in _RUNS_INPUT or (builtins and (name in EVALUATING or name in _CHANGES_NAMES)):
        return True
    if name == "git":
        plain = drop_git_options(words)
        return _sets_git(words) or (builtins and len(plain) > 1 and plain[1] not in _OWN_GIT)
    if _INTERPRETER.fullmatch(name) is None:
        return False
    options = list(takewhile(lambda word: word.startswith("-") and word != "-", words[1:]))
    operand = words[len(options) + 1] if len(options) + 1 < len(words) else "-"
    if any(_CODE_OPTION.fullmatch(word) for word in options):
        return True
    return operand == "-" and _INFORMS.isdisjoint(options)


def _without_options(words: tuple[str, ...]) -> Iterator[str]:
    """Yield the command as it is, then without the options before its first argument. An option may have a value or
    not."""
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
