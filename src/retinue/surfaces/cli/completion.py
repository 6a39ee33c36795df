"""`retinue completion SHELL`: a completion script made from the parsers themselves, so that it cannot go stale."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

EPILOG = """\
examples:
  bash:  retinue completion bash > ~/.local/share/bash-completion/completions/retinue
         or for this shell only: source <(retinue completion bash)
  zsh:   retinue completion zsh > "${fpath[1]}/_retinue"
  fish:  retinue completion fish > ~/.config/fish/completions/retinue.fish"""
SHELLS = ("bash", "zsh", "fish")
FILES = frozenset({"FILE"})


@dataclass(frozen=True)
class Option:
    """One option: its spellings, and whether a word, and then a file, follows."""

    names: tuple[str, ...]
    text: str
    takes_value: bool
    takes_file: bool


@dataclass(frozen=True)
class Command:
    name: str
    text: str
    options: tuple[Option, ...]
    words: tuple[str, ...]
    takes_files: bool


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print a completion script for your shell."
    parser.epilog = EPILOG
    parser.add_argument("shell", metavar="|".join(SHELLS), choices=SHELLS, help="which shell it is for")


def run(args: argparse.Namespace) -> int:
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    print(scripts[args.shell](commands()), end="")
    return 0


def commands() -> list[Command]:
    """Every command as its own parser describes it."""
    from retinue.surfaces.cli.main import COMMANDS, parser

    _, parsers = parser(*COMMANDS)
    return [_command(name, COMMANDS[name], made) for name, made in parsers.items()]


def _command(name: str, text: str, parser: argparse.ArgumentParser) -> Command:
    options, words, files = [], [], False
    for action in parser._actions:
        if action.option_strings:
            value = action.nargs != 0
            takes_file = value and str(action.metavar) in FILES
            options.append(Option(tuple(action.option_strings), action.help or "", value, takes_file))
        elif action.choices:
            words += [str(choice) for choice in action.choices]
            for below in action.choices.values() if isinstance(action.choices, dict) else ():
                known = {option.names for option in options}
                options += [option for option in _command("", "", below).options if option.names not in known]
        elif str(action.metavar) == "TASK":
            files = True
    return Command(name, text, tuple(options), tuple(words), files)


def _spellings(options: tuple[Option, ...]) -> list[str]:
    return [name for option in options for name in option.names]


def _bash(found: list[Command]) -> str:
    cases = []
    for command in found:
        words = " ".join([*command.words, *_spellings(command.options)])
        with_file = "|".join(_spellings(tuple(o for o in command.options if o.takes_file)))
        with_value = "|".join(_spellings(tuple(o for o in command.options if o.takes_value and not o.takes_file)))
        lines = [f"    {command.name})"]
        if with_file or with_value:
            lines.append('      case "$before" in')
            if with_file:
                lines.append(f"        {with_file}) _retinue_files; return ;;")
            if with_value:
                lines.append(f"        {with_value}) return ;;")
            lines.append("      esac")
        if command.takes_files:
            lines.append('      case "$word" in @*) _retinue_files; return ;; esac')
        lines += [f'      COMPREPLY=($(compgen -W "{words}" -- "$word")) ;;']
        cases.append("\n".join(lines))
    names = " ".join([*(command.name for command in found), "--help", "--version"])
    return BASH.format(names=names, cases="\n".join(cases))


def _zsh(found: list[Command]) -> str:
    described = "\n".join(f"    {_quoted(f'{command.name}:{command.text}')}" for command in found)
    cases = []
    for command in found:
        arguments = [_quoted(_zsh_option(name, option)) for option in command.options for name in option.names]
        if command.words:
            arguments.append(_quoted(f"1:word:({' '.join(command.words)})"))
        elif command.takes_files:
            arguments.append(_quoted("1:task:_files"))
        cases.append(f"      {command.name}) _arguments {' '.join(arguments)} ;;")
    return ZSH.format(described=described, cases="\n".join(cases))


def _zsh_option(name: str, option: Option) -> str:
    text = "".join("\\" + char if char in "[]:\\" else char for char in option.text.replace("%%", "%"))
    value = "" if not option.takes_value else ":file:_files" if option.takes_file else ":value:"
    return f"{name}[{text}]{value}"


def _fish(found: list[Command]) -> str:
    lines = ["complete -c retinue -f", "complete -c retinue -n __fish_use_subcommand -l version -d 'print the version'"]
    for command in found:
        lines.append(f"complete -c retinue -n __fish_use_subcommand -a {command.name} -d {_quoted(command.text)}")
        here = f"complete -c retinue -n '__fish_seen_subcommand_from {command.name}'"
        lines += [f"{here} -a {word}" for word in command.words]
        if command.takes_files:
            lines.append(f"{here} -F")
        for option in command.options:
            spelled = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
            value = " -r -F" if option.takes_file else " -x" if option.takes_value else ""
            lines.append(f"{here} {spelled}{value} -d {_quoted(option.text)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


BASH = """\
# bash completion of retinue; made by `retinue completion bash`
_retinue_files() {{
  local prefix=""
  case "$word" in @*) prefix="@"; word="${{word#@}}" ;; esac
  COMPREPLY=($(compgen -f -P "$prefix" -- "$word"))
  compopt -o filenames 2>/dev/null
}}
_retinue() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" IFS=$' \\t\\n'
  COMPREPLY=()
  if [ "$COMP_CWORD" -le 1 ]; then
    COMPREPLY=($(compgen -W "{names}" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
}}
complete -F _retinue retinue
"""
ZSH = """\
#compdef retinue
# zsh completion of retinue; made by `retinue completion zsh`
_retinue() {{
  local -a commands
  commands=(
{described}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    _arguments '--version[print the version]' '--help[print the help]'
  else
    local command="${{words[2]}}"
    shift words
    (( CURRENT-- ))
    case "$command" in
{cases}
    esac
  fi
}}
if [ "$funcstack[1]" = "_retinue" ]; then _retinue "$@"; else compdef _retinue retinue; fi
"""
