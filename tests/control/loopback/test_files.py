"""Address files: private whatever the umask, removed with their server; files of dead processes do no harm."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from retinue.control.address_files import (
    AddressFile,
    find_address,
    find_addresses,
    list_files_of_others,
    survey_addresses,
)
from retinue.control.client import ControlClient
from retinue.control.server import ControlServer
from retinue.core.errors import ControlUnreachable, RetinueError
from retinue.protocol.control import Address
from tests.control.loopback.kit import serve_supervisor

NOBODY = 65534


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def make_address(*, pid: int = os.getpid(), port: int = 2, token: str = "y", writer: str = "me") -> Address:
    return Address(version=1, pid=pid, port=port, token=token, writer=writer)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_modes_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "control"
    file = AddressFile(tmp_path, make_address(port=1))
    assert (mode(folder), mode(file.path)) == (0o700, 0o600)
    file.remove()
    folder.chmod(0o777)
    file = AddressFile(tmp_path, make_address(port=1))
    assert mode(folder) == 0o700
    file.remove()


async def test_the_file_says_where_the_server_is_and_goes_with_it(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        [file] = (h.state / "control").iterdir()
        assert file.name.startswith(f"{os.getpid()}-")
        assert find_address(h.state, h.supervisor.log.writer) == h.server.address
        assert find_addresses(h.state) == [h.server.address]
        assert len(h.server.address.token) >= 43
        assert await h.client.list_trees() == []
        client = h.client
    assert list((tmp_path / ".retinue/control").iterdir()) == []
    with pytest.raises(ControlUnreachable):
        await client.list_trees()


async def test_each_server_has_a_token_of_its_own(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path / "a") as a, serve_supervisor(tmp_path / "b") as b:
        assert a.server.address.token != b.server.address.token
        stranger = ControlClient(make_address(port=a.server.address.port, token=b.server.address.token))
        with pytest.raises(RetinueError, match="token is missing or wrong"):
            await stranger.list_trees()


@pytest.mark.finding("X1")
def test_a_file_that_others_can_open_is_not_used_though_somebody_holds_its_lock(tmp_path: Path) -> None:
    file = AddressFile(tmp_path, make_address())
    assert find_address(tmp_path, "me") is not None
    file.path.chmod(0o644)
    assert find_address(tmp_path, "me") is None and find_addresses(tmp_path) == []
    assert file.path.exists()
    file.remove()


@pytest.mark.requirement("P23")
def test_a_file_whose_process_died_is_ignored_and_removed(tmp_path: Path) -> None:
    """Also when another process has got its number since: this one has ours."""
    file = AddressFile(tmp_path, make_address())
    left = file.path
    file.remove()
    left.write_text(json.dumps({"version": 1, "pid": os.getpid(), "port": 1, "token": "x", "writer": "me"}))
    assert find_address(tmp_path, "me") is None
    assert not left.exists()
    left.write_text("{}")
    file = AddressFile(tmp_path, make_address())
    assert find_addresses(tmp_path) == [make_address()]
    file.remove()


def test_a_process_is_found_by_its_id_in_the_log_whatever_that_looks_like(tmp_path: Path) -> None:
    """No id leads out of the folder, although the files are named by it."""
    files = [
        AddressFile(tmp_path, make_address(pid=pid, writer=writer))
        for pid, writer in ((70, "host-a:1f"), (71, "../71"))
    ]
    found = [find_address(tmp_path, writer) for writer in ("host-a:1f", "../71", "70", "")]
    assert [address and address.pid for address in found] == [70, 71, None, None]
    for file in files:
        file.remove()


def test_processes_of_two_containers_with_equal_pids_are_both_found(tmp_path: Path) -> None:
    """Each of them may be process 1 of its container."""
    first, second = (AddressFile(tmp_path, make_address(pid=1, writer=writer)) for writer in ("me", "you"))
    assert [find_address(tmp_path, writer) for writer in ("me", "you")] == [
        make_address(pid=1, writer="me"),
        make_address(pid=1, writer="you"),
    ]
    first.remove()
    assert find_addresses(tmp_path) == [make_address(pid=1, writer="you")]
    second.remove()


def test_a_survey_names_the_servers_that_a_client_would_ask_and_removes_nothing(tmp_path: Path) -> None:
    files = [AddressFile(tmp_path, make_address(writer=writer)) for writer in ("me", "open", "renamed", "odd", "dead")]
    _, others_read, renamed, odd, dead = (file.path for file in files)
    others_read.chmod(0o644)
    renamed.rename(renamed.with_name("7-1234.json"))
    odd.write_text("{}")  # the lock stays
    files[-1].remove()
    dead.write_text("{}")
    assert survey_addresses(tmp_path) == ([make_address()], [dead])
    assert dead.exists()
    assert survey_addresses(tmp_path, remove=True)[0] == find_addresses(tmp_path) == [make_address()]
    assert not dead.exists()
    for file in files[:-1]:
        file.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the files of other users")
def test_root_sees_the_live_servers_of_another_user_and_asks_none_of_them(tmp_path: Path) -> None:
    live, others_read, foreign = (AddressFile(tmp_path, make_address(writer=name)) for name in ("a", "b", "c"))
    others_read.path.chmod(0o640)
    gone = live.path.with_name("1-1.json")
    gone.write_text("{}")
    gone.chmod(0o600)
    assert list_files_of_others(tmp_path) == []
    for path in (live.path.parent, live.path, others_read.path, gone):
        os.chown(path, NOBODY, NOBODY)
    assert list_files_of_others(tmp_path) == [(live.path, NOBODY)]
    assert [address.writer for address in survey_addresses(tmp_path)[0]] == ["c"]
    os.rename(tmp_path / "control", tmp_path / "elsewhere")
    (tmp_path / "control").symlink_to("elsewhere")
    assert list_files_of_others(tmp_path) == []
    for file in (live, others_read, foreign):
        file.remove()


def test_what_is_no_file_of_ours_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    file = AddressFile(tmp_path, make_address(pid=77))
    (folder / "1.json").symlink_to(file.path)
    os.mkfifo(folder / "2.json")
    (folder / "3.json").mkdir()
    os.link(file.path, folder / "4.json")
    (folder / "5.txt").write_text("hello")
    (folder / "6.json").symlink_to("/dev/zero")
    assert [address.pid for address in find_addresses(tmp_path)] == [77]
    assert find_address(tmp_path / "nowhere", "me") is None
    assert find_addresses(tmp_path / "nowhere") == []
    file.remove()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path, durable=False) as h:
        (tmp_path / "other").write_text("in the way")
        with pytest.raises(RetinueError, match=r"cannot make .*other/control"):
            async with ControlServer(h.supervisor, tmp_path / "other"):
                pass
