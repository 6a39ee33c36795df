"""`retinue demo`: a live tree of agents at work, without a key and without a network.

A primary and its subagents find and fix a real bug in a copy of a sample project. Only the models are scripted: tools,
approvals and the log are those of every other run. Writes only to its scratch folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue.build.parts import Parts
from retinue.concurrency import SystemClock
from retinue.core.approvals import Allow, Approval, Deny
from retinue.core.errors import ConfigError
from retinue.core.messages import ToolSpec
from retinue.core.ports import AttachedApprover
from retinue.core.profiles import Profile, Task, Team
from retinue.core.rules import ALLOW, ASK, Verdict
from retinue.core.teams import Member
from retinue.files.reserved import STATE_FOLDER
from retinue.log.runs import Runs
from retinue.surfaces.cli import output
from retinue.surfaces.cli.foreground import print_answer
from retinue.surfaces.cli.live import Display, run_and_show
from retinue.surfaces.cli.options import add_level_options
from retinue.surfaces.cli.prompts import at_terminal
from retinue.surfaces.cli.startup import make_printer, wants_live_view
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.header import Header

HERE = Path(__file__).parent
TASK = "One of the checks of this project fails. Find out why, have it fixed, and prove it."
EDITED = "till/pricing.py"
FIX = "fix the failing check"

EXPLORER = Profile(
    "explorer", "Find out how the code works. Have scouts search for you.",
    description="Reads code and explains it", tools=["read", "glob", "grep", "subagent_scout"], workspace="shared",
)  # fmt: skip
SCOUT = Profile("scout", "Answer one question by searching.", tools=["grep"], workspace="shared", leaf=True)
TESTER = Profile("tester", "Run the project's checks.", tools=["shell"], workspace="shared", leaf=True)
CRITIC = Profile("critic", "Say what is unfinished.", tools=["read", "grep"], workspace="shared", leaf=True)
FIXER = Profile("fixer", "Make the smallest edit that fixes it.", tools=["read", "edit"], workspace="shared", leaf=True)
MAIN = Profile(
    "main", "Delegate, decide, and end with the answer.",
    tools=["read", "glob", "grep", "shell", "edit", "spawn_subagents", "subagent_fixer", "subagent_tester"],
    workspace="shared",
)  # fmt: skip
PROFILES = (EXPLORER, SCOUT, TESTER, CRITIC, FIXER)

FIXERS = Team(
    "fixers", "Make the failing check pass, in your own copy.", members=[Member(id="hasty"), Member(id="careful"),
    Member(id="tricky")], strategy="winner_present", tools=["edit", "shell"], workspace="copy", leaf=True,
)  # fmt: skip
MAIN_WITH_TEAM = Profile(
    "main", "Delegate, decide, and end with the answer.", tools=["edit", "shell", "apply_subagent", FIXERS],
    workspace="shared",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Play:
    """One version of the demo: its primary, its script, and the one tool call that needs an approval."""

    main: Profile
    script: str
    title: str
    asked: str
    asked_args: Mapping[str, str]
    shown: str  # the agent whose run is worth a closer look


SUBAGENTS = Play(
    main=MAIN,
    script="demo.yaml",
    title="an agent and its subagents fix a bug",
    asked="edit",
    asked_args={"path": EDITED},
    shown=FIXER.name,
)
TEAM = Play(
    main=MAIN_WITH_TEAM,
    script="demo_team.yaml",
    title="a team of three fixes a bug and votes",
    asked="apply_subagent",
    asked_args={"subagent_id": FIX},
    shown=FIXERS.name,
)


def configure_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--team", action="store_true", help="watch a team: three agents fix it, each in its own copy, and vote"
    )
    parser.add_argument("--fast", action="store_true", help="do not pause as a model would")
    add_level_options(parser)


def execute_demo(args: argparse.Namespace) -> int:
    """Watch an agent and its subagents fix a real bug in a sample project. Needs no key and no network.

    examples:
      retinue demo
      retinue demo --team
      retinue demo --quiet
    """
    play = TEAM if args.team else SUBAGENTS
    terminal = at_terminal()
    printer = make_printer(args)
    command = output.format_command()
    project = _copy_of_the_sample()
    parts = Parts(
        project=project,
        state=project / STATE_FOLDER,
        profiles=PROFILES,
        model=f"scripted:{HERE / play.script}",
        approver=AttachedApprover(DemoApprover(play), by="the demo's policy"),
        policy=DemoPolicy(play),
        clock=InstantClock() if args.fast else None,
        runtime="inherited",
    )
    live = terminal and wants_live_view(args)
    show = printer.show_note if live else printer.show_text
    show(_describe_demo(play, project, terminal))
    with _own_python_first():
        header = Header(model=str(parts.model), runtime=parts.runtime, workspace=play.main.workspace)
        display = Display(printer=printer, asks=terminal, live=live, header=header)
        shown = asyncio.run(run_and_show(parts, lambda control: control.spawn(play.main, Task(TASK)), display))
    code = print_answer(shown, printer, as_json=False, live=live, is_here=False)
    if live:
        printer.show_note(f"Look closer: cd {shlex.quote(str(project))} && {command} ps")
    else:
        printer.show_text(_list_hints(play, command, project, shown.runs))
    return code


def _copy_of_the_sample() -> Path:
    try:
        project = Path(tempfile.mkdtemp(prefix="retinue-demo-")).resolve() / "till"
        shutil.copytree(HERE / "sample", project, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:  # includes shutil.Error
        raise ConfigError(
            f"cannot make a scratch folder in {tempfile.gettempdir()}: {error.strerror or error}"
        ) from None
    return project


def _describe_demo(play: Play, project: Path, terminal: bool) -> str:
    who = "You will be asked before it is edited." if terminal else "Its one edit is approved by the demo's own policy."
    about = f"retinue demo: {play.title}. The models are scripted, the tools are real."
    lines = (about, f"The project is a copy in {safe.escape_line(str(project))}. {who}")
    return "\n".join(safe.fold_line(line, sys.stderr) for line in lines)


def _list_hints(play: Play, command: str, project: Path, runs: Runs) -> str:
    shown = next((run.number for run in runs.runs.values() if run.agent == play.shown), 0)
    hints = {
        f"cd {shlex.quote(str(project))}": "",
        f"{command} ps": "the tree again, from the log",
        f"{command} show {runs.tree}/{shown}": "one run: its task, tools and result",
        f"{command} tail --json": "every event, in order",
    }
    wide = max(len(hint) for hint, why in hints.items() if why)
    lines = (f"  {hint:<{wide}}  {why and '# ' + why}".rstrip() for hint, why in hints.items())
    return "\n".join(["Look closer:", *lines])


@contextmanager
def _own_python_first() -> Iterator[None]:
    """Put the folder of this Python first on the PATH, so that the checks of the sample project use it."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


class DemoPolicy:
    """A policy that asks about the one change of the project, and allows spawning, checks and changes in a copy."""

    def __init__(self, play: Play) -> None:
        self._free = ("shell",) if play.asked == "edit" else ("shell", "edit")

    def judge(self, spec: ToolSpec, args: dict[str, Any], *, primary: bool, workspace: str) -> Verdict:
        unasked = spec.tier == "observe" or spec.spawns or spec.name in self._free
        return ALLOW if unasked else ASK


class InstantClock(SystemClock):
    """A system clock whose sleeps take no time, so that scripted models do not pause."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class DemoApprover:
    """An approver for a demo without a terminal: allows the one change of the play and denies everything else."""

    def __init__(self, play: Play) -> None:
        self._play = play

    async def __call__(self, question: Approval) -> Allow | Deny:
        if question.tool == self._play.asked and self._play.asked_args.items() <= question.args.items():
            return Allow()
        return Deny("the demo allows only its own edit")
