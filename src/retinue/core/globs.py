"""Glob patterns of rules and searches, matched in time that grows with the text, not with the number of possible
matches.

A regular expression with several `*` can take years on a text that almost matches, and a rule may come from an
untrusted file. So a pattern is matched like an automaton: all places in the pattern at once, character by character,
as bits of a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from retinue.core.errors import ConfigError

GLOB_CHARACTERS = "*?["
MAX_CHARACTERS = 4096
TOO_LONG = f"is longer than the {MAX_CHARACTERS} characters that a pattern can have"
NO_RANGE = "has an invalid range in [...]"


class GlobPattern:
    """A compiled pattern. `*` matches any text (in paths: up to the next `/`, and `**` any text), `?` one character,
    `[...]` one of the characters listed. Raises ConfigError if the pattern is too long or has an invalid range."""

    def __init__(self, pattern: str, *, paths: bool) -> None:
        if len(pattern) > MAX_CHARACTERS:
            raise ConfigError(TOO_LONG)
        self._paths = paths
        self._literals: dict[str, int] = {}
        self._classes: list[tuple[int, re.Pattern[str]]] = []
        self._singles = self._stars = self._long_stars = self._optional = 0
        self._end = 0
        self._masks: dict[str, tuple[int, int]] = {}
        self._parse(pattern)
        self.matches: Callable[[str], bool] = self._make_simple(pattern) or self._match

    def _make_simple(self, pattern: str) -> Callable[[str], bool] | None:
        """Return a faster matcher for the common patterns: a plain text, or a text whose only `*` is at its end.
        Return None for other patterns."""
        start = pattern.rstrip("*")
        if any(char in start for char in GLOB_CHARACTERS) or (self._paths and start != pattern):
            return None
        return (lambda text: text == start) if start == pattern else (lambda text: text.startswith(start))

    def _parse(self, pattern: str) -> None:
        """Turn the pattern into places, a bit each. A text matches if the place after the last is reached."""
        at = place = 0
        while at < len(pattern):
            char, bit = pattern[at], 1 << place
            if self._paths and pattern.startswith("**/", at):
                while pattern.startswith("**/", at):
                    at += 3
                # Matches nothing, or any text and a `/`: three places, the first of which leads to both.
                self._optional |= bit
                self._long_stars |= bit << 1
                self._literals["/"] = self._literals.get("/", 0) | bit << 2
                place += 3
            elif char == "*":
                stars = len(pattern) - at - len(pattern[at:].lstrip("*"))
                if self._paths and stars == 1:
                    self._stars |= bit
                else:
                    self._long_stars |= bit
                at, place = at + stars, place + 1
            elif char == "?":
                self._singles |= bit
                at, place = at + 1, place + 1
            elif char == "[" and (end := pattern.find("]", at + 2)) > 0:
                self._classes.append((bit, _compile_class(pattern[at + 1 : end])))
                at, place = end + 1, place + 1
            else:
                self._literals[char] = self._literals.get(char, 0) | bit
                at, place = at + 1, place + 1
        self._end = 1 << place

    def _match(self, text: str) -> bool:
        reached = self._follow(1)
        for char in text:
            masks = self._masks.get(char)
            if masks is None:
                masks = self._masks[char] = self._find_masks(char)
            steps, stays = masks
            reached = self._follow((reached & steps) << 1 | reached & stays)
            if not reached:
                return False
        return bool(reached & self._end)

    def _follow(self, reached: int) -> int:
        """Add the places that can be reached without a character. At most two such steps follow each other, because a
        `*` is never followed by another `*` or by `**/`."""
        optional = reached & self._optional
        reached |= optional << 1 | optional << 3
        return reached | (reached & (self._stars | self._long_stars)) << 1

    def _find_masks(self, char: str) -> tuple[int, int]:
        """Return the places from which `char` leads to the next place, and the places at which `char` stays."""
        if len(self._masks) >= MAX_CHARACTERS:
            self._masks.clear()
        crosses = self._paths and char == "/"
        steps = self._literals.get(char, 0) | (0 if crosses else self._singles)
        for bit, members in self._classes:
            steps |= bit if members.fullmatch(char) else 0
        return steps, self._long_stars | (0 if crosses else self._stars)


@lru_cache(4096)
def compile_glob(pattern: str, *, paths: bool) -> GlobPattern:
    """Return the compiled pattern, from a cache if it was compiled before."""
    return GlobPattern(pattern, paths=paths)


@lru_cache(256)
def _compile_class(inside: str) -> re.Pattern[str]:
    turned = inside[0] == "!" and len(inside) > 1
    safe = re.sub(r"([\\\[\]^&|~])", r"\\\1", inside[1:] if turned else inside)
    try:
        return re.compile(f"[{'^' if turned else ''}{safe}]", re.DOTALL)
    except re.error:
        raise ConfigError(NO_RANGE) from None
