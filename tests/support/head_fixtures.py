"""For drafters that read the target's features: a decode loop with heads, and the certificate on a real model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from draft_contexts import GivenContext
from torch import Tensor

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import BATCH, Enumeration, _widen
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.models.checkpoint import load_checkpoint


class CopyingLM(TransformersLM):
    """Slots that start with the prompt of slot 0 copy its keys, values and features: thousands of equal prefills."""

    def start(self, row: int, prompt: Sequence[int]) -> Tensor | None:
        if row == 0:
            self._prompt, self._hidden = list(prompt), super().start(0, prompt)
        elif list(prompt) != self._prompt:
            return super().start(row, prompt)
        self.lengths[row] = length = len(prompt) - 1
        if length and row:
            with torch.inference_mode():
                for layer in self.cache.layers:
                    for buffer in (layer.keys, layer.values):
                        buffer[row, :, :length] = buffer[0, :, :length]
        return self._hidden


def make_decoder(
    target: Any,
    drafter: str,
    options: Mapping[str, Any],
    verifier: str,
    *,
    batch_size: int,
    sampling: Sampling | None = None,
    max_length: int = 128,
    load_heads: Callable[[str], Checkpoint] = load_checkpoint,
    lm: type[TransformersLM] = TransformersLM,
    **loop: Any,
) -> Decoder:
    """A decoder whose context provides the features and the module of a registered drafter.

    ``options`` are the drafter's; temperature 0 by default.
    """
    drafting, rule = plugins.get("drafters", drafter), plugins.get("verifiers", verifier)
    sampling = sampling if sampling is not None else Sampling(temperature=0)
    config = drafting.Config(**options)
    model = lm(target, batch_size, max_length)
    context = GivenContext(
        model,
        sampling,
        max_length,
        load_heads=load_heads,
        target_model=target,
        final_q=rule.traits(rule.Config()).modifies_target,
    )
    return Decoder(model, drafting(config, context), rule(), sampling=sampling, **{"validate": "always", **loop})


@pytest.fixture(scope="session")
def heads_decoder() -> Callable[..., Decoder]:
    """See `make_decoder`."""
    return make_decoder


@pytest.fixture(scope="session")
def exact_model() -> Any:
    """A float64 llama with a vocabulary of 4 and features of size 8, for `enumerate_model`."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=4,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=12,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


# -- the certificate ------------------------------------------------------------------------------------


class EveryStep(Enumeration):
    """Decisions of all steps of a run: a number of one step is another decision than that of the next."""

    steps_started = 0

    def for_step(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> Enumeration:
        self.steps_started += 1
        return self

    def _decide(self, key: tuple[str, int], probability: np.ndarray) -> np.ndarray:
        return super()._decide((f"{key[0]} {self.steps_started}", key[1]), probability)


@dataclass(frozen=True)
class ModelCertificate:
    """Result of `enumerate_model`.

    Attributes:
        tv: total variation between the joint distribution of the output and that of the target.
        expected_tau: E[tau] of each step.
        paths: decision paths followed.
    """

    tv: float
    expected_tau: list[float]
    paths: int


@pytest.fixture(scope="session")
def enumerate_model() -> Callable[..., ModelCertificate]:
    """``enumerate_model(model, drafter, options, verifier, prompt=..., ...)``: see `enumerate_steps`."""
    return enumerate_steps


@torch.inference_mode()
def enumerate_steps(
    model: Any,
    drafter: str,
    options: Mapping[str, Any],
    verifier: str,
    *,
    prompt: Sequence[int],
    depth: int,
    steps: int = 2,
    sampling: Sampling | None = None,
    **loop: Any,
) -> ModelCertificate:
    """Exact joint distribution of a pair's output after ``prompt`` on a small float64 model, against the model's.

    Drafter, loop, cache and verifier are the real ones: the drafter starts with the prompt and then only observes.
    Shorter outputs are completed to ``steps * (depth + 1)`` tokens with the model's own distribution, computed without
    a cache.

    Args:
        model: a transformers model in float64 with a vocabulary of about 4 (all outputs are in one table).
        options: the drafter's; ``loop`` goes to `make_decoder`.
        depth: of the deepest node the drafter can draft.
        sampling: temperature 1 by default.
    """
    sampling = sampling if sampling is not None else Sampling()
    columns: dict[tuple[str, int], int] = {}
    scripts, weight = np.full((1, 0), -1, dtype=np.int64), np.ones(1)
    emitted: dict[tuple[int, ...], float] = {}
    tau = np.zeros(steps)
    paths, length = 0, steps * (depth + 1)
    while len(weight):
        rng = EveryStep(scripts[:BATCH], weight[:BATCH], columns)
        b = len(rng.weight)
        decoder = make_decoder(
            model,
            drafter,
            options,
            verifier,
            batch_size=b,
            sampling=sampling,
            max_length=len(prompt) + length + 32,
            lm=CopyingLM,
            max_new_tokens=length + 32,
            rng=rng,
            **loop,
        )
        for row in range(b):
            decoder.start(row, prompt)
        lengths = [[len(prompt)] * b]
        for _ in range(steps):
            decoder.step()
            lengths.append([len(history) for history in decoder.sequences.history])
        # A row's weight is whole only now that all of its decisions are taken.
        tau += ((np.diff(lengths, axis=0) - 1) * rng.weight).sum(1)
        for history, probability in zip(decoder.sequences.history, rng.weight, strict=True):
            tokens = tuple(history[len(prompt) :])
            emitted[tokens] = emitted.get(tokens, 0.0) + float(probability)
        paths += b
        weight = np.concatenate([weight[BATCH:], *(w for _, _, w in rng.alternatives)])
        scripts = np.concatenate(
            [_widen(s, len(columns)) for s in (scripts[BATCH:], *(s for _, s, _ in rng.alternatives))]
        )
    return ModelCertificate(_distance(emitted, _laws(model, prompt, length, sampling)), tau.tolist(), paths)


def _laws(model: Any, prompt: Sequence[int], length: int, sampling: Sampling) -> list[np.ndarray]:
    """Per n < length: ``[V ** n, V]``, the model's distributions after the prompt and n tokens, without a cache."""
    vocab = model.get_output_embeddings().weight.shape[0]
    ends = torch.tensor(list(product(range(vocab), repeat=length - 1)))
    prefix = torch.tensor(list(prompt)).expand(len(ends), -1)
    distributions: list[np.ndarray] = []
    logits = torch.cat([model(piece).logits for piece in torch.cat([prefix, ends], 1).split(BATCH)])
    for n in range(length):
        all_items = vocab ** (length - 1 - n)  # equal beginnings stand side by side
        distributions.append(sampling.probs(logits[::all_items, len(prompt) - 1 + n]).numpy())
    return distributions


def _distance(emitted: Mapping[tuple[int, ...], float], distributions: Sequence[np.ndarray]) -> float:
    """Total variation, all outputs completed with ``laws`` to the same length."""
    length, vocab = len(distributions), distributions[0].shape[1]
    ended = [np.zeros(vocab**n) for n in range(length + 1)]
    for tokens, probability in emitted.items():
        index = 0
        for token in tokens:
            index = index * vocab + token
        ended[len(tokens)][index] += probability
    ours, target = ended[0], np.ones(1)
    for n, distribution in enumerate(distributions):
        ours = (ours[:, None] * distribution).ravel() + ended[n + 1]
        target = (target[:, None] * distribution).ravel()
    return float(np.abs(ours - target).sum() / 2)
