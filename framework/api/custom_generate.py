"""The door through transformers' own ``generate``: ``model.generate(..., custom_generate=crossdraft.custom_generate)``.

``generate`` takes some eighty settings. Each of them, and each of its arguments, is honoured, refused with a sentence,
or changes nothing about the tokens; the tables below say which, and what a future transformers adds is refused until it
is in one of them.
"""

from __future__ import annotations

import copy
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..contracts.models import LoadedModel
from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from ..engine.logits_processors import LogitsProcessors, Processor
from ..errors import UsageError
from .build import StrategyLike
from .generate import check_ids, pair_decoder
from .generate_args import checked_sampling, whole

#: Fields of the generation config that are honoured.
HONOURED = frozenset({
    "max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id", "do_sample", "temperature", "top_k",
    "top_p", "min_p", "num_return_sequences", "return_dict_in_generate", "min_new_tokens", "min_length",
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
})  # fmt: skip

#: Fields that change no token here, whatever their value, and why.
HARMLESS = {
    "use_cache": "crossdraft has a cache of its own",
    "max_cache_len": "crossdraft has a cache of its own",
    "prefill_chunk_size": "prompts are fed in pieces in any case",
    "compile_config": "of transformers' own loop",
    "disable_compile": "of transformers' own loop",
    "continuous_batching_config": "of generate_batch",
    "early_stopping": "of beams, which are refused",
    "length_penalty": "of beams, which are refused",
    "diversity_penalty": "of beams, which are refused",
    "low_memory": "of contrastive search, which is refused",
    "renormalize_logits": "a softmax of normalised logits is the same law",
    "decoder_start_token_id": "of encoder-decoder models, which are refused",
    "num_assistant_tokens": "of assistants, which are refused",
    "num_assistant_tokens_schedule": "of assistants, which are refused",
    "assistant_confidence_threshold": "of assistants, which are refused",
    "assistant_lookbehind": "of assistants, which are refused",
    "target_lookbehind": "of assistants, which are refused",
    "max_matching_ngram_size": "of prompt_lookup_num_tokens, which is refused",
    "transformers_version": "says who wrote the file",
}

_BATCH = "it looks at the whole batch, and here each text is scored by itself"
_WARPER = "laws are warped by temperature, top_k, top_p and min_p alone"
_STOP = "a sequence ends at eos_token_id or at its length alone"
_MODE = "it asks for another way of decoding than sampling or taking the argmax"
_DRAFTING = "it asks transformers to draft, but here the drafter does"
_CACHE = "the cache is crossdraft's own, on the model's device and in its dtype"
_OUTPUT = "only the sequences are returned"

#: Fields that are refused: the values that ask for nothing (None always does), and why others cannot be honoured.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "encoder_repetition_penalty": ((1.0,), _BATCH),
    "encoder_no_repeat_ngram_size": ((0,), _BATCH),
    "guidance_scale": ((1.0,), "it makes passes of its own"),
    "watermarking_config": ((), "transformers alone checks its watermarks"),
    "remove_invalid_values": ((False,), "logits that are NaN or infinite are an error here, not mended"),
    "token_healing": ((False,), "prompts are taken as they are"),
    "top_h": ((), _WARPER),
    "typical_p": ((1.0,), _WARPER),
    "epsilon_cutoff": ((0.0,), _WARPER),
    "eta_cutoff": ((0.0,), _WARPER),
    "max_time": ((), _STOP),
    "stop_strings": ((), _STOP),
    "num_beams": ((1,), _MODE),
    "num_beam_groups": ((1,), _MODE),
    "penalty_alpha": ((0.0,), _MODE),
    "dola_layers": ((), _MODE),
    "constraints": ((), _MODE),
    "force_words_ids": ((), _MODE),
    "use_mtp": ((False,), _DRAFTING),
    "is_assistant": ((False,), _DRAFTING),
    "prompt_lookup_num_tokens": ((), _DRAFTING),
    "assistant_early_exit": ((), _DRAFTING),
    "assistant_ensemble_weight": ((), _DRAFTING),
    "speculation_type": ((), _DRAFTING),
    "cache_implementation": (("dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window"), _CACHE),
    "cache_config": (({},), _CACHE),
    "output_attentions": ((False,), _OUTPUT),
    "output_hidden_states": ((False,), _OUTPUT),
    "output_scores": ((False,), _OUTPUT),
    "output_logits": ((False,), _OUTPUT),
}

