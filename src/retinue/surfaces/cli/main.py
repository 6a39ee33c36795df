"""`retinue`: the table of commands, their help, and the boundary where an error becomes one line and an exit code.

Imports only argparse before a command is chosen, so that `--help` is fast. A command NAME is two functions of a module:
`configure_NAME(parser)`, and `execute_NAME(args) -> int`, whose docstring is the help of the command.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NoReturn

from retinue.surfaces.cli.start_line import clear_start_line, show_start_line

GROUPS = {
    "run agents": {
        "init": "write a retinue.yaml and a first agent for this project",
        "run": "run an agent on a task and print its answer",
        "resume": "resume a tree whose process is gone",
        "continue": "continue a run that has ended, with a new message",
        "demo": "watch a tree of agents at work; needs no key and no network",
    },
    "see what they do": {
        "ps": "list runs and their states",
        "show": "show everything about one run",
        "tail": "print the events of a tree, or follow them live",
        "replay": "replay a recorded tree without a model, and compare",
    },
    "steer them and answer their questions": {
        "send": "send a message to a run at work",
        "cancel": "cancel a run and everything below it",
        "approvals": "list the questions that wait for your answer",
        "approve": "approve a tool call that waits for an answer",
        "deny": "deny a tool call, with a reason",
    },
    "take over their changes": {
        "diff": "show the changes of a run in its copy of the project",
        "apply": "apply the changes of a run to the project",
    },
    "work with other programs": {
        "mcp": "offer subagents to MCP clients such as Claude Code",
        "a2a": "serve an agent to other programs over A2A, or call one",
        "watch": "run subagents that containers ask for in a shared folder",
    },
    "look after the project": {
        "usage": "show tokens and cost",
        "gc": "remove old trees and their folders",
        "profiles": "list the available agents",
        "trust": "trust this project's retinue.yaml",
        "doctor": "check the installation and the project",
        "completion": "print a completion script for your shell",
        "help": "show this help, or the help of a command",
    },
}
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}
HEADINGS = {next(iter(group)): heading for heading, group in GROUPS.items()}  # by the first command of the group
MODULES = {
    "approve": "approvals", "deny": "approvals", "apply": "diff", "cancel": "send", "continue": "resume",
    "help": "main",
}  # fmt: skip
EPILOG = """\
A run is one agent at work on a task. A tree is a run with all its subagents; the first run of a tree is its primary.

`retinue` alone starts a conversation with an agent. It takes the options of `retinue run`.

The answer goes to stdout (as JSON with --json), everything live to stderr.

exit codes: 0 done, 1 failed, 2 usage, 124 timed out, 130 cancelled

