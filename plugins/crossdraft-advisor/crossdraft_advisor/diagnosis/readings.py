"""The catalogue of readings: what a server may compute instead of what the files define, each a `Trial`.

A reading changes one of: the options of the drafter, its heads or draft model, the class that drafts, or the prompts.
To add one, add a function to `READINGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crossdraft import Checkpoint, Misconfiguration, generate
from crossdraft.heads import FeatureDrafter
from crossdraft.models import TRANSFORMERS, Configured

from ..replay.response import Response
from ..replay.teacher_forcing.lazy_models import Target
from .head_misreadings import MISREADINGS, misread
from .misconfigurations import misconfigurations
from .trials import Trial

_ROWS = 8  # responses that are continued at a time
_MARK = "crossdraft"  # text of a message that shows where a chat template puts it


@dataclass(frozen=True)
class Setup:
    """Facts about a server: the drafter and its heads (None without), the target and its responses.

    ``others``: further heads or draft models that it may have loaded. ``continued``: responses with what a target emits
    past their end; ``recorded``: the responses without that.
    """

    drafter: Configured
    heads: Checkpoint | None
    target: Target
    responses: Sequence[Response]
    others: Sequence[str] = ()
    continued: Callable[[Sequence[Response], Target], Sequence[Response]] = lambda responses, _: responses
    recorded: Sequence[Response] | None = None

    def trial(self, mistake: str, cure: str, **changes: Any) -> Trial:
        """A trial of the same target and responses with ``changes`` of `Trial` or `Misconfiguration`."""
        fields = {key: changes.pop(key) for key in ("options", "change") if key in changes}
        return replace(Trial(Misconfiguration(mistake, cure, **fields), self.target, self.responses), **changes)


def with_continuations(responses: Sequence[Response], target: Target, gamma: int) -> list[Response]:
    """The responses with what the target emits past their end at temperature 0, where engines count drafts, too."""
    results = list(responses)
    maximum = target.loaded.context_length
    short = [
        number
        for number, response in enumerate(results)
        if not len(response.continuation)
        and (maximum is None or len(response.prompt) + len(response.tokens) + gamma <= maximum)
    ]
    if short:
        texts = [[*results[number].prompt, *results[number].tokens] for number in short]
        options = {"temperature": 0.0, "ignore_eos": True, "batch_size": min(_ROWS, len(short))}
        for number, more in zip(short, generate(target.loaded, texts, max_new_tokens=gamma, **options), strict=True):
            results[number] = replace(results[number], continuation=more.tokens)
    return results


Reading = Callable[[Setup], Iterator[Trial]]


def readings(setup: Setup, catalogue: Sequence[Reading]) -> Iterator[Trial]:
    """Yield the drafter as configured, then the readings of a catalogue."""
    responses = setup.continued(setup.responses, setup.target)
    setup = replace(setup, responses=responses, recorded=setup.responses)
    yield setup.trial("", "")
    for reading in catalogue:
        yield from reading(setup)


def _greedy_as_configured(setup: Setup) -> Iterator[Trial]:
    """Drafts that are greedy by the drafter's options although the target samples."""
    sampling = setup.target.sampling
    if sampling.temperature and getattr(setup.drafter[1], "temperature", None) == 0:
        yield setup.trial(
            f"drafts are greedy (temperature: 0), but the target samples at {sampling.temperature:g}",
            "remove temperature from the drafter's options",
            options={"temperature": None},
        )


def _published_mistakes(setup: Setup) -> Iterator[Trial]:
    """Common misconfigurations of heads, see `misconfigurations`."""
    if setup.heads is not None and setup.target.loaded.backend == TRANSFORMERS:
        for item in misconfigurations(*setup.drafter, setup.heads, setup.target.loaded.model):
            yield Trial(item, setup.target, setup.responses)


def _other_temperature(setup: Setup) -> Iterator[Trial]:
    """Greedy drafts, and drafts sampled at temperature 1 although the target is at another."""
    sampling = setup.target.sampling
    if not sampling.temperature or getattr(setup.drafter[1], "temperature", 0) is not None:
        return
    yield setup.trial("the engine drafts greedily", "set its draft sampling", options={"temperature": 0})
    if sampling.temperature != 1:
        mistake = f"the engine drafts at temperature 1, not at {sampling.temperature:g}"
        yield setup.trial(mistake, "set the temperature of its drafts", options={"temperature": 1.0})


def _vocabulary(setup: Setup) -> Iterator[Trial]:
    """A vocabulary map that is not applied, and ids of a draft model that are off by one."""
    if setup.heads is None:
        if _is_draft_model(setup):
            for by, how in ((1, "one too high"), (-1, "one too low")):
                target = setup.target.with_draft_models(partial(_shifted_ids, by=by))
                yield setup.trial(f"ids of the draft model are {how}", "align the vocabularies", target=target)
        return
    d2t = setup.heads.tensors.get("d2t")
    if d2t is not None and d2t.bool().any():
        yield setup.trial(
            "the vocabulary map d2t is not applied",
            "use an engine that reads d2t",
            change=lambda loaded: loaded.with_tensors({"d2t": torch.zeros_like(d2t)}, ("t2d",)),
        )


def _four_bits(setup: Setup) -> Iterator[Trial]:
    """Heads or a draft model that are quantised to 4 bits."""
    cure = "serve them in the precision of their files"
    if setup.heads is not None:
        yield setup.trial("the heads are quantised to 4 bits", cure, change=_quantized)
    elif _is_draft_model(setup):
        target = setup.target.with_draft_models(_quantized_model)
        yield setup.trial("the draft model is quantised to 4 bits", cure, target=target)


