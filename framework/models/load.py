"""Loading a model: by its backend, which for directories of transformers is `load_transformers`.

Weights are read from safetensors only: pickles can run code when they are read, so they are refused. Nothing here knows
about drafting.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..contracts.models import LoadedModel, ResolvedModel
from ..errors import CrossdraftError, ModelError, UsageError, first_line, printable, quoted
from ..util.shared_patch import SharedPatch
from . import distributed, placement
from .configs import check_against_weights, check_files, read_config
from .device import pick_dtype
from .digests import model_sha256
from .quantization import GROUP, check_quantized, load_options
from .resolve import listed, resolve
from .shared_embedding import adopt_embedding, check_owner, shared_embedding_of
from .tokenizer import check_code_is_here, eos_token_ids

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from .placement import Device

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    share_with: LoadedModel | None = None,
) -> LoadedModel:
    """Load the causal language model called `name` (see `resolve`) for inference.

    Args:
        dtype: a torch dtype or its name; for ``"auto"`` see `pick_dtype`.
        device: a torch device or its name; for ``"auto"`` see `pick_device`. For models larger than one:
            ``"spread"``, or a mapping from the names of its parts to devices (accelerate's ``device_map``); ``"tp"``
            under ``torchrun``, see `models.distributed`.
        trust_remote_code: let the model run Python code from its own directory. Consent is for this one model: not for
            the owner of a shared embedding, nor for code that its files fetch from another repository.
        attn_implementation: passed to transformers, which chooses if it is None.
        share_with: for a model that leaves out its embedding, the loaded model to take it from: the very
            same tensor is used. Without it, the model that ``crossdraft.json`` names is loaded for it.
            An ``"auto"`` dtype or device is then that of this model.

    Raises:
        UsageError: an unknown name, dtype or device, or one that cannot be had of this model.
        ModelError: a model that is incomplete, damaged, pickled, or has weights missing: never run with
            weights that were made up.
    """
    distributed.check(device)
    options: Any = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "attn_implementation": attn_implementation,
    }

    def load() -> LoadedModel:
        found = resolve(name)
        backend = plugins.get("backends", found.backend)()
        return backend.load(found, device=device, share_with=share_with, **options)

    if device != distributed.SPLIT:
        return load()
    key = distributed.number()
    loaded = distributed.everywhere(load, "load", key, name, options)
    placement.lead(loaded.model, key)
    return loaded


def load_transformers(
    found: ResolvedModel,
    *,
    dtype: str | torch.dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    share_with: LoadedModel | None = None,
) -> LoadedModel:
    """`load_model` of a directory as transformers writes it."""
    name = found.name
    shares = share_with.model if share_with else None
    place: torch.device = shares.device if device == "auto" and shares is not None else placement.first_device(device)
    precision: torch.dtype = shares.dtype if dtype == "auto" and shares is not None else pick_dtype(dtype, place)
    shared = shared_embedding_of(found.path)
    if trust_remote_code:
        check_code_is_here(name, found.path)
    if shared is not None and share_with is None:
        check_owner(name, found.path)
    config = read_config(found.path)
    if attention := next(_fetched({"attn_implementation": attn_implementation}, config), None):
        raise ModelError(
            f"{name}: {quoted(attention)} is attention whose code would be fetched from a repository, unread; "
            "take one of transformers' own, sdpa or eager"
        )
    check_against_weights(found.path, config, without=("vocab_size",) if shared else ())
    check_files(found.path)
    if shared is not None and placement.larger(device):
        raise UsageError(
            f"{name} takes its embedding from {shared['model']}, so it has one device, that of the embedding; give cpu "
            "or cuda"
        )
    placement.check_divides(name, config, device)
    placing = placement.load_options(name, device, found.quantization)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    # Quiet, because transformers warns at length about the embedding that we are about to add.
    # And of layers that cannot be quantised.
    with _explained(name), _quiet if shared is not None or found.quantization else nullcontext():
        from transformers import AutoModelForCausalLM

        model: Any
        loading: Any
        model, loading = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            found.path,
            dtype=precision,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            **options,
            **load_options(name, found.quantization, place),
            **placing,
        )
        model = (model if placing else model.to(place)).eval()
        if found.quantization:
            model.requires_grad_(False)  # torchao's weights would be kept for a backward pass otherwise
            check_quantized(name, found.quantization, model)
    missing, unexpected = set(loading["missing_keys"]), set(loading["unexpected_keys"])
    owner = None
    if shared is not None:
        owner = share_with or _owner(name, shared["model"], dtype=precision, device=place)
        missing -= adopt_embedding(name, model, owner, shared)
    elif unexpected:
        logger.warning("crossdraft: %s: weights that its model does not use: %s", name, listed(unexpected))
        unexpected = set()
    if missing or unexpected:
        raise ModelError(
            f"the weights of {name} do not fit its config.json: missing {listed(missing)}; "
            f"unexpected {listed(unexpected)}"
        )
    placement.check_split(name, model, device)
    tokenizer = _tokenizer(name, found.path, owner, options)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        source=found.source,
        sha256=model_sha256(found),
        eos_token_ids=eos_token_ids(
            name,
            *(
                getattr(holder, "eos_token_id", None)
                for holder in (model.generation_config, model.config.get_text_config(), tokenizer)
            ),
        ),
        context_length=getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> str | None:
    """None if both give every token the same id, else a sentence that says where they differ."""
    left, right = a.get_vocab(), b.get_vocab()
    if left == right:
        return None
    if len(left) != len(right):
        return f"the tokenizers differ: one has {len(left)} tokens, the other {len(right)}"
    token = min((t for t in left if left[t] != right.get(t)), key=left.__getitem__)
    other = f"id {right[token]}" if token in right else "no id"
    return f"the tokenizers differ: {token!r} has id {left[token]} in one and {other} in the other"


def _owner(name: str, model: str, **options: Any) -> LoadedModel:
    """The model whose embedding ``name`` shares, loaded without anybody's consent to run code of its own."""
    if shared_embedding_of(resolve(model).path) is not None:
        raise ModelError(
            f"{name} takes its embedding from {model}, which has none of its own; name that of a whole model"
        )
    try:
        return load_model(model, **options)
    except ModelError as error:
        raise ModelError(
            f"{error}; {name} takes its embedding from it: where it needs options of its own, load it and give it as "
            "share_with"
        ) from error


def _fetched(*configs: Any) -> Iterator[str]:
    """Attention by the name of a repository (``org/name``), in a config at any depth, or in a call."""
    for config in configs:
        for key, value in config.items() if isinstance(config, dict) else ():
            if "_implementation" in key:
                for one in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(one, str) and "/" in one:
                        yield one
            elif isinstance(value, dict):
                yield from _fetched(value)


def _tokenizer(name: str, path: Path, owner: LoadedModel | None, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    if any((path / file).is_file() for file in _TOKENIZER_FILES):
        with _explained(f"the tokenizer of {name}"):
            return AutoTokenizer.from_pretrained(path, **options)
    if owner is None:
        raise ModelError(f"{name} has no tokenizer: {path} has none of {listed(_TOKENIZER_FILES)}")
    return owner.tokenizer


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what transformers and safetensors raise about a bad directory into one sentence."""
    try:
        yield
    except (CrossdraftError, KeyboardInterrupt):
        raise
    except BaseException as error:  # code of the model's own may raise anything, SystemExit too
        reason = first_line(error)
        if "ignore_mismatched_sizes" in reason:
            reason = "its weights have other shapes than its config.json describes"
        if "automatic conversion of the weights" in reason:
            reason = f"its linear layers cannot be quantised so; int4 takes widths that {GROUP} divides"
        if "trust_remote_code" in str(error):
            reason = "it brings Python code of its own; read that code, then allow it with trust_remote_code"
        elif found := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", str(error)):
            reason = (
                f"{found[1]} belongs to no causal language model of transformers; "
                "crossdraft decodes decoder-only causal models"
            )
        raise ModelError(f"{printable(name)} could not be loaded: {reason}") from error


def _silence() -> Callable[[], None]:
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    return lambda: transformers_logging.set_verbosity(before)


#: Meanwhile transformers logs errors alone.
_quiet = SharedPatch(_silence)
