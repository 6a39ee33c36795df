"""State counts only if this user made it in this place."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from retinue.core.errors import ConfigError
from retinue.files.state_owner import (
    OWNER_FILE,
    adopt_state_folder,
    claim_state_folder,
    is_adoptable,
    verify_state_folder,
)
from retinue.files.user_key import find_user_folder, has_signature, load_user_key, sign_data

pytestmark = pytest.mark.finding("X1")
UNSIGNED = "has no signature of yours for this place"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "project" / ".retinue"
    claim_state_folder(folder)
    (folder / "logs").mkdir(mode=0o700)
    return folder


def refused(state: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        verify_state_folder(state)
    with pytest.raises(ConfigError) as again:
        claim_state_folder(state)
    assert str(again.value) == str(caught.value)
    return str(caught.value)


def test_what_the_user_made_here_counts_and_what_is_missing_does_not(state: Path, tmp_path: Path) -> None:
    assert verify_state_folder(state)
    claim_state_folder(state)
    assert not verify_state_folder(tmp_path / "nothing" / ".retinue")


def test_a_folder_without_a_signature_is_refused_unless_nothing_is_in_it(tmp_path: Path) -> None:
    state = tmp_path / ".retinue"
    state.mkdir(mode=0o755)
    (state / ".gitignore").write_text("*\n")
    assert not verify_state_folder(state)
    (state / "applying").mkdir()
    assert refused(state) == (
        f"{state} has no signature of yours for this place, so nothing in it is used: it came with a clone or an "
        "archive, was copied, or lost its owner.json, for example to `git clean`. Move it away, or, if it is yours, "
        "take it over with `retinue trust --state`"
    )


def test_a_folder_whose_signing_was_cut_short_is_signed_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / ".retinue"
    folder.mkdir(mode=0o700)
    (folder / ".retinue-0123456789abcdef").write_bytes(b"{")  # what a killed process leaves of its owner file
    assert not verify_state_folder(folder)
    claim_state_folder(folder)
    assert verify_state_folder(folder)


def test_a_folder_that_is_just_being_made_is_the_user_s_to_everybody_who_looks(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) / ".retinue" for number in range(200)]
    at_once = threading.Barrier(2)

    def make_folders() -> None:
        for folder in folders:
            at_once.wait()
            claim_state_folder(folder)
            (folder / "logs").mkdir(mode=0o700)

    maker = threading.Thread(target=make_folders)
    maker.start()
    refusals = []
    for folder in folders:
        at_once.wait()
        try:
            while not verify_state_folder(folder):
                pass
        except ConfigError as error:
            refusals.append(str(error))
    maker.join()
    assert refusals == []


def test_a_copy_is_refused_and_a_moved_folder_is_not(state: Path, tmp_path: Path) -> None:
    shutil.copytree(state, tmp_path / "copy" / ".retinue")
    assert UNSIGNED in refused(tmp_path / "copy" / ".retinue")
    state.parent.rename(tmp_path / "moved")
    assert verify_state_folder(tmp_path / "moved" / ".retinue")
    shutil.rmtree(tmp_path / "moved")
    shutil.copytree(tmp_path / "copy" / ".retinue", state)  # as from a backup
    assert verify_state_folder(state)


def test_a_signature_of_another_user_or_for_another_purpose_is_none(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_signature("a", b"data", sign_data("a", b"data"))
    assert not has_signature("b", b"data", sign_data("a", b"data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert UNSIGNED in refused(state)
    (state / OWNER_FILE).write_text("[]")
    assert UNSIGNED in refused(state)
    (state / OWNER_FILE).unlink()
    (state / OWNER_FILE).symlink_to("/dev/zero")
    assert UNSIGNED in refused(state)


def test_a_user_can_take_state_over(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / ".retinue"
    shutil.copytree(state, copy)
    assert is_adoptable(copy) and not is_adoptable(state) and not is_adoptable(tmp_path / "nothing")
    adopt_state_folder(copy)
    assert verify_state_folder(copy) and not is_adoptable(copy)


@pytest.mark.parametrize("name", ["", "logs"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_is_refused_and_cannot_be_taken_over(state: Path, name: str, mode: int) -> None:
    (state / name).chmod(mode)
    assert refused(state).startswith(f"other users may write {state / name}, so nothing in it is used: `chmod -R go-w")
    with pytest.raises(ConfigError, match="other users may write"):
        adopt_state_folder(state)


@pytest.mark.parametrize("name", ["logs", "runs", "control", "outbox", "applying", "mcp", "a2a"])
def test_links_are_refused(state: Path, tmp_path: Path, name: str) -> None:
    if (state / name).exists():
        shutil.rmtree(state / name)
    (state / name).symlink_to(tmp_path)
    assert f"{name} is a link" in refused(state)


@pytest.mark.finding("X2", "R6")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("name", ["", "logs"])
def test_state_of_another_user_is_refused_in_a_plain_sentence(state: Path, name: str) -> None:
    os.chown(state / name, 54321, 54321)
    text = refused(state)
    assert text.startswith(f"{state / name} belongs to user 54321, and you are root, so nothing in it is used: ")
    assert f"`chown -R root {state / name}` and then `retinue trust --state`" in text


def test_the_key_is_private_stable_and_not_taken_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    key, file = load_user_key(), find_user_folder() / "key"
    assert load_user_key() == key and len(key) == 32
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in file.parent.iterdir()] == ["key"]
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read or written by others, so others may know it: remove it"):
        load_user_key()


def test_without_a_place_for_the_key_no_state_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        ConfigError, match=r"the key that signs the state of projects cannot be kept in .*XDG_STATE_HOME"
    ):
        claim_state_folder(tmp_path / ".retinue")


@pytest.mark.finding("R6")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("with_key", [True, False])
def test_root_neither_uses_nor_makes_a_key_in_the_home_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_key: bool
) -> None:
    """`sudo -E` keeps HOME."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    if with_key:
        load_user_key()
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 54321, 54321)
    with pytest.raises(
        ConfigError, match="belongs to another user, so your key cannot be kept there: run this as that"
    ):
        load_user_key()
    assert (tmp_path / "retinue").exists() is with_key
