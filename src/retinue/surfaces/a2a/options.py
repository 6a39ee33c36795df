"""Options of an A2A server, and the screen of the user who started it. Contains only values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from retinue.core.control import ResumeOverrides
from retinue.core.profiles import Profile


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a server for one profile.

    The server runs at most `most_tasks` tasks at once. `profiles` are the profiles that a continued run may have had.
    `public_url` is the address given to clients, if it differs from the bound address. `tokens` maps client names to
    secrets; if it is empty, every client is admitted."""

    profile: Profile
    profiles: Sequence[Profile]
    host: str
    port: int
    public_url: str
    tokens: Mapping[str, str]
    pattern: Literal["supervisor", "subagent"]
    asks_client: bool
    on_disconnect: Literal["continue", "cancel"]
    most_tasks: int
    certificate: Path | None
    key: Path | None
    version: str

    @property
    def overrides(self) -> ResumeOverrides:
        """Return the profiles for resumed and continued runs, because the log cannot store them."""
        return ResumeOverrides(profiles=(self.profile, *self.profiles))


class OperatorScreen(msgspec.Struct, frozen=True):
    """Callbacks to the screen of the user who started the server. `say` shows a message. `show_task` shows a task from
    now on; it gets the id, a label for lines of the task, and a line about it."""

    say: Callable[[str], object]
    show_task: Callable[[str, str, str], object]
