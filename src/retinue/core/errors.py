"""Errors, by who has to act on them. A run that fails is a Result, not one of these."""

from __future__ import annotations

from collections.abc import Sequence

from retinue.core.usage import NO_USAGE, Usage, repair_usage

DEPTH_EXCEEDED = (
    "Subagent depth limit exceeded ({depth}/{limit}). "
    "Cannot spawn nested subagent '{name}' \u2014 maximum nesting depth reached."
)
NO_SLOT = (
    "Cannot spawn subagent '{name}': maximum concurrent subagent limit reached. "
    "Try again when another subagent completes."
)


class RetinueError(Exception):
    """Base of everything retinue raises on purpose; its text is one line a person can act on."""


class ConfigError(RetinueError):
    """A file, option or value given by a person is wrong; the text names file, line and key."""


class NotFound(ConfigError):
    """A name given by a person names nothing here (a run, a profile, a model)."""


class Ambiguous(ConfigError):
    """A name given by a person could mean several things; `candidates` describes each on one line."""

    def __init__(self, name: str, candidates: Sequence[str]) -> None:
        self.summary = f"'{name}' could be any of"
        self.candidates = tuple(candidates)
        super().__init__(f"{self.summary} {'; '.join(candidates)}")


class OutputFailed(RetinueError):
    """stdout cannot be written: its disk is full, or it fails. A reader that is gone is a BrokenPipeError instead."""

    def __init__(self, why: str) -> None:
        super().__init__(f"cannot write to stdout: {why}")


class LogError(RetinueError):
    """The log cannot be written or read; nothing after the last acknowledged event is promised."""


class LogVersionError(LogError):
    """A part of the log was written by another version of Retinue."""


class LogDamaged(LogError):
    """A part of the log is not as it was written."""


class LogHeld(LogError):
    """Another process has the right to write a tree; `pid` is its number, 0 while that is not known."""

    def __init__(self, message: str, *, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


class LogLost(LogError):
    """This process has lost the right to write the log. Final: the events it had not written are never written, and
    writing them again is no use."""


class SpawnRefused(RetinueError):
    """A spawn that made no run. The text goes to the model as the tool's result."""


class NoSlot(SpawnRefused):
    """Refused because as many runs as may run at once are running."""


class ToolError(RetinueError):
    """A tool says no, in words for the model; the run goes on."""


class ModelError(RetinueError):
    """The provider answered with an error; `status` is its HTTP status where it has one.

    `usage` is what the failed call spent all the same, as far as it is known or `estimated`; `partial` is the text that
    had arrived. `transient` says that
    the same request may work later, `retry_after` how many seconds later the provider wants it."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        usage: Usage = NO_USAGE,
        partial: str = "",
        transient: bool = False,
        retry_after: float | None = None,
        estimated: bool = False,
    ) -> None:
        if status is not None:
            what = "Server error" if status >= 500 else "Rate limited" if status == 429 else "Request rejected"
            message = f"{what} ({status}): {message}"
        super().__init__(message)
        self.status = status
        self.usage = repair_usage(usage)
        self.partial = partial
        self.transient = transient
        self.retry_after = retry_after
        self.estimated = estimated


class StreamCut(ModelError):
    """The provider's stream ended in the middle; no tool of an incomplete reply ever runs."""


class CallCancelled(BaseException):
    """A model call was cancelled after it had begun to cost. `usage` is what is known of it; `estimated` says that
    the provider had not told all of it yet; `partial` is the text that had arrived. Stands for the CancelledError of
    the loop, which the link raises again."""

    def __init__(self, usage: Usage, *, estimated: bool, partial: str = "") -> None:
        super().__init__("the model call was cancelled")
        self.usage = repair_usage(usage)
        self.estimated = estimated
        self.partial = partial


class Stop(Exception):
    """Base of what ends a loop early; the supervisor turns it into the run's one ending."""


class Limited(Stop):
    """A limit of the run is spent; the text says which. `usage` is what a call spent that is not made once more, as far
    as it is known or `estimated`."""

    usage: Usage = NO_USAGE
    estimated: bool = False


class TurnsSpent(Limited):
    """The run has had all its turns. A conversation waits for the next message then."""


class Failed(Stop):
    """The run cannot go on; the text says why."""


class Unconfirmed(Stop):
    """A call needs a person and no approver is attached."""


class ApproverLeft(Exception):
    """An approver cannot answer any more, because its terminal was closed. The question stays open for others."""


class Disconnected(Stop):
    """The run's process went away before it gave an ending; the text says what is known of that."""
