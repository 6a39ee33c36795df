"""Approvals: questions to people about tool calls. The first answer counts.

Questions belong to a tree, not to a turn. Every answer names the id of its question, whether it comes from the
approver function or terminal, from a second terminal, from a rule or from a timeout. The first answer is written and
takes effect; later ones are stale. An answer for more than one call also counts for questions that are already open.
The tools of a peer are other tools than ours of the same name: an answer for more than one call holds at the peer only,
or here only.
An approver who leaves, such as the terminal of the run, answers nothing: if nobody else is present, the question stays
open for some time. This module knows runs and trees, but not how a call is made or run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.approvals import (
    PROGRAM_ENDED,
    Allow,
    Answered,
    Approval,
    Decision,
    Deny,
    QuestionChange,
    QuestionClosed,
    check_decision,
    digest_of,
    is_edit,
)
from retinue.core.errors import ApproverLeft, ConfigError, Failed, Unconfirmed
from retinue.core.events import ApprovalAsked, ApprovalDecided, ToolStarted, Warned, redact
from retinue.core.messages import FOREIGN, Call, ToolSpec
from retinue.core.ports import AttachedApprover, Clock, Preview, Timer
from retinue.core.rules import ALLOW, ASK, FILES, WRITERS, Verdict, derive_rules, is_a, join_seal
from retinue.core.secrets import clean_text, clean_value
from retinue.log.blocks import format_json
from retinue.log.questions import make_approval, make_closing
from retinue.supervisor.policy import SANDBOXED_TOOLS, find_sandbox_policy, subjects_of
from retinue.supervisor.tree import Run, StandingAnswer, Tree

MAX_REMEMBERED = 10_000
CLOSE_SECONDS = 2.0
LEFT_SECONDS = 600.0
TURN_INTERRUPTED = "the turn was interrupted"
CHANGED = "the call changed while it was being asked about"
EDITED_AT_PEER = "a call at a remote agent cannot be given other arguments; the user would allow it with these: {args}"
ANOTHER = "It was allowed before, but its server describes it differently now."


class ApprovalTerms(msgspec.Struct, frozen=True):
    """The timeouts of a question.

    - `expiry`: seconds until an open question is denied.
    - `wait`: seconds to wait for a person if no approver is attached. After this time the run ends as it does without
      an approver. If unset, a question whose last approver left waits `LEFT_SECONDS`."""

    expiry: float | None = None
    wait: float | None = None


async def write_started(run: Run, call: Call) -> None:
    """Write that an approved call starts, and wait until this is on disk. After a crash, the log says whether the tool
    may have run."""
    written = run.write(ToolStarted(call.id), True)
    if written is not None:
        await written


class Approvals:
    """The open questions of one supervisor, for use in one event loop. Not thread-safe."""

    def __init__(
        self,
        clock: Clock,
        *,
        approver: AttachedApprover | None,
        terms: ApprovalTerms,
        store_rule: Callable[[str], None] | None,
        project: str,
    ) -> None:
        self.approver = approver
        self._clock = clock
        self._terms = terms
        self._store_rule = store_rule
        self._project = project
        self._questions: dict[str, Question] = {}
        self._answered: dict[str, None] = {}
        self._approver_tasks = TaskOwner()
        self._attendants: Counter[str | None] = Counter()  # people present for a tree; None is for all trees
        self._departure = asyncio.Event()  # set when one of them has left
        self._watchers: dict[asyncio.Queue[QuestionChange], str | None] = {}  # and the tree of each, or None for all

    # Asking

    async def decide(
        self,
        run: Run,
        call: Call,
        *,
        spec: ToolSpec,
        preview: Preview | str,
        verdict: Verdict,
        runs_here: bool = True,
        on_asked: Callable[[str], object] = lambda _: None,
    ) -> Decision:
        """Decide about a call that the policy does not simply allow. The decision is written before it takes
        effect. The start of a call that does not run here is for its peer to report. `on_asked` is called with the id
        of the question, if a person is asked."""
        standing = _find_standing(run, call, spec, verdict)
        if verdict.what != "ask" or standing:
            rule = standing or verdict.rule
            is_denied = verdict.what == "deny"
            decision: Decision = Deny(f"the rule {verdict.rule} forbids it") if is_denied else Allow()
            body = _decided_event(
                run.next_approval_id(), call, spec, decision, by=f"rule: {rule}", scope="call", rule=rule
            )
            written = run.write(body, not (spec.repeatable or spec.waits))  # as for its call
            if written is not None:
                await written
            return decision
        if not (self._terms.wait or self._has_approver(run.tree) or self._has_attendant(run.tree)):
            raise _make_unconfirmed(run, call)
        shown = preview if isinstance(preview, str) else await preview(call, run.folders)
        if spec.seal and (verdict.changed or _was_allowed_before(run.tree, call, spec)):
            shown = _describe_changed_tool(run, call, spec, shown)
        has_rule = not verdict.rule and spec.tier != FOREIGN
        asked = ApprovalAsked(
            approval_id=run.next_approval_id(),
            call_id=call.id,
            tool=call.name,
            args=deepcopy(call.args),
            label=None if run.parent is None else run.ref.label,
            preview=shown,
            rule=_derive_rule(run, call, self._project, spec.seal) if has_rule else "",
            digest=_digest_call(run, call),
        )
        on_asked(asked.approval_id)
        decision = await self._ask(run, call, spec, redact(asked))
        if isinstance(decision, Allow) and runs_here:
            await write_started(run, call)
        return decision

    async def _ask(self, run: Run, call: Call, spec: ToolSpec, asked: ApprovalAsked) -> Decision:
        """Ask a question and wait for its answer, while the clocks of the run and its ancestors are paused."""
        approval = make_approval(run.ref, asked, run.tree.count_question())
        question = self._questions[approval.id] = Question(run=run, call=call, spec=spec, approval=approval)
        run.write(msgspec.structs.replace(asked, args=deepcopy(asked.args)))  # an approver function may change its own
        self._publish(approval.tree, approval)
        run.pause_for_person()
        try:
            self._consult(question)
            decision = await question.answer
        except asyncio.CancelledError:
            if run.is_interrupted and not run.is_stopping:
                self._write(question, Deny(TURN_INTERRUPTED), by="user")
            elif call.within and not run.is_stopping:
                self._write(question, Deny(PROGRAM_ENDED), by="expiry")
            raise
        finally:
            run.resume_after_person()
            self._close(question)
        if question.written is not None:
            await question.written
        if decision is None:
            raise _make_unconfirmed(run, call)
        return decision

    def _has_approver(self, tree: Tree) -> bool:
        """Return True if the approver function serves this tree. A function may serve some trees only."""
        approver = self.approver
        return approver is not None and (approver.attends is None or approver.attends(tree.id))

    def _has_attendant(self, tree: Tree) -> bool:
        return bool(self._attendants[tree.id] or self._attendants[None])

    def is_attended_by_name(self, tree: str) -> bool:
        """Return True if a person is present for just this tree. A person present for all trees does not count."""
        return self._attendants[tree] > 0

    async def wait_until_left(self, tree: str) -> None:
        """Wait until no person is present for just this tree."""
        while self.is_attended_by_name(tree):
            self._departure.clear()
            await self._departure.wait()

    @contextmanager
    def attend(self, tree: str | None) -> Iterator[None]:
        """Count a person who is present to answer the questions of `tree`, or of all trees if None. When the person
        leaves, questions with nobody left to answer them wait for another person."""
        self._attendants[tree] += 1
        try:
            yield
        finally:
            self._attendants[tree] -= 1
            self._departure.set()
            for question in list(self._questions.values()):
                if question.approver_task is None and question.is_open:
                    self._wait_for_others(question)

    def _wait_for_others(self, question: Question) -> None:
        """Give up a question after some time, unless a person is present by then."""
        if not self._has_attendant(question.run.tree):
            seconds = self._terms.wait or LEFT_SECONDS
            question.timers.append(self._clock.call_later(seconds, partial(self._give_up, question, seconds)))

    def _consult(self, question: Question) -> None:
        """Start the timers of a question, and ask the approver function."""
        terms, later = self._terms, self._clock.call_later
        if terms.expiry is not None:
            question.timers.append(later(terms.expiry, lambda: self._expire(question)))
        if self.approver is not None and self._has_approver(question.run.tree):
            question.approver_task = self._approver_tasks.start(self._ask_approver(self.approver, question))
        else:
            self._wait_for_others(question)

    async def _ask_approver(self, approver: AttachedApprover, question: Question) -> None:
        try:
            decision = check_decision(await approver.function(question.approval))
        except asyncio.CancelledError:
            self._resolve(question, Deny("the approver was cancelled"), by="function")
            raise
        except ApproverLeft:
            question.approver_task = None
            if question.is_open:
                self._wait_for_others(question)
            return
        except Exception as error:  # noqa: BLE001 - the boundary to the approver: an error is not a yes
            text = (
                str(error)
                if isinstance(error, ConfigError)
                else f"the approver failed: {type(error).__name__}: {error}"
            )
            self._fail(question, text)
            return
        self._resolve(question, decision, by=approver.by, surface=approver.surface)

    def _fail(self, question: Question, text: str) -> None:
        """End the run of a question whose approver failed. This is an error of the program, not a person's no."""
        if question.is_open:
            self._write(question, Deny(text), by="function")
            question.answer.set_exception(Failed(text))
            self._close(question)

    def _expire(self, question: Question) -> None:
        self._resolve(question, Deny(f"nobody answered within {self._terms.expiry:g} s"), by="expiry")

    def _give_up(self, question: Question, seconds: float) -> None:
        if question.is_open and not self._has_attendant(question.run.tree):
            reason = f"nobody was there to answer within {seconds:g} s"
            self._write(question, Deny(reason), by="expiry")
            question.answer.set_result(None)
            self._close(question)

    # Answering

    def pending(self, tree: str | None = None) -> list[Approval]:
        """Return the open questions, oldest first."""
        return [q.approval for q in self._questions.values() if q.is_open and tree in (None, q.approval.tree)]

    async def watch_questions(self, tree: str | None = None) -> AsyncGenerator[QuestionChange]:
        """Yield the open questions, then each change. A slow watcher delays nobody."""
        changes: asyncio.Queue[QuestionChange] = asyncio.Queue()
        for question in self.pending(tree):
            changes.put_nowait(question)
        self._watchers[changes] = tree
        try:
            while True:
                yield await changes.get()
        finally:
            del self._watchers[changes]

    def _publish(self, tree: str, change: QuestionChange) -> None:
        for changes, watched in self._watchers.items():
            if watched in (None, tree):
                changes.put_nowait(change)

    def answer(
        self, approval_id: str, decision: Decision, *, by: str, digest: str = "", surface: str = "", key: str = ""
    ) -> Answered:
        """Answer a question. Only the first answer is taken. With a `digest`, the answer counts only for the action
        with this digest. The `key` is written with the answer."""
        decision = check_decision(decision)
        question = self._questions.get(approval_id)
        if question is None:
            return "stale" if approval_id in self._answered else "unknown"
        if digest and digest != question.approval.digest:
            return "stale"
        return "taken" if self._resolve(question, decision, by=by, surface=surface, key=key) else "stale"

    def _resolve(
        self,
        question: Question,
        decision: Decision,
        *,
        by: str,
        surface: str = "",
        scope: str = "",
        rule: str = "",
        key: str = "",
    ) -> bool:
        """Set the answer of a question. Return False if the question is not open any more."""
        if not question.is_open:
            return False
        decision = self._check_answer(question, decision)
        decision = self._keep_rule(question, decision) if isinstance(decision, Allow) else decision
        reach = decision.scope if isinstance(decision, Allow) else "call"
        body = self._write(question, decision, by=by, surface=surface, scope=scope or reach, rule=rule, key=key)
        question.answer.set_result(decision)
        self._close(question)
        self._answer_others(question, decision, body)
        return True

    def _check_answer(self, question: Question, decision: Decision) -> Decision:
        """Return the decision, or a denial if the call is no longer the one shown, or if the edited call is not
        possible: a rule denies it, or the call is at a peer, which would make it as it was."""
        if isinstance(decision, Deny):
            return decision
        if question.has_changed:
            return Deny(CHANGED)
        if question.spec.tier == FOREIGN and decision.args is not None and is_edit(question.call.args, decision.args):
            return Deny(EDITED_AT_PEER.format(args=format_json(decision.args)))
        if decision.args is not None:
            call = Call(question.call.id, question.call.name, decision.args)
            verdict = judge_call(question.run, question.spec, call)
            if verdict.what == "deny":
                return Deny(f"the rule {verdict.rule} forbids the edited call")
        return decision

    def _keep_rule(self, question: Question, decision: Allow) -> Allow:
        """Keep the rule of an answer for the whole project. If this fails, the answer is for this call only."""
        if decision.scope != "project":
            return decision
        try:
            if decision.args is not None:
                raise ConfigError("its arguments were changed, and the rule would be for what was asked")
            if self._store_rule is None or not question.approval.rule:
                raise ConfigError("no rule would allow only this call, or there is no file to write it to")
            for rule in question.approval.rule.splitlines():
                self._store_rule(rule)
        except ConfigError as error:
            warning = f"the answer holds for this call only: {error}"
            question.run.write(Warned(warning, code="rule_not_kept"))
            return msgspec.structs.replace(decision, scope="call")
        return decision

    def _answer_others(self, question: Question, decision: Decision, written: ApprovalDecided) -> None:
        """Answer the other open questions that this answer covers too."""
        surface = written.surface
        if decision.all_pending_of_run:
            same = Deny(decision.reason) if isinstance(decision, Deny) else Allow()
            self._resolve_all(lambda q: same if q.run is question.run else None, "pending", surface, by=written.by)
        if isinstance(decision, Deny) or decision.scope == "call":
            return
        if decision.scope == "project":
            rule = question.approval.rule
            self._resolve_all(lambda q: Allow() if q.judge().what == "allow" else None, "project", surface, rule=rule)
            return
        words = remember_answer(question.run, written)
        self._resolve_all(lambda q: Allow() if q.find_standing() else None, decision.scope, surface, rule=words)

    def _resolve_all(
        self, choose: Callable[[Question], Decision | None], scope: str, surface: str, *, by: str = "", rule: str = ""
    ) -> None:
        for question in list(self._questions.values()):
            decision = choose(question)
            if decision is not None:
                by = by or f"rule: {rule}"
                self._resolve(question, decision, by=by, surface=surface, scope=scope, rule=rule)

    def _write(
        self,
        question: Question,
        decision: Decision,
        *,
        by: str,
        scope: str = "call",
        surface: str = "",
        rule: str = "",
        key: str = "",
    ) -> ApprovalDecided:
        body = _decided_event(
            question.approval.id, question.call, question.spec, decision, by=by, scope=scope, rule=rule
        )
        body = msgspec.structs.replace(body, surface=surface, key=key)
        question.written = question.run.write(body, True)
        question.closed = make_closing(redact(body), self._clock.wall())
        return body

    # Leaving

    def _close(self, question: Question) -> None:
        question.close()
        if self._questions.pop(question.approval.id, None) is not None:
            self._publish(question.approval.tree, question.closed or QuestionClosed(question.approval.id))
            self._answered[question.approval.id] = None
            if len(self._answered) > MAX_REMEMBERED:
                del self._answered[next(iter(self._answered))]

    async def close(self) -> None:
        """Cancel the approver functions that still run."""
        await self._approver_tasks.close(CLOSE_SECONDS)


