"""A folder made by the tools is whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
from new_folder import new_folder

from megatron_tim.errors import UserError


def test_it_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    with new_folder(target) as folder:
        (folder / "file").write_text("text")
        assert not target.exists()
    assert (target / "file").read_text() == "text"
    assert [path.name for path in target.parent.iterdir()] == ["b"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), new_folder(tmp_path / "x") as folder:
        (folder / "file").write_text("text")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the disk is full"), new_folder(tmp_path / "x"):
        raise OSError(28, "No space left on device")


def test_one_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already"), new_folder(tmp_path / "x"):
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "theirs").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "theirs").exists()
