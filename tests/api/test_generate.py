"""`generate`: accepted and refused arguments, and default verifiers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny_models import save_model

from crossdraft import Drafter, DraftTraits, LoadedModel, generate, load_model
from crossdraft.framework import plugins
from crossdraft.framework.api.build import compatible_verifiers, configured, default_verifier
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.draft_kind import DRAFT_KINDS
from crossdraft.framework.contracts.drafter import StrategyConfig
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import UnknownNameError, UsageError

WIDTH = 72


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> LoadedModel:
    return load_model(save_model(tmp_path_factory.mktemp("models") / "target"), dtype="float32", device="cpu")


def refused(target: Any, inputs: Any, **options: Any) -> str:
    """The error message of `generate`."""
    with pytest.raises(UsageError) as caught:
        generate(target, inputs, **{"max_new_tokens": 4, **options})
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 400
    return sentence


@pytest.mark.parametrize(
    "inputs, sentence",
    [
        ([5, 6, 7], "inputs is one flat list of token ids; wrap it"),
        (torch.tensor([5, 6]), "inputs is one flat list of token ids; wrap it"),
        (None, "inputs must be a text, a list of texts or a list of lists of token ids, not NoneType"),
        (7, "inputs must be a text, a list of texts or a list of lists of token ids, not int"),
        (b"ab", "inputs must be a text, a list of texts or a list of lists of token ids, not bytes"),
        (torch.tensor(5), "inputs must be a list of texts or a list of lists"),
        ({"input_ids": [[5]], "attention_mask": [[1]]}, "inputs is a dict; give only its token ids"),
        ([[5], None], r"inputs[1] must be a text or a list of token ids, not None"),
        ([{"role": "user", "content": "a"}], "inputs has messages; give the text of one user message with chat=True"),
        ([[{"role": "user", "content": "a"}]], "inputs has messages; give the text"),
        ([5.5], r"inputs[0] must be a text or a list of token ids, not 5.5"),
        ([b"ab"], r"inputs[0] must be a text or a list of token ids"),
        ([[5, 2.9]], "inputs[0] has 2.9 among its token ids; they must be integers"),
        ([[5], [6, 3.0]], "inputs[1] has 3.0 among its token ids"),
        ([torch.tensor([1.0])], "inputs[0] has 1.0 among its token ids"),
        ([[5, "6"]], "inputs[0] has '6' among its token ids"),
        ([[5, None]], "inputs[0] has None among its token ids"),
        ([[True, 5]], "inputs[0] has True among its token ids"),
        ([[5], [6, WIDTH]], "prompt 1 has the token id 72, but the ids of"),
        ([[-1]], "prompt 0 has the token id -1, but the ids of"),
        ([[5], []], "prompt 1 is empty"),
    ],
)
def test_invalid_inputs(target: LoadedModel, inputs: Any, sentence: str) -> None:
    assert sentence in refused(target, inputs)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"batch_size": 0}, "batch_size=0 must be an integer of at least 1"),
        ({"prefill_tokens": -1}, "prefill_tokens=-1 must be an integer of at least 0"),
        ({"batch_size": 2.0}, "batch_size=2.0 must be an integer of at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be an integer of at least 1"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 must be an integer of at least 1"),
        ({"max_new_tokens": None}, "max_new_tokens=None must be an integer"),
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
        ({"seed": "1"}, "seed='1' must be an integer"),
        ({"seed": True}, "seed=True must be an integer"),
        ({"temperature": -1}, "temperature=-1 is not valid: should be greater than or equal to 0"),
        (
            {"temperature": 1e-9},
            "temperature=1e-09 is not valid: should be 0, which is greedy decoding, or at least 1e-06",
        ),
        ({"temperature": float("nan")}, "temperature=nan is not valid"),
        ({"temperature": float("inf")}, "temperature=inf is not valid"),
        ({"temperature": None}, "temperature=None is not valid"),
        ({"top_p": 0}, "top_p=0 is not valid: should be greater than 0"),
        ({"top_p": 1.5}, "top_p=1.5 is not valid"),
        ({"top_k": -3}, "top_k=-3 is not valid"),
        ({"top_k": 2.5}, "top_k=2.5 is not valid"),
        ({"min_p": 2}, "min_p=2 is not valid"),
        ({"chat": "no"}, "chat='no' must be True, False, or None"),
        ({"on_step": 3}, "on_step=3 must be a function"),
        ({"drafter": None}, "a drafter is given by its name"),
        ({"drafter": {"gamma": 3}}, "a drafter needs a 'name'"),
        (
            {"drafter": Drafter},
            "a drafter is given by its name, by a mapping with 'name' and its options, or by its class",
        ),
        ({"drafter": int}, "a drafter is given by its name"),
        ({"verifier": Drafter}, "a verifier is given by its name"),
        ({"verifier": 3}, "a verifier is given by its name"),
    ],
)
@pytest.mark.parametrize("inputs", [[[5, 6]], []], ids=["a prompt", "no prompt"])
def test_invalid_arguments(target: LoadedModel, options: dict[str, Any], sentence: str, inputs: Any) -> None:
    assert sentence in refused(target, inputs, **options)


def test_model_that_was_not_loaded_here(target: LoadedModel) -> None:
    assert "model is a LlamaForCausalLM; pass a name" in refused(target.model, [[5]])
    assert "model is a NoneType" in refused(None, [[5]])


def test_texts_need_tokenizer_and_chat_template(target: LoadedModel, tokenizers: Any) -> None:
    bare = LoadedModel(target.model, None, "bare", "", "", (), None)
    assert "bare has no tokenizer" in refused(bare, "w5")
    assert generate(bare, [[5, 6]], max_new_tokens=3, temperature=0)[0].text is None
    plain = LoadedModel(target.model, tokenizers[1], "plain", "", "", (), None)
    assert "the tokenizer of plain has no chat template" in refused(plain, ["w5"], chat=True)


def test_all_kinds_of_integers_are_ids(target: LoadedModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": np.int64(5), "batch_size": np.int32(2), "seed": np.int64(3)}
    want = [r.tokens for r in generate(target, [[5, 6, 7], [8, 9, 10]], **options)]
    tensor = torch.tensor([[5, 6, 7], [8, 9, 10]])
    for inputs in (tensor, tensor.numpy(), list(tensor), ((5, 6, 7), (8, 9, 10)), iter([[5, 6, 7], [8, 9, 10]])):
        assert [r.tokens for r in generate(target, inputs, **options)] == want  # type: ignore[arg-type]
    assert generate(target, []) == []


def test_seeds_decide_samples(target: LoadedModel) -> None:
    def outputs(**options: Any) -> list[int]:
        return generate(target, [[5, 6, 7]], max_new_tokens=16, **options)[0].tokens

    torch.manual_seed(5)
    assert outputs() == outputs(seed=0)  # the default is a number, not torch's generator
    assert len({tuple(outputs(seed=seed)) for seed in (0, 1, -2)}) == 3


# -- strategies -------------------------------------------------------------------------------------------


def test_wrong_key_is_named_with_right_ones() -> None:
    with pytest.raises(UsageError, match=r"key 'gama'.*its keys are gamma"):
        configured("drafters", {"name": "prompt-lookup", "gama": 3})
    with pytest.raises(UnknownNameError, match="prompt-lookup"):
        configured("drafters", "prompt-lokup")
    with pytest.raises(UsageError, match="key '3'"):
        configured("drafters", {"name": "prompt-lookup", 3: 3})  # type: ignore[dict-item]


def test_classes_stand_for_themselves(target: LoadedModel) -> None:
    lookup, block = plugins.get("drafters", "prompt-lookup"), plugins.get("verifiers", "block")
    named = generate(target, [[5, 6, 5, 6]], drafter="prompt-lookup", verifier="block", max_new_tokens=8)
    for drafter, verifier in [(lookup, block), ((lookup, lookup.Config()), (block, block.Config()))]:
        inputs = generate(target, [[5, 6, 5, 6]], drafter=drafter, verifier=verifier, max_new_tokens=8)
        assert inputs[0].tokens == named[0].tokens
    sentence = refused(target, [[5]], drafter=(lookup, StrategyConfig()))
    assert "the config of drafter 'prompt-lookup' is" in sentence


class Drawing(Drafter):
    """Drafts of a kind that its config names: none at all, to be exact."""

    name = "drawing"

    class Config(StrategyConfig):
        kind: str = "chain"

    config: Config
    seen: ClassVar[list[str]] = []

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        kind = None if config.kind == "none" else DRAFT_KINDS[config.kind]
        return DraftTraits(kind, point_mass=config.kind == "deterministic", nodes=4)

    def propose(self, sequences: Any, rng: Any) -> Draft:
        return Draft.empty(sequences.batch_size)


BEST = {"iid": "spectr", "delayed_iid": "traversal", "without_replacement": "traversal"}
BEST |= {"greedy_draft": "greedy-draft-optimal", "deterministic": "sample-match"}


@pytest.mark.parametrize("kind", ["none", *DRAFT_KINDS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_default_verifier_fits_every_kind_of_draft(target: LoadedModel, kind: str, temperature: float) -> None:
    drafter = Drawing, Drawing.Config(kind=kind)
    rule, _ = default_verifier(drafter, Sampling(temperature=temperature))
    assert rule.name == ("greedy" if temperature == 0 else BEST.get(kind, "block"))
    fitting = compatible_verifiers(drafter, Sampling(temperature=temperature))
    assert rule.name in fitting and not {"lenient", "typical", "top-k", "bild"} & set(fitting)
    assert ("greedy" in fitting) == (temperature == 0)
    assert len(generate(target, [[5]], drafter=drafter, temperature=temperature, max_new_tokens=2)[0].tokens) == 2


@pytest.mark.parametrize("name", ["draft-model-iid", "draft-model-tree", "draft-model-dynamic-tree"])
def test_tree_drafters_run_by_default(target: LoadedModel, tmp_path: Path, name: str) -> None:
    small = save_model(tmp_path / "small", seed=1)
    outputs = generate(target, [[5, 6, 7]], drafter={"name": name, "model": small}, max_new_tokens=6)
    assert 1 <= len(outputs[0].tokens) <= 6


def test_error_of_incompatible_pair_lists_compatible_verifiers(target: LoadedModel) -> None:
    sentence = refused(target, [[5]], drafter=(Drawing, Drawing.Config(kind="iid")), verifier="block")
    assert "makes 'iid' drafts, but verifier 'block' accepts only: chain; compatible verifiers: " in sentence
    rules = set(sentence.rpartition(": ")[2].split(", "))
    assert rules >= {"spectr", "specinfer", "traversal", "sample-match", "multipath-block"}
    assert not rules & {"block", "token", "greedy", "greedy-draft-optimal", "typical", "top-k"}
    sentence = refused(target, [[5]], drafter=(Drawing, Drawing.Config(kind="iid")), verifier="greedy")
    assert "use 'traversal' or 'specinfer'" in sentence and "'token'" not in sentence


def test_verifier_that_does_not_load_is_not_compatible(install: Any) -> None:
    install("verifiers", ("broken", SimpleNamespace()), ("absent", "no.such.module:Rule"))
    result = compatible_verifiers((Drawing, Drawing.Config()), Sampling())
    assert {"token", "block"} <= set(result) and not {"broken", "absent"} & set(result)
