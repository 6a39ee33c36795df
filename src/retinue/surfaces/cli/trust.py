"""`retinue trust`: let the project's retinue.yaml loosen what agents may do. Also the question of `retinue run`."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

from retinue.config import trust
from retinue.config.files import exists, read_text
from retinue.config.project import SETTINGS_FILE, find_project
from retinue.config.settings import parse_settings, restrict
from retinue.core.errors import ConfigError
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli import prompts
from retinue.surfaces.printer import safe


def configure_trust(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--yes", action="store_true", help="do not ask")
    what.add_argument("--revoke", action="store_true", help="take it back")


def execute_trust(args: argparse.Namespace) -> int:
    """Let this project's retinue.yaml loosen what agents may do.

    A retinue.yaml that came with a clone was written by somebody else. What it forbids always holds; what it loosens
    (`mode: yes`, `allow`, limits above the defaults) holds only after you said yes to exactly this text, here or when
    `retinue run` asks. What `retinue init` or your own "always in this project" wrote is trusted. A file that you
    name with --config is trusted for that command.

    examples:
      retinue trust               shows what it would allow, and asks
      retinue trust --yes         trusts it without asking, such as in CI
      retinue trust --revoke      from now on it is ignored again
    """
    file = screen.check_folder(find_project(Path.cwd())) / SETTINGS_FILE
    if args.revoke:
        trust.remove_answer(file)
        print(f"{safe.escape_line(str(file))} is not trusted.")
        return 0
    text = read_text(file)
    loose = [str(each) for each in restrict(parse_settings(text, file))[1]]
    if not loose:
        print(f"{safe.escape_line(str(file))} loosens nothing, so all of it is in force.")
        return 0
    if not args.yes:
        if not prompts.at_terminal():
            raise ConfigError(f"{file} would allow {', '.join(loose)}; to trust it without a terminal give --yes")
        if not _ask_user(file, loose):
            print("Nothing was changed.", file=sys.stderr)
            return 1
    trust.keep_answer(file, text)
    print(f"{safe.escape_line(str(file))} is trusted until it changes: {safe.escape_line(', '.join(loose))}")
    return 0


def ask_trust() -> None:
    """Ask at the terminal, once for each text of the project's retinue.yaml, whether what it loosens may hold."""
    file = find_project(Path.cwd()) / SETTINGS_FILE
    if not exists(file) or not prompts.at_terminal():
        return
    text = read_text(file)
    loose = [str(each) for each in restrict(parse_settings(text, file))[1]]
    if loose and trust.read_answer(file, text) is None:
        yes = _ask_user(file, loose)
        with nullcontext() if yes else suppress(ConfigError):  # a no that cannot be kept is asked for again
            trust.keep_answer(file, text, trusted=yes)


def _ask_user(file: Path, loose: list[str]) -> bool:
    lines = [
        f"{safe.escape_line(str(file))} loosens what agents may do here:",
        *(f"  {safe.escape_line(line)}" for line in loose),
    ]
    print("\n".join([*lines, "Without your trust this part is ignored."]), file=sys.stderr)
    return prompts.ask_yes_no("Trust it, until it changes?", default=False)
