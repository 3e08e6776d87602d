"""The doctor names the mistake that was made: each is put into a head that was trained without it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_heads import LAYERS, SHAPE, START, make_head, overfit
from replaying import configured
from safetensors.torch import load_file, save_file
from tiny_models import argmax_text, save_model

from crossdraft.drafters.heads.eagle import EagleHead
from crossdraft.drafters.heads.eagle3 import Eagle3Head
from crossdraft.drafters.heads.eagle_weights import make_config
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.errors import UsageError
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.suspect import Suspect
from crossdraft.framework.models.checkpoint import load_checkpoint
from crossdraft.framework.replay.doctor import Examined, Trial, examine, greedy_drafts, named
from crossdraft.framework.replay.response import Response
from crossdraft.framework.replay.target import Target

WIDTH = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> Target:
    name = save_model(tmp_path_factory.mktemp("doctor") / "target", seed=2, layers=4)
    return Target(name, Sampling(temperature=0), dtype="float32")  # wherever the tests run


@pytest.fixture(scope="module")
def text(target: Target) -> list[int]:
    """What the target says after START at temperature 0."""
    return argmax_text(target.loaded.model, START, 24)


@pytest.fixture(scope="module")
def responses(text: list[int]) -> list[Response]:
    """The text from several places on."""
    starts = range(len(START), len(START) + 4)
    return [Response(str(i), "", text[:i], text[i:], where=f"text from {i}") for i in starts]


@pytest.fixture(scope="module")
def trained(target: Target, text: list[int], tmp_path_factory: Any) -> Callable[..., Path]:
    """``trained(name, ..)``: the directory of a head that knows the text."""

    made: dict[tuple, Path] = {}

    def directory(name: str, scale: float = 1.0, **norms: int) -> Path:
        key = (name, scale, *norms.items())
        if key not in made:
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
            made[key] = tmp_path_factory.mktemp(name)
            head.save(made[key])
        return made[key]

    return directory


def config_of(path: Path, **keys: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | keys), encoding="utf-8")


def tensors_of(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / "model.safetensors")


def ids_for_offsets(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def without_norms(tensors: dict[str, torch.Tensor]) -> None:
    for i in range(3):
        del tensors[f"fc_norm.{i}.weight"]


def swapped(key: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] = torch.cat(list(tensors[key].chunk(2, 1))[::-1], 1)

    return change


#: The mistake as it is put in: the head, how it is damaged, its options; and what the doctor has to say.
MISTAKES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any], str]] = {
    "layers off by one": ("eagle3", {}, None, {"layers": (3, 1, 4)}, "ids of hidden layers are off by one"),
    "layers permuted": ("eagle3", {}, None, {"layers": (0, 2, 3)}, "the inputs of fc are permuted"),
    "ids in d2t": ("eagle3", {}, ids_for_offsets, {}, "d2t holds the target's ids"),
    "no scale": (
        "eagle",
        {"scale": 4.0},
        None,
        {},
        "the embedding lacks a scale: the heads were trained with it times",
    ),
    "no norm": (
        "eagle3",
        {"fc_norm": 3},
        without_norms,
        {},
        "features are normed before fc, layer by layer",
    ),
    "residual": ("eagle3", {"norm_before_residual": True}, None, {}, "the residual of the first layer is taken after"),
    "eagle's fc swapped": ("eagle", {}, swapped("fc.weight"), {}, "the inputs of fc.weight are swapped"),
    "mtp's fc swapped": ("mtp", {}, swapped("mtp.fc.weight"), {}, "the inputs of mtp.fc.weight are swapped"),
}
QUICK = ("ids in d2t",)


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in MISTAKES]
)
def test_the_mistake_is_named(
    target: Target, responses: list[Response], trained: Callable[..., Path], tmp_path: Path, mistake: str
) -> None:
    name, made, damage, options, sentence = MISTAKES[mistake]
    path = tmp_path / "heads"
    path.mkdir()
    for file in trained(name, **made).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    if damage is not None:
        tensors_of(path, damage)
    if mistake == "residual":
        config_of(path, norm_before_residual=False)
    if name == "eagle3":
        options = {"layers": LAYERS, **options}
    drafter = configured(name, model=str(path), **options)
    suspects = [Suspect("", ""), *drafter[0].suspects(drafter[1], load_checkpoint(str(path)), target.loaded.model)]
    found = list(examine(drafter, [Trial(one, target, responses) for one in suspects], 4))
    assert len(found) == len(suspects) > 3
    likely = named(found)
    assert likely and likely[0].suspect.mistake.startswith(sentence)
    # Without the mistake the head knows the text; what is said of a sound head is nothing.
    assert likely[0].row is not None and likely[0].row.block_efficiency is not None
    assert likely[0].row.block_efficiency.value > 3.5
    as_it_is = found[0].row
    if as_it_is is not None and as_it_is.block_efficiency is not None:
        assert as_it_is.block_efficiency.value < likely[0].row.block_efficiency.value - 0.5


def test_nothing_is_said_of_a_sound_head(
    target: Target, responses: list[Response], trained: Callable[..., Path]
) -> None:
    drafter = configured("eagle3", model=str(trained("eagle3")), layers=LAYERS)
    suspects = list(drafter[0].suspects(drafter[1], load_checkpoint(drafter[1].model), target.loaded.model))
    few = [Suspect("", ""), suspects[0], suspects[-1]]
    found = list(examine(drafter, [Trial(one, target, responses) for one in few], 4))
    assert named(found) == []
    assert found[1].gain is not None and found[1].gain.value < 0


def test_greedy_drafts_are_suspected_where_the_target_samples() -> None:
    greedy, sampled = (configured("small-lm", model="any", **options) for options in ({"temperature": 0}, {}))
    (found,) = greedy_drafts(greedy, Sampling(temperature=0.7))
    assert found.options == {"temperature": None} and "samples at 0.7" in found.mistake
    assert not list(greedy_drafts(greedy, Sampling(temperature=0)))
    assert not list(greedy_drafts(sampled, Sampling(temperature=0.7)))


def test_a_change_that_adds_little_explains_nothing(target: Target, responses: list[Response]) -> None:
    drafter = configured("small-lm", model=target.name)
    found = list(examine(drafter, [Trial(Suspect("", ""), target, responses)] * 2, 3))
    assert found[1].gain is not None and found[1].gain.value == 0
    assert named(found) == [] and found[0].row is not None and found[0].row.marginal == [1.0, 1.0, 1.0]
    assert named([Examined(Suspect("", ""), 3, reason="it does not load"), found[1]]) == [found[1]]


def test_trees_are_refused(target: Target, responses: list[Response]) -> None:
    drafter = configured("small-lm-tree", model=target.name, branching=(2, 1))
    with pytest.raises(UsageError, match="drafts no single chains here"):
        list(examine(drafter, [Trial(Suspect("", ""), target, responses)], 3))


# -- the command -------------------------------------------------------------------------------------------------


def test_the_command(models: dict[str, str], write_prompts: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    options = ["--target", models["target"], "--prompts", prompts, "--responses", "5", "--max-new-tokens", "12"]
    options += ["--dtype", "float32"]  # elsewhere lower precision is one mistake more to try
    greedy = f"{{name: small-lm, model: {models['same']}, temperature: 0}}"
    assert cli.main(["doctor", *options, "--drafter", greedy, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "usual mistakes are tried" in err and "decoding 5 responses" in err
    assert found["likely"][0]["mistake"].startswith("drafts are greedy")
    # The model itself drafts, so that without the mistake everything is accepted.
    assert found["likely"][0]["block_efficiency"] > 4  # less than 5 where a response ends
    assert found["tried"][0]["mistake"] == ""
    assert any("without the chat template" in one["mistake"] for one in found["tried"])
    assert cli.main(["doctor", *options, "--drafter", f"{{name: small-lm, model: {models['same']}}}"]) == 0
    out, err = capsys.readouterr()
    assert "None of the 1 usual mistakes explains it" in out and "as it is" in out and "were decoded before" in err
    assert "By category: a 1.00, b 1.00, c 1.00" in out
    # Responses are decoded in the precision that is asked for, and both are tried along them.
    options[-1] = "bfloat16"
    assert cli.main(["doctor", *options, "--drafter", f"{{name: small-lm, model: {models['same']}}}", "--json"]) == 0
    out, err = capsys.readouterr()
    as_it_is, *_, exact = json.loads(out)["tried"]
    assert "decoding 5 responses" in err and exact["mistake"].startswith("bfloat16 is too coarse")
    assert min(as_it_is["marginal"][0], exact["marginal"][0]) > 0.99


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--responses", "0"], "--responses 0: it must be at least 1"),
        (["--gamma", "0"], "--gamma 0: it must be at least 1"),
        (["--temperature", "-1"], "--temperature: Input should be"),
        (["--drafter", "nobody"], "there is no drafter named 'nobody'"),
    ],
)
def test_what_cannot_be_is_refused(models: dict[str, str], capsys: Any, options: list[str], sentence: str) -> None:
    assert cli.main(["doctor", "--target", models["target"], "--drafter", "none", *options]) == 2
    assert sentence in capsys.readouterr().err
