"""Confusion matrix of ``crossdraft diagnose --counters``: servers with a known fault, decoded by crossdraft's own loop.

    python benchmarks/diagnose_signatures.py [--servers 100] [--responses 100] [--seed 0] [--fault NAME]

A server decodes the responses of a tiny target at temperature 0 with a drafter that is right at each text position with
a probability of its own: a level that differs between servers and responses, and a slope along the draft. A fault is
built into the drafter: its state is not fed back after the first token, a window ends, rows of a batch are mixed, .. .
Greedy drafts are real ones, of a draft model at temperature 1. The counters of the steps are what a server would
report. Rows of the matrix are the faults, columns the answers; an answer needs 90 % of the likelihood, otherwise it is
"not decided".
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crossdraft_advisor.diagnosis.hypothesis import CLEAR_SHARE, assess
from crossdraft_advisor.diagnosis.signatures import counts_of, signatures
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.engines.formats import CounterSource
from scipy.special import expit
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft import CHAIN, Draft, Drafter, DraftTraits, generate, load_model

VOCABULARY, TOKENS, DEPTH = 512, 32, 8
_GREEDY = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}


class Oracle(Drafter):
    """A drafter that knows the responses, and errs as often as ``rates`` has it.

    Args:
        texts: prompt and response of each prompt.
        rates: [responses, tokens, gamma], probability of being right at a text position as the i-th drafted token.
        mixed: share of the steps in which a row drafts for its neighbour.
    """

    name = "oracle"

    def __init__(self, texts: Sequence[list[int]], rates: np.ndarray, mixed: float, rng: np.random.Generator):
        super().__init__(None, None)  # type: ignore[arg-type]
        self.texts, self.rates, self.mixed, self.rng = texts, rates, mixed, rng
        self.uniform = rng.random(rates.shape[:2])

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=DEPTH)

    def propose(self, sequences: Any, rng: Any) -> Draft:
        rows: list[list[int]] = []
        count, gamma = len(self.texts), self.rates.shape[2]
        for row, (history, limit) in enumerate(zip(sequences.history, sequences.limit, strict=True)):
            if not history:
                rows.append([])
                continue
            number = sequences.stream[row]
            start = len(history) - (len(self.texts[number]) - TOKENS)
            source = (number + 1) % count if self.rng.random() < self.mixed else number
            draft = []
            for i in range(min(gamma, limit, TOKENS - start)):
                token = self.texts[source][len(self.texts[source]) - TOKENS + start + i]
                right = self.uniform[number, start + i] < self.rates[number, start + i, i]
                draft.append(token if right else (token + 1 + number) % VOCABULARY)
            rows.append(draft)
        return Draft.copied(rows, sequences.device)


def target_of(folder: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=None, bos_token_id=None, **shape))
    model.lm_head.weight.data *= 30.0
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return load_model(str(folder), dtype="float32", device="cpu")


def rates_of(rng: np.random.Generator, responses: int, gamma: int, level: float, shift: float = 0.0) -> np.ndarray:
    """Right with probability level (as logit) + response + text position, and a slope along the draft."""
    x = level + shift + rng.normal(0, 0.5, (responses, 1, 1)) + rng.normal(0, 0.7, (responses, TOKENS, 1))
    return expit(x - rng.uniform(0, 0.15) * np.arange(gamma))


def acceptance_of(responses: Sequence[Any], gamma: int) -> Acceptance:
    """Counters of the steps with full drafts."""
    rows = []
    for response in responses:
        full = [step for step in response.steps if step.nodes == gamma]
        rows.append((len(full), *(sum(step.tau >= i for step in full) for i in range(1, gamma + 1))))
    return Acceptance.from_rows(rows, "server", drafter="draft-model", verifier="token")


class Servers:
    """Decodes the responses of one target by faulty drafters."""

    def __init__(self, folder: Path, responses: int):
        self.target = target_of(folder / "target", 1)
        self.draft = str(folder / "draft")
        near = load_model(str(folder / "target"), dtype="float32", device="cpu").model
        torch.manual_seed(2)
        near.lm_head.weight.data += 0.1 * torch.randn_like(near.lm_head.weight)
        near.save_pretrained(self.draft)
        self.target.tokenizer.save_pretrained(self.draft)
        self.prompts = np.random.default_rng(5).integers(0, VOCABULARY, (responses, 4)).tolist()
        plain = generate(self.target, self.prompts, batch_size=100, **_GREEDY)
        self.texts = [[*prompt, *response.tokens] for prompt, response in zip(self.prompts, plain, strict=True)]

    def oracle(self, rng: np.random.Generator, rates: np.ndarray, mixed: float = 0.0) -> Acceptance:
        drafter = Oracle(self.texts, rates, mixed, rng)
        responses = generate(self.target, self.prompts, drafter=drafter, batch_size=100, **_GREEDY)
        return acceptance_of(responses, rates.shape[2])

    def model(self, temperature: float, seed: int, drafts: float | None) -> Acceptance:
        drafter = {"name": "draft-model", "model": self.draft, "gamma": 4, "temperature": drafts}
        options = {"max_new_tokens": 24, "temperature": temperature, "ignore_eos": True, "seed": seed}
        options["verifier"] = "token" if temperature else "greedy"
        return acceptance_of(generate(self.target, self.prompts, drafter=drafter, batch_size=100, **options), 4)

    def of(self, fault: str, rng: np.random.Generator, seed: int) -> list[tuple[dict[str, int], Acceptance]]:
        """Circumstances and counters of one or two sources with ``fault``, by the name of its signature."""
        count, level = len(self.prompts), rng.uniform(0.3, 1.8)
        gamma = int(rng.integers(3, DEPTH + 1))
        rates = rates_of(rng, count, gamma, level)
        other = rates_of(rng, count, gamma, level, -rng.uniform(1.2, 2.5))
        repeat = rates_of(rng, count, gamma, level)
        if fault == "healthy, one to three tokens":
            rates = rates_of(rng, count, int(rng.integers(1, 4)), rng.uniform(0.3, 3.5))
        elif fault == "lower at all positions":
            rates = rates_of(rng, count, gamma, rng.uniform(-2.2, -0.9))
        elif fault == "nothing at any position":
            rates = rates_of(rng, count, gamma, rng.uniform(-6.0, -4.0))
        elif fault == "the first position only":
            rates[:, :, 1:] *= rng.uniform(0.02, 0.25)
        elif fault == "a cliff":
            rates[:, :, int(rng.integers(2, gamma)) :] *= rng.uniform(0.0, 0.2)
        elif fault == "low first, then high":
            rates[:, :, 0] *= rng.uniform(0.15, 0.4)
        elif fault == "healthy, two batch sizes":
            return [({"batch_size": 1}, self.oracle(rng, rates)), ({"batch_size": 16}, self.oracle(rng, repeat))]
        elif fault == "only in batches":
            mixed = self.oracle(rng, repeat, rng.uniform(0.4, 1.0))
            return [({"batch_size": 1}, self.oracle(rng, rates)), ({"batch_size": 16}, mixed)]
        elif fault == "falls with the context length":
            return [({"context": 512}, self.oracle(rng, rates)), ({"context": 8192}, self.oracle(rng, other))]
        elif fault == "healthy, two draft lengths":
            return [({}, self.oracle(rng, rates)), ({}, self.oracle(rng, rates[:, :, : int(rng.integers(1, gamma))]))]
        elif fault == "depends on the draft length":
            return [({}, self.oracle(rng, rates)), ({}, self.oracle(rng, other[:, :, : int(rng.integers(1, gamma))]))]
        elif fault == "healthy, two temperatures":
            return [({"temperature": t}, self.model(t, seed, None)) for t in (0, 1)]
        elif fault == "only above temperature 0":
            return [({"temperature": t}, self.model(t, seed, 0.0)) for t in (0, 1)]
        return [({}, self.oracle(rng, rates))]


FAULTS = (
    "healthy",
    "healthy, one to three tokens",
    "lower at all positions",
    "nothing at any position",
    "the first position only",
    "a cliff",
    "low first, then high",
    "healthy, two batch sizes",
    "only in batches",
    "falls with the context length",
    "healthy, two draft lengths",
    "depends on the draft length",
    "healthy, two temperatures",
    "only above temperature 0",
)


def answer(sources: Sequence[tuple[dict[str, int], Acceptance]]) -> str:
    """Name of the signature with 90 % of the likelihood."""
    described = [CounterSource(source="s", gamma=item.gamma, **keys) for keys, item in sources]
    counts = [counts_of(item, str(i), sources[0][1]) for i, (_, item) in enumerate(sources)]
    best = assess(list(signatures(described, sources[0][1].gamma)), counts)[0]
    return best.hypothesis.name if best.share >= CLEAR_SHARE else "not decided"


def lines(matrix: dict[str, Counter[str]]) -> Iterator[str]:
    yield "| fault | right | other answers |"
    yield "|---|---|---|"
    for fault, answers in matrix.items():
        right = fault.partition(",")[0] if fault.startswith("healthy") else fault
        total = sum(answers.values())
        others = ", ".join(f"{name} {n}" for name, n in answers.most_common() if name != right)
        yield f"| {fault} | {answers[right]} of {total} | {others} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=100)
    parser.add_argument("--responses", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", action="append", choices=FAULTS, help="a row of the matrix (repeatable)")
    args = parser.parse_args()
    start, matrix = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(Path(folder), args.responses)
        for fault in args.fault or FAULTS:
            answers = matrix[fault] = Counter()
            for seed in range(args.servers):
                rng = np.random.default_rng([args.seed, seed, FAULTS.index(fault)])
                answers[answer(servers.of(fault, rng, seed))] += 1
            print(f"{time.perf_counter() - start:5.0f} s  {fault}: {dict(answers)}", file=sys.stderr, flush=True)
    print("\n".join(lines(matrix)))


if __name__ == "__main__":
    main()
