"""`retinue completion SHELL`: a completion script that shtab makes from the parsers themselves.

Completes commands, options, choices and file names. Ids of runs are not completed: that would ask the log of the
current folder at every press of the Tab key.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

SHELLS = ("bash", "zsh", "fish")
FILES, FOLDERS, TASKS = ("FILE",), ("DIR", "FOLDER", "PATH"), ("TASK", "TEXT")
TASK = {"bash": "_retinue_complete_task", "zsh": "_files", "fish": "(__fish_complete_path (commandline -ct))"}
BASH_PREAMBLE = """\
# A task may be in a file: @FILE.
_retinue_complete_task() {
  case "$1" in @*) compgen -f -P @ -- "${1#@}" ;; esac
}
"""


def configure_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="|".join(SHELLS), choices=SHELLS, help="your shell")


def execute_completion(args: argparse.Namespace) -> int:
    """Print a completion script for your shell.

    examples:
      bash:  retinue completion bash > ~/.local/share/bash-completion/completions/retinue
             or for this shell only: source <(retinue completion bash)
      zsh:   retinue completion zsh > "${fpath[1]}/_retinue"
      fish:  retinue completion fish > ~/.config/fish/completions/retinue.fish
    """
    import shtab

    from retinue.surfaces.cli.main import COMMANDS, make_parser

    top, _ = make_parser(*COMMANDS)
    for action in _find_actions(top):
        completer = _choose_completer(action)
        if completer is not None:
            action.complete = completer  # type: ignore[attr-defined]  # shtab's way to name it
    print(shtab.complete(top, shell=args.shell, preamble=BASH_PREAMBLE if args.shell == "bash" else ""), end="")
    return 0


def _find_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of the commands below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _find_actions(below)


def _choose_completer(action: argparse.Action) -> Mapping[str, Any] | None:
    """Return what completes the argument's value; its placeholder says which kind of file it names."""
    import shtab

    for names, completer in ((FILES, shtab.FILE), (FOLDERS, shtab.DIR), (TASKS, TASK)):
        if action.metavar in names:
            return completer
    return None
