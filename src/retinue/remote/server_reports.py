"""The events that MCP servers post to the collector, turned into reports of remote runs.

Servers speak the format of CPE (`protocol.reports`): calls may come without ids, an ending without a status, and the
first event of a run may be any. Knows no connection and no tree: the collector in `control/` has both.
"""

from __future__ import annotations

from collections.abc import Callable

from retinue.core.events import Body, RunEnded, Thinking, ToolCall, ToolResult, UsageReported
from retinue.protocol.reports import Reported, read_arguments
from retinue.remote.port import RemoteSpawned, Report
from retinue.remote.validator import clean_name

RUNTIME = "foreign"  # the runtime of runs that a server reports, and the tier of their calls


class ServerReports:
    """Turns the events of one run into reports. `parent` is the key of the run above it; `now` is a monotonic clock."""

    def __init__(self, server: str, parent: str, now: Callable[[], float]) -> None:
        self.parent = parent
        self._server = server
        self._now = now
        self._open: list[tuple[str, str, float]] = []
        self._calls = 0

    def spawn_report(self, event: Reported, *, size: int) -> Report:
        """Return the report that makes the run, from the first event that a server posts about it."""
        is_start = event.type == "subagent_start"
        body = RemoteSpawned(
            parent=self.parent,
            agent=event.subagent_name,
            task=event.payload or "" if is_start else "",
            label=clean_name(event.run_id),
            subagent_id=event.run_id,
            is_at_work=True,
        )
        return Report(event.run_id, body, seq=event.seq if is_start else None, size=size if is_start else 0)

    def body_report(self, event: Reported, *, size: int) -> Report | None:
        """Return the report of what an event says beside that the run has begun."""
        usage = event.usage
        spent = None if usage is None else UsageReported(f"mcp:{self._server}", usage, event.spent)
        body = self._body_of(event)
        if body is None:
            return None if spent is None else Report(event.run_id, spent)
        return Report(event.run_id, body, seq=event.seq, size=size, spent=spent)

    def _body_of(self, event: Reported) -> Body | None:
        payload = event.payload or ""
        match event.type:
            case "thought_trace":
                return Thinking(payload, event.reasoning_type or "")
            case "tool_call":
                return self._call_of(event, payload)
            case "tool_result":
                name = event.tool_name or ""
                call_id, milliseconds = self._close_call(event.call_id, name)
                return ToolResult(call_id, name, payload, event.success, milliseconds)
            case "subagent_end":
                return _ending_of(event.status, payload)
            case _:
                return None

    def _call_of(self, event: Reported, payload: str) -> ToolCall:
        name = event.tool_name or ""
        self._calls += 1
        call_id = event.call_id or f"call-{self._calls}"
        self._open.append((call_id, name, self._now()))
        args, raw = read_arguments(payload)
        timeout = event.execution_timeout_seconds
        return ToolCall(call_id, name, args, RUNTIME, timeout_seconds=timeout or None, raw=raw)

    def _close_call(self, call_id: str | None, name: str) -> tuple[str, int]:
        """Return the id of the call that a result belongs to, and its milliseconds: the call that the result names, or
        the oldest open one of the tool."""
        for call in self._open:
            if call[0] == call_id or (not call_id and call[1] == name):
                self._open.remove(call)
                return call[0], round((self._now() - call[2]) * 1000)
        return call_id or "", 0


def _ending_of(status: str | None, payload: str) -> RunEnded:
    """Return the ending. CPE processes give no status: words at the end are those of an error."""
    if status is None:
        status = "failed" if payload else "done"
    text = payload if status in ("done", "failed") else ""
    return RunEnded(status, text, 0, payload or None)
