"""Third-party strategies and a backend, which import ``crossdraft`` and PyTorch only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from crossdraft import (
    CHAIN,
    LM,
    Backend,
    Draft,
    DraftContext,
    Drafter,
    DraftModel,
    DraftTraits,
    LoadedModel,
    ModelPreparation,
    ResolvedModel,
    Sampling,
    Scores,
    Sequences,
    StepRng,
    StrategyConfig,
    UsageError,
    Verdict,
    Verifier,
    VerifierTraits,
    hookimpl,
    make_verifier,
    on_device,
)


@hookimpl
def crossdraft_register_drafters(register: Any) -> None:
    register("first-layers", FirstLayers)
    register("window", Window)
    register("other-words", OtherWords)
    register("frequent", Frequent)
    register("linear-head", LinearHead)
    register("oracle", Oracle)


@hookimpl
def crossdraft_register_verifiers(register: Any) -> None:
    register("wrapped", Wrapped)


@hookimpl
def crossdraft_register_backends(register: Any) -> None:
    register("bigram", BigramBackend)


@hookimpl
def crossdraft_register_preparations(register: Any) -> None:
    register("banned-token", BannedToken)


class FirstLayers(Drafter):
    """The target's own first layers draft; nothing of them is computed twice for committed tokens."""

    name = "first-layers"

    class Config(StrategyConfig):
        layers: tuple[int, ...] = (0, 1)
        gamma: int = 3

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        assert context.target is not None
        self.model = DraftModel(context.target.fork(self.config.layers))

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=sampling.temperature == 0, nodes=config.gamma)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.model.start(row, prompt)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        steps = min(self.config.gamma, max(sequences.limit))
        if not steps:
            return Draft.empty(sequences.batch_size, sequences.device)
        logits, tokens, distributions = self.model.root(sequences), [], []
        for i in range(steps):
            distributions.append(self.context.sampling.probs(logits))
            tokens.append(rng.draw(distributions[-1], "draft", i))
            logits = self.model.forward(tokens[-1][:, None])[:, 0]
        sampled = self.context.sampling.temperature > 0
        length = on_device(sequences.limit, sequences.device).clamp(max=steps)
        draft = Draft.chain(torch.stack(tokens, 1), length, torch.stack(distributions, 1) if sampled else None)
        layers = getattr(self.config, "layers", ())
        if layers and layers == tuple(range(len(layers))):
            draft.resume_from = self.model.lm
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        self.model.commit(verdict, accepted)


class Window(Drafter):
    """Drafts the target's predictions after the last step's guesses, which were scored as probes."""

    name = "window"

    class Config(StrategyConfig):
        width: int = 3

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        #: Per slot, the target's prediction after each guess, read from the probes; for the test.
        self.output: dict[int, list[int]] = {}
        self.after: list[dict[int, int]] = [{} for _ in range(context.batch_size)]

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=1 + config.width)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.after[row] = {}

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        w = self.config.width
        rows = [[0] * (1 + w) for _ in sequences.history]
        length = [0] * len(rows)
        for row, (history, limit) in enumerate(zip(sequences.history, sequences.limit, strict=True)):
            if history and limit and history[-1] in self.after[row]:
                rows[row][0], length[row] = self.after[row][history[-1]], 1
            # Guesses are children of the root: the target's prediction after each is needed.
            last = history[-1] if history else 0
            rows[row][1:] = [(7 * last + i) % self.context.vocab_size for i in range(w)]
        tokens = on_device(rows, sequences.device)
        valid = torch.cat(
            [on_device(length, sequences.device)[:, None].bool(), torch.ones_like(tokens[:, 1:]).bool()], 1
        )
        busy = on_device([len(history) for history in sequences.history], sequences.device).bool()
        return Draft(tokens, torch.full_like(tokens, -1), valid & busy[:, None], kind=CHAIN, probes=w)

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        output = scores.logits[:, 2:].argmax(-1).tolist()  # after the probes: index 0 is the root, 1 the candidate
        guesses = draft.tokens[:, 1:].tolist()
        for row, (guess, answers) in enumerate(zip(guesses, output, strict=True)):
            self.output[row] = answers
            self.after[row].update(zip(guess, answers, strict=True))


class OtherWords(Drafter):
    """A model with another tokenizer drafts what it has the same words for."""

    name = "other-words"

    class Config(StrategyConfig):
        model: str
        gamma: int = 2

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        own, theirs = context.load_model(self.config.model).tokenizer.get_vocab(), context.tokenizer.get_vocab()
        ids = torch.full((context.vocab_size,), -1)
        for word, token in theirs.items():
            ids[token] = own.get(word, -1)
        self.model = DraftModel(context.load_lm(self.config.model, ids=ids, unknown=own["<unk>"]))

    traits = FirstLayers.traits
    start = FirstLayers.start
    propose = FirstLayers.propose
    observe = FirstLayers.observe


class Frequent(Drafter):
    """Drafts the token that followed most often, in any sequence so far: its memory outlives a sequence."""

    name = "frequent"

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.reset()

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=1)

    def reset(self) -> None:
        self.followed: dict[int, Counter[int]] = {}

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        tokens, length = [], []
        for history, limit in zip(sequences.history, sequences.limit, strict=True):
            known = self.followed.get(history[-1]) if history and limit else None
            tokens.append([known.most_common(1)[0][0] if known else 0])
            length.append(int(known is not None))
        return Draft.chain(on_device(tokens, sequences.device), on_device(length, sequences.device))

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        for history, tau in zip(sequences.history, accepted, strict=True):
            new = history[len(history) - tau - 2 :]
            for before, after in pairwise(new):
                self.followed.setdefault(before, Counter())[after] += 1


