"""Training texts for drafters: answers written by the target itself, since that is what a drafter must predict.

Questions come from prompt files, or the target writes them too: a chat model that is asked to continue from the
bare opening of a user's turn invents one (Z. Xu et al., "Magpie: Alignment Data Synthesis from Scratch by
Prompting Aligned LLMs with Nothing", 2024). Texts are kept as token ids, one JSON object a line, and appended as
they are written, so an interrupted run goes on where it stopped. Finished texts by others can be added; the
target then only scores them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..contracts.errors import UsageError
from ..contracts.models import LoadedModel
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..contracts.training import Text
from ..decoding.build import TargetContext, build_decoder, configured, make_slots

#: Answers asked for at once, for each slot. Slots stand empty while the last ones are written, and a run that is
#: interrupted writes these again.
ANSWERS_A_SLOT = 6
#: Stands where the user's words go when the chat template is cut open.
_MARK = "\u2063MARK\u2063"


class Writer:
    """Lets the target answer questions and invent its own.

    Args:
        target: the loaded target.
        batch_size: rows decoded at once.
        max_prompt, max_response: longest prompt taken and longest answer written, in tokens.
        seed: of all sampling.
    """

    def __init__(self, target: LoadedModel, *, batch_size: int, max_prompt: int, max_response: int, seed: int):
        if getattr(target.tokenizer, "chat_template", None) is None:
            raise UsageError(
                f"{target.name} has no chat template, so it cannot be asked; give finished texts with --texts"
            )
        self.target, self.seed = target, seed
        self.max_prompt, self.max_response = max_prompt, max_response
        room = max(max_prompt, 64) + max_response + 2
        self._lm = make_slots(target, batch_size, room)
        self._length = room

    def conversation(self, question: str) -> list[int]:
        """The chat template around ``question``, opened for an answer, as token ids."""
        text = self._template(question, add_generation_prompt=True)
        return self._encode(text)

    def opening(self) -> list[int]:
        """The chat template up to where a user's words would start, as token ids."""
        return self._encode(self._template(_MARK, add_generation_prompt=False).split(_MARK)[0])

    def invent(self, count: int, round_: int) -> list[str]:
        """About ``count`` questions written by the target; those it did not finish are dropped."""
        prompts = [self.opening()] * count
        answers = self._decode(prompts, 1.0, 48, seed=self.seed * 7919 + 2 * round_)
        ended = [a[:-1] for a in answers if a[-1] in self.target.eos_token_ids]
        texts = [str(self.target.tokenizer.decode(a)).strip() for a in ended]
        return [t for t in texts if len(t.split()) > 2]

    def answer(self, prompts: Sequence[list[int]], temperature: float, round_: int) -> list[list[int]]:
        return self._decode(prompts, temperature, self.max_response, seed=self.seed * 7919 + 2 * round_ + 1)

    def _decode(self, prompts: Sequence[list[int]], temperature: float, most: int, seed: int) -> list[list[int]]:
        lm, sampling = self._lm, Sampling(temperature=temperature)
        context = TargetContext.of(self.target, lm, sampling, slot=self._length, sequence=self._length)
        decoder = build_decoder(
            context,
            configured("drafters", "none"),
            configured("verifiers", "token"),
            eos=self.target.eos_token_ids,
            max_new_tokens=most,
            rng=CounterRng(seed),
        )
        answers: list[list[int]] = [[] for _ in prompts]
        for response in decoder.run(prompts):
            answers[response.index] = response.tokens
        return answers

    def _template(self, question: str, add_generation_prompt: bool) -> str:
        turns = [{"role": "user", "content": question}]
        tokenizer: Any = self.target.tokenizer
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _encode(self, text: str) -> list[int]:
        return self.target.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]


