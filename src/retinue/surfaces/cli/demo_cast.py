"""The agents of the demo and their policy. Their replies are in demo.yaml."""

from __future__ import annotations

import asyncio
from typing import Any

from retinue.core.approvals import Allow, Approval, Deny
from retinue.core.messages import ToolSpec
from retinue.core.profiles import Profile
from retinue.core.rules import ALLOW, ASK, Verdict
from retinue.supervisor.timers import SystemClock

EDITED = "till/pricing.py"
UNASKED = frozenset({"spawn_subagents", "shell"})

EXPLORER = Profile(
    "explorer", "Find out how the code works. Have scouts search for you.",
    description="Reads code and explains it", tools=["read", "glob", "grep", "subagent_scout"], workspace="shared",
)  # fmt: skip
SCOUT = Profile("scout", "Answer one question by searching.", tools=["grep"], workspace="shared", leaf=True)
TESTER = Profile("tester", "Run the project's checks.", tools=["shell"], workspace="shared", leaf=True)
CRITIC = Profile("critic", "Say what is unfinished.", tools=["read", "grep"], workspace="shared", leaf=True)
FIXER = Profile("fixer", "Make the smallest edit that fixes it.", tools=["read", "edit"], workspace="shared", leaf=True)
MAIN = Profile(
    "main", "Delegate, decide, and end with the answer.",
    tools=["read", "glob", "grep", "shell", "edit", "spawn_subagents", "subagent_fixer", "subagent_tester"],
    workspace="shared",
)  # fmt: skip
PROFILES = (EXPLORER, SCOUT, TESTER, CRITIC, FIXER)


class DemoPolicy:
    """Spawning and running the checks need nobody; the edit does."""

    def judge(self, spec: ToolSpec, args: dict[str, Any], *, primary: bool, workspace: str) -> Verdict:
        unasked = spec.tier == "observe" or spec.name in UNASKED or spec.name.startswith("subagent_")
        return ALLOW if unasked else ASK


class Hurried(SystemClock):
    """The system's clock, but nobody thinks for long."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class AnswerForNobody:
    """The demo's own answers where there is no terminal: its one edit, nothing else."""

    by = "the demo's policy"

    async def __call__(self, question: Approval) -> Allow | Deny:
        if question.tool == "edit" and question.args.get("path") == EDITED:
            return Allow()
        return Deny("the demo allows only its own edit")
