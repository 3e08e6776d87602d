"""Models that leave out the token embedding they share with another one, usually their target.

A small student of a large-vocabulary model is mostly embedding. Its ``crossdraft.json`` says whose it is::

    {"shared_embedding": {"model": "smollm2-135m-instruct", "sha256": "<embedding_sha256 of that tensor>"}}
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
from .digests import embedding_sha256
from .resolve import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

SHARED = "crossdraft.json"


def shared_embedding_of(path: Path) -> dict[str, str] | None:
    """What ``crossdraft.json`` says about the embedding, or None if the directory has its own."""
    file = path / SHARED
    if not kind_of(file):
        return None
    found = read_json(file, CONFIG_BYTES, error=ModelError)
    shared = found.get("shared_embedding")
    if len(found) == 1 and isinstance(shared, dict) and shared.keys() == {"model", "sha256"}:
        owner, digest = shared["model"], shared["sha256"]
        if isinstance(owner, str) and isinstance(digest, str):
            return shared
    raise ModelError(f'{file} must read {{"shared_embedding": {{"model": ..., "sha256": ...}}}}')


def check_owner(name: str, path: Path) -> None:
    """Follow ``crossdraft.json`` to a model that has its own embedding. Raises ModelError where there is none."""
    seen = [path.resolve()]
    while (shared := shared_embedding_of(seen[-1])) is not None:
        owner = resolve(shared["model"]).path.resolve()
        if owner in seen:
            raise ModelError(
                f"{seen[-1] / SHARED} says that the embedding of {name} is in {shared['model']}, which leaves it out, "
                "too, and leads back: no model has it"
            )
        seen.append(owner)


def adopt_embedding(name: str, model: Any, owner: LoadedModel, shared: dict[str, str]) -> set[str]:
    """Give `model` the embedding of `owner`; return the names of the weights it now has."""
    import torch

    weight: Any = owner.model.get_input_embeddings().weight
    own = model.get_input_embeddings().weight
    if weight.shape != own.shape:
        raise ModelError(
            f"{name} needs a token embedding of shape {list(own.shape)}, "
            f"but that of {owner.name} has {list(weight.shape)}"
        )
    # A float16 model was rounded once already, so its digest proves nothing.
    if weight.dtype != torch.float16 and embedding_sha256(weight) != shared["sha256"]:
        logger.warning(
            "crossdraft: %s was made for another token embedding than that of %s (%s); "
            "its drafts may be accepted less often",
            name,
            owner.name,
            owner.source,
        )
    if (weight.dtype, weight.device) != (own.dtype, own.device):
        weight = torch.nn.Parameter(weight.detach().to(own.device, own.dtype), requires_grad=False)
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
    kept = {key: t.detach().cpu().contiguous() for key, t in state.items() if t is not embedding}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    shared = {"shared_embedding": {"model": embedding_of, "sha256": embedding_sha256(embedding)}}
    (directory / SHARED).write_text(json.dumps(shared, indent=2) + "\n", encoding="utf-8")


def shares_embedding(name: str, target: LoadedModel) -> bool:
    """Whether the model `name` leaves out an embedding that is the target's; if not, it finds its own."""
    try:
        shared = shared_embedding_of(resolve(name).path)
    except ModelError:
        return False  # loading it will complain
    if shared is None:
        return False
    weight: Any = target.model.get_input_embeddings().weight
    return shared["model"] == target.name or shared["sha256"] == embedding_sha256(weight)
