"""The class that vLLM's ``method: custom_class`` loads: a crossdraft drafter.

vLLM passes tokens by rows of its batch. The ids of their requests, and the lengths at which they end, are read from the
model runner, whose ``propose_draft_token_ids`` is wrapped for that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from crossdraft import DraftContext, Sampling, UsageError

from .guards import check_signature
from .settings import VARIABLE, read_settings
from .slots import DrafterSlots, Row


class Proposer:
    """A crossdraft drafter with the interface of vLLM's custom proposers."""

    def __init__(self, vllm_config: Any):
        drafter = read_settings().drafter
        if drafter is None:
            raise UsageError(
                f'{VARIABLE} has no drafter, which crossdraft_vllm.Proposer needs; set it to {{"drafter": NAME}}'
            )
        cls, config = drafter
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        nodes = cls.traits(config, Sampling(temperature=1)).nodes
        if nodes > speculative.num_speculative_tokens:
            raise UsageError(
                f"num_speculative_tokens is {speculative.num_speculative_tokens}, but drafts of '{cls.name}' have up "
                f"to {nodes} tokens; set it to {nodes}, or shorten the drafts"
            )
        self.max_length: int = model.max_model_len
        context = DraftContext(
            sampling=Sampling(temperature=1),
            batch_size=vllm_config.scheduler_config.max_num_seqs,
            max_length=self.max_length + speculative.num_speculative_tokens + 1,
            vocab_size=model.get_vocab_size(),
            device=torch.device("cpu"),
            target_name=str(model.model),
            tokenizer=_tokenizer(model),
        )
        self.slots = DrafterSlots(drafter, context)
        self.runner: Any = None
        _wrap_runner()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing: the drafter has no model."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the drafts of the rows of vLLM's batch, one list of tokens per row."""
        batch = []
        for index, sampled in enumerate(sampled_token_ids):
            state = self.runner.requests[self.runner.input_batch.req_ids[index]]
            length = int(num_tokens_no_spec[index])
            batch.append(row_of(state, token_ids_cpu[index], length, sampled, self.max_length))
        return self.slots.propose(batch, self.runner.requests)


def row_of(state: Any, tokens: Sequence[int] | np.ndarray, length: int, sampled: list[int], max_length: int) -> Row:
    """The row of a request in vLLM's ``CachedRequestState``; ``max_length``: of prompt and response."""
    params, prompt_len = state.sampling_params, state.num_prompt_tokens
    stop: set[int] = set()
    if params is not None:
        if params.max_tokens is not None:
            max_length = min(max_length, prompt_len + params.max_tokens)
        if length - len(sampled) - prompt_len >= params.min_tokens:
            stop |= params.all_stop_token_ids
            if params.eos_token_id is not None and not params.ignore_eos:
                stop.add(params.eos_token_id)
    return Row(state.req_id, tokens, length, prompt_len, sampled, max_length - length - 1, stop)  # type: ignore[arg-type]


def _tokenizer(model: Any) -> Any:
    """The target's tokenizer, which drafters with a datastore compare with theirs; None if vLLM loads none."""
    if model.skip_tokenizer_init:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model.tokenizer, trust_remote_code=model.trust_remote_code)


#: Parameters of ``GPUModelRunner.propose_draft_token_ids`` in vLLM 0.32.
PARAMETERS = (
    "self",
    "scheduler_output",
    "sampled_token_ids",
    "sampling_metadata",
    "hidden_states",
    "sample_hidden_states",
    "aux_hidden_states",
    "spec_decode_metadata",
    "common_attn_metadata",
    "slot_mappings",
)


def _wrap_runner() -> None:
    """Let vLLM's model runner introduce itself to the `Proposer` before each draft."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # pyright: ignore[reportMissingImports]

    original = GPUModelRunner.propose_draft_token_ids
    if hasattr(original, "__wrapped__"):
        return
    check_signature("GPUModelRunner.propose_draft_token_ids", original, PARAMETERS)

    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.drafter, Proposer):
            self.drafter.runner = self
        return original(self, *args, **kwargs)

    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids
