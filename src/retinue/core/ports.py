"""The ports: interfaces that let imports point down.

A port has two implementations, or is the role of one consumer with at most three methods. The supervisor and a replay
implement `Link`. Through its roles, and through `RunningTeam`, tools and the loop reach packages above them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from retinue.core.approvals import Approval, Decision
from retinue.core.caller import Caller
from retinue.core.errors import LogError
from retinue.core.events import Body, Delta, Event, RunSpawned, RunWaiting
from retinue.core.limits import Limits
from retinue.core.messages import Call, Reply, RunRef, SystemPrompt, ToolSpec, Turn, UserTurn
from retinue.core.profiles import Profile, Task
from retinue.core.results import Ending, Result, Status
from retinue.core.round_state import RoundState
from retinue.core.rules import Verdict
from retinue.core.teams import TeamState
from retinue.core.usage import NO_USAGE, Usage

T = TypeVar("T")
STATUS_FILE = "full_logs/status.json"  # in the folder of a run whose state is kept as files
Emit = Callable[[Body], Any]  # writes an event of a run


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a tool call. `data` is for programs and never written to the log. `file` has the whole text if it
    was cut. `code` tells programs why a call has no ordinary result. `sandbox` names the sandbox's protections, with
    its first call. `gives` are the background runs whose answers the text contains. With an `ending` the run ends with
    the turn."""

    text: str
    success: bool = True
    data: Any = None
    file: str = ""
    code: str = ""
    sandbox: tuple[str, ...] = ()
    gives: tuple[int, ...] = ()
    ending: Ending | None = None


class Setup(msgspec.Struct, frozen=True, gc=False):
    """A command of the user, with its timeout, to run in a new copied workspace before the run begins."""

    command: str
    seconds: float


class ProgramCallResult(msgspec.Struct, frozen=True, gc=False):
    """The answer to a tool call made by a program: a value as JSON, or an error message. `note` is for the model,
    which did not see the call."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    note: str = ""


class Folders(Protocol):
    """The folders that a run may read and write, as its tools see them."""

    @property
    def workspace(self) -> Path:
        """The folder the run may write. Created at the first access."""

    @property
    def roots(self) -> Sequence[Path]:
        """The folders the run may read, its workspace first."""

    @property
    def granted_paths(self) -> Sequence[str]:
        """The paths among the roots that the task of the run names. They are real paths and must not be resolved
        again: another run may have put a link there meanwhile."""

    @property
    def search_roots(self) -> Sequence[Path]:
        """The roots to search if a search names no folder."""

    @property
    def hidden_paths(self) -> Sequence[str]:
        """Patterns of paths that a search skips, because a rule denies reading them or asks about it."""

    def spill(self, name: str) -> Path:
        """Return a new file of the run for text that does not fit inline."""


Preview = Callable[[Call, Folders], Awaitable[str]]


async def skip_preview(call: Call, folders: Folders) -> str:
    """Return an empty preview: only the arguments of the call are shown. This is a Preview."""
    return ""


class Tool(Protocol):
    """A tool that a model can call, as the loop on the host sees it. Raises ToolError with a message for the model."""

    @property
    def spec(self) -> ToolSpec: ...

    def __call__(self, call: Call, folders: Folders, link: Link) -> Awaitable[Outcome]: ...

    async def preview(self, call: Call, folders: Folders) -> str:
        """Return the text to show a person before approval: a diff for an edit, the command for a shell.

        Called only if a person will be asked. Raises ToolError for a call that cannot work; then nobody is asked."""


class Execution(Protocol):
    """One running call of a local tool, with everything the tool may use, in this process or inside a sandbox."""

    @property
    def folders(self) -> Folders: ...

    @property
    def path(self) -> str:
        """The path of the calling run."""

    async def wait_for_expiry(self) -> None:
        """Wait until the host says that the call has timed out. The timeout starts with the first wait."""

    async def call_tool(self, name: str, args: dict[str, Any]) -> ProgramCallResult:
        """Call an MCP tool of the run for a program of code mode. Raises only exceptions that end the run."""

    def show_output(self, data: bytes, *, is_cut: bool = False) -> None:
        """Show a piece of output to current watchers. It may be dropped. `is_cut` means output is missing before this
        piece."""


class LocalTool(Protocol):
    """A tool that touches files, processes or the network. It executes in the sandbox of its run."""

    @property
    def spec(self) -> ToolSpec: ...

    def time_limit(self, call: Call) -> float | None:
        """Return the timeout of a call in seconds, given its arguments, or None for no limit. Raises ToolError."""

    def preview(self, call: Call, folders: Folders) -> str: ...

    def __call__(self, call: Call, execution: Execution) -> Awaitable[Outcome]: ...


class SandboxSession(Protocol):
    """A session that previews and executes the file, shell and code calls of a run."""

    async def preview(self, tool: LocalTool, call: Call, folders: Folders) -> str: ...

    def execute(self, tool: LocalTool, call: Call, execution: Execution) -> Awaitable[Outcome]: ...


class RunSession(SandboxSession, Protocol):
    """The sandbox and the workspace of one run. The first call that needs them creates them."""

    @property
    def setup(self) -> Setup | None:
        """The user's command to run in the new workspace before the run begins, or None."""

    @property
    def has_copy(self) -> bool:
        """Return True if the run works in a copy of a folder, which `make_workspace` has to make."""

    @property
    def needs_workspace(self) -> bool:
        """True if the workspace must be made before the run begins: a folder is moved there, and a resumed run could
        not find the folder again."""

    def runs_tool(self, name: str) -> bool:
        """Return True if calls of this local tool execute here. Other tools run in the supervisor's process."""

    async def make_workspace(self) -> None:
        """Create the run's workspace, unless it exists already."""

    async def close(self) -> None:
        """End the sandbox and everything inside. Always finishes; hurries if cancelled meanwhile."""


