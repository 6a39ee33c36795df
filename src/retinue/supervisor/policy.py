"""The policy: decides by rules, tier and the user's mode whether a tool call runs, asks or is denied. Fulfils the
Policy port.

Rules are values (core/rules.py). Here they meet the disk: a path is resolved before it is judged, in any spelling.
Every call is judged, so verdicts independent of the arguments are cached.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from retinue.core.commands import PATH_CHARACTERS, list_named_paths
from retinue.core.messages import FOREIGN, QUESTION, ToolSpec
from retinue.core.ports import Policy
from retinue.core.rules import (
    ALLOW,
    ALWAYS_ASK,
    ASK,
    CODE_MODE,
    FILES,
    READERS,
    SHELLS,
    WRITERS,
    Mode,
    Rule,
    Rules,
    Verdict,
    concerns_tool,
    escape_pattern,
    find_allowing_rule,
    find_stopping_rule,
    is_a,
    is_about_path,
    is_unclear,
    matches_path,
)
from retinue.files.reserved import is_git_name

CACHED = 1024
NAMED = "it names a path that {rule} covers"
UNCLEAR = "it is unclear whether a rule for {tool} applies"
_SEARCHES = frozenset({"glob", "grep"})
SANDBOXED_TOOLS = frozenset({"edit", "write", "shell", CODE_MODE})
MAX_PATHS = 2000
GIT_RULE = "that protects .git"
ASKS_PERSON = Verdict("ask", rule="only a person can answer", firm=True)
_STRICTNESS = {"allow": 0, "ask": 1, "deny": 2}


class RulePolicy:
    """A policy made of rules and a mode.

    - `ask`: calls of the confirm tier ask, in every run. So do tools that edit, write or are a shell, and all MCP
      tools of the primary. Spawning does not ask: only profiles that the user made available can be spawned, and each
      of their calls is judged.
    - `strict`: like `ask`, and every tool of the primary asks.
    - `sandboxed`: like `ask`. `in_sandbox` is the policy for a run in a sandboxed workspace of its own, where edits,
      commands and programs do not ask.
    - `yes`: only a rule asks.

    A call of the `foreign` tier, at a peer, is denied and asked about by the same rules, but no rule allows it: rules
    are written for the tools of this machine.

    `config` is the file with the rules. Editing it asks in every mode but `yes`, or an agent could give itself rules.
    Editing programs that git runs (`git_programs`) asks in every mode."""

    def __init__(
        self,
        rules: Rules,
        *,
        mode: Mode,
        project: str = "",
        config: str = "",
        git_programs: Sequence[str] = (),
        unasked: frozenset[str] = frozenset(),
    ) -> None:
        self.mode = mode
        self._unasked = unasked
        self.in_sandbox = self
        if mode == "sandboxed" and not unasked:
            self.in_sandbox = RulePolicy(
                rules, mode=mode, project=project, config=config, git_programs=git_programs, unasked=SANDBOXED_TOOLS
            )
        self._project = os.path.realpath(project) if project else ""
        own = [escape_pattern(os.path.realpath(config))] if config and mode != "yes" else []
        programs = [f"{escape_pattern(path)}{rest}" for path in git_programs for rest in ("", "/**")]
        changers = ("edit", "write", "*_edit_file", "*_write_file")
        self._protected = tuple(Rule(tool, path) for path in (*own, *programs) for tool in changers)
        self._rules = rules
        self._known: dict[tuple[str, str, bool, bool], Verdict] = {}
        self._concerned: dict[str, tuple[tuple[Rule, ...], ...]] = {}

    def judge(self, spec: ToolSpec, args: dict[str, Any], *, primary: bool, workspace: str) -> Verdict:
        if spec.tier == QUESTION:
            return ASKS_PERSON
        if spec.server and _writes_git_folder(spec.name, args, workspace, self._project):
            return Verdict("deny", GIT_RULE)
        key = (spec.name, spec.seal if spec.server else spec.tier, spec.spawns, primary)
        known = self._known.get(key)
        verdict = known if known is not None else self._judge(key, spec, args, workspace)
        if not spec.server or verdict.what == "deny" or is_a(spec.name, FILES):
            return verdict
        if any(map(_names_git_folder, _list_path_arguments(args.values()))):
            return Verdict("ask", GIT_RULE, firm=True)
        if verdict.what == "ask" or not self._path_rules:
            return verdict
        listed = [text for value in args.values() if isinstance(value, list) for text in value[:MAX_PATHS]]
        rule = self._find_path_rule(_list_path_arguments((*args.values(), *listed)), workspace)
        return Verdict("ask", NAMED.format(rule=rule)) if rule else verdict

    def learn(self, rule: Rule) -> None:
        """Add an allow rule."""
        rules = self._rules
        self._rules = Rules(rules.mode, (*rules.allow, rule), rules.ask, rules.deny)
        self._forget()
        if self.in_sandbox is not self:
            self.in_sandbox.learn(rule)

    def _judge(self, key: tuple[str, str, bool, bool], spec: ToolSpec, args: dict[str, Any], workspace: str) -> Verdict:
        tool, *_, primary = key
        concerned = self._concerned.get(tool)
        if concerned is None:
            if max(len(self._concerned), len(self._known)) >= CACHED:
                self._forget()
            concerned = self._concerned[tool] = self._rules_about(tool)
        verdict = self._judge_by(concerned, spec, args, primary=primary, workspace=workspace)
        by_path = self._path_rules and is_a(tool, SHELLS)
        if not by_path and all(rule.pattern is None for rules in concerned for rule in rules):  # for any arguments
            self._known[key] = verdict
        return verdict

    def _forget(self) -> None:
        self._known.clear()
        self._concerned.clear()

    def _rules_about(self, tool: str) -> tuple[tuple[Rule, ...], ...]:
        """Return the deny, allow, ask and protecting rules about a tool. A rule that denies or asks about a path holds
        for every tool that reads or writes the path. Code mode obeys these rules and the rules about shells, because a
        program can do anything."""

        def is_held(rule: Rule) -> bool:
            if tool == CODE_MODE and (concerns_tool(rule, SHELLS[0]) or self._is_path_rule(rule)):
                return True
            return concerns_tool(rule, tool) or is_about_path(rule, tool)

        deny, ask = (tuple(filter(is_held, rules)) for rules in (self._rules.deny, self._rules.ask))
        allow, protected = (
            tuple(rule for rule in rules if concerns_tool(rule, tool)) for rules in (self._rules.allow, self._protected)
        )
        return deny, allow, ask, protected

    @staticmethod
    def _is_path_rule(rule: Rule) -> bool:
        return any(is_about_path(rule, kind) for kind in (READERS[0], WRITERS[0]))

    @cached_property
    def _path_rules(self) -> tuple[Rule, ...]:
        return tuple(filter(self._is_path_rule, (*self._rules.deny, *self._rules.ask)))

    @cached_property
    def hidden_paths(self) -> tuple[str, ...]:
        """The patterns of paths that searches skip, because reading them is denied or asks."""
        rules = (*self._rules.deny, *self._rules.ask)
        return tuple(rule.pattern for rule in rules if rule.pattern is not None and is_about_path(rule, READERS[0]))

    def find_write_denial(self, path: str, workspace: str) -> str:
        """Return the rule that denies writing this path, or ''. A rule without a pattern is about a tool, not a
        path."""
        if not self._write_denials:
            return ""
        tool, args = WRITERS[0], {"path": path}
        subjects = subjects_of(tool, args, workspace=workspace, project=self._project)
        return find_stopping_rule(self._write_denials, tool, args, subjects)

    @cached_property
    def _write_denials(self) -> tuple[Rule, ...]:
        deny, *_ = self._rules_about(WRITERS[0])
        return tuple(rule for rule in deny if rule.pattern is not None)

    def _find_named_path(self, tool: str, subjects: tuple[str, ...], workspace: str) -> str:
        """Return the rule about a path among the words of a shell command, or ''."""
        if not self._path_rules or not is_a(tool, SHELLS):
            return ""
        pieces = {piece for subject in subjects for piece in list_named_paths(subject)}
        if len(pieces) > MAX_PATHS:  # each is looked up on disk
            return str(self._path_rules[0])
        return self._find_path_rule(pieces, workspace)

    def _find_path_rule(self, given: Iterable[str], workspace: str) -> str:
        """Return the first rule about one of these paths, or ''."""
        paths = [
            path
            for each in given
            for path in subjects_of(READERS[0], {"path": each}, workspace=workspace, project=self._project)
        ]
        for rule in self._path_rules:
            if any(matches_path(rule.pattern or "", path) for path in paths):
                return str(rule)
        return ""

    def _judge_by(
        self,
        concerned: tuple[tuple[Rule, ...], ...],
        spec: ToolSpec,
        args: dict[str, Any],
        *,
        primary: bool,
        workspace: str,
    ) -> Verdict:
        tool = spec.name
        # The tier that a server claims for its tools does not count.
        confirm = primary if spec.server else spec.tier != "observe" and not spec.spawns
        asks = confirm or is_a(tool, ALWAYS_ASK) or (self.mode == "strict" and primary)
        default = ASK if asks and self.mode != "yes" and tool not in self._unasked else ALLOW
        deny, allow, ask, protected = concerned
        named = self._path_rules and is_a(tool, SHELLS)
        if not any(concerned) and not named:
            return default
        subjects = subjects_of(tool, args, workspace=workspace, project=self._project)
        if rule := find_stopping_rule(deny, tool, args, subjects):
            return Verdict("deny", rule)
        if rule := find_stopping_rule(protected, tool, args, subjects):
            return Verdict("ask", rule, firm=True)
        if rule := find_stopping_rule(ask, tool, args, subjects):
            return Verdict("ask", rule)
        if is_unclear((*deny, *ask, *protected), tool, subjects):
            return Verdict("ask", UNCLEAR.format(tool=tool))
        if rule := self._find_named_path(tool, subjects, workspace):
            return Verdict("ask", NAMED.format(rule=rule))
        if default.what == "ask" and spec.tier != FOREIGN and len(_list_paths(tool, args)) < 2:
            subject = subjects[0] if subjects else None
            if rule := find_allowing_rule(
                tuple(rule for rule in allow if rule.seal in ("", spec.seal)), tool, args, subject
            ):
                return Verdict("allow", rule)
            return Verdict("ask", changed=bool(find_allowing_rule(allow, tool, args, subject)))
        return default


class NarrowedPolicy:
    """The stricter verdict of two policies: a child with its own rules still obeys all rules of its parent."""

    def __init__(self, parent: Policy, own: Policy) -> None:
        self._parent = parent
        self._own = own

    @cached_property
    def in_sandbox(self) -> Policy:
        return NarrowedPolicy(find_sandbox_policy(self._parent), find_sandbox_policy(self._own))

    @cached_property
    def hidden_paths(self) -> tuple[str, ...]:
        """The patterns that either policy hides from searches."""
        return (*find_hidden_paths(self._parent), *find_hidden_paths(self._own))

    def judge(self, spec: ToolSpec, args: dict[str, Any], *, primary: bool, workspace: str) -> Verdict:
        first = self._parent.judge(spec, args, primary=primary, workspace=workspace)
        # `strict` in a child's own rules is about the child's tools, so its own policy judges it as a primary.
        second = self._own.judge(spec, args, primary=True, workspace=workspace)
        return second if (_STRICTNESS[second.what], second.firm) > (_STRICTNESS[first.what], first.firm) else first

    def find_write_denial(self, path: str, workspace: str) -> str:
        return find_write_denial(self._parent, path, workspace) or find_write_denial(self._own, path, workspace)


_WITH_RULES = (RulePolicy, NarrowedPolicy)  # a union would be looked through at each check


def find_sandbox_policy(policy: Policy) -> Policy:
    """Return the policy for calls in the run's own sandboxed workspace."""
    return policy.in_sandbox if isinstance(policy, _WITH_RULES) else policy


