"""Results of runs: one Result for every ending, with the texts shown to people and parents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Generic, Literal, cast, get_args

import msgspec

from retinue.core.errors import RetinueError
from retinue.core.usage import NO_USAGE, Usage

if TYPE_CHECKING:  # a bare `Result`, `RunHandle` or `Profile` is one of any output
    from typing_extensions import TypeVar

    OutputT = TypeVar("OutputT", default=Any)
    OutputT_co = TypeVar("OutputT_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    OutputT = TypeVar("OutputT")
    OutputT_co = TypeVar("OutputT_co", covariant=True)

Status = Literal["done", "refused", "failed", "limited", "timed_out", "cancelled", "disconnected"]
State = Literal["queued", "starting", "running", "waiting_approval", "waiting_children", "waiting", "stalled"]
EndingCode = Literal["", "unconfirmed"]
ENDING_CODES: tuple[EndingCode, ...] = get_args(EndingCode)
STATUSES: tuple[Status, ...] = get_args(Status)
FINAL_ANSWER = "final_answer"  # the tool by which a run with an output type gives its answer


class ToolLog(msgspec.Struct, frozen=True, gc=False):
    """One finished tool call in a line: its subject (`context`) and its result."""

    name: str
    display_name: str
    context: str
    result: str
    success: bool
    duration_ms: int | None = None


class UserReply(msgspec.Struct, frozen=True, gc=False):
    """A reply without tool calls. `to` names the message answered: `task`, `user`, `asker`, or `agent:N` for the
    notice about the ending of run N."""

    text: str
    to: str


class Ending(msgspec.Struct, frozen=True, gc=False):
    """The ending of a loop, before the supervisor writes it. `error` is None only for `done`.

    `code` is for programs: `unconfirmed` means the run had nobody to ask for approval."""

    status: Status
    text: str = ""
    error: str | None = None
    structured: Any = None
    code: EndingCode = ""


class ChangedFile(msgspec.Struct, frozen=True, gc=False):
    """A file that a run changed. `status` is added, modified or deleted."""

    status: str
    path: str


def format_changed_files(files: Sequence[ChangedFile], count: int) -> list[str]:
    """Return one line for each file, and a last line that counts the rest."""
    more = [f"and {count - len(files)} more"] if count > len(files) else []
    return [*(f"{file.status:<8} {file.path}" for file in files), *more]


class Contribution(msgspec.Struct, frozen=True, gc=False):
    """The contribution of one member to a team: its answers by label, its vote, and its usage. `vote` is empty if the
    member did not vote or abstained."""

    agent: str
    run: int
    model: str
    status: str
    answers: dict[str, str] = {}
    vote: str = ""
    reason: str = ""
    usage: Usage = NO_USAGE
    cost: Decimal | None = None
    id: str = ""


class TeamReport(msgspec.Struct, frozen=True, gc=False):
    """The way in which a team reached its answer. `presented` is the run whose workspace is handed over: the
    presenter, or the winner if nobody presents."""

    strategy: str
    winner: str
    reason: str
    presented: int | None
    contributions: tuple[Contribution, ...] = ()
    votes: dict[str, int] = {}


class RoundReport(msgspec.Struct, frozen=True, gc=False):
    """One round of a run. `basis` is its starting point: the evaluator's `tasks`, its `packet` or the run's own
    `checklist`; empty for the first round. `label` names its `answer`, and `snapshot` is a copy of the files with this
    answer. `chosen` marks the answer that the run decided for."""

    round: int
    label: str = ""
    answer: str = ""
    snapshot: str = ""
    chosen: bool = False
    basis: str = ""
    evaluator_run: int | None = None
    packet: str = ""
    tasks: dict[str, Any] | None = None


class Result(msgspec.Struct, Generic[OutputT_co], frozen=True, gc=False):
    """The result of an ended run. Encodes to the JSON that `--json` prints.

    `final_response` is the text given to the parent. `partial` is the last text of an unfinished run. `replies` are
    all replies without tool calls, in order; `final_response` has only the replies since the user's last message.
    `changed_files` are files changed in the run's own copied workspace, of `changed_count` in all. `sandbox` names the
    protections of the sandbox in which its tools ran, and is empty if no call needed one. `cost` is in US dollars, or
    None if a price is unknown. `code` is `unconfirmed` for a run that had nobody to ask. `team` has the contributions
    of a team's members; `workspace` and `changed_files` then belong to the presented work. `rounds` are the rounds of a
    run that answered several times."""

    name: str
    final_response: str
    total_turns: int
    tool_count: int
    tool_logs: tuple[ToolLog, ...]
    usage: Usage
    cost: Decimal | None
    success: bool
    duration_ms: int
    error_details: str | None
    status: Status
    tree: str
    run: int
    path: str
    label: str = ""
    subagent_id: str = ""
    workspace: str = ""
    structured: Any = None
    partial: str = ""
    warning: str | None = None
    changed_files: tuple[ChangedFile, ...] = ()
    changed_count: int = 0
    runtime: str = "inherited"
    sandbox: tuple[str, ...] = ()
    code: str = ""
    children: tuple[Result[Any], ...] = ()
    replies: tuple[UserReply, ...] = ()
    team: TeamReport | None = None
    rounds: tuple[RoundReport, ...] = ()
    parse: Callable[[Any], OutputT_co] | msgspec.UnsetType = msgspec.UNSET

    def output(self) -> OutputT_co:
        """Return the typed output of a run that is done. Raises RunFailed for every other ending.

        Without an `output` type in the profile, this is the final text."""
        if self.status != "done":
            raise RunFailed(self)
        if self.parse is msgspec.UNSET:
            return cast("OutputT_co", self.final_response if self.structured is None else self.structured)
        return self.parse(self.structured)

    @property
    def total_usage(self) -> Usage:
        """The tokens of the run and of all runs below it."""
        total = self.usage
        for child in self.children:
            total += child.total_usage
        return total

    @property
    def total_cost(self) -> Decimal | None:
        """The cost of the run and of all runs below it, or None if the cost of a call is unknown."""
        total = self.cost
        for child in self.children:
            below = child.total_cost
            total = None if total is None or below is None else total + below
        return total

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values. Leaves out `error_details`, `warning`, `code`, `team` and `rounds` if
        empty."""
        fields: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, parse=msgspec.UNSET, children=()))
        for name in ("error_details", "warning", "code", "team", "rounds"):
            if not fields[name]:
                del fields[name]
        fields["children"] = [child.to_json() for child in self.children]
        return fields