def _masks_and_states(setup: Setup) -> Iterator[Trial]:
    """Masks, positions and features of heads that draft token by token, see `head_misreadings`."""
    if issubclass(setup.drafter[0], FeatureDrafter):
        for item in MISREADINGS:
            yield setup.trial(item.mistake, item.cure, drafter=misread(setup.drafter, item))


def _other_files(setup: Setup) -> Iterator[Trial]:
    """The further heads or draft models."""
    for name in setup.others:
        yield setup.trial(f"the server has loaded {name}", "load the files that you give", options={"model": name})


def _other_prompts(setup: Setup) -> Iterator[Trial]:
    """The target, and with it the drafter, read other prompts: begin of sequence, chat template, system prompt."""
    tokenizer = setup.target.loaded.tokenizer
    if tokenizer is None:
        return
    recorded = setup.recorded or setup.responses
    prompts = [list(response.prompt) for response in recorded]
    tried = [prompts]
    for mistake, cure, change in _prompt_changes(tokenizer, prompts):
        changed = [change(prompt) for prompt in prompts]
        if all(changed) and changed not in tried:
            tried.append(changed)
            responses = [replace(r, prompt=p, log_p=None) for r, p in zip(recorded, changed, strict=True)]
            yield setup.trial(mistake, cure, responses=setup.continued(responses, setup.target))


#: Mistakes in files and options, and all that a server may do wrong.
OF_FILES: tuple[Reading, ...] = (_greedy_as_configured, _published_mistakes)
READINGS: tuple[Reading, ...] = (
    *OF_FILES,
    _other_temperature,
    _vocabulary,
    _four_bits,
    _masks_and_states,
    _other_files,
    _other_prompts,
)

PromptChange = Callable[[list[int]], list[int]]


def _prompt_changes(tokenizer: Any, prompts: Sequence[list[int]]) -> Iterator[tuple[str, str, PromptChange]]:
    """Yield mistake, cure and change; a change that does not apply to a prompt returns it."""
    bos = tokenizer.bos_token_id
    if bos is not None:
        cure = "let either the template or the tokenizer add it"
        yield "prompts begin with two BOS tokens", cure, lambda prompt: [bos, *prompt] if prompt[0] == bos else prompt
        yield (
            "prompts begin without a BOS token",
            cure,
            lambda prompt: prompt[1:] if prompt[0] == bos and len(prompt) > 2 else prompt,
        )
        yield "prompts begin with a BOS token", cure, lambda prompt: prompt if prompt[0] == bos else [bos, *prompt]
    if not getattr(tokenizer, "chat_template", None):
        return
    cure = "render the prompts with the chat template of the target"
    before, after = _around(tokenizer, [])
    if not before:
        return
    bare_before, bare_after = _around(tokenizer, [{"role": "system", "content": ""}])
    _, open_after = _around(tokenizer, [], open_answer=False)
    first = [bos] if bos is not None and before[:1] == [bos] else []

    def inside(prompt: list[int]) -> list[int] | None:
        """The text in a template of one message."""
        ends = len(prompt) - len(after)
        is_one = len(before) < ends and prompt[: len(before)] == before and prompt[ends:] == after
        return prompt[len(before) : ends] if is_one else None

    def within(left: list[int], right: list[int]) -> PromptChange:
        def change(prompt: list[int]) -> list[int]:
            text = inside(prompt)
            return prompt if text is None else [*left, *text, *right]

        return change

    yield "the chat template is missing", cure, within(first, [])
    yield "the template's beginning of an answer is missing", cure, within(before, open_after)
    if bare_before:
        yield "the system prompt is empty, not the template's own", cure, within(bare_before, bare_after)
    if all(inside(prompt) is None for prompt in prompts):
        yield "prompts are in the chat template", "send them as plain text", lambda prompt: [*before, *prompt, *after]


def _around(tokenizer: Any, system: list[dict[str, str]], open_answer: bool = True) -> tuple[list[int], list[int]]:
    """Token ids before and after the text of a message; empty if the template does not render it.

    ``open_answer``: with the template's beginning of an answer.
    """
    messages = [*system, {"role": "user", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_answer)
    except Exception:  # a template may refuse a role
        return [], []
    before, _, after = text.partition(_MARK)
    ids_of = partial(tokenizer, add_special_tokens=False)
    return ids_of(before)["input_ids"], ids_of(after)["input_ids"]


def _is_draft_model(setup: Setup) -> bool:
    """True if the drafter is a draft model of transformers with the target's tokenizer."""
    cls, config = setup.drafter
    return (
        setup.heads is None
        and isinstance(getattr(config, "model", None), str)
        and setup.target.loaded.backend == TRANSFORMERS
        and cls.name in ("draft-model", "draft-model-iid")
    )


def _rounded(weight: Tensor) -> Tensor:
    """The matrix rounded to 16 levels in each row."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 7.5
    return ((weight / scale - 0.5).round() + 0.5) * scale


def _quantized(heads: Checkpoint) -> Checkpoint:
    matrices = {k: t for k, t in heads.tensors.items() if t.dim() == 2 and t.is_floating_point()}
    return heads.with_tensors({name: _rounded(tensor) for name, tensor in matrices.items()})


def _quantized_model(model: Any) -> None:
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.copy_(_rounded(weight))


def _shifted_ids(model: Any, by: int) -> None:
    """Rows of the embedding and of the output head in the order of other ids."""
    tables = {id(t): t for t in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    for table in tables.values():
        table.copy_(table.roll(by, 0))
