"""Uses of the library that type checkers must refuse, each in a line that ends with `# wrong`. Checked, never run."""

from dataclasses import dataclass

import retinue
from retinue import Allow, Approval, EventBody, Limits, Profile, Retinue, events, tool
from retinue.models import Request


@dataclass
class Finding:
    file: str


FINDER = Profile("finder", output=Finding)
PLAIN = Profile("plain")

Profile("p", outptu=Finding)  # wrong
Profile("p", output=3)  # wrong
Profile("p", tools=[3])  # wrong
Profile("p", tools=[print])  # wrong
Profile("p", runtime="moon")  # wrong
Profile("p", model=Finding("x"))  # wrong
Profile("p", limits=30)  # wrong
Profile("p", "Do it.", "anthropic:x")  # wrong

number: int = retinue.run_sync(PLAIN, "go").output()  # wrong
text: str = retinue.run_sync(FINDER, "go").output()  # wrong
retinue.run_sync(FINDER, "go").output().risk  # wrong
retinue.run_sync(PLAIN, "go", modle="yes")  # wrong
retinue.run_sync(PLAIN, "go", mode="maybe")  # wrong
retinue.run_sync(PLAIN, "go", limits={"turns": 3})  # wrong
retinue.run_sync(PLAIN, "go", model=3)  # wrong
retinue.open(".retinue", aprover=None)  # wrong
retinue.open(profiles=["explorer"])  # wrong
retinue.nosuch  # wrong
events.NoSuchEvent  # wrong


def decide_at_once(question: Approval) -> Allow:
    return Allow()


async def decide_badly(question: Approval) -> bool:
    return True


async def decide_two(question: Approval, more: int) -> Allow:
    return Allow()


async def decide_text(question: str) -> Allow:
    return Allow()


retinue.open(approver=decide_at_once)  # wrong
retinue.open(approver=decide_badly)  # wrong
retinue.open(approver=decide_two)  # wrong
retinue.open(approver=decide_text)  # wrong
retinue.run_sync(PLAIN, "go", approver=decide_at_once)  # wrong
Allow(scope="ever")  # wrong


async def use_runs(r: Retinue) -> None:
    await r.spawn(3, "go")  # wrong
    await r.spawn(PLAIN, 3)  # wrong
    await r.run(PLAIN, "go", timeout=3)  # wrong
    await r.run(PLAIN, "go", limits=3)  # wrong
    run = await r.spawn(FINDER, "go")
    other: retinue.RunHandle[str] = run  # wrong
    finding: Finding = await run.result()  # wrong
    async for event in run.events():
        event.text  # wrong
        event.body.text  # wrong
    async for piece in run.stream_text():
        piece.text  # wrong
    async for item in run.events(deltas=True):
        item.body  # wrong


def describe(body: EventBody) -> str:
    match body:
        case events.ToolCall(name=name):
            return name + 3  # wrong
        case events.RunEnded():
            return body.text  # wrong
        case _:
            return body.kind


@tool
def add(a: int, b: int = 2) -> int:
    """Add."""
    return a + b


add("x")  # wrong
tool(tier="maybe")  # wrong


class Silent:
    async def complete(self, request: Request) -> str:
        return ""


retinue.open(model=Silent())  # wrong
Limits(turns="many")  # wrong
