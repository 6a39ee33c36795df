"""The ports: what each room asks of the rooms below it. Every one has at least two implementations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from retinue.core.approvals import Approval, Decision
from retinue.core.errors import LogError
from retinue.core.events import Body, Delta, Event, RunSpawned, RunWaiting
from retinue.core.limits import Limits
from retinue.core.messages import Call, Reply, RunRef, ToolSpec, Turn, UserTurn
from retinue.core.profiles import Profile, Task
from retinue.core.results import Ending, Result, Status
from retinue.core.round_state import RoundState
from retinue.core.rules import Verdict
from retinue.core.servers import ServerReport
from retinue.core.teams import TeamState
from retinue.core.usage import NO_USAGE, Usage

T = TypeVar("T")


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a tool call. `data` is for programs (never written to the log); `file` holds text that was cut.
    `code` says for programs how a call went that has no ordinary result; `sandbox` names the protections, with
    the first call of a sandbox; `gives` are the background runs whose answers the text has. With an `ending` the run
    ends when the turn does."""

    text: str
    success: bool = True
    data: Any = None
    file: str = ""
    code: str = ""
    sandbox: tuple[str, ...] = ()
    gives: tuple[int, ...] = ()
    ending: Ending | None = None


class Setup(msgspec.Struct, frozen=True, gc=False):
    """A command of the user's that is run in a new copied workspace before the run begins."""

    command: str
    seconds: float


class Made(msgspec.Struct, frozen=True, gc=False):
    """The answer to a call that a program made: a value as JSON, or the words of what went wrong. `note` is for the
    model, which did not see the call."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    note: str = ""


Preview = Callable[[], Awaitable[str]]


async def skip_preview() -> str:
    """Show nothing beside the arguments of a call. A Preview."""
    return ""


class Folders(Protocol):
    """The folders that a run may read and write, as its tools see them."""

    @property
    def workspace(self) -> Path:
        """The folder the run may write; made when first asked for."""

    @property
    def roots(self) -> Sequence[Path]:
        """The folders the run may read, its workspace first."""

    @property
    def search_roots(self) -> Sequence[Path]:
        """The roots that a search looks in when it names no folder."""

    @property
    def hidden_paths(self) -> Sequence[str]:
        """Patterns of paths that a search does not look into, because a rule denies or asks about reading them."""

    def spill(self, name: str) -> Path:
        """Return a new file of the run's own for text that does not fit inline."""


class Tool(Protocol):
    """Something a model can call, as the loop on the host sees it. Raises ToolError with words for the model."""

    @property
    def spec(self) -> ToolSpec: ...

    def __call__(self, call: Call, folders: Folders, link: Link) -> Awaitable[Outcome]: ...

    async def preview(self, call: Call, folders: Folders) -> str:
        """Return what a person should see before saying yes: a diff for an edit, the command for a shell.

        Asked for only if a person will be asked. Raises ToolError for a call that cannot work; then nobody is asked."""


class Execution(Protocol):
    """One call of a local tool at work: what the tool may use, in this process or inside a sandbox."""

    @property
    def folders(self) -> Folders: ...

    @property
    def path(self) -> str:
        """The path of the run that calls."""

    async def wait_for_expiry(self) -> None:
        """Return when the host says that the call's time is over; its clock starts with the first wait."""

    async def call_tool(self, name: str, args: dict[str, Any]) -> Made:
        """Call an MCP tool of the run for a program of code mode. Raises only what ends the run."""

    def show_output(self, data: bytes, *, is_cut: bool = False) -> None:
        """Show a piece of output to whoever watches now. May be dropped. `is_cut` says that some is missing before
        it."""


class LocalTool(Protocol):
    """A tool that touches files, processes or the network: it runs where its run's sandbox is."""

    @property
    def spec(self) -> ToolSpec: ...

    def time_limit(self, call: Call) -> float | None:
        """Return the seconds a call may take, by its arguments; None without a limit. Raises ToolError."""

    def preview(self, call: Call, folders: Folders) -> str: ...

    def __call__(self, call: Call, execution: Execution) -> Awaitable[Outcome]: ...