examples:
  retinue demo                                  see it work, without a key
  retinue init                                  set up a project
  retinue run "make test fails. Fix it."        run an agent
  retinue diff                                  see what it changed
  retinue apply                                 merge that into your files
  retinue help run                              read about a command"""
TALK = "talk"  # the module of `retinue` without a command
TOP_OPTIONS = ("-h", "--help", "--version", "-C")
USAGE = 2
FAILED = 1
INTERRUPTED = 130
BROKEN_PIPE = 141
SHOW_WHERE = "RETINUE_TRACEBACK=1 in the environment shows where"
NO_FOLDER = "the current folder is gone: change to one that exists"
WIDEST = 100  # longer lines of prose are hard to read
MOST_OPTIONS = 9  # a command with more has `[OPTIONS]` in its usage line
SIMILAR = 0.66  # of a word to the command that was probably meant, as `rnu` is to `run`
LEAST_COLUMN = 26  # the least width of the second column next to the first
BELOW = "      "
_TWO_COLUMNS = re.compile(r"(\s+\S.*?)\s{2,}(\S.*)")
# Commands of other tools, and the command of Retinue that does the same. Only words with an obvious meaning.
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


class _Stdout(io.FileIO):
    """The raw file of `sys.stdout`. Raises OutputFailed instead of OSError, except for a broken pipe."""

    def write(self, data: Any, /) -> int:
        try:
            if self.isatty():
                clear_start_line()
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            from retinue.core.errors import OutputFailed

            raise OutputFailed(error) from None


class _Stderr(io.FileIO):
    """The raw file of `sys.stderr`. Ignores errors, because there is no place left to report them."""

    def write(self, data: Any, /) -> int:
        try:
            clear_start_line()
            return super().write(data)
        except OSError:
            return len(data)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error as one line with the command for help."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", Help)
        super().__init__(allow_abbrev=False, **options)
        self._positionals.title = "arguments"
        self.set_defaults(chosen_parser=self)  # the innermost parser wins: that of the command or its action

    def parse_all(self, words: list[str]) -> argparse.Namespace:
        """Parse `words`. Unlike `parse_args`, report an unknown argument with the name of the command."""
        found, unknown = self.parse_known_args(words)
        chosen: Parser = found.chosen_parser
        if unknown:
            chosen.error(f"unrecognized arguments: {' '.join(unknown)}{chosen._suggest(unknown)}")
        return found

    def _suggest(self, unknown: list[str]) -> str:
        """Return a hint what `unknown` arguments were meant to be, or an empty text."""
        import difflib

        last = [action.metavar for action in self._get_positional_actions()][-1:]
        if last in (["TASK"], ["TEXT"]) and not any(word.startswith("-") for word in unknown):
            return f"; {last[0]} is one argument: put quotes around it"
        similar = difflib.get_close_matches(unknown[0], self._option_string_actions, n=1)
        return f"; did you mean {similar[0]}?" if similar else ""

    def error(self, message: str) -> NoReturn:
        # argparse reports missing arguments only as a message: there is no exception and no list of them to look at.
        names = [action.metavar for action in self._get_positional_actions()]
        if message.endswith("required: TEXT") and names == ["RUN", "TEXT"]:
            message += "; RUN comes before it: `last` is the newest tree"
        complain(f"{message} (see `{self.prog} --help`)")
        self.exit(USAGE)


def make_parser(*chosen: str) -> tuple[Parser, dict[str, Parser]]:
    """Return the top parser, and the parser of each command. Imports and configures only the `chosen` commands."""
    top = Parser(
        prog="retinue", description="Run agents and their subagents, and see everything they do.", epilog=EPILOG
    )
    _add_top_options(top)
    commands = top.add_subparsers(
        title="commands", prog=top.prog, dest="command", metavar="COMMAND", parser_class=Parser
    )
    made = {name: commands.add_parser(name, help=text) for name, text in COMMANDS.items()}
    for name in chosen:
        load_function(name, "configure")(made[name])
        describe_command(made[name], load_function(name, "execute"))
    return top, made


def _add_top_options(parser: Parser) -> None:
    """Add the options that need no command."""
    parser.add_argument("--version", action="version", version=f"retinue {get_version()}", help="show the version")
    parser.add_argument(
        "-C",
        dest="folders",
        metavar="DIR",
        action="append",
        default=[],
        help="run as if started in DIR; goes before COMMAND, and relative paths in other options start at DIR",
    )


def describe_command(parser: argparse.ArgumentParser, execute: Callable[..., object]) -> None:
    """Set the description and the epilog of `parser` from the docstring of `execute`."""
    import inspect

    parser.description, _, parser.epilog = inspect.cleandoc(execute.__doc__ or "").partition("\n\n")


def add_actions(
    parser: argparse.ArgumentParser, actions: Mapping[str, tuple[str, Callable[[Any], None], Callable[[Any], int]]]
) -> None:
    """Add the actions of a command, such as `serve` of `mcp`.

    `actions` gives for each name a line for the help, a function that adds the options, and a function that executes
    the action and whose docstring is its help. The parsed arguments hold the latter as `execute_action`."""
    chosen = parser.add_subparsers(
        title="actions", prog=parser.prog, dest="action", metavar="ACTION", required=True, parser_class=type(parser)
    )
    for name, (about, configure, execute) in actions.items():
        action = chosen.add_parser(name, help=about)
        action.set_defaults(execute_action=execute)
        configure(action)
        describe_command(action, execute)


def get_version() -> str:
    """Return the version from `sys.modules`. An import of `retinue` would depend on all of its exports."""
    number: str = sys.modules["retinue"].__version__
    return number


def load_function(command: str, verb: str) -> Callable[[Any], Any]:
    """Import the module of `command` and return its function `verb`, which is `configure` or `execute`."""
    module = importlib.import_module(f"retinue.surfaces.cli.{MODULES.get(command, command)}")
    function: Callable[[Any], Any] = getattr(module, f"{verb}_{command}")
    return function


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Prints an error as one line, unless RETINUE_TRACEBACK is set."""
    _mend_streams()
    try:
        code = _run_command(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output, such as `head`, has left
        return BROKEN_PIPE
    except KeyboardInterrupt:
        clear_start_line()
        return INTERRUPTED
    except Exception as error:  # the boundary of the surface: the user reads one line
        if os.environ.get("RETINUE_TRACEBACK"):
            raise
        return report_error(error)
    finally:
        _drop_output()


def _run_command(argv: list[str]) -> int:
    chosen = _choose_command(argv)
    if chosen is not None and chosen not in (*COMMANDS, TALK):
        complain(explain_unknown_command(chosen))
        return USAGE
    show_start_line(chosen, argv)
    try:
        parser = _make_talk_parser() if chosen == TALK else make_parser(*([chosen] if chosen else []))[0]
        args = parser.parse_all(argv)
    except SystemExit as done:  # argparse has printed the help, the version or an error
        sys.stdout.flush()
        return int(done.code or 0)
    _change_folder(args.folders)
    if chosen is None:
        parser.print_help(sys.stderr)
        return USAGE
    code: int = load_function(chosen, "execute")(args)
    return code


def _choose_command(argv: list[str]) -> str | None:
    """Return the command that `argv` names, or None if it names none.

    Options of a conversation without a command, or no words at a terminal, mean TALK."""
    words = [word for before, word in pairwise(("", *argv)) if "-C" not in (before, word)]
    if not words:
        from retinue.surfaces.printer.terminal import can_draw

        return TALK if can_draw() else None
    if words[0].startswith("-") and not words[0].startswith(TOP_OPTIONS):
        return TALK
    return next((word for word in words if not word.startswith("-")), None)


def _make_talk_parser() -> Parser:
    """Return the parser of `retinue` without a command."""
    parser = Parser(prog="retinue")
    _add_top_options(parser)
    load_function(TALK, "configure")(parser)
    return parser


def _change_folder(folders: list[str]) -> None:
    """Change to the folders of -C, each relative to the one before it."""
    if folders and os.sep in sys.argv[0]:
        sys.argv[0] = os.path.abspath(sys.argv[0])  # noqa: PTH100 - keeps links; hints print this command
    for folder in folders:
        try:
            os.chdir(folder)
        except (OSError, ValueError) as error:
            from retinue.core.errors import ConfigError

            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"-C: cannot change to '{folder}': {why}") from None