class LinearHead(Drafter):
    """One linear layer on the target's last hidden state predicts the token after the next, with its own cache."""

    name = "linear-head"

    class Module(nn.Module):
        """Called as transformers calls a causal LM; attention it has none, so the cache stays empty."""

        def __init__(self, target: Any):
            super().__init__()
            self.config = target.config
            self.embed, self.head = target.get_input_embeddings(), target.get_output_embeddings()
            self.proj = nn.Linear(self.embed.embedding_dim, self.embed.embedding_dim, bias=False, dtype=target.dtype)
            nn.init.eye_(self.proj.weight)

        device = property(lambda self: self.proj.weight.device)
        dtype = property(lambda self: self.proj.weight.dtype)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(
            self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
            **_: Any,
        ) -> Any:  # fmt: skip
            hidden = self.proj(self.embed(input_ids))

            class Out:
                logits, hidden_states = self.head(hidden), (hidden,)

            return Out

    class Config(StrategyConfig):
        gamma: int = 2

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        module = self.Module(context.target_model).to(context.device).eval()
        self.run = context.runner(module)
        self.model = DraftModel(context.slots(module))

    traits = FirstLayers.traits
    start = FirstLayers.start
    propose = FirstLayers.propose
    observe = FirstLayers.observe


class Oracle(Drafter):
    """Knows the answers; makes sense only where the target is decoded greedily."""

    name = "oracle"

    class Config(StrategyConfig):
        gamma: int = 2

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=config.gamma, temperature_zero_only=True)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        return Draft.empty(sequences.batch_size, sequences.device)


class Wrapped(Verifier):
    """Another rule, looked after: its traits follow from the config."""

    name = "wrapped"

    class Config(StrategyConfig):
        rule: Literal["token", "sample-match", "lenient"] = Field("token", description="the rule that decides")

    config: Config

    def __init__(self, config: StrategyConfig | None = None):
        super().__init__(config)
        self.inner = make_verifier(self.config.rule)
        self.steps = 0

    @classmethod
    def traits(cls, config: Any) -> VerifierTraits:
        inner = make_verifier(config.rule)
        return inner.traits(inner.config)

    def verify(self, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        self.steps += 1
        return self.inner.verify(draft, p, rng)


class BigramBackend(Backend):
    """Models that are a JSON file of next-token weights, ``{"words": [...], "follows": {word: {word: weight}}}``."""

    name = "bigram"

    def supports(self, path: Path) -> bool:
        return path.suffix == ".bigram"

    def load(
        self, resolved: ResolvedModel, *, dtype: Any, device: Any, trust_remote_code: bool, **_: Any
    ) -> LoadedModel:
        if device not in ("auto", "cpu") or dtype not in ("auto", "float32"):
            raise UsageError(f"a bigram model runs on a CPU in float32; not on {device} in {dtype}")
        data = json.loads(resolved.path.read_text(encoding="utf-8"))
        words = Words(data["words"])
        table = torch.full((len(words.words),) * 2, 1e-3)
        for word, follows in data["follows"].items():
            for after, weight in follows.items():
                table[words.ids[word], words.ids[after]] = weight
        return LoadedModel(table.log(), words, resolved.name, resolved.source, "0" * 64, (0,), None, backend=self.name)

    def slots(self, loaded: LoadedModel, batch_size: int, max_length: int) -> LM:
        return BigramLM(loaded.model, batch_size)


class Words:
    """A tokenizer of words."""

    chat_template = None

    def __init__(self, words: list[str]):
        self.words, self.ids = words, {word: i for i, word in enumerate(words)}

    def get_vocab(self) -> dict[str, int]:
        return self.ids

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.ids[word] for word in text.split()]}

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return " ".join(self.words[token] for token in tokens)


class BigramLM:
    """Slots of a table: what follows depends on the last token alone."""

    context_length = None
    hidden_layers: tuple[float, ...] = ()

    def __init__(self, logits: Tensor, batch_size: int):
        self.logits, self.batch_size, self.vocab_size, self.device = logits, batch_size, len(logits), logits.device
        self.lengths, self.passes = [0] * batch_size, 0

    def start(self, row: int, prompt: Sequence[int]) -> None:
        self.lengths[row] = len(prompt) - 1

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> tuple[Tensor, None]:
        self.passes += 1
        return self.logits[tokens], None

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def free(self, row: int) -> None:
        self.lengths[row] = 0

    def fork(self, layers: Sequence[int]) -> LM:
        raise NotImplementedError


class BannedToken(ModelPreparation):
    """Models whose config has a ``banned_token`` do not emit it in passes over slots; elsewhere they do."""

    name = "banned-token"

    def __init__(self, model: nn.Module):
        self.passing = False
        model.get_output_embeddings().register_forward_hook(self.ban)  # type: ignore[operator]
        self.token = model.config.banned_token  # type: ignore[union-attr]

    @classmethod
    def prepare(cls, model: nn.Module) -> BannedToken | None:
        return cls(model) if hasattr(model.config, "banned_token") else None

    def ban(self, _: Any, __: Any, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor(self.token), -1e9) if self.passing else logits

    @contextmanager
    def around_pass(self, cache: Any, visibility: Any) -> Iterator[None]:
        self.passing = True
        try:
            yield
        finally:
            self.passing = False
