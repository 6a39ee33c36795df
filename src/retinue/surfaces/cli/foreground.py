"""One tree of a command, run to its end on this terminal or detached. Prints the answer and returns the exit code."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from retinue.core.control import RunHandle
from retinue.core.errors import ConfigError, OutputFailed, RetinueError
from retinue.core.profiles import Profile
from retinue.core.results import Result
from retinue.files.private import make_private_folder, open_private_file
from retinue.files.state_folder import name_run_folder
from retinue.log.blocks import format_count
from retinue.log.lookup import find_run
from retinue.surfaces.cli import output
from retinue.surfaces.cli.live import Begin, Display, ShownTree, run_and_show
from retinue.surfaces.cli.main import FAILED
from retinue.surfaces.cli.startup import StartUp, make_header, make_printer, wants_live_view
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.markdown import render_markdown
from retinue.surfaces.printer.printer import Printer
from retinue.surfaces.printer.totals import format_summary, format_totals

EXIT_CODES = {"done": 0, "timed_out": 124, "cancelled": 130}
CONTINUABLE = ("failed", "limited", "timed_out", "cancelled")
UNCONFIRMED_HINT = "; --yes runs tools without asking, --wait-approvals waits for `retinue approve`"
DETACHED_FILES = ((1, "stdout.txt"), (2, "stderr.txt"))


def run_tree(
    args: argparse.Namespace, start: StartUp, begin: Begin, *, after: int = 0, profile: Profile | None = None
) -> int:
    """Run the tree that `begin` starts, on this terminal or detached, and return the exit code.

    Events up to sequence number `after` are not shown."""
    if args.detach and args.no_control and not args.yes:
        raise ConfigError("--detach with --no-control can never ask anything: add --yes, or leave --no-control out")
    pipe, code = detach() if args.detach else (None, 0)
    if args.detach and pipe is None:
        return code

    def announce(run: RunHandle) -> None:
        """Redirect the output to files, and send the id of the tree to the first process."""
        assert pipe is not None and start.parts.state is not None
        redirect_output(start.parts.state, run)
        os.write(pipe, run.tree.encode())
        os.close(pipe)

    printer = make_printer(args, color=False if args.detach else None)
    live = start.asks and wants_live_view(args)
    header = make_header(start, profile) if live and profile is not None and profile.has_model else None
    display = Display(printer=printer, asks=start.asks, live=live, after=after, header=header)
    running = run_and_show(
        start.parts,
        begin,
        display,
        serves=not args.no_control,
        announce=announce if args.detach else None,
        profile=profile,
    )
    return print_answer(asyncio.run(running), printer, as_json=args.json, live=live)


def print_answer(shown: ShownTree, printer: Printer, *, as_json: bool, live: bool = False, is_here: bool = True) -> int:
    """Print the summary on stderr and the answer on stdout, and return the exit code. `is_here` means that commands in
    the current folder find the run.

    After the live view (`live`), print the answer first, then one line of totals. Print nothing on a stuck terminal,
    and end the process."""
    code = EXIT_CODES.get(shown.result.status, FAILED) or (FAILED if shown.log_error is not None else 0)
    if shown.stuck:
        if not shares_terminal():
            _print_result(shown.result, as_json=as_json, rendered=False, is_here=is_here)
        output.exit_stuck(code)
    if live:
        _print_result(shown.result, as_json=as_json, rendered=shares_terminal(), is_here=is_here)
        printer.note_foreign_output()
        print_live_end(shown, printer, is_newest=bool(shown.unapplied) and _is_newest(shown.result.tree))
    else:
        _print_end(shown, printer, is_here=is_here)
    if is_here:
        _suggest_continue(shown, printer)
    if not live:
        _print_result(shown.result, as_json=as_json, rendered=False, is_here=is_here)
    return code


def shares_terminal() -> bool:
    """Return True if stdout is the same terminal as stderr, where the live view is."""
    try:
        return os.isatty(1) and os.fstat(1).st_rdev == os.fstat(2).st_rdev
    except OSError:
        return False


def _print_end(shown: ShownTree, printer: Printer, *, is_here: bool) -> None:
    """Print the summary of the tree, and how to review and apply the changes, before the answer."""
    tree = shown.result.tree
    if printer.level != "quiet":
        view = shown.runs.runs.get(shown.result.run)
        if shown.log_error is None and view is not None and view.ended is not None:  # else totals are incomplete
            printer.show_text(format_summary(shown.runs, color=printer.color))
        if is_here:
            more = f"more: retinue show {tree} · retinue tail {tree}"
            printer.show_text(colors.paint_faint(more, color=printer.color))
    for name, count in shown.unapplied:
        files = format_count(count, "file")
        printer.show_note(f"{files} changed, not applied: retinue diff {name} · retinue apply {name}")
    _print_failure(shown)


def print_live_end(shown: ShownTree, printer: Printer, *, is_newest: bool) -> None:
    """Print how to review and apply the changes, then one line of totals, below the answer of a live view.

    Commands without a name mean the primary of the newest tree, so its name is left out."""
    primary = f"{shown.result.tree}/0"
    for name, count in shown.unapplied:
        which = "" if is_newest and name == primary else f" {name}"
        files = format_count(count, "file")
        printer.show_text(f"Review: retinue diff{which}\nApply:  retinue apply{which}  ({files} changed)")
    _print_failure(shown)
    printer.show_note(safe.fold_line(format_totals(shown.runs, time.time()), sys.stderr))


def _is_newest(tree: str) -> bool:
    """Return True if `tree` is the newest tree of the project, which commands without a name mean."""
    try:
        return asyncio.run(find_run(output.open_project_log().log, None)).tree == tree
    except RetinueError:
        return False


def _print_failure(shown: ShownTree) -> None:
    result = shown.result
    if result.status != "done":
        hint = UNCONFIRMED_HINT if result.code == "unconfirmed" else ""
        output.print_error(f"{result.status}: {result.error_details or result.final_response}{hint}")
    if shown.log_error is not None:
        output.print_error(shown.log_error)


def _suggest_continue(shown: ShownTree, printer: Printer) -> None:
    """Print the command that continues a run which ended before its answer."""
    result = shown.result
    if result.status not in CONTINUABLE or shown.log_error is not None or printer.level == "quiet":
        return
    name = f"{result.tree}/{result.run}" if result.run else result.tree
    printer.show_note(f'to go on from here: retinue continue {name} "..."')


def _print_result(result: Result[Any], *, as_json: bool, rendered: bool, is_here: bool) -> None:
    """Print the answer on stdout: as JSON, unchanged, or as Markdown rendered for the terminal.

    Raises OutputFailed if stdout is closed or full. If the run `is_here`, the error says which command shows it."""
    try:
        if as_json:
            output.print_json(result.to_json())
        elif result.status == "done" and result.final_response:
            if rendered:
                width, color = shutil.get_terminal_size().columns, colors.wants_color(sys.stdout)
                print("\n" + render_markdown(result.final_response, width=width, color=color))
            else:
                output.print_text(result.final_response)
        sys.stdout.flush()
    except OutputFailed as error:
        hint = f"; `retinue show {result.tree}/{result.run}` has the answer" if is_here else ""
        raise OutputFailed(error.error, hint) from None


def redirect_output(state: Path, run: RunHandle) -> None:
    """Redirect stdout and stderr to files in the folder of the run."""
    folder = make_private_folder(Path(name_run_folder(state, run.tree, run.number)))
    sys.stdout.flush()
    sys.stderr.flush()
    for fd, name in DETACHED_FILES:
        file = open_private_file(folder / name, append=True)
        os.dup2(file, fd)
        os.close(file)


def leave_session(*streams: int) -> None:
    """Start a new session without a terminal, and redirect `streams` to /dev/null."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


def detach() -> tuple[int | None, int]:
    """Fork a second process that continues in a session of its own, without the terminal.

    In the second process, return the pipe to the first one. It reports errors on the terminal until the tree has
    started; then its output goes to files.

    In the first process, wait for the id of the tree, print it, and return None and the exit code.

    Call this before there is a thread or an event loop."""
    sys.stdout.flush()
    sys.stderr.flush()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        leave_session(0, 1)  # a reader of the first process's stdout must not wait for the second process
        return tell, 0
    os.close(tell)
    with os.fdopen(told, "rb") as pipe:
        tree = pipe.read().decode()
    if tree:
        print(tree)
        return None, 0
    return None, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
