"""Continuing a run that has ended: a new run that begins with its thread and the new words.

In a tree at work, or a finished one, it is a run of the same tree, below the same parent. The primary of a finished
tree is continued by a tree of its own, whose origin it is.
"""

from __future__ import annotations

from msgspec import structs

from retinue.core.control import ResumeOverrides
from retinue.core.errors import ConfigError, NotFound
from retinue.core.ports import Order
from retinue.core.profiles import Task
from retinue.log.runs import Runs
from retinue.log.threads import Histories, before, thread
from retinue.supervisor import caller_limits as called
from retinue.supervisor.budgets import open_account
from retinue.supervisor.nodes import After, Node
from retinue.supervisor.rebuilt import Plans
from retinue.supervisor.resume import Ground, Revival, task_of
from retinue.supervisor.trees import Tree
from retinue.workspaces.run_folders import resolve_context_paths

NOT_HERE = "{who} ran in the MCP server '{server}': it cannot be continued from here"


def continue_run(ground: Ground, tree: str, run: int, text: str, histories: Histories, given: ResumeOverrides) -> Node:
    """The new run. Raises before anything is written when it cannot be."""
    if not text.strip():
        raise ConfigError("there is nothing to go on with: the text is empty")
    host, events = ground.supervisor, histories.get(tree)
    if not events:
        raise NotFound(f"there is no tree '{tree}' in the log")
    live = host.trees.get(tree)
    views = Runs.of(tree, events) if live is None else live.runs
    old = views.runs.get(run)
    if old is None:
        raise NotFound(f"{tree} has no run {run}")
    if live is None and any(view.ended is None for view in views.runs.values()):
        raise ConfigError(f"{tree} was interrupted: `retinue resume {tree}` goes on with it")
    if old.ended is None:
        raise ConfigError(f"{tree}/{run} is at work: `retinue send {tree}/{run} TEXT` tells it something")
    if old.spawned.server:
        raise ConfigError(NOT_HERE.format(who=f"{tree}/{run}", server=old.spawned.server))
    called.check_depth(f"{tree}/{run}")
    said = thread(events, run, before=before(histories, tree, old.spawned))
    plans = Plans(ground.planner, tree, views.runs[0].spawned, given.profiles, given.model, given.runtime)
    if old.spawned.parent is None:
        plan = plans.of(old, None)
        model = plan.model_name if ":" in plan.model_name else None
        task = Task(text, context=old.spawned.task_context, context_paths=old.spawned.context_paths, model=model)
        task = structs.replace(task, timeout_seconds=given.seconds)
        limits = given.limits.over(old.spawned.limits) if old.spawned.limits is not None else given.limits
        return host.spawn(plan.profile, task, limits=limits, after=After(tree, run, said))
    home = live or Revival(ground, tree, histories).tree(given, planned=old.spawned.parent)
    words = structs.replace(task_of(old.spawned), text=text, timeout_seconds=given.seconds)
    return _below(ground, home, home.nodes[run], words, said_after=After("", run, said), plans=plans, files=given.files)


def _below(ground: Ground, tree: Tree, old: Node, task: Task, *, said_after: After, plans: Plans, files: bool) -> Node:
    """A run beside the old one. Its parent, if that is at work, is told of its ending as of any in the background."""
    parent, host = old.parent, ground.supervisor
    assert parent is not None
    at_work = tree.id in host.trees
    if at_work and (parent.ending or parent.stopping is not None):
        raise ConfigError(f"{tree.id}/{old.ref.run} cannot be continued: its parent is stopping")
    plan = plans.of(old.view, parent.plan)
    readable = resolve_context_paths(task.context_paths, base=ground.state.project)
    call = called.CALL.get()
    above = parent.account if call is None else call.shared(parent.account)
    account = open_account(old.name, (plan.profile.limits,), above, plan, host.prices)
    asked = task.timeout_seconds is not None
    order = Order(plan.profile, task, background=True, asked_by_model=asked, files=files, continues=said_after.run)
    node = host.make(tree, parent, order, plan, readable, account)
    said_after.over(node, order)
    if not at_work:
        tree.root = node
        host.trees[tree.id] = tree
    return node