def configure_help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", metavar="COMMAND", nargs="*", help="the command, such as `run` or `mcp serve`")


def execute_help(args: argparse.Namespace) -> int:
    """Show the help of a command; without one, list all commands.

    examples:
      retinue help
      retinue help run
      retinue help mcp serve
    """
    return _run_command([*args.words, "--help"])


def complain(text: str, *more: str) -> None:
    """Print `text` on stderr as one escaped line, and the lines of `more` below it."""
    from retinue.surfaces.printer import safe

    first = safe.fold_line(f"retinue: {safe.escape_line(text)}", sys.stderr, indent="  ")
    print("\n  ".join([first, *map(safe.escape_line, more)]), file=sys.stderr)


def report_error(error: Exception) -> int:
    """Print an error on stderr and return its exit code."""
    from retinue.core.errors import Ambiguous, ControlUnreachable, OutputFailed, RetinueError

    if isinstance(error, Ambiguous):
        complain(f"{error.summary}:", *error.candidates)
        return USAGE
    if isinstance(error, RetinueError):
        complain(str(error))
        return FAILED if isinstance(error, OutputFailed | ControlUnreachable) else USAGE
    if isinstance(error, OSError) and error.strerror:
        complain(_explain_refusal(error))
        return FAILED
    what = f"{type(error).__name__}: {error}"
    complain(f"internal error: {what} (this is a bug; RETINUE_TRACEBACK=1 in the environment shows where)")
    return FAILED


