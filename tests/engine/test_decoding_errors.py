"""Errors of the decode loop and their messages: NaN, drafts against the contract, models it cannot run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from oracle_trees import drafter_class, verifier_class

from crossdraft import DraftModel
from crossdraft.framework.certificate.table_lm import TableLM, Toy, ToyContext
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.draft_kind import CHAIN, DETERMINISTIC
from crossdraft.framework.contracts.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.errors import ContractError, ModelError, NumericalError
from crossdraft.framework.lm.transformers_lm import TransformersLM


def table_decoder(toy: Toy, drafter: Drafter, **loop: Any) -> Decoder:
    return Decoder(
        TableLM(toy.target, 2),
        drafter,
        verifier_class("token")(),
        sampling=Sampling(),
        max_new_tokens=4,
        **loop,
    )


def table_context(toy: Toy) -> DraftContext:
    return ToyContext(toy.target, toy.drafter, Sampling(), batch_size=2, max_length=64)


@pytest.mark.parametrize("who", ["target", "drafter"])
def test_nan_logits_are_reported(toys: dict[str, Toy], who: str) -> None:
    nan = torch.full_like(toys["G1"].target, torch.nan)
    g1 = toys["G1"]
    toy = Toy("nan", 2, nan if who == "target" else g1.target, nan if who == "drafter" else g1.drafter)
    small = drafter_class("draft-model")
    loop = table_decoder(toy, small(small.Config(model="toy", gamma=2), table_context(toy)))
    produced = "the target produced NaN" if who == "target" else "drafter 'draft-model' produced NaN"
    with pytest.raises(NumericalError, match=f"^{produced} or infinite logits for prompt 0 at position 1; try dtype"):
        list(loop.run([[3], [3]]))
    assert loop.occupied == 0


def test_nan_logits_of_rejected_node_are_reported() -> None:
    """After token 1, which is drafted always and accepted never."""
    target = torch.tensor([0.5, 0.0, 0.5]).double().repeat(4, 1)
    target[1] = torch.nan
    toy = Toy("nan", 2, target, torch.tensor([0.0, 1.0, 0.0]).double().repeat(4, 1))
    small = drafter_class("draft-model")
    loop = table_decoder(toy, small(small.Config(model="toy", gamma=2), table_context(toy)))
    with pytest.raises(NumericalError, match=r"^the target produced NaN or infinite logits for prompt 0 at position 1"):
        list(loop.run([[3], [3]]))


class TooDeep(Drafter):
    """Ignores the limit, with a chain or with a tree that is one."""

    name = "too-deep"

    class Config(StrategyConfig):
        tree: bool

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(kind=DETERMINISTIC if config.tree else CHAIN, point_mass=True, nodes=16)

    def propose(self, sequences: Any, rng: Any) -> Draft:
        draft = Draft.chain(torch.ones(2, 5, dtype=torch.long), torch.tensor([5, 5]))
        if self.config.tree:  # type: ignore[attr-defined]
            draft.kind = DETERMINISTIC
        return draft


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_draft_beyond_limit_breaks_contract(toys: dict[str, Toy], tree: bool) -> None:
    always_1 = torch.tensor([[0.0, 1.0]]).expand(3, 2).double()
    toy = Toy("ones", 5, always_1, always_1)
    loop = Decoder(
        TableLM(toy.target, 2),
        TooDeep(TooDeep.Config(tree=tree), table_context(toy)),
        verifier_class("greedy")(),
        sampling=Sampling(temperature=0),
        max_new_tokens=4,
    )
    with pytest.raises(ContractError, match=r"drafter 'too-deep' drafted 5 tokens deep, but .* allows 3, in slot 0"):
        list(loop.run([[2], [2]]))


class FeedsTooMuch(Drafter):
    """Grows its own model beyond what the slots were made for."""

    name = "feeds-too-much"

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.model = DraftModel(context.load_lm("m"))

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=True, nodes=5)

    def start(self, row: int, prompt: Any, hidden: Any = None) -> None:
        self.model.start(row, prompt)

    def propose(self, sequences: Any, rng: Any) -> Draft:
        logits = self.model.root(sequences)
        while True:
            logits = self.model.forward(logits.argmax(-1)[:, None])[:, 0]


@pytest.mark.parametrize("validate", ["always", "never"])
@pytest.mark.parametrize(
    "drafter, options, sentence",
    [
        (TooDeep, {"tree": False}, "drafter 'too-deep' drafted 5 tokens deep, but sequences.limit allows 3, in slot 0"),
        (TooDeep, {"tree": True}, "drafter 'too-deep' drafted 5 tokens deep, but sequences.limit allows 3, in slot 0"),
        (FeedsTooMuch, {}, "drafter 'feeds-too-much' could not draft: .* exceed max_length 7; draft no deeper"),
    ],
    ids=["chain", "tree", "own model"],
)
def test_error_names_drafter_beyond_slots(
    tiny_model: Callable, decoder: Callable, drafter: Any, options: Any, sentence: str, validate: str
) -> None:
    """Not the target, whose slots are full, and not by the number of tokens in them."""
    settings = {
        "batch_size": 2,
        "max_new_tokens": 4,
        "max_length": 7,
        "drafting": tiny_model("llama"),
        "validate": validate,
    }
    loop = decoder(tiny_model("llama"), drafter, options, verifier_class("greedy"), **settings)
    with pytest.raises(ContractError, match=f"^{sentence}"):
        list(loop.run([[2, 3, 4], [2, 3]]))


def test_draft_of_wrong_batch_breaks_contract(toys: dict[str, Toy]) -> None:
    class WrongBatch(TooDeep):
        def propose(self, sequences: Any, rng: Any) -> Draft:
            return Draft.empty(3)

    loop = table_decoder(toys["G1"], WrongBatch(TooDeep.Config(tree=False), table_context(toys["G1"])))
    with pytest.raises(ContractError, match=r"draft.tokens of shape \[3, 0\], not \[2, N\]"):
        list(loop.run([[3], [3]]))


def small_t5() -> Any:
    config = transformers.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def small_bloom() -> Any:
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=31, hidden_size=16, n_layer=1, n_head=2))


@pytest.mark.parametrize(
    "make, sentence",
    [
        (small_t5, "T5ForConditionalGeneration is an encoder-decoder model"),
        (small_bloom, "BloomForCausalLM takes no position_ids"),
    ],
    ids=["t5", "bloom"],
)
def test_models_that_would_run_wrongly_are_refused(make: Callable, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        TransformersLM(make(), 1, 16)


def test_growing_past_buffer_is_error(tiny_model: Callable) -> None:
    lm = TransformersLM(tiny_model("llama"), 1, 8)
    lm.start(0, [1, 2, 3, 4, 5, 6, 7])
    with pytest.raises(ModelError, match="exceed max_length 8"):
        lm.forward(torch.tensor([[7, 8, 9]]))
