"""The host of an MCP server: the supervisor, its control server, and what each session's calls are done with.

Made by `load` from what the command line said, torn down by `close`. Heavy: loaded beside the first answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from retinue import build
from retinue.control.server import ControlServer
from retinue.core.caller import narrower
from retinue.core.control import ResumeOverrides
from retinue.core.errors import RetinueError
from retinue.core.limits import Limits
from retinue.core.profiles import Profile
from retinue.protocol import inherited_limits as travel
from retinue.supervisor import caller_limits as called
from retinue.supervisor import client_run as clients
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.mcp import catalog
from retinue.surfaces.mcp import profile_tool as single
from retinue.surfaces.mcp.elicitation import Asker, Attendant, can_be_asked
from retinue.surfaces.mcp.jobs import Asked, Job, Jobs
from retinue.surfaces.mcp.messages import INVALID_PARAMS, Problem
from retinue.surfaces.mcp.registry import Registry, Words
from retinue.surfaces.mcp.server import Exchange, Session
from retinue.surfaces.mcp.texts import text_of
from retinue.surfaces.mcp.tool_handlers import Calls, Ground, Reply

WAIT_APPROVALS = 600.0
Tool = Callable[[Calls, str, dict[str, Any]], Any]
TOOLS: dict[str, Tool] = {
    catalog.SPAWN: Calls.spawn,
    catalog.LIST: Calls.listed,
    catalog.CONTINUE: Calls.go_on,
    catalog.STATUS: Calls.status,
    catalog.RESULT: Calls.result,
    catalog.WAIT: Calls.wait,
    catalog.CANCEL: Calls.cancel,
    catalog.BACKGROUND: Calls.background,
}


@dataclass(frozen=True)
class Wish:
    """What was asked of the server: the project's parts, how we are called, one profile instead of the eight tools, how
    long a question waits for somebody (0: not at all), and after how long a call is answered whatever it waits for."""

    parts: build.Parts
    profiles: tuple[Profile, ...]
    command: str
    profile: Profile | None = None
    wait_approvals: float = WAIT_APPROVALS
    reply_within: float | None = None
    control: bool = True


class _Served:
    """One session as the host has it."""

    def __init__(self, ground: Ground, exchange: Exchange, reply_within: float | None) -> None:
        session = self.session = exchange.session
        self.calls = Calls(ground, f"{exchange.client.name or 'an MCP client'} ({session.about})")
        self.jobs = Jobs(ground.supervisor, self.calls, reply_within)
        self.asker = Asker(ground.supervisor, session)
        session.at_work = self.calls.at_work
        self._following = asyncio.create_task(self._follow())

    @property
    def attended(self) -> bool:
        return can_be_asked(self.session) or self.jobs.suspended

    async def _follow(self) -> None:
        """Asks the user what runs ask."""
        while True:
            change = self.calls.bell.rung()
            self.asker.look(self.calls.pending())
            await change

    async def leave(self) -> None:
        self._following.cancel()
        self.asker.close()
        await self.calls.leave()


class Host:
    """Serves every session of one server process with one supervisor."""

    def __init__(self, wish: Wish, supervisor: Supervisor, servers: AsyncExitStack) -> None:
        self._wish, self._supervisor, self._servers = wish, supervisor, servers
        self._served: dict[Session, _Served] = {}
        parts = wish.parts
        assert parts.state is not None
        self.state = parts.state
        self._ground = Ground(
            supervisor=supervisor,
            registry=Registry(supervisor, parts.state),
            words=Words(wish.command, parts.project),
            state=parts.state,
            limits=Limits(seconds=None, stall=None),
            timeouts=parts.timeouts,
            given=self._given,
            reach=self._reach,
        )

    @classmethod
    async def opened(cls, wish: Wish, say: Callable[[str], None]) -> Host:
        made: list[Host] = []
        attendant = Attendant(
            lambda tree: any(host.attends(tree) for host in made), wish.wait_approvals or WAIT_APPROVALS
        )
        parts = replace(wish.parts, approver=attendant, wait_approvals=wish.wait_approvals)
        supervisor = build.make_supervisor(parts)
        servers = AsyncExitStack()
        host = cls(replace(wish, parts=parts), supervisor, servers)
        made.append(host)
        if wish.control:
            try:
                await servers.enter_async_context(
                    ControlServer(supervisor.control, host.state, unattended=supervisor.is_unattended)
                )
            except RetinueError as error:
                say(f"warning: no control server for other terminals: {error}")
        return host

    def _given(self, **more: Any) -> ResumeOverrides:
        profiles = (build.MAIN, clients.GONE, *self._wish.profiles)
        return ResumeOverrides(profiles=profiles, **more)

    def _reach(self, tree: str) -> None:
        self._supervisor.open_stored(tree)

    def attends(self, tree: str) -> bool:
        """Whether the user of the client whose tree it is can be asked."""
        return any(each.attended for each in self._served.values() if each.calls.has(tree))

    def tools(self) -> list[dict[str, Any]]:
        if self._wish.profile is not None:
            return [single.tool(self._wish.profile)]
        parts = self._wish.parts
        return catalog.tools([(profile.name, profile.description) for profile in parts.profiles], parts.timeouts)

    async def call(self, exchange: Exchange, name: str, args: dict[str, Any]) -> dict[str, Any]:
        served = self._served.get(exchange.session)
        if served is None:
            served = self._served[exchange.session] = _Served(self._ground, exchange, self._wish.reply_within)
        profile = self._wish.profile
        with self._called(exchange, args):
            job = served.jobs.taken_up(exchange, (name, args)) or self._job(served, name, args)
        served.calls.bell.ring()  # there is a way to the client again, if there was none
        try:
            reply = await served.jobs.run(exchange, job)
        except Asked as asked:
            return asked.result
        except RetinueError as error:
            if profile is not None:
                return single.refused(str(error))
            reply = {"success": False, "operation": _operation(name), "error": str(error)}
        return reply if profile is not None else _result(reply)

    @contextmanager
    def _called(self, exchange: Exchange, args: dict[str, Any]) -> Iterator[None]:
        """What is left to the run that makes the call, if it comes from one, and to whom its runs are reported, hold
        for all that is made in here."""
        run_id = args.get("runId") if self._wish.profile is not None else ""
        caller = narrower(self._supervisor.caller, travel.from_meta(exchange.request.meta))
        caller = msgspec.structs.replace(caller, run_id=run_id.strip() if isinstance(run_id, str) else "")
        with called.serve_caller(caller):
            yield

    def _job(self, served: _Served, name: str, args: dict[str, Any]) -> Job:
        """A new call; a Problem when there is no such tool."""
        calls, profile = served.calls, self._wish.profile
        call_id = calls.new_id()
        if profile is not None:
            if name != single.name_of(profile):
                raise Problem(INVALID_PARAMS, f"Unknown tool: {name[:100]}")
            work = single.run(calls, profile, call_id, args, self._ground)
            return Job((name, args), work, lambda: single.handle(calls, call_id))
        found = catalog.canonical(name)
        if found is None:
            raise Problem(INVALID_PARAMS, f"Unknown tool: {name[:100]}")
        tool, operation = TOOLS[found], _operation(name)

        async def replied() -> Reply:
            if found in (catalog.SPAWN, catalog.CONTINUE):
                await self._supervisor.prepare()
            reply: Reply = await tool(calls, call_id, args)
            return {"success": reply["success"], "operation": operation, **reply}

        def instead() -> Reply:
            if found == catalog.WAIT:
                return {"operation": operation, **calls.waiting()}
            return calls.handles(operation, call_id)

        return Job((name, args), replied(), instead)

    async def left(self, session: Session) -> None:
        served = self._served.pop(session, None)
        if served is not None:
            await served.leave()

    async def close(self) -> None:
        for session in list(self._served):
            await self.left(session)
        await self._servers.aclose()
        await self._supervisor.close()

    def kill(self) -> None:
        for tree in list(self._supervisor.trees):
            self._supervisor.kill(tree)


def _operation(name: str) -> str:
    found = catalog.canonical(name) or name
    return found.removeprefix(catalog.PREFIX)


def _result(reply: Reply) -> dict[str, Any]:
    """What a client gets: the reply as data, whole, and the same in words."""
    return {
        "content": [{"type": "text", "text": text_of(reply)}],
        "structuredContent": reply,
        "isError": "error" in reply,
    }
