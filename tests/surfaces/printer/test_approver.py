"""Questions at a real terminal: a pseudo-terminal whose other end is the person."""

import asyncio
import os
import shlex
import sys
import termios
from collections.abc import Iterator

import pytest

from retinue.core.approvals import INPUT_REQUIRED, Allow, Approval, Deny
from retinue.core.errors import ApproverLeft
from retinue.core.events import ApprovalAsked, Delta, Thinking
from retinue.surfaces.printer.approver import ANSWER, LEFT, PROMPT, SURE, TerminalApprover, parse_answer
from retinue.surfaces.printer.printer import Printer
from tests.surfaces.printer.facts import ANNA, Facts


class Person:
    """Sits at the terminal: reads what is on the screen, types lines."""

    def __init__(self) -> None:
        self.master, self.terminal = os.openpty()
        self._data = b""
        self.stream = os.fdopen(self.terminal, "w", encoding="utf-8", closefd=False)
        self.facts = Facts()
        self.preview = ""
        self.number = 3  # so many were asked and answered before

    def sit_down(self, *, color: bool = False, names_runs: bool = False) -> None:
        self.printer = Printer(self.stream, color=color)
        self.approver = TerminalApprover(self.printer, self.terminal, names_runs=names_runs)

    def ask(self, name: str, *, tree: str = "t1") -> asyncio.Task[Allow | Deny]:
        """A question, and its event in its place among the blocks. Each tree counts its own questions."""
        args = {"path": f"{name}.py"}
        self.number += tree == "t1"
        question = Approval(
            name, tree, 1, "/main/anna-1", "anna", "edit", args, "c1", name,
            self.preview or f"-old {name}\n+new {name}",
            number=self.number,
        )  # fmt: skip
        asking = asyncio.ensure_future(self.approver(question))
        asking.get_loop().call_soon(
            self.printer.show_event, self.facts(ANNA, ApprovalAsked(name, "c1", "edit", args, name, question.preview))
        )
        return asking

    @property
    def screen(self) -> str:
        """The text read so far, without an incomplete character at its end."""
        return self._data.decode(errors="ignore").replace("\r\n", "\n")

    async def sees(self, words: str) -> None:
        """Reads until these words have come, and takes everything up to them off the screen."""
        loop = asyncio.get_running_loop()
        while words not in self.screen:
            ready = asyncio.Event()
            loop.add_reader(self.master, ready.set)
            await ready.wait()
            loop.remove_reader(self.master)
            self._data += os.read(self.master, 65536)
        self.seen, rest = self.screen.split(words, 1)
        half = self._data[len(self._data.decode(errors="ignore").encode()) :]
        self._data = rest.encode() + half

    def types(self, text: str) -> None:
        os.write(self.master, text.encode())

    def ask_in_words(self, text: str) -> asyncio.Task[Allow | Deny]:
        """A question of an agent elsewhere, which wants words."""
        self.number += 1
        args = {"question": text}
        question = Approval(
            "input-1", "t1", 1, "/main/anna-1", "anna", INPUT_REQUIRED, args, "c1", "anna", text, number=self.number
        )
        return asyncio.ensure_future(self.approver(question))

    def leave(self) -> None:
        os.close(self.master)
        self.master = -1


@pytest.fixture
def person() -> Iterator[Person]:
    person = Person()
    yield person
    person.stream.close()
    for fd in (person.master, person.terminal):
        if fd >= 0:
            os.close(fd)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("y\n", Allow()),
        ("YES\n", Allow()),
        ("n\n", Deny()),
        ("no\n", Deny()),
        ("n because it is late\n", Deny("because it is late")),
        ("No, not today\n", Deny("not today")),
    ],
)
async def test_answers(person: Person, typed: str, expected: Allow | Deny) -> None:
    person.sit_down()
    asking = person.ask("one")
    await person.sees(PROMPT)
    assert person.seen == "◐ [one] edit(one.py)\n│ -old one\n│ +new one\n\n"
    person.types(typed)
    assert await asking == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("blue\n", Allow(args={"question": "Which cluster?", "answer": "blue"})),
        ("\n3\n", Allow(args={"question": "Which cluster?", "answer": "3"})),
        ("no, none of them\n", Deny("no, none of them")),
    ],
)
async def test_an_agent_that_asks_for_words_gets_them(person: Person, typed: str, expected: Allow | Deny) -> None:
    person.sit_down()
    asking = person.ask_in_words("Which cluster?")
    await person.sees(ANSWER)
    person.types(typed)
    assert await asking == expected