@dataclass(slots=True, eq=False)
class Question:
    """An open question. `answer` is None if nobody came to answer. `written` is done when the log has the answer.
    `closed` describes the answer for watchers."""

    run: Run
    call: Call
    spec: ToolSpec
    approval: Approval
    answer: asyncio.Future[Decision | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    written: Awaitable[None] | None = None
    approver_task: asyncio.Task[None] | None = None
    timers: list[Timer] = field(default_factory=list)
    closed: QuestionClosed | None = None

    @property
    def is_open(self) -> bool:
        return not self.answer.done() and self.run.stopping is None and not self.run.ending

    @property
    def has_changed(self) -> bool:
        """True if the call or the tool differs from the one shown."""
        if self.spec.server and current_spec(self.run, self.spec).seal != self.spec.seal:
            return True
        return _digest_call(self.run, self.call) != self.approval.digest

    def judge(self) -> Verdict:
        return judge_call(self.run, self.spec, self.call)

    def find_standing(self) -> str:
        return _find_standing(self.run, self.call, self.spec, self.judge())

    def close(self) -> None:
        """Stop the timers and the approver function."""
        for timer in self.timers:
            timer.cancel()
        if self.approver_task is not None and self.approver_task is not asyncio.current_task():
            self.approver_task.cancel()


def judge_call(run: Run, spec: ToolSpec, call: Call) -> Verdict:
    """Return the verdict of the run's policy on a call. Exceptions for our sandboxes and workspaces do not hold for a
    call at a peer."""
    policy = run.policy
    if spec.tier == FOREIGN:
        return policy.judge(spec, call.args, primary=run.parent is None, workspace=run.folders.path)
    if spec.name in SANDBOXED_TOOLS and not spec.host and spec.name not in run.plan.host and _is_sandboxed(run):
        policy = find_sandbox_policy(policy)
    verdict = policy.judge(spec, call.args, primary=run.parent is None, workspace=run.folders.path)
    if run.plan.handed_files and verdict == ASK and _writes_handed_file(run, spec, call):
        return ALLOW
    return verdict


def remember_answer(run: Run, answer: ApprovalDecided, *, is_restored: bool = False) -> str:
    """Remember an answer for all calls of a tool, in the run, in its tree or at its peer. Return a description of the
    answer."""
    only, peer = run.ref.run if answer.scope == "run" else None, run.peer_number
    where = "this run" if only is not None else "this tree" if peer is None else f"run {peer} and the runs below it"
    standing = StandingAnswer(f"{answer.tool} in {where}, said by {answer.by}", is_restored)
    run.tree.remember_answer((only, peer, join_seal(answer.tool, answer.seal)), standing)
    return standing.words


def _find_standing(run: Run, call: Call, spec: ToolSpec, verdict: Verdict) -> str:
    """Return the description of an earlier answer that covers a call, or ''. An answer from an earlier process does not
    cover a call that a current rule asks about: a log never loosens the settings."""
    answers = run.tree.standing_answers
    if not answers or verdict.what != "ask" or verdict.firm:
        return ""
    peer, tool = run.peer_number, join_seal(call.name, spec.seal)
    keys = ((run.ref.run, peer, tool), (None, peer, tool))
    found = [answer for key in keys if (answer := answers.get(key)) is not None]
    return next((answer.words for answer in found if not (verdict.rule and answer.is_restored)), "")


def _was_allowed_before(tree: Tree, call: Call, spec: ToolSpec) -> bool:
    """Return True if a person allowed the tool while it had another seal."""
    tool = join_seal(call.name, spec.seal)
    ours = [other for _, peer, other in tree.standing_answers if peer is None]
    return any(other != tool and other.startswith(f"{call.name}@") for other in ours)


def _writes_handed_file(run: Run, spec: ToolSpec, call: Call) -> bool:
    """Return True if a call writes a file that the run hands over, into the run's own workspace."""
    plan, folder = run.plan, run.folders.path
    if spec.name != WRITERS[0] or spec.host or spec.name in plan.host:
        return False
    named = [call.args[key] for key in ("path", "file_path") if key in call.args]
    wanted = [each for name in plan.handed_files for each in (name, f"{folder}/{name}")]
    return not run.folders.is_shared and bool(named) and all(name in wanted for name in named)


def current_spec(run: Run, spec: ToolSpec) -> ToolSpec:
    """Return the spec of an MCP tool as its server describes it now."""
    now: ToolSpec = getattr(run.plan.host.get(spec.name), "spec", spec)
    return now


def _is_sandboxed(run: Run) -> bool:
    """Return True if the run changes only its own folder, in a sandbox that does not share the host's network."""
    started = run.plan.runtime.started
    sandbox = () if started is None else started.sandbox
    return bool(sandbox) and "full_network" not in sandbox and run.folders.path.startswith(f"{run.folders.own}/")


def _describe_changed_tool(run: Run, call: Call, spec: ToolSpec, shown: str) -> str:
    """Return the preview of a call whose tool is now described differently by its server: the change, then the call.
    The old description is known if the run was offered the tool with it."""
    before = next((each for each in run.plan.specs if each.name == spec.name and each.seal != spec.seal), None)
    lines = [ANOTHER]
    if before is not None and before.description != spec.description:
        lines += [f"- {line}" for line in before.description.splitlines()]
        lines += [f"+ {line}" for line in spec.description.splitlines()]
    else:
        lines.append(f"Its description: {spec.description or '(none)'}")
    if before is not None and before.schema != spec.schema:
        lines += [f"- arguments: {format_json(before.schema)}", f"+ arguments: {format_json(spec.schema)}"]
    return "\n".join([*lines, "", shown or format_json(clean_value(call.args))])


def _digest_call(run: Run, call: Call) -> str:
    return digest_of(run.tree.id, run=run.ref.run, call_id=call.id, tool=call.name, args=call.args)


def _make_unconfirmed(run: Run, call: Call) -> Unconfirmed:
    """Return the error for a call that nobody can be asked about. The ending of a subagent has a fixed text, so a
    warning names the tool."""
    if not run.is_primary:
        run.write(Warned(f"{call.name} needs a confirmation, and no approver is attached", "unconfirmed"))
    return Unconfirmed(call.name)


def _derive_rule(run: Run, call: Call, project: str, seal: str) -> str:
    """Return the project rules that would allow this call, one per line. A file in a workspace other than the project
    has no rule: the same path in the project would be another file. A command or path with a secret has none either:
    the file of rules must not have the secret, and without it the rule would be for other calls."""
    if is_a(call.name, FILES) and run.folders.path != project:
        return ""
    subjects = subjects_of(call.name, call.args, workspace=run.folders.path, project=project)
    subject = subjects[0] if subjects else ""
    rule = "\n".join(map(str, derive_rules(call.name, subject, seal)))
    return rule if clean_text(subject) == subject and clean_text(rule) == rule else ""


def _decided_event(
    approval_id: str,
    call: Call,
    spec: ToolSpec,
    decision: Decision,
    *,
    by: str,
    scope: str,
    rule: str,
) -> ApprovalDecided:
    return ApprovalDecided(
        approval_id=approval_id,
        call_id=call.id,
        allowed=isinstance(decision, Allow),
        reason=decision.reason if isinstance(decision, Deny) else "",
        by=by,
        tool=call.name,
        scope=scope,
        args=decision.args if isinstance(decision, Allow) else None,
        seal=spec.seal,
        rule=rule,
    )
