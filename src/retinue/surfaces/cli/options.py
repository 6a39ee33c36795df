"""Options that several commands share, and parsers of their values. A limit of 0 means 0, not unlimited."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

from msgspec import UNSET

from retinue.core.errors import ConfigError
from retinue.core.limits import LIMIT_KEYS, Limits
from retinue.core.profiles import RUNTIMES, WORKSPACES

AGES = {"d": 86400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}
DETACHED_WAIT_SECONDS = 600.0
NAMED_RUN_HELP = (
    "a tree (its primary), TREE/N for another run of it, a path such as /main/explorer-1, a label, a subagent_id, or a "
    "unique beginning of one; `last` or @1 is the newest tree, @2 the one before it"
)
RUN_HELP = f"{NAMED_RUN_HELP} (default: last)"
TREE_HELP = "a tree or a run in it, named as for `retinue show` (default: last)"


def add_level_options(parser: argparse.ArgumentParser, *, has_live_view: bool = True) -> None:
    """Add the options for the detail of live output, and for its form if the command `has_live_view`."""
    level = parser.add_mutually_exclusive_group()
    whole = "show long texts and results in full"
    keeps = "; the live view also keeps what agents think" if has_live_view else ""
    level.add_argument("--verbose", action="store_true", help=f"{whole}{keeps}")
    level.add_argument("--quiet", action="store_true", help="show one line for each tool call")
    if has_live_view:
        parser.add_argument(
            "--plain", action="store_true", help="print blocks instead of the live view; the default without a terminal"
        )


def add_live_options(parser: argparse.ArgumentParser, *, keeps_limits: bool = False) -> None:
    """Add the options of every command that runs one tree and shows it. `keeps_limits` is that of `add_options`."""
    parser.add_argument("--json", action="store_true", help="print the whole result as one JSON object")
    add_level_options(parser)
    parser.add_argument("--detach", action="store_true", help="run in the background and print the id of the tree")
    parser.add_argument(
        "--wait-approvals",
        metavar="SECONDS",
        type=parse_seconds,
        help="without a terminal: how long a question waits for `retinue approve` "
        f"({DETACHED_WAIT_SECONDS:g} with --detach)",
    )
    add_options(parser, keeps_limits=keeps_limits)


def add_primary_options(parser: argparse.ArgumentParser, *, verb: str) -> None:
    """Add the options of a new primary: profile, workspace and context paths."""
    parser.add_argument("--profile", metavar="NAME", help=f"the agent to {verb} (see `retinue profiles --all`)")
    parser.add_argument(
        "--workspace",
        choices=WORKSPACES,
        help="where it works: a worktree or copy of the project, shared (the project itself) or scratch (empty)",
    )
    add_context_option(parser)


def add_context_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that lets a primary read files and folders outside the project."""
    parser.add_argument(
        "--context-path",
        metavar="PATH",
        action="append",
        default=[],
        help="a file or folder outside the project that the primary may read and pass on to its subagents; can be "
        "given several times",
    )