#: Arguments of transformers' ``generate`` that are honoured; its keywords are fields and inputs of the model.
HONOURED_ARGUMENTS = frozenset({
    "self", "inputs", "generation_config", "custom_generate", "streamer", "logits_processor",
})  # fmt: skip
#: Those that are refused, as in `REFUSED`.
REFUSED_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "prefix_allowed_tokens_fn": ((), _BATCH),
    "stopping_criteria": (([],), _STOP),
    "synced_gpus": ((False,), "devices that decode different texts make different numbers of steps"),
    "assistant_model": ((), _DRAFTING),
    "negative_prompt_ids": ((), "there is no guidance"),
    "negative_prompt_attention_mask": ((), "there is no guidance"),
}
#: Inputs of the model that are honoured, or (the last two) change no token.
HONOURED_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep"})
#: Warpers, wherever they stand.
_TOP = logits_process.TopKLogitsWarper | logits_process.TopPLogitsWarper | logits_process.MinPLogitsWarper
_UNKNOWN = (), "this version of crossdraft does not know it"


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    drafter: StrategyLike = "prompt-lookup",
    verifier: StrategyLike | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """For ``model.generate(..., custom_generate=crossdraft.custom_generate, drafter=..., verifier=...)``.

    Honours the generation config's (the model's own one counts) max_length, max_new_tokens, eos_token_id,
    pad_token_id, do_sample, temperature, top_k, top_p, min_p, num_return_sequences and return_dict_in_generate; logits
    processors, and the settings that transformers makes some of (min_length, repetition_penalty, ...); prompts that are
    padded on the left; and a streamer, for one sequence. Every other setting that would change the output is
    refused. Samples follow torch's generator: ``torch.manual_seed`` decides them. The model's modules stay as they are.
    Drafters that load another model need :func:`generate`.

    Args:
        drafter, verifier: as for :func:`generate`.
        seed: an integer that decides the samples in the place of torch's generator.

    Returns:
        ``[B, longest]``: prompt and output, padded on the right with the pad (or first EOS) id; with
        return_dict_in_generate a ``GenerateDecoderOnlyOutput`` that holds them as ``sequences``, and nothing else.

    Raises:
        UsageError: a setting that cannot be honoured; names it, its value, and what to do.
    """
    call = _call_of_transformers(model)
    if call is None:
        raise UsageError(
            "custom_generate is called by transformers; say model.generate(..., custom_generate=custom_generate)"
        )
    config, (arguments, inputs) = generation_config, call
    check_fields(config)
    for name in arguments.keys() - HONOURED_ARGUMENTS:
        _refuse(name, arguments[name], *REFUSED_ARGUMENTS.get(name, _UNKNOWN))
    for name in inputs.keys() - HONOURED_INPUTS - vars(config).keys():
        _refuse(name, inputs[name], (), "a target is given token ids and their attention_mask alone")
    sampling = sampling_of(config)
    processors = _processors(logits_processor or (), sampling)
    _check_criteria(stopping_criteria or (), config)
    prompts, padding = _prompts(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    most, ends = config.max_length - input_ids.shape[1], _listed(config.eos_token_id)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and (longest := max(map(len, prompts))) + most > context:
        raise UsageError(
            f"a prompt of {longest} tokens and {most} new ones exceed the model's context of {context} tokens; ask for "
            "fewer (max_new_tokens) or shorten the prompt"
        )
    streamer, target = (
        arguments.get("streamer"),
        LoadedModel(model, None, type(model).__name__, "given", "", ends, None),
    )
    most = whole("max_new_tokens", most, 1)
    decoder = pair_decoder(
        target,
        drafter,
        verifier,
        max(map(len, prompts)) + most,
        sampling=sampling,
        batch_size=len(prompts),
        max_new_tokens=most,
        seed=_drawn_seed(sampling) if seed is None else whole("seed", seed),
        load=_no_model,
        on_step=None if streamer is None else _streamed(streamer, len(prompts)),
        processors=LogitsProcessors(_of_each(processors, len(prompts)), padding) if processors else None,
    )
    for i, prompt in enumerate(prompts):
        check_ids(decoder, f"prompt {i}", prompt, target.name)
    outputs = {response.index: response.tokens for response in decoder.run(prompts)}
    if streamer is not None:
        streamer.end()
    longest = max(len(tokens) for tokens in outputs.values())
    pad = (*_listed(config.pad_token_id), *ends, 0)[0]
    new = [outputs[i] + [pad] * (longest - len(outputs[i])) for i in range(len(prompts))]
    sequences = torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], 1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences  # type: ignore


