"""Making a process undumpable, so that commands it runs (same uid) cannot read its memory or environment.

Used by the tool server of a sandbox, and by the host, whose environment has the keys of the models.
"""

from __future__ import annotations

import ctypes
import sys

_SET_DUMPABLE = 4


def hide_process() -> None:
    """Make /proc show this process's memory, descriptors and environment to root only.

    Does not affect child processes. Does nothing on systems other than Linux, which have no such /proc."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot be hidden from its commands")
