"""Live output of commands: pieces for screens that may be dropped, without a secret or half of one in them."""

import asyncio
from pathlib import Path

import pytest

import retinue
from retinue.core import secrets
from retinue.core.events import Delta, Event
from retinue.tools.live_output import PIECE_CHARACTERS, LiveOutput
from retinue.tools.truncate import HeadAndTail, clean_cut
from tests.gates import until
from tests.supervisor.tree.kit import call, main

KEY = "sk-planted-0123456789abcdefghij"


class Screen:
    """A screen that collects the pieces shown and can refuse more of them."""

    def __init__(self, *, masks: bool) -> None:
        self.pieces: list[tuple[str, bool]] = []
        self.is_ready = True
        self.output = LiveOutput(
            lambda text, is_cut: self.pieces.append((text, is_cut)), is_ready=lambda: self.is_ready, masks=masks
        )

    async def sees(self, words: str) -> None:
        await until(lambda: any(words in text for text, _ in self.pieces))

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "known", ())
    secrets.hide_secret(KEY)


async def test_the_first_piece_comes_at_once_and_the_next_ones_together() -> None:
    screen = Screen(masks=True)
    screen.output.feed(b"one\n")
    assert screen.pieces == [("one\n", False)]
    screen.output.feed(b"two\n")
    screen.output.feed("thr\u00e9".encode()[:-1])
    screen.output.feed("\u00e9".encode()[-1:] + b"e\n")
    assert screen.pieces == [("one\n", False)]
    await screen.sees("thr\u00e9e")
    assert screen.pieces[1:] == [("two\nthr\u00e9e\n", False)]


async def test_more_than_a_screen_takes_is_dropped_by_the_line_and_marked() -> None:
    screen = Screen(masks=False)
    screen.is_ready = False
    for number in range(10_000):
        screen.output.feed(b"line %d\n" % number)
    screen.output.feed(b"the end\n")
    screen.is_ready = True
    await screen.sees("the end")
    [(text, is_cut)] = screen.pieces
    assert is_cut and len(text) <= PIECE_CHARACTERS and text.endswith("line 9999\nthe end\n")
    assert all(line.startswith("line ") for line in text.splitlines()[:-1])


async def test_a_line_without_an_end_is_dropped_as_a_whole() -> None:
    screen = Screen(masks=False)
    for _ in range(300):
        screen.output.feed(b"x" * 5000)
    screen.output.feed(b"x\nafter it\n")
    await screen.sees("after it")
    assert screen.text == "after it\n"


@pytest.mark.parametrize("cut", range(len(KEY) + 1))
async def test_a_secret_is_masked_wherever_its_pieces_part(cut: int) -> None:
    screen = Screen(masks=True)
    screen.output.feed(f"a {KEY[:cut]}".encode())
    await asyncio.sleep(0)
    screen.output.feed(f"{KEY[cut:]} b\n".encode())
    await screen.sees(" b\n")
    assert screen.text == f"a {secrets.HIDDEN} b\n"


@pytest.mark.parametrize("cut", range(1, len(KEY)))
async def test_no_half_of_a_secret_is_shown_where_lines_are_dropped_in_a_sandbox(cut: int) -> None:
    """The tool server, which knows no secrets, drops; the host masks what is left."""
    host = Screen(masks=True)
    server = LiveOutput(
        lambda text, is_cut: host.output.feed(text.encode(), is_cut=is_cut), is_ready=lambda: host.is_ready, masks=False
    )
    server.feed(f"a {KEY[:cut]}".encode())
    host.is_ready = False
    server.feed(KEY[cut:].encode() + b"\n" + b"x" * 40 * PIECE_CHARACTERS)
    server.feed(f"{KEY[:cut]}".encode())
    server.feed(f"{KEY[cut:]}\nthe end {KEY}\n".encode())
    host.is_ready = True
    await host.sees("the end")
    assert host.text == f"a the end {secrets.HIDDEN}\n"


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("cut", [1, 12, 13, 25])
async def test_no_line_of_a_secret_is_shown_where_the_lines_before_it_were_dropped(first: int, cut: int) -> None:
    """A key may have several lines, such as that of a certificate."""
    lines = ["BEGIN 0123456", "AAAABBBBCCCC", "DDDDEEEEFFFF"]
    secrets.hide_secret("\n".join(lines))
    rest = "\n".join(lines[first:])
    screen = Screen(masks=True)
    screen.output.feed(b"before\n")
    screen.output.feed(rest[:cut].encode(), is_cut=True)
    screen.output.feed(f"{rest[cut:]}\nafter\n".encode())
    await screen.sees("after")
    assert screen.text == f"before\n{secrets.HIDDEN}\nafter\n"


@pytest.mark.parametrize("runtime", ["inherited", "isolated"])
async def test_a_command_is_seen_while_it_runs_and_its_secrets_are_not(runtime: str, tmp_path: Path) -> None:
    def wait_for(words: str) -> str:
        """A shell command that waits until the test has seen these words."""
        return f"until [ -e '{words}' ]; do sleep 0.01; done"

    command = (
        f"printf 'begins {KEY[:12]}'; {wait_for('begins')}; printf '{KEY[12:]} goes on\\n'; {wait_for('goes on')}; "
        f"seq 1 200000; printf '{KEY[:20]}'; printf '{KEY[20:]}\\n'; echo ended; {wait_for('ended')}"
    )
    script = {"main": [call("shell", command=command), {"text": "end"}]}
    tmp_path.chmod(0o755)  # the user of a sandbox reads below it
    items: list[Event | Delta] = []
    async with retinue.open(mode="yes", path=tmp_path / ".retinue", runtime=runtime) as r:
        run = await r.spawn(main(script, workspace="scratch"), "go")
        workspace = Path((await r.control.describe_run(run.tree)).workspace)
        async for item in r.control.watch(run.tree, deltas=True):
            items.append(item)
            if isinstance(item, Delta) and item.kind == "output":
                for words in ("begins", "goes on", "ended"):
                    if words in item.text:
                        (workspace / words).touch()
    deltas = [item for item in items if isinstance(item, Delta) and item.kind == "output"]
    text = "".join(delta.text for delta in deltas)
    kinds = [item.kind for item in items]
    assert kinds.index("tool.call") < kinds.index("output") < kinds.index("tool.result")
    assert {delta.call_id for delta in deltas} == {items[kinds.index("tool.call")].body.call_id}  # type: ignore[union-attr]
    assert text.startswith(f"begins {secrets.HIDDEN} goes on\n") and text.endswith("ended\n")
    assert len(text) < 200_000  # most numbers were dropped
    assert KEY[:12] not in text and KEY[12:] not in text and KEY[20:] not in text


@pytest.mark.parametrize("missing", range(1, len(KEY)))
async def test_no_half_of_a_secret_is_in_a_result_that_a_sandbox_has_cut(missing: int) -> None:
    """A tool server, which knows no secrets, cuts; the host masks what is left of one at the cut."""
    known, secrets.known = secrets.known, ()
    ends = HeadAndTail(400)
    ends.feed(f"{'x' * missing}{KEY * 40}".encode())
    cut, _ = ends.close()
    secrets.known = known
    shown = secrets.clean_text(clean_cut(cut))
    head, _, tail = shown.partition(" bytes cut; ")
    head, tail = head.rpartition("\n[... ")[0], tail.partition(" ...]\n")[2]
    for text in (head, tail):
        left = text.replace(secrets.HIDDEN, "").strip("x")
        assert len(left) < secrets.SHOWN_AT_CUT
