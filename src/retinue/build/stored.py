"""The factory of the Control of stored trees, for commands that need no running process."""

from __future__ import annotations

from pathlib import Path

from retinue.build.logs import open_reader
from retinue.supervisor.stored_control import StoredControl
from retinue.workspaces.copies import CopiedWorkspace

__all__ = ["CopiedWorkspace", "open_stored_control"]


def open_stored_control(state: Path) -> StoredControl:
    """Return the Control of a project's stored trees, whichever process wrote them."""
    return StoredControl(open_reader(state), str(state))