def _explain_refusal(error: OSError) -> str:
    """Describe an error of the operating system, which is a problem of the machine and not a bug."""
    if error.filename is not None:
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
        return f"{name}: {error.strerror} ({SHOW_WHERE})"
    try:
        Path.cwd()
    except OSError:
        return NO_FOLDER
    return f"the system refused: {error.strerror} ({SHOW_WHERE})"


def _mend_streams() -> None:
    """Replace closed streams by /dev/null, handle output errors, and escape characters that an encoding lacks.

    A write to a closed stdout fails, because its file is open for reading only: no answer is lost in silence."""
    is_ours = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__  # else a test or a caller captures them
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            mode = "r" if name == "stdin" else "w"
            # No `closefd`, because the descriptor is used longer than this file.
            setattr(sys, name, open(nowhere, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for name, raw in (("stdout", _Stdout), ("stderr", _Stderr)) if is_ours else ():
        old: Any = getattr(sys, name)
        buffer = io.BufferedWriter(raw(old.fileno(), "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(buffer, old.encoding, line_buffering=old.line_buffering))
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Drop buffered output that cannot be written, because the interpreter would report it at exit."""
    try:
        sys.stdout.flush()
    except Exception:  # noqa: BLE001 - OutputFailed too, whose module is not loaded for every command
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class Help(argparse.RawDescriptionHelpFormatter):
    """A help formatter for the width of the terminal. Wraps prose, and keeps lines that begin with a space."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(shutil.get_terminal_size().columns, WIDEST) - 2)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        """Write `[OPTIONS]` instead of the options of a command with more than MOST_OPTIONS."""
        actions = list(actions)
        if sum(bool(action.option_strings) for action in actions) > MOST_OPTIONS:
            actions = [action for action in actions if action.required or not action.option_strings]
            groups, self._prog = [], f"{self._prog} [OPTIONS]"
        super().add_usage(usage, actions, groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment  # commands are indented below headings

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        parts = []
        for command in action._get_subactions():  # without a line for the action itself
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
    """Wrap prose as paragraphs, and lines that begin with a space as tables of one or two columns."""
    for is_table, group in groupby(text.splitlines(), key=lambda line: line[:1].isspace()):
        if is_table:
            yield from _wrap_table(list(group), width)
            continue
        for is_blank, lines in groupby(group, key=lambda line: not line):
            paragraph = list(lines)
            yield from paragraph if is_blank else _wrap_line(" ".join(paragraph), width)


def _wrap_table(lines: list[str], width: int) -> Iterator[str]:
    """Yield the lines of a table, unchanged if all fit into `width`.

    Otherwise move the second column closer to the first, or below a first column that is too long. A line without a
    second column is a command and stays unchanged, so that it can be copied."""
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
        elif line.startswith(BELOW):  # a continuation of the second column of the line above
            text = line.lstrip()
            yield (" " * column if column + len(text) <= width else BELOW) + text
        else:
            yield line


def _wrap_line(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def explain_unknown_command(word: str) -> str:
    """Return the error for an unknown command, with the command that the user probably meant."""
    text = f"there is no command '{word}'"
    meant = _find_meant(word)
    if meant is None:
        return f"{text} (see `retinue --help`)"
    if not meant:
        return f"{text}; use `retinue` without a command to talk to an agent"
    about = COMMANDS.get(meant.split()[0], "")
    return f"{text}; use `retinue {meant}`{f' to {about}' if about else ''}"


def _find_meant(word: str) -> str | None:
    lower = word.casefold()
    if lower in SYNONYMS:
        return SYNONYMS[lower]
    if lower in COMMANDS:
        return lower
    if len(word.split()) > 1:
        return "run TASK"
    import difflib

    similar = difflib.get_close_matches(lower, COMMANDS, n=1, cutoff=SIMILAR)
    return similar[0] if similar else None
