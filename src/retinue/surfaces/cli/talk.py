"""`retinue` without a command, and `retinue resume` of a conversation: the processes behind a conversation.

The conversation runs in a child of the process that the shell waits for. If subagents are still at work when the user
leaves, the child continues in the background and the shell gets its terminal back. `conversation.py` handles the
screen.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import termios
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

from retinue.build.models import import_provider
from retinue.config.models import explain_missing_key
from retinue.core.control import Control, RunHandle
from retinue.core.errors import ConfigError, RetinueError
from retinue.core.messages import RunRef
from retinue.core.profiles import Task
from retinue.log.blocks import format_count
from retinue.surfaces.cli import output
from retinue.surfaces.cli.conversation import Conversation, Opening
from retinue.surfaces.cli.foreground import EXIT_CODES, leave_session, print_live_end, redirect_output
from retinue.surfaces.cli.host_process import open_process
from retinue.surfaces.cli.live import ShownTree, catch_telemetry_warnings, find_unapplied
from retinue.surfaces.cli.live_screen import LiveScreen, open_live_screen
from retinue.surfaces.cli.main import FAILED
from retinue.surfaces.cli.options import DETACHED_WAIT_SECONDS, add_level_options, add_options, add_primary_options
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.cli.start_line import clear_start_line
from retinue.surfaces.cli.startup import (
    StartUp,
    choose_level,
    make_header,
    prepare_primary,
)
from retinue.surfaces.printer.printer import Printer
from retinue.surfaces.printer.terminal import LEAVE_SEQUENCE, can_draw

NEEDS_TERMINAL = "a conversation needs a terminal: `retinue run TASK` works without one"


def configure_talk(parser: argparse.ArgumentParser) -> None:
    add_primary_options(parser, verb="talk to")
    add_level_options(parser)
    add_options(parser)
    parser.set_defaults(wait_approvals=DETACHED_WAIT_SECONDS)


def execute_talk(args: argparse.Namespace) -> int:
    """Talk with an agent that stays open between your messages.

    Its subagents in the background continue meanwhile. What you type while it works is read at its next turn; Esc
    interrupts it. /help lists the commands. `retinue resume` comes back to a conversation that you left.

    examples:
      retinue
      retinue --model anthropic:claude-sonnet-5-5 --max-cost 2
      retinue --profile explorer
    """
    if not can_draw() or args.plain:
        raise ConfigError(NEEDS_TERMINAL)
    start, profile = prepare_primary(args)
    header = make_header(start, profile)
    missing = explain_missing_key(header.model, os.environ)
    if missing:
        raise ConfigError(missing)

    async def begin(control: Control, text: str) -> RunHandle:
        await asyncio.to_thread(import_provider, header.model)  # in a thread, so that keys still work
        return await control.spawn(profile, Task(text, model=start.model, conversation=True), limits=start.limits)

    opening = Opening(begin=begin, profile=profile, header=header)
    return host_conversation(args, start, opening)


def host_conversation(args: argparse.Namespace, start: StartUp, opening: Opening) -> int:
    """Run a conversation in a child process that hosts its runs, and return the exit code."""
    clear_start_line()
    shell, code = split_process()
    if shell is None:
        return code
    return asyncio.run(_host_runs(args, start, opening, shell))


async def _host_runs(args: argparse.Namespace, start: StartUp, opening: Opening, shell: socket.socket) -> int:
    """Host the runs of a conversation, and show it. `shell` is a socket to the process that the shell waits for."""
    parts = replace(start.parts, approver=None)  # the live view answers, after `_hold_conversation` attends with it
    view = open_live_screen(level=choose_level(args), after=opening.shown, talks=True, header=opening.header)
    async with view as live:
        live.restore_unsent(opening.unsent)
        process = open_process(parts, live.view.show_note, serves=not args.no_control, profile=opening.profile)
        with catch_telemetry_warnings() as telemetry:
            async with process as (control, signals):
                conversation = await _hold_conversation(opening, live, control, signals, shell)
                shown = await _read_ending(conversation)
                await live.close()
                signals.stop()
                if not live.is_stuck:
                    print_parting(conversation, shown)
                if conversation.parting == "left":
                    await _go_on(start, conversation, shell)
        if telemetry.first and not live.is_stuck:
            output.print_warning(f"telemetry: {telemetry.first}")
        return _end_command(live, shown)


async def _hold_conversation(
    opening: Opening, live: LiveScreen, control: Control, signals: Signals, shell: socket.socket
) -> Conversation:
    """Run the conversation until the user leaves."""
    async with control.attend():
        run = None if opening.resume is None else await opening.resume(control)
        live.view.show_starting(is_starting=False)
        conversation = Conversation(live, control, signals, begin=opening.begin, known=opening.known)
        loop = asyncio.get_running_loop()
        loop.add_reader(shell, conversation.leave_open)  # readable: the first process is gone
        try:
            await conversation.hold(run)
        finally:
            loop.remove_reader(shell)
    return conversation


async def _go_on(start: StartUp, conversation: Conversation, shell: socket.socket) -> None:
    """Continue without a terminal until no run is at work and no other terminal is attached. The conversation stays
    open."""
    assert conversation.run is not None and start.parts.state is not None
    leave_session(0)
    redirect_output(start.parts.state, conversation.run)
    with suppress(OSError):
        shell.send(b".", socket.MSG_NOSIGNAL)
    await conversation.control.wait_until_idle(conversation.run.tree)


async def attach_conversation(
    args: argparse.Namespace, control: Control, ref: RunRef, *, known: int
) -> tuple[Conversation, int]:
    """Run a conversation whose runs are in another process. Return the Conversation and the exit code."""
    clear_start_line()
    async with AsyncExitStack() as screens:
        live = await screens.enter_async_context(open_live_screen(level=choose_level(args), talks=True))
        live.view.show_starting(is_starting=False)
        with Signals() as signals:
            with suppress(RetinueError):  # if the process is gone, `hold` ends at once
                await screens.enter_async_context(control.attend(ref.tree))
            conversation = Conversation(live, control, signals, known=known, hosts=False)
            await conversation.hold(RunHandle(control, ref))
            shown = await _read_ending(conversation)
            await live.close()
    if not live.is_stuck:
        print_parting(conversation, shown)
    return conversation, _end_command(live, shown)


async def _read_ending(conversation: Conversation) -> ShownTree | None:
    """Return the tree of a conversation that has ended, else None."""
    run, control = conversation.run, conversation.control
    if conversation.parting == "ended" and run is not None:
        with suppress(RetinueError):
            result = await control.result(run.tree, run.number)
            if result is not None:
                return ShownTree(result, conversation.runs, await find_unapplied(result, control))
    return None


def _end_command(live: LiveScreen, shown: ShownTree | None) -> int:
    """Return the exit code of a conversation. End the process with that code if the terminal is stuck."""
    code = 0 if shown is None else EXIT_CODES.get(shown.result.status, FAILED)
    if live.is_stuck:
        output.exit_stuck(code)
    return code


def print_parting(conversation: Conversation, shown: ShownTree | None) -> None:
    """Print how the conversation was left and how to resume it. `shown` is its tree, if it has ended."""
    if conversation.run is None:
        return
    back = f"Come back: retinue resume {conversation.run.tree}"
    if shown is not None:
        print_live_end(shown, Printer(sys.stderr), is_newest=False)
        print(back, file=sys.stderr)
    elif conversation.parting == "left":
        count = len(conversation.list_children())
        what = f"{format_count(count, 'subagent')} at work in the background (retinue ps)."
        print(f"{what} {back}", file=sys.stderr)
    elif conversation.parting == "open":
        print(f"The conversation stays open. {back}", file=sys.stderr)


# Processes


def split_process() -> tuple[socket.socket | None, int]:
    """Fork a second process that can leave the terminal later.

    In the second process, return a socket to the first one. In the first process, wait until the second has ended or
    has left the terminal, and return None and the exit code. Call this before there is a thread or an event loop."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = socket.socketpair()
    modes = termios.tcgetattr(0)
    child = os.fork()
    if child == 0:
        ours.close()
        return theirs, 0
    theirs.close()
    code = _wait_for_second(child, ours)
    if code < 0:  # killed, so it could not restore the terminal
        with suppress(OSError, termios.error):
            os.write(2, f"{LEAVE_SEQUENCE}\r\x1b[J".encode())  # erases the bottom area, too
            if os.tcgetpgrp(0) == os.getpgrp():
                termios.tcsetattr(0, termios.TCSANOW, modes)
    return None, code if code >= 0 else 128 - code


def _wait_for_second(child: int, connection: socket.socket) -> int:
    """Wait until the second process `child` has ended or left the terminal, and return the exit code, or the negative
    number of the signal that killed the child.

    The terminal sends Ctrl-C and Ctrl-Z to both processes, and this one ignores them. It stops itself only after the
    child has stopped, so that the shell gets the terminal after the child has restored it."""
    ended: list[int] = []

    def follow_child(number: int, frame: object) -> None:
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED) if not ended else (0, 0)
        if pid and os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif pid:
            ended.append(status)

    for number in (signal.SIGINT, signal.SIGTSTP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, follow_child)
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    with connection:
        if connection.recv(1):
            return 0
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return os.waitstatus_to_exitcode(ended[0] if ended else os.waitpid(child, 0)[1])
