"""Fixtures shared by several test modules: golden values, toy models and tiny transformers models."""

import gc
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import distributions
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_contexts import GivenContext
from hypothesis import settings

from crossdraft.framework.bench import environment
from crossdraft.framework.certificate import outcomes
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.certificate.toys import built_in_toys
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.plugins import COMPANIONS, manager

gc.disable()  # until tests are collected: what is imported and collected stays
os.fsync = lambda descriptor: (
    None
)  # files survive a test by the system's cache; processes that tests kill write for real

environment.git_commit = cache(environment.git_commit)  # of this checkout, once a process: every run names its commit

# Tests count and never time: on a busy machine any example may take a while. Every run tries the same examples;
# `pytest --hypothesis-profile=others` draws others.
settings.register_profile("others", deadline=None, max_examples=50)
settings.register_profile("untimed", settings.get_profile("others"), derandomize=True)
settings.load_profile("untimed")

#: Whose plug-ins these tests are about: distributions that are installed. `pythonpath` also has folders of companions,
#: where a build leaves metadata with entry points.
_PLUGINS = Path(__file__).parents[2] / "plugins"
_FOLDERS = [folder for folder in sys.path if not Path(folder).resolve().is_relative_to(_PLUGINS)]
_INSTALLED = {distribution.name for distribution in distributions(path=_FOLDERS)}
OURS = _INSTALLED & {"crossdraft", "crossdraft-smollm2", *COMPANIONS.values()}
for _name, _ in manager().list_name_plugin():  # independent of other installed packages
    if _name.partition(":")[0] not in OURS:
        manager().unregister(name=_name)
manager().broken_plugins = [one for one in manager().broken_plugins if one.provider.partition(" ")[0] in OURS]

os.environ["CROSSDRAFT_OPENVINO"] = "0"  # converting takes longer than a test; the companion's tests switch it on
torch.set_num_threads(1)  # the models are tiny: threads cost more than they gain
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and those of processes that tests start
# In pytest's workers and other processes that start here, memory that glibc frees stays mapped: mapping large tensors
# anew costs more than computing with them.
for _name, _value in (("MMAP_MAX_", "0"), ("TRIM_THRESHOLD_", str(2**30)), ("TOP_PAD_", str(2**26))):
    os.environ.setdefault(f"MALLOC_{_name}", _value)


@pytest.fixture(scope="module")
def third_party() -> Iterator[Any]:
    """The strategies of tests/third_party, registered; ``first-layers`` is a drafter of the target's own layers."""
    import strategies

    manager().register(strategies, "third-party")
    yield strategies
    manager().unregister(strategies)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Golden values by toy, fractions as strings: E[tau] per step, Pr(tau = i); h, p, residual per draft."""
    return json.loads((Path(__file__).parents[1] / "golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def toys() -> dict[str, Toy]:
    """The built-in toys by name."""
    return {toy.name: toy for toy in built_in_toys()}


@pytest.fixture(scope="session")
def drafts() -> dict[str, Callable]:
    """Drafter factories by the label that ``crossdraft certify`` gives them."""
    return {label: kind.build for label, kind in DRAFTS.items()}


#: The dearest test files, by `.ci/dearest`.
_DEAREST = ("drafter_coverage", "docs", "html", "contract", "packages", "openvino_slots")
_DEAREST += ("universal", "coverage", "response_format", "golden", "served_runs", "charts")


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The dearest files first: the others fill the other processes meanwhile. Tests of distributions get a mark."""
    for item in items:
        if item.path.is_relative_to(_PLUGINS):
            item.add_marker("plugin")
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in _DEAREST)


def pytest_collection_finish() -> None:
    """Keep all that exists out of the collector's later passes."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # fewer passes: 7 % of the time of tests
    gc.enable()


#: Modules outside of tests/certificate whose runs certify verifiers on all toys of `outcomes.QUICK`, not on the first.
WHOLE_CERTIFICATES = {"test_marks", "test_failures"}


@pytest.fixture(autouse=True)
def certificates(request: Any, monkeypatch: Any, tmp_path_factory: Any) -> None:
    """Certificates in a cache of the test's own; of a strategy with the same code, runs enumerate once in a process."""
    if request.node.get_closest_marker("network") is None:
        monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path_factory.getbasetemp() / f"cache-{next(_NUMBERS)}"))
    for certify in _CERTIFY:
        monkeypatch.setattr(outcomes, certify.__name__, partial(_certified_once, certify))
    if request.path.parent.name != "certificate" and request.path.stem not in WHOLE_CERTIFICATES:
        monkeypatch.setattr(outcomes, "QUICK", outcomes.QUICK[:1])


_NUMBERS = count()
_ROWS: dict[Any, list[Any]] = {}
_CERTIFY = (outcomes.certify_quickly, outcomes.certify_drafter)


