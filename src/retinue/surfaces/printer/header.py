"""The header of the live view: model, tree, sandbox, workspace and budget of a primary.

All but the tree's id is known before the run exists, so the header is on screen immediately. The lasting header is
then built from the log.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec

from retinue.core.events import decode_raw
from retinue.log.blocks import Span
from retinue.log.runs import RunView
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.totals import format_amounts

NO_TREE = "\0" * 12  # as wide as an id, so that nothing moves when the id is known
WORKSPACES = {
    "shared": "works in the project itself",
    "copy": "works in its own copy",
    "worktree": "works in its own copy",
    "scratch": "works in an empty folder",
}
A2A = "a2a"  # the runtime of a run at an A2A agent, which has no sandbox and no workspace here
Line = tuple[Span, ...]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first lines of a live view. `workspace` is None for the default, which depends on the runtime. `tree` is
    empty until the tree exists."""

    model: str
    runtime: str
    workspace: str | None = None
    tree: str = ""
    tokens: int | None = None
    cost: Decimal | None = None
    seconds: float | None = None

    def layout_lines(self, columns: int) -> list[Line]:
        """Return the header as lines of at most `columns`, broken between its pieces."""
        named = name_model(self.model)
        default = "shared" if self.runtime == "inherited" else "copy"
        budget = format_amounts(self.tokens, self.cost, self.seconds)
        place = (
            "no sandbox" if self.runtime == "inherited" else f"sandbox {self.runtime}",
            WORKSPACES.get(self.workspace or default, f"workspace {self.workspace}"),
        )
        pieces = [
            f"tree {self.tree or NO_TREE}",
            *(("works at an A2A agent",) if self.runtime == A2A else place),
            f"budget {budget}" if budget else "no budget",
        ]
        lines = [named]
        for piece in pieces:
            longer = f"{lines[-1]} · {piece}"
            if safe.measure_width(longer) <= columns:
                lines[-1] = longer
            else:
                lines.append(piece)
        lines = [line.replace(NO_TREE, "…") for line in lines]
        first: Line = (("name", named), ("faint", lines[0].removeprefix(named)))
        return [first, *((("faint", line),) for line in lines[1:])]


def read_header(run: RunView, tree: str, *, runtime: str | None = None) -> Header | None:
    """Return the header of a run, read from the log. `runtime` is the requested runtime, used until the run has
    started. Return None if the runtime is unknown."""
    if run.started is not None:
        runtime = run.started.runtime
    if runtime is None:
        return None
    spawned, profile = run.spawned, _read_profile(run)
    return Header(
        model=spawned.model or run.agent,
        runtime=runtime,
        workspace=spawned.workspace_kind or profile.get("workspace"),
        tree=tree,
        tokens=spawned.max_tokens,
        cost=spawned.max_cost,
        seconds=spawned.timeout_seconds,
    )


def has_workspace(run: RunView) -> bool:
    """Return False for a run at an A2A agent, also if it never started there."""
    return _read_profile(run).get("runtime") != A2A


def _read_profile(run: RunView) -> dict[str, Any]:
    profile = decode_raw(run.spawned.profile)
    return profile if isinstance(profile, dict) else {}


def name_model(model: str) -> str:
    """Return the name of a model. For a script file, leave out the folder."""
    return f"scripted:{model.rpartition('/')[2]}" if model.startswith("scripted:") and "/" in model else model