class SpawnOrder(msgspec.Struct, frozen=True, gc=False):
    """A request for a child run. With `queue` the run waits for a free slot; otherwise a full tree refuses the
    request. With `files` the run's log and status are also kept as files, for callers whose replies name them.
    `continues` is the run whose thread is continued, in a replay. `limits` are the limits given to a primary with its
    task."""

    profile: str | Profile
    task: Task
    call_id: str = ""
    background: bool = False
    queue: bool = True
    files: bool = False
    asked_by_model: bool = True
    continues: int | None = None
    limits: Limits | None = None


class SpawnedRun(msgspec.Struct, frozen=True, gc=False):
    """A child run that was created, as the tool that ordered it sees it. `status_file` is the path of its status file;
    empty if it has none."""

    run: int
    ref: RunRef
    workspace: str
    timeout_seconds: float | None
    status_file: str


class RunSummary(msgspec.Struct, frozen=True, gc=False):
    """One run in a list: its names and its state. `timeout_seconds` is its whole timeout. `last_message` is the newest
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
    """Files that a run hands over, by name: the contents of the `found` ones, and why others were `refused`."""

    found: Mapping[str, bytes] = {}
    refused: Mapping[str, str] = {}


class RunState(msgspec.Struct, frozen=True, gc=False):
    """The state of a run at one moment. `team` holds the answers and votes in its thread, if it leads a team. `rounds`
    holds its rounds. `runs_folder` has the folders of all runs of its tree, by number."""

    task: Task
    runs_folder: str
    team: TeamState
    rounds: RoundState


class Link(Protocol):
    """The only connection between a run and the supervisor. In process, its methods are plain calls.

    The link itself has the services that every run uses. The others are roles, one per consumer."""

    @property
    def ref(self) -> RunRef: ...

    @property
    def state(self) -> RunState: ...

    @property
    def emit(self) -> Emit:
        """A function that takes an event body. The event becomes visible when its batch is written."""

    def write_calls(self, calls: Sequence[tuple[Call, ToolSpec]]) -> None:
        """Write several calls of one reply before any of them begins. After a crash the log has all of them or
        none."""

    async def begin(self, call: Call, spec: ToolSpec, preview: Preview) -> Decision:
        """Write the call, unless already written, and return the decision about it. The policy decides, or a person
        after seeing the preview. Raises Unconfirmed if nobody can be asked, and the ToolError of the preview.

        A call that must not happen twice is on disk before this method returns."""

    def run_host_tool(self, call: Call) -> Awaitable[Outcome]:
        """Run a tool on the host."""

    def finish(self, call: Call, outcome: Outcome, duration_ms: int) -> None:
        """Write the outcome of a call as the model will see it."""

    def give_up(self, call: Call, text: str, duration_ms: int) -> None:
        """Write the text as the result of a call whose caller no longer waits. A call of a program ends with a run that
        is being stopped, and gets no result then."""

    async def complete(self, turn: int, system: SystemPrompt, thread: list[Turn], tools: tuple[ToolSpec, ...]) -> Reply:
        """Make one model call and return the reply. The host makes the call and writes its events."""

    def inbox(self) -> Sequence[UserTurn]:
        """Return the messages that arrived since the last turn."""

    async def children_done(self) -> bool:
        """Wait until a message arrives or no background child is left. Return False if there is no message. A
        conversation does not wait for its children here."""

    @property
    def children(self) -> ChildRuns: ...

    @property
    def commands(self) -> ChildCommands: ...

    @property
    def conversation(self) -> ConversationTurns: ...

    @property
    def team(self) -> TeamPlace: ...

    @property
    def files(self) -> FileExchange: ...

    @property
    def local_calls(self) -> LocalCalls: ...


class ChildRuns(Protocol):
    """The runs below a run, for the tools that spawn and list them. Raises ToolError for any other run."""

    async def spawn_runs(self, orders: Sequence[SpawnOrder]) -> list[SpawnedRun]:
        """Create child runs, all or none. Raises SpawnRefused."""

    async def wait_for(
        self, runs: Sequence[int], *, any: bool = False, seconds: float | None = None
    ) -> list[Result[Any]]:
        """Return the results of these runs, once all have ended. With `any`, wait for the first ending, for at most
        `seconds`, and return the results of the ended runs."""

    def list_runs(self) -> list[RunSummary]:
        """Return the runs below this run, ended ones too, in the order of creation."""


class ChildCommands(Protocol):
    """The commands of a run to the runs below it. Raises ToolError for any other run."""

    def cancel_run(self, run: int) -> bool:
        """Stop a run and all runs below it. Return False if there is nothing to stop."""

    async def send_message(self, run: int, text: str, *, seconds: float) -> Receipt:
        """Send a message to another run, and wait at most `seconds` until it is read."""

    async def continue_run(self, run: int, text: str, *, seconds: float | None, call_id: str) -> int:
        """Start a run from the conversation of an ended run, and return its number. Raises ToolError if the run cannot
        be continued."""


class BrokenTurn(msgspec.Struct, frozen=True, gc=False):
    """A turn that was broken off: the text `spoken` by the model so far, and the outcomes of the calls, by id."""

    spoken: str
    outcomes: Mapping[str, Outcome]


class ConversationTurns(Protocol):
    """The services for a run that answers message after message."""

    async def run_interruptible(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run the turns for one message. Return None if the user interrupted them."""

    def break_off_turn(self, calls: Sequence[Call]) -> BrokenTurn:
        """Write the text that the model produced in a turn that was broken off, and the results of the turn's
        unfinished `calls`."""
        ...

    async def wait_for_message(self, waiting: RunWaiting) -> bool:
        """Write that the conversation waits, and wait until a message arrives. Return False if the conversation should
        end."""


