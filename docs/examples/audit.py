"""An agent with a tool, a typed answer and somebody who decides, from Python."""

import asyncio
from dataclasses import dataclass

import retinue
from retinue import Allow, Approval, Deny, Limits, Profile, tool
from retinue.testing import scripted


@dataclass
class Finding:
    file: str
    risk: int


@tool(tier="confirm")
async def page_oncall(reason: str) -> str:
    """Wake the person on call."""
    return f"paged: {reason}"


# A real model goes here; this one says what it is told to, so that the example runs anywhere.
MODEL = scripted(
    {
        "auditor": [
            {"tools": [{"name": "page_oncall", "args": {"reason": "a TODO in the payment code"}}]},
            {"tools": [{"name": "final_answer", "args": {"file": "payment.py", "risk": 3}}]},
        ]
    }
)
AUDITOR = Profile(
    "auditor",
    "Find the riskiest file.",
    model=MODEL,
    tools=["read", "grep", page_oncall],
    output=Finding,
    limits=Limits(turns=30, seconds=900),
)


async def decide(question: Approval) -> Allow | Deny:
    return Allow() if question.tool == "page_oncall" else Deny("not in this example")


async def main() -> None:
    async with retinue.open(approver=decide) as r:
        run = await r.spawn(AUDITOR, "audit the payment code")
        async for event in run.events():
            print(event.seq, event.path, event.kind)
        result = await run.result()
        print(result.status, result.output())


if __name__ == "__main__":
    asyncio.run(main())
