"""Training texts for drafters: answers written by the target itself, since that is what a drafter must predict.

Questions come from prompt files, or the target writes them too: a chat model that is asked to continue from the
bare opening of a user's turn invents one (Z. Xu et al., "Magpie: Alignment Data Synthesis from Scratch by
Prompting Aligned LLMs with Nothing", 2024). Finished texts by others can be added; the target then only scores them.

Every text has an index, and all that is random about it (whether its question is given or invented, the question, the
temperature, the answer) follows from the seed and that index. So texts that a killed run left and those that are
written after it are those of a run that nobody disturbed, in the same order, whatever the batch size. Texts that were
written together are also written together again, so that sums are rounded alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..contracts.training import Text
from ..errors import UsageError
from .files import replace_text, writing
from .text_files import drop_half_line, line_of, read
from .writer import MOST_INVENTED, Writer

#: Answers asked for at once, for each slot. Slots stand empty while the last ones are written, and a run that is
#: interrupted writes these again.
ANSWERS_A_SLOT = 6
#: The share of the questions it invents that the target ends in time, roughly.
FINISHED = 0.6
#: After so many questions without a single text the target is not asked for more.
BARREN = 400


class Questions:
    """Which question has which index: a given one, or one that the target invents.

    Args:
        given: in the order that they are taken in.
        invented: share of texts with invented questions; once the given ones are used up it is all of them, if it
            was not none.
        seed: with the index it decides which.
    """

    def __init__(self, given: Sequence[str], invented: float, seed: int):
        self.given, self.invented, self._seed = list(given), invented, seed
        # Of those that are asked for, because some are never finished.
        self._asked = invented / (FINISHED + (1 - FINISHED) * invented)
        self._places: list[int | None] = []
        self._used, self._said = 0, False

    def at(self, index: int) -> str | None:
        """The given question of an index, or None where the target invents one. Raises IndexError after the last."""
        while len(self._places) <= index:
            draw = random.Random(f"{self._seed} {len(self._places)}").random()
            used_up = self._used >= len(self.given)
            if used_up and self.given and self.invented and not self._said:
                self._said = True
                _say(f"all {len(self.given)} questions are in use; the target invents the others")
            if draw < self._asked or (used_up and self.invented):
                self._places.append(None)
            elif used_up:
                raise IndexError(index)
            else:
                self._places.append(self._used)
                self._used += 1
        place = self._places[index]
        return None if place is None else self.given[place]


def write(
    path: Path,
    writer: Writer,
    *,
    tokens: int,
    questions: Sequence[str],
    invented: float,
    temperatures: Sequence[float],
) -> list[Text]:
    """Append texts to ``path`` until their responses hold ``tokens`` tokens; returns those that do.

    What they are made with is kept beside them in ``texts.json``. Without that file, texts that somebody put there are
    returned as they are, if they are enough.

    Args:
        questions: given questions, taken in a shuffled order; may be empty.
        invented: share of questions the target invents (1 when ``questions`` is empty).
        temperatures: answers are sampled at these in turn.

    Raises:
        UsageError: texts of other options, a damaged file, questions that are used up or never fit.
        CrossdraftError: the disk is full; what is whole is kept.
    """
    facts = {
        "target": writer.target.sha256,
        "questions": hashlib.sha256(json.dumps(list(questions)).encode()).hexdigest(),
        "invented": invented,
        "temperatures": list(temperatures),
        "max_prompt": writer.chat.most,
        "max_response": writer.max_response,
        "seed": writer.seed,
    }
    texts, after = _found(path, writer, facts, tokens)
    have = sum(len(text.response) for text in texts)
    if have >= tokens:
        return texts
    plan = Questions(_fitting(writer, questions), invented, writer.seed)
    size = ANSWERS_A_SLOT * writer.batch_size
    start, last = after // size * size, after - 1  # the last index that is a text
    with (
        tqdm(total=tokens, initial=have, unit="tok", desc="target writes texts", disable=None) as bar,
        writing(path),
        path.open("ab") as file,
    ):
        while have < tokens:
            with closing(_together(writer, plan, range(start, start + size), temperatures)) as made:
                for index, text in made:
                    last = index
                    if index < after:
                        continue  # on disk already
                    file.write(line_of(index, text))
                    file.flush()
                    texts.append(text)
                    have += len(text.response)
                    bar.update(min(have, tokens) - bar.n)
                    if have >= tokens:
                        break
            os.fsync(file.fileno())
            start += size
            if have < tokens:
                _check_goes_on(plan, start, last, have, tokens)
    return texts


def _found(path: Path, writer: Writer, facts: dict[str, Any], tokens: int) -> tuple[list[Text], int]:
    """The texts on disk, no more than are asked for, and the index to go on from; notes what they are made with."""
    side = path.with_suffix(".json")
    texts: list[Text] = []
    indices: list[int] | None = []
    with writing(path):
        if path.exists():
            drop_half_line(path)
        there = path.exists() and path.stat().st_size > 0
    if there:
        vocab_size = writer.target.model.get_output_embeddings().weight.shape[0]
        texts, indices = read(path, vocab_size, writer.target.context_length)
    have = sum(len(text.response) for text in texts)
    if texts and not side.exists():
        if have >= tokens:
            return texts, 0
        raise UsageError(
            f"{path} holds {have} of {tokens} response tokens, and {side.name} is not there to say how to go on with "
            f"them; give --tokens {have}, or another --out"
        )
    if side.exists():
        try:
            made = json.loads(side.read_text(encoding="utf-8"))
            differ = sorted(key for key in facts if made[key] != facts[key])
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{side} is damaged; delete it with {path.name} to start over") from None
        if texts and differ:
            raise UsageError(
                f"{path} was written with other options ({', '.join(differ)}); use them again, or another --out"
            )
    if indices is None:
        raise UsageError(f"{path} was changed: its lines are not in the order of their index; use another --out")
    replace_text(side, json.dumps(facts, indent=1) + "\n")
    have = 0
    for count, text in enumerate(texts):
        if have >= tokens:
            return texts[:count], 0
        have += len(text.response)
    return texts, indices[-1] + 1 if indices else 0


def _together(
    writer: Writer, plan: Questions, indices: Sequence[int], temperatures: Sequence[float]
) -> Generator[tuple[int, Text]]:
    """The texts of ``indices``, in that order; those whose question was not finished or does not fit are left out."""
    asked: dict[int, Text] = {}
    given: dict[int, str | None] = {}
    for index in indices:
        try:
            given[index] = plan.at(index)
        except IndexError:
            break
    invented = writer.invent([index for index, question in given.items() if question is None])
    for index, question in given.items():
        source = "invented" if question is None else "given"
        if (question := question or invented.get(index)) is not None:
            prompt = writer.chat.conversation(question)
            if len(prompt) <= writer.chat.most:
                asked[index] = Text(prompt, [], source)
    waiting, done = list(asked), {}
    for temperature in dict.fromkeys(temperatures):
        part = [i for i in asked if temperatures[i % len(temperatures)] == temperature]
        with closing(writer.answer([asked[i].prompt for i in part], part, temperature)) as answers:
            for index, response in answers:
                done[index] = response
                while waiting and waiting[0] in done:
                    first = waiting.pop(0)
                    yield first, Text(asked[first].prompt, done.pop(first), asked[first].source)


def _fitting(writer: Writer, questions: Sequence[str]) -> list[str]:
    """The given questions in a shuffled order; says which are too long. Raises UsageError if all are."""
    most = writer.chat.most
    sizes = [len(writer.chat.conversation(question)) for question in questions]
    if long := [question for question, size in zip(questions, sizes, strict=True) if size > most]:
        first = f"{long[0][:60]!r}{'...' * (len(long[0]) > 60)}"
        if len(long) == len(questions):
            raise UsageError(
                f"no question fits into --max-prompt {most} tokens: the shortest takes {min(sizes)} with the chat "
                f"template, the first is {first}"
            )
        _say(f"{len(long)} of {len(questions)} questions are longer than {most} tokens and left out; one is {first}")
    order = list(questions)
    random.Random(writer.seed).shuffle(order)
    return order


def _check_goes_on(plan: Questions, start: int, last: int, have: int, tokens: int) -> None:
    """Raise UsageError if there will be no texts from the index ``start`` on."""
    try:
        plan.at(start)
    except IndexError:
        raise UsageError(
            f"the questions are used up after {have} of {tokens} tokens; give more, or let the target invent"
        ) from None
    if start - 1 - last >= BARREN:
        raise UsageError(
            f"none of the last {start - 1 - last} questions became a text, because the target ended none of those it "
            f"invented within {MOST_INVENTED} tokens, or they are longer than --max-prompt; give --questions with "
            "--invented 0"
        )


def _say(message: str) -> None:
    print(f"crossdraft: {message}", file=sys.stderr, flush=True)


def split(texts: Sequence[Text], held_out: float) -> tuple[list[Text], list[Text]]:
    """Training and held-out texts, at least one each; a conversation is never in both."""
    count = min(max(1, round(len(texts) * held_out)), len(texts) - 1)
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