def write(
    path: Path,
    writer: Writer,
    *,
    tokens: int,
    questions: Sequence[str],
    invented: float,
    temperatures: Sequence[float],
) -> list[Text]:
    """Append texts to ``path`` until their responses hold ``tokens`` tokens; returns them all.

    Args:
        questions: given questions, taken in a shuffled order; may be empty.
        invented: share of questions the target invents (1 when ``questions`` is empty).
        temperatures: answers are sampled at these in turn.
    """
    if path.exists():
        _drop_half_line(path)
    texts = read(path) if path.exists() else []
    have = sum(len(t.response) for t in texts)
    order = list(questions)
    random.Random(writer.seed).shuffle(order)
    used = sum(t.source == "given" for t in texts)
    many = ANSWERS_A_SLOT * writer._lm.batch_size
    with (
        tqdm(total=tokens, initial=min(have, tokens), unit="tok", desc="target writes texts") as bar,
        path.open("a") as file,
    ):
        batch = len(texts)
        while have < tokens:
            mine = [("invented", q) for q in writer.invent(round(many * invented / 0.6), batch)] if invented else []
            given = order[used : used + max(many - len(mine), 0)]
            used += len(given)
            if not mine and not given:
                raise UsageError(
                    f"the questions are used up after {have} of {tokens} tokens; give more, or let the target invent"
                )
            asked = [(source, writer.conversation(q)) for source, q in mine + [("given", q) for q in given]]
            asked = [(source, p) for source, p in asked if len(p) <= writer.max_prompt]
            temperature = temperatures[batch % len(temperatures)]
            answers = writer.answer([p for _, p in asked], temperature, batch)
            for (source, prompt), response in zip(asked, answers, strict=True):
                text = Text(prompt, response, source)
                texts.append(text)
                file.write(json.dumps(vars(text)) + "\n")
                have += len(response)
            file.flush()
            batch += 1
            bar.update(min(have, tokens) - bar.n)
    return texts


def read(path: Path) -> list[Text]:
    """Texts from a file this module wrote. Raises UsageError naming file and line."""
    rows = _rows(path)
    try:
        return [Text(row["prompt"], row["response"], row["source"]) for _, row in rows]
    except KeyError as error:
        raise UsageError(f"{path} was not written by crossdraft train: a line lacks {error}") from None


def read_finished(path: Path, target: LoadedModel, max_prompt: int, max_response: int) -> list[Text]:
    """Finished texts by others: JSONL rows with ``prompt`` and ``response``, or ``question`` and ``answer`` (GSM8K).

    GSM8K's calculator notes (``<<3*4=12>>``) are taken out. Longer prompts are left out, longer responses cut.
    """
    writer = Writer(target, batch_size=1, max_prompt=max_prompt, max_response=max_response, seed=0)
    texts = []
    for number, row in _rows(path):
        prompt, response = row.get("prompt", row.get("question")), row.get("response", row.get("answer"))
        if not isinstance(prompt, str) or not isinstance(response, str):
            raise UsageError(f"{path}, line {number}: needs 'prompt' and 'response' (or 'question' and 'answer')")
        ids = writer.conversation(prompt)
        answer = [*writer._encode(re.sub(r"<<.*?>>", "", response)), target.eos_token_ids[0]]
        if len(ids) <= max_prompt:
            texts.append(Text(ids, answer[:max_response], "finished"))
    return texts


def _drop_half_line(path: Path) -> None:
    """Cut what follows the last newline: a run that was killed while it wrote leaves half a line there."""
    whole = path.read_bytes().rfind(b"\n") + 1
    with path.open("r+b") as file:
        file.truncate(whole)


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read texts {path}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append((number, dict(json.loads(line))))
        except (ValueError, TypeError):
            if number == len(lines):  # a run was killed in the middle of a line; that text is written again
                break
            raise UsageError(f"{path}, line {number}: not a JSON object") from None
    return rows


def split(texts: Sequence[Text], held_out: float) -> tuple[list[Text], list[Text]]:
    """Training and held-out texts; a conversation is never in both."""
    count = max(1, round(len(texts) * held_out))
    return list(texts[:-count]), list(texts[-count:])


def pad(texts: Sequence[Text], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``ids [n, L]``, attention mask ``[n, L]`` and ``predicts [n, L]``: the next token is a response's."""
    longest = max(len(t.ids) for t in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    predicts = torch.zeros_like(ids, dtype=torch.bool)
    for i, text in enumerate(texts):
        n = len(text.ids)
        ids[i, :n] = torch.tensor(text.ids)
        mask[i, :n] = 1
        predicts[i, len(text.prompt) - 1 : n - 1] = True
    return ids.to(device), mask.to(device), predicts.to(device)
