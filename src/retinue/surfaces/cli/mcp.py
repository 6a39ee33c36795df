"""`retinue mcp`: subagents for MCP clients. `serve` is the server, `install` adds it to a client.

Imports little at the top, because a client that starts the server waits only about a second for the first answer."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from retinue.core.errors import ConfigError
from retinue.core.limits import SPAWNED_SECONDS
from retinue.surfaces.cli.main import add_actions
from retinue.surfaces.cli.options import (
    add_context_option,
    add_options,
    parse_context_paths,
    parse_limits,
    parse_port,
    parse_seconds,
)
from retinue.surfaces.printer import safe

if TYPE_CHECKING:
    import asyncio
    from contextlib import AsyncExitStack

    from retinue.config.project import Project
    from retinue.core.profiles import Profile
    from retinue.surfaces.mcp.host import Host
    from retinue.surfaces.mcp.server import Server

CLIENTS = ("claude", "codex", "gemini", "opencode", "cursor", "vscode")
WAIT_APPROVALS = 600.0
SESSION_TIMEOUT = 1800.0
AT_TERMINAL = (
    "this command speaks MCP on stdin and stdout and is started by an MCP client (`retinue mcp install` registers it); "
    "Ctrl-C stops"
)

NO_SUBAGENTS = (
    "`retinue mcp serve` offers subagents, but 'enable_subagents' is false in {file}: set it to true, or offer one "
    "agent with --profile NAME"
)


def configure_mcp(parser: argparse.ArgumentParser) -> None:
    actions = {
        "serve": ("start the MCP server, on stdio or over HTTP", _configure_serve, _execute_serve),
        "install": ("register this server with an MCP client", _configure_install, _execute_install),
    }
    add_actions(parser, actions)


def execute_mcp(args: argparse.Namespace) -> int:
    """Offer the subagents of this project to MCP clients such as Claude Code, Codex or Gemini CLI.

    examples:
      retinue mcp install --client claude          print how to add the server to Claude Code
      retinue mcp serve                            the command that clients start, on stdin and stdout
      retinue mcp serve --http --port 8931         over HTTP on this machine, for several clients
      retinue mcp serve --profile explorer         one subagent as one tool
    """
    code: int = args.execute_action(args)
    return code


def _configure_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--project", metavar="DIR", type=Path, help="the project (default: the current folder)")
    parser.add_argument(
        "--profile", metavar="NAME", help="offer only this subagent, as one tool that takes prompt, inputs and runId"
    )
    parser.add_argument(
        "--output-schema", metavar="FILE", type=Path, help="with --profile: the JSON schema of its answer"
    )
    parser.add_argument(
        "--http", action="store_true", help="serve over HTTP on this machine instead of stdin and stdout"
    )
    parser.add_argument("--port", metavar="N", type=parse_port, help="with --http: the port (default: a free one)")
    parser.add_argument("--no-token", action="store_true", help="with --http: admit every program on this machine")
    parser.add_argument(
        "--session-timeout",
        metavar="SECONDS",
        type=parse_seconds,
        help=f"with --http: end a session and its subagents after this long without a request (default: "
        f"{SESSION_TIMEOUT:g})",
    )
    parser.add_argument(
        "--wait-approvals",
        metavar="SECONDS",
        type=parse_seconds,
        default=WAIT_APPROVALS,
        help=f"how long a question waits for `retinue approve` if the client cannot ask (default: {WAIT_APPROVALS:g}; "
        "0: not at all)",
    )
    parser.add_argument(
        "--reply-within",
        metavar="SECONDS",
        type=parse_seconds,
        help="answer each call after this long, with a handle if it is not done (default: 50 for clients without "
        "progress, no limit for others)",
    )
    add_context_option(parser)
    add_options(parser, timed="each subagent", timeout=SPAWNED_SECONDS)


def _configure_install(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--client", choices=CLIENTS, required=True, help="the client")
    parser.add_argument(
        "--write", action="store_true", help="write the client's file; keeps the old one as FILE.retinue-backup"
    )
    parser.add_argument("--project", metavar="DIR", type=Path, help="use this project wherever the client is started")
    parser.add_argument(
        "--name", metavar="NAME", default="retinue", help="the name of the server in the client (default: retinue)"
    )
    add_context_option(parser)


def _execute_serve(args: argparse.Namespace) -> int:
    """Serve this project's subagents as tools to the MCP client that starts this command.

    The client gets tools to spawn, list, continue, message, wait for and cancel subagents. They are runs like any
    other: `retinue ps`, `retinue tail -f` and `retinue apply` work on them. Their questions appear in the client, if it
    can ask its user; `retinue approve` always answers them. On stdio, only the protocol is written to stdout.

    examples:
      retinue mcp serve --project ~/src/shop
      retinue mcp serve --model anthropic:claude-sonnet-5-5 --max-cost 5
      retinue mcp serve --profile explorer --output-schema findings.json
      retinue mcp serve --http --port 8931 --wait-approvals 60
    """
    if args.output_schema is not None and args.profile is None:
        raise ConfigError("--output-schema is about the answer of one subagent: give --profile too")
    if not args.http and (args.port is not None or args.no_token or args.session_timeout is not None):
        raise ConfigError("--port, --no-token and --session-timeout are for --http")
    if args.session_timeout == 0:
        raise ConfigError("--session-timeout must be more than 0 seconds")
    import asyncio

    return asyncio.run(_run_server(args))


def _execute_install(args: argparse.Namespace) -> int:
    """Print how to add this server to an MCP client, or write it into the client's configuration.

    examples:
      retinue mcp install --client codex
      retinue mcp install --client cursor --write
    """
    from retinue.config.project import find_project, load_own_settings
    from retinue.core.profiles import check_name
    from retinue.surfaces.cli import output
    from retinue.surfaces.mcp.install import Installation, list_passed_variables, write_entry

    if args.project is not None and not args.project.is_dir():
        raise ConfigError(f"--project: there is no folder {args.project}")
    folder = find_project(args.project or Path.cwd())
    line = [*output.find_command(), "mcp", "serve", *(["--project", str(folder)] if args.project is not None else [])]
    line += [word for path in parse_context_paths(args) for word in ("--context-path", path)]
    settings, _ = load_own_settings(folder)
    installation = Installation(
        args.client,
        check_name(args.name, what="--name"),
        line,
        folder,
        seconds=settings.coordination.subagent_default_timeout,
        variables=[*list_passed_variables(os.environ), *(name for each in settings.mcp_servers for name in each.gets)],
    )
    if args.write:
        print(safe.escape_line(write_entry(installation)))
        return 0
    adds = installation.add_command
    if adds:
        print(
            f"{installation.kind.title}: run\n\n  {safe.escape_line(adds)}\n\n"
            f"or put this into {safe.escape_line(str(installation.file))}:\n"
        )
    else:
        print(
            f"{installation.kind.title}: put this into {safe.escape_line(str(installation.file))} (--write does it):\n"
        )
    print(installation.text, end="")
    return 0


async def _run_server(args: argparse.Namespace) -> int:
    import asyncio
    from contextlib import AsyncExitStack

    from retinue.surfaces.cli.signals import Signals
    from retinue.surfaces.mcp.install import remove_unset_variables
    from retinue.surfaces.mcp.server import Server

    remove_unset_variables(os.environ)
    stop = asyncio.Event()

    with Signals() as signals:
        async with AsyncExitStack() as closing:
            owner = _HostOwner(args, closing)
            signals.set_actions(stop.set, owner.kill, _say)
            server = Server(owner.open_host, say=_say, keeps_running=not args.http, profile=args.profile)
            try:
                await _serve(args, server, owner, stop)
            finally:
                await server.find_host()  # wait until it is loaded
    return 0


async def _serve(args: argparse.Namespace, server: Server, owner: _HostOwner, stop: asyncio.Event) -> None:
    if args.http:
        from retinue.surfaces.mcp import http

        await server.wait_for_host()  # report an error in the project now, to the user who starts the server
        await http.serve_http(
            server,
            stop,
            port=args.port or 0,
            state=owner.state,
            token=not args.no_token,
            say=_say,
            idle_seconds=args.session_timeout or SESSION_TIMEOUT,
        )
    else:
        if sys.stdin is not None and sys.stdin.isatty():
            _say(AT_TERMINAL)
        from retinue.surfaces.mcp import stdio

        await stdio.serve_stdio(server, stop)


class _HostOwner:
    """The owner of the server's host and its Control."""

    def __init__(self, args: argparse.Namespace, closing: AsyncExitStack) -> None:
        self._args, self._closing = args, closing
        self._host: Host | None = None

    @property
    def state(self) -> Path:
        """The state folder of the project, once the host is open."""
        assert self._host is not None
        return self._host.backend.state

    async def open_host(self) -> Host:
        """Open the host after the first request is answered. Does the slow imports in a thread.

        Signals are handled since the start of the server, so this is not `open_process`."""
        import asyncio

        host = await asyncio.to_thread(_make_host, self._args)
        from retinue.build.supervisor import open_served_control

        opening = open_served_control(host.parts, _say, serves=not self._args.no_control)
        host.attach(await self._closing.enter_async_context(opening))
        self._closing.push_async_callback(host.close)
        self._host = host
        return host

    async def kill(self) -> None:
        """Stop all trees of the host immediately, if it is open."""
        from retinue.surfaces.cli.host_process import kill_trees

        if self._host is not None:
            await kill_trees(self._host.backend.control)


