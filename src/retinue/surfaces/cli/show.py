"""`retinue show RUN`: everything about one run on one page."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from retinue.build.logs import open_stored_control
from retinue.core.results import ToolLog, ending_texts, format_changed_files
from retinue.core.usage import Usage
from retinue.log.accounts import format_cost, sum_subtree_bill
from retinue.log.activity import describe_team
from retinue.log.blocks import Role, describe_basis, format_count, format_json, make_call_spans
from retinue.log.listing import Listing, load_listing
from retinue.log.reading import iterate_events
from retinue.log.receipts import MessageReceipt, find_unread
from retinue.log.runs import RunView
from retinue.log.summaries import reword_summary, summarize_result
from retinue.log.transcripts import Action, fold_actions, format_transcript
from retinue.protocol.subagent_tools import INTERRUPTED
from retinue.surfaces.cli import output, pager
from retinue.surfaces.cli.options import RUN_HELP
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.header import has_workspace, name_model

INDENT = "  "
ABSTAINED = "abstained"
_NUMBERS = frozenset({"RUN", "TOKENS", "COST"})
_FLEXIBLE = {"MODEL": 12, "ANSWERS": 12}


def configure_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", nargs="?", help=RUN_HELP)
    parser.add_argument(
        "--all", action="store_true", help="also look in trees that another process shows as its subagents"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object; of a live run, what is known so far"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--markdown", action="store_true", help="print the whole conversation as Markdown")
    what.add_argument(
        "--tools",
        metavar="NAMES",
        type=lambda text: frozenset(name.strip() for name in text.split(",")),
        help="list the calls of these tools in and below this run: what ran, what changed, who approved ('*': all)",
    )


def execute_show(args: argparse.Namespace) -> int:
    """Show everything about one run: its task, its tool calls and its result.

    On a terminal, a page that is longer than the screen is shown in $PAGER (less -FRX).

    examples:
      retinue show                      the primary of the newest tree
      retinue show @2                   the primary of the tree before it
      retinue show 7jw4p2xk9mtb/3       run 3 of a tree (`retinue ps` lists them)
      retinue show /main/explorer-1     by path
      retinue show "look at src"        by label
      retinue show 7jw4 --json | jq .usage
      retinue show --tools shell,edit   what ran, what changed, who approved
      retinue show --markdown > run.md  everything that was said
    """
    return asyncio.run(_show(args))


async def _show(args: argparse.Namespace) -> int:
    project, found = await output.look_up(args.name, everything=args.all)
    if args.tools is not None:
        called = fold_actions(await project.log.read(found.tree), path=found.path, tools=args.tools)
        if args.json:
            output.print_json(
                [{**msgspec.to_builtins(each, enc_hook=str), "permission": each.permission} for each in called]
            )
        else:
            lines = _format_actions(called, project.state.parent)
            pager.print_long("\n".join(lines) if called else f"No such tool ran in {found.name}.")
        return 0
    if args.markdown:
        events = [event async for event in iterate_events(project.log, found.tree) if event.run == found.run]
        text = format_transcript(events).removesuffix("\n")
        pager.print_long(safe.escape_text(text) if sys.stdout.isatty() else text)
        return 0
    tree = await load_listing(project.log, found.tree)
    view, now = tree.runs.runs[found.run], time.time()
    if args.json:
        output.print_json(tree.make_result(view, now))
        return 0
    changes = await _describe_changes(project, tree, view.find_presented())
    unread = await find_unread(iterate_events(project.log, found.tree), found.run)
    pager.print_long("\n".join(_format_page(project.state, tree, view, now, changes=changes, unread=unread)))
    return 0


def _format_page(
    state: Path, tree: Listing, view: RunView, now: float, *, changes: Sequence[str], unread: Sequence[MessageReceipt]
) -> Iterator[str]:
    name, label = _paint("name", f"{tree.tree}/{view.number}"), _paint("label", f"[{view.label}]")
    yield f"{name}  {safe.escape_line(view.path)}  {label}"
    for fact, value in _list_facts(state, tree, view, now, changes=changes):
        yield f"{INDENT}{_paint('faint', f'{fact:<11}')} {safe.escape_line(value)}"
    yield from _format_part("task", view.spawned.task)
    if view.spawned.task_context:
        yield from _format_part("context", view.spawned.task_context)
    yield from _format_section("tools", map(_format_tool_line, view.tool_logs))
    for each in unread:
        yield from _format_part(f"message, {each.describe()}", each.text)
    made = view.find_presented().ended
    if made is not None and made.changed_count:
        changed = format_changed_files(made.changed_files, made.changed_count)
        yield from _format_section("changed files", map(safe.escape_line, changed))
    yield from _format_team(view)
    yield from _format_rounds(view)
    yield from _format_outcome(tree, view)
    children = [
        f"{tree.tree}/{child.number}  {tree.describe_state(child):<12}  "
        + safe.escape_line(f"{child.agent}  [{child.label}]")
        for child in view.children
        if child.spawned.depth > view.spawned.depth  # members of a team have a table of their own
    ]
    yield from _format_section("children", children)


def _format_team(view: RunView) -> Iterator[str]:
    """Yield the table of a team's members with their answers and votes, then the reasons for the votes."""
    if not view.members:
        return
    team = view.report_team()
    has_costs = any(each.cost for each in team.contributions)
    rows = [
        {
            "RUN": str(each.run),
            "MEMBER": each.agent,
            "ID": each.id,
            "MODEL": name_model(each.model),
            "STATE": f"{each.status}, presented" if team.presented == each.run else each.status,
            "ANSWERS": ", ".join(each.answers),
            "VOTE": each.vote or (ABSTAINED if each.reason else ""),
            "TOKENS": f"{each.usage.total_tokens:,}",
            "COST": "" if not has_costs else "unknown" if each.cost is None else format_cost(each.cost, 0),
        }
        for each in team.contributions
    ]
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    yield from _format_table("members", heads, [[row[head] for head in heads] for row in rows])
    votes = []
    for each in team.contributions:
        what = f"for {each.vote}" if each.vote else ABSTAINED
        why = f": {' '.join(each.reason.split())}" if each.reason else ""
        if each.vote or each.reason:
            votes.append(safe.escape_line(f"{each.agent} {what}{why}"))
    yield from _format_section("votes", votes)


