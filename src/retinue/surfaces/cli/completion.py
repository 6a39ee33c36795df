"""`retinue completion SHELL`: a completion script that shtab generates from the argument parsers.

Completes commands, options, choices and file names. For the names of runs, questions, profiles and models the script
calls `retinue completion --values`, which prints only plain words, because a shell may expand the words it is offered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from retinue.core.errors import ConfigError
from retinue.surfaces.cli.main import COMMANDS, make_parser

SHELLS = ("bash", "zsh", "fish")
FILES, FOLDERS, TASKS = ("FILE",), ("DIR", "FOLDER", "PATH"), ("TASK", "TEXT")
KINDS = {"RUN": "runs", "TREE": "runs", "RUN|TREE": "runs", "ID": "questions"}  # by placeholder
TASK = {"bash": "_retinue_complete_task", "zsh": "_files", "fish": "(__fish_complete_path (commandline -ct))"}
LATEST_TREES = 30
_PLAIN = re.compile(r"[A-Za-z0-9_./:-]+")
BASH_PREAMBLE = """\
# A task may be in a file: @FILE.
_retinue_complete_task() {
  case "$1" in @*) compgen -f -P @ -- "${1#@}" ;; esac
}
# Ask the same program, in the folder that -C names.
_retinue_values() {
  local n; local -a at=()
  for ((n = 1; n < COMP_CWORD; n++)); do
    case "${COMP_WORDS[n]}" in
      -C) at+=(-C "${COMP_WORDS[n + 1]/#\\~/$HOME}"); ((n++)) ;;
      -*) ;;
      *) break ;;
    esac
  done
  "${COMP_WORDS[0]/#\\~/$HOME}" "${at[@]}" completion --values "$1" "$2" 2>/dev/null
}
_retinue_values_runs() { _retinue_values runs "$1"; }
_retinue_values_questions() { _retinue_values questions "$1"; }
_retinue_values_profiles() { _retinue_values profiles "$1"; }
_retinue_values_commands() { _retinue_values commands "$1"; }
_retinue_values_models() { _retinue_values models "$1"; }
# Bash breaks words at colons. Put a model together again, and offer only what comes after its last colon.
_retinue_complete() {
  local n last=-1 at=0 open=0 current kept
  local -a words=()
  for ((n = 0; n < ${#COMP_WORDS[@]}; n++)); do
    if ((open == 2)) || { ((open == 1)) && [[ ${COMP_WORDS[n]} == :* ]]; }; then
      words[last]+="${COMP_WORDS[n]}"
      open=$((open == 2 ? 1 : 2))
    else
      words[++last]="${COMP_WORDS[n]}"
      open=0
      ((last > 0)) && [[ ${words[last - 1]} == --model ]] && open=1
    fi
    ((n == COMP_CWORD)) && at=$last
  done
  local -a COMP_WORDS=("${words[@]}")
  local COMP_CWORD=$at
  current="${words[at]}"
  _shtab_retinue "$@"
  kept="${current%"${current##*:}"}"
  if [[ -n $kept && $COMP_WORDBREAKS == *:* ]]; then
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
  fi
}
"""
BASH_REGISTRATION = "\ncomplete -o bashdefault -F _retinue_complete retinue\n"
ZSH_PREAMBLE = """\
_retinue_values() {
  local -a found
  found=(${(f)"$(retinue completion --values $1 "$PREFIX" 2>/dev/null)"})
  compadd -a found
}
"""
PREAMBLES = {"bash": BASH_PREAMBLE, "zsh": ZSH_PREAMBLE, "fish": ""}


def configure_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="|".join(SHELLS), nargs="?", choices=SHELLS, help="your shell")
    parser.add_argument(
        "--values",
        nargs=2,
        metavar=("KIND", "WORD"),
        help=f"print the {', '.join(FIND_VALUES)} that begin with WORD; the scripts call this",
    )


def execute_completion(args: argparse.Namespace) -> int:
    """Print a completion script for your shell.

    It completes commands, options and their values, files, and the names of runs, waiting questions and profiles of
    the project that you are in.

    examples:
      bash:  retinue completion bash > ~/.local/share/bash-completion/completions/retinue
             or for this shell only: source <(retinue completion bash)
      zsh:   retinue completion zsh > "${fpath[1]}/_retinue"
      fish:  retinue completion fish > ~/.config/fish/completions/retinue.fish
    """
    if args.values is not None:
        kind, word = args.values
        if kind not in FIND_VALUES:
            raise ConfigError(f"--values: unknown kind '{kind}'; available: {', '.join(FIND_VALUES)}")
        values = FIND_VALUES[kind](word)
        print("".join(f"{value}\n" for value in values if value.startswith(word) and _PLAIN.fullmatch(value)), end="")
        return 0
    if args.shell is None:
        raise ConfigError(f"name your shell: {', '.join(SHELLS)}")
    print(_make_script(args.shell), end="")
    return 0


def _make_script(shell: str) -> str:
    import shtab

    from retinue.surfaces.cli.talk import configure_talk

    top, _ = make_parser(*COMMANDS)
    configure_talk(top)  # the options of `retinue` without a command
    for parser, action in _find_actions(top):
        completer = _choose_completer(parser, action)
        if completer is not None:
            action.complete = completer  # type: ignore[attr-defined]  # the attribute that shtab reads
    script = shtab.complete(top, shell=shell, preamble=PREAMBLES[shell])
    return script + BASH_REGISTRATION if shell == "bash" else script


def _find_actions(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    """Yield the arguments of a parser and of its subcommands, each with its parser."""
    for action in parser._actions:
        yield parser, action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _find_actions(below)


def _choose_completer(parser: argparse.ArgumentParser, action: argparse.Action) -> Mapping[str, Any] | None:
    """Return the shtab completer for an argument, chosen by its placeholder or name; None if there is none."""
    import shtab

    for names, completer in ((FILES, shtab.FILE), (FOLDERS, shtab.DIR), (TASKS, TASK)):
        if action.metavar in names:
            return completer
    if action.dest == "profile" and parser.prog != "retinue init":
        return _ask_for("profiles")
    if action.dest == "model":
        return _ask_for("models")
    if action.dest == "words" and parser.prog == "retinue help":
        return _ask_for("commands")
    return _ask_for(KINDS[action.metavar]) if isinstance(action.metavar, str) and action.metavar in KINDS else None


def _ask_for(kind: str) -> dict[str, str]:
    """Return, for each shell, the completer that asks `retinue completion --values` for values of `kind`."""
    return {
        "bash": f"_retinue_values_{kind}",
        "zsh": f"{{_retinue_values {kind}}}",
        "fish": f"(retinue completion --values {kind} (commandline -ct) 2>/dev/null)",
    }


def _find_runs(word: str) -> list[str]:
    """Return trees. If `word` contains a slash, return runs instead: paths if it begins with one, else TREE/N."""
    from retinue.surfaces.cli.output import open_project_log

    log = open_project_log().log

    async def find() -> list[str]:
        trees = [stored.tree for stored in await log.list_trees(latest=LATEST_TREES, reported=False)]
        if "/" not in word:
            return ["last", *trees] if trees else []
        runs = await log.read_runs(trees)
        return list(dict.fromkeys(run.ref.path if word.startswith("/") else run.ref.name for run in runs))

    return asyncio.run(find())


def _find_questions(word: str) -> list[str]:
    """Return the numbers of pending questions, or their ids if numbers are ambiguous or `word` is not a number."""
    from retinue.surfaces.cli.output import open_project_log
    from retinue.surfaces.cli.questions import find_waiting

    waiting = [each.approval for each in asyncio.run(find_waiting(open_project_log()))]
    numbers = [str(question.number) for question in waiting]
    if (word and not word.isdigit()) or len(set(numbers)) < len(numbers):
        return [question.id for question in waiting]
    return numbers


def _find_profiles(_: str) -> list[str]:
    from retinue.config.project import load_project

    return [profile.name for profile in load_project(Path.cwd()).all_profiles]


def _find_models(word: str) -> list[str]:
    """Return the models named by the project and the environment. If `word` has a provider, add all known models."""
    from retinue.config.models import PROVIDERS, find_default_model
    from retinue.config.project import load_project

    project = load_project(Path.cwd())
    named = [project.settings.model, *(profile.model for profile in project.all_profiles)]
    found = [*named, find_default_model(os.environ), *(provider.default for provider in PROVIDERS)]
    if ":" in word:
        from retinue.build.models import list_known_models  # imports the model library

        found += list_known_models()
    return list(dict.fromkeys(model for model in found if isinstance(model, str)))


FIND_VALUES: dict[str, Callable[[str], list[str]]] = {
    "runs": _find_runs,
    "questions": _find_questions,
    "profiles": _find_profiles,
    "commands": lambda _: list(COMMANDS),
    "models": _find_models,
}
