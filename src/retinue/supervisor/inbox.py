"""Messages to a run at work: written, then read at its next turn. They come from the user and from us, never from a
child."""

from __future__ import annotations

from retinue.core.errors import ConfigError
from retinue.core.events import Inbox
from retinue.core.messages import UserTurn
from retinue.core.ports import Receipt
from retinue.supervisor.run import Run
from retinue.supervisor.tree import Tree

USER, NOTICE = "user", "notice"
MAX_BYTES = 256 * 1024


async def send_message(tree: Tree | None, number: int, text: str, *, source: str = USER) -> Receipt:
    """Write a message and put it in the run's inbox in one step, so that the log has it before the turn that reads it.
    A remote run gets it from its peer, and it is written when the peer confirms it."""
    message = text.encode("utf-8", "replace").decode()
    if not message.strip():
        raise ConfigError("there is nothing to send: the text is empty")
    if len(message.encode()) > MAX_BYTES:
        raise ConfigError(f"the text is larger than {MAX_BYTES // 1024} KiB: put it in a file that the agent can read")
    run = None if tree is None else tree.find_run(number)
    if tree is None or run is None:
        return Receipt("too_late", why="no such run is at work here")
    if run.ended:
        return Receipt("too_late", why=f"the run has ended: {run.view.status}")
    if run.is_stopping:
        return Receipt("too_late", why="the run is stopping")
    if run.relay is not None:
        return await run.relay(message)
    written = tree.write(run, Inbox(message, source=source), True)
    seq = tree.seq
    run.post_message(UserTurn(message, source))
    if written is not None:
        await written
    return Receipt("queued", seq)


def notify_parent(tree: Tree, child: Run) -> None:
    """Tell a run that a child of its background has ended."""
    parent, number, status = child.parent, child.ref.run, child.view.status
    assert parent is not None
    text = f"agent:{number} [{child.ref.label}] has ended: {status}. get_agent with agent_id {number} gives its result."
    tree.write(parent, Inbox(text, source=NOTICE, about=number))
    parent.post_message(UserTurn(text, NOTICE))