def _make_host(args: argparse.Namespace) -> Host:
    """Load the project and return the Host, not opened yet."""
    from dataclasses import replace

    import msgspec

    from retinue.build.parts import MAIN, add_profiles, find_profile
    from retinue.core.limits import Limits
    from retinue.surfaces.cli import output
    from retinue.surfaces.cli.startup import check_sandbox, prepare, require_model
    from retinue.surfaces.mcp.host import Host

    limits = parse_limits(args)
    own = Limits(seconds=limits.seconds, stall=limits.stall)  # for each subagent: the run of the client has no deadline
    limits = msgspec.structs.replace(limits, seconds=msgspec.UNSET, stall=msgspec.UNSET)
    start = prepare(args, folder=args.project, limits=limits, interactive=False)
    profile = None if args.profile is None else _choose_profile(start.project, args)
    if profile is None and not start.parts.enable_subagents:
        raise ConfigError(NO_SUBAGENTS.format(file=start.settings_file))
    # If teams have a shared pool of members, the subagents of a client use the models of the pool.
    if profile is not None or not (start.parts.teams.enabled and start.parts.teams.agents):
        require_model(start, [*start.parts.profiles, *([] if profile is None else [profile])])
    parts = check_sandbox(start, profile or MAIN).parts
    if own != Limits():
        general = find_profile(parts, "subagent")
        parts = add_profiles(
            parts, [replace(found, limits=own.override(found.limits)) for found in (general, *parts.profiles)]
        )
        profile = profile and replace(profile, limits=own.override(profile.limits))
    return Host(
        parts,
        start.project.all_profiles,
        command=output.format_command(),
        profile=profile,
        wait_approvals=args.wait_approvals,
        reply_within=args.reply_within,
    )


def _choose_profile(project: Project, args: argparse.Namespace) -> Profile:
    from dataclasses import replace

    import jsonschema

    from retinue.config.files import read_text
    from retinue.surfaces.cli.startup import choose_profile

    profile = choose_profile(project, args.profile)
    if args.output_schema is None:
        return profile
    try:
        schema = json.loads(read_text(args.output_schema))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{args.output_schema} is not JSON: {error}") from None
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise ConfigError(f"{args.output_schema} must be the JSON schema of an object: 'type' is 'object'")
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{args.output_schema} is not a JSON schema: {error.message}") from None
    return replace(profile, output=schema)


def _say(text: str) -> None:
    print(f"retinue: {safe.escape_line(text)}", file=sys.stderr, flush=True)
