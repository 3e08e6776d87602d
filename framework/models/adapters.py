"""LoRA adapters of PEFT, merged into their base model on load: ``BASE+ADAPTER``.

The merged weights are those of PEFT's ``merge_and_unload`` in the dtype of the base, so the model differs from an
unmerged one by rounding only. It is a separate model with its own distribution, as target and as drafter.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.models import ResolvedModel
from ..errors import ModelError, UsageError, printable, quoted
from ..util.extras import need
from ..util.input_files import kind_of, path_of, read_json
from ..util.limits import CONFIG_BYTES, MOST_WIDTH
from ..util.patterns import SECONDS, compile_pattern
from .digests import weights_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Files of an adapter.
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
#: Initialisations of LoRA that leave the base weights as they are.
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
#: Keys of methods that cannot be merged, add layers, or read files and modules that the config names.
_UNSUPPORTED = (
    *("alora_invocation_tokens", "arrow_config", "corda_config", "kasa_config", "layer_replication", "loftq_config"),
    *("lora_ga_config", "megatron_config", "monteclora_config", "use_bdlora", "use_qalora", "velora_config"),
)
#: Keys whose items PEFT takes for regular expressions, although they are names of layers.
_NAMES = ("layers_pattern", "modules_to_save")
#: Spelling of ``target_modules`` that selects all linear layers.
_ALL_LINEAR = "all-linear"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def split_adapter(name: str) -> tuple[str, str]:
    """Split a model name into base and adapter ("" = none)."""
    base, _, adapter = name.rpartition("+")
    return (base, adapter) if base and adapter else (name, "")


def refuse_adapter(name: str, unsupported: str) -> None:
    """Raise UsageError with the reason ``unsupported`` if ``name`` has an adapter."""
    if kind_of(name):
        return
    base, adapter = split_adapter(name)
    if adapter:
        raise UsageError(
            f"{printable(name)}: {unsupported}; use {printable(base)}, or a directory with the merged weights, "
            "load_model(NAME).model.save_pretrained(DIRECTORY)"
        )


def check_adapter(name: str, path: Path) -> None:
    """Raise ModelError unless ``path`` is the directory of a LoRA adapter in safetensors."""
    if kind_of(path / CONFIG) != "file":
        raise ModelError(f"{printable(name)}: {path} is not an adapter of PEFT: {CONFIG} is missing")
    if kind_of(path / WEIGHTS) != "file":
        raise ModelError(
            f"{printable(name)}: {path} does not contain {WEIGHTS}. Pickled weights (adapter_model.bin) can run code, "
            "so they are not loaded; if you trust them, convert them once: "
            "PeftModel.from_pretrained(BASE, OLD).save_pretrained(NEW)"
        )
    read_adapter_config(path)


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Read ``adapter_config.json``. Raises ModelError for methods that are not plain LoRA."""
    file = path / CONFIG
    config = read_json(file, CONFIG_BYTES, error=ModelError)
    remedy = "merge it with peft (merge_and_unload) and give the directory of the merged model"
    if (method := config.get("peft_type")) != "LORA":
        raise ModelError(f"{file}: peft_type is {quoted(method)}, but only LORA is merged on load; {remedy}")
    if keys := [key for key in _UNSUPPORTED if config.get(key)]:
        raise ModelError(f"{file}: {keys[0]} is set, but only plain LoRA is merged on load; {remedy}")
    if (start := config.get("init_lora_weights")) not in _INITIALISATIONS:
        raise ModelError(
            f"{file}: init_lora_weights is {quoted(start)}, which changes the base weights, too; save the adapter as "
            "plain LoRA (path_initial_model_for_weight_conversion of save_pretrained)"
        )
    ranks = config.get("rank_pattern") or {}
    for rank in (config.get("r", 8), *(ranks.values() if isinstance(ranks, dict) else [ranks])):
        if type(rank) is not int or not 0 < rank <= MOST_WIDTH:
            raise ModelError(f"{file}: the rank {quoted(rank)} is not valid; it must be an integer of at least 1")
    for key in _NAMES:
        items = config.get(key) or []
        for item in [items] if isinstance(items, str) else items:
            if not isinstance(item, str) or not re.fullmatch(r"[\w.]+", item):
                raise ModelError(f"{file}: {key} contains {quoted(item)}, which is not the name of a layer; {remedy}")
    return config