async def test_what_is_neither_yes_nor_no_is_asked_again(person: Person) -> None:
    person.sit_down()
    asking = person.ask("one")
    for typed in ("maybe\n", "\n", "yes but no\n", "yn\n"):
        await person.sees(PROMPT)
        person.types(typed)
    await person.sees(PROMPT)
    assert not asking.done()
    person.types("y\n")
    assert await asking == Allow()


async def test_questions_come_one_at_a_time_in_their_order(person: Person) -> None:
    person.sit_down()
    first = person.ask("one")
    await person.sees(PROMPT)
    second, third = person.ask("two"), person.ask("three")
    await person.sees("(1 more question waiting)\n")
    await person.sees("(2 more questions waiting)\n")
    assert "two.py" not in person.seen
    await person.sees(PROMPT)
    person.types("n\n")
    assert await first == Deny()
    await person.sees("◐ [two] edit(two.py)")
    await person.sees("(1 more question waiting)")
    await person.sees(PROMPT)
    person.types("y\n")
    assert await second == Allow()
    await person.sees("◐ [three] edit(three.py)")
    await person.sees(PROMPT)
    assert "waiting" not in person.seen
    person.types("n\n")
    assert await third == Deny()


async def test_a_number_goes_to_the_question_that_has_it_at_every_terminal(person: Person) -> None:
    person.sit_down()
    first, second = person.ask("one"), person.ask("two")
    await person.sees("  5. [two] edit(two.py)\n" + PROMPT)
    person.types("2\n")
    await person.sees("no question 2 is waiting\n" + PROMPT)
    person.types("5\n")
    await person.sees("◐ [two]")
    await person.sees("  4. [one] edit(one.py)\n" + PROMPT)
    person.types("y\n")
    assert await second == Allow()
    await person.sees(PROMPT)
    person.types("n\n")
    assert await first == Deny()


async def test_questions_of_several_trees_name_their_runs_and_a_number_goes_to_the_next_that_has_it(
    person: Person,
) -> None:
    person.sit_down(names_runs=True)
    first, second = person.ask("one"), person.ask("two", tree="t2")
    await person.sees("◐ [one] edit(one.py)  anna · question 4 of t1/1\n")
    await person.sees("  4. [two] edit(two.py) of t2/1\n" + PROMPT)
    third = person.ask("three", tree="t3")
    await person.sees(PROMPT)
    for name, run in (("two", "t2/1"), ("three", "t3/1"), ("one", "t1/1"), ("two", "t2/1")):
        person.types("4\n")
        await person.sees(f"◐ [{name}] edit({name}.py)  anna · question 4 of {run}\n")
        await person.sees(PROMPT)
    person.types("v\n")
    await person.sees("anna · question 4 of t2/1\n")
    await person.sees(PROMPT)
    person.types("n\n")
    assert await second == Deny()
    await person.sees("question 4 of t1/1")
    await person.sees(PROMPT)
    person.leave()
    for asking in (first, third):
        with pytest.raises(ApproverLeft):
            await asking
    assert LEFT.format(name="one") == "(the input has ended: answer with `retinue approve one` in another terminal)"


async def test_yes_to_all_that_an_agent_asks_is_to_what_was_shown(person: Person) -> None:
    person.sit_down()
    first, second = person.ask("one"), person.ask("two")
    await person.sees(PROMPT)
    person.types("p\n")
    await person.sees(SURE)
    assert "+new one" in person.seen and "+new two" in person.seen
    person.types("no\n")
    await person.sees(PROMPT)
    assert not first.done() and not second.done()
    person.types("p\n")
    await person.sees(SURE)
    third = person.ask("three")
    await person.sees("(2 more questions waiting)")
    person.types("y\n")
    assert (await first, await second) == (Allow(), Allow())
    await person.sees("◐ [three]")
    await person.sees(PROMPT)
    assert not third.done()
    person.types("n\n")
    assert await third == Deny()


async def test_what_was_typed_before_a_question_was_shown_is_no_answer(person: Person) -> None:
    person.sit_down()
    first, second = person.ask("one"), person.ask("two")
    await person.sees(PROMPT)
    person.types("y\ny\ny\n")
    assert await first == Allow()
    await person.sees("◐ [two]")
    await person.sees(PROMPT)
    assert not second.done()
    person.types("n\n")
    assert await second == Deny()


@pytest.mark.parametrize(("color", "cleared"), [(False, "\n"), (True, "\r\x1b[K")])
async def test_blocks_still_come_and_the_prompt_comes_again(person: Person, color: bool, cleared: str) -> None:
    person.sit_down(color=color)
    asking = person.ask("one")
    await person.sees(PROMPT)
    person.printer.show_event(person.facts((3, "/main/bert-3", "bert"), Thinking("still at work")))
    await person.sees(PROMPT)
    assert person.seen.startswith(cleared)
    assert "still at work" in person.seen
    person.types("y\n")
    assert await asking == Allow()


