"""The collector: where the MCP servers that we started report their subagents, over HTTP on the loopback interface.

Each server gets an address of its own, with a path nobody can guess. What is posted there is checked and handed to the
supervisor, which makes it runs and events of the tree of the run that made the call; nothing is kept or printed here.
A request's Host, Origin, path, method, type and size are checked before its body is read.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from retinue.control.server_limits import Downward, mint
from retinue.core.events import Gap
from retinue.core.messages import RunRef
from retinue.core.ports import Outcome
from retinue.core.secrets import forget, hide
from retinue.http.listener import HOST, Listener
from retinue.http.server import HttpError, Request, ServerConnection
from retinue.protocol import inherited_limits as travel
from retinue.protocol import reports as collected
from retinue.protocol.control import BadBody
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS, ROUTE, Reported
from retinue.supervisor.adoption import ForeignNode

MOST_CONNECTIONS = 1024
MOST_RUNS = 1000
MOST_EVENTS = 200_000
MOST_MIB = 256
DEEPEST = 32
SWEPT = 4096
IDLE_SECONDS = 120.0
END = "subagent_end"
NOT_YOURS = "run '{run}' is not below a call that was made on this server"


class _Server:
    """One server that was started, and the runs of calls on it that have not come back, the newest last."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.secret = secrets.token_urlsafe(24)
        self.open: dict[str, _Run] = {}


class _Run:
    """A run id that may be reported by one server. `parent` is the run of our tree that it stands below; `node` is the
    run it became with its first event; `give_up` ends the call whose own run it is."""

    __slots__ = ("cut", "give_up", "node", "over", "parent", "server", "tree")

    def __init__(self, server: _Server, tree: str, parent: int, give_up: Callable[[], object] | None = None) -> None:
        self.server = server
        self.tree = tree
        self.parent = parent
        self.give_up = give_up
        self.node: ForeignNode | None = None
        self.over = False
        self.cut = False

    def below(self) -> int:
        """The run of our tree that stands above what this one makes."""
        return self.parent if self.node is None or self.node.ending else self.node.ref.run