class SandboxSession(Protocol):
    """Previews and executes the file, shell and code calls of a run."""

    async def preview(self, tool: LocalTool, call: Call, folders: Folders) -> str: ...

    def execute(self, tool: LocalTool, call: Call, execution: Execution) -> Awaitable[Outcome]: ...


class RunSession(SandboxSession, Protocol):
    """The sandbox and the workspace of one run. Both are made by the first call that needs them."""

    @property
    def setup(self) -> Setup | None:
        """The user's command that has to run in the new workspace before the run begins."""

    @property
    def has_copy(self) -> bool:
        """True if the run works in a copy of a folder, which `make_workspace` has to make."""

    def runs_tool(self, name: str) -> bool:
        """Tell whether calls of this local tool are executed here; the others run in the supervisor's process."""

    async def make_workspace(self) -> None:
        """Make the run's workspace, if that has not been done."""

    async def close(self) -> None:
        """End the sandbox with everything in it. Always finishes; when cancelled meanwhile, in a hurry."""


class Order(msgspec.Struct, frozen=True, gc=False):
    """A wish for a child run. `queue` waits for a free slot; without it a full tree refuses. `files` keeps the
    run's log and status as files too, for callers whose replies name them. `continues` is the run whose thread it goes
    on with, in a replay; `limits` are those a primary was given with its task."""

    profile: str | Profile
    task: Task
    call_id: str = ""
    background: bool = False
    queue: bool = True
    files: bool = False
    asked_by_model: bool = True
    continues: int | None = None
    limits: Limits | None = None


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """A child that was made."""

    run: int
    ref: RunRef
    workspace: str
    timeout_seconds: float | None
    status_file: str


class Row(msgspec.Struct, frozen=True, gc=False):
    """One run in a list: what it is, where it stands. `timeout_seconds` is its whole time; `last_message` the newest
    text of its model."""

    run: int
    parent: int | None
    path: str
    label: str
    agent: str
    subagent_id: str
    state: str
    status: str | None
    task: str
    workspace: str
    created_at: float
    result: Result[Any] | None = None
    call_id: str = ""
    timeout_seconds: float | None = None
    started_at: float | None = None
    turns: int = 0
    tool_count: int = 0
    last_message: str = ""


class HandedFiles(msgspec.Struct, frozen=True, gc=False):
    """Files that a run hands over, by name: those that were `found`, and why others were `refused`."""

    found: Mapping[str, bytes] = {}
    refused: Mapping[str, str] = {}