def _certified_once(certify: Callable[..., list[Any]], strategy: Any, options: Any, *more: Any) -> list[Any]:
    methods = [
        getattr(strategy, name, None) for name in ("traits", "verify", "propose", "observe")
    ]  # tests replace some
    toys = outcomes.QUICK if certify.__name__ == "certify_quickly" else str(more)  # the pair's verifier
    key = (strategy, *methods, str(options), toys)
    if key not in _ROWS:
        _ROWS[key] = certify(strategy, options, *more)
    return _ROWS[key]


@pytest.fixture(autouse=True)
def seed(monkeypatch: Any) -> None:
    """Every test draws the same numbers whatever ran before it, in any order and in any process."""
    monkeypatch.setattr("secrets.randbelow", random.Random(0).randrange)  # a server's, for requests without a seed
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats three stack traces without a GPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A suite that runs in the background ignores some signals, which tests send to themselves."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.getsignal(number) for number in usual}
    directory = threading.current_thread() is threading.main_thread()
    for number, handler in usual.items():
        if directory and before[number] is signal.SIG_IGN:
            signal.signal(number, handler)
    yield
    for number, handler in before.items():
        if directory and handler is signal.SIG_IGN:
            signal.signal(number, handler)


#: The smallest shape in which heads, groups of heads and layers all differ.
_SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
_GROUPED = dict(**_SHAPE, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen3": ("Qwen3", _GROUPED),
    "mistral": ("Mistral", dict(**_GROUPED, sliding_window=None)),
    "mistral-sliding": ("Mistral", dict(**_GROUPED, sliding_window=8)),
    "gemma3": (
        "Gemma3",
        dict(
            **_GROUPED,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=8,
        ),
    ),
    "gpt2": ("GPT2", dict(n_embd=32, n_layer=2, n_head=4)),
    "opt": (
        "OPT",
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32),
    ),
    "gpt-neox": ("GPTNeoX", _SHAPE),
}


@pytest.fixture(params=list(_FAMILIES))
def family(request: Any) -> str:
    """Every architecture that `tiny_model` can make; a test may parametrise ``family`` with some of them."""
    return request.param


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """``tiny_model(family, seed=0, noise=0.0, copy="", vocab_size=97, ...)``: a random float32 model.

    Weights are drawn ten times wider than usual: attention is sharp and logits lie far apart, so that a wrong
    mask or position changes the argmax and rounding does not. ``noise`` adds that share of random weights to
    the model of ``seed``: a drafter that is right now and then. Models are made once; another ``copy`` is
    another object with the same weights.
    """
    import transformers

    models: dict[tuple, Any] = {}

    @torch.inference_mode(False)  # or weights would depend on which test makes them
    def make(
        family: str,
        seed: int = 0,
        vocab_size: int = 97,
        context: int = 96,
        noise: float = 0.0,
        copy: str = "",
        **changes: Any,
    ) -> Any:
        key = (family, seed, vocab_size, context, noise, copy, *sorted(changes.items()))
        if key not in models:
            prefix, options = _FAMILIES[family]
            config_name = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
            std = "init_std" if family == "opt" else "initializer_range"
            common = dict(vocab_size=vocab_size, max_position_embeddings=context, pad_token_id=0, **{std: 0.2})
            ends = dict(bos_token_id=None, eos_token_id=None)
            config = getattr(transformers, config_name)(**{**options, **common, **ends, **changes})
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
            with torch.no_grad():
                for weight in model.parameters():
                    if noise and weight.dim() > 1:
                        weight += noise * weight.std() * torch.randn_like(weight)
            models[key] = model
        return models[key]

    return make


@pytest.fixture(scope="session")
def decoder() -> Callable[..., Decoder]:
    """``decoder(target, drafter class, config, verifier, ...)``: a decode loop around transformers models.

    ``drafting``: the draft model of drafters that load one; ``lm``: the class of both.
    """

    def make(
        target: Any,
        drafter: Any,
        options: dict[str, Any],
        verifier: Any,
        *,
        batch_size: int,
        drafting: Any = None,
        temperature: float = 0.0,
        max_length: int = 128,
        lm: Any = TransformersLM,
        **loop: Any,
    ) -> Decoder:
        model = lm(target, batch_size, max_length)
        sampling = Sampling(temperature=temperature)
        context = GivenContext(model, sampling, max_length, load_lm=lambda name: lm(drafting, batch_size, max_length))
        loop = {"validate": "always", **loop}
        return Decoder(model, drafter(drafter.Config(**options), context), verifier(), sampling=sampling, **loop)

    return make


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    """The config of a Llama of 70 billion parameters."""
    config = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
              "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256}  # fmt: skip
    file = tmp_path / "llama-70b.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return str(file)
