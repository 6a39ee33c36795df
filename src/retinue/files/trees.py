"""Folder trees as a whole: removing and measuring them while others may change them."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress

from retinue.files.opening import AnyPath, stat_entry

BLOCK_BYTES = 512


def remove_tree(folder: AnyPath) -> bool:
    """Remove a folder and all below it as far as possible; return whether it is gone. Links are not followed."""
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def measure_folder(folder: AnyPath) -> int:
    """Return the bytes that the regular files below a folder take on disk; links are not followed."""
    total = 0
    with suppress(OSError):
        for _, _, names, at in os.fwalk(folder):
            for name in names:
                status = stat_entry(name, at)
                if status is not None and stat.S_ISREG(status.st_mode):
                    total += status.st_blocks * BLOCK_BYTES
    return total
