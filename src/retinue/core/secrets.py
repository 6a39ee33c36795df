"""Secret values that must not be seen anywhere (log, screens, files, children, models), and their removal from text.

The known secrets belong to the process: the values of environment variables with the name of a key, and secrets made
here (a control token, while its server runs). `make_supervisor` registers them. If none are known, nothing is
searched.
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
SHOWN_AT_CUT = 4  # fewer characters of a secret may remain where a text was cut
_NAMED = re.compile(r"PASS(?:WORD|WD|PHRASE)$|(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASS|PWD|PAT)$", re.IGNORECASE)
_KEYLIKE = re.compile(r"\b(?:sk|pk|key|xai|gsk|AIza)[-_][A-Za-z0-9_\-]{12,}|(?<=[Bb]earer )\S+")
known: tuple[str, ...] = ()  # read as `secrets.known`, because every change makes a new tuple
T = TypeVar("T")


def learn_secrets(environ: Mapping[str, str]) -> None:
    """Register the value of every variable whose name says it is a key. Skip plain words and paths."""
    for name, value in environ.items():
        if is_named(name) and not value.isalpha() and not value.startswith("/"):
            hide_secret(value.strip())


def is_named(name: str) -> bool:
    """Return True if a variable of this name holds a secret."""
    return _NAMED.search(name) is not None


def hide_secret(value: str) -> None:
    """Register a secret to hide from now on. Ignore values shorter than SHORTEST."""
    global known  # noqa: PLW0603 - one set for the process, like its environment
    if len(value) >= SHORTEST and value not in known:
        known = tuple(sorted((*known, value), key=len, reverse=True))


def forget_secret(value: str) -> None:
    """Stop hiding a secret that is no longer valid."""
    global known  # noqa: PLW0603 - as above
    known = tuple(each for each in known if each != value)


def clean_text(text: str) -> str:
    """Return the text with known secrets replaced, or the same object if it has none."""
    for value in known:
        if value in text:
            text = text.replace(value, HIDDEN)
    return text


def scrub_text(text: str) -> str:
    """Return the text with known secrets and anything that looks like a key replaced. For texts of providers and files
    of a repository."""
    return _KEYLIKE.sub(HIDDEN, clean_text(text))


def clean_value(value: T) -> T:
    """Return a JSON value with known secrets replaced in its texts at any depth, keys included, or the same object if
    it has none."""
    found: Any = value
    if isinstance(value, str):
        found = clean_text(value)
    elif isinstance(value, msgspec.Raw):
        plain = msgspec.json.decode(value)  # JSON may spell a secret with escapes
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
    """Return a text whose end was cut off, with a partial secret at its end replaced."""
    sizes = [len(text) - at for value in known if (at := _find_beginning(text, value)) <= len(text) - SHOWN_AT_CUT]
    return text[: -max(sizes)] + HIDDEN if sizes else text


def clean_beginning(text: str) -> str:
    """Return a text whose beginning was cut off, with a partial secret at its beginning replaced."""
    sizes = [size for value in known for size in range(SHOWN_AT_CUT, len(value)) if text.startswith(value[-size:])]
    return HIDDEN + text[max(sizes) :] if sizes else text


class SecretStream:
    """A filter for text that comes in pieces. It holds back the possible beginning of a secret until more text has
    come. With `is_cut`, lines before the first line of the text are missing and may have the beginning of a secret."""

    __slots__ = ("_held", "_is_cut")

    def __init__(self, *, is_cut: bool = False) -> None:
        self._held = ""
        self._is_cut = is_cut

    def feed(self, piece: str) -> str:
        """Add a piece. Return the text that can be shown now."""
        if not known and not self._held:
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
        cut_at = min((_find_beginning(text, value) for value in known), default=len(text))
        self._held = text[cut_at:]
        return text[:cut_at]

    def rest(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


class ListRedactor:
    """A cleaner for a list that grows between calls. It does not check earlier items again, unless the known secrets
    have changed. Cleaned items are copies: later changes of an item do not affect them."""

    __slots__ = ("_cleaned", "_items", "_known_then")

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._cleaned: list[Any] = []
        self._known_then: tuple[str, ...] = ()

    def clean(self, items: list[T]) -> list[T]:
        """Return the items with known secrets replaced, or the same object if no secrets are known."""
        if not known:
            return items
        pairs = zip(self._items, items, strict=False) if self._known_then == known else ()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
        new = [deepcopy(clean_value(item)) for item in items[same:]]
        self._items, self._cleaned = list(items), [*self._cleaned[:same], *new]
        self._known_then = known
        return list(self._cleaned)


def _list_last_lines() -> list[str]:
    """Return the ends of secrets with several lines, starting at each line but the first, the longest end first."""
    ends = [
        value[at + 1 :] for value in known for at, char in enumerate(value) if char == "\n" and value[at + 1 :].strip()
    ]
    return sorted(ends, key=len, reverse=True)


def _find_beginning(text: str, value: str) -> int:
    """Return the index at which the text ends in a beginning of `value`, or the length of the text if it does not."""
    at = max(0, len(text) - len(value) + 1)
    while (at := text.find(value[0], at)) >= 0:
        if value.startswith(text[at:]):
            return at
        at += 1
    return len(text)
