"""`retinue resume` and `retinue continue`: runs in existing trees, in this process or in the one that writes them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import msgspec

from retinue.build.logs import open_stored_control
from retinue.build.parts import MAIN
from retinue.build.servers import connect_to_server
from retinue.control.address_files import find_address
from retinue.core.control import RAN_ELSEWHERE, Control, ResumeOverrides, RunHandle
from retinue.core.errors import ConfigError, LogHeld, NotFound
from retinue.core.events import RunEnded, decode_raw
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader, name_process
from retinue.core.profiles import RUNTIMES
from retinue.files.state_folder import OUTBOX_FOLDER
from retinue.log.listing import Listing, load_listing
from retinue.log.lookup import find_run, resolve_recent
from retinue.log.reading import follow_events
from retinue.log.runs import Runs
from retinue.protocol.outbox import parse_request_name, request_name
from retinue.surfaces.cli import control_clients, output
from retinue.surfaces.cli.conversation import NOTHING_UNSENT, Opening
from retinue.surfaces.cli.foreground import print_answer, run_tree
from retinue.surfaces.cli.live import ShownTree, find_unapplied
from retinue.surfaces.cli.options import DETACHED_WAIT_SECONDS, NAMED_RUN_HELP, add_live_options
from retinue.surfaces.cli.run import read_task
from retinue.surfaces.cli.startup import StartUp, make_printer, prepare
from retinue.surfaces.cli.talk import attach_conversation, host_conversation
from retinue.surfaces.printer.printer import Printer
from retinue.surfaces.printer.terminal import can_draw

BeginInTree = Callable[[Control, ResumeOverrides], Awaitable[RunHandle]]
STRICTER = "{tree} ran with runtime '{runtime}'; it resumes with '{current}' (--runtime {runtime} keeps it as it was)"
TALKS = "{tree} is a conversation: resume it at a terminal, or with --detach, and then `retinue send` reaches it"
REQUEST_ANSWERED = (
    "{tree} was requested through an outbox. Its watcher was killed, so the request {request} was answered "
    "`disconnected`, and further changes stay in {workspace}"
)


def configure_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="TREE",
        nargs="?",
        help="a tree: its id or a unique beginning of it, `last` for the newest, @2 for the one before (default: the "
        "newest that was interrupted)",
    )
    add_live_options(parser, keeps_limits=True)


def execute_resume(args: argparse.Namespace) -> int:
    """Resume a tree whose process is gone, and print its answer.

    Every run without an ending continues where its events stop, at any depth. What was spent stays spent, open
    questions are asked again, and answers that were given take effect. A tool that was running when the process died is
    not run again, unless repeating it does no harm; its outcome is `unknown_after_crash`, and the model is told. The
    limits and the model are those of the tree, unless you give others.

    exit codes: as `retinue run`

    examples:
      retinue resume
      retinue resume 7jw4p2xk9mtb --yes
      retinue resume 7jw4 --model anthropic:NAME --json
    """
    project = output.open_project_log()
    talk = asyncio.run(find_conversation(project.log, args.name))
    if talk is not None and not args.detach:
        return resume_conversation(args, project, talk)
    start = prepare(args)
    found = asyncio.run(find_interrupted_tree(project.log, args.name))
    _warn_of_answered_request(project.state, found)
    return run_in_tree(args, start, project, found, lambda control, overrides: control.resume(found.tree, overrides))


def _warn_of_answered_request(state: Path, found: Listing) -> None:
    """Warn if the tree was requested through an outbox. Its request was answered when the watcher was killed."""
    spawned = found.runs.runs[0].spawned
    request = parse_request_name(request_name(spawned.subagent_id))
    if request is not None and any((state / OUTBOX_FOLDER).glob(f"*/{request}")):
        output.print_warning(REQUEST_ANSWERED.format(tree=found.tree, request=request, workspace=spawned.workspace))


async def find_conversation(log: LogReader, name: str | None) -> Listing | None:
    """Return the tree `name` if it is a conversation, else None.

    Without a name, use the latest interrupted tree, or the latest tree if none is interrupted."""
    if name is None:
        interrupted = await log.list_trees(output.print_warning, only="interrupted")
        stored = interrupted or await log.list_trees(output.print_warning)
        found = await load_listing(log, stored[0].tree) if stored else None
    else:
        found = await _load_tree(log, name)
    return found if found is not None and found.runs.runs[0].spawned.conversation else None


async def _load_tree(log: LogReader, name: str) -> Listing:
    name = await resolve_recent(log, name, output.print_warning)
    ref = await find_run(log, name, output.print_warning)
    return await load_listing(log, ref.tree)


def resume_conversation(args: argparse.Namespace, project: output.ProjectLog, found: Listing) -> int:
    """Reopen a conversation and return the exit code.

    Attaches to the process that runs it. Without such a process, resumes the tree in this one. If the conversation has
    ended, the next message continues it as a new tree."""
    if args.json or args.plain or not can_draw():
        raise ConfigError(TALKS.format(tree=found.tree))
    shown, unsent = 0, NOTHING_UNSENT
    if found.live:
        client = asyncio.run(control_clients.connect_to_tree(project, found.tree))
        if client is None:
            who = name_process(found.stored.pid)
            raise ConfigError(f"{who} runs {found.tree} without a control server: end the conversation there first")
        ref = asyncio.run(client.find_run(found.tree))
        conversation, code = asyncio.run(attach_conversation(args, client, ref, known=found.stored.last_seq))
        if conversation.parting != "lost":
            return code
        found = asyncio.run(load_listing(project.log, found.tree))
        shown, unsent = found.stored.last_seq, conversation.live.take_unsent()
    args.wait_approvals = DETACHED_WAIT_SECONDS if args.wait_approvals is None else args.wait_approvals
    start = keep_runtime(args, prepare(args), found)
    overrides = make_overrides(args, start)
    if found.ended:
        onward = msgspec.structs.replace(overrides, conversation=True)
        output.print_error(f"{found.tree} has ended: your next message continues it in a new tree")
        opening = Opening(begin=lambda control, text: control.continue_run(found.tree, 0, text, onward))
    else:
        opening = Opening(
            resume=lambda control: control.resume(found.tree, overrides),
            known=found.stored.last_seq,
            shown=shown,
            unsent=unsent,
        )
    return host_conversation(args, start, opening)


async def find_interrupted_tree(log: LogReader, name: str | None) -> Listing:
    """Return the interrupted tree `name`, or without a name the latest one that can be resumed.

    Raises ConfigError if the tree has ended or is live, and NotFound if no tree is interrupted."""
    if name is None:
        for stored in await log.list_trees(output.print_warning, only="interrupted"):
            found = await load_listing(log, stored.tree)
            if _has_work(found):
                return found
        raise NotFound("no tree here is interrupted; `retinue ps --all` lists all trees")
    found = await _load_tree(log, name)
    if found.ended:
        primary = found.runs.runs[0]
        raise ConfigError(
            f"{found.tree} has ended: {primary.status}; `retinue continue {found.tree} TEXT` continues it"
        )
    if found.live:
        who = name_process(found.stored.pid)
        raise ConfigError(f"{found.tree} is not interrupted: {who} runs it (`retinue tail -f {found.tree}`)")
    return found


def _has_work(found: Listing) -> bool:
    """Return True if a run of the tree can be resumed. A client cannot: it has left."""
    runs = found.runs.runs.values()
    return any(run.ended is None and not run.spawned.client for run in runs)


def configure_continue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", help=NAMED_RUN_HELP)
    parser.add_argument("text", metavar="TEXT", help="the new message; - reads it from stdin, @FILE from a file")
    add_live_options(parser, keeps_limits=True)


def execute_continue(args: argparse.Namespace) -> int:
    """Continue a run that has ended, with a new message, and print the answer.

    The new run knows the whole conversation of the old one. A primary continues as a new tree; a subagent continues in
    its own tree, next to the old run, and its subagent_id then names the new one. If the old run worked in a copy,
    worktree or scratch folder, the new one starts with the files it left, and `retinue diff` and `retinue apply` cover
    the changes of both. Use `retinue send` for a run that is still at work, and `retinue resume` for an interrupted
    tree.

    exit codes: as `retinue run`

    examples:
      retinue continue last "now write the tests too"
      retinue continue /main/explorer-1 @question.md
      retinue continue 7jw4 - --json
    """
    text = read_task(args.text)
    start = prepare(args, interactive=args.text != "-")
    project, tree, found = asyncio.run(_find_ended(args.name))
    if found.run == 0:
        overrides, start = make_overrides(args, start), keep_runtime(args, start, tree)
        return run_tree(args, start, lambda control: control.continue_run(tree.tree, 0, text, overrides))
    return run_in_tree(
        args,
        start,
        project,
        tree,
        lambda control, overrides: control.continue_run(tree.tree, found.run, text, overrides),
    )


async def _find_ended(name: str) -> tuple[output.ProjectLog, Listing, RunRef]:
    """Return the run `name`, its tree and its log. Raises ConfigError if the run is remote or has not ended."""
    project, found = await output.look_up(name)
    tree = await load_listing(project.log, found.tree)
    old = tree.runs.runs[found.run]
    if old.spawned.server:
        where = f"in the MCP server '{old.spawned.server}'"
        hint = "; `retinue continue {run} TEXT` does"
        instead = await control_clients.suggest_reporting_run(project.log, old, hint)
        raise ConfigError(RAN_ELSEWHERE.format(who=found.name, where=where) + instead)
    if not tree.live and not tree.ended:
        raise ConfigError(f"{tree.tree} was interrupted: `retinue resume {tree.tree}` resumes it")
    if old.ended is None:
        raise ConfigError(f"{found.name} is at work: `retinue send {found.name} TEXT` tells it something")
    return project, tree, found


def make_overrides(args: argparse.Namespace, start: StartUp) -> ResumeOverrides:
    """Return the values from the command line that override those of an existing tree."""
    profiles = (MAIN, *start.project.all_profiles)
    return ResumeOverrides(profiles=profiles, limits=start.limits, model=start.model, runtime=args.runtime)


def keep_runtime(args: argparse.Namespace, start: StartUp, tree: Listing) -> StartUp:
    """Return `start` with the runtime of the tree's primary, if that is stricter than the current settings.

    A laxer runtime needs a new --runtime, because a log must not loosen the settings. Prints a warning then."""
    runtime, current = decode_raw(tree.runs.runs[0].spawned.profile).get("runtime"), start.parts.runtime
    if args.runtime is not None or current == "delegated" or runtime not in RUNTIMES or runtime == current:
        return start
    if RUNTIMES.index(runtime) > RUNTIMES.index(current):
        return replace(start, parts=replace(start.parts, runtime=runtime))
    output.print_warning(STRICTER.format(tree=tree.tree, runtime=runtime, current=current))
    return start


def run_in_tree(
    args: argparse.Namespace, start: StartUp, project: output.ProjectLog, found: Listing, begin: BeginInTree
) -> int:
    """Start a run in an existing tree and return the exit code.

    If another process holds the log of the tree, start the run there through its control server."""
    overrides = make_overrides(args, start)
    try:
        start = keep_runtime(args, start, found)
        return run_tree(args, start, lambda control: begin(control, overrides), after=found.stored.last_seq)
    except LogHeld as held:
        address = find_address(project.state, held.writer)
        if address is None:
            raise ConfigError(f"{held}, which has no control server: try later") from None
        if start.limits != Limits():
            raise ConfigError(
                f"process {address.pid} writes the log of {found.tree} and runs it: its limits cannot be changed from "
                "here"
            ) from None
        theirs = ResumeOverrides(model=start.model, unattended=start.parts.is_unattended)
        printer, starting = make_printer(args), begin(connect_to_server(address), theirs)
        shown = asyncio.run(_run_elsewhere(args, printer, project, found, address.pid, starting))
        return 0 if shown is None else print_answer(shown, printer, as_json=args.json)


async def _run_elsewhere(
    args: argparse.Namespace,
    printer: Printer,
    project: output.ProjectLog,
    found: Listing,
    pid: int,
    starting: Awaitable[RunHandle],
) -> ShownTree | None:
    """Start the run in the process that writes the log of the tree, and show it here until its end, unless --detach is
    given."""
    begun = await starting
    if args.detach:
        print(begun.tree)
        return None
    printer.show_note(
        f"{begun.tree} runs in process {pid}, which writes its log; that process decides what needs an approval"
    )
    runs = Runs(found.tree)
    async with aclosing(follow_events(project.log, found.tree)) as events:
        async for event in events:
            runs.apply(event)
            (printer.show_event if event.seq > found.stored.last_seq else printer.recall_event)(event)
            if event.run == begun.number and isinstance(event.body, RunEnded):
                break
    view = runs.runs.get(begun.number)
    if view is None or view.ended is None:
        raise ConfigError(f"process {pid} is gone too: retinue resume {found.tree}")
    result = view.result(found.tree)
    return ShownTree(result, runs, await find_unapplied(result, open_stored_control(project.state)))
