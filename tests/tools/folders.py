"""Real folders and a link that knows its run and no person, for tests that call a local tool directly."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from retinue.agent.local_tools import SandboxedTool
from retinue.core.messages import Call, RunRef
from retinue.core.ports import Folders, Link, LocalTool, Outcome

WORKER = RunRef("t1", 1, "/main/worker-1", "worker-1", "worker", "s1")


@dataclass(frozen=True)
class RealFolders:
    """A workspace to write, other folders to read, and a place for what does not fit inline."""

    workspace: Path
    readable: tuple[Path, ...]
    spills: Path
    hidden_paths: tuple[str, ...] = ()
    granted_paths: tuple[str, ...] = ()

    @property
    def search_roots(self) -> Sequence[Path]:
        return self.roots

    @property
    def roots(self) -> Sequence[Path]:
        return (self.workspace, *self.readable)

    def spill(self, name: str) -> Path:
        return self.spills / f"{len(list(self.spills.iterdir()))}-{name}"


@dataclass(frozen=True)
class NamedLink:
    """The part of a link that calls of local tools use."""

    ref: RunRef = WORKER

    @property
    def local_calls(self) -> "NamedLink":
        return self

    def show_output(self, call_id: str, text: str) -> None:
        """Nobody watches."""


def make_folders(base: Path, *readable: Path) -> RealFolders:
    for name in ("workspace", "spills"):
        (base / name).mkdir()
    return RealFolders(base / "workspace", readable, base / "spills")


async def use(tool: LocalTool, folders: Folders, **args: Any) -> Outcome:
    call = Call("c1", tool.spec.name, args)
    return await SandboxedTool(tool)(call, folders, cast("Link", NamedLink()))


def preview(tool: LocalTool, folders: Folders, **args: Any) -> str:
    return tool.preview(Call("c1", tool.spec.name, args), folders)
