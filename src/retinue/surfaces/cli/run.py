"""`retinue run TASK`: run a primary, with live output on stderr and the answer on stdout."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from retinue.build.project import enable_rounds
from retinue.config.files import read_text
from retinue.core.errors import ConfigError
from retinue.core.limits import EVENT_BYTES
from retinue.core.profiles import Task
from retinue.surfaces.cli import output
from retinue.surfaces.cli.foreground import run_tree
from retinue.surfaces.cli.options import add_live_options, add_primary_options, parse_whole
from retinue.surfaces.cli.startup import DELEGATED, prepare_primary


def configure_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK", help="the task; - reads it from stdin, @FILE from a file")
    add_primary_options(parser, verb="run")
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=parse_whole,
        help="let it answer up to N times; before each answer but the first an evaluator judges those so far",
    )
    add_live_options(parser)


def execute_run(args: argparse.Namespace) -> int:
    """Run an agent and its subagents on a task, and print the answer.

    The answer goes to stdout, everything else to stderr, live. Tools that change something ask you at this terminal;
    you can also answer from another one (`retinue approvals`). Without a terminal, a run that has to ask ends, unless
    --wait-approvals lets it wait for another terminal, or --yes lets every tool run.
    Ctrl-C asks what to cancel, a second one cancels the run and everything below it, a third kills it. With --plain,
    the first cancels and the second kills.

    exit codes: 0 done, 1 failed, refused, limited or disconnected, 2 usage, 124 timed out, 130 cancelled

    examples:
      retinue run "find the riskiest file" --model anthropic:claude-sonnet-5-5
      retinue run @task.md --profile explorer --max-turns 20
      git diff | retinue run - --yes --timeout 600
      retinue run "does the client fit the spec?" --context-path ~/specs
      retinue run "fix the tests" --detach        then: retinue tail -f, retinue approvals, retinue send
      retinue run "audit src/" --json --quiet | jq .usage
      retinue run "write the release notes" --rounds 3
    """
    text = read_task(args.task)
    start, profile = prepare_primary(args, interactive=args.task != "-")
    if args.rounds is not None:
        rounds = msgspec.structs.replace(start.project.settings.coordination.make_rounds(), answers=args.rounds)
        start = replace(start, parts=enable_rounds(start.parts, rounds))
    chosen = args.runtime or start.project.settings.coordination.subagent_runtime_mode
    if start.parts.runtime == "delegated" and not chosen:
        output.print_error(DELEGATED.format(outbox=start.parts.outbox))
    task = Task(text, model=start.model)
    limits = start.limits
    return run_tree(args, start, lambda control: control.spawn(profile, task, limits=limits), profile=profile)


def read_task(text: str) -> str:
    """Return the task: `text` itself, stdin for `-`, or the content of FILE for `@FILE`. `@@` stands for one `@`."""
    if text == "-":
        data = sys.stdin.buffer.read(EVENT_BYTES + 1)
        try:
            task = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigError("the task on stdin is not UTF-8 text") from None
    elif text.startswith("@") and not text.startswith("@@"):
        task = read_text(Path(text[1:]).expanduser())
    else:
        task = os.fsencode(text).decode("utf-8", "replace")
        task = task[1:] if task.startswith("@@") else task
    if not task.strip():
        raise ConfigError("the task is empty: say what to do, or give - or @FILE")
    if len(task.encode()) > EVENT_BYTES // 2:
        raise ConfigError(
            f"the task is larger than {EVENT_BYTES // 2 // 1024 // 1024} MiB: put it in a file that the agent can read"
        )
    return task.rstrip("\n")
