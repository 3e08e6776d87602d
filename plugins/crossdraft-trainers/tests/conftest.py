"""Fixtures of the training tests."""

import sys
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.models.load import load_model

sys.path.insert(0, str(Path(__file__).parent))  # what test modules share


@pytest.fixture(scope="session")
def on_disk(tmp_path_factory: Any) -> Path:
    """A directory with a chat model of 40 words and ``questions.jsonl``."""
    from training_target import save_chat_model

    path = tmp_path_factory.mktemp("target")
    save_chat_model(path)
    return path


@pytest.fixture(scope="session")
def chat_target(on_disk: Path) -> LoadedModel:
    """The same, loaded."""
    return load_model(str(on_disk), dtype="float32", device="cpu")
