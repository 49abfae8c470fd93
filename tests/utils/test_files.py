"""Files are written completely or not at all."""

import os

import pytest
import torch

from pyro_bdl import Samples
from pyro_bdl.utils.files import atomic_write


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "new" / "a.txt"
    for text in ("first", "second"):
        with atomic_write(path) as part:
            part.write_text(text)
            assert part.suffix == ".txt" and part != path
        assert path.read_text() == text
    assert names(path.parent) == ["a.txt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_no_other(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(type(error)), atomic_write(path) as part:
        part.write_text("half of the n")
        raise error
    assert path.read_text() == "old" and names(tmp_path) == ["a.txt"]


def test_permissions_links_folders_and_devices(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link.txt"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with atomic_write(link) as part:
        part.write_text("new")
    assert link.is_symlink() and path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(IsADirectoryError, match="is a folder"), atomic_write(tmp_path):
        pass
    with atomic_write(os.devnull) as part:
        part.write_text("gone")
    assert not os.path.isfile(os.devnull)


def test_samples_keep_the_old_file(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    path = Samples({"w": torch.zeros(1, 3)}).save(tmp_path / "draws.safetensors")
    before = path.read_bytes()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr("pyro_bdl.utils.tensor_file.save_file", full)
        Samples({"w": torch.ones(1, 3)}).save(path)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["draws.safetensors"]


# ------------------------------------------------------------------------------- damaged samples


def test_cut_or_changed_samples_are_a_value_error_or_numbers(tmp_path):
    samples = Samples({"w": torch.zeros(1, 3)}, info={"kernel": "nuts"})
    path = samples.save(tmp_path / "d.safetensors")
    whole = path.read_bytes()
    for end in range(0, len(whole), 29):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="is no file of samples"):
            Samples.load(path)
    for place in range(0, len(whole), 13):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            Samples.load(path)
        except ValueError as error:
            assert "is no file of samples" in str(error)
