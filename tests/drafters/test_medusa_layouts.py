"""Every layout that Medusa heads are published in gives the same logits; what does not fit is refused."""

import json
import pickle
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_trainers.medusa_files import save_heads
from medusa_heads import HEADS, LAYOUTS, MEDUSA, PROMPTS, H, V, Weights, hidden_of, layout, propose, write

from crossdraft.drafters.heads.medusa.weights import MedusaHeads
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError, NumericalError

# -- layouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, pickled", [*product(LAYOUTS, [False]), ("v0.1", True), ("vLLM, token map", True)])
def test_every_layout_gives_logits_of_hand_computation(
    tiny_model: Callable, heads_decoder: Callable, tmp_path: Path, name: str, pickled: bool
) -> None:
    target = tiny_model("llama")
    weights, tensors, config = layout(name, target)
    heads = write(tmp_path, tensors, config, pickled)
    loop = heads_decoder(target, "medusa", {"model": heads}, "block", batch_size=1, sampling=Sampling(temperature=0.8))
    loop.start(0, PROMPTS[1])
    expected = (weights.logits(hidden_of(target, PROMPTS[1])[-2]) / 0.8).softmax(-1)
    draft = propose(loop)
    assert draft.width == HEADS
    torch.testing.assert_close(draft.q[0], expected, atol=1e-5, rtol=1e-4)
    assert (draft.q[0][:, [i for i in range(V) if i not in weights.ids]] == 0).all()


@pytest.mark.parametrize("name", ["v0.1, fewer ids than the target", "vLLM, token map"])
def test_point_masses_are_ids_of_target(
    tiny_model: Callable, heads_decoder: Callable, tmp_path: Path, name: str
) -> None:
    target = tiny_model("llama")
    weights, tensors, config = layout(name, target)
    heads = write(tmp_path, tensors, config)
    best = weights.logits(hidden_of(target, PROMPTS[1])[-2]).argsort(-1, descending=True)
    for options, expected in (({}, best[:, 0]), ({"choices": [[2], [2, 0], [2, 1]]}, [best[0, 2], *best[1, :2]])):
        loop = heads_decoder(target, "medusa", {"model": heads, **options}, "greedy", batch_size=1)
        loop.start(0, PROMPTS[1])
        draft = propose(loop)
        assert draft.q is None and draft.tokens[0].tolist() == [int(token) for token in expected]


def damaged() -> Iterator[Any]:
    """A layout, the damage to its tensors and config, and the error message."""

    def case(name: str, sentence: str, change: Callable[[dict, dict], Any], **options: Any) -> Any:
        return pytest.param(name, change, options, sentence, id=sentence)

    yield case("v0.1", r"missing 1.0.linear.bias \[32\]", lambda t, c: t.pop("1.0.linear.bias"))
    yield case(
        "v0.1",
        r"missing 1.0.linear.weight \[32, 32\]; unexpected 1.0.liner.weight \[32, 32\]",
        lambda t, c: t.update({"1.0.liner.weight": t.pop("1.0.linear.weight")}),
    )
    yield case("v0.1", r"missing 2.1.weight \[97, 32\]", lambda t, c: t.pop("2.1.weight"))
    yield case(
        "v0.1",
        r"of another shape: 1.1.weight is \[97, 31\], not \[97, 32\]",
        lambda t, c: t.update({"1.1.weight": t["1.1.weight"][:, :31]}),
    )
    yield case(
        "v0.1",
        "they read features of size 48, but those of the target have size 32; use heads that were trained for this",
        lambda t, c: t.update({key: torch.zeros(48, 48) for key in t if "linear.weight" in key}),
    )
    yield case(
        "v0.1",
        "their logits have 98 entries, but the target's vocabulary has 97",
        lambda t, c: t.update({key: torch.zeros(98, H) for key in t if "linear" not in key}),
    )
    yield case(
        "v0.1", "0.0.linear.bias holds numbers that are not finite", lambda t, c: t["0.0.linear.bias"].fill_(torch.nan)
    )
    yield case(
        "v0.1",
        r"has 2 heads \(medusa_num_heads\), but the tensors hold 3; if the tensors are right, write heads: 3 in the",
        lambda t, c: c.update(medusa_num_heads=2),
    )
    yield case(
        "v0.1", r"has 1 head \(medusa_num_heads\), but the tensors hold 3", lambda t, c: c.update(medusa_num_heads=1)
    )
    yield case(
        "v0.1",
        r"has 2 blocks \(medusa_num_layers\), but the tensors hold 1",
        lambda t, c: c.update(medusa_num_layers=2),
    )
    yield case("v0.1", "heads is 4, but the tensors hold 3", lambda t, c: None, heads=4)
    yield case(
        "v0.1",
        "their keys are not a known layout of Medusa heads: fc.weight, norm.weight",
        lambda t, c: (t.clear(), t.update({"fc.weight": torch.ones(2), "norm.weight": torch.ones(2)})),
    )
    yield case("version 2", r"missing 0.0.linear.bias \[32\]", lambda t, c: t.pop("0.0.linear.bias"))
    yield case("version 2", r"unexpected 0.2.weight \[2\]", lambda t, c: t.update({"0.2.weight": torch.ones(2)}))
    yield case("Medusa-2", r"missing 2.0.linear.weight \[32, 32\]", lambda t, c: t.pop("medusa_head.2.0.linear.weight"))
    yield case("vLLM", r"has 4 heads \(num_heads\), but the tensors hold 3", lambda t, c: c.update(num_heads=4))
    yield case("vLLM", r"has 2 blocks \(num_hidden_layers\), but the", lambda t, c: c.update(num_hidden_layers=2))
    yield case(
        "vLLM",
        r"missing 0.0.linear.bias \[32\], 1.*; blocks.{i}.layers.{j} and lm_heads.{i} are",
        lambda t, c: c.update(medusa_fc_bias=True),
    )
    yield case("vLLM, one projection", r"missing 1.1.weight \[97, 32\]", lambda t, c: c.pop("original_lm_head"))
    yield case(
        "vLLM, token map",
        "their config has 12 tokens .truncated_vocab_size., but token_map, which lists them, is missing",
        lambda t, c: t.pop("token_map"),
    )
    yield case(
        "vLLM, token map",
        r"token_map\[\d+\] leads to id 97, but valid ids are 0 to 96",
        lambda t, c: t["token_map"].__setitem__(3, 97),
    )
    yield case(
        "vLLM, token map",
        r"token_map\[\d+\] leads to id -1, but valid ids are 0 to 96",
        lambda t, c: t["token_map"].__setitem__(3, -1),
    )
    yield case(
        "vLLM, token map",
        "token_map leads to the same id of the target twice",
        lambda t, c: t["token_map"].__setitem__(3, 3),
    )
    yield case(
        "vLLM, token map",
        r"token_map \[13\] does not fit projections of 12 rows",
        lambda t, c: t.update(token_map=torch.arange(13)),
    )


