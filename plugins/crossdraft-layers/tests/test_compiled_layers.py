"""Compiled layers return what plain layers return, or leave the pass to them."""

import copy
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_layers import compiled_layers, small_batch_linear
from torch import Tensor, nn

from crossdraft.drafters.heads.eagle3 import Eagle3Head
from crossdraft.drafters.heads.eagle_weights import make_config
from crossdraft.drafters.heads.feature_head import FeatureHead
from crossdraft.framework.lm.cuda_graphs import CaptureLimits, recording
from crossdraft.framework.lm.layer_surgery import own_modules
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.util.cache_argument import cache_argument
from crossdraft.framework.util.compilation import load_package
from crossdraft.framework.util.output_files import cache_dir

pytestmark = [
    pytest.mark.usefixtures("fresh_warnings"),
    pytest.mark.skipif(
        not small_batch_linear._available(torch.float32), reason="oneDNN has no kernels for this processor"
    ),
]
WARM_UP = CaptureLimits(depth=8, nodes=8)


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_COMPILED_LAYERS", "1")
    monkeypatch.setattr(compiled_layers, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(small_batch_linear, "LEAST_WEIGHTS", 1)
    compiled_layers._has_code.cache_clear()


@pytest.fixture
def traced(monkeypatch: Any) -> list[int]:
    """Run traced layers without compiling them; the number of inputs of every call."""
    programs: dict[str, Any] = {}
    calls: list[int] = []

    def package(program: Any, path: Path, options: Any) -> Path:
        programs[path.name] = program.module()
        path.touch()
        return path

    def load(path: Path) -> Callable[[list[Tensor]], Any]:
        def run(inputs: list[Tensor]) -> Any:
            calls.append(len(inputs))
            return programs[path.name](*inputs)

        return run

    monkeypatch.setattr(compiled_layers, "package_program", package)
    monkeypatch.setattr(compiled_layers, "_load", load)
    return calls


#: Parents of the tokens of each pass; the first pass of a model without a cache is never compiled.
PASSES = [-1, 0], [-1, 0, 1], [-1, -1, 0, 1]


def logits(
    model: Any, rows: int, warm_up: CaptureLimits | None = WARM_UP, passes: Sequence[list[int]] = PASSES
) -> list[Tensor]:
    """Logits of ``passes`` over chains and trees, in rows of different lengths; a head gets features of its width."""
    lm, head = TransformersLM(model, rows, 40), isinstance(model, FeatureHead)

    def inputs(*shape: int) -> dict[str, Tensor]:
        size = model.config.hidden_size
        return {"features": torch.linspace(-1, 1, size).expand(*shape, size).contiguous()} if head else {}

    for row in range(rows):
        lm.start(row, range(5, 9 + 2 * row), **inputs(3 + 2 * row))
    outputs = []
    with recording(warm_up):
        for parents in passes:
            width = len(parents)
            tree = torch.tensor([parents] * rows) if parents[1:2] == [-1] else None
            tokens = torch.arange(rows * width).view(rows, width) + 11
            outputs.append(lm.forward(tokens, tree, **inputs(rows, width))[0])
            lm.commit([1] * rows, None if tree is None else torch.zeros(rows, 1, dtype=torch.long))
    return outputs


def close(outputs: list[Tensor], expected: list[Tensor], tolerance: float = 1e-4) -> bool:
    return all((a - b).abs().max() <= tolerance * b.abs().max() for a, b in zip(outputs, expected, strict=True))


def plain(model: Any, rows: int, monkeypatch: Any, passes: Sequence[list[int]] = PASSES) -> list[Tensor]:
    with monkeypatch.context() as context:
        context.setenv("CROSSDRAFT_COMPILED_LAYERS", "0")
        return logits(own_modules(model), rows, None, passes)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("normed", [False, True])
def test_first_layer_of_an_eagle3_head(rows: int, normed: bool, monkeypatch: Any, traced: list[int]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    head = Eagle3Head(make_config(**sizes), torch.randn(97, 32), 64, norm_before_residual=normed)
    head.eval().requires_grad_(False)
    expected = plain(head, rows, monkeypatch)
    assert traced == []
    assert close(logits(own_modules(head), rows), expected) and traced


@pytest.mark.parametrize(("family", "rows"), [("llama", 1), ("qwen2", 3)])
def test_logits_are_those_of_plain_layers(
    tiny_model: Callable, family: str, rows: int, monkeypatch: Any, traced: list[int]
) -> None:
    model = tiny_model(family)
    passes = [[-1], *PASSES]
    expected = plain(model, rows, monkeypatch, passes)
    assert traced == []
    assert close(logits(own_modules(model), rows, passes=passes), expected)
    # A pass over one token takes all weights as they are.
    assert len(traced) == 4 * model.config.num_hidden_layers and len(set(traced)) == (2 if rows == 1 else 1)


def test_prompts_run_compiled_code(tiny_model: Callable, monkeypatch: Any, traced: list[int]) -> None:
    """Prompts of one row, of several rows in one pass, and of more tokens than any draft."""

    def outputs(model: Any) -> tuple[Tensor, list[int]]:
        lm, calls = TransformersLM(model, 4, 300), []
        with recording(WARM_UP):
            lm.prefill({row: range(5, 8 + row) for row in range(4)})  # without a cache, it is never compiled
            for row in range(4):
                lm.free(row)
            prompts = {3: range(7, 12), 0: range(9, 11), 2: range(20, 26)}
            for feed in (lambda: lm.prefill(prompts), lambda: lm.start(1, [*range(5, 95)] * 3)):
                before = len(traced)
                feed()
                calls.append(len(traced) - before)
            for row, prompt in prompts.items():
                lm.start(row, [*prompt, 4])
            return lm.forward(torch.arange(8).view(4, 2) + 11)[0], calls

    model = tiny_model("llama")
    output, calls = outputs(own_modules(model))
    assert calls == [model.config.num_hidden_layers] * 2
    monkeypatch.setenv("CROSSDRAFT_COMPILED_LAYERS", "0")
    assert close([output], [outputs(own_modules(model))[0]])


@pytest.mark.parametrize("first", [(), (0, 1, 2)], ids=["compiled before", "compiled with them"])
def test_hidden_states_are_returned(
    tiny_model: Callable, monkeypatch: Any, traced: list[int], first: tuple[int, ...]
) -> None:
    def hidden_states(model: Any) -> list[Tensor]:
        lm = TransformersLM(model, 1, 20)
        lm.start(0, range(5, 10))
        lm.hidden_layers = first
        with recording(WARM_UP):
            before = lm.forward(torch.tensor([[11, 12]]))[0]
            lm.hidden_layers = (0, 1, 2)
            lm.commit([0])
            logits, hidden = lm.forward(torch.tensor([[11, 12]]))
        assert hidden is not None and torch.equal(before, logits) and len(traced) in (0, 4)
        return list(hidden.unbind(2))

    model = tiny_model("llama")
    outputs = hidden_states(own_modules(model))
    monkeypatch.setenv("CROSSDRAFT_COMPILED_LAYERS", "0")
    traced.clear()
    assert close(outputs, hidden_states(own_modules(model)))


@pytest.mark.parametrize("requested", [False, True])
def test_code_is_compiled_in_warm_ups_or_on_request(
    requested: bool, tiny_model: Callable, monkeypatch: Any, traced: list[int], caplog: Any
) -> None:
    model, expected = tiny_model("llama"), plain(tiny_model("llama"), 2, monkeypatch)
    compiled_layers._warn_once.cache_clear()
    for _ in range(2):
        assert close(logits(own_modules(model), 2, None), expected) and traced == []
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "no code is stored" in message and "set CROSSDRAFT_COMPILED_LAYERS=compile" in message
    if requested:
        monkeypatch.setenv("CROSSDRAFT_COMPILED_LAYERS", "compile")
    logits(own_modules(model), 2, None if requested else WARM_UP)
    monkeypatch.setenv("CROSSDRAFT_COMPILED_LAYERS", "1")
    before = len(traced)
    assert close(logits(own_modules(model), 2, None), expected) and len(traced) > before  # stored code is used


def test_damaged_code_is_removed(tiny_model: Callable, monkeypatch: Any, traced: list[int], caplog: Any) -> None:
    model, passes = tiny_model("llama"), [[-1, 0]] * 2
    logits(own_modules(model), 2, passes=passes)
    files = list((cache_dir() / "layers").iterdir())
    assert len(files) == 1 and not files[0].read_bytes()
    monkeypatch.setattr(compiled_layers, "_load", load_package)
    expected = plain(model, 2, monkeypatch, passes)
    assert close(logits(own_modules(model), 2, None, passes), expected) and not files[0].exists()
    assert "LlamaDecoderLayer runs uncompiled" in caplog.text


def test_code_that_others_can_replace_is_neither_loaded_nor_removed(
    tiny_model: Callable, monkeypatch: Any, traced: list[int], caplog: Any
) -> None:
    model, passes = tiny_model("llama"), [[-1, 0]] * 2
    expected = plain(model, 2, monkeypatch, passes)
    logits(own_modules(model), 2, passes=passes)
    (file,) = (cache_dir() / "layers").iterdir()
    file.parent.chmod(0o777)
    monkeypatch.setattr(compiled_layers, "_failed", set())
    before = len(traced)
    assert close(logits(own_modules(model), 2, passes=passes), expected)
    assert len(traced) == before and file.exists()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(file.parent) in warning and "can be written by others" in warning and "chmod go-w" in warning


def test_code_that_is_no_longer_loaded_is_removed(tiny_model: Callable, traced: list[int]) -> None:
    files = {days: cache_dir() / "layers" / f"{days}.pt2" for days in (1, 100)}
    files[1].parent.mkdir(parents=True)
    for days, file in files.items():
        file.touch()
        os.utime(file, times=(time.time() - days * 86400,) * 2)
    logits(own_modules(tiny_model("llama")), 1, passes=[[-1, 0]] * 2)
    assert traced and files[1].exists() and not files[100].exists()


def test_weights_that_change_are_used(tiny_model: Callable, monkeypatch: Any, traced: list[int]) -> None:
    model = tiny_model("llama", copy="compiled")
    logits(model, 2)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-2)
        model.model.layers[1].input_layernorm.weight.mul_(3)
    before = len(traced)
    assert close(logits(model, 2), plain(model, 2, monkeypatch)) and len(traced) > before


def test_layers_with_weights_of_inference_mode_are_not_compiled(
    tiny_model: Callable, monkeypatch: Any, traced: list[int], capsys: Any
) -> None:
    """Such weights have no packed copy, which compiled code needs."""
    with torch.inference_mode():
        model = copy.deepcopy(tiny_model("llama"))
        assert close(logits(own_modules(model), 2), plain(model, 2, monkeypatch)) and traced == []
    assert not capsys.readouterr().err


class Twice(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_replaced_modules_and_hooks_run(tiny_model: Callable, monkeypatch: Any, traced: list[int]) -> None:
    model = own_modules(tiny_model("llama"))
    logits(model, 2)
    twice = Twice(*reversed(model.model.layers[0].mlp.down_proj.weight.shape), bias=False)
    twice.weight = model.model.layers[0].mlp.down_proj.weight
    model.model.layers[0].mlp.down_proj = twice
    model.model.layers[1].self_attn.register_forward_hook(lambda module, inputs, output: (-output[0], output[1]))
    before = len(traced)
    expected = plain(model, 2, monkeypatch)
    assert close(logits(model, 2), expected) and len(traced) > before  # the first layer, compiled anew


def test_layers_that_differ_by_their_number_run_uncompiled(
    tiny_model: Callable, monkeypatch: Any, traced: list[int], caplog: Any
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward
    model = own_modules(tiny_model("llama"))
    for index, layer in enumerate(model.model.layers):
        layer.mlp.__dict__["layer_idx"] = layer.self_attn.layer_idx = index
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x) * (1 + self.layer_idx))
    assert close(logits(model, 2), plain(model, 2, monkeypatch))
    assert len(traced) > 0
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "crossdraft: LlamaDecoderLayer runs uncompiled, which makes its passes slower: compiled code returns other "
        "numbers"
    ]


