"""Reserved names in a project, which no run may write: git's, ours, and git folders under other names."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from retinue.files.content import read_small_file

GIT_FOLDER = ".git"
STATE_FOLDER = ".retinue"
MAX_CONFIG_BYTES = 1024 * 1024
_IGNORABLE = frozenset(
    "\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u206a\u206b\u206c\u206d\u206e\u206f\ufeff"
)


def is_git_name(name: str) -> bool:
    """Return True if a name is `.git`, or equals it on a file system that folds case or ignores some characters."""
    return _fold_name(name) in (GIT_FOLDER, "git~1")


def is_state_name(name: str) -> bool:
    """Return True if a name is `.retinue`, or equals it on a file system that folds case or ignores some characters."""
    return _fold_name(name) == STATE_FOLDER


def is_reserved_name(name: str) -> bool:
    """Return True if a name is `.git` or `.retinue` in any such spelling."""
    return _fold_name(name) in (GIT_FOLDER, "git~1", STATE_FOLDER)


def _fold_name(name: str) -> str:
    if name.isascii() and "~" not in name and not name.startswith("."):  # true of most names, so this is the fast path
        return name
    plain = unicodedata.normalize("NFKC", "".join(char for char in name if char not in _IGNORABLE)).casefold()
    return plain.split(":")[0].rstrip(" .")


def list_all_prefixes(paths: Iterable[str]) -> set[str]:
    """Return the relative paths and all their parent folders."""
    found: set[str] = set()
    for path in paths:
        at = len(path)
        while at > 0 and path[:at] not in found:
            found.add(path[:at])
            at = path.rfind("/", 0, at)
    return found


def find_git_root(folder: Path) -> Path | None:
    """Return the nearest folder, from `folder` upward, with a `.git`."""
    return next((one for one in (folder, *folder.parents) if os.path.lexists(one / GIT_FOLDER)), None)


def find_git_folder(root: str | Path, path: str, planned: Collection[str] = ()) -> str | None:
    """Return the folder between `root` and `path` that git would take for a repository, or None.

    The folder's name does not matter: a bare repository counts, and so does the target of a `gitdir:` file. A folder
    that would become a repository by writing `path`, or by writing it together with the `planned` paths, counts too."""
    written = list_all_prefixes([path])

    def has_entry(name: str) -> bool:
        return name in written or name in planned or os.path.lexists(Path(root, name))

    parts = path.split("/")
    for depth in range(len(parts)):
        above = "".join(f"{part}/" for part in parts[:depth])
        if has_entry(f"{above}HEAD") and (
            has_entry(f"{above}commondir") or (has_entry(f"{above}objects") and has_entry(f"{above}refs"))
        ):
            return above.rstrip("/") or "."
    return None


def find_git_programs(project: str | Path) -> list[str]:
    """Return the paths outside of `.git` from which git reads hooks and included settings.

    Uses the git settings of the project and of the user. A file written to such a path would run at the user's next
    git command."""
    above = (Path(project), *Path(project).parents)
    top = next((folder for folder in above if os.path.lexists(folder / GIT_FOLDER)), Path(project))
    own = top / GIT_FOLDER
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - no error without a home
    base = os.environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    found = []
    for config in (own / "config", own / "config.worktree", home / ".gitconfig", Path(base, "git", "config")):
        for section, key, value in _list_settings(config):
            path = os.path.expanduser(value)  # noqa: PTH111
            if section == "core" and key == "hookspath":
                found.append(os.path.join(top, path))  # noqa: PTH118
            elif section.startswith("include") and key == "path":
                found.append(os.path.join(config.parent, path))  # noqa: PTH118
    return [os.path.realpath(path) for path in found]


def _list_settings(config: Path) -> Iterator[tuple[str, str, str]]:
    """Yield section, key and value of each setting in a git config file."""
    try:
        lines = read_small_file(config, MAX_CONFIG_BYTES, follow=True).decode("utf-8", "replace").splitlines()
    except OSError:
        return
    section = ""
    for line in lines:
        rest = line.strip()
        if rest.startswith("["):
            head, _, rest = rest[1:].partition("]")
            section = head.split()[0].casefold() if head.split() else ""
        key, is_set, value = rest.partition("=")
        if is_set and "\0" not in value:
            yield section, key.strip().casefold(), value.strip().strip('"')
