"""The panel of pinned questions: the current question in full with its keys, and the number of other waiting
questions.

The panel turns keys into answers. It draws nothing: the view draws its lines and reports when a question is fully on
screen. Only then does the panel show the keys and accept them. Pasted text never answers. The questions come from the
log's view, so a question answered on another surface disappears here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from retinue.core.approvals import Allow, Approval, Decision, Deny, is_edit
from retinue.log.blocks import Role, describe_asker, format_question_body, make_question_spans
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.edit_call import UNCHANGED, edit_in_editor, find_editor, parse_args
from retinue.surfaces.printer.input_line import InputLine, Position
from retinue.surfaces.printer.keys import ESCAPE, TAB, Key, Paste
from retinue.surfaces.printer.printer import QUOTED, describe_rule
from retinue.surfaces.printer.screen import Line, Screen

KEYS = (  # each with the key for a call that a rule can allow; the first that fits is shown
    ("[y]es [n]o {always}this r[u]n this [t]ool [e]dit [?]", "[a]lways in this project "),
    ("[y]es [n]o {always}r[u]n [t]ool [e]dit [?]", "[a]lways "),
    ("[y]es [n]o {always}[u] [t] [e] [?]", "[a] "),
)
CONFIRM = "sure? [y]es [n]o"
NOT_SHOWN = "…"
READ_ONLY = "only watched here: `retinue approve` answers it"
PASTED = "pasted text does not answer a question"
NONSENSE = "not an answer: press y, n or ?"
REASON = "reason > "
JSON = "JSON > "
ALWAYS_HELP = "a  yes, and always in this project: shows the rule, then asks again"
HELP = (
    "y  yes, this call",
    "n  no; N asks you for a reason, which the agent reads",
    ALWAYS_HELP,
    "u  yes, and to this tool for the rest of this run",
    "t  yes, and to this tool in the whole tree",
    "p  yes, to all that this agent asks now; d  no, to all of it",
    "e  change the arguments (in $EDITOR, or as JSON)",
    "space, b  next and previous page; Tab, 2  another question",
)
_SCOPES = {"y": Allow(), "u": Allow("run"), "t": Allow("tool")}
_DIFF: dict[str, Role] = {"-": "bad", "+": "good", "@": "label"}
Mode = Literal["ask", "reason", "json", "confirm"]
ARM_SECONDS = 0.2  # a key pressed sooner was meant for the previous screen


class QuestionPanel:
    """The pinned questions on a screen. `answer` sends an answer; without it the panel is read only.

    With `names_runs`, each question names its run, because the questions are those of several trees."""

    def __init__(
        self,
        screen: Screen,
        answer: Callable[[Approval, Decision], object] | None,
        *,
        names_runs: bool = False,
    ) -> None:
        self._screen = screen
        self._names_runs = names_runs
        self._answer = answer
        self._questions: dict[str, Approval] = {}
        self._sent: set[str] = set()  # answered here, but the answer is not in the log yet
        self._id = ""
        self._mode: Mode = "ask"
        self._input = InputLine()
        self._decisions: list[tuple[Approval, Decision]] = []  # to be sent once confirmed
        self._about: tuple[str, ...] = ()  # lines between the question and its keys
        self._shown_args: dict[str, Any] | None = None  # the edited arguments of the call
        self._page = 0
        self._digits = ""
        self._body: tuple[object, list[Line]] | None = None
        self.is_armed = False

    @property
    def current(self) -> Approval | None:
        """Return the current question: the first waiting question, unless the user went to another."""
        found = self._questions.get(self._id)
        if found is None and self._questions:
            found = next(iter(self._questions.values()))
        return found

    @property
    def takes_escape(self) -> bool:
        """Return True while Escape goes back to the question."""
        return self.current is not None and self._mode != "ask"

    @property
    def takes_text(self) -> bool:
        """Return True while the user types a reason or arguments."""
        return self._mode in ("reason", "json")

    def show_questions(self, questions: Mapping[str, Approval]) -> None:
        """Set the waiting questions. A question that was answered here does not come back."""
        self._sent &= questions.keys()
        self._questions = {key: question for key, question in questions.items() if key not in self._sent}
        current = self.current
        if (current.id if current is not None else "") != self._id:
            self._go_to(current)

    def show_question(self, question_id: str) -> None:
        """Go to this question, if it is waiting."""
        if question_id != self._id and question_id in self._questions:
            self._go_to(self._questions[question_id])
        self._screen.request_redraw()

    def reopen_question(self, question_id: str) -> None:
        """Allow a question to be shown again after its answer could not be sent."""
        self._sent.discard(question_id)

    def arm_later(self, question_id: object, *, is_typing: Callable[[], bool] = lambda: False) -> None:
        """Accept keys for this question after `ARM_SECONDS`, now that it is fully on screen. Keys typed before are
        dropped. Does nothing while `is_typing` returns True."""

        def arm() -> None:
            current = self.current
            if current is None or current.id != question_id or self.is_armed or is_typing():
                return
            self._screen.terminal.discard_typed()
            if question_id == self._id and self._answer is not None:
                self.is_armed = True
                self._screen.request_redraw()

        if not self.is_armed:
            self._screen.call_later(ARM_SECONDS, arm)

    def press_key(self, key: Key | Paste) -> None:
        """Handle a key. Keys pressed before the question was fully drawn are ignored."""
        question = self.current
        if question is None or not self.is_armed:
            return
        if self.takes_text:
            self._write_line(question, key)
        elif isinstance(key, Paste):
            self._about = (PASTED,)
        elif self._mode == "confirm":
            self._press_confirm(key)
        else:
            self._press_answer(question, key)
        self._screen.request_redraw()

    def offer_edit(self, question: Approval, args: dict[str, Any] | str) -> None:
        """Show the call with the edited arguments and ask for confirmation, or show the error message in `args`."""
        if question.id != self._id:
            return
        if isinstance(args, str):
            self._about = (args,)
        elif not is_edit(question.args, args):
            self._about = (UNCHANGED,)
        else:
            self._shown_args, self._body = args, None
            self._ask_sure([(question, Allow(args=args))], ("the call as you changed it:",))
        self._screen.request_redraw()

    def layout_lines(self, columns: int, rows: int) -> tuple[list[Line], Position | None]:
        """Return the lines of the question in at most `rows` rows, and the cursor position if the user is typing."""
        question = self.current
        if question is None:
            return [], None
        shown = question
        if self._shown_args is not None:
            shown = msgspec.structs.replace(question, args=self._shown_args, preview="")
        about: list[Line] = [
            (("faint", piece),)
            for text in self._about
            for piece in safe.wrap_line(safe.escape_line(text), columns, at_words=True)
        ]
        keys, cursor = self._layout_keys(question, columns)
        body = self._layout_body(shown, columns)
        header = self._layout_header(shown, columns)
        room = max(1, rows - len(header) - len(about[:rows]) - len(keys))
        if len(body) > room:
            body = self._cut_page(body, max(1, room - 1))
        lines = [*header, *body, *about[: max(0, rows - len(header) - 1 - len(keys))], *keys]
        return lines, None if cursor is None else (len(lines) - len(keys) + cursor[0], cursor[1])

    def _layout_header(self, question: Approval, columns: int) -> list[Line]:
        """Return the run and the call on one line. If they do not fit, the label gets a separate line."""
        more = len(self._questions) - 1
        waiting = "" if not more else f", {more} more wait{'s' if more == 1 else ''}"
        asker = safe.escape_line(f"{describe_asker(question, names_run=self._names_runs)}{waiting}")
        side: Line = (("faint", f"  {asker}"),)
        spans = make_question_spans(question.label, question.tool, question.args)
        if _measure(spans) + _measure(side) <= columns:
            return [(*spans, *side)]
        below: list[Line] = [(("faint", f"  {piece}"),) for piece in safe.wrap_line(asker, columns - 2, at_words=True)]
        if _measure(spans) <= columns:
            return [spans, *below]
        front: list[Line] = [spans[:-2]] if question.label is not None else []
        call = safe.escape_line("".join(text for _, text in (spans[-2:] if front else spans)))
        return [*front, *((("tool", piece),) for piece in safe.wrap_line(call, columns)), *below]

    def _layout_body(self, question: Approval, columns: int) -> list[Line]:
        """Return the lines of the action. They may be many, so they are cached per width."""
        key = question.id, self._shown_args is None, columns
        if self._body is None or self._body[0] != key:
            self._body = key, layout_action(question, columns)
        return self._body[1]

    def _layout_keys(self, question: Approval, columns: int) -> tuple[list[Line], Position | None]:
        if self._answer is None:
            return [(("faint", READ_ONLY),)], None
        if not self.is_armed:
            return [(("faint", NOT_SHOWN),)], None
        if self.takes_text:
            prompt = REASON if self._mode == "reason" else JSON
            rows, cursor = self._input.layout_lines(columns, prompt=prompt)
            return [(("plain", row),) for row in rows], cursor
        return [(("mark", CONFIRM if self._mode == "confirm" else list_keys(question, columns)),)], None

    def _cut_page(self, body: list[Line], room: int) -> list[Line]:
        pages = -(-len(body) // room)
        self._page = max(0, min(self._page, pages - 1))
        start = self._page * room
        end = min(len(body), start + room)
        place = f"lines {start + 1}-{end} of {len(body)} · space: next page, b: back"
        return [*body[start:end], (("faint", place),)]

    def _go_to(self, question: Approval | None) -> None:
        self._id = "" if question is None else question.id
        self._page, self._digits, self.is_armed = 0, "", False
        self._return_to_ask()

    def _return_to_ask(self, *about: str) -> None:
        self._mode, self._about, self._decisions, self._shown_args = "ask", about, [], None

    def _ask_sure(self, decisions: list[tuple[Approval, Decision]], about: Sequence[str]) -> None:
        self._mode, self._decisions, self._about = "confirm", decisions, tuple(about)
        self._page = 0

    def _send(self, *answers: tuple[Approval, Decision]) -> None:
        """Send answers and show the next question immediately."""
        assert self._answer is not None
        for question, decision in answers:
            self._sent.add(question.id)
            self._answer(question, decision)
        self._return_to_ask()
        self.show_questions(dict(self._questions))

    def _press_confirm(self, key: Key) -> None:
        if key.name == "y":
            self._send(*self._decisions)
        elif key.name in ("n", ESCAPE):
            self._return_to_ask()
        elif not self._turn_page(key):
            self._about = (*self._about[:8], NONSENSE)

    def _press_answer(self, question: Approval, key: Key) -> None:
        self._about = ()
        if key.name in _SCOPES:
            self._send((question, _SCOPES[key.name]))
        elif key.name == "n":
            self._send((question, Deny()))
        elif key.name == "N":
            self._mode, self._input = "reason", InputLine()
        elif key.name == "?":
            self._page = 0
            self._about = tuple(line for line in HELP if question.rule or line is not ALWAYS_HELP)
        elif key.name == "e":
            self._begin_edit(question)
        elif key.name == "a":
            self._offer_rule(question)
        elif key.name in ("p", "d"):
            self._offer_all(question, allow=key.name == "p")
        elif not self._turn_page(key) and not self._change_question(key):
            self._page, self._about = 0, (NONSENSE,)

    def _turn_page(self, key: Key) -> bool:
        if key.name in (" ", "page-down", "down"):
            self._page += 1
        elif key.name in ("b", "page-up", "up"):
            self._page -= 1
        else:
            return False
        return True

    def _change_question(self, key: Key) -> bool:
        """Go to the question with the typed number, or to the next or previous question. Return False for other
        keys."""
        questions = list(self._questions.values())
        if key.name in (TAB, "shift-tab"):
            place = [each.id for each in questions].index(self._id) + (1 if key.name == TAB else -1)
            if len(questions) > 1:
                self._go_to(questions[place % len(questions)])
            return True
        if not (key.name.isascii() and key.name.isdigit()):
            return False
        self._digits = (self._digits + key.name)[-6:]
        found = [each for each in questions if str(each.number).startswith(self._digits)]
        if not found:
            self._about, self._digits = (f"no question {self._digits} is waiting",), ""
        elif len({each.number for each in found}) == 1:  # several trees may have this number: go to the next one
            ids = [each.id for each in found]
            place = ids.index(self._id) + 1 if self._id in ids else 0
            if ids[place % len(ids)] != self._id:
                self._go_to(found[place % len(ids)])
            self._digits = ""
        return True

    def _begin_edit(self, question: Approval) -> None:
        command = find_editor()
        if command:
            self._screen.tasks.start(self._edit(question, command))
            return
        self._mode, self._input = "json", InputLine()
        self._input.replace_text(msgspec.json.encode(question.args, enc_hook=str).decode())

    async def _edit(self, question: Approval, command: list[str]) -> None:
        with self._screen.terminal.lend() as fd:
            args = await edit_in_editor(command, question.args, fd=fd)
        self.offer_edit(question, args)

    def _offer_rule(self, question: Approval) -> None:
        self._about = (describe_rule(question),)
        if question.rule:
            self._ask_sure([(question, Allow("project"))], self._about)

    def _offer_all(self, question: Approval, *, allow: bool) -> None:
        """Offer the same answer for all questions the run has open now. Questions that arrive while the user reads are
        excluded."""
        pending = [each for each in self._questions.values() if (each.tree, each.run) == (question.tree, question.run)]
        decision: Decision = Allow() if allow else Deny()
        listed = ["".join(text for _, text in make_question_spans(None, each.tool, each.args)) for each in pending]
        what = f"{'yes' if allow else 'no'} to {len(pending)} question{'' if len(pending) == 1 else 's'} of this agent:"
        self._ask_sure([(each, decision) for each in pending], (what, *listed))

    def _write_line(self, question: Approval, key: Key | Paste) -> None:
        if isinstance(key, Key) and key.name == ESCAPE:
            self._return_to_ask()
            return
        text = self._input.press_key(key)
        if text is None:
            return
        if self._mode == "reason":
            self._send((question, Deny(text.strip())))
        else:
            self._return_to_ask()
            self.offer_edit(question, parse_args(text) if text.strip() else question.args)


def _measure(spans: Line) -> int:
    return sum(safe.measure_width(safe.escape_line(text)) for _, text in spans)


def list_keys(question: Approval, columns: int) -> str:
    """Return the keys that answer a question, in at most `columns` if possible."""
    lists = [keys.format(always=always if question.rule else "") for keys, always in KEYS]
    return next((keys for keys in lists if len(keys) <= columns), lists[-1])


def layout_action(question: Approval, columns: int) -> list[Line]:
    """Return the action as lines of at most `columns`. Each line starts with a mark of ours, so that no text can
    imitate a question."""
    lines: list[Line] = []
    text = format_question_body(question).rstrip("\n")
    for line in safe.escape_text(text).split("\n") if text else ():
        role: Role = _DIFF.get(line[:1], "plain")
        lines.extend((("faint", QUOTED), (role, piece)) for piece in safe.wrap_line(line, columns - len(QUOTED)))
    return lines
