"""`retinue usage`: the tokens and cost of the models of this project."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable

from retinue.core.events import Event, UsageReported
from retinue.core.ports import LogReader, OnProblem
from retinue.log.accounts import BY, NO_BILL, Bill, fold_bills, format_cost
from retinue.surfaces.cli import output
from retinue.surfaces.cli.options import parse_age
from retinue.surfaces.printer import safe

HEADS = ("CALLS", "INPUT", "OUTPUT", "CACHED", "TOKENS", "COST")
EXPENDABLE = ("CACHED", "INPUT", "OUTPUT", "CALLS", "TOKENS")  # least important first; TOKENS is the sum of the others
LEAST_NAMES = {"MODEL": 16, "PROFILE": 16}  # a day or an id is not shortened while a column is left to drop


def configure_usage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", metavar="AGE", type=parse_age, help="count only calls of the last 7d, 12h or 30min")
    parser.add_argument(
        "--by", metavar="|".join(BY), choices=list(BY), default="day", help="what each line adds up (default: day)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the rows and the total")


def execute_usage(args: argparse.Namespace) -> int:
    """Show tokens and cost by day, model, profile, tree or run.

    Costs are in US dollars, by the prices that were known when the call was made. A call whose price is not known is
    shown as unknown, and never counted as zero.

    examples:
      retinue usage
      retinue usage --since 7d --by model
      retinue usage --by tree --json | jq '.rows[] | select(.cost != null) | .cost'
    """
    log = output.open_project_log().log
    since = 0.0 if args.since is None else time.time() - args.since
    problems: dict[str, None] = {}
    events = asyncio.run(_read_usage(log, lambda problem: problems.setdefault(str(problem)), since))
    found = fold_bills(events, by=args.by)
    for problem in problems:
        output.print_warning(problem)
    whole = sum(found.values(), NO_BILL)
    if args.json:
        rows = [{args.by: name, **bill.to_json()} for name, bill in found.items()]
        output.print_json({"by": args.by, "since": since or None, "rows": rows, "total": whole.to_json()})
        return 0
    if not found:
        print("Nothing was spent here" + (" yet." if args.since is None else " in that time."))
        return 0
    cells = list(_make_rows([*found.items(), ("total", whole)]))
    heads, right = (args.by.upper(), *HEADS), frozenset(HEADS)
    print("\n".join(output.format_table(heads, cells, right=right, flexible=LEAST_NAMES, expendable=EXPENDABLE)))
    return 0


async def _read_usage(log: LogReader, on_problem: OnProblem, since: float) -> list[Event]:
    """Read the usage events of all trees, except trees that another process already reports as its subagents."""
    reported = {stored.tree for stored in await log.list_trees(on_problem) if stored.is_reported}
    events = log.read_kind(UsageReported.kind, on_problem, since=since)
    return [event async for event in events if event.tree not in reported]


def _make_rows(found: Iterable[tuple[str, Bill]]) -> Iterable[tuple[str, ...]]:
    for name, bill in found:
        usage = bill.usage
        counts = (bill.calls, usage.input_tokens, usage.output_tokens, usage.cache_read_tokens, usage.total_tokens)
        yield safe.escape_line(name), *(f"{count:,}" for count in counts), format_cost(bill.cost, bill.unpriced)