class Collector(Listener):
    """Implements the port of that name. Opens its socket when the first server is about to be started; `close` ends
    it. Made in the event loop of the supervisor, by `build`."""

    def __init__(self, down: Downward) -> None:
        super().__init__("the collector", max_connections=MOST_CONNECTIONS, idle_seconds=IDLE_SECONDS)
        self._down = down
        self._port = 0
        self._paths: dict[str, _Server] = {}
        self._servers: dict[str, _Server] = {}
        self._secrets: list[str] = []
        self._runs: dict[str, _Run] = {}
        self._anchors: dict[tuple[str, int], str] = {}
        self._anchored: dict[str, tuple[str, int]] = {}
        self._made: Counter[tuple[str, str]] = Counter()
        self._said: Counter[tuple[str, str]] = Counter()
        self._size: Counter[tuple[str, str]] = Counter()

    # For whoever starts and calls servers

    def environment(self, server: str) -> Mapping[str, str]:
        if not self._port:
            self._port = self.listen()
        started = self._servers[server] = _Server(server)
        self._paths[f"/{started.secret}{ROUTE}"] = started
        self._secrets.append(started.secret)
        hide(started.secret)
        address = f"http://{HOST}:{self._port}/{started.secret}"
        return {**self._down.variables(), ADDRESS: address, CPE_ADDRESS: address}

    def call(self, server: str, ref: RunRef, name: str, give_up: Callable[[], object] | None = None) -> str:
        self._sweep()
        run_id, started = mint(name), self._servers.get(server)
        if started is not None:
            started.open[run_id] = self._runs[run_id] = _Run(started, ref.tree, ref.run, give_up)
        return run_id

    def meta(self, ref: RunRef) -> Mapping[str, Any]:
        """With a word for the run itself, below which a server can report what is not the call's own run."""
        place = ref.tree, ref.run
        anchor = self._anchors.get(place)
        if anchor is None:
            self._sweep()
            anchor = self._anchors[place] = f"{ref.tree}-{ref.run}-{secrets.token_hex(8)}"
            self._anchored[anchor] = place
        return travel.to_meta(self._down.left(ref, parent_id=anchor))

    def returned(self, run_id: str, outcome: Outcome | None) -> None:
        run = self._runs.get(run_id)
        if run is None or run.over:
            return
        run.over = True
        run.server.open.pop(run_id, None)
        if run.node is not None:
            run.node.returned(outcome)

    def gone(self, server: str) -> None:
        started = self._servers.pop(server, None)
        if started is None:
            return
        del self._paths[f"/{started.secret}{ROUTE}"]
        for name, run in list(self._runs.items()):
            if run.server is started and run.node is not None and name not in started.open:  # an open call tells why
                run.node.stop("disconnected")

    def _sweep(self) -> None:
        """Forgets what belongs to trees that have ended, when it has become much."""
        if len(self._runs) + len(self._anchors) < SWEPT:
            return
        trees = self._down.supervisor.trees
        self._runs = {name: run for name, run in self._runs.items() if run.tree in trees}
        self._anchors = {place: name for place, name in self._anchors.items() if place[0] in trees}
        self._anchored = {name: place for place, name in self._anchors.items()}
        for counted in (self._made, self._said, self._size):
            for key in [key for key in counted if key[1] not in trees]:
                del counted[key]

    # Listening

    async def close(self) -> None:
        await self.stop_listening()
        await self.end_connections()
        for secret in self._secrets:
            forget(secret)

    async def respond(self, request: Request, connection: ServerConnection) -> None:
        server = self._server(request)
        body = await connection.read_json_body(request, collected.BODY_BYTES)
        try:
            event = collected.decode(body)
        except BadBody as error:
            raise HttpError(400, str(error)) from None
        self._take(server, event, len(body))
        connection.send_response(200, b"{}")
        await connection.drain()

    def _server(self, request: Request) -> _Server:
        """Return the server whose path it is. Nothing of the body was read yet."""
        server = self._paths.get(request.path)
        if server is None:
            raise HttpError(404, "there is no such address")
        if request.method != "POST":
            raise HttpError(405, "this address takes POST only", Allow="POST")
        return server

    # What arrives

    def _take(self, server: _Server, event: Reported, size: int) -> None:
        run = self._runs.get(event.run_id)
        if run is None:
            run = self._first_seen(server, event)
            if event.type == END:
                return  # nothing was reported of it, so there is nothing to end
        elif run.server is not server:
            raise HttpError(403, NOT_YOURS.format(run=event.run_id))
        if run.over or (run.node is not None and run.node.ending):
            if event.type != END:
                raise HttpError(409, f"run '{event.run_id}' has ended{_how(run.node)}: it is not wanted any more")
            return
        if not self._may_say(run, size) and event.type != END:
            return
        if run.node is None:
            run.node = self._adopted(run, event)
            if run.node is None:
                return
        run.node.take(event)

    def _first_seen(self, server: _Server, event: Reported) -> _Run:
        """A run nobody announced: below a run of the same server, or of whoever made its newest open call."""
        if event.parent_id:
            above, place = self._runs.get(event.parent_id), self._anchored.get(event.parent_id)
        else:
            above, place = next(reversed(server.open.values()), None), None
        if above is not None and above.server is server:
            return _Run(server, above.tree, above.below())
        if place is None:
            raise HttpError(403, NOT_YOURS.format(run=event.run_id))
        return _Run(server, *place)

    def _adopted(self, run: _Run, event: Reported) -> ForeignNode | None:
        """The run as one of ours; None when there are too many, which its parent's log says once."""
        tree = self._down.supervisor.trees.get(run.tree)
        parent = None if tree is None else tree.nodes[run.parent]
        if parent is not None and parent.depth >= DEEPEST:
            raise HttpError(403, f"runs are nested deeper than {DEEPEST}")
        key = run.server.name, run.tree
        self._made[key] += 1
        if self._made[key] > MOST_RUNS and parent is not None and tree is not None:
            if self._made[key] == MOST_RUNS + 1:
                reason = f"server '{run.server.name}' reports more than {MOST_RUNS} runs; the rest is not shown"
                tree.write(parent, Gap(1, reason))
            return None
        node = self._down.supervisor.adopt(run.tree, run.parent, event, server=run.server.name)
        if node is None:
            raise HttpError(409, f"the run that made the call of '{event.run_id}' has ended: it is not wanted any more")
        self._runs[event.run_id], node.give_up = run, run.give_up
        return node

    def _may_say(self, run: _Run, size: int) -> bool:
        key = run.server.name, run.tree
        self._said[key] += 1
        self._size[key] += size
        if self._said[key] <= MOST_EVENTS and self._size[key] <= MOST_MIB * 1024 * 1024:
            return True
        if run.node is not None and not run.cut:
            run.cut = True
            most = f"{MOST_EVENTS} events or {MOST_MIB} MiB"
            run.node.gap(f"server '{run.server.name}' reports more than {most}; the rest is not shown")
        return False


def _how(node: ForeignNode | None) -> str:
    return "" if node is None or node.view.status is None else f" ({node.view.status})"
