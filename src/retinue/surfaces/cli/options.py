"""The options of every command that runs agents, and what they mean. A limit of 0 means 0; a negative one is wrong."""

from __future__ import annotations

import argparse
import math
import re
from decimal import Decimal
from pathlib import Path

from retinue.core.limits import Limits
from retinue.core.profiles import RUNTIMES

AGES = {"d": 86400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}
DETACHED_WAIT_SECONDS = 600.0
_UNSET = object()


def add_live_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that shows a tree at work."""
    parser.add_argument("--json", action="store_true", help="print the whole result as one JSON object")
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument("--verbose", action="store_true", help="show texts and results whole, not cut")
    how_much.add_argument("--quiet", action="store_true", help="show one line for each tool call")
    parser.add_argument("--detach", action="store_true", help="print the tree's id and go on without the terminal")
    parser.add_argument("--no-control", action="store_true", help="no send, cancel or answers from other terminals")
    parser.add_argument(
        "--wait-approvals",
        metavar="SECONDS",
        type=seconds,
        help=f"without a terminal, wait so long for answers from another ({DETACHED_WAIT_SECONDS:g} with --detach)",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that runs agents."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="anthropic:NAME, openai:NAME, another PROVIDER:NAME or scripted:FILE; the default is `model:` in "
        "retinue.yaml, else RETINUE_MODEL, else that of the only provider whose key is set",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="read this instead of the project's retinue.yaml")
    parser.add_argument("--yes", action="store_true", help="run every tool without asking, but for rules")
    parser.add_argument(
        "--runtime",
        choices=RUNTIMES,
        help="where runs live: isolated (each in a process of its own behind a wall, the default), container (each in "
        "one of podman or docker), inherited (in this process, with your authority) or delegated (subagents on the "
        "host of this container)",
    )
    parser.add_argument(
        "--delegation-directory",
        metavar="DIR",
        type=Path,
        help="inside a container: the folder shared with `retinue watch` on the host, for --runtime delegated",
    )
    limits = parser.add_argument_group("limits", "a limit of 0 means 0")
    limits.add_argument("--max-depth", metavar="N", type=_whole, help="levels of subagents below the primary (3)")
    limits.add_argument(
        "--max-concurrent",
        metavar="N",
        type=_whole_or_none,
        default=_UNSET,
        help="subagents at once (8); none: no limit",
    )
    limits.add_argument(
        "--max-turns", metavar="N", type=_whole_or_none, default=_UNSET, help="turns of each run (100); none: no limit"
    )
    limits.add_argument("--timeout", metavar="SECONDS", type=seconds, help="for the whole run (no limit)")
    limits.add_argument(
        "--stall",
        metavar="SECONDS",
        type=seconds,
        help="in which nothing may happen in a run and below it; after as long again it ends (no limit)",
    )
    limits.add_argument(
        "--max-tokens",
        metavar="N",
        type=_whole_or_none,
        default=_UNSET,
        help="tokens the whole tree may spend (no limit)",
    )
    limits.add_argument(
        "--max-cost",
        metavar="AMOUNT",
        type=_amount_or_none,
        default=_UNSET,
        help="US dollars the whole tree may spend (no limit); needs models whose price is known",
    )


def limits_of(args: argparse.Namespace) -> Limits:
    given = {"depth": args.max_depth, "seconds": args.timeout, "stall": args.stall}
    limits = {name: value for name, value in given.items() if value is not None}
    optional = {"concurrent": args.max_concurrent, "turns": args.max_turns}
    optional |= {"tokens": args.max_tokens, "cost": args.max_cost}
    return Limits(**limits, **{name: value for name, value in optional.items() if value is not _UNSET})


def model_of(args: argparse.Namespace) -> str | None:
    """The model that was given; its file is looked for from the current folder, like every file on a command line."""
    model: str | None = args.model
    if model is None or not model.startswith("scripted:") or model == "scripted:":
        return model
    return f"scripted:{Path.cwd() / Path(model.removeprefix('scripted:')).expanduser()}"


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, got {text!r}")
    return int(text)


def _whole_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else _whole(text)


def _amount_or_none(text: str) -> Decimal | None:
    if text.lower() == "none":
        return None
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be an amount of US dollars, 0 or more, got {text!r}")
    return Decimal(text)


def age(text: str) -> float:
    """Seconds, as people write a length of time: 7d, 12h, 30min, 45s."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(d|h|min|m|s)", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a length of time such as 7d, 12h, 30min or 45s, got {text!r}")
    return float(found[1]) * AGES[found[2]]


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or "_" in text:  # written so that NaN is refused too
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, got {text!r}")
    return value
