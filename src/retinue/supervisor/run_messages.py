"""Messages to runs, from the user, from other runs and from Retinue itself."""

from __future__ import annotations

from retinue.core.errors import ConfigError
from retinue.core.events import Inbox
from retinue.core.messages import NOTICE, UserTurn
from retinue.core.ports import Receipt
from retinue.core.sendable import repair_text
from retinue.supervisor.tree import Run

USER = "user"
MAX_MESSAGE = 256 * 1024


def check_message(text: str) -> str:
    """Return the text of a message as the log can keep it. Raises ConfigError if the text is empty or too long."""
    message = text.encode("utf-8", "replace").decode()
    if not message.strip():
        raise ConfigError("there is nothing to send: the text is empty")
    if len(message.encode()) > MAX_MESSAGE:
        kib = MAX_MESSAGE // 1024
        raise ConfigError(f"the text is larger than {kib} KiB: put it in a file that the agent can read")
    return message


async def send_message(run: Run, text: str, *, source: str = USER, message_id: str = "") -> Receipt:
    """Send a message to a run. Write the message and put it in the inbox in one step, so that the log has it before the
    run can read it. For a remote run, the message goes to the peer, and is written when the peer confirms it."""
    if run.ended:
        return Receipt("too_late", why=f"the run has ended: {run.view.status}")
    if run.is_stopping:
        return Receipt("too_late", why="the run is stopping")
    if run.relay is not None:
        return await run.relay(text, message_id)
    if run.plan.team is not None:
        return await _send_to_members(run, text, source=source, message_id=message_id)
    text = repair_text(text)
    written = run.write(Inbox(text, source=source, message_id=message_id), True)
    seq = run.tree.seq
    run.post_message(UserTurn(text, source))
    if written is not None:
        await written
    return Receipt("queued", seq)


async def _send_to_members(team: Run, text: str, *, source: str, message_id: str) -> Receipt:
    """Send a message to all members of a team that are at work. Return one receipt for all."""
    receipts = {
        member.ref.run: await send_message(member, text, source=source, message_id=message_id)
        for member in team.children
        if not member.is_stopping
    }
    queued = {number: receipt.seq for number, receipt in receipts.items() if receipt.state == "queued"}
    if not queued:
        return Receipt("too_late", why="no member of the team is at work")
    return Receipt("queued", min(queued.values()), readers=tuple(queued))


def notify_parent(child: Run) -> None:
    """Tell the parent of a background child that the child has ended."""
    parent, number, status = child.parent, child.ref.run, child.view.status
    assert parent is not None
    label = child.ref.label
    text = f"agent:{number} [{label}] has ended: {status}. get_agent with agent_id {number} gives its result."
    parent.write(Inbox(text, source=NOTICE, about=number))
    parent.post_message(UserTurn(text, NOTICE))
