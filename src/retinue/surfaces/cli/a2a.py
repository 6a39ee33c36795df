"""`retinue a2a`: serve an agent over A2A, call an agent, or add one to retinue.yaml. Imports the A2A library lazily."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import UNSET

from retinue.build.parts import Parts
from retinue.build.remote_agents import inspect_agent
from retinue.config import trust
from retinue.config.project import SETTINGS_FILE, Project, find_project
from retinue.config.remote_agents import check_agent_url, make_remote_profile
from retinue.core.errors import ConfigError
from retinue.core.limits import Limits
from retinue.core.profiles import Profile, Task, check_name
from retinue.core.remote_agents import A2aAgent, AgentAuth
from retinue.files.reserved import find_git_root
from retinue.files.state_owner import claim_state_folder
from retinue.files.token_file import load_token
from retinue.surfaces.cli.foreground import run_tree
from retinue.surfaces.cli.main import add_actions, get_version
from retinue.surfaces.cli.options import (
    add_context_option,
    add_level_options,
    add_live_options,
    add_options,
    parse_limit_amount,
    parse_limit_count,
    parse_port,
    parse_seconds,
    parse_whole,
)
from retinue.surfaces.cli.run import read_task
from retinue.surfaces.cli.server_process import ServerScreen, open_server_process
from retinue.surfaces.cli.startup import check_sandbox, choose_profile, make_printer, prepare, require_model
from retinue.surfaces.printer import safe

if TYPE_CHECKING:
    from retinue.surfaces.a2a.options import ServerOptions

WAIT_APPROVALS = 600.0
DEFAULT_TOKEN = "default"
TOKEN_PURPOSE = "a2a token"
TOKEN_VARIABLE = "RETINUE_A2A_TOKEN_"
LOOPBACK = "127.0.0.1"
MIN_TOKEN = 16
MAX_TASKS = 100
PATTERNS = ("supervisor", "subagent")
CURL = """\
try it:
  curl -N {url} \\
    -H "Content-Type: application/json" -H "Accept: text/event-stream" \\{token}
    -d '{{"id":"1","method":"message/stream","params":{{"message":{{"role":"user","messageId":"'$(date +%s)'",\
"parts":[{{"kind":"text","text":"hello"}}]}}}}}}'"""


def configure_a2a(parser: argparse.ArgumentParser) -> None:
    actions = {
        "serve": ("serve an agent of this project to A2A clients", _configure_serve, _execute_serve),
        "call": ("give a task to an A2A agent and print its answer", _configure_call, _execute_call),
        "add": ("check an A2A agent and add it to retinue.yaml", _configure_add, _execute_add),
    }
    add_actions(parser, actions)


def execute_a2a(args: argparse.Namespace) -> int:
    """Serve an agent of this project over A2A (Agent2Agent), or call other A2A agents.

    examples:
      retinue a2a serve --profile explorer
      retinue a2a call http://127.0.0.1:8001 "show version"
      retinue a2a add http://127.0.0.1:8001 --name argocd
    """
    code: int = args.execute_action(args)
    return code


def _configure_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="base URL of the agent")
    parser.add_argument(
        "--bearer-env", metavar="VARIABLE", default="", help="the environment variable with its bearer token"
    )
    parser.add_argument(
        "--api-key-env", metavar="VARIABLE", default="", help="the environment variable with its API key"
    )
    parser.add_argument(
        "--allow-host",
        metavar="HOST",
        action="append",
        default=[],
        help="another HOST:PORT that the card may point to; can be given several times",
    )


def _configure_call(parser: argparse.ArgumentParser) -> None:
    _configure_address(parser)
    parser.add_argument("task", metavar="TEXT", help="the task; - reads it from stdin, @FILE from a file")
    add_live_options(parser)


def _configure_add(parser: argparse.ArgumentParser) -> None:
    _configure_address(parser)
    parser.add_argument("--name", metavar="NAME", help="its name in this project (default: the name in its card)")


def _read_agent(args: argparse.Namespace) -> A2aAgent:
    if args.bearer_env and args.api_key_env:
        raise ConfigError("use either --bearer-env or --api-key-env, not both")
    auth = AgentAuth(bearer_env=args.bearer_env, api_key_env=args.api_key_env)
    return A2aAgent(url=check_agent_url(args.url), auth=auth, allowed_hosts=tuple(args.allow_host))


def _execute_call(args: argparse.Namespace) -> int:
    """Give a task to an A2A agent and print its answer.

    Use it to try an agent. You see live what the agent does, its questions are asked here, Ctrl-C cancels the task, and
    `retinue continue` continues the same conversation.

    examples:
      retinue a2a call http://127.0.0.1:8001 "show version"
      retinue a2a call https://agents.example.com/argocd "sync it" --bearer-env ARGOCD_TOKEN
    """
    agent, text = _read_agent(args), read_task(args.task)
    start = prepare(args, interactive=args.task != "-")
    profile = make_remote_profile("agent", agent, f"The agent at {agent.url}")
    limits = start.limits
    return run_tree(args, start, lambda control: control.spawn(profile, Task(text), limits=limits), profile=profile)


def _execute_add(args: argparse.Namespace) -> int:
    """Check the card of an A2A agent and add the agent to retinue.yaml.

    Your agents can then delegate to it. Secrets are not written: --bearer-env and --api-key-env name the environment
    variables that hold them.

    examples:
      retinue a2a add http://127.0.0.1:8001
      retinue a2a add https://agents.example.com/argocd --name argocd --bearer-env ARGOCD_TOKEN
    """
    from retinue.config.edit import add_agent

    agent = _read_agent(args)
    report = asyncio.run(inspect_agent(agent))
    name = args.name or re.sub(r"[^A-Za-z0-9_-]+", "-", report.name).strip("-_").lower()[:64]
    check_name(name, what="--name")
    file = find_project(Path.cwd()) / SETTINGS_FILE
    values: dict[str, Any] = {"url": agent.url, "description": report.description or report.name}
    if agent.auth.variables:
        values["auth"] = {key: getattr(args, key) for key in ("bearer_env", "api_key_env") if getattr(args, key)}
    if agent.allowed_hosts:
        values["allowed_hosts"] = list(agent.allowed_hosts)
    before, after = add_agent(file, name, values)
    trust.carry_answer(file, before, after)
    protocols = ", ".join(report.protocols)
    print(safe.escape_line(f"{report.name} {report.version}: {report.description}"))
    print(safe.escape_line(f"speaks {protocols}{', streams' if report.is_streaming else ', does not stream'}"))
    for note in report.notes:
        print(safe.escape_line(f"warning: {note}"))
    print(safe.escape_line(f"written to {file} as '{name}'; if that file is not trusted yet, run `retinue trust`"))
    return 0


def _configure_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", metavar="NAME", help="the agent to serve (default: the primary of `retinue run`)")
    parser.add_argument("--project", metavar="DIR", type=Path, help="the project (default: the current folder)")
    parser.add_argument(
        "--host", metavar="ADDRESS", default=LOOPBACK, help=f"the address to listen on (default: {LOOPBACK})"
    )
    parser.add_argument(
        "--port", metavar="N", type=parse_port, default=0, help="the port to listen on (default: a free one)"
    )
    parser.add_argument("--public-url", metavar="URL", help="the URL that clients use, if they come through a proxy")
    parser.add_argument(
        "--token",
        metavar="NAME",
        action="append",
        default=[],
        help=f"create a token for client NAME (default: '{DEFAULT_TOKEN}'); a client sees only its own tasks; can be "
        "given several times",
    )
    parser.add_argument("--no-token", action="store_true", help="admit every program on this machine")
    parser.add_argument("--tls-cert", metavar="FILE", type=Path, help="the TLS certificate; with --tls-key")
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="the private key of the certificate")
    parser.add_argument(
        "--stream-as",
        choices=PATTERNS,
        default=PATTERNS[0],
        help="supervisor: notices and the answer as artifacts, token by token; subagent: as status updates",
    )
    parser.add_argument(
        "--approve-by",
        choices=("host", "client"),
        default="host",
        help="who answers questions: host (you, with `retinue approve`), or client (the client of the task as well)",
    )
    parser.add_argument(
        "--on-disconnect",
        choices=("continue", "cancel"),
        default="continue",
        help="what happens to a task if its client disconnects from the stream",
    )
    parser.add_argument(
        "--wait-approvals",
        metavar="SECONDS",
        type=parse_seconds,
        default=WAIT_APPROVALS,
        help=f"how long a question waits for `retinue approve` (default: {WAIT_APPROVALS:g}; 0: not at all)",
    )
    parser.add_argument(
        "--max-tasks",
        metavar="N",
        type=parse_whole,
        default=MAX_TASKS,
        help=f"how many tasks may run at once (default: {MAX_TASKS}); more are refused",
    )
    parser.add_argument(
        "--server-max-tokens", metavar="N", type=parse_limit_count, help="tokens that all tasks together may spend"
    )
    parser.add_argument(
        "--server-max-cost",
        metavar="AMOUNT",
        type=parse_limit_amount,
        help="US dollars that all tasks together may spend",
    )
    add_level_options(parser, has_live_view=False)
    add_context_option(parser)
    add_options(parser, timed="each task")


def _execute_serve(args: argparse.Namespace) -> int:
    """Serve an agent of this project over A2A: protocol 1.0 and 0.3, JSON-RPC and REST, on one address.

    Each message becomes a task, and each task is a tree of runs: `retinue ps`, `retinue tail -f` and `retinue approve`
    work on it. After a restart, the server resumes tasks that were interrupted. Limits such as --max-cost apply to each
    task. Tasks work in copies: your files change only when you run `retinue apply`. The server listens on loopback
    unless you give --host; other addresses always need tokens. A token is created on first use, or taken from the
    environment variable RETINUE_A2A_TOKEN_NAME. Ctrl-C cancels all tasks and stops; a second Ctrl-C kills them.

    examples:
      retinue a2a serve --profile explorer
      retinue a2a serve --profile explorer --port 8001 --stream-as subagent --no-token
      retinue a2a serve --token alice --token bob --max-cost 1 --server-max-cost 20
      retinue a2a serve --host 0.0.0.0 --public-url https://agents.example.com --tls-cert c.pem --tls-key k.pem
    """
    check_address(args)
    start = prepare(args, folder=args.project, interactive=False)
    profile = _choose_profile(start.project, args.profile)
    require_model(start, [profile])
    parts = check_sandbox(start, profile).parts
    total = Limits(
        tokens=UNSET if args.server_max_tokens is None else args.server_max_tokens,
        cost=UNSET if args.server_max_cost is None else args.server_max_cost,
    )
    parts = replace(parts, wait_approvals=args.wait_approvals, total=total)
    options = _make_options(args, parts, start.project, profile)
    asyncio.run(_serve(args, parts, options))
    return 0


def check_address(args: argparse.Namespace) -> None:
    """Raise ConfigError if the address options contradict each other or would admit unintended clients."""
    is_local = is_loopback(args.host)
    if args.no_token and (args.token or not is_local):
        raise ConfigError(
            "--no-token admits every program on this machine, so it needs a loopback --host and no --token"
        )
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together")
    if args.public_url is not None:
        parts = urlsplit(args.public_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"--public-url: {args.public_url!r} is not an http or https URL")
    elif args.host in ("0.0.0.0", "::", ""):
        raise ConfigError(f"--host {args.host!r} means every address: give the one that clients use with --public-url")
    for name in args.token:
        check_name(name, what="--token")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _choose_profile(project: Project, name: str | None) -> Profile:
    """Return the profile to serve.

    Clients are strangers, so a profile with the workspace `shared` gets a worktree, or a copy outside a git
    repository."""
    profile = choose_profile(project, name)
    if profile.workspace not in (None, "shared"):
        return profile
    return replace(profile, workspace="copy" if find_git_root(project.folder) is None else "worktree")


def _make_options(args: argparse.Namespace, parts: Parts, project: Project, profile: Profile) -> ServerOptions:
    from retinue.surfaces.a2a.options import ServerOptions

    assert parts.state is not None
    return ServerOptions(
        profile=profile,
        profiles=project.all_profiles,
        host=args.host,
        port=args.port,
        public_url=(args.public_url or "").rstrip("/"),
        tokens={} if args.no_token else load_tokens(args.token or [DEFAULT_TOKEN], parts.state),
        pattern=args.stream_as,
        asks_client=args.approve_by == "client",
        on_disconnect=args.on_disconnect,
        most_tasks=args.max_tasks,
        certificate=args.tls_cert,
        key=args.tls_key,
        version=get_version(),
    )


def load_tokens(names: list[str], state: Path) -> dict[str, str]:
    """Return the token of each client in `names`, from the environment or from a file that is created on first use."""
    claim_state_folder(state)
    found = {}
    for name in names:
        variable, given = _read_token(name)
        if given and len(given) < MIN_TOKEN:
            raise ConfigError(f"{variable} is too short for a token: {MIN_TOKEN} characters or more")
        found[name] = given or load_token(_find_token_file(state, name), f"{TOKEN_PURPOSE} {name}")
    if len(set(found.values())) != len(found):
        raise ConfigError("two clients have the same token: each client needs its own")
    return found


def _read_token(name: str) -> tuple[str, str]:
    """Return the name and the value of the variable for a client's token. The value is empty if it is not set."""
    variable = TOKEN_VARIABLE + re.sub(r"[^A-Z0-9]", "_", name.upper())
    return variable, os.environ.get(variable, "").strip()