def test_layers_that_cannot_be_traced_run_uncompiled(
    tiny_model: Callable, monkeypatch: Any, traced: list[int], caplog: Any
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x) if x.sum() < 1e9 else -x)
    model = tiny_model("llama")
    assert close(logits(own_modules(model), 2), plain(model, 2, monkeypatch)) and traced == []
    assert "LlamaDecoderLayer runs uncompiled" in caplog.text


class OtherLayer:
    """A cache with its two layers exchanged."""

    def __init__(self, cache: Any):
        self.cache = cache

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        return self.cache.update(keys, values, 1 - layer_idx, *args, **options)


def test_layers_with_the_cache_of_another_layer_run_uncompiled(
    tiny_model: Callable, monkeypatch: Any, traced: list[int], caplog: Any
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    own, name = LlamaAttention.forward, cache_argument(LlamaAttention.forward)
    monkeypatch.setattr(
        LlamaAttention,
        "forward",
        lambda self, *args, **options: own(self, *args, **options | {name: OtherLayer(options[name])}),
    )
    model = tiny_model("llama")
    assert close(logits(own_modules(model), 2), plain(model, 2, monkeypatch)) and traced == []
    assert "it writes to the cache of another layer" in caplog.text


def test_conditions_on_sizes_are_found(tiny_model: Callable, monkeypatch: Any, traced: list[int], caplog: Any) -> None:
    """Code of this layer would be right for more than two tokens only."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x) * (2 if x.shape[1] > 2 else 1))
    model = tiny_model("llama")
    assert close(logits(own_modules(model), 1), plain(model, 1, monkeypatch))
    assert "LlamaDecoderLayer runs uncompiled" in caplog.text


def test_other_code_than_passes_is_not_affected(tiny_model: Callable, traced: list[int]) -> None:
    model = own_modules(tiny_model("llama"))
    logits(model, 1)
    before, ids = len(traced), torch.arange(5, 15)[None]
    assert torch.equal(model(ids).logits, tiny_model("llama")(ids).logits) and len(traced) == before
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    assert isinstance(model.model.layers[0], type(tiny_model("llama").model.layers[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("gemma3", torch.float32), ("llama", torch.bfloat16)]
)
def test_compiled_code_returns_the_same_logits(
    tiny_model: Callable, family: str, dtype: torch.dtype, monkeypatch: Any
) -> None:
    model, compiled, running = tiny_model(family, copy=str(dtype)).to(dtype), set(), []
    load, product = compiled_layers._load, small_batch_linear.packed_product

    def loaded(path: Path) -> Callable[[list[Tensor]], Any]:
        compiled.add(path)

        def run(inputs: list[Tensor]) -> Any:
            running.append(path)
            outputs = load(path)(inputs)
            running.remove(path)
            return outputs

        return run

    def product_outside(*args: Any) -> Tensor:
        assert not running  # compiled code that calls Python would replace a KeyboardInterrupt by an error of its own
        return product(*args)

    monkeypatch.setattr(compiled_layers, "_load", loaded)
    monkeypatch.setattr(small_batch_linear, "packed_product", product_outside)
    passes = [[-1], *PASSES]
    for rows in (1, 3, 5):
        outputs = logits(own_modules(model), rows, passes=passes)
        assert close(outputs, plain(model, rows, monkeypatch, passes), 1e-4 if dtype == torch.float32 else 4e-2)
    assert len(compiled) >= 4
