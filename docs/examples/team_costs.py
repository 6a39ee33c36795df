"""The cost of a task for one agent, a quick team, a team that refines, and one agent in two rounds.

Needs no key: the models are scripted, with the tokens that a review of a file of 300 lines takes, 0.1 s for each call.
"""

import asyncio
from typing import Any

import retinue
from retinue import Profile, Result, Rounds, Team
from retinue.testing import scripted

SECONDS = 0.1
PACKET = "## preserve\nthe findings\n\n## improvement_spec\nsay how to fix each"
PLAN = """{"schema_version": "1", "objective": "make it usable", "primary_strategy": "show the fixes",
 "tasks": [{"id": "fix", "description": "add a fix to each finding", "verification": "read it"}]}"""


def reply(tokens: int, *calls: dict[str, Any], text: str = "") -> dict[str, Any]:
    """Return a reply of a model that was given so many tokens."""
    usage = {"input_tokens": tokens, "output_tokens": 300}
    return {"text": text, "tools": list(calls), "usage": usage, "delay": SECONDS}


def call(name: str, **args: str) -> dict[str, Any]:
    return {"name": name, "args": args}


LOOK = reply(1500, call("glob", pattern="*.py"))
ANSWER = reply(4500, call("new_answer", content="what is wrong in the file"))
ANSWER_ANEW = reply(6000, call("new_answer", content="more of what is wrong"))
VOTE = reply(6000, call("vote", agent_id="agent2", reason="it found the most"))
VOTE_AGAIN = reply(7500, call("vote", agent_id="agent2", reason="now more so"))


def member(number: int, *replies: dict[str, Any]) -> Profile:
    return Profile(f"m{number}", model=scripted({f"agent{number}": [LOOK, ANSWER, *replies]}))


ONE = Profile("one", model=scripted({"one": [LOOK, reply(4500, text="what is wrong in the file")]}))
QUICK = Team("quick", members=[member(1, reply(6000, text="all that is wrong")), member(2), member(3)])
REFINING = Team(
    "refining",
    refine=True,
    members=[
        member(1, VOTE, VOTE_AGAIN),
        member(2, ANSWER_ANEW, VOTE_AGAIN, reply(8000, text="the best of it")),
        member(3, VOTE, VOTE_AGAIN),
    ],
)
EVALUATOR = [
    reply(
        5000,
        call("write", path="critique_packet.md", content=PACKET),
        call("write", path="next_tasks.json", content=PLAN),
    ),
    reply(6000, text="judged"),
]
IN_ROUNDS = Profile("one", model=scripted({"one": [LOOK, ANSWER, ANSWER_ANEW], "round_evaluator": EVALUATOR}))


def count_calls(result: Result[Any]) -> int:
    return result.total_turns + sum(count_calls(child) for child in result.children)


async def main() -> None:
    print(f"{'':14}{'model calls':>12}{'tokens':>9}{'time':>8}")
    async with retinue.open(mode="yes") as r:
        for name, profile, rounds in (
            ("one agent", ONE, None),
            ("quick team", QUICK, None),
            ("refining team", REFINING, None),
            ("two rounds", IN_ROUNDS, Rounds(2)),
        ):
            result = await r.run(profile, "Review the file.", rounds=rounds)
            calls, tokens = count_calls(result), result.total_usage.total_tokens
            print(f"{name:14}{calls:>12}{tokens:>9,}{result.duration_ms / 1000:>6.1f} s")


if __name__ == "__main__":
    asyncio.run(main())
