"""What a tool call needs before it runs, by its tier and the mode the user chose."""

from __future__ import annotations

from typing import Literal

from retinue.core.messages import ToolSpec

Mode = Literal["ask", "yes"]
MODES: tuple[Mode, ...] = ("ask", "yes")


class ModePolicy:
    """`ask`: the confirm tier asks, whoever calls. `yes`: nothing asks."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def judge(self, spec: ToolSpec, *, primary: bool) -> Literal["allow", "ask", "deny"]:
        return "allow" if self.mode == "yes" or spec.tier == "observe" else "ask"
