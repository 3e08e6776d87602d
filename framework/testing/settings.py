"""Test settings of strategies: exact tables, or a tiny model with random weights."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ..api.build import ModuleContext
from ..certificate.outcomes import QUICK_DRAFTER
from ..certificate.table_lm import Toy, ToyContext, random_tables
from ..certificate.toys import built_in_toys
from ..contracts.drafter import DraftContext
from ..contracts.lm import LM
from ..contracts.models import Checkpoint
from ..contracts.sampling import Sampling
from ..engine.constrained_lm import masked
from ..lm.transformers_lm import TransformersLM
from ..models.checkpoint import load_checkpoint
from ..plugins import installing
from ..runs.threads import one_thread

#: Parts of PyTorch's errors about tensors of two devices, and the message about them.
_TWO_DEVICES = re.compile("same device|expected device")
_MIXED = (
    "mixes devices: a tensor is made on the CPU, which fails on a GPU. Make it on the device of its inputs, such as "
    "sequences.device or p.device"
)


@contextmanager
def no_waits(who: str, where: str, advice: str = "") -> Iterator[None]:
    """Raise AssertionError if code on the meta device reads a value of a tensor, or mixes devices."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        if _TWO_DEVICES.search(str(error)):
            raise AssertionError(f"{who} {_MIXED}: {error}") from error
        value = "a value of a tensor (bool(), int(), .item(), .tolist(), a mask as an index)"
        raise AssertionError(f"{who} waits for the device{where}: it reads {value}{advice}: {error}") from error


def device_comparison() -> Any:
    """The module of crossdraft-simulated-cuda that compares devices; without it or without CUDA the test is skipped."""
    if not torch.cuda.is_available():
        pytest.skip("runs on a GPU, or by: pytest -p crossdraft_simulated_cuda -k on_cuda")
    reason = f"devices are compared by crossdraft-simulated-cuda; {installing('crossdraft-simulated-cuda')}"
    return pytest.importorskip("crossdraft_simulated_cuda.device_comparison", reason=reason)


class OneThread:
    """Tests that run with one PyTorch thread, which is faster for tiny tensors."""

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        with one_thread():
            yield


class Setting(ABC):
    """A target and its drafter context.

    Attributes:
        prompts: of different lengths, for ragged batches.
        eos: a token that the target emits occasionally.
    """

    prompts: Sequence[list[int]]
    eos: int

    @abstractmethod
    def context(self, batch_size: int, sampling: Sampling, device: str = "cpu") -> DraftContext:
        """Return a context over new slots of the target."""


class Toys(Setting):
    """A target table of exact probabilities; every model that a drafter loads is a similar table (see `TableLM`)."""

    #: V = 5, so that distributions do not coincide by chance; id V is not a token of the text.
    prompts = ([0, 1, 2, 1, 3], [4], [2, 1, 2, 1, 2, 1, 2], [3, 3, 0, 4])
    eos = 4

    def context(self, batch_size: int, sampling: Sampling, device: str = "cpu") -> DraftContext:
        target, drafter = random_tables(5)
        return ToyContext(target.to(device), drafter.to(device), sampling, batch_size)

    @property
    def toys(self) -> list[Toy]:
        """Toys for enumeration, those of a quick certificate."""
        return [toy for toy in built_in_toys() if toy.name in QUICK_DRAFTER]


class TinyModel(Setting):
    """A Llama of four small layers with random weights, in float32; models that a drafter loads are noisy copies of it.

    For drafters that read hidden states or run layers of the target. Heads are loaded from the directory in their
    options.
    """

    prompts = ([5, 9, 3, 7, 11], [6, 2], [8, 4, 8, 4, 8, 4, 8], [3, 3, 10, 12])
    eos = 4

    def context(self, batch_size: int, sampling: Sampling, device: str = "cpu") -> DraftContext:
        return TinyContext(self.model(device), sampling, batch_size)

    @staticmethod
    @cache
    def model(device: str = "cpu") -> Any:
        """Target: a causal LM of transformers with a vocabulary of 13 and hidden size 16."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=13,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            initializer_range=0.4,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            model: Any = LlamaForCausalLM(config).float().eval().requires_grad_(False)
        return model.to(device)


class TinyContext(ModuleContext):
    """Drafter context of `TinyModel`."""

    def __init__(self, model: Any, sampling: Sampling, batch_size: int, max_length: int = 128):
        lm = TransformersLM(model, batch_size, max_length)
        super().__init__(
            sampling=sampling,
            batch_size=batch_size,
            max_length=max_length,
            vocab_size=lm.vocab_size,
            device=lm.device,
            target=lm,
            target_model=model,
            target_name="a tiny model",
        )

    def load_lm(self, name: str, *, extra_tokens: int = 0, ids: Tensor | None = None, unknown: int = 0) -> LM:
        slots = TransformersLM(_noisy(self.target_model), self.batch_size, self.max_length + extra_tokens)
        return masked(slots, self.constraints, self.mask_drafts)

    def load_heads(self, name: str) -> Checkpoint:
        return load_checkpoint(name)


@lru_cache(maxsize=4)  # CUDA graphs of the copy live as long as it does
def _noisy(model: Any) -> Any:
    """A copy of a model with 10% of noise on its weights."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for weight in noisy.parameters():
        if weight.dim() > 1 and weight.device.type != "meta":
            noise = torch.randn(weight.shape, generator=generator).to(weight.device)  # equal on all devices
            weight += 0.1 * weight.std() * noise
    return noisy
