"""The user's key: a secret outside all projects that signs files which Retinue keeps inside them.

A clone, an archive or another user can bring any file into a project, but not a file with this signature. The key is
created on first use in `XDG_STATE_HOME/retinue` (`~/.local/state/retinue`) and never leaves the user's machine.
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from retinue.core.errors import ConfigError, RetinueError
from retinue.files.content import read_small_file
from retinue.files.opening import RefusedFile
from retinue.files.private import make_private_folder, write_private_file

KEY_BYTES = 32
NO_HOME = "there is no home folder to keep the key in that signs the state of projects: set XDG_STATE_HOME"

NOT_YOURS = (
    "{path} belongs to another user, so your key cannot be kept there: run this as that user, or set HOME or "
    "XDG_STATE_HOME to a folder of your own"
)


def find_user_folder() -> Path:
    """Return the folder for this user's secrets. The folder may not exist yet."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        raise ConfigError(NO_HOME) from None
    if not base.is_absolute():
        raise ConfigError(NO_HOME)
    return base / "retinue"


def load_user_key() -> bytes:
    """Return the user's key, creating it if it is missing. Raises ConfigError if the key is unusable or cannot be
    created."""
    path = find_user_folder() / "key"
    try:
        found = _read_key(path)
        return _make_key(path) if found is None else found
    except RefusedFile as error:
        if error.reason == "owner":
            raise ConfigError(NOT_YOURS.format(path=path)) from None
        raise ConfigError(f"{path} {error.text}, so others may know it: remove it") from None
    except OSError as error:
        raise ConfigError(_explain_no_key(path, error.strerror or str(error))) from None
    except ConfigError:
        raise
    except RetinueError as error:
        raise ConfigError(_explain_no_key(path, str(error))) from None


def check_user_key() -> None:
    """Raise ConfigError if there is no usable key and none could be created. Changes nothing."""
    path = find_user_folder() / "key"
    above = next(folder for folder in path.parents if os.path.lexists(folder))
    if os.path.lexists(path) or not above.is_dir():
        load_user_key()
    elif not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(_explain_no_key(path, f"{above} cannot be written"))
    else:
        _check_home(above)


def sign_data(purpose: str, data: bytes) -> str:
    """Return the signature of `data` by the user's key. The signature is valid for this purpose only."""
    return hmac.new(load_user_key(), purpose.encode() + b"\0" + data, "sha256").hexdigest()


def has_signature(purpose: str, data: bytes, signature: str) -> bool:
    """Return True if the user's key made `signature` for `data` and this purpose."""
    return hmac.compare_digest(sign_data(purpose, data).encode(), signature.encode("utf-8", "replace"))


def _read_key(path: Path) -> bytes | None:
    try:
        found = read_small_file(path, KEY_BYTES, owners=(os.geteuid(),), forbidden_mode=0o077)
    except FileNotFoundError:
        return None
    if len(found) != KEY_BYTES:
        raise ConfigError(f"{path} is damaged; remove it, then `retinue trust --state` in each project")
    return found


def _make_key(path: Path) -> bytes:
    """Create the key. If several processes do so at once, all of them end up with the same key."""
    _check_home(next(folder for folder in path.parents if folder.exists()))
    make_private_folder(path.parent)
    temporary = path.with_name(f".key-{secrets.token_hex(8)}")
    try:
        write_private_file(temporary, secrets.token_bytes(KEY_BYTES), exclusive=True)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    found = _read_key(path)
    if found is None:
        raise FileNotFoundError(path)
    return found


def _check_home(folder: Path) -> None:
    if os.geteuid() == 0 and folder.stat().st_uid != 0:  # a file of root's in a user's home would shut the user out
        raise ConfigError(NOT_YOURS.format(path=folder))


def _explain_no_key(path: Path, why: str) -> str:
    return f"the key that signs the state of projects cannot be kept in {path}: {why}; set XDG_STATE_HOME"
