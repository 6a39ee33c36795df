"""The names in a project that belong to git or to us, and that no run writes."""

from __future__ import annotations

import unicodedata

GIT_FOLDER = ".git"
STATE_FOLDER = ".retinue"
_IGNORABLE = frozenset(
    "\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u206a\u206b\u206c\u206d\u206e\u206f\ufeff"
)


def is_reserved_name(name: str) -> bool:
    """Tell whether a name is git's or ours, or would be on a file system that folds letters or drops some."""
    plain = unicodedata.normalize("NFKC", "".join(char for char in name if char not in _IGNORABLE)).casefold()
    plain = plain.rstrip(" .").split(":")[0]
    return plain in (GIT_FOLDER, "git~1", STATE_FOLDER)
