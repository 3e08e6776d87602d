"""Generation of answers and questions by the target, with its chat template."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from crossdraft import CounterRng, LoadedModel, Sampling, UsageError
from crossdraft.models import TargetContext, build_decoder, configured, make_slots, scoring_slots

from .heartbeat import doing

#: Maximum tokens of a generated question.
MOST_INVENTED = 48
#: Placeholder of the user's text in the chat template.
_MARK = "\u2063MARK\u2063"


class Chat:
    """Chat template of the target, applied to questions.

    Args:
        target: the loaded target.
        max_prompt: maximum prompt length in tokens.

    Raises:
        UsageError: the chat template is missing, fails, or exceeds the maximum prompt length.
    """

    def __init__(self, target: LoadedModel, max_prompt: int):
        if getattr(target.tokenizer, "chat_template", None) is None:
            raise UsageError(
                f"{target.name} does not have a chat template, which is needed to generate answers; use a chat model"
            )
        self.target = target
        max_length = target.context_length
        #: Maximum prompt length in tokens, with at least one token left for an answer.
        self.maximum = max_prompt if max_length is None else min(max_prompt, max_length - 1)
        if (shortest := len(self.conversation(""))) >= self.maximum:
            subject = (
                f"--max-prompt {max_prompt}" if self.maximum == max_prompt else f"the context of {max_length} tokens"
            )
            raise UsageError(
                f"{subject}: the empty chat template of {target.name} has {shortest} tokens, so questions do not fit; "
                f"set --max-prompt to more than {shortest + 1}"
            )

    def conversation(self, question: str) -> list[int]:
        """Token ids of the chat template with ``question`` and the generation prompt."""
        return self.encode(self._template(question, add_generation_prompt=True))

    def opening(self) -> list[int]:
        """Token ids of the chat template before the user's text; may be empty."""
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
        except Exception as error:  # third-party templates may raise anything
            reason = str(error).partition("\n")[0]
            raise UsageError(f"the chat template of {self.target.name} fails: {reason}") from error


class Writer:
    """Generator of answers and questions by the target.

    Args:
        target: the loaded target.
        batch_size: rows decoded at once.
        max_prompt, max_response: maximum lengths of prompts and answers in tokens.
        seed: of all sampling.

    Raises:
        UsageError: see `Chat`.
    """

    def __init__(self, target: LoadedModel, *, batch_size: int, max_prompt: int, max_response: int, seed: int):
        self.chat = Chat(target, max_prompt)
        self.target, self.seed, self.max_response = target, seed, max_response
        self.batch_size, self._opening = batch_size, self.chat.opening()
        max_length = max(self.chat.maximum + max_response, len(self._opening) + MOST_INVENTED) + 2
        if target.context_length is not None:
            max_length = min(max_length, target.context_length + 2)
        self._lm = scoring_slots(target, batch_size, max_length, make_slots)
        self._length = max_length

    def invent(self, indices: Sequence[int]) -> dict[int, str]:
        """Generate questions, by index; unfinished ones are omitted."""
        if indices and not self._opening:
            raise UsageError(
                f"{self.target.name} cannot generate questions, because its chat template has nothing before the "
                "user's text; give --questions with --invented 0"
            )
        prompts, questions = [self._opening] * len(indices), {}
        for index, answer in self._decode(prompts, indices, 1.0, MOST_INVENTED, 2 * self.seed):
            if answer[-1] in self.target.eos_token_ids:
                text = str(self.target.tokenizer.decode(answer[:-1])).strip()
                if len(text.split()) > 2:
                    questions[index] = text
        return questions

    def answer(
        self, prompts: Sequence[list[int]], indices: Sequence[int], temperature: float
    ) -> Generator[tuple[int, list[int]]]:
        """Yield indices and answers in order of completion."""
        return self._decode(prompts, indices, temperature, self.max_response, 2 * self.seed + 1)

    def _decode(
        self, prompts: Sequence[list[int]], indices: Sequence[int], temperature: float, maximum: int, seed: int
    ) -> Generator[tuple[int, list[int]]]:
        lm, sampling = self._lm, Sampling(temperature=temperature)
        context = TargetContext.of(self.target, lm, sampling, slot=self._length, sequence=self._length)
        decoder = build_decoder(
            context,
            configured("drafters", "none"),
            configured("verifiers", "token"),
            eos=self.target.eos_token_ids,
            max_new_tokens=maximum,
            rng=CounterRng(seed),
        )
        doing(lambda: f"target writes texts: step {decoder.batch_steps} of a batch of {len(prompts)}")
        run: Any = decoder.run(prompts, streams=indices)
        with closing(run) as responses:
            for response in responses:
                yield indices[response.index], response.tokens
