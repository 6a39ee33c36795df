"""The user's answers about trust in a project's retinue.yaml. An answer is valid only for the exact text of the file.

A retinue.yaml in a clone was written by another person. Settings that restrict agents always apply. Settings that
loosen restrictions (see the trust rules in `settings.restrict`) apply only after the user has agreed. The answer is
stored outside the project, in `~/.config/retinue/trusted/`, one file per retinue.yaml, with the hash of the text. A
file named explicitly (`--config`, `config=` in Python) is trusted without an answer. The user may also accept that
another user owns a project folder (see `ownership.py`). Surfaces ask the user; this module does not.
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

from retinue.config.location import SourceLocation
from retinue.config.settings import parse_settings, restrict
from retinue.core.errors import ConfigError, RetinueError
from retinue.files.atomic import replace_file
from retinue.files.content import read_small_file
from retinue.files.private import make_private_folder

MAX_ANSWER_BYTES = 16 * 1024


def list_loosenings(file: Path, text: str) -> list[str]:
    """Return the settings in this text of a file that need the user's trust."""
    return [str(each) for each in restrict(parse_settings(text, file))[1]]


def read_answer(file: Path, text: str) -> bool | None:
    """Return True or False if the user has answered for this text of this file, else None."""
    kept = _read_record(_answer_path(file))
    return kept.get("trusted") is True if kept.get("sha256") == _hash_text(text) else None


def keep_answer(file: Path, text: str, *, trusted: bool = True) -> None:
    """Store the user's answer. Raises ConfigError if it cannot be written."""
    about = {"file": os.path.realpath(file), "sha256": _hash_text(text), "trusted": trusted}
    _write_record(_answer_path(file), about)


def remove_answer(file: Path) -> None:
    """Remove the user's answer. Raises ConfigError if it cannot be removed."""
    place = _answer_path(file)
    try:
        if place is not None:
            place.unlink(missing_ok=True)
    except OSError as error:
        raise SourceLocation(str(place)).error(f"cannot be removed: {error.strerror or error}") from None


def read_accepted_owner(folder: Path) -> int | None:
    """Return the uid of the other user whose files in this project folder are accepted, or None."""
    owner = _read_record(_answer_path(folder)).get("owner")
    return owner if isinstance(owner, int) else None


def keep_accepted_owner(folder: Path, owner: int) -> None:
    """Store that the user accepts `owner` as the owner of a project folder. Raises ConfigError if it cannot be
    written."""
    _write_record(_answer_path(folder), {"folder": os.path.realpath(folder), "owner": owner})


def carry_answer(file: Path, before: str | None, after: str) -> None:
    """Trust the new text of a file that we changed at the user's request, if the old text was in force."""
    if before is None or read_answer(file, before) or not list_loosenings(file, _normalize_text(before)):
        with suppress(ConfigError):  # without a stored answer, the next run asks
            keep_answer(file, after)


def _answer_path(file: Path) -> Path | None:
    """Return the path of the answer for a file, or None without a home folder."""
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
    """Return the stored record. Return an empty record if the file is missing, belongs to another user, or others can
    write it."""
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
        make_private_folder(place.parent)
        replace_file(place, json.dumps(about).encode())
    except OSError as error:
        raise SourceLocation(str(place)).error(f"cannot be written: {error.strerror or error}") from None
    except RetinueError as error:
        raise SourceLocation(str(place)).error(f"cannot be written: {error}") from None


def _normalize_text(text: str) -> str:
    """Return the text in the form that is parsed: without a BOM, with LF line ends."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _hash_text(text: str) -> str:
    return hashlib.sha256(_normalize_text(text).encode()).hexdigest()