@pytest.mark.parametrize("name, change, options, sentence", list(damaged()))
def test_mismatched_heads_raise(
    tiny_model: Callable,
    heads_decoder: Callable,
    tmp_path: Path,
    name: str,
    change: Callable[[dict, dict], Any],
    options: dict[str, Any],
    sentence: str,
) -> None:
    target = tiny_model("llama")
    _, tensors, config = layout(name, target)
    tensors, config = {key: t.clone() for key, t in tensors.items()}, dict(config)
    change(tensors, config)
    with pytest.raises(ModelError, match=f"^the heads '{tmp_path}' do not load: .*{sentence}"):
        heads_decoder(target, "medusa", {"model": write(tmp_path, tensors, config), **options}, "block", batch_size=1)


class Payload:
    """Payload that a pickle runs when it is read."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("the pickle was run",))


def test_pickle_of_objects_is_refused(tiny_model: Callable, heads_decoder: Callable, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    torch.save({**Weights().v01(), "x": Payload()}, tmp_path / "medusa_lm_head.pt", pickle_module=pickle)
    with pytest.raises(ModelError, match="is a pickle of more than tensors"):
        heads_decoder(tiny_model("llama"), "medusa", {"model": str(tmp_path)}, "block", batch_size=1)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_user_can_override_wrong_head_count(
    tiny_model: Callable, heads_decoder: Callable, tmp_path: Path, heads: int
) -> None:
    """As in the first uploads, whose config states 2 heads and whose file holds 5."""
    options = {"model": write(tmp_path, Weights().v01(), {**MEDUSA, "medusa_num_heads": 7}), "heads": heads}
    loop = heads_decoder(tiny_model("llama"), "medusa", options, "greedy", batch_size=1)
    loop.start(0, PROMPTS[1])
    assert propose(loop).width == heads


# -- the module, and what is written --------------------------------------------------------------------


def test_new_heads_are_targets_head(tiny_model: Callable) -> None:
    head = tiny_model("llama").get_output_embeddings()
    heads, x = MedusaHeads(H, 2, layers=2, lm_head=head), torch.randn(5, H)
    torch.testing.assert_close(heads(x), head(x).expand(2, -1, -1))
    assert heads(x, 1).shape == (1, 5, V)
    assert not any(parameter is head.weight for parameter in heads.parameters())
    with pytest.raises(ValueError, match="either the target's lm_head or a vocab_size"):
        MedusaHeads(H, 2)


@pytest.mark.parametrize("own", [{}, {"vocab_size": V}, {"vocab_size": V, "one_projection": True}])
def test_saved_heads_round_trip(
    tiny_model: Callable, heads_decoder: Callable, tmp_path: Path, own: dict[str, Any]
) -> None:
    target = tiny_model("llama")
    heads = MedusaHeads(H, 2, layers=2, lm_head=None if own else target.get_output_embeddings(), **own)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(tmp_path, heads, {"base_model_name_or_path": "target", "medusa_num_heads": 9})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config == {
        "base_model_name_or_path": "target",
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "hidden_size": H,
    }
    loop = heads_decoder(target, "medusa", {"model": str(tmp_path)}, "greedy", batch_size=1)
    read, written = loop.drafter.heads.state_dict(), heads.state_dict()
    assert read.keys() == written.keys()
    assert all(torch.equal(read[key], tensor) for key, tensor in written.items())


def test_heads_that_overflow_are_named(tiny_model: Callable, heads_decoder: Callable, tmp_path: Path) -> None:
    tensors = {key: torch.full_like(tensor, 1e30) for key, tensor in Weights().v01().items()}
    loop = heads_decoder(
        tiny_model("llama"),
        "medusa",
        {"model": write(tmp_path, tensors, MEDUSA)},
        "token",
        batch_size=1,
        sampling=Sampling(temperature=1),
    )
    loop.start(0, PROMPTS[1])
    sentence = (
        f"drafter 'medusa' produced NaN or infinite logits for the prompt at position {len(PROMPTS[1])}; try dtype"
    )
    with pytest.raises(NumericalError, match=sentence):
        loop.step()
