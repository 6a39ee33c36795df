"""Errors, grouped by the party that has to act on them. A failed run is a Result, not an error."""

from __future__ import annotations

import errno
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
    """Base of all errors that Retinue raises on purpose. The text is a single line for a person to act on."""


class ConfigError(RetinueError):
    """A file, option or value given by a person is wrong; the text names file, line and key."""


class ControlUnreachable(RetinueError):
    """The process of a control server is gone or no longer answers."""


class ReplyTimeout(ControlUnreachable):
    """The process of a control server is there, but has not replied in time. If it goes on, for instance because it was
    stopped, a command that was sent to it still takes effect."""


class NotFound(ConfigError):
    """A name given by a person matches nothing (no run, profile or model)."""


class Ambiguous(ConfigError):
    """A `name` given by a person could mean several things; `candidates` describes each on one line."""

    def __init__(self, name: str, candidates: Sequence[str]) -> None:
        self.name = name
        self.summary = f"'{name}' could be any of"
        self.candidates = tuple(candidates)
        super().__init__(f"{self.summary} {'; '.join(candidates)}")


class OutputFailed(RetinueError):
    """A failed write to stdout, for instance on a full disk. If the reader is gone, a BrokenPipeError is raised
    instead."""

    def __init__(self, error: OSError, hint: str = "") -> None:
        self.error = error
        why = "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)
        super().__init__(f"cannot write to stdout: {why}{hint}")


class LogError(RetinueError):
    """The log cannot be written or read. Events after the last acknowledged event may be lost."""


class LogVersionError(LogError):
    """A part of the log was written by another version of Retinue."""


class LogDamaged(LogError):
    """A part of the log has changed since it was written."""


class LogHeld(LogError):
    """Another process holds the right to write a tree. `writer` is its id in the log, as in `StoredTree`."""

    def __init__(self, message: str, *, writer: str) -> None:
        super().__init__(message)
        self.writer = writer


class LogLost(LogError):
    """This process has lost the right to write the log. This is final: its unwritten events are never written, and a
    retry cannot succeed. The tree stops its runs, because they would act without a trace."""


class SpawnRefused(RetinueError):
    """A spawn that created no run. The model reads the text as the tool's result."""


class NoSlot(SpawnRefused):
    """A spawn refused because the maximum number of runs is already running."""


class ToolError(RetinueError):
    """A refusal by a tool, with a message for the model. The run continues."""


class SpentUsage:
    """The usage of failed model calls, a part of their exception. `usage` is `estimated` if the provider had not
    reported everything."""

    usage: Usage = NO_USAGE
    estimated: bool = False

    def add_usage(self, usage: Usage, *, estimated: bool = False) -> None:
        """Add the usage of earlier calls for the same request."""
        self.usage = usage + self.usage
        self.estimated = estimated or self.estimated


class ModelError(SpentUsage, RetinueError):
    """An error response from the provider. `status` is its HTTP status, if any.

    `usage` is the usage of the failed call, as far as known or `estimated`. `partial` is the text received before the
    error. `transient` means the same request may work later; `retry_after` is the delay in seconds asked for by the
    provider."""

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
    """A provider's stream ended in the middle. No tool call of an incomplete reply ever runs."""


class CallCancelled(SpentUsage, BaseException):
    """A model call was cancelled after it had begun to cost. `usage` is the known part of its usage; `estimated` means
    the provider had not reported everything. `partial` is the text received so far. This exception replaces the
    CancelledError of the loop, which the link raises again."""

    def __init__(self, usage: Usage, *, estimated: bool, partial: str = "") -> None:
        super().__init__("the model call was cancelled")
        self.usage = repair_usage(usage)
        self.estimated = estimated
        self.partial = partial


class Stop(Exception):
    """Base of the exceptions that end a loop early. The supervisor turns each into the ending of the run."""


class Limited(SpentUsage, Stop):
    """A limit of the run is used up; the text says which. `usage` is the usage of a call that is not retried, as far
    as known or `estimated`."""


class TurnsSpent(Limited):
    """The run has used all its turns. A conversation then waits for the next message."""


class Failed(Stop):
    """The run cannot continue; the text says why."""


class Unconfirmed(Stop):
    """A call needs approval and no approver is attached."""


class ApproverLeft(Exception):
    """An approver can no longer answer because its terminal was closed. The question stays open for others."""


class Disconnected(Stop):
    """The run's process disappeared before giving an ending; the text has the known details."""
