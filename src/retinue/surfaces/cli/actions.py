"""`retinue show RUN --tools`: what tools ran in a run and below it, what they changed, and who approved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from retinue.log.audit import Action
from retinue.log.styled_text import call_spans, pretty
from retinue.log.summaries import summary
from retinue.surfaces.cli import output as screen
from retinue.surfaces.printer import safe

INDENT = "  "


def page(found: list[Action]) -> Iterator[str]:
    """A block for each call."""
    for action in found:
        mark = "…" if action.success is None else "✓" if action.success else "✗"
        call = "".join(text for _, text in call_spans(action.tool, action.args))
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(action.at))
        yield f"{mark} {safe.escape_line(call)}  {safe.escape_line(action.path)}  {at}"
        yield f"{INDENT}{safe.escape_line(action.permission)}"
        if action.success is None:
            yield f"{INDENT}it has no result"
        else:
            said = summary(action.tool, action.text, action.success, spoken=True)
            yield f"{INDENT}-> {safe.escape_line(said)}  ({screen.duration(action.duration_ms / 1000)})"
        if action.file:
            yield f"{INDENT}whole text in {safe.escape_line(action.file)}"
        for line in safe.escape_text(action.preview or pretty(action.args)).split("\n"):
            yield f"{INDENT * 2}{line}".rstrip()
        yield ""


def as_json(found: list[Action]) -> list[dict[str, Any]]:
    return [{**msgspec.to_builtins(action, enc_hook=str), "permission": action.permission} for action in found]