def _format_rounds(view: RunView) -> Iterator[str]:
    """Yield the table of a run's rounds, the decision, and the packet that the latest round started from."""
    rounds = view.rounds
    if rounds is None:
        return
    reports, rows = view.report_rounds(), []
    for each in reports:
        opened = rounds.evaluated.get(each.round)
        evaluator = "" if opened is None or opened.evaluator_run is None else f"{opened.evaluator_run}, {opened.status}"
        rows.append([str(each.round), evaluator, "" if opened is None else describe_basis(opened), each.label])
    yield from _format_table("rounds", ["ROUND", "EVALUATOR", "STARTS FROM", "ANSWER"], rows)
    if rounds.voted is not None:
        why = f": {' '.join(rounds.voted.reason.split())}" if rounds.voted.reason else ""
        yield INDENT + safe.escape_line(f"decided for {rounds.voted.choice}{why}")
    for each in [each for each in reports if each.packet][-1:]:
        yield from _format_part(f"packet of round {each.round}", each.packet)


def _format_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    cells = [[safe.escape_line(cell) for cell in row] for row in rows]
    lines = output.format_table(heads, cells, right=_NUMBERS, flexible=_FLEXIBLE, indent=len(INDENT))
    yield from _format_section(title, [_paint("faint", lines[0]), *lines[1:]])


def _list_facts(
    state: Path, tree: Listing, view: RunView, now: float, *, changes: Sequence[str]
) -> Iterator[tuple[str, str]]:
    spawned, usage = view.spawned, view.usage
    took = output.format_duration(tree.seconds_of(view, now))
    yield "agent", view.agent
    if view.members:
        yield "team", describe_team(view)
    whole = sum_subtree_bill(view)
    if view.members:  # a team calls no model itself
        yield "state", f"{tree.describe_state(view)}, {took}"
        yield "usage", _describe_usage(whole.usage)
        yield "cost", format_cost(whole.cost, whole.unpriced)
    else:
        turns, calls = format_count(view.turns, "turn"), format_count(view.tool_count, "tool call")
        yield "state", f"{tree.describe_state(view)}, {took}, {turns}, {calls}"
        below = whole.usage.total_tokens - usage.total_tokens
        yield "usage", _describe_usage(usage) + (f", and {below:,} below it" if below else "")
        cost = format_cost(view.cost, view.unpriced)
        yield "cost", cost + (f", and with all below it {format_cost(whole.cost, whole.unpriced)}" if below else "")
    if spawned.max_tokens is not None or spawned.max_cost is not None:
        budgets = (
            None if spawned.max_tokens is None else f"{spawned.max_tokens:,} tokens",
            None if spawned.max_cost is None else f"${spawned.max_cost:f}",
        )
        yield "budget", " and ".join(budget for budget in budgets if budget)
    project = state.parent
    if spawned.model:
        kind, colon, name = spawned.model.partition(":")
        yield "model", f"{kind}{colon}{output.shorten_path(name, project) if kind == 'scripted' else name}"
    if spawned.server:
        yield "server", spawned.server
    presented = view.find_presented()
    workspace = presented.spawned.workspace
    if workspace and has_workspace(presented):
        whose = " (the project itself)" if Path(workspace) == project else ""
        yield "workspace", output.shorten_path(workspace, project) + whose
    yield from zip(("changes", ""), changes, strict=False)
    yield "subagent_id", spawned.subagent_id
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.spawned_at))
    yield "started", f"{started} ({output.format_age(now - view.spawned_at)})"
    if spawned.continues is not None:
        yield "continues", f"{spawned.origin or tree.tree}/{spawned.continues}"
    if spawned.parent is not None:
        yield "parent", f"{tree.tree}/{spawned.parent}"
    if view.ended is not None and view.ended.file:
        yield "file", output.shorten_path(view.ended.file, project)
    for warning in view.warnings:
        yield "warning", warning