def check_fields(config: GenerationConfig) -> None:
    """Raise UsageError for the first field that cannot be honoured; ``config`` as transformers merged it."""
    defaults = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    for name, (neutral, why) in REFUSED.items():
        _refuse(name, getattr(config, name, None), neutral, why)
    # Entries that transformers does not know come with the files of some models; it does not read them either.
    for name in defaults.keys() - REFUSED.keys() - HONOURED - HARMLESS.keys():
        if not name.startswith("_"):
            _refuse(name, getattr(config, name, None), (defaults[name],), _UNKNOWN[1])


def sampling_of(config: GenerationConfig) -> Sampling:
    """The law that a generation config asks for, as transformers reads it; UsageError where there is none such."""
    if not config.do_sample:
        return Sampling(temperature=0.0)
    for name in ("temperature", "top_p"):  # top_p=0 leaves one token there, temperature 0 is refused there
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise UsageError(f"custom_generate cannot sample with {name}={value!r}; for the argmax say do_sample=False")
    return checked_sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else min(config.top_p, 1.0),
        min_p=config.min_p or 0.0,
    )


# -- what cannot be honoured ------------------------------------------------------------------------------


def _refuse(name: str, value: Any, neutral: Iterable[Any], why: str) -> None:
    """Raise UsageError unless ``value`` asks for nothing: it is None or one of ``neutral``."""
    if value is not None and not any(_equal(value, one) for one in neutral):
        plain = isinstance(value, bool | int | float | str | list | tuple | dict)
        shown = reprlib.repr(value).replace("\n", " ") if plain else f"<{type(value).__name__}>"
        raise UsageError(
            f"custom_generate cannot honour {name}={shown}: {why}; leave it out (the model's own "
            "generation_config counts, too), or call generate without custom_generate"
        )


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):  # tensors of several numbers
        return False


def _processors(given: Iterable[Any], sampling: Sampling) -> list[Processor]:
    """What transformers would do to the logits before it warps them as ``sampling`` does."""
    ours, found = sampling.warpers(), list[Processor]()
    count = len(ours)
    for processor in given:
        if ours and type(processor) is type(ours[0]) and vars(processor) == vars(ours[0]):
            ours.pop(0)
        elif isinstance(processor, logits_process.TemperatureLogitsWarper | _TOP) or len(ours) < count:
            if not _does_nothing(processor):
                _refuse("logits_processor", [type(processor).__name__], (), _WARPER)
        elif not _does_nothing(processor):
            found.append(processor)
    return found


