"""Who of a tree's runs has a slot: taking one, giving it up while only waiting for children, getting it back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from retinue.core.errors import ToolError
from retinue.core.results import Result
from retinue.supervisor.nodes import Node
from retinue.supervisor.runfiles import RunFiles
from retinue.supervisor.trees import Tree


def children(tree: Tree, node: Node, runs: Sequence[int]) -> list[Node]:
    """Those of its children; a ToolError for a number that is none."""
    found = []
    for run in runs:
        child = tree.nodes[run] if 0 <= run < len(tree.nodes) else None
        if child is None or child.parent is not node:
            raise ToolError(f"agent:{run} is not a child of this run")
        found.append(child)
    return found


async def results(tree: Tree, node: Node, runs: Sequence[int], files: RunFiles) -> list[Result[Any]]:
    """Those of its children, when all of them have ended; and when their files are written, if they have any."""
    wanted = children(tree, node, runs)
    if wanted and wanted[0].queues:
        await wait_without(tree, node, _join_all(wanted))
        await node.knowing(files.written(tree.id, runs))
    else:
        for child in wanted:
            if not child.finished:
                await child.join()
    return [child.result() for child in wanted]


async def _join_all(nodes: Sequence[Node]) -> None:
    for node in nodes:
        await node.join()


async def take(tree: Tree, node: Node) -> None:
    """Several calls of one run may want its slot back at once: one place in the queue serves them all."""
    while not node.holds_slot:
        if node.ending:
            raise asyncio.CancelledError  # one that was ended without it has no place any more
        if node.place is None:
            node.place = tree.slots.line_up(first=True)
        place = node.place
        await asyncio.wait([place])
        if node.place is place:
            node.place, node.holds_slot = None, True


def leave(tree: Tree, node: Node) -> None:
    """For good: out of the slot, or out of the queue for one."""
    if node.place is not None:
        tree.slots.leave(node.place)
        node.place = None
    elif node.holds_slot:
        tree.slots.give_back()
        node.holds_slot = False


def only_waits(node: Node) -> bool:
    return node.waiting > 0 and node.waiting >= node.inflight


def leave_if_only_waiting(tree: Tree, node: Node) -> None:
    if node.holds_slot and only_waits(node):
        tree.slots.give_back()
        node.holds_slot = False


async def wait_without(tree: Tree, node: Node, awaited: Awaitable[None]) -> None:
    """Waits for children; while that is all the run does, its slot is free for others. Of several waits the last to
    end takes it back, also when the wait was given up."""
    node.waiting += 1
    leave_if_only_waiting(tree, node)
    try:
        await awaited
    finally:
        node.waiting -= 1
        if node.parent is not None and node.stopping is None and not only_waits(node):
            await take(tree, node)
