"""Markdown of a model, rendered as text for a terminal. Emits no hyperlinks and no images: a link shows its address.

The text is escaped first, so it cannot contain control sequences. `rich` is imported for the first text that needs it,
because importing it takes longer than all other work before the first line on screen.
"""

from __future__ import annotations

import functools
import io
import re
from typing import Any

from retinue.surfaces.printer import safe

MAX_CHARACTERS = 200_000  # a longer text is not rendered
MAX_LINES = 5_000  # nor is one with more lines: the time for a paragraph grows with the square of its lines
_MARKUP = re.compile(r"[*_`#|~\[]|^ *(?:[-+>]|\d+[.)]) |^ *(?:---|===)|\n[ \t]*\n|^ {4}", re.MULTILINE)
_PADDING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)


def render_markdown(text: str, *, width: int, color: bool) -> str:
    """Return Markdown `text` as lines of at most `width` columns. Escape codes within `text` do not survive."""
    shown = safe.escape_text(text).rstrip()
    if len(shown) > MAX_CHARACTERS or shown.count("\n") >= MAX_LINES:
        return shown
    if not _MARKUP.search(shown) and all(len(line) <= width for line in shown.split("\n")) and shown.isascii():
        return shown
    console, markdown_type = _load_rich(max(10, width), color)
    with console.capture() as captured:
        console.print(markdown_type(shown, hyperlinks=False))
    return _PADDING.sub(r"\1", captured.get()).strip("\n")


@functools.lru_cache(maxsize=4)
def _load_rich(width: int, color: bool) -> tuple[Any, Any]:
    """Return a `rich` console of this width, and the Markdown class that it prints."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
        _environ={},
    )
    return console, _make_markdown_type()


@functools.cache
def _make_markdown_type() -> Any:
    from markdown_it import MarkdownIt
    from rich.markdown import CodeBlock, Heading, Markdown
    from rich.text import Text

    class PlainCode(CodeBlock):
        """A code block, indented and not highlighted: highlighting would load 500 lexers."""

        def __rich_console__(self, console: Any, options: Any) -> Any:
            code = str(self.text).rstrip()
            yield Text("\n".join(f"    {line}" for line in code.split("\n")), style="cyan")

    class PlainHeading(Heading):
        """A bold heading, aligned left."""

        def __rich_console__(self, console: Any, options: Any) -> Any:
            text = self.text.copy()
            text.justify, text.style = "left", "bold"
            yield text

    class SafeMarkdown(Markdown):
        """Markdown that treats HTML as text and images as links, and keeps the model's line breaks."""

        elements = {  # noqa: RUF012 - as rich declares it
            **Markdown.elements, "fence": PlainCode, "code_block": PlainCode, "heading_open": PlainHeading,
        }  # fmt: skip

        def __init__(self, markup: str, **options: Any) -> None:
            super().__init__("", **options)
            parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("image")
            self.markup, self.parsed = markup, parser.parse(markup)
            for token in self.parsed:
                for child in token.children or ():
                    child.type = "hardbreak" if child.type == "softbreak" else child.type

    return SafeMarkdown
