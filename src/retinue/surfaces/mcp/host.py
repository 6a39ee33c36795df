"""The host of an MCP server: one backend, and the tool calls of every session on it.

Made by `Host.open` from the command line's options, and torn down by `close`. Heavy: loaded beside the first answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from retinue.build.parts import Parts
from retinue.concurrency import TaskOwner
from retinue.core.errors import RetinueError
from retinue.core.profiles import Profile
from retinue.surfaces.mcp import catalog, profile_tool
from retinue.surfaces.mcp.backend import Backend
from retinue.surfaces.mcp.call_runner import CallRunner, InputRequired, RunningCall
from retinue.surfaces.mcp.elicitation import ClientApprover, Elicitor, can_be_asked
from retinue.surfaces.mcp.messages import INVALID_PARAMS, RpcError
from retinue.surfaces.mcp.registry import CommandHints, RunRegistry
from retinue.surfaces.mcp.server import Exchange, Session
from retinue.surfaces.mcp.texts import render_reply
from retinue.surfaces.mcp.tool_handlers import Reply, ToolHandlers

WAIT_APPROVALS = 600.0
Handler = Callable[[ToolHandlers, str, dict[str, Any]], Any]
HANDLERS: dict[str, Handler] = {
    catalog.SPAWN: ToolHandlers.spawn,
    catalog.LIST: ToolHandlers.list_subagents,
    catalog.CONTINUE: ToolHandlers.continue_subagent,
    catalog.STATUS: ToolHandlers.get_status,
    catalog.RESULT: ToolHandlers.get_result,
    catalog.WAIT: ToolHandlers.wait,
    catalog.CANCEL: ToolHandlers.cancel,
    catalog.BACKGROUND: ToolHandlers.list_background,
}


@dataclass(frozen=True)
class ServeOptions:
    """The options of `retinue mcp serve`. `command` is how the user calls us. `profile` is served as one tool instead
    of the eight. A question waits `wait_approvals` seconds for somebody (0: not at all); each call is answered within
    `reply_within` seconds. `control` starts a control server for other terminals."""

    parts: Parts
    profiles: tuple[Profile, ...]
    command: str
    profile: Profile | None = None
    wait_approvals: float = WAIT_APPROVALS
    reply_within: float | None = None
    control: bool = True


class _ClientSession:
    """One session's tool calls and questions."""

    def __init__(self, backend: Backend, handlers: ToolHandlers, session: Session, reply_within: float | None) -> None:
        self.handlers = handlers
        self.runner = CallRunner(backend, handlers, reply_within)
        self._session = session
        self._elicitor = Elicitor(backend, session)
        session.has_running_subagents = handlers.has_running_subagents
        self._tasks = TaskOwner()
        self._tasks.start(self._ask_questions())

    @property
    def is_attended(self) -> bool:
        return can_be_asked(self._session) or self.runner.has_suspended

    async def _ask_questions(self) -> None:
        while True:
            change = self.handlers.changes.next_change()
            self._elicitor.update(await self.handlers.list_pending())
            await change

    async def leave(self) -> None:
        self._tasks.cancel()
        self._elicitor.close()
        await self.handlers.leave()