def parse_context_paths(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the paths of --context-path as absolute paths. Raises ConfigError if a path does not exist."""
    granted = []
    for text in getattr(args, "context_path", ()):
        path = Path.cwd() / Path(text).expanduser()
        if not path.exists():
            raise ConfigError(f"--context-path: '{text}' does not exist")
        granted.append(str(path.resolve()))
    return tuple(granted)


def add_options(
    parser: argparse.ArgumentParser,
    *,
    timed: str = "the primary",
    timeout: float | None = None,
    keeps_limits: bool = False,
) -> None:
    """Add the options of every command that runs agents.

    `timed` are the runs that --timeout bounds, and `timeout` is its default. With `keeps_limits`, the limits of an
    existing tree stay as they are, unless an option changes them."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="anthropic:NAME, openai:NAME, another PROVIDER:NAME or scripted:FILE; the default is `model:` in "
        "retinue.yaml, else RETINUE_MODEL, else the default of the only provider whose key is set",
    )
    parser.add_argument(
        "--no-control", action="store_true", help="do not let other terminals answer questions, send messages or cancel"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="use this file instead of the project's retinue.yaml, and trust what it allows",
    )
    parser.add_argument(
        "--yes", action="store_true", help="run tools without asking; `ask` and `deny` rules of retinue.yaml still hold"
    )
    parser.add_argument(
        "--runtime",
        choices=RUNTIMES,
        help="where tools run: isolated (a bubblewrap sandbox, the default), container (podman or docker), inherited "
        "(this process, with your authority) or delegated (subagents run on the host of this container)",
    )
    parser.add_argument(
        "--delegation-directory",
        metavar="DIR",
        type=Path,
        help="inside a container: the folder shared with `retinue watch` on the host, for --runtime delegated",
    )
    _add_limits(parser, timed=timed, timeout=timeout, keeps_limits=keeps_limits)


def _add_limits(parser: argparse.ArgumentParser, *, timed: str, timeout: float | None, keeps_limits: bool) -> None:
    group = parser.add_argument_group("limits", "0 means 0, not unlimited")
    parsers: dict[str, tuple[str, Callable[[str], object]]] = {
        "depth": ("N", parse_whole),
        "concurrent": ("N", parse_limit_count),
        "turns": ("N", parse_limit_count),
        "seconds": ("SECONDS", parse_seconds),
        "stall": ("SECONDS", parse_seconds),
        "tokens": ("N", parse_limit_count),
        "cost": ("AMOUNT", parse_limit_amount),
    }
    for limit, (metavar, parse) in parsers.items():
        key = LIMIT_KEYS[limit]
        text, default = key.help, key.default
        if limit == "seconds":
            text, default = text.replace("the primary", timed), timeout
        unlimited = "; `none`: no limit" if default is not None and parse is parse_limit_count else ""
        shown = "as before" if keeps_limits else "no limit" if default is None else f"{default:g}{unlimited}"
        option = f"--{key.name.replace('_', '-')}"
        group.add_argument(option, metavar=metavar, type=parse, default=UNSET, help=f"{text} (default: {shown})")


def parse_model(args: argparse.Namespace) -> str | None:
    """Return the model of --model, with the path of a script file made absolute."""
    model: str | None = args.model
    if model is None or not model.startswith("scripted:") or model == "scripted:":
        return model
    return f"scripted:{Path.cwd() / Path(model.removeprefix('scripted:')).expanduser()}"


def parse_limits(args: argparse.Namespace) -> Limits:
    """Return the limits in the options. An option that is not given leaves its limit UNSET."""
    return Limits(**{name: getattr(args, key.name) for name, key in LIMIT_KEYS.items()})


def parse_whole(text: str) -> int:
    """Parse a whole number of 0 or more."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, got {text!r}")
    return int(text)


def parse_limit_count(text: str) -> int | None:
    """Parse a whole number of 0 or more. Return None for `none`, which means no limit."""
    return None if text.lower() == "none" else parse_whole(text)


def parse_limit_amount(text: str) -> Decimal | None:
    """Parse an amount of US dollars. Return None for `none`, which means no limit."""
    if text.lower() == "none":
        return None
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be an amount of US dollars, 0 or more, got {text!r}")
    return Decimal(text)


def parse_age(text: str) -> float:
    """Parse a length of time such as 7d, 12h, 30min or 45s, and return seconds."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(d|h|min|m|s)", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a length of time such as 7d, 12h, 30min or 45s, got {text!r}")
    return float(found[1]) * AGES[found[2]]


def parse_port(text: str) -> int:
    """Parse the number of a TCP port."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"must be a port, 1 to 65535, got {text!r}")
    return int(text)


def parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or "_" in text:  # written so that NaN is refused too
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, got {text!r}")
    return value
