"""`retinue trust`: let the project's retinue.yaml loosen the permissions of agents.

`--state` takes over a state folder that was created in another place, `--owner` accepts a project of another user."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from retinue.build.logs import take_over_state
from retinue.config import trust
from retinue.config.files import read_text
from retinue.config.ownership import find_other_owners
from retinue.config.project import OWNED_MARKS, SETTINGS_FILE, find_project, find_project_folder, load_project
from retinue.core.errors import ConfigError
from retinue.files.reserved import STATE_FOLDER
from retinue.files.state_owner import is_adoptable, name_user
from retinue.surfaces.cli import prompts
from retinue.surfaces.printer import safe

TRUSTED = "{file} is trusted already, until it changes: {what}; --revoke withdraws your trust"
STATE_WARNING = """\
{state} has no signature of yours for this place. Once it has one, its trees can be resumed and its answers to questions
count as given by you. Take it over only if you made it here, or moved, copied or restored it yourself."""
OWNER_WARNING = """\
{folder} belongs to {owner}. Its settings and agents decide what runs as you, within what you allow."""


def configure_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--revoke", action="store_true", help="withdraw your trust, also in an accepted owner")
    what.add_argument("--state", action="store_true", help="take over a .retinue folder without your signature")
    what.add_argument("--owner", action="store_true", help="accept that another user owns this project")


def execute_trust(args: argparse.Namespace) -> int:
    """Trust this project's retinue.yaml, so that it may loosen what agents may do.

    A retinue.yaml that came with a clone was written by somebody else. What it forbids always takes effect. What it
    loosens (`mode: yes`, `allow`, limits above the defaults) takes effect only after you agreed to exactly this text,
    here or when `retinue run` asks. Files written by `retinue init`, and rules that you add with "always in this
    project", are trusted. A file that you name with --config is trusted for that command.

    State in .retinue is used only if you made it in this place; --state takes over state that you brought here
    yourself. A project of another user is refused, because its files could run commands as you; --owner accepts it.

    examples:
      retinue trust               show what the file would allow, and ask
      retinue trust --yes         trust it without asking, for example in CI
      retinue trust --revoke      ignore those parts again
      retinue trust --state       take over a .retinue folder that you copied here
      retinue trust --owner       use a project that belongs to another user
    """
    folder = find_project_folder(Path.cwd())
    if args.state:
        return _take_over_state(folder / STATE_FOLDER, yes=args.yes)
    if args.owner:
        return _accept_owner(folder, yes=args.yes)
    file = folder / SETTINGS_FILE
    if args.revoke:
        trust.remove_answer(file)
        trust.remove_answer(folder)
        print(f"{safe.escape_line(str(file))} is not trusted.")
        return 0
    find_project(folder)
    text = read_text(file)
    loose = trust.list_loosenings(file, text)
    if not loose:
        print(f"{safe.escape_line(str(file))} loosens nothing, so all of it takes effect.")
        return 0
    if trust.read_answer(file, text):
        print(safe.fold_line(safe.escape_line(TRUSTED.format(file=file, what=", ".join(loose))), sys.stdout))
        return 0
    load_project(folder, config=file)  # raises ConfigError for a file that has an error
    no_terminal = f"{file} would allow {', '.join(loose)}; to trust it without a terminal give --yes"
    shown = prompts.format_loosenings(file, loose)
    if not prompts.confirm(prompts.TRUST_QUESTION, shown, yes=args.yes, no_terminal=no_terminal):
        return 1
    trust.keep_answer(file, text)
    print(safe.fold_line(safe.escape_line(f"{file} is trusted until it changes: {', '.join(loose)}"), sys.stdout))
    return 0


def _take_over_state(state: Path, *, yes: bool) -> int:
    """Take over a state folder that the user moved, copied or restored, and return the exit code."""
    if not is_adoptable(state):
        print(f"{safe.escape_line(str(state))} is yours already." if state.exists() else "There is no state here.")
        return 0
    no_terminal = f"{state} has no signature of yours for this place; to take it over without a terminal give --yes"
    shown = STATE_WARNING.format(state=safe.escape_line(str(state)))
    if not prompts.confirm("Take it over?", shown, yes=yes, no_terminal=no_terminal):
        return 1
    asyncio.run(take_over_state(state))
    print(f"{safe.escape_line(str(state))} is yours.")
    return 0


def _accept_owner(folder: Path, *, yes: bool) -> int:
    """Accept another user as the owner of the project's files, and return the exit code."""
    owners = find_other_owners([folder / mark for mark in (*OWNED_MARKS, ".git")])
    if not owners:
        print(f"{safe.escape_line(str(folder))} has no files of another user.")
        return 0
    if len(owners) > 1:
        names = ", ".join(sorted(map(name_user, owners)))
        raise ConfigError(f"the files of {folder} belong to several users ({names}): give them one owner first")
    [owner] = owners
    name = safe.escape_line(name_user(owner))
    no_terminal = f"{folder} belongs to {name_user(owner)}; to accept that without a terminal give --yes"
    shown = OWNER_WARNING.format(folder=safe.escape_line(str(folder)), owner=name)
    if not prompts.confirm(f"Accept {name}?", shown, yes=yes, no_terminal=no_terminal):
        return 1
    trust.keep_accepted_owner(folder, owner)
    print(f"{safe.escape_line(str(folder))} is accepted as a project of {name}.")
    return 0
