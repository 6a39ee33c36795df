"""Values that must be seen nowhere (log, screens, files, children, models), and how a text is rid of them.

What is known is a property of the process: the values of its environment that are keys by their name, and what was
made here (a control token, while its server runs). `make_supervisor` learns them. Where nothing is known, nothing
is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from itertools import takewhile
from typing import Any, TypeVar

import msgspec

HIDDEN = "[secret]"
SHORTEST = 8
SHOWN_AT_CUT = 4  # fewer characters of a value may be left where a text was cut
_NAMED = re.compile(r"PASS(?:WORD|WD|PHRASE)$|(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASS|PWD|PAT)$", re.IGNORECASE)
_KEYLIKE = re.compile(r"\b(?:sk|pk|key|xai|gsk|AIza)[-_][A-Za-z0-9_\-]{12,}|(?<=[Bb]earer )\S+")
_known: tuple[str, ...] = ()
T = TypeVar("T")


def learn_secrets(environ: Mapping[str, str]) -> None:
    """Take note of every variable whose name says that it is a key. A plain word or a path is none."""
    for name, value in environ.items():
        if is_named(name) and not value.isalpha() and not value.startswith("/"):
            hide_secret(value.strip())


def is_named(name: str) -> bool:
    """Return whether a variable of that name holds a secret."""
    return _NAMED.search(name) is not None


def hide_secret(value: str) -> None:
    """Hide a value from now on."""
    global _known  # noqa: PLW0603 - one set for the process, as its environment is one
    if len(value) >= SHORTEST and value not in _known:
        _known = tuple(sorted((*_known, value), key=len, reverse=True))


def forget_secret(value: str) -> None:
    """Stop hiding a value that opens nothing any more."""
    global _known  # noqa: PLW0603 - as above
    _known = tuple(each for each in _known if each != value)


def has_secrets() -> bool:
    """Return whether there is anything to look for."""
    return bool(_known)


def clean_text(text: str) -> str:
    """Return the text without the values that are known; the same object when none is in it."""
    for value in _known:
        if value in text:
            text = text.replace(value, HIDDEN)
    return text


def scrub_text(text: str) -> str:
    """Return the text also without whatever looks like a key: for texts of providers and files of a repository."""
    return _KEYLIKE.sub(HIDDEN, clean_text(text))


def clean_value(value: T) -> T:
    """Return the same for JSON: texts at any depth, keys included; the same object when there is nothing to hide."""
    found: Any = value
    if isinstance(value, str):
        found = clean_text(value)
    elif isinstance(value, msgspec.Raw):
        plain = msgspec.json.decode(value)  # in JSON a value may be written otherwise than it is
        cleaned = clean_value(plain)
        found = value if cleaned is plain else msgspec.Raw(msgspec.json.encode(cleaned))
    elif isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value)
        cleaned = clean_value(fields)
        found = value if cleaned is fields else type(value)(**cleaned)
    elif isinstance(value, dict):
        pairs = [(clean_value(key), clean_value(inner)) for key, inner in value.items()]
        if any(new is not inner or key not in value for (key, new), inner in zip(pairs, value.values(), strict=True)):
            found = dict(pairs)
    elif isinstance(value, list | tuple):
        items = [clean_value(inner) for inner in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            found = type(value)(items)
    return found  # type: ignore[no-any-return]


def clean_end(text: str) -> str:
    """Return a text whose end was cut off, without the beginning of a value that is left there."""
    sizes = [len(text) - at for value in _known if (at := _find_beginning(text, value)) <= len(text) - SHOWN_AT_CUT]
    return text[: -max(sizes)] + HIDDEN if sizes else text


def clean_beginning(text: str) -> str:
    """Return a text whose beginning was cut off, without the end of a value that is left there."""
    sizes = [size for value in _known for size in range(SHOWN_AT_CUT, len(value)) if text.startswith(value[-size:])]
    return HIDDEN + text[max(sizes) :] if sizes else text


class SecretStream:
    """Text that comes in pieces. What may be the beginning of a value is held back until more of it has come. Where the
    text `is_cut`, it begins with a line, before which others are missing: these may have the beginning of a value."""

    __slots__ = ("_held", "_is_cut")

    def __init__(self, *, is_cut: bool = False) -> None:
        self._held = ""
        self._is_cut = is_cut

    def feed(self, piece: str) -> str:
        """Return what can be shown now."""
        if not _known:
            return piece
        text = self._held + piece
        if self._is_cut and text:
            rests = _list_last_lines()
            if any(rest.startswith(text) and rest != text for rest in rests):
                self._held = text
                return ""
            self._is_cut = False
            cut = next((rest for rest in rests if text.startswith(rest)), "")
            text = text if not cut else HIDDEN + text[len(cut) :]
        text = clean_text(text)
        cut_at = min((_find_beginning(text, value) for value in _known), default=len(text))
        self._held = text[cut_at:]
        return text[:cut_at]

    def rest(self) -> str:
        """Return what was held back, when there is no more to come."""
        held, self._held = self._held, ""
        return held


class GrowingList:
    """A list that is cleaned again and again while items are added to it. Items that were there before are not looked
    at again, unless other values are known by now. Cleaned items are copies: whoever changes an item later does not
    change those."""

    __slots__ = ("_cleaned", "_items", "_known_then")

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._cleaned: list[Any] = []
        self._known_then: tuple[str, ...] = ()

    def clean(self, items: list[T]) -> list[T]:
        """Return the items without the values that are known; the same object where nothing is known."""
        if not _known:
            return items
        pairs = zip(self._items, items, strict=False) if self._known_then == _known else ()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
        new = [deepcopy(clean_value(item)) for item in items[same:]]
        self._items, self._cleaned = list(items), [*self._cleaned[:same], *new]
        self._known_then = _known
        return list(self._cleaned)


def _list_last_lines() -> list[str]:
    """Return the ends of values that have several lines, from any of their lines on, the longest first."""
    ends = [
        value[at + 1 :] for value in _known for at, char in enumerate(value) if char == "\n" and value[at + 1 :].strip()
    ]
    return sorted(ends, key=len, reverse=True)


def _find_beginning(text: str, value: str) -> int:
    """Return where the text ends in a beginning of the value; its length when it does not."""
    at = max(0, len(text) - len(value) + 1)
    while (at := text.find(value[0], at)) >= 0:
        if value.startswith(text[at:]):
            return at
        at += 1
    return len(text)
