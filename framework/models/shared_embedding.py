"""Models saved without their token embedding, which they share with another model, usually their target.

A small student of a large-vocabulary model is mostly embedding. Its ``crossdraft.json`` names the owner::

    {"shared_embedding": {"model": "smollm2-135m-instruct", "sha256": "<embedding_sha256 of that tensor>"}}

Other loaders would initialise the embedding at random. So the index of the weights lists it in a file that does not
exist, `LEFT_OUT`, whose name is part of their error. Directories of earlier versions have no index, and their weights
are in ``model.safetensors``.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.models import LoadedModel
from ..errors import ModelError
from ..util.input_files import kind_of, read_json
from ..util.limits import CONFIG_BYTES
from .configs import COMPACT_WEIGHTS, INDEX, LEFT_OUT, SHARED
from .digests import embedding_sha256
from .resolve import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def shared_embedding_of(path: Path) -> dict[str, str] | None:
    """Content of ``crossdraft.json``, or None if the model has its own embedding."""
    file = path / SHARED
    if not kind_of(file):
        return None
    content = read_json(file, CONFIG_BYTES, error=ModelError)
    shared = content.get("shared_embedding")
    if len(content) == 1 and isinstance(shared, dict) and shared.keys() == {"model", "sha256"}:
        owner, digest = shared["model"], shared["sha256"]
        if isinstance(owner, str) and isinstance(digest, str):
            return shared
    raise ModelError(f'{file} must be {{"shared_embedding": {{"model": ..., "sha256": ...}}}}')


def check_owner(name: str, path: Path) -> None:
    """Follow ``crossdraft.json`` to a model with its own embedding. Raises ModelError for a cycle."""
    seen = [path.resolve()]
    while (shared := shared_embedding_of(seen[-1])) is not None:
        owner = resolve(shared["model"]).path.resolve()
        if owner in seen:
            raise ModelError(
                f"{seen[-1] / SHARED} names {shared['model']} as owner of the embedding of {name}, which is a cycle; "
                "name a model with its own embedding"
            )
        seen.append(owner)


def adopt_embedding(name: str, model: Any, owner: LoadedModel, shared: dict[str, str]) -> set[str]:
    """Give `model` the embedding of `owner`; return the names of the weights it now has."""
    import torch

    weight: Any = owner.model.get_input_embeddings().weight
    own_weight = model.get_input_embeddings().weight
    if weight.shape != own_weight.shape:
        raise ModelError(
            f"{name} needs a token embedding of shape {list(own_weight.shape)}, "
            f"but that of {owner.name} has {list(weight.shape)}"
        )
    # A float16 weight is rounded differently, so its digest is not comparable.
    if weight.dtype != torch.float16 and embedding_sha256(weight) != shared["sha256"]:
        logger.warning(
            "crossdraft: %s was trained with another token embedding than that of %s (%s); "
            "its acceptance rate may be lower",
            name,
            owner.name,
            owner.source,
        )
    if (weight.dtype, weight.device) != (own_weight.dtype, own_weight.device):
        weight = torch.nn.Parameter(weight.detach().to(own_weight.device, own_weight.dtype), requires_grad=False)
    model.get_input_embeddings().weight = weight
    model.tie_weights()
    return {key for key, tensor in model.state_dict(keep_vars=True).items() if tensor is weight}


def save_sharing_embedding(model: PreTrainedModel, directory: Path | str, *, embedding_of: str) -> None:
    """Write `model` without its token embedding and tied head: `load_model` takes them from `embedding_of`.

    The embedding of `model` must be that of `embedding_of`, unchanged. Existing files are replaced.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    embedding: Any = model.get_input_embeddings().weight
    state = model.state_dict(keep_vars=True)
    state_dict = {key: t.detach().cpu().contiguous() for key, t in state.items() if t is not embedding}
    save_file(state_dict, directory / COMPACT_WEIGHTS, metadata={"format": "pt"})
    files = {key: COMPACT_WEIGHTS if key in state_dict else LEFT_OUT for key in sorted(state)}
    index = {"metadata": {"total_size": sum(t.nbytes for t in state_dict.values())}, "weight_map": files}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    shared = {"shared_embedding": {"model": embedding_of, "sha256": embedding_sha256(embedding)}}
    (directory / SHARED).write_text(json.dumps(shared, indent=2) + "\n", encoding="utf-8")


def shares_embedding(name: str, target: LoadedModel) -> bool:
    """True if the model `name` shares the embedding of the target."""
    try:
        shared = shared_embedding_of(resolve(name).path)
    except ModelError:
        return False  # loading it raises the error
    if shared is None:
        return False
    weight: Any = target.model.get_input_embeddings().weight
    return shared["model"] == target.name or shared["sha256"] == embedding_sha256(weight)
