"""The target as a writer: it answers questions put into its chat template, and invents questions of its own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from ..api.build import TargetContext, build_decoder, configured, make_slots
from ..contracts.models import LoadedModel
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..errors import UsageError

#: Most tokens of a question that the target invents.
MOST_INVENTED = 48
#: Stands where the user's words go when the chat template is cut open.
_MARK = "\u2063MARK\u2063"


class Chat:
    """The target's chat template, and prompts as token ids.

    Args:
        target: the loaded target.
        max_prompt: longest prompt taken, in tokens.

    Raises:
        UsageError: no chat template, one that cannot be used, or one that is longer than any prompt may be.
    """

    def __init__(self, target: LoadedModel, max_prompt: int):
        if getattr(target.tokenizer, "chat_template", None) is None:
            raise UsageError(
                f"{target.name} has no chat template, so it cannot be asked, and questions cannot be put as it knows "
                "them; take a chat model"
            )
        self.target = target
        room = target.context_length
        #: Longest prompt, in tokens, that leaves room for an answer.
        self.most = max_prompt if room is None else min(max_prompt, room - 1)
        if (shortest := len(self.conversation(""))) >= self.most:
            what = f"--max-prompt {max_prompt}" if self.most == max_prompt else f"the context of {room} tokens"
            raise UsageError(
                f"{what}: the chat template of {target.name} alone takes {shortest} tokens, so no question fits; give "
                f"at least --max-prompt {shortest + 1}, and some more for the question"
            )

    def conversation(self, question: str) -> list[int]:
        """The chat template around ``question``, opened for an answer, as token ids."""
        return self.encode(self._template(question, add_generation_prompt=True))

    def opening(self) -> list[int]:
        """The chat template up to where a user's words would start, as token ids; empty where nothing stands there."""
        opening, mark, _ = self._template(_MARK, add_generation_prompt=False).partition(_MARK)
        return self.encode(opening) if mark else []

    def encode(self, text: str) -> list[int]:
        return list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _template(self, question: str, add_generation_prompt: bool) -> str:
        turns = [{"role": "user", "content": question}]
        try:
            return self.target.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # whatever the template of somebody else's model raises
            reason = str(error).partition("\n")[0]
            raise UsageError(f"the chat template of {self.target.name} cannot be used: {reason}") from error


class Writer:
    """Lets the target answer questions and invent its own.

    Args:
        target: the loaded target.
        batch_size: rows decoded at once.
        max_prompt, max_response: longest prompt taken and longest answer written, in tokens.
        seed: of all sampling.

    Raises:
        UsageError: see `Chat`.
    """

    def __init__(self, target: LoadedModel, *, batch_size: int, max_prompt: int, max_response: int, seed: int):
        self.chat = Chat(target, max_prompt)
        self.target, self.seed, self.max_response = target, seed, max_response
        self.batch_size, self._opening = batch_size, self.chat.opening()
        room = max(self.chat.most + max_response, len(self._opening) + MOST_INVENTED) + 2
        if target.context_length is not None:
            room = min(room, target.context_length + 2)
        self._lm = make_slots(target, batch_size, room)
        self._length = room

    def invent(self, indices: Sequence[int]) -> dict[int, str]:
        """Questions written by the target, by index; those it did not finish are missing."""
        if indices and not self._opening:
            raise UsageError(
                f"{self.target.name} cannot invent questions, because nothing stands before the user's words in its "
                "chat template; give --questions with --invented 0"
            )
        prompts, found = [self._opening] * len(indices), {}
        for index, answer in self._decode(prompts, indices, 1.0, MOST_INVENTED, 2 * self.seed):
            if answer[-1] in self.target.eos_token_ids:
                text = str(self.target.tokenizer.decode(answer[:-1])).strip()
                if len(text.split()) > 2:
                    found[index] = text
        return found

    def answer(
        self, prompts: Sequence[list[int]], indices: Sequence[int], temperature: float
    ) -> Generator[tuple[int, list[int]]]:
        """Indices and answers, as they are finished."""
        return self._decode(prompts, indices, temperature, self.max_response, 2 * self.seed + 1)

    def _decode(
        self, prompts: Sequence[list[int]], indices: Sequence[int], temperature: float, most: int, seed: int
    ) -> Generator[tuple[int, list[int]]]:
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
        run: Any = decoder.run(prompts, streams=indices)
        with closing(run) as responses:
            for response in responses:
                yield indices[response.index], response.tokens
