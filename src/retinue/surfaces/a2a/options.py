"""Options of an A2A server, and the screen of the person who started it. Only values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from retinue.core.control import ResumeOverrides, RunHandle
from retinue.core.events import Event
from retinue.core.profiles import Profile


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a server of one profile, which works on at most `most_tasks` tasks at once. `profiles` are those that
    continued runs may have had; `public_url` is the address that clients are told, where that is another one; `tokens`
    are secrets by the name of their client, none lets everybody in."""

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
        """The profiles that resumed and continued runs get: the log cannot keep them."""
        return ResumeOverrides(profiles=(self.profile, *self.profiles))


class OperatorScreen(msgspec.Struct, frozen=True):
    """The screen of whoever started the server: notes, runs that begin, and every event."""

    say: Callable[[str], object]
    begin: Callable[[RunHandle, str, str], object]
    show: Callable[[Event], object]