class Host:
    """Serves all sessions of one server process."""

    def __init__(self, options: ServeOptions) -> None:
        seconds = options.wait_approvals or WAIT_APPROVALS
        approver = ClientApprover(self.attends, seconds)
        parts = replace(options.parts, approver=approver, wait_approvals=options.wait_approvals)
        self._options = options
        self._sessions: dict[Session, _ClientSession] = {}
        self._backend = Backend(parts, options.profiles)
        self._registry = RunRegistry(self._backend)
        self._hints = CommandHints(options.command, parts.project)
        self.state = self._backend.state

    @classmethod
    async def open(cls, options: ServeOptions, say: Callable[[str], None]) -> Host:
        host = cls(options)
        if options.control:
            try:
                await host._backend.start_control_server()
            except RetinueError as error:
                say(f"warning: no control server for other terminals: {error}")
        return host

    def attends(self, tree: str) -> bool:
        """Tell whether the user of the client whose tree it is can be asked."""
        return any(each.is_attended for each in self._sessions.values() if each.handlers.has_tree(tree))

    def list_tools(self) -> list[dict[str, Any]]:
        options = self._options
        if options.profile is not None:
            return [profile_tool.describe_tool(options.profile)]
        profiles = [(profile.name, profile.description) for profile in options.parts.profiles]
        return catalog.list_tools(profiles, options.parts.timeouts)

    async def call_tool(self, exchange: Exchange, name: str, args: dict[str, Any]) -> dict[str, Any]:
        client, profile = self._get_session(exchange), self._options.profile
        run_id = args.get("runId") if profile is not None else ""
        with self._backend.serve_call(exchange.request.meta, run_id.strip() if isinstance(run_id, str) else ""):
            call = await client.runner.resume_call(exchange, (name, args)) or self._start_call(client, name, args)
        client.handlers.changes.notify()  # the client can be asked again, if it could not before
        try:
            reply = await client.runner.run(exchange, call)
        except InputRequired as required:
            return required.result
        except RetinueError as error:
            if profile is not None:
                return profile_tool.make_error_result(str(error))
            reply = {"success": False, "operation": _name_operation(name), "error": str(error)}
        return reply if profile is not None else _make_result(reply)

    def _get_session(self, exchange: Exchange) -> _ClientSession:
        found = self._sessions.get(exchange.session)
        if found is None:
            about = f"{exchange.client.name or 'an MCP client'} ({exchange.session.about})"
            handlers = ToolHandlers(self._backend, self._registry, self._hints, about)
            found = _ClientSession(self._backend, handlers, exchange.session, self._options.reply_within)
            self._sessions[exchange.session] = found
        return found

    def _start_call(self, client: _ClientSession, name: str, args: dict[str, Any]) -> RunningCall:
        """Start a new call. Raises RpcError if there is no such tool."""
        handlers, profile = client.handlers, self._options.profile
        call_id = handlers.make_call_id()
        if profile is not None:
            if name != profile.name:
                raise RpcError(INVALID_PARAMS, f"Unknown tool: {name[:100]}")
            work = profile_tool.run_profile(handlers, self._backend, profile, self._hints.project, call_id, args)
            return RunningCall((name, args), work, lambda: profile_tool.make_early_reply(handlers, call_id))
        tool = catalog.resolve_name(name)
        if tool is None:
            raise RpcError(INVALID_PARAMS, f"Unknown tool: {name[:100]}")
        handle, operation = HANDLERS[tool], _name_operation(name)

        async def make_reply() -> Reply:
            if tool in (catalog.SPAWN, catalog.CONTINUE):
                await self._backend.control.prepare()
            reply: Reply = await handle(handlers, call_id, args)
            return {"success": reply["success"], "operation": operation, **reply}

        async def make_early_reply() -> Reply:
            if tool == catalog.WAIT:
                return {"operation": operation, **await handlers.make_early_wait_reply()}
            return await handlers.make_early_reply(operation, call_id)

        return RunningCall((name, args), make_reply(), make_early_reply)

    async def end_session(self, session: Session) -> None:
        client = self._sessions.pop(session, None)
        if client is not None:
            await client.leave()

    async def close(self) -> None:
        for session in list(self._sessions):
            await self.end_session(session)
        await self._backend.close()

    def kill(self) -> None:
        self._backend.kill()


def _name_operation(name: str) -> str:
    return (catalog.resolve_name(name) or name).removeprefix(catalog.PREFIX)


def _make_result(reply: Reply) -> dict[str, Any]:
    """Make the result that a client gets: the reply as data, and the same as text."""
    return {
        "content": [{"type": "text", "text": render_reply(reply)}],
        "structuredContent": reply,
        "isError": "error" in reply,
    }
