"""transformers: arguments of ``generate`` for assisted decoding.

https://huggingface.co/docs/transformers: generation_strategies; transformers/generation/candidate_generator.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..engine import Engine, Schedule, Settings
from ..settings import length_remarks, match_remarks, needs_method, needs_model, ngram_sizes


class Transformers(Engine):
    name = "transformers"
    read_from = "transformers 5.24.0"
    methods: ClassVar[Mapping[str, str]] = {
        "draft-model": "assistant_model",
        "prompt-lookup": "prompt_lookup_num_tokens",
    }
    most_sequences = 1

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("model.generate(**inputs)")
        acceptance = schedule.acceptance
        remarks = length_remarks(schedule)
        if needs_method(self, acceptance) == "prompt_lookup_num_tokens":
            n = ngram_sizes(acceptance)["max"]
            text = f"model.generate(**inputs, prompt_lookup_num_tokens={schedule.gamma}, max_matching_ngram_size={n})"
            return Settings(text, (*remarks, *match_remarks(acceptance, self.name, shortest=True)))
        # The length is read from the assistant's generation_config, whose defaults change it in each step.
        text = (
            f"assistant = AutoModelForCausalLM.from_pretrained({needs_model(self, acceptance)!r})\n"
            f"assistant.generation_config.num_assistant_tokens = {schedule.gamma}\n"
            'assistant.generation_config.num_assistant_tokens_schedule = "constant"\n'
            "assistant.generation_config.assistant_confidence_threshold = 0.0\n"
            "model.generate(**inputs, assistant_model=assistant)"
        )
        return Settings(text, remarks)