def _find_token_file(state: Path, name: str) -> Path:
    return state / "a2a" / "tokens" / name


async def _serve(args: argparse.Namespace, parts: Parts, options: ServerOptions) -> None:
    """Serve until Ctrl-C, and show the runs of all tasks live."""
    from retinue.surfaces.a2a.options import OperatorScreen
    from retinue.surfaces.a2a.server import A2aServer

    assert parts.state is not None
    process = open_server_process(parts, make_printer(args), serves=not args.no_control)
    async with process as (control, screen, stop):

        def show_task(tree: str, label: str, line: str) -> None:
            screen.show_tree(control, tree, label=label, line=line)

        operator = OperatorScreen(say=screen.say, show_task=show_task)
        async with A2aServer(control, parts.state, options, operator) as server:
            _greet(args, parts, options, server.url, screen)
            await stop.wait()


def _greet(args: argparse.Namespace, parts: Parts, options: ServerOptions, url: str, screen: ServerScreen) -> None:
    """Print the address and the tokens of the server at `url`, and how to try it."""
    assert parts.state is not None
    about = f"as {options.pattern}, {parts.runtime}"
    screen.say(f"serving '{options.profile.name}' over A2A on {url} ({about}); Ctrl-C stops")
    screen.say(f"card: {url}/.well-known/agent-card.json")
    header = ""
    if not options.tokens:
        screen.say("warning: every program of this machine may use it (--no-token)")
    for name in options.tokens:
        variable, given = _read_token(name)
        source = f"${variable}" if given else f"$(cat {shlex.quote(str(_find_token_file(parts.state, name)))})"
        screen.say(f'token of {name}: send the header "Authorization: Bearer {source}"')
        header = header or f'\n    -H "Authorization: Bearer {source}" \\'
    if parts.runtime == "inherited":
        screen.say("warning: without a sandbox, what clients ask for runs with your authority (--runtime inherited)")
    if options.certificate is None and not is_loopback(args.host) and not url.startswith("https:"):
        screen.say("warning: tokens and texts travel unencrypted: give --tls-cert and --tls-key, or use a proxy")
    screen.show_example(CURL.format(url=url, token=header))