def check_base(base: ResolvedModel, adapter: Path) -> None:
    """Raise ModelError if the adapter was trained for another base model, as far as names and files can be compared."""
    trained = read_adapter_config(adapter).get("base_model_name_or_path")
    if not isinstance(trained, str) or not trained or trained in (base.name, base.hub_id):
        return
    if kind_of(trained) == "directory":
        path = path_of(trained)
        same = path.samefile(base.path) or weights_sha256(path) == weights_sha256(base.path)
    elif base.hub_id and _HUB_ID.fullmatch(trained):
        same = trained.lower() == base.hub_id.lower()
    else:
        return  # not comparable; the shapes are
    if not same:
        raise ModelError(
            f"{adapter / CONFIG}: base_model_name_or_path is {quoted(trained)}, but the base given is "
            f"{printable(base.name)} ({base.source}), whose weights are others; name that base before the +, or "
            "correct the key if the weights are the same"
        )


def merge_adapter(resolved: ResolvedModel, model: PreTrainedModel) -> None:
    """Merge the adapter of ``resolved`` into ``model``, in place.

    Raises:
        ModelError: peft is not installed, or the adapter's tensors do not fit the model.
    """
    path, name = resolved.adapter, printable(resolved.name)
    assert path is not None
    need(name, "adapters", "peft", error=ModelError)
    from peft import LoraConfig, PeftModel  # pyright: ignore[reportMissingImports]  # an extra
    from peft.tuners.tuners_utils import BaseTunerLayer  # pyright: ignore[reportMissingImports]

    _check_shapes(path)
    keys = set(model.state_dict())
    embeddings: Any = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embeddings[0].weight is getattr(embeddings[1], "weight", None)
    config: Any = LoraConfig.from_pretrained(str(path))
    _match_modules(config, [module for module, _ in model.named_modules()], path / CONFIG)
    wrapped = PeftModel(model, config)
    if tied and any(
        isinstance(module, BaseTunerLayer) for module in (model.get_input_embeddings(), model.get_output_embeddings())
    ):
        raise ModelError(
            f"{path / CONFIG}: target_modules contains an embedding, which {name} ties to its output head, so "
            "merging would change both; untie them (peft describes how) and give the directory of that model"
        )
    result: Any = wrapped.load_adapter(str(path), "default", torch_device=str(model.device))
    if result.missing_keys or result.unexpected_keys:
        missing, unexpected = (", ".join(keys[:3]) or "none" for keys in (result.missing_keys, result.unexpected_keys))
        raise ModelError(
            f"the tensors of {path / WEIGHTS} do not match {CONFIG} and the base of {name}: missing {missing}; "
            f"unexpected {unexpected}; name the base that the adapter was trained for"
        )
    wrapped.merge_and_unload()
    if set(model.state_dict()) != keys:
        raise ModelError(f"{name}: peft left parts of the adapter unmerged; merge it yourself and give that directory")
    model.requires_grad_(True)  # as without an adapter; peft freezes the base


def _match_modules(config: Any, modules: Sequence[str], file: Path) -> None:
    """Replace the regular expressions in ``config`` by the names of ``modules`` that match, within a time limit.

    Raises:
        ModelError: an expression is not valid, or takes too long.
    """
    end = time.monotonic() + SECONDS

    def matching(key: str, pattern: str) -> list[str]:
        try:
            compiled = compile_pattern(pattern)
            left = (max(end - time.monotonic(), 0.01) for _ in modules)
            return [m for m, seconds in zip(modules, left, strict=True) if compiled.fullmatch(m, timeout=seconds)]
        except (ValueError, TimeoutError, MemoryError) as error:
            reason = str(error) if isinstance(error, ValueError) else "matching it takes too long"
            raise ModelError(f"{file}: {key} is {quoted(pattern)}: {reason}; list the names of the layers") from None

    for key in ("target_modules", "exclude_modules"):
        pattern = getattr(config, key, None)
        if isinstance(pattern, str) and pattern.lower() != _ALL_LINEAR:
            setattr(config, key, set(matching(key, pattern)))
    for key in ("rank_pattern", "alpha_pattern"):
        values = getattr(config, key, None) or {}
        names: dict[str, Any] = {}
        for pattern, value in values.items():
            for module in matching(key, rf"(?:.*\.)?(?:{pattern})"):
                names.setdefault(re.escape(module), value)  # the first pattern that matches counts
        setattr(config, key, names)


def _check_shapes(path: Path) -> None:
    """Raise ModelError for a rank larger than any tensor, which would be allocated before the weights are read."""
    from safetensors import safe_open

    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            sides = [side for key in file.keys() for side in file.get_slice(key).get_shape()]  # noqa: SIM118
    except Exception as error:  # of safetensors, struct, the disk
        raise ModelError(f"{path / WEIGHTS} is damaged or not a safetensors file: {error}") from None
    config = read_adapter_config(path)
    rank = max(config.get("r", 8), *(config.get("rank_pattern") or {"": 1}).values())
    if rank > max(sides, default=0):
        raise ModelError(
            f"{path / CONFIG} has rank {rank}, but the largest dimension of {WEIGHTS} is {max(sides, default=0)}"
        )