class Link(Protocol):
    """The one way between a run and the supervisor. In process these are plain calls."""

    @property
    def ref(self) -> RunRef: ...

    @property
    def task(self) -> Task: ...

    @property
    def emit(self) -> Callable[[Body], Any]:
        """Takes a fact; it appears when its batch is written."""

    def write_calls(self, calls: Sequence[tuple[Call, ToolSpec]]) -> None:
        """Write several calls of one reply, before any of them begins. After a crash the log has all of them or
        none."""

    async def begin(self, call: Call, spec: ToolSpec, preview: Preview) -> Decision:
        """Write the call, unless it is written already, and say whether it may run, by the policy or by a person, who
        sees the preview. Raises Unconfirmed when nobody can be asked, and the preview's ToolError.

        A call that must not happen twice is on disk before the answer comes."""

    def finish(self, call: Call, outcome: Outcome, duration_ms: int) -> None:
        """Write what the model will see of the outcome."""

    async def complete(self, turn: int, system: str, thread: list[Turn], tools: tuple[ToolSpec, ...]) -> Reply:
        """Return one model call, lent by the host, which writes what came of it."""

    def lend(self, call: Call) -> Awaitable[Outcome]:
        """Run a tool that lives on the host."""

    def withdraw(self, call: Call) -> None:
        """Give a call its result that a program made and does not wait for any more. Does nothing in a run that is
        being stopped, which ends as a whole."""

    def show_output(self, call_id: str, text: str) -> None:
        """Show a piece of a call's output to whoever watches now."""

    def claim_call_id(self, wanted: str) -> str:
        """Return a call id that no other call of the run has."""

    def spill(self, name: str) -> Path:
        """Return a new file of the run's own, for a tool that runs with the supervisor: where the run can read it."""
        ...

    def record_activity(self) -> None:
        """Count something that happens in a call, though no event tells of it."""
        ...

    async def ask_person(
        self, name: str, args: dict[str, Any], preview: str, asker: Sequence[str] = ()
    ) -> Decision | None:
        """Ask a person, whatever the rules and the mode; None when nobody can be asked. `asker` are ids under which a
        run of a peer, below this one, may be reported: the question is then that run's."""
        ...

    def on_question(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        """Tell the listener when a person is asked about the run (True) and when that is over (False). Returns what
        ends this."""

    async def spawn(self, orders: Sequence[Order]) -> list[Ticket]:
        """Make child runs, all or none; raises SpawnRefused."""

    def wait(self, runs: Sequence[int]) -> Awaitable[list[Result[Any]]]:
        """Return the results of these runs below this one, when all have ended."""

    def agents(self) -> list[Row]:
        """Return the runs below this one."""

    def ticket(self, run: int) -> Ticket:
        """Return a run below this one as the tool that asked for it gets it. Raises ToolError, as the following do,
        for a run that is not below this one."""

    async def wait_for_any(self, runs: Sequence[int], seconds: float | None) -> None:
        """Wait until one of these has ended, at most so long."""

    async def cancel_run(self, run: int) -> bool:
        """Stop a run and all below it; False if there is nothing to stop."""

    async def send_message(self, run: int, text: str, *, seconds: float) -> Receipt:
        """Send a message of this run to another, and wait at most so long until that one has read it."""

    async def continue_run(self, run: int, text: str, *, seconds: float | None, call_id: str) -> Ticket:
        """Start a run from the conversation of an ended one. Raises ToolError if it cannot be."""

    def profiles(self) -> Sequence[Profile]:
        """Return the profiles a child may be made of."""

    def inbox(self) -> Sequence[UserTurn]:
        """Return what has come in since the last turn."""

    async def children_done(self) -> bool:
        """Wait until something came in or no background child is left; False when there was none. A conversation does
        not wait for its children here."""

    async def run_interruptible(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run the turns of one message of a conversation; None if the user interrupted them."""

    def keep_spoken(self) -> str:
        """Write what the model had said in a turn that was broken off, and return it."""
        ...

    def break_off_calls(self, calls: Sequence[Call]) -> dict[str, Outcome]:
        """Write the results of calls that the user interrupted, and return them by their ids."""
        ...

    async def wait_for_message(self, waiting: RunWaiting) -> bool:
        """Write that a conversation waits, and wait until something came in; False when it is to end."""

    @property
    def team_state(self) -> TeamState:
        """The answers and votes in the thread of this run, which leads a team."""

    def lead_team(self, team: Team) -> None:
        """Let the members below this run find their team."""

    async def join_team(self) -> Team:
        """Return the team that this run is a member of."""

    async def publish_workspace(self, name: str) -> str:
        """Copy the files of the run, as they are now, to where the runs beside it can read them. Return the folder;
        '' if there is nothing to read."""

    async def wait_for_others(self, awaited: Awaitable[None]) -> None:
        """Wait for other members of the team, without a slot; the time does not count as a stall."""

    @property
    def round_state(self) -> RoundState:
        """The rounds in the thread of this run."""

    async def read_handed_files(self, run: int, names: Sequence[str], limit: int) -> HandedFiles:
        """Read files at the top of the workspace that an ended run below this one hands over: its own, or that of the
        member that its team decided for. Follows no link, and reads no file over `limit` bytes."""

    def fit_event_text(self, text: str) -> tuple[str, str]:
        """Return text that fits an event, and the file with all of it if it had to be cut."""


class Team(Protocol):
    """The team as a member's calls reach it. Each waits until the member has something to do, or is done. Raises
    ToolError for what the member may not do now."""

    async def give_answer(self, link: Link, call_id: str, content: str) -> Outcome:
        """Take a new answer of the member with that link."""

    async def cast_vote(self, link: Link, call_id: str, choice: str, reason: str) -> Outcome:
        """Take the vote of the member with that link."""

    async def take_text(self, link: Link, turn: int, text: str) -> Outcome:
        """Take what a member said without calling a tool."""


class Approver(Protocol):
    """An async function that answers questions; its parameter may have any name. Cancelled when the question is no
    longer open."""

    def __call__(self, question: Approval, /) -> Coroutine[Any, Any, Decision]: ...


class Policy(Protocol):
    """Says what a call needs before it runs: of the primary or another run, which works in that folder."""

    def judge(self, spec: ToolSpec, args: dict[str, Any], *, primary: bool, workspace: str) -> Verdict: ...


class RuleBook(Protocol):
    """Keeps a rule that a person gave for the whole project, and has the policy follow it from now on."""

    def keep(self, rule: str) -> None:
        """Raise ConfigError when it cannot be kept."""


class Prices(Protocol):
    """Prices of model calls."""

    def price(self, model: str, usage: Usage, /) -> Decimal | None:
        """US dollars; None when nobody here knows, which is not the same as nothing."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Time, so that a test can own it."""

    def wall(self) -> float: ...
    def monotonic(self) -> float: ...
    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer: ...
    def sleep(self, seconds: float) -> Awaitable[None]: ...


Unfinished = Literal["live", "interrupted"]


class StoredTree(msgspec.Struct, frozen=True, gc=False):
    """A stored tree: its newest event, whether it has ended, and the process that writes it now, if one does. `origin`
    is the tree whose primary it continues; `reported` is the run id under which another process shows the tree too, as
    runs of a tree of its own."""

    tree: str
    spawned_at: float
    last_seq: int
    last_at: float
    ended: bool
    writer: int | None = None
    origin: str = ""
    reported: str = ""

    @property
    def is_reported(self) -> bool:
        return bool(self.reported)

    @property
    def is_live(self) -> bool:
        return self.writer is not None


class RunTally(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The part of a run that lists show beside its first event. `state` is its state by its own events alone,
    `stalled_seq` the newest warning that it makes no progress, `away` the seconds in which no process had it, or
    in which it waited for a message, as it does since `waiting_since`."""

    state: str
    last_seq: int
    started_at: float | None = None
    ended_at: float | None = None
    status: str | None = None
    duration_ms: int = 0
    changed_count: int = 0
    turns: int = 0
    tool_count: int = 0
    usage: Usage = NO_USAGE
    cost: Decimal = Decimal(0)
    unpriced: int = 0
    stalled_seq: int = 0
    away: float = 0.0
    waiting_since: float | None = None


class StoredRun(msgspec.Struct, frozen=True, gc=False):
    """A run of a stored tree without its texts: its first event, without profile and tools, and its tally.
    `is_reported` is that of its tree."""

    first: Event
    tally: RunTally
    is_reported: bool = False

    @property
    def ref(self) -> RunRef:
        event, body = self.first, self.first.body
        label, subagent_id = (body.label, body.subagent_id) if isinstance(body, RunSpawned) else ("", "")
        return RunRef(event.tree, event.run, event.path, label, event.agent, subagent_id)


class StoredLine(msgspec.Struct, frozen=True, gc=False):
    """One event as it is stored: its number in the tree, and its JSON with unknown fields and all."""

    seq: int
    line: bytes


class Removal(msgspec.Struct):
    """The outcome of removing trees. `held` names the parts of the log that another process writes just now: their
    trees stay."""

    removed: list[str] = []
    held: list[str] = []
    problems: list[str] = []
    freed_bytes: int = 0


OnProblem = Callable[[LogError], object]


def ignore_problem(_: LogError) -> None:
    """Read what can be read, and say nothing of the rest."""


class LogReader(Protocol):
    """Reads the trees of a project, whichever process writes them, and removes old ones. It waits for no writer, and
    sees committed events only. Where a part of the log cannot be read, `on_problem` is told and the rest is read. A
    `gap` with the code `damaged` is in the place of damaged events of a tree."""

    @property
    def location(self) -> str:
        """The place of the log, for messages."""

    async def list_trees(
        self,
        on_problem: OnProblem = ignore_problem,
        *,
        latest: int | None = None,
        only: Unfinished | None = None,
        reported: bool = True,
    ) -> list[StoredTree]:
        """Return the trees, the newest first: at most the `latest` of them, `only` those without an ending that a
        process runs (`live`) or none (`interrupted`), with or without those that another process shows (`reported`).
        The order is the log's, not that of the ids. Costs what the answer is long."""

    async def count_trees(self, *, reported: bool = True) -> int:
        """Count the trees, with or without those that another process shows."""

    async def read_status(self, tree: str) -> StoredTree:
        """Look for the writer first, then for the newest event: a tree that nobody writes gets no later one. Raises
        NotFound."""

    async def read_runs(self, trees: Sequence[str], on_problem: OnProblem = ignore_problem) -> list[StoredRun]:
        """Return the runs of these trees, tree after tree and each in the order they were made; nothing for a tree
        that is not there. Costs what the answer is long, however long the trees are."""

    async def find_runs(self, name: str, on_problem: OnProblem = ignore_problem) -> list[StoredRun]:
        """Return the runs with a name that is this one or begins with it: a path, a label, a subagent_id, or the tree
        of a primary. Runs of newer trees come first."""

    async def read(self, tree: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        """Return the events of a tree after that number, at most `limit`; none for a tree that is not there."""

    async def read_lines(self, tree: str, *, after: int = 0, limit: int | None = None) -> list[StoredLine]:
        """Return the same as they are stored."""

    def read_kind(
        self, kind: str, on_problem: OnProblem = ignore_problem, *, since: float = 0.0
    ) -> AsyncIterator[Event]:
        """Yield the events of one kind of all trees; those of a tree in their order. With `since`, only those that
        happened then or later: trees that were over by then are not read."""

    async def remove_trees(
        self, trees: Mapping[str, int], *, discard: Callable[[str], bool], dry_run: bool = False
    ) -> Removal:
        """Remove the events of trees whose newest event is the one given. `discard` is called for each while nobody
        can write it, and keeps it by returning False. With `dry_run` no event is removed."""

    async def check_health(self, on_problem: OnProblem = ignore_problem) -> str:
        """Check what is stored, the newest first, for as long as is reasonable; return what there is in a few words,
        empty for nothing."""


class Log(LogReader, Protocol):
    """The log of one process: it also appends, and shows what is appended to watchers of this process, none of whom it
    waits for. Each tree has one writing process. `ahead` says whether a run may ask its model before its first event
    is written.

    A wait that ends in LogError may be followed by one that succeeds: what could not be written is written later, in
    order. After LogLost nothing is written any more."""

    @property
    def ahead(self) -> bool: ...

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        """Take an event. With `wait`, the awaitable that comes back (if any) is done when the event is written."""

    async def claim(self, tree: str) -> None:
        """Take the right to append to a stored tree. Raises NotFound, or LogHeld while another process has it."""

    async def flush(self) -> None:
        """Wait until every event that was appended before is written. Raises LogError if one could not be."""

    def show(self, delta: Delta) -> None:
        """Show a delta to those who watch now."""

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        """Yield what is in the log after that number, then what happens, without a seam; ends with the tree."""

    async def close(self) -> None:
        """Write what is left and give up the right to write. Raises LogError for events that are lost."""


class CommitHook(Protocol):
    """Takes every event beside its commit, such as a report to the collector of a parent process. A run whose events
    it must take, and cannot, fails. It changes no event and no run: `RunStopper` has what it may ask for."""

    def take(self, event: Event, written: Awaitable[None] | None) -> Awaitable[None] | None:
        """Take an event that is handed to the log. What comes back is done when the event is written and, where a run
        must wait for that, taken."""

    async def settle(self, ref: RunRef) -> None:
        """Wait until every event of a run that is about to end is taken. Raises RetinueError if one could not be."""

    async def close(self) -> None: ...


class RunStopper(Protocol):
    """The part of the supervisor that a CommitHook may use."""

    def stop_run(self, tree: str, run: int, status: Status, *, failure: str = "") -> None:
        """Stop a run that is at work. With a `failure` it ends `failed`, with that text."""

    def warn_run(self, tree: str, run: int, text: str, *, code: str) -> bool:
        """Write a warning to a run; False if it has ended."""


class Collector(Protocol):
    """The receiver of what MCP servers that we start report of their subagents; it also knows what travels down to
    them.

    The MCP client asks it for these; it adopts what arrives as runs of the calling run's tree."""

    def environment(self, server: str) -> Mapping[str, str]:
        """Return what a server gets beside its own variables: an address of its own to report to, and how deep it may
        go."""

    def call(self, server: str, ref: RunRef, name: str, give_up: Callable[[], object] | None = None) -> str:
        """Mint the `runId` of one call of a subagent tool of that server, made by that run. `give_up` ends the call,
        for when the run it made is stopped here."""

    def meta(self, ref: RunRef) -> Mapping[str, Any]:
        """Return the `_meta` of a call made by that run: depth, deadline and budget that are left, and its trace."""

    def end_call(self, run_id: str, outcome: Outcome | None) -> None:
        """End what is still open below a call that came back, or that was given up (None)."""

    def end_server(self, server: str) -> None:
        """End the runs that a server reported, now that it has ended, and close its address."""


class ToolServers(Protocol):
    """The MCP servers there are, and the tools they have. `version` grows whenever those change."""

    @property
    def version(self) -> int: ...

    async def ready(self, profile: Profile | str | None, say: Callable[[str], object] | None = None) -> None:
        """Wait until every server that a run of the profile (None: any run) has tools from is there or has failed.
        `say` is told what is waited for, and what is odd about what came."""

    def find(self, entry: str | None) -> Mapping[str, ServerTool]:
        """Return the tools an entry of a profile means, by name: `mcp__SERVER`, `mcp__SERVER__TOOL`; None means all."""

    def lacks(self, entries: Sequence[Any] | None) -> Sequence[tuple[str, str]]:
        """Return what of these is not there: in our own words for the model, and in words for a person."""

    def explain_missing(self, tool: str) -> str:
        """Say why a tool that no run has now is missing, if it belongs to a server that is not available; else ''."""

    def reports(self) -> Sequence[ServerReport]:
        """Return how each server was found that was tried."""

    async def close(self) -> None: ...


class ServerTool(Protocol):
    """A tool of a server; called with the arguments and the context of the run that calls. `spec` is as it is now."""

    @property
    def spec(self) -> ToolSpec: ...

    def __call__(self, args: dict[str, Any], context: Any, /) -> Awaitable[Outcome]: ...


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The receipt of a message to a run. `queued`: written at place `seq` of the tree's order, read at the run's next
    turn, which is its first `turn.started` after that place. `delivered`: read at that `turn`, for whoever waited for
    it. `too_late`: it will have no next turn, and why. `elsewhere`: it is only watched here, and words do not reach
    it. Of a message to a team, `readers` are the members that got it."""

    state: Literal["queued", "delivered", "too_late", "elsewhere"]
    seq: int = 0
    why: str = ""
    turn: int | None = None
    readers: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return the receipt as a line for whoever sent the message."""
        match self.state:
            case "delivered":
                return f"delivered at turn {self.turn}"
            case "queued":
                return "queued: the run reads it at its next turn"
            case "too_late":
                return f"too late: {self.why}"
            case "elsewhere":
                return self.why