def find_hidden_paths(policy: Policy) -> tuple[str, ...]:
    """Return the patterns of paths that searches skip under this policy."""
    return policy.hidden_paths if isinstance(policy, _WITH_RULES) else ()


def find_write_denial(policy: Policy, path: str, workspace: str) -> str:
    """Return the rule of this policy that denies writing a path, or ''. Other rules that deny the tool do not hide
    it."""
    return policy.find_write_denial(path, workspace) if isinstance(policy, _WITH_RULES) else ""


def narrow_policy(policy: Policy, rules: Rules | None, project: str) -> Policy:
    """Return the policy of a child whose profile has `rules`, below a run with `policy`."""
    if rules is None:
        return policy
    return NarrowedPolicy(policy, RulePolicy(rules, mode=rules.mode or "yes", project=project))


def subjects_of(tool: str, args: dict[str, Any], *, workspace: str, project: str) -> tuple[str, ...]:
    """Return the texts that patterns are matched against: the command of a call, or its path under all names. The
    first text is the one for allow rules: a path relative to the workspace if inside, else absolute."""
    if is_a(tool, SHELLS):
        command = args.get("command", args.get("cmd"))
        return (command,) if isinstance(command, str) else ()
    if not is_a(tool, FILES):
        return ()
    home = os.path.realpath(workspace)
    return tuple(
        name for raw in _list_paths(tool, args) for name in _list_names(raw, home=home, project=project) if name
    )


