"""`isolated`: a run's tools execute in a process of their own behind bubblewrap, with nothing of the machine but what
the run was given.

It holds no key and has no network: hosts that the profile allows are reached through a proxy of the host's. Folders
that are shared with the user are only read inside; `write` and `edit` there are the host's, after approval."""

from __future__ import annotations

from retinue.core.events import RunStarted
from retinue.core.limits import CANCEL_ASK_SECONDS, TERM_SECONDS, Caps
from retinue.core.plans import Job
from retinue.core.ports import Link
from retinue.sandbox.box import SandboxBuilder
from retinue.sandbox.hints import find_program_hint
from retinue.sandbox.process import REAP_SECONDS, Process
from retinue.sandbox.proxy_socket import Proxies
from retinue.sandbox.tool_server_session import SandboxKind, ToolServerSession


class Isolated:
    """A sandbox with a tool server. `proxies` makes what runs reach their hosts through; without it none does."""

    name = "isolated"
    process = Process
    find_hint = staticmethod(find_program_hint)
    grace = CANCEL_ASK_SECONDS + TERM_SECONDS + REAP_SECONDS

    def __init__(self, builder: SandboxBuilder, *, caps: Caps | None = None, proxies: Proxies | None = None) -> None:
        self._kind = SandboxKind(builder, caps or Caps(), proxies, self.process, self.find_hint)
        self.started = RunStarted(self.name, self._kind.protections)

    def open(self, job: Job, link: Link) -> ToolServerSession:
        return ToolServerSession(self._kind, job, link)
