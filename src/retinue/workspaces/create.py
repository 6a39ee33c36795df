"""Creating a workspace: the files of another folder, and for a `worktree` a `.git` of its own beside them.

`copy` has everything but `.git` folders and our own state. `worktree` has what git would see (tracked, and untracked
but not ignored) as it is now, and a clone whose objects are the project's, read by path. In both, what `.gitignore`
names is never a change. Submodules and nested repositories are plain files.
"""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

from retinue.core.errors import ConfigError, RetinueError
from retinue.files.private import make_private_folder
from retinue.files.trees import remove_tree
from retinue.workspaces import alternates, git
from retinue.workspaces.copy_tree import BudgetExceeded, CopyBudget, FolderCopier
from retinue.workspaces.ignores import Ignores
from retinue.workspaces.store import Files, Import, Store
from retinue.workspaces.walk import Skipped, Walker, display_path

NOT_A_REPOSITORY = "workspace 'worktree' needs a git repository, and {project} is in none: use copy"
TOO_LARGE = (
    "the workspace would be larger than {limit} MiB (it was full at {path}): name what it does not need in .gitignore, "
    "raise workspace_max_mib in retinue.yaml, or use scratch"
)
MIB = 1024 * 1024


@dataclass
class CreatedWorkspace:
    """A new workspace: its files, what was left out, and the folders (`objects`) that its git has to read."""

    files: Files = field(default_factory=dict)
    skipped: Skipped = field(default_factory=Skipped)
    objects: tuple[str, ...] = ()


def create_workspace(  # noqa: PLR0913 - each by name
    workspace: str,
    *,
    kind: str,
    source: str,
    project: str,
    store: Store,
    ref: str,
    known: Files | None,
    limit: int,
    stop: threading.Event,
) -> CreatedWorkspace:
    """Make the workspace and store its first state under `ref`. `known` are the first files of a source that is such a
    workspace itself. Leaves nothing behind if it fails."""
    repository = git.find_repository(project)
    if kind == "worktree" and repository is None:
        raise ConfigError(NOT_A_REPOSITORY.format(project=project))
    foreign = source != project
    tracked = git.list_tracked(project) if repository is not None and not foreign else list(known or ())
    place = make_private_folder(workspace)
    try:
        with Ignores(tracked, repository) as ignores, Import(store) as into:
            walker = Walker(source, ignored=ignores, inside_ignored=kind == "copy", foreign=foreign, stop=stop)
            files = FolderCopier(workspace, into, CopyBudget(limit)).copy(walker)
            into.add_tree(ref, files)
        made = CreatedWorkspace(files, walker.skipped)
        if kind == "worktree" and repository is not None:
            made.objects = tuple(alternates.find_object_folders(repository.objects))
            _make_repository(workspace, project, repository, made.objects)
    except BudgetExceeded as error:
        remove_tree(place)
        raise RetinueError(TOO_LARGE.format(limit=limit // MIB, path=display_path(error.path))) from None
    except OSError as error:
        remove_tree(place)
        raise RetinueError(f"cannot make the workspace {workspace}: {error.strerror or error}") from error
    except BaseException:
        remove_tree(place)
        raise
    return made


def _make_repository(workspace: str, project: str, repository: git.Repository, objects: tuple[str, ...]) -> None:
    """Make a `.git` in a workspace that no run has seen yet: no remote, no hooks, no settings but git's own."""
    folder = f"{workspace}/.git"
    words = ("init", "-q", "--template=", f"--object-format={repository.format}", workspace)
    git.run_in_store(*words, git_dir=folder, cwd=workspace)
    info = Path(folder, "objects", "info")
    info.mkdir(parents=True, exist_ok=True)
    (info / "alternates").write_bytes(alternates.format_alternates(objects))
    if Path(repository.shallow).is_file():
        shutil.copyfile(repository.shallow, f"{folder}/shallow")
    whole = not repository.prefix
    head = repository.head if whole else _commit_subfolder(project, repository, folder)
    if whole and head:
        kinds = ("refs/heads", "refs/tags")
        refs = git.run_in_project("for-each-ref", "--format=%(objectname) %(refname)", *kinds, project=project)
        Path(folder, "packed-refs").write_bytes(b"# pack-refs with: \n" + refs)
    if repository.branch:
        git.run_in_store("symbolic-ref", "HEAD", repository.branch, git_dir=folder)
    if head:
        git.run_in_store("update-ref", *(() if repository.branch else ("--no-deref",)), "HEAD", head, git_dir=folder)
        git.run_in_store("read-tree", head, git_dir=folder, cwd=workspace)


def _commit_subfolder(project: str, repository: git.Repository, folder: str) -> str:
    """Return a commit with the content of a project that is a folder inside a repository: it stands for its history."""
    if not repository.head:
        return ""
    place = repository.prefix.rstrip("/")
    words = ("rev-parse", "--verify", "--quiet", f"{repository.head}:{place}")
    tree = git.run_in_project(*words, project=project, good=(0, 1)).decode().strip()
    if not tree:
        return ""
    message = f"{place} at {repository.head}"
    return git.run_in_store("commit-tree", tree, "-m", message, git_dir=folder).decode().strip()
