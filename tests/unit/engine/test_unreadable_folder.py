"""A model's file that the service's user may not read is named, with the user: what reads it says that there is no such file."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.engine import UnsupportedModel
from specdec.engine.weights import FolderWeights, read_config, safetensors_of
from tests.tiny import save_tiny

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where other users may come, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        model = save_tiny(Path(place) / "model")
        model.chmod(0o755)
        yield model


@contextlib.contextmanager
def closed(path: Path) -> Iterator[int]:
    """Nobody but root may read it, and this process is not root: yields its uid."""
    uid, mode = os.geteuid(), path.stat().st_mode
    path.chmod(0)
    if uid == 0:
        os.seteuid(NOBODY)
    try:
        yield os.geteuid()
    finally:
        os.seteuid(uid)
        path.chmod(mode)


def test_a_weights_file_that_may_not_be_read_is_named_with_the_user(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    for read in (FolderWeights, safetensors_of):  # the second is what the generic path asks first
        with closed(weights) as uid, pytest.raises(UnsupportedModel, match=f"{re.escape(str(weights))} cannot be read by uid {uid}: Perm"):
            read(folder)
    assert safetensors_of(folder) == [weights]


def test_a_config_or_folder_that_may_not_be_read_is_named_too(folder: Path) -> None:
    with closed(folder / "config.json") as uid, pytest.raises(UnsupportedModel, match=f"config.json cannot be read by uid {uid}"):
        read_config(folder)
    for read in (read_config, safetensors_of):
        with closed(folder) as uid, pytest.raises(UnsupportedModel, match=f"cannot be read by uid {uid}: Permission denied; give"):
            read(folder)


def test_a_link_that_leads_nowhere_is_named(folder: Path) -> None:
    """As caches of models have them, where only a part of the cache is there."""
    (weights,) = folder.glob("*.safetensors")
    weights.unlink()
    weights.symlink_to(folder / "blobs" / "0123")
    with pytest.raises(UnsupportedModel, match=f"{re.escape(str(weights))} cannot be read by uid .*: No such file"):
        safetensors_of(folder)
    with pytest.raises(UnsupportedModel, match="no model folder"):
        read_config(folder / "blobs")