async def test_what_is_being_said_leaves_the_line_to_who_is_asked(person: Person) -> None:
    person.sit_down(color=True)
    termios.tcsetwinsize(person.terminal, (24, 77))
    person.printer.show_delta(Delta(tree="t", run=1, path="/anna", agent="anna", text="let me " * 50))
    await person.sees("\r\x1b[K\x1b[2manna: …")
    await person.sees("let me\x1b[0m")
    assert len("anna: …" + person.seen + "let me") == 76  # as wide as where it prints, wherever the answer goes
    person.printer.show_status("anna: let me \x1bsee")
    await person.sees("\r\x1b[K\x1b[2manna: let me \\x1bsee\x1b[0m")
    asking = person.ask("one")
    await person.sees(PROMPT)
    assert person.seen.startswith("\r\x1b[K")
    person.printer.show_status("bert: me too")
    person.types("y\n")
    assert await asking == Allow()
    person.printer.show_status("bert: at last")
    await person.sees("bert: at last")
    assert "me too" not in person.seen


async def test_a_cancelled_question_disappears_and_the_next_is_asked(person: Person) -> None:
    person.sit_down()
    first, second, third = person.ask("one"), person.ask("two"), person.ask("three")
    await person.sees(PROMPT)
    second.cancel()
    first.cancel()
    await person.sees("\n(no longer needed)\n")
    await person.sees("◐ [three]")
    await person.sees(PROMPT)
    person.types("y\n")
    assert await third == Allow()
    assert first.cancelled() and second.cancelled()


async def test_an_editor_that_is_no_longer_needed_gives_the_terminal_back(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys, tty; tty.setraw(0); print('raw', flush=True); sys.stdin.read()"
    monkeypatch.setenv("VISUAL", shlex.join([sys.executable, "-c", program]))
    person.sit_down()
    modes = termios.tcgetattr(person.terminal)
    asking = person.ask("one")
    await person.sees(PROMPT)
    person.types("e\n")
    await person.sees("raw")
    assert termios.tcgetattr(person.terminal) != modes
    asking.cancel()
    await asyncio.wait([asking])
    assert termios.tcgetattr(person.terminal) == modes


async def test_the_end_of_the_input_answers_nothing(person: Person) -> None:
    person.sit_down()
    asking = person.ask("one")
    await person.sees(PROMPT)
    person.types("\x04")
    await person.sees(LEFT.format(name=4))
    with pytest.raises(ApproverLeft):
        await asking


async def test_a_terminal_that_is_gone_answers_nothing(person: Person) -> None:
    person.sit_down()
    asking = person.ask("one")
    await person.sees(PROMPT)
    person.leave()
    for question in (asking, person.ask("two")):
        with pytest.raises(ApproverLeft):
            await question


async def test_a_file_is_nobody(person: Person) -> None:
    person.sit_down()
    with open(os.devnull, "rb") as nothing, pytest.raises(ApproverLeft):
        person.approver = TerminalApprover(person.printer, nothing.fileno())
        await person.ask("one")


def test_a_line_decides_only_when_it_is_clear() -> None:
    assert parse_answer("y ") == Allow()
    assert parse_answer("y, go") is None
    assert parse_answer("nope") is None
    assert parse_answer("") is None


@pytest.mark.finding("X4")
async def test_a_folded_question_can_be_seen_whole(person: Person) -> None:
    person.sit_down()
    person.preview = "".join(f"+line {number}\n" for number in range(1000))
    asking = person.ask("one")
    await person.sees(PROMPT)
    assert "line 399" in person.seen and "line 999" not in person.seen
    assert "v or `retinue approvals N` shows all" in person.seen
    person.types("v\n")
    await person.sees(PROMPT)
    assert "line 0\n" in person.seen and "line 999" in person.seen and not asking.done()
    person.types("n\n")
    assert await asking == Deny()


@pytest.mark.finding("X4")
@pytest.mark.parametrize("between", ["\n", "\r\n", "\x1b[2J\x1b[H", "\u2028", "\x85", " " * 78, " " * 77, "\t" * 10])
async def test_no_command_can_look_like_a_question(person: Person, between: str) -> None:
    """Also not one whose lines the terminal would break where its text continues."""
    termios.tcsetwinsize(person.terminal, (24, 80))
    person.sit_down()
    person.preview = f"true{between}{'◐ [one] edit(harmless.py)'}{between}(? for more) [y]es [n]o > "
    asking = person.ask("one")
    await person.sees("\n\n")
    assert all(line.startswith("│ ") for line in person.seen.split("\n")[1:])
    assert max(map(len, person.seen.split("\n"))) <= 80
    person.types("n\n")
    assert await asking == Deny()
