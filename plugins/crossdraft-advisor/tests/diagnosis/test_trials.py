"""The diagnosis names the mistake that was made: each is put into a head that was trained without it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_advisor.diagnosis.matching import CONFIGURED, UNLISTED, match
from crossdraft_advisor.diagnosis.misconfigurations import misconfigurations
from crossdraft_advisor.diagnosis.trials import (
    Trial,
    TrialResult,
    inconclusive,
    likely_causes,
    responses_needed,
    run_trials,
)
from crossdraft_advisor.engines.acceptance import Acceptance
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS
from crossdraft_advisor.intervals import pieces_needed
from crossdraft_advisor.replay.aggregate import PromptGroups, Tally
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.teacher_forcing.lazy_models import Target
from feature_heads import LAYERS, SHAPE, START, make_head, overfit
from replay_fixtures import configured
from safetensors.torch import load_file, save_file
from tiny_models import argmax_text, save_model
from transformers import LlamaForCausalLM

from crossdraft.drafters.heads.eagle import EagleHead
from crossdraft.drafters.heads.eagle3 import Eagle3Head
from crossdraft.drafters.heads.eagle_weights import make_config
from crossdraft.framework.contracts.misconfiguration import Misconfiguration
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import UsageError
from crossdraft.framework.metrics.intervals import Estimate
from crossdraft.framework.models.checkpoint import load_checkpoint

SIZE = 4.0
WIDTH = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> Target:
    """Its hidden states are as large as those of real models, which changes none of its logits."""
    name = save_model(tmp_path_factory.mktemp("diagnosis") / "target", seed=2, layers=4)
    model: Any = LlamaForCausalLM.from_pretrained(name)
    with torch.no_grad():
        model.model.embed_tokens.weight *= SIZE
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= SIZE
            layer.mlp.down_proj.weight *= SIZE
    model.save_pretrained(name)
    return Target(name, Sampling(temperature=0), dtype="float32")  # wherever the tests run


@pytest.fixture(scope="module")
def text(target: Target) -> list[int]:
    """Greedy output of the target after START."""
    return argmax_text(target.loaded.model, START, 24)


@pytest.fixture(scope="module")
def responses(text: list[int]) -> list[Response]:
    """The text from several places on."""
    starts = range(len(START), len(START) + 4)
    return [Response(str(i), "", text[:i], text[i:], place=f"text from {i}") for i in starts]


@pytest.fixture(scope="module")
def trained(target: Target, text: list[int], tmp_path_factory: Any) -> Callable[..., Path]:
    """``trained(name, ..)``: the directory of a head that knows the text."""
    directories: dict[tuple, Path] = {}

    def directory(name: str, scale: float = 1.0, **norms: Any) -> Path:
        key = (name, scale, *norms.items())
        if key not in directories:
            torch.manual_seed(1)
            model = target.loaded.model
            shape = SHAPE | WIDTH
            if name == "eagle3":
                embedding = model.get_input_embeddings().weight.detach()
                ids = torch.tensor(sorted({*text, *range(0, 72, 3)}))
                head = Eagle3Head(make_config(**shape), embedding, len(LAYERS) * 16, target_ids=ids, **norms)
            elif scale != 1:
                weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
                head = EagleHead(make_config(**shape), weights[0].detach() * scale, weights[1].detach())
            else:
                head = make_head(name, model, shape=shape)
            overfit(name, head, model, text, steps=90)
            directories[key] = tmp_path_factory.mktemp(name)
            head.feed_normed = False  # the layout cannot express it, which is the mistake
            head.save(directories[key])
        return directories[key]

    return directory


Damage = Callable[[Path], None]


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(path: Path) -> None:
        result = load_file(path / "model.safetensors")
        change(result)
        save_file({key: tensor.contiguous() for key, tensor in result.items()}, path / "model.safetensors")

    return damage


def config(**keys: Any) -> Damage:
    def damage(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | keys), encoding="utf-8")

    return damage


@tensors
def ids_for_offsets(weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"] += torch.arange(len(weights["d2t"]))


@tensors
def no_norms(weights: dict[str, torch.Tensor]) -> None:
    for key in [key for key in weights if key.startswith(("fc_norm.", "input_norm."))]:
        del weights[key]


@tensors
def one_norm_more(weights: dict[str, torch.Tensor]) -> None:
    weights["input_norm.weight"] = torch.ones(weights["fc.weight"].shape[1])


@tensors
def foreign_embedding(weights: dict[str, torch.Tensor]) -> None:
    weights["embed_tokens.weight"] = torch.randn(72, 16, generator=torch.Generator().manual_seed(3))


def swapped(key: str) -> Damage:
    @tensors
    def change(result: dict[str, torch.Tensor]) -> None:
        result[key] = torch.cat(list(result[key].chunk(2, 1))[::-1], 1)

    return change


def reads_a_norm(path: Path) -> None:
    """An additional norm: its weights, and the config entry that enables it."""

    @tensors
    def weights(result: dict[str, torch.Tensor]) -> None:
        result["norm.weight"] = torch.randn(16, generator=torch.Generator().manual_seed(3))

    weights(path)
    config(norm_output=None)(path)


def unharmed(path: Path) -> None:
    """The mistake is in the options, or in a property that the layout does not store."""


#: Each mistake: head, damage, options, and the expected diagnosis.
MISTAKES: dict[str, tuple[str, dict[str, Any], Damage, dict[str, Any], str]] = {
    "layers off by one": ("eagle3", {}, unharmed, {"layers": (3, 1, 4)}, "ids of hidden layers are off by one"),
    "layers permuted": ("eagle3", {}, unharmed, {"layers": (0, 2, 3)}, "the inputs of fc are permuted"),
    "ids in d2t": ("eagle3", {}, ids_for_offsets, {}, "d2t holds the target's ids"),
    "no scale": (
        "eagle",
        {"scale": 4.0},
        unharmed,
        {},
        "the embedding lacks a scale: the heads were trained with it times",
    ),
    "other rotary base": (
        "eagle3",
        {},
        config(rope_parameters=None, rope_theta=10.0),
        {},
        "the rotary base is 10000, not 10",
    ),
    "other embedding": ("eagle3", {}, foreign_embedding, {}, "the heads were trained with the target's embedding"),
    "no norms": ("eagle3", {"fc_norm": 3}, no_norms, {}, "features are normed before fc, layer by layer"),
    "no norm": ("eagle3", {"norm_before_fc": True}, no_norms, {}, "features are normed before fc, together"),
    "a norm too many": ("eagle3", {}, one_norm_more, {}, "features are not normed before fc"),
    "fed back without the norm": (
        "eagle3",
        {"feed_normed": True},
        unharmed,
        {},
        "the normed output is fed back",
    ),
    "read with the norm": (
        "eagle3",
        {"head_norm": False},
        reads_a_norm,
        {},
        "the head reads the output without",
    ),
    "residual": (
        "eagle3",
        {"norm_before_residual": True},
        config(norm_before_residual=False),
        {},
        "the residual of the first layer is taken after",
    ),
    "eagle's fc swapped": ("eagle", {}, swapped("fc.weight"), {}, "the inputs of fc.weight are swapped"),
    "mtp's fc swapped": ("mtp", {}, swapped("mtp.fc.weight"), {}, "the inputs of mtp.fc.weight are swapped"),
}
QUICK = ("ids in d2t",)


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in MISTAKES]
)
def test_mistake_is_named(
    target: Target, responses: list[Response], trained: Callable[..., Path], tmp_path: Path, mistake: str
) -> None:
    name, config, damage, options, sentence = MISTAKES[mistake]
    path = tmp_path / "heads"
    path.mkdir()
    for file in trained(name, **config).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    damage(path)
    if name == "eagle3":
        options = {"layers": LAYERS, **options}
    drafter = configured(name, model=str(path), **options)
    items = [
        Misconfiguration("", ""),
        *misconfigurations(*drafter, load_checkpoint(str(path)), target.loaded.model),
    ]
    trials = [Trial(item, target, responses) for item in items]
    result = list(run_trials(drafter, trials, 4, DEFINITIONS["vllm"]))
    assert len(result) == len(items) > 1
    likely = likely_causes(result)
    assert likely and likely[0].misconfiguration.mistake.startswith(sentence)
    # Without the mistake the head predicts the text, so nothing is reported.
    assert likely[0].row is not None and likely[0].row.block_efficiency is not None
    assert likely[0].row.block_efficiency.value > 3.5
    # A server that reads the heads in the right way has the counters of that trial.
    for item in (likely[0], *(result[:1] if result[0].counts is not None else ())):
        matched = match(result, counted(item))
        # Twenty drafts do not exclude a cause outside of the list, which has a share of its own.
        readings = [one.hypothesis.name for one in matched.assessments if one.hypothesis.name != UNLISTED]
        assert matched.own and readings[0] in alike(result, item)
    as_it_is = result[0].row
    if as_it_is is not None and as_it_is.block_efficiency is not None:
        assert as_it_is.block_efficiency.value < likely[0].row.block_efficiency.value - 0.5


def counted(result: TrialResult) -> Acceptance:
    """Counters of a server that computes as in a trial."""
    assert result.counts is not None
    return Acceptance.from_rows([(result.counts.drafts, *result.counts.per_position)], "scrape.txt")


def alike(results: list[TrialResult], result: TrialResult) -> list[str]:
    """Names of the trials with the same counters."""
    return [
        item.misconfiguration.mistake or CONFIGURED
        for item in results
        if item.counts is not None
        and result.counts is not None
        and np.abs(item.counts.per_position - result.counts.per_position).max() < 2
    ]


def test_sound_heads_have_no_findings(target: Target, responses: list[Response], trained: Callable[..., Path]) -> None:
    drafter = configured("eagle3", model=str(trained("eagle3")), layers=LAYERS)
    items = list(misconfigurations(*drafter, load_checkpoint(drafter[1].model), target.loaded.model))
    few = [Misconfiguration("", ""), items[0], items[-1]]
    result = list(run_trials(drafter, [Trial(item, target, responses) for item in few], 4))
    assert likely_causes(result) == []
    assert result[1].gain is not None and result[1].gain.value < 0


def test_small_gain_is_not_reported(target: Target, responses: list[Response]) -> None:
    drafter = configured("draft-model", model=target.name)
    result = list(run_trials(drafter, [Trial(Misconfiguration("", ""), target, responses)] * 2, 3))
    assert result[1].gain is not None and result[1].gain.value == 0
    assert likely_causes(result) == [] and result[0].row is not None and result[0].row.marginal == [1.0, 1.0, 1.0]
    assert likely_causes([TrialResult(Misconfiguration("", ""), 3, reason="it does not load"), result[1]]) == [
        result[1]
    ]


def test_trees_are_refused(target: Target, responses: list[Response]) -> None:
    drafter = configured("draft-model-tree", model=target.name, branching=(2, 1))
    with pytest.raises(UsageError, match="does not draft single chains"):
        list(run_trials(drafter, [Trial(Misconfiguration("", ""), target, responses)], 3))


def trial(gain: Estimate | None, mistake: str = "a mistake", efficiency: float = 1.5, prompts: int = 3) -> TrialResult:
    """A finished trial of ``prompts`` prompts with two steps each."""
    groups = PromptGroups()
    for i in range(prompts):
        groups.number("", str(i))
    tally = Tally(groups, [4])
    tally._sums = np.array([[[2 * efficiency, 2.0, 2 * efficiency, 2.0, 0.0]]] * prompts)
    tally._accepted[""] = np.full((1, 4), prompts * (efficiency - 1) / 2)
    tally._drafted[""] = np.full(1, 8.0 * prompts)
    return TrialResult(Misconfiguration(mistake, ""), 4, tally, gain)


def test_conclusion_needs_interval_that_supports_it() -> None:
    """A clear gain is one of 0.1 tokens here: a fifth of the 0.5 that are accepted a step."""
    base = trial(None, "")
    wide, above, below, small = (
        trial(Estimate(*interval), efficiency=1.5 + interval[0])
        for interval in ((0.19, -1.25, 1.62), (0.3, 0.05, 0.55), (-0.1, -0.15, 0.05), (0.05, 0.01, 0.09))
    )
    unknown, nothing = trial(Estimate(0.4), prompts=2, efficiency=1.9), trial(Estimate(0.0))
    assert likely_causes([base, wide]) == [] and inconclusive([base, wide]) == [wide]
    # The interval is to be as narrow as the gain: half of it is 1.435 now, 4.6 (Student's quantile) standard errors.
    needed = responses_needed([base, wide])
    assert needed == math.ceil(pieces_needed(1.435, 0.19, 3)) and 20 < needed < 60
    assert likely_causes([base, above]) == [above] and inconclusive([base, above]) == []
    assert likely_causes([base, below, small, nothing]) == [] and inconclusive([base, below, small, nothing]) == []
    two = trial(None, "", prompts=2)
    assert likely_causes([two, unknown]) == [] and inconclusive([two, unknown]) == [unknown]
    assert responses_needed([two, unknown]) is None
    # Where nearly all is accepted, nothing can add a clear gain: 0.02 tokens are left, and 0.796 would be one.
    best = trial(None, "", efficiency=4.98)
    assert inconclusive([best, trial(Estimate(0.0, -2.0, 2.0), efficiency=4.98)]) == []
