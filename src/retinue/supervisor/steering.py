"""Words for a run that is at work: written, then read at its next turn. The user's own, and ours; never a child's."""

from __future__ import annotations

from retinue.core.errors import ConfigError
from retinue.core.events import Inbox
from retinue.core.messages import UserTurn
from retinue.core.ports import Receipt
from retinue.supervisor.nodes import Node
from retinue.supervisor.trees import Tree

SOURCE, NOTICE = "user", "notice"
LONGEST = 256 * 1024


async def send(tree: Tree | None, run: int, text: str, *, source: str = SOURCE) -> Receipt:
    """Told and written in one step, so that the log has the words before the turn that reads them. A run that lives
    elsewhere gets them there, and they are written when it has them."""
    words = text.encode("utf-8", "replace").decode()
    if not words.strip():
        raise ConfigError("there is nothing to send: the text is empty")
    if len(words.encode()) > LONGEST:
        raise ConfigError(f"the text is larger than {LONGEST // 1024} KiB: put it in a file that the agent can read")
    if tree is None or not 0 <= run < len(tree.nodes):
        return Receipt("too_late", why="no such run is at work here")
    node = tree.nodes[run]
    if node.ended:
        return Receipt("too_late", why=f"the run has ended: {node.view.status}")
    if node.ending or node.stopping is not None:
        return Receipt("too_late", why="the run is stopping")
    if node.relay is not None:
        return await node.relay(words)
    written = tree.write(node, Inbox(words, source=source), True)
    seq = tree.seq
    node.tell(UserTurn(words, source))
    if written is not None:
        await written
    return Receipt("queued", seq)


def notify(tree: Tree, parent: Node, child: Node) -> None:
    """Tells a run that a child of its background has ended."""
    run, status = child.ref.run, child.view.status
    text = f"agent:{run} [{child.ref.label}] has ended: {status}. get_agent with agent_id {run} gives its result."
    tree.write(parent, Inbox(text, source=NOTICE, about=run))
    parent.tell(UserTurn(text, NOTICE))