def _of_each(processors: Sequence[Any], rows: int) -> Callable[[int], list[Processor]]:
    """The processors of each row; one that knows how long the padding of every row is, knows that row's alone."""

    def of(row: int) -> list[Processor]:
        found = []
        for processor in processors:
            ignored = getattr(processor, "prompt_ignore_length", None)
            if isinstance(ignored, Tensor):
                processor = copy.copy(processor)
                processor.prompt_ignore_length = int(ignored[row * len(ignored) // rows])
            found.append(processor)
        return found

    return of


def _does_nothing(processor: Any) -> bool:
    match processor:
        case logits_process.LogitNormalization():
            return True
        case logits_process.MinPLogitsWarper():
            return processor.min_p == 0
        case logits_process.SuppressTokensLogitsProcessor():
            return len(processor.suppress_tokens) == 0
        case logits_process.SuppressTokensAtBeginLogitsProcessor():
            return len(processor.begin_suppress_tokens) == 0
    return False


def _check_criteria(criteria: Iterable[Any], config: GenerationConfig) -> None:
    ends = set(_listed(config.eos_token_id))
    for criterion in criteria:
        match criterion:
            case MaxLengthCriteria() if criterion.max_length == config.max_length:
                continue
            case EosTokenCriteria() if set(_listed(criterion.eos_token_id)) == ends:
                continue
        _refuse("stopping_criteria", [type(criterion).__name__], (), _STOP)


def _prompts(
    input_ids: Tensor, mask: Tensor | None, positions: Tensor | None
) -> tuple[list[list[int]], dict[int, list[int]]]:
    """The rows without their padding, and their padding, which is on the left; positions must count tokens from 0."""
    seen = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    if seen.shape != input_ids.shape or not (seen[:, 1:] >= seen[:, :-1]).all() or not seen[:, -1:].all():
        raise UsageError(
            "custom_generate cannot honour this attention_mask: prompts are padded on the left alone; set "
            "tokenizer.padding_side='left', and leave out what the model is not to see"
        )
    if positions is not None:
        usual = seen.long().cumsum(1) - 1
        try:
            moved = bool(((positions != usual) & seen).any())
        except RuntimeError:  # of another shape
            moved = True
        if moved:
            _refuse("position_ids", positions.tolist(), (), "positions count the tokens of a prompt from 0")
    rows = list(zip(input_ids, seen, strict=True))
    return [row[keep].tolist() for row, keep in rows], {i: row[~keep].tolist() for i, (row, keep) in enumerate(rows)}


# -- pieces -----------------------------------------------------------------------------------------------


def _call_of_transformers(model: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The arguments, and the further keywords, of the ``model.generate`` that called us; None if none did.

    transformers hands only some of them on to a function: about a streamer or an assistant it says nothing.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "generate":
            names, _, keywords, found = inspect.getargvalues(frame)
            if "custom_generate" in names and keywords and found.get("self") is model:
                return {name: found[name] for name in names}, dict(found[keywords])
        frame = frame.f_back
    return None


def _streamed(streamer: Any, rows: int) -> Callable[[StepEvent], None]:
    if rows != 1:
        raise UsageError(f"custom_generate streams one sequence, and there are {rows}; leave out the streamer")

    def put(event: StepEvent) -> None:
        with torch.inference_mode(False):  # the streamer's tensors are ordinary ones
            for token in event.emitted[0]:
                streamer.put(torch.tensor([token]))

    return put


def _drawn_seed(sampling: Sampling) -> int:
    """From torch's generator, as any sampling: it moves on. Greedy decoding leaves it alone."""
    return int(torch.empty((), dtype=torch.long, device="cpu").random_()) if sampling.temperature > 0 else 0


def _no_model(*_: Any) -> LoadedModel:
    raise UsageError("this drafter loads a model of its own; use crossdraft.generate instead of custom_generate")


def _listed(ids: Any) -> tuple[int, ...]:
    """Token ids as a config or transformers holds them: none, one, several, or a tensor."""
    found = ids.tolist() if isinstance(ids, Tensor) else ids
    return () if found is None else tuple(found) if isinstance(found, list | tuple) else (int(found),)
