"""The place of a value (file, line, key path), and the one-line error that names it. Knows no values and no
formats."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from retinue.core.errors import ConfigError


def show_text(text: str, limit: int = 400) -> str:
    """Return the text on one line for a terminal: unprintable characters are escaped, long texts are cut."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in cut)


def suggest(word: str, words: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if one of `words` is similar to `word`, else an empty text."""
    candidates = [other for other in islice(words, 200) if other != word and len(other) <= 100]
    close = difflib.get_close_matches(word[:100], candidates, n=1)
    return f"; did you mean '{show_text(close[0], 80)}'?" if close else ""


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The place of a value: file, line and key path. Python values have no line."""

    file: str
    line: int | None = None
    keys: tuple[str | int, ...] = ()

    def child(self, key: str | int, line: int | None = None) -> SourceLocation:
        return SourceLocation(self.file, line if line is not None else self.line, (*self.keys, key))

    def error(self, what: str) -> ConfigError:
        """Return the error `FILE:LINE: key 'a.b[0]': what`, on one line."""
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{show_text(key, 80)}" for key in self.keys)
        path = show_text(path.removeprefix("."), 200)
        name = show_text(self.file, 4096)
        if self.line is None:
            where = f"{name}: {path}" if path else name
        else:
            where = f"{name}:{self.line}: key '{path}'" if path else f"{name}:{self.line}"
        return ConfigError(f"{where}: {show_text(what, 1000)}")
