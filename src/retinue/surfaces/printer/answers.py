"""What a line typed at a question means. Pure: asking, and asking again, is the approver's."""

from __future__ import annotations

from typing import Literal

import msgspec

from retinue.core.approvals import Allow, Deny

HELP = """\
y           yes, this call
r           yes, and to this tool for the rest of this run
t           yes, and to this tool in the whole tree
p           yes, and to all that this agent asks now: shows it, then asks if you are sure
a           yes, and always in this project: shows the rule, then writes it to retinue.yaml
e           change the arguments (in $EDITOR, or as a line of JSON), then run it
n [reason]  no; the agent reads the reason
N [reason]  no, to everything this agent has asked
2           look at question 2 first
?           this, and the questions that wait"""
_YES = {
    "y": Allow(),
    "yes": Allow(),
    "r": Allow("run"),
    "run": Allow("run"),
    "t": Allow("tool"),
    "tool": Allow("tool"),
}


class Wish(msgspec.Struct, frozen=True, gc=False):
    """Something else than an answer; `number` is the question it is about."""

    what: Literal["always", "edit", "help", "go", "pending"]
    number: int = 0


def decide(line: str) -> Allow | Deny | Wish | None:
    """The answer or the wish a line says; None when it says neither clearly."""
    word, _, reason = line.strip().partition(" ")
    word, reason = word.rstrip(",:;"), reason.strip()
    if word == "N":
        return Deny(reason, all_pending_of_run=True)
    if word.lower() in ("n", "no"):
        return Deny(reason)
    if reason:
        return None
    if word.isascii() and word.isdigit():
        return Wish("go", int(word[:6]))
    match word.lower():
        case "a" | "always":
            return Wish("always")
        case "p" | "pending":
            return Wish("pending")
        case "e" | "edit":
            return Wish("edit")
        case "?" | "h" | "help":
            return Wish("help")
    return _YES.get(word.lower())
