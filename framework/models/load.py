"""Loading of models by their backend; for directories of transformers, by `load_transformers`.

Weights are read from safetensors only, because pickles can run code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..contracts.checkpoint_kinds import Identity, identify, unknown_tensors
from ..contracts.models import LoadedModel, ResolvedModel
from ..errors import CrossdraftError, ModelError, UsageError, first_line, printable, quoted
from ..util.shared_patch import SharedPatch
from . import placement
from .adapters import merge_adapter
from .configs import COMPACT_WEIGHTS, check_against_weights, check_files, read_config, tensor_shapes
from .device import pick_dtype
from .digests import model_sha256
from .quantization import GROUP, check_quantized, quantization_options
from .resolve import listed, resolve
from .shared_embedding import adopt_embedding, check_owner, shared_embedding_of
from .tokenizer import TOKENIZER_FILES, check_code_is_here, eos_token_ids, tokenizer_directory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from .placement import Device, Spread


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    share_with: LoadedModel | None = None,
) -> LoadedModel:
    """Load the causal language model `name` (see `resolve`) for inference.

    Args:
        dtype: a torch dtype or its name; for ``"auto"`` see `pick_dtype`.
        device: a torch device or its name; for ``"auto"`` see `pick_device`. For models larger than one device:
            ``"spread"``, or a mapping from module names to devices (accelerate's ``device_map``); ``"tp"`` under
            ``torchrun``, with crossdraft-cluster.
        trust_remote_code: allow the model to run Python code from its own directory. It does not extend to the owner of
            a shared embedding, nor to code fetched from another repository.
        attn_implementation: passed to transformers.
        share_with: for a model without its own embedding, the loaded model whose tensor it shares, and whose dtype and
            device are used for ``"auto"``; by default the model named in ``crossdraft.json`` is loaded.

    Raises:
        UsageError: unknown name, dtype or device, or an unsupported combination.
        ModelError: the model is incomplete, damaged, pickled, or has missing weights.
    """
    count = placement.process_count()
    if count > 1 and isinstance(device, str) and device != placement.SPLIT:
        raise UsageError(
            f"torchrun started {count} processes, but device {device} uses only one; set device {placement.SPLIT} to "
            "split the target over them, or start one process"
        )
    options: Any = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "attn_implementation": attn_implementation,
    }

    def load() -> LoadedModel:
        resolved = resolve(name)
        backend = plugins.get("backends", resolved.backend)()
        return backend.load(resolved, device=device, share_with=share_with, **options)

    spread = placement.several_devices(device)
    return load() if spread is None else spread.load(load, name, options)


def load_transformers(
    resolved: ResolvedModel,
    *,
    dtype: str | torch.dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    share_with: LoadedModel | None = None,
) -> LoadedModel:
    """`load_model` for directories of transformers."""
    name = resolved.name
    like: Any = share_with.model if share_with else None
    spread = placement.several_devices(device)
    first_device = like.device if like is not None and device == "auto" else placement.first_device(device)
    precision = like.dtype if like is not None and dtype == "auto" else pick_dtype(dtype, first_device)
    shared = shared_embedding_of(resolved.path)
    for path in {resolved.path, tokenizer_directory(resolved)} if trust_remote_code else ():
        check_code_is_here(name, path)
    if shared is not None and share_with is None:
        check_owner(name, resolved.path)
    config, shapes, identity = _checked_files(resolved, shared, spread, attn_implementation)
    placement_options = placement.load_options(name, spread, first_device, resolved.quantization)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    quantized = quantization_options(name, resolved.quantization, first_device) if resolved.quantization else {}
    compact = shared is not None and (resolved.path / COMPACT_WEIGHTS).is_file()
    # Silence warnings about the embedding that is added below, and about layers that cannot be quantised.
    with (
        _one_at_a_time,
        _model_errors(name, identity),
        _quiet if shared is not None or resolved.quantization else nullcontext(),
    ):
        model, loading = _from_pretrained(
            resolved.path,
            config.get("model_type"),
            compact,
            dtype=precision,
            attn_implementation=attn_implementation,
            **options,
            **quantized,
            **placement_options,
        )
        model = (model if placement_options else model.to(first_device)).eval()
        if resolved.adapter is not None:
            merge_adapter(resolved, model)
        if resolved.quantization:
            model.requires_grad_(False)  # torchao's weights would be kept for a backward pass otherwise
            check_quantized(name, resolved.quantization, model)
    missing, unexpected = set(loading["missing_keys"]), unknown_tensors(loading["unexpected_keys"], shapes)
    owner = None
    if shared is not None:
        owner = share_with or _owner(name, shared["model"], dtype=precision, device=first_device)
        missing -= adopt_embedding(name, model, owner, shared)
    _check_tensors(name, missing, unexpected)
    if spread is not None:
        spread.check_model(name, model)
    tokenizer = _tokenizer(name, tokenizer_directory(resolved), owner, options)
    text_config = model.config.get_text_config()
    holders = (model.generation_config, text_config, tokenizer)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        source=resolved.source,
        sha256=model_sha256(resolved),
        eos_token_ids=eos_token_ids(name, *(getattr(holder, "eos_token_id", None) for holder in holders)),
        context_length=getattr(text_config, "max_position_embeddings", None),
    )


def _checked_files(
    resolved: ResolvedModel, shared: Any, spread: Spread | None, attn_implementation: str | None
) -> tuple[dict[str, Any], dict[str, Any], Identity | None]:
    """Config, shapes of tensors and identity of a model that can be loaded like this; Usage- or ModelError."""
    name = resolved.name
    config = read_config(resolved.path)
    if attention := next(_repository_attention({"attn_implementation": attn_implementation}, config), None):
        raise ModelError(
            f"{name}: the attention {quoted(attention)} would fetch unreviewed code from a repository; use one of "
            "transformers, sdpa or eager"
        )
    shapes = tensor_shapes(resolved.path)
    identity = identify(config, shapes)
    if identity is not None and not identity.kind.causal:
        raise ModelError(
            f"{printable(name)} is not a causal language model: its files are {identity}; {identity.remedy}"
            f"{' with these files as its model' if identity.drafters else ''}"
        )
    check_against_weights(resolved.path, config, shapes, without=("vocab_size",) if shared else ())
    check_files(resolved.path)
    if shared is not None and spread is not None:
        raise UsageError(
            f"{name} shares the embedding of {shared['model']}, so it must be on a single device; use cpu or cuda"
        )
    if spread is not None:
        spread.check_config(name, config)
    if resolved.adapter is not None and (shared is not None or spread is not None):
        reason = f"shares the embedding of {shared['model']}" if shared else "is placed on several devices"
        raise UsageError(
            f"{printable(name)}: the base {reason}, so an adapter cannot be merged into it on load; give the directory "
            "of the merged model"
        )
    return config, shapes, identity


def _check_tensors(name: str, missing: set[str], unexpected: Collection[str]) -> None:
    if missing or unexpected:
        raise ModelError(
            f"the weights of {name} do not match its config.json: missing {listed(missing)}; "
            f"unexpected {listed(unexpected)}; correct config.json or the weights (heads of a drafter are the model of "
            "that drafter, and quantised weights need their quantization_config)"
        )


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> str | None:
    """Return None if both vocabularies are equal, else a description of the difference."""
    left, right = a.get_vocab(), b.get_vocab()
    if left == right:
        return None
    if len(left) != len(right):
        return f"the tokenizers differ: one has {len(left)} tokens, the other {len(right)}"
    token = min((t for t in left if left[t] != right.get(t)), key=left.__getitem__)
    other = f"id {right[token]}" if token in right else "no id"
    return f"the tokenizers differ: {token!r} has id {left[token]} in one and {other} in the other"


def _owner(name: str, model: str, **options: Any) -> LoadedModel:
    """Load the model whose embedding ``name`` shares, without trust_remote_code."""
    if shared_embedding_of(resolve(model).path) is not None:
        raise ModelError(f"{name} shares the embedding of {model}, which does not have its own; name a complete model")
    try:
        return load_model(model, **options)
    except ModelError as error:
        raise ModelError(
            f"{error}; {name} shares its embedding: if it needs options, load it first and pass it as share_with"
        ) from error


def _from_pretrained(path: Path, model_type: Any, compact: bool, **options: Any) -> Any:
    """The language model of transformers (the multimodal one, if it has no class of its own) and its loading info."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto as auto

    own, multimodal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    inside = model_type in multimodal and model_type not in own
    cls: Any = auto.AutoModelForMultimodalLM if inside else auto.AutoModelForCausalLM
    if compact:  # the index lists the embedding, too
        trust = {name: options[name] for name in ("trust_remote_code", "local_files_only")}
        options["config"] = AutoConfig.from_pretrained(path, **trust)
        options["config"].transformers_weights = COMPACT_WEIGHTS
    model, loading = cls.from_pretrained(path, use_safetensors=True, output_loading_info=True, **options)
    if compact:
        del model.config.transformers_weights
    return model, loading


def _repository_attention(*configs: Any) -> Iterator[str]:
    """Yield attention implementations that are repositories (``org/name``), at any depth of the configs."""
    for config in configs:
        for key, value in config.items() if isinstance(config, dict) else ():
            if "_implementation" in key:
                for name in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(name, str) and "/" in name:
                        yield name
            elif isinstance(value, dict):
                yield from _repository_attention(value)


def _tokenizer(name: str, path: Path, owner: LoadedModel | None, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    if any((path / file).is_file() for file in TOKENIZER_FILES):
        with _model_errors(f"the tokenizer of {name}"):
            return AutoTokenizer.from_pretrained(path, **options)
    if owner is None:
        raise ModelError(f"{name} does not have a tokenizer: {path} lacks {listed(TOKENIZER_FILES)}")
    return owner.tokenizer


@contextmanager
def _model_errors(name: str, identity: Identity | None = None) -> Iterator[None]:
    """Convert errors of transformers and safetensors to ModelError; ``identity``: that of the model's files."""
    try:
        yield
    except (CrossdraftError, KeyboardInterrupt):
        raise
    except BaseException as error:  # custom model code may raise anything, SystemExit too
        reason = first_line(error)
        if "ignore_mismatched_sizes" in reason:
            reason = "the shapes of its weights do not match its config.json"
        if "automatic conversion of the weights" in reason:
            reason = f"its linear layers cannot be quantised; int4 requires widths divisible by {GROUP}"
        if "trust_remote_code" in str(error):
            reason = "it contains custom Python code; review it, then allow it with trust_remote_code"
        elif match := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", str(error)):
            reason = (
                f"{match[1]} is not the config of a causal language model of transformers; crossdraft supports "
                "decoder-only causal models"
            )
        if identity is not None and not identity.drafters:
            reason = f"{reason}; its files are {identity}; {identity.remedy}"
        raise ModelError(f"{printable(name)} could not be loaded: {reason}") from error


#: While transformers loads a model, it replaces functions of all models (`tie_weights`) and the default dtype.
_one_at_a_time = RLock()


def _log_errors_only() -> Callable[[], None]:
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    return lambda: transformers_logging.set_verbosity(verbosity)


#: Context in which transformers logs errors only.
_quiet = SharedPatch(_log_errors_only)