def _describe_usage(usage: Usage) -> str:
    return f"{usage.total_tokens:,} tokens ({usage.input_tokens:,} in, {usage.output_tokens:,} out)"


async def _describe_changes(project: output.ProjectLog, tree: Listing, view: RunView) -> list[str]:
    """Describe in lines whether the changes of a run were applied, or how to apply them, or why they cannot be read.
    Empty for a run without changes."""
    if view.ended is None:
        return []
    control = open_stored_control(project.state)
    one = next((copy for copy in await control.list_copies(tree.tree) if copy.run == view.number), None)
    if one is None:
        return ["gone with the run's folder"] if view.ended.changed_count else []
    if one.has_unapplied and not one.problem:  # two lines, because a terminal of 80 columns would break one in a name
        return [f"not applied: retinue diff {one.name}", f"to apply them: retinue apply {one.name}"]
    return [text for text in (one.problem or one.applied,) if text]


def _format_outcome(tree: Listing, view: RunView) -> Iterator[str]:
    ended = view.ended
    if ended is None:
        if tree.state_of(view) == INTERRUPTED:
            yield from _format_part(
                "result", f"none: the process that ran it is gone. Go on: retinue resume {tree.tree}"
            )
        if view.last_message:
            yield from _format_part("last message", view.last_message)
        return
    said = ended.final_response
    if ended.error_details and ended.error_details != said:
        if said == ending_texts(ended.status, name=view.agent, primary=view.number == 0)[0]:
            said = ended.error_details  # the other text only repeats the status
        else:
            yield from _format_part("error", ended.error_details)
    yield from _format_part("result" if ended.status == "done" else ended.status, said or "(no text)")
    if ended.partial and ended.partial != ended.final_response:
        yield from _format_part("last message", ended.partial)


def _format_part(title: str, text: str) -> Iterator[str]:
    return _format_section(title, safe.escape_text(text).split("\n"))


def _format_section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield `title` and the indented lines, which must be escaped. Yield nothing if there are no lines."""
    below = [f"{INDENT}{line}".rstrip() for line in lines]
    if below:
        yield from ("", _paint("name", title), *below)


def _format_tool_line(log: ToolLog) -> str:
    took = "" if log.duration_ms is None else f"  ({output.format_duration(log.duration_ms / 1000)})"
    call = f"{log.name}({log.context})" if log.context else log.name
    said = reword_summary(log.name, log.result, log.success)
    return f"{_format_mark(log.success)} {safe.escape_line(f'{call} -> {said}')}{took}"


def _format_mark(success: bool) -> str:
    return _paint("good", "✓") if success else _paint("bad", "✗")


def _paint(role: Role, text: str) -> str:
    """Return `text` as an escaped line, in the colour of its role if stdout takes colours."""
    return colors.paint_header(((role, text),), color=colors.wants_color(sys.stdout))


def _format_actions(found: list[Action], project: Path) -> Iterator[str]:
    """Yield a block of lines for each tool call."""
    for action in found:
        mark = "…" if action.success is None else _format_mark(action.success)
        call = "".join(text for _, text in make_call_spans(action.tool, action.args))
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(action.at))
        yield f"{mark} {safe.escape_line(call)}  {safe.escape_line(action.path)}  {at}"
        yield f"{INDENT}{safe.escape_line(action.permission)}"
        if action.success is None:
            yield f"{INDENT}it has no result"
        else:
            said = summarize_result(action.tool, action.text, action.success, spoken=True)
            yield f"{INDENT}-> {safe.escape_line(said)}  ({output.format_duration(action.duration_ms / 1000)})"
        if action.file:
            yield f"{INDENT}whole text in {safe.escape_line(output.shorten_path(action.file, project))}"
        for line in safe.escape_text(action.preview or format_json(action.args)).split("\n"):
            yield f"{INDENT * 2}{line}".rstrip()
        yield ""
