"""A program with a screen, for the tests: each submitted line is printed above; `quit` ends it, `fail` crashes it."""

import asyncio

from retinue.surfaces.printer import safe
from retinue.surfaces.printer.input_line import InputLine
from retinue.surfaces.printer.keys import Key, Paste
from retinue.surfaces.printer.screen import BottomArea, Screen
from retinue.surfaces.printer.terminal import Terminal

WIDE = "日本語" * 200


async def show_screen() -> None:
    terminal = Terminal()
    screen = Screen(terminal, color=False)
    line = InputLine(["first", "second"])
    submitted: asyncio.Queue[str] = asyncio.Queue()

    def compose(columns: int, rows: int) -> BottomArea:
        texts, (row, column) = line.layout_lines(columns)
        size = (("plain", f"{columns}x{rows} \x1b[31m{WIDE}"),)
        last = (("plain", "the last line " + "x" * columns),)
        return BottomArea([size, *((("plain", text),) for text in texts), last], cursor=(row + 1, column))

    def take_key(key: Key | Paste) -> None:
        text = line.press_key(key)
        if text is not None:
            submitted.put_nowait(text)
        screen.request_redraw()

    screen.draw_bottom(compose)
    terminal.report_keys(take_key)
    screen.open()
    try:
        while (text := await submitted.get()) != "quit":
            if text == "fail":
                raise RuntimeError("as asked")
            for number in range(int(text) if text.isdigit() else 1):
                screen.print_text(safe.escape_text(f"lasting {number} {text!r} " + "y" * (number % 120)))
    finally:
        await screen.close()


asyncio.run(show_screen())