class RunFailed(RetinueError):
    """A run has no output to return. Raised by `Result.output()`."""

    def __init__(self, result: Result[Any]) -> None:
        super().__init__(result.error_details or f"run {result.path} ended {result.status}")
        self.result = result


WITHOUT_WORDS: tuple[Status, ...] = ("timed_out", "cancelled", "disconnected", "limited")  # see `ending_texts`


def ending_texts(status: str, *, name: str, primary: bool, detail: str = "") -> tuple[str, str]:
    """Return `final_response` and `error_details` for an ending that has no texts of its own.

    `detail` is the number of milliseconds of a timeout, or the reason of a limit."""
    who = "Run" if primary else "Subagent"
    match status:
        case "timed_out":
            return f"{who} timed out", f"{who} '{name}' timed out after {detail}ms"
        case "cancelled":
            return f"{who} cancelled", f"{who} '{name}' was cancelled"
        case "disconnected":
            return f"{who} ended unexpectedly", f"{who} '{name}' ended before returning a final state"
        case "limited":
            return f"{who} reached its limit", f"{who} '{name}' stopped: {detail}"
        case "refused":
            return f"{who} refused the request", f"{who} refused the request"
        case _:
            return "subagent returned an unrecognized run state", "subagent returned an unrecognized run state"


def stalled_texts(*, name: str, primary: bool, seconds: float) -> tuple[str, str]:
    """Return `final_response` and `error_details` of a run that was ended after `seconds` without activity."""
    who = "Run" if primary else "Subagent"
    return f"{who} timed out", f"{who} '{name}' timed out: stalled, nothing happened in it for {seconds:g} s"


def make_unconfirmed_ending(*, name: str, primary: bool, tool: str = "") -> Ending:
    """Return the ending of a run that needed approval while no approver was attached. `tool` is the tool to
    approve."""
    if primary:
        wanted = f" for {tool}" if tool else ""
        text = "Run requires confirmation"
        error = f"Run '{name}' requested confirmation{wanted}, and no approver is attached"
    else:
        text = "Subagent requires confirmation"
        error = f"Subagent '{name}' requested confirmation, which is not supported in nested runs"
    return Ending("failed", text, error, code="unconfirmed")
