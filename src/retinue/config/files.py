"""Reading of a small text file that a person wrote, whatever its format.

Only regular UTF-8 files of limited size are read. Nothing here ever blocks: a FIFO or a device is an error. Every
failure is a one-line ConfigError with the file name.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from retinue.config.location import SourceLocation
from retinue.core.errors import ConfigError
from retinue.files.content import read_small_file
from retinue.files.opening import Reason, RefusedFile

MAX_BYTES = 4 * 1024 * 1024
_REASONS = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "no such file",
    errno.EACCES: "permission denied",
}
_REFUSALS: dict[Reason, str] = {
    "link": "is a symbolic link; only regular files are read here",
    "fifo": "is not a regular file",
    "socket": "is not a regular file",
    "device": "is not a regular file",
    "too_large": f"is larger than {MAX_BYTES // 1024 // 1024} MiB",
}


def read_text(path: Path, *, follow: bool = True) -> str:
    """Return the text of a file, without a BOM and with `\\n` as line end. Without `follow` a link is an error."""
    place = SourceLocation(str(path))
    try:
        text = read_small_file(path, MAX_BYTES, follow=follow).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise SourceLocation(str(path), line).error("is not UTF-8 text") from None
    except ValueError:
        raise place.error("is not a usable file name") from None
    except RefusedFile as error:
        raise place.error(_REFUSALS.get(error.reason, error.text)) from None
    except OSError as error:
        raise _make_read_error(path, error) from None
    if "\0" in text:
        raise SourceLocation(str(path), text[: text.index("\0")].count("\n") + 1).error("has a NUL character")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def exists(path: Path) -> bool:
    """Return True if the path exists, even as a broken link or an unreadable file: reading it then gives the
    reason."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def list_subfolders(folder: Path) -> list[Path]:
    """Return the subfolders of a folder, sorted by name, without names that begin with `_` or `.`."""
    try:
        found = [entry for entry in folder.iterdir() if not entry.name.startswith(("_", "."))]
        return sorted(entry for entry in found if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _make_read_error(folder, error) from None


def _make_read_error(path: Path, error: OSError) -> ConfigError:
    return SourceLocation(str(path)).error(_REASONS.get(error.errno or 0) or error.strerror or "cannot be read")
