"""The desk: where questions wait for whoever answers first. They belong to a tree, not to a turn.

Everybody answers the same way, by the id of the question: the function or terminal that was given as approver, a
second terminal, a rule, the clock. The first answer is written and takes effect; all others are told that they came
too late. What was answered for more than one call holds for the questions that wait already too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.approvals import Allow, Answered, Approval, Decision, Deny
from retinue.core.errors import ConfigError, Unconfirmed
from retinue.core.events import ApprovalDecided, ToolStarted, Warned
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Approver, Clock, Preview, RuleBook
from retinue.core.rules import Verdict, sealed
from retinue.supervisor.nodes import Node
from retinue.supervisor.questions import (
    ANOTHER,
    CHANGED,
    GIVEN_UP,
    Question,
    approval_of,
    asked_body,
    judged,
    minted,
    sound,
)
from retinue.supervisor.trees import Tree

REMEMBERED = 10_000
CLOSE_SECONDS = 2.0


class Terms(msgspec.Struct, frozen=True):
    """How long a question waits: `expiry` seconds for an answer, then it is a no; `wait` seconds for somebody to come
    where no approver is attached, then the run ends as without one."""

    expiry: float | None = None
    wait: float | None = None


async def started(tree: Tree, node: Node, call: Call) -> None:
    """The answer takes effect now: on disk before the tool runs, so that after a crash it is known whether it may
    have."""
    written = tree.write(node, ToolStarted(call.id), True)
    if written is not None:
        await written


class Desk:
    """Owned by the supervisor. Lives in one event loop; nothing here is for other threads."""

    def __init__(
        self, clock: Clock, *, approver: Approver | None, terms: Terms, book: RuleBook | None, project: str
    ) -> None:
        self.approver = approver
        self._clock = clock
        self._terms = terms
        self._book = book
        self._project = project
        self._questions: dict[str, Question] = {}
        self._answered: dict[str, None] = {}
        self._standing: dict[tuple[str, int | None, str], str] = {}
        self._asking = TaskOwner()
        self._attendants: Counter[str | None] = Counter()  # those present for a tree; None is for all
        self.asked: Counter[str] = Counter()  # how many questions each tree has asked
        self.shown: dict[tuple[str, int, str], str] = {}  # digests of what calls were shown to do, beyond their words

    # Asking

    async def settle(
        self, tree: Tree, node: Node, call: Call, *, spec: ToolSpec, preview: Preview | str, verdict: Verdict
    ) -> Decision:
        """Decide about a call that the policy does not simply let pass. It is written before it takes effect."""
        tool = sealed(call.name, spec.seal)
        standing = self._stands(tree.id, node.ref.run, tool, verdict)
        if verdict.what != "ask" or standing:
            allowed = verdict.what != "deny"
            reason = "" if allowed else f"the rule {verdict.rule} forbids it"
            by = f"rule: {standing or verdict.rule}"
            body = ApprovalDecided(minted(tree, node), call.id, allowed, reason, by, call.name, seal=spec.seal)
            written = tree.write(node, body, not (spec.repeatable or spec.waits))  # as its call was
            if written is not None:
                await written
            return Allow() if allowed else Deny(reason)
        if not self._terms.wait and not self._attended(tree):
            raise Unconfirmed(call.name)
        shown = preview if isinstance(preview, str) else await preview()
        if spec.seal and (verdict.changed or self._stood(tree.id, tool)):
            shown = f"{ANOTHER}\n{shown}".strip()
        self.asked[tree.id] += 1
        approval = approval_of(tree, node, call, spec=spec, preview=shown, verdict=verdict, project=self._project)
        approval = msgspec.structs.replace(approval, number=self.asked[tree.id])
        return await self._ask(Question(tree, node, call, spec, approval))

    async def _ask(self, question: Question) -> Decision:
        """Waits for the one answer, while the clocks of the run and its ancestors stand still."""
        approval, node = question.approval, question.node
        self._questions[approval.id] = question
        question.tree.write(node, asked_body(approval))
        node.pause()
        try:
            self._bring(question)
            decision = await question.answer
        except asyncio.CancelledError:
            if question.call.within and node.stopping is None and not node.ending:
                self._write(question, Deny(GIVEN_UP), by="expiry", scope="call")
            raise
        finally:
            node.unpause()
            self._put_away(question)
        if question.written is not None:
            await question.written
        if decision is None:
            raise Unconfirmed(question.call.name)
        if isinstance(decision, Allow):
            await started(question.tree, node, question.call)
        return decision

    def _attended(self, tree: Tree) -> bool:
        """Whether somebody can be asked about this tree now."""
        return self._has_approver(tree) or self._has_attendant(tree)

    def _has_approver(self, tree: Tree) -> bool:
        """Return whether an approver function is there for the tree: it may be for some trees only."""
        attends: Callable[[str], bool] | None = getattr(self.approver, "attends", None)
        return self.approver is not None and (attends is None or attends(tree.id))

    def _has_attendant(self, tree: Tree) -> bool:
        return bool(self._attendants[tree.id] or self._attendants[None])

    def add_attendant(self, tree: str | None) -> None:
        """Count somebody who is present to answer the questions of a tree, or of all."""
        self._attendants[tree] += 1

    def remove_attendant(self, tree: str | None) -> None:
        """Discount one. Questions that nobody is there for any more wait as without an approver."""
        self._attendants[tree] -= 1
        for question in list(self._questions.values()):
            if question.asking is None and question.open and not self._has_attendant(question.tree):
                if self._terms.wait:
                    later = self._clock.call_later(self._terms.wait, partial(self._give_up, question))
                    question.timers.append(later)
                else:
                    self._give_up(question)

    def _bring(self, question: Question) -> None:
        """To the approver, and to the clock."""
        terms, later = self._terms, self._clock.call_later
        if terms.expiry is not None:
            question.timers.append(later(terms.expiry, lambda: self._expire(question)))
        if self.approver is not None and self._has_approver(question.tree):
            question.asking = self._asking.start(self._consult(self.approver, question))
        elif terms.wait and not self._has_attendant(question.tree):
            question.timers.append(later(terms.wait, lambda: self._give_up(question)))

    async def _consult(self, approver: Approver, question: Question) -> None:
        try:
            decision: Decision = await approver(question.approval)
        except asyncio.CancelledError:
            self._resolve(question, Deny("the approver was cancelled"), by="function")
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to the approver: one that breaks has not said yes
            decision = Deny(f"the approver failed: {error}")
        self._resolve(question, decision, by=getattr(approver, "by", "function"))

    def _expire(self, question: Question) -> None:
        self._resolve(question, Deny(f"nobody answered within {self._terms.expiry:g} s"), by="expiry")

    def _give_up(self, question: Question) -> None:
        if question.open:
            reason = f"nobody came to answer within {self._terms.wait or 0:g} s"
            self._write(question, Deny(reason), by="expiry", scope="call")
            question.answer.set_result(None)
            self._put_away(question)

    # Answering

    def pending(self, tree: str | None = None) -> list[Approval]:
        """The questions that wait, in the order they came."""
        return [q.approval for q in self._questions.values() if q.open and tree in (None, q.tree.id)]

    def answer(self, approval_id: str, decision: Decision, *, by: str, digest: str = "") -> Answered:
        """The first answer is taken. With a digest it counts only for exactly the action that has it."""
        question = self._questions.get(approval_id)
        if question is None:
            return "stale" if approval_id in self._answered else "unknown"
        if digest and digest != question.approval.digest:
            return "stale"
        return "taken" if self._resolve(question, decision, by=by) else "stale"

    def _resolve(self, question: Question, decision: Decision, *, by: str, scope: str = "") -> bool:
        """Makes it the answer, if there is none yet."""
        if not question.open:
            return False
        decision = self._checked(question, sound(decision))
        decision = self._kept(question, decision) if isinstance(decision, Allow) else decision
        reach = decision.scope if isinstance(decision, Allow) else "call"
        self._write(question, decision, by=by, scope=scope or reach)
        question.answer.set_result(decision)
        self._put_away(question)
        self._follow(question, decision, by=by)
        return True

    def _checked(self, question: Question, decision: Decision) -> Decision:
        """A yes is to what was shown, and an edited call is still under the rules that deny."""
        if isinstance(decision, Deny):
            return decision
        if question.changed:
            return Deny(CHANGED)
        if decision.args is not None:
            call = Call(question.call.id, question.call.name, decision.args)
            verdict = judged(question.node, question.spec, call)
            if verdict.what == "deny":
                return Deny(f"the rule {verdict.rule} forbids the edited call")
        return decision

    def _kept(self, question: Question, decision: Allow) -> Allow:
        """The rule of an answer for the project is written first; without one the answer is for this call."""
        if decision.scope != "project":
            return decision
        try:
            if decision.args is not None:
                raise ConfigError("its arguments were changed, and the rule would be for what was asked")
            if self._book is None or not question.approval.rule:
                raise ConfigError("there is no rule, or no file for it, that would say just this")
            self._book.keep(question.approval.rule)
        except ConfigError as error:
            warning = f"the answer holds for this call only: {error}"
            question.tree.write(question.node, Warned(warning, code="rule_not_kept"))
            return msgspec.structs.replace(decision, scope="call")
        return decision

    def _follow(self, question: Question, decision: Decision, *, by: str) -> None:
        """What the answer means for the questions that wait beside this one."""
        tree, run, tool = question.tree.id, question.node.ref.run, sealed(question.call.name, question.spec.seal)
        if decision.all_pending_of_run:
            same = Deny(decision.reason) if isinstance(decision, Deny) else Allow()
            self._resolve_all(lambda q: same if (q.tree.id, q.node.ref.run) == (tree, run) else None, by, "pending")
        if isinstance(decision, Deny) or decision.scope == "call":
            return
        if decision.scope == "project":
            rule = f"rule: {question.approval.rule}"
            self._resolve_all(lambda q: Allow() if q.judged().what == "allow" else None, rule, "project")
            return
        words = self.stand(tree, run, tool, scope=decision.scope, by=by)
        self._resolve_all(lambda q: Allow() if self._stands_for(q) else None, f"rule: {words}", decision.scope)

    def stand(self, tree: str, run: int, tool: str, *, scope: str, by: str) -> str:
        """Remembers an answer for all calls of a tool, in a run or in its tree; the answer in words."""
        where = "this run" if scope == "run" else "this tree"
        words = f"{tool.partition('@')[0]} in {where}, said by {by}"
        self._standing[tree, run if scope == "run" else None, tool] = words
        return words

    def _resolve_all(self, choose: Callable[[Question], Decision | None], by: str, scope: str) -> None:
        for question in list(self._questions.values()):
            decision = choose(question)
            if decision is not None:
                self._resolve(question, decision, by=by, scope=scope)

    def _stands_for(self, question: Question) -> str:
        tool = sealed(question.call.name, question.spec.seal)
        return self._stands(question.tree.id, question.node.ref.run, tool, question.judged())

    def _stands(self, tree: str, run: int, tool: str, verdict: Verdict) -> str:
        """The answer given before that covers this, in words."""
        if not self._standing or verdict.what != "ask" or verdict.firm:
            return ""
        return self._standing.get((tree, run, tool)) or self._standing.get((tree, None, tool)) or ""

    def _stood(self, tree: str, tool: str) -> bool:
        """Whether a yes was given for the tool as it was before it had this seal."""
        before = f"{tool.partition('@')[0]}@"
        return any(its == tree and name != tool and name.startswith(before) for its, _, name in self._standing)

    def _write(self, question: Question, decision: Decision, *, by: str, scope: str) -> None:
        allowed = isinstance(decision, Allow)
        reason, args = ("", decision.args) if isinstance(decision, Allow) else (decision.reason, None)
        call, approval = question.call, question.approval
        seal = question.spec.seal
        body = ApprovalDecided(approval.id, call.id, allowed, reason, by, call.name, scope, args, seal)
        question.written = question.tree.write(question.node, body, True)

    # Leaving

    def _put_away(self, question: Question) -> None:
        question.close()
        if self._questions.pop(question.approval.id, None) is not None:
            self._answered[question.approval.id] = None
            if len(self._answered) > REMEMBERED:
                del self._answered[next(iter(self._answered))]

    def forget(self, tree: str) -> None:
        """The tree has ended: what was answered for it is over."""
        self.asked.pop(tree, None)
        if self._standing:
            for key in [key for key in self._standing if key[0] == tree]:
                del self._standing[key]
        if self.shown:
            self.shown = {key: digest for key, digest in self.shown.items() if key[0] != tree}

    async def close(self) -> None:
        """Sees to it that no approver is left running."""
        await self._asking.close(CLOSE_SECONDS)