class TeamPlace(Protocol):
    """The place of a run in a team, as its leader or a member."""

    def lead_team(self, team: RunningTeam) -> None:
        """Let the member runs below this run find their team."""

    async def join_team(self) -> RunningTeam:
        """Return the team that this run is a member of."""

    async def wait_for_others(self, awaited: Awaitable[None]) -> None:
        """Wait for other members of the team without a slot. The time does not count as a stall."""


class FileExchange(Protocol):
    """The files that runs hand to each other."""

    async def publish_workspace(self, name: str) -> str:
        """Copy the current files of the run to a folder that its sibling runs can read. Return the folder, or '' if
        there is nothing to read."""

    async def read_handed_files(self, run: int, names: Sequence[str], limit: int) -> HandedFiles:
        """Read files at the top of the workspace that an ended run below this one hands over: its own workspace, or
        the workspace of the member its team decided for. Follows no links, and reads no file larger than `limit`
        bytes."""

    def fit_event_text(self, text: str) -> tuple[str, str]:
        """Return the text cut to fit an event, and the file with the whole text if it was cut."""
        ...


class LocalCalls(Protocol):
    """The services for the calls of local tools while they run."""

    def claim_call_id(self, wanted: str) -> str:
        """Return `wanted`, with a suffix if another call of the run has this id."""
        ...

    def show_output(self, call_id: str, text: str) -> None:
        """Show a piece of a call's output to current watchers."""

    def on_question(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        """Call `listener` with True when a person is asked about the run, and with False when the question is closed.
        Return a function that removes the listener."""


class RunningTeam(Protocol):
    """The team as its members' calls reach it. Each method waits until the member has something to do, or is done.
    Raises ToolError for an action that the member may not take now."""

    async def give_answer(self, link: Link, call_id: str, content: str) -> Outcome:
        """Take a new answer of the member with this link."""

    async def cast_vote(self, link: Link, call_id: str, choice: str, reason: str) -> Outcome:
        """Take the vote of the member with this link."""

    async def take_text(self, link: Link, turn: int, text: str) -> Outcome:
        """Take the text of a member that called no tool in this turn."""


class Approver(Protocol):
    """An async function that answers questions. Its parameter may have any name. It is cancelled when the question is
    no longer open."""

    def __call__(self, question: Approval, /) -> Coroutine[Any, Any, Decision]: ...


class AttachedApprover(msgspec.Struct, frozen=True):
    """An approver function that a supervisor asks, and the author (`by`) and `surface` of its answers in the log.
    `attends` returns True for a tree whose questions the function can answer now; None: it answers for all trees."""

    function: Approver
    by: str = "function"
    surface: str = ""
    attends: Callable[[str], bool] | None = None


class Policy(Protocol):
    """A policy that judges a call before it runs: allow, ask or deny. `primary` is True for a call of the primary;
    `workspace` is the working folder of the calling run."""

    def judge(self, spec: ToolSpec, args: dict[str, Any], *, primary: bool, workspace: str) -> Verdict: ...


class Prices(Protocol):
    """Prices of model calls."""

    def price(self, model: str, usage: Usage, /) -> Decimal | None:
        """Return the price in US dollars, or None if it is unknown. None does not mean free."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """A source of time that a test can control."""

    def wall(self) -> float: ...
    def monotonic(self) -> float: ...
    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer: ...
    def sleep(self, seconds: float) -> Awaitable[None]: ...


Unfinished = Literal["live", "interrupted"]


def name_process(pid: int | None) -> str:
    """Return a name for the process that writes a tree, for messages."""
    return "another process" if pid is None else f"process {pid}"


class StoredTree(msgspec.Struct, frozen=True, gc=False):
    """A stored tree: its newest event, and whether it has ended. `writer` is the id of the process that writes the
    tree now, equal to its `Log.writer`; `pid` is its process id, for people, if it runs on this machine. `origin` is
    the tree whose primary is continued. `reported` is the run id under which another process also shows the tree, as
    runs of a tree of its own."""

    tree: str
    spawned_at: float
    last_seq: int
    last_at: float
    ended: bool
    writer: str | None = None
    pid: int | None = None
    origin: str = ""
    reported: str = ""

    @property
    def is_reported(self) -> bool:
        return bool(self.reported)

    @property
    def is_live(self) -> bool:
        return self.writer is not None

    @property
    def is_at_work(self) -> bool:
        """True if the tree has not ended and its process is alive."""
        return self.is_live and not self.ended


class RunTally(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The figures of a run that lists show in addition to its first event. `state` is the state by the run's own events
    alone. `stalled_seq` is the newest warning about a lack of progress. `away` is the number of seconds in which no
    process had the run or it waited for a message. `waiting_since` is when the current wait for a message began."""

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
    `is_reported` is taken from its tree."""

    first: Event
    tally: RunTally
    is_reported: bool = False

    @property
    def ref(self) -> RunRef:
        event, body = self.first, self.first.body
        label, subagent_id = (body.label, body.subagent_id) if isinstance(body, RunSpawned) else ("", "")
        return RunRef(
            tree=event.tree, run=event.run, path=event.path, label=label, agent=event.agent, subagent_id=subagent_id
        )


class StoredLine(msgspec.Struct, frozen=True, gc=False):
    """An event as stored: its number in the tree, and its JSON including unknown fields."""

    seq: int
    line: bytes


class Removal(msgspec.Struct, frozen=True):
    """The outcome of removing trees. `held` names the parts of the log that another process is writing: their trees
    stay."""

    removed: list[str] = []
    held: list[str] = []
    problems: list[str] = []
    freed_bytes: int = 0


OnProblem = Callable[[LogError], object]


def ignore_problem(_: LogError) -> None:
    """Ignore a part of the log that cannot be read."""


class LogReader(Protocol):
    """A reader of the trees of a project, whichever process writes them. It also removes old trees. It waits for no
    writer and sees only committed events. If a part of the log cannot be read, it calls `on_problem` and reads the
    rest. A `gap` with the code `damaged` takes the place of damaged events of a tree.

    Nobody closes a reader, so it holds no file and no connection open between two calls. A log that nobody has written
    yet is empty."""

    @property
    def location(self) -> str:
        """The place of the log, for messages."""

    @property
    def cure(self) -> str:
        """The advice to a person about a part of the log that cannot be read."""

    async def list_trees(
        self,
        on_problem: OnProblem = ignore_problem,
        *,
        latest: int | None = None,
        only: Unfinished | None = None,
        reported: bool = True,
    ) -> list[StoredTree]:
        """Return the trees, newest first, in the order of the log and not of the ids.

        `latest` is the maximum number of trees. `only` selects trees without an ending: `live` if a process runs them,
        `interrupted` if none does. Without `reported`, leave out trees that another process also shows. The cost grows
        with the number of trees returned."""

    async def count_trees(self, *, reported: bool = True) -> int:
        """Count the trees. Without `reported`, leave out trees that another process also shows."""

    async def read_status(self, tree: str) -> StoredTree:
        """Return the state of a tree. Reads the writer first, then the newest event: a tree without a writer gets no
        later event. Raises NotFound."""

    async def read_runs(self, trees: Sequence[str], on_problem: OnProblem = ignore_problem) -> list[StoredRun]:
        """Return the runs of these trees, tree by tree, each in the order of creation. An unknown tree has no runs.
        The cost grows with the number of runs, not with the length of the trees."""

    async def find_runs(self, name: str, on_problem: OnProblem = ignore_problem) -> list[StoredRun]:
        """Return the runs with a name that equals `name` or begins with it: a path, a label, a subagent_id, or the
        tree of a primary. Runs of newer trees come first."""

    async def read(self, tree: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        """Return the events of a tree after number `after`, at most `limit`. An unknown tree has no events."""

    async def read_lines(self, tree: str, *, after: int = 0, limit: int | None = None) -> list[StoredLine]:
        """Return the same events as `read`, as stored lines."""

    def read_kind(
        self, kind: str, on_problem: OnProblem = ignore_problem, *, since: float = 0.0
    ) -> AsyncIterator[Event]:
        """Yield the events of one kind from all trees, in order within each tree. With `since`, yield only events at
        or after this time; trees already over by then are not read."""

    async def remove_trees(
        self, trees: Mapping[str, int], *, discard: Callable[[str], Awaitable[bool]], dry_run: bool = False
    ) -> Removal:
        """Remove the events of trees whose newest event still has the number given in `trees`. `discard` is awaited for
        each tree while nobody can write it; the tree stays if it returns False. With `dry_run` no event is removed."""

    async def adopt_events(self) -> None:
        """Make the user the owner of all stored events, whoever wrote them. Raises LogError if a part of the log cannot
        be read, or while another process writes it."""

    async def check_health(self, on_problem: OnProblem = ignore_problem) -> str:
        """Check the stored events, newest first, for a reasonable time. Return a short summary of the log, empty if
        nothing is stored."""


class Log(LogReader, Protocol):
    """The log of one process, which also appends events and shows them to watchers in this process, without waiting
    for any watcher. Each tree has a single writing process. `ahead` is True if a run may ask its model before its
    first event is written. The log is opened in the event loop whose tasks append to it, and opening may block.

    Events of one tree, appended in a row without a return to the event loop, are written together: after a crash, a
    failed write or a loss, the log has all of them or none. After a LogError a later wait may succeed: unwritten events
    are written later, in order. After LogLost nothing is written any more, and nothing is taken."""

    @property
    def ahead(self) -> bool: ...

    @property
    def writer(self) -> str:
        """The id under which this process writes, for others to find it by (`StoredTree.writer`). No two processes
        have the same one, on whatever machines or in whatever containers they run."""

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        """Append an event. With `wait`, the returned awaitable (if any) is done when the event is written. Raises
        LogLost as soon as the loss of the right to write is known."""

    async def claim(self, tree: str) -> None:
        """Take the right to append to a stored tree. Raises NotFound, or LogHeld while another process has the
        right."""

    async def flush(self) -> None:
        """Wait until all events appended so far are written. Raises LogError if one could not be written."""

    def show(self, delta: Delta) -> None:
        """Show a delta to current watchers."""

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        """Yield the events of a tree after number `after`, then new events as they happen, without a gap. With
        `deltas`, yield deltas too. Ends with the tree."""

    async def close(self) -> None:
        """Write the remaining events and give up the right to write. Raises LogError for events that are lost."""


class CommitHook(Protocol):
    """A receiver of every event while it is committed, such as a reporter to the collector of a parent process. A run
    fails if the hook must take its events and cannot. The hook changes no event and no run: `ReportedRuns` has the
    requests it may make."""

    def take(self, event: Event, written: Awaitable[None] | None) -> Awaitable[None] | None:
        """Take an event that is handed to the log. The returned awaitable is done when the event is written and, if
        the run must wait for the hook, taken."""

    async def settle(self, ref: RunRef) -> None:
        """Wait until every event of a run that is about to end is taken. Raises RetinueError if one could not be
        taken."""

    async def close(self) -> None: ...


class ReportedRuns(Protocol):
    """The part of the supervisor that a CommitHook may use."""

    def find_served_caller(self) -> Caller | None:
        """Return the caller of the call that the current task serves."""

    def stop_run(self, tree: str, run: int, status: Status, *, failure: str = "") -> None:
        """Stop a run that is at work. With a `failure` it ends as `failed`, with this text."""

    def warn_run(self, tree: str, run: int, text: str, *, code: str) -> bool:
        """Write a warning to a run. Return False if the run has ended."""


class Collector(Protocol):
    """The receiver of reports about the subagents of MCP servers started by us. The MCP client also asks it for the
    limits and ids to pass down to these servers. Reported runs are adopted into the tree of the calling run."""

    def environment(self, server: str) -> Mapping[str, str]:
        """Return the extra environment variables of a server: its own address to report to, and the depth allowed to
        it."""

    def call(self, server: str, ref: RunRef, name: str, give_up: Callable[[], object] | None = None) -> str:
        """Create the `runId` for one call of a subagent tool of `server`, made by the run `ref`. `give_up` ends the
        call if the run it created is stopped here."""

    def meta(self, ref: RunRef) -> Mapping[str, Any]:
        """Return the `_meta` of a call made by the run `ref`: its remaining depth, deadline and budget, and its
        trace."""

    def end_call(self, run_id: str, outcome: Outcome | None) -> None:
        """End the runs still open below a call after it returned or was given up (`outcome` is None)."""

    def end_server(self, server: str) -> None:
        """End the runs that a server reported, after the server has ended, and close its address."""


class ServerStarter(Protocol):
    """The MCP servers, as the supervisor sees them. It prepares them before it spawns a run."""

    async def ready(self, profile: Profile | str | None, say: Callable[[str], object] | None = None) -> None:
        """Wait until every server with tools for a run of `profile` (None: any run) is connected or has failed. Tell
        `say` which servers are awaited, and any oddities of their tools."""


class ServerTools(Protocol):
    """The tools of the MCP servers, as the planner sees them. `version` grows whenever they change."""

    @property
    def version(self) -> int: ...

    def find(self, entry: str | None) -> Mapping[str, ServerTool]:
        """Return the tools that an entry of a profile means, by name: `mcp__SERVER`, `mcp__SERVER__TOOL`; None means
        all."""

    def lacks(self, entries: Sequence[Any] | None) -> Sequence[tuple[str, str]]:
        """Return the missing entries, each as two messages: one in our own words for the model, and one for a
        person."""


class ServerTool(Protocol):
    """A tool of an MCP server, called with the arguments and the context of the calling run. `spec` is the current
    one."""

    @property
    def spec(self) -> ToolSpec: ...

    def __call__(self, args: dict[str, Any], context: Any, /) -> Awaitable[Outcome]: ...


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The receipt of a message to a run.

    `queued`: written with number `seq`; the run reads the message at its next turn, the first `turn.started` after
    `seq`. `delivered`: read at `turn`, for a sender that waited. `too_late`: the run has no next turn; `why` is the
    reason. `elsewhere`: the run is only watched here and out of reach of messages. `readers` are the members that got
    a message to a team."""

    state: Literal["queued", "delivered", "too_late", "elsewhere"]
    seq: int = 0
    why: str = ""
    turn: int | None = None
    readers: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return the receipt as one line for the sender."""
        match self.state:
            case "delivered":
                return f"delivered at turn {self.turn}"
            case "queued":
                return "queued: the run reads it at its next turn"
            case "too_late":
                return f"too late: {self.why}"
            case "elsewhere":
                return self.why