def _list_paths(tool: str, args: dict[str, Any]) -> list[str]:
    """Return the paths that a file tool is given. An MCP tool may use either argument name."""
    if not is_a(tool, FILES):
        return []
    given = list(filter(None, (args.get("path"), args.get("file_path")))) or ["."] * (tool in _SEARCHES)
    return [raw for raw in given if isinstance(raw, str) and "\0" not in raw]


def _list_names(raw: str, *, home: str, project: str) -> list[str]:
    path = os.path.realpath(os.path.join(home, raw))  # noqa: PTH118 - as text: a Path is too slow here
    names = [_below(path, home) or path, path, _below(path, project)]
    if project and project != home:  # tools look above a workspace for missing files
        names.append(_below(os.path.realpath(os.path.join(project, raw)), project))  # noqa: PTH118
    return names


def _writes_git_folder(tool: str, args: dict[str, Any], workspace: str, project: str) -> bool:
    """Return True if a file tool of an MCP server would write into a `.git`, in any spelling. Our own tools check this
    themselves when they write."""
    if not is_a(tool, WRITERS):
        return False
    return any(map(_names_git_folder, subjects_of(tool, args, workspace=workspace, project=project)))


def _list_path_arguments(values: Iterable[Any]) -> Iterator[str]:
    """Yield the arguments of an MCP tool that may be paths, for example of a tool that moves files. A sentence, a
    pattern such as `**/.git/**` and a URL are not paths."""
    for text in values:
        if not isinstance(text, str) or len(text) > PATH_CHARACTERS or "*" in text or "://" in text:
            continue
        if "/" in text or not any(map(str.isspace, text)):
            yield text


def _names_git_folder(path: str) -> bool:
    return any(map(is_git_name, path.split("/")))


def _below(path: str, folder: str) -> str:
    """Return `path` relative to `folder`, or '' if the folder does not contain it."""
    if path == folder:
        return "."
    return path.removeprefix(f"{folder}/") if folder and path.startswith(f"{folder}/") else ""
