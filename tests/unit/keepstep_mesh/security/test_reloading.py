"""Objects made of files are made again when the files change, and never of half a change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep_mesh.security.reloaded_files import ReloadedFiles


@pytest.fixture
def number(tmp_path: Path) -> Path:
    file = tmp_path / "number"
    file.write_text("1")
    return file


def test_it_is_read_again_when_the_file_was_written(number: Path) -> None:
    one = ReloadedFiles("number", [number], lambda: int(number.read_text()))
    assert (one.value, one.refresh()) == (1, False)
    number.write_text("22")
    assert (one.refresh(), one.value, one.refresh()) == (True, 22, False)


def test_it_is_read_again_when_the_file_was_replaced_by_one_of_the_same_size_and_time(number: Path) -> None:
    one = ReloadedFiles("number", [number], lambda: int(number.read_text()))
    before = number.stat()
    other = number.with_name("other")
    other.write_text("2")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(number)
    assert (one.refresh(), one.value) == (True, 2)


def test_a_link_that_leads_elsewhere_is_a_change(number: Path, tmp_path: Path) -> None:
    # Kubernetes mounts secrets so: the file is a link into a folder that is itself a link.
    other, link = tmp_path / "other", tmp_path / "link"
    other.write_text("2")
    link.symlink_to(number)
    one = ReloadedFiles("number", [link], lambda: int(link.read_text()))
    link.unlink()
    link.symlink_to(other)
    assert (one.refresh(), one.value) == (True, 2)


def test_a_broken_file_is_reported_once_and_the_old_value_stays(number: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = ReloadedFiles("number", [number], lambda: int(number.read_text()))
    number.write_text("rubbish")
    assert [one.refresh(), one.refresh()] == [False, False]
    number.unlink()
    assert not one.refresh()
    assert one.value == 1
    reports = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(reports) == 2
    assert str(number) in caplog.text
    number.write_text("3")
    assert (one.refresh(), one.value) == (True, 3)


def test_by_force_it_is_read_though_nothing_seems_to_have_changed(number: Path) -> None:
    read = []
    one = ReloadedFiles("number", [number], lambda: read.append(1))
    one.refresh()
    assert len(read) == 1
    assert one.refresh(force=True)
    assert len(read) == 2


def test_a_value_of_no_file_never_changes() -> None:
    one = ReloadedFiles("nothing", [], list)
    before = one.value
    assert not one.refresh(force=True)
    assert one.value is before


def test_a_first_reading_that_fails_is_for_the_caller(number: Path) -> None:
    number.write_text("rubbish")
    with pytest.raises(ValueError, match="rubbish"):
        ReloadedFiles("number", [number], lambda: int(number.read_text()))
