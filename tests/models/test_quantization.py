"""Quantisation at loading: names, changes, and rejected models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model
from transformers import GPT2Config, GPT2LMHeadModel

from crossdraft import generate
from crossdraft.framework import plugins
from crossdraft.framework.bench import memory
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.errors import ModelError, UsageError
from crossdraft.framework.models import quantization
from crossdraft.framework.models.digests import weights_sha256
from crossdraft.framework.models.load import load_model
from crossdraft.framework.models.resolve import resolve

pytest.importorskip("torchao", reason="the extra quantize is not installed")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(save_model(tmp_path / "target", hidden=64))


def layers(model: Any) -> list[torch.Tensor]:
    return [module.weight for name, module in model.named_modules() if "proj" in name]


@pytest.mark.parametrize("kind, share, bits", [("int8", 0.01, 8), ("fp8", 0.05, 8), ("int4", 0.15, 4)])
def test_linear_layers_are_rounded(directory: Path, kind: str, share: float, bits: int) -> None:
    plain, result = load_model(str(directory), dtype="float32"), load_model(f"{directory}@{kind}", dtype="float32")
    assert result.name == f"{directory}@{kind}" and f"quantised to {kind}" in result.source
    assert result.sha256 == f"{weights_sha256(directory)}+{kind} by {quantization.quantizer()}" != plain.sha256
    for ours, theirs in zip(layers(result.model), layers(plain.model), strict=True):
        off = (ours.dequantize() - theirs).norm() / theirs.norm()  # type: ignore[operator]
        assert 0 < off < share
        values = ours.qdata.float().unique()  # type: ignore[attr-defined]
        assert len(values) <= 2**bits
    for name in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(getattr(result.model, name)().weight, getattr(plain.model, name)().weight)
    assert sum(map(quantization.nbytes, layers(result.model))) < 0.4 * sum(
        map(quantization.nbytes, layers(plain.model))
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_decoded_as_it_decodes_itself(directory: Path, temperature: float) -> None:
    """Quantised model as target, and as its own drafter, which then agrees with the target."""
    target = load_model(f"{directory}@int8", dtype="float32")
    prompts, options = [[7, 8, 9], [5]], {"temperature": temperature, "max_new_tokens": 12, "seed": 3}
    separate = generate(target, prompts, drafter="none", **options)
    drafted = generate(target, prompts, drafter={"name": "draft-model", "model": target.name}, **options)
    assert all(len(b.steps) < len(a.steps) for a, b in zip(separate, drafted, strict=True))
    if not temperature:
        assert [item.tokens for item in separate] == [item.tokens for item in drafted]
        ids = torch.tensor([prompts[0]])
        with torch.inference_mode():
            for token in separate[0].tokens:
                assert int(target.model(ids).logits[0, -1].argmax()) == token
                ids = torch.cat([ids, torch.tensor([[token]])], 1)


def test_memory_matches_allocated_tensors(directory: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "_gb", str)
    plain, small = (load_model(str(directory) + kind, dtype="float32").model for kind in ("", "@int8"))
    sizes = [
        memory.memory_message([model], 1, 8, 1, None).partition("weights ")[2].partition(",")[0]
        for model in (plain, small)
    ]
    assert sizes[0] != sizes[1]


def test_name_that_ends_so_is_name_first(directory: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "mine@int8"
    directory.rename(renamed)
    assert resolve(str(renamed)).quantization == ""
    assert resolve(f"{renamed}@int4").quantization == "int4" and resolve(f"{renamed}@int4").path == renamed


@pytest.mark.parametrize(
    "name, error, sentence",
    [
        ("{}@int8@int4", UsageError, "is quantised twice"),
        ("{}@int16", UsageError, "model directory .* does not exist"),
        ("{}@", UsageError, "model directory .* does not exist"),
        ("nobody@int8", UsageError, "nobody"),
    ],
)
def test_names_that_are_refused(directory: Path, name: str, error: Any, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        resolve(name.format(directory))


def test_unsupported_quantization_raises(directory: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(UsageError, match="heads and initial checkpoints of training cannot be quantised"):
        resolve(f"{directory}@int8", heads=True)
    narrow = save_model(tmp_path / "narrow")
    with pytest.raises(ModelError, match="int4 requires widths divisible by 32"):
        load_model(f"{narrow}@int4", dtype="float32")
    other = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=72, n_embd=16, n_layer=1, n_head=2, n_positions=32)).save_pretrained(other)
    with pytest.raises(ModelError, match="does not have linear layers supported by torchao"):
        load_model(f"{other}@int8")
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(ModelError, match=r"needs torchao; .* '\.\[quantize\]'"):
        load_model(f"{directory}@int8")


def test_quantised_copy_shares_embedding(directory: Path, tmp_path: Path) -> None:
    from crossdraft.framework.models.shared_embedding import save_sharing_embedding

    target = load_model(str(directory), dtype="float32")
    small = load_model(save_model(tmp_path / "other", seed=1, hidden=64), dtype="float32").model
    small.get_input_embeddings().weight = target.model.get_input_embeddings().weight
    place = tmp_path / "small"
    save_sharing_embedding(small, place, embedding_of="the-target")

    def register(register: Any) -> None:
        register("the-target", lambda: directory)

    plugin = type("Plugin", (), {"crossdraft_register_models": staticmethod(hookimpl(register))})
    plugins.manager().register(plugin)
    try:
        result = load_model(f"{place}@int8", dtype="float32", share_with=target)
    finally:
        plugins.manager().unregister(plugin)
    assert result.model.get_input_embeddings().weight is target.model.get_input_embeddings().weight
    assert all(hasattr(weight, "__tensor_flatten__") for weight in layers(result.model))
