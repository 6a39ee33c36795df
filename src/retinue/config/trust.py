"""The user's answer to what a project's retinue.yaml loosens: it holds for exactly the text it was given for.

A retinue.yaml in a clone was written by somebody else. What it narrows always holds. What it loosens (each setting's
trust rule says so, see `settings.restrict`) holds only after the user has agreed. The answer is kept outside the
project, in `~/.config/retinue/trusted/`, one file for each retinue.yaml, with the hash of the text. A file that
somebody named (`--config`, `config=` in Python) is trusted by that. The user may also accept that a project folder
belongs to another user (see `ownership.py`). Surfaces ask; this module does not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from retinue.config.location import Place
from retinue.config.settings import parse_settings, restrict
from retinue.core.errors import ConfigError
from retinue.files.atomic import replace_file
from retinue.files.content import read_small_file

MAX_ANSWER_BYTES = 16 * 1024


def read_answer(file: Path, text: str) -> bool | None:
    """Return whether the user trusts this text in this file; None if nobody has answered for this text."""
    kept = _read_record(_answer_path(file))
    return kept.get("trusted") is True if kept.get("sha256") == _hash_text(text) else None


def keep_answer(file: Path, text: str, *, trusted: bool = True) -> None:
    """Keep the user's answer; raises ConfigError when that is not possible."""
    about = {"file": os.path.realpath(file), "sha256": _hash_text(text), "trusted": trusted}
    _write_record(_answer_path(file), about)


def remove_answer(file: Path) -> None:
    """Forget the user's answer; raises ConfigError when that is not possible."""
    place = _answer_path(file)
    try:
        if place is not None:
            place.unlink(missing_ok=True)
    except OSError as error:
        raise Place(str(place)).error(f"cannot be removed: {error.strerror or error}") from None


def read_accepted_owner(folder: Path) -> int | None:
    """Return the other user whose files in this project folder the user accepts, if there is one."""
    owner = _read_record(_answer_path(folder)).get("owner")
    return owner if isinstance(owner, int) else None


def keep_accepted_owner(folder: Path, owner: int) -> None:
    """Accept that another user owns a project folder; raises ConfigError when that cannot be kept."""
    _write_record(_answer_path(folder), {"folder": os.path.realpath(folder), "owner": owner})


def carry_answer(file: Path, before: str | None, after: str) -> None:
    """Trust the new text of a file that we changed on the user's word, if the old text was in force."""
    in_force = (
        before is None or read_answer(file, before) or not restrict(parse_settings(_normalize_text(before), file))[1]
    )
    if in_force:
        with suppress(ConfigError):  # then the next run asks
            keep_answer(file, after)


def _answer_path(file: Path) -> Path | None:
    """Return the path of the answer for a file; None without a home folder."""
    given = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        base = Path(given) if Path(given).is_absolute() else Path.home() / ".config"
    except RuntimeError:
        return None
    if not base.is_absolute():
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()[:32]
    return base / "retinue" / "trusted" / f"{name}.json"


def _read_record(place: Path | None) -> Mapping[str, Any]:
    """Return what is kept there; nothing unless it is a file of ours that nobody else may write."""
    if place is None:
        return {}
    try:
        data = read_small_file(place, MAX_ANSWER_BYTES, owners=(os.geteuid(),), forbidden_mode=0o022)
        kept = msgspec.json.decode(data)
    except (OSError, msgspec.MsgspecError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _write_record(place: Path | None, about: Mapping[str, Any]) -> None:
    if place is None:
        raise ConfigError("there is no home folder to keep it in: set XDG_CONFIG_HOME")
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(place, json.dumps(about).encode())
    except OSError as error:
        raise Place(str(place)).error(f"cannot be written: {error.strerror or error}") from None


def _normalize_text(text: str) -> str:
    """Return the text as it is read: without a BOM, with one kind of line end."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _hash_text(text: str) -> str:
    return hashlib.sha256(_normalize_text(text).encode()).hexdigest()
