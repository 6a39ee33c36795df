"""The layout of a state folder: the names of its parts, and the folders of trees and runs in it."""

from __future__ import annotations

import re
from pathlib import Path

from retinue.files.opening import AnyPath

LOG_FOLDER = "logs"  # of a log in files, whose owner is checked here too; build/logs.py gives it to the log
RUNS_FOLDER = "runs"
OUTBOX_FOLDER = "outbox"
APPLY_FOLDER = "applying"
STATE_FOLDERS = (LOG_FOLDER, RUNS_FOLDER, "control", OUTBOX_FOLDER, APPLY_FOLDER, "mcp", "a2a")
_TREE_ID = re.compile(r"[0-9a-z]+")


def name_run_folder(state: AnyPath, tree: str, run: int) -> str:
    """Return the path of the folder of a run, in the state folder `state`."""
    return f"{state}/{RUNS_FOLDER}/{tree}/{run}"


def find_state_folder(own: AnyPath) -> Path:
    """Return the state folder that a run's folder is in."""
    return Path(own).parents[2]


def find_tree_folder(state: AnyPath, tree: str) -> Path | None:
    """Return the path of the folder of a tree, which need not exist. Returns None if the id is not in our format: an id
    from a log must not lead to another path."""
    return Path(state, RUNS_FOLDER, tree) if _TREE_ID.fullmatch(tree) else None
