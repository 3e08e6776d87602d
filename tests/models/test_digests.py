"""Number of reads of weights for digests."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.models import digests

OLD, NEW = b"a" * 64, b"b" * 64


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: Any) -> list[Path]:
    """The files that were read, each time they were."""
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_LARGE", 64)
    monkeypatch.setattr(digests, "_SETTLED", -1)
    read: list[Path] = []
    plain = digests.file_sha256.__globals__["_file_sha256"].__wrapped__

    def counted(file: Path, size: int, mtime_ns: int) -> str:
        read.append(file)
        return plain(file, size, mtime_ns)

    monkeypatch.setattr(digests, "_file_sha256", counted)  # without the memory of one process
    return read


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_large_file_is_read_once_and_again_when_it_changes(tmp_path: Path, reads: list[Path]) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(OLD)
    times = file.stat()
    assert [digests.weights_sha256(file) for _ in range(3)] == [sha256(OLD)] * 3
    assert reads == [file]
    replaced = tmp_path / "aside"  # of equal size and time, as cp -p leaves it
    replaced.write_bytes(NEW)
    os.utime(replaced, ns=(times.st_atime_ns, times.st_mtime_ns))
    replaced.replace(file)
    assert [digests.weights_sha256(file) for _ in range(2)] == [sha256(NEW)] * 2
    assert reads == [file] * 2


def test_small_fresh_or_verified_files_are_hashed(tmp_path: Path, reads: list[Path], monkeypatch: Any) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(OLD[:63])
    large.write_bytes(OLD)
    for _ in range(2):
        digests.weights_sha256(small)
        digests.file_sha256(large)
    monkeypatch.setattr(digests, "_SETTLED", 10**12)
    for _ in range(2):
        digests.weights_sha256(large)
    assert reads == [small, large] * 2 + [large] * 2
    assert not (tmp_path / "cache").exists()


def test_damaged_digest_cache_is_ignored(tmp_path: Path, reads: list[Path]) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(OLD)
    digests.weights_sha256(file)
    (kept,) = (tmp_path / "cache" / "digests").iterdir()
    kept.write_bytes(b"\xff no digest")
    assert digests.weights_sha256(file) == sha256(OLD)
    assert kept.read_text() == sha256(OLD) + "\n" and len(reads) == 2
