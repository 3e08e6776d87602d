"""Shared parts of gpu.py: models and prompts, alternating timings, and the recorded numbers.

Random models are Llamas initialized on the device; with ``--tiny`` all models are tiny.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from tabulate import tabulate

from crossdraft.framework.api.build import (
    StrategyLike,
    TargetContext,
    build_decoder,
    configured,
    make_slots,
    slot_length,
)
from crossdraft.framework.bench import memory
from crossdraft.framework.contracts.lm import LM
from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.engine.stopwatch import Stopwatch
from crossdraft.framework.lm.vocab_adapter import fitted
from crossdraft.framework.models.chat import encode
from crossdraft.framework.models.device import pick_device
from crossdraft.framework.models.load import load_model
from crossdraft.framework.recipe.prompts import load_prompts

Ids = list[int]
TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
TINY_VOCAB = 500


class GivenContext(TargetContext):
    """A target context without tokenizer checks, because random draft models have no tokenizer."""

    def load_lm(self, name: str, *, extra_tokens: int = 0, **_: Any) -> LM:
        return fitted(
            make_slots(self.load_model(name), self.batch_size, self.max_length + extra_tokens), self.vocab_size
        )


class Bench:
    """Options, lazily loaded models, and recorded numbers."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = pick_device(args.device)
        #: Recorded numbers: name, value, remark.
        self.found: list[tuple[str, float, str]] = []
        self._copied: float | None = None

    # -- models and prompts ---------------------------------------------------------------------------------

    def random(self, name: str, shape: dict[str, Any], seed: int = 0, attention: str | None = None) -> LoadedModel:
        """A randomly initialized Llama without end-of-sequence tokens."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        if self.args.tiny:
            shape = TINY | {"vocab_size": TINY_VOCAB}
        torch.manual_seed(seed)
        config = LlamaConfig(**shape, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        with torch.device(self.device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
        return LoadedModel(model, None, name, "random weights", "", (), 4096)  # type: ignore[arg-type]

    def smollm2(self) -> LoadedModel:
        if self.args.tiny:
            return self.random("tiny", {})
        return load_model(self.args.model, device=self.device)

    def drafting(self, target: LoadedModel) -> LoadedModel:
        if self.args.tiny:
            return self.random("tiny drafter", {}, seed=1)
        return load_model(self.args.drafter, share_with=target)

    def prompts(self, target: LoadedModel, count: int) -> list[Ids]:
        if target.tokenizer is None:
            most, length = target.model.config.vocab_size, 8 if self.args.tiny else 128
            generator = torch.Generator().manual_seed(0)
            return torch.randint(most, (count, length), generator=generator).tolist()
        results = [encode(target.tokenizer, prompt.turns[:1]) for prompt in load_prompts("builtin")]
        return list(islice(cycle(results), count))

    # -- the sides ------------------------------------------------------------------------------------------

    def decoder(
        self,
        target: LoadedModel,
        small: LoadedModel | None,
        batch_size: int,
        *,
        new: int,
        longest: int,
        gamma: int = 0,
        verifier: StrategyLike = "greedy",
        temperature: float = 0.0,
        timed: bool = False,
        graphs: bool = True,
    ) -> Decoder:
        before = os.environ.get("CROSSDRAFT_CUDA_GRAPHS")
        if not graphs:
            os.environ["CROSSDRAFT_CUDA_GRAPHS"] = "0"
        try:
            drafter = {"name": "draft-model", "model": small.name, "gamma": gamma} if small else "none"
            pair = configured("drafters", drafter), configured("verifiers", verifier)
            sampling, sequence = Sampling(temperature=temperature), longest + new
            slot = slot_length(sequence, [pair[0]], sampling)
            context = GivenContext.of(
                target,
                make_slots(target, batch_size, slot),
                sampling,
                slot=slot,
                sequence=sequence,
                load=lambda name, target: small,
            )
            return build_decoder(
                context,
                *pair,
                eos=target.eos_token_ids,
                max_new_tokens=new,
                stopwatch=Stopwatch(self.device, enabled=timed),
            )
        finally:
            if before is None:
                os.environ.pop("CROSSDRAFT_CUDA_GRAPHS", None)
            else:
                os.environ["CROSSDRAFT_CUDA_GRAPHS"] = before

    def theirs(self, target: LoadedModel, assistant: LoadedModel | None, new: int, prompt: Ids) -> int:
        """Transformers' generate; returns the number of new tokens."""
        ids = torch.tensor([prompt], device=self.device)
        ends = list(target.eos_token_ids) or None
        options: dict[str, Any] = {"assistant_model": assistant.model} if assistant else {}
        out = target.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0] if ends else 0,
            **options,
        )
        return out.shape[1] - len(prompt)

    def seconds(self, run: Callable[[], Any]) -> tuple[float, Any]:
        self.wait()
        start = time.perf_counter()
        out = run()
        self.wait()
        return time.perf_counter() - start, out

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rates(self, sides: dict[str, Callable[[Ids], int]], prompts: Sequence[Ids]) -> dict[str, list[float]]:
        """Tokens per second of each side on each prompt."""
        for _ in range(2):
            for name, run in sides.items():
                for prompt in prompts if name == "ours" else prompts[:1]:
                    run(prompt)
        order, result = list(sides), {name: [] for name in sides}
        for i, prompt in enumerate(prompts):
            turn = i % len(order)
            for name in order[turn:] + order[:turn]:
                used, count = self.seconds(partial(sides[name], prompt))
                result[name].append(count / used)
        return result

    def compare(self, title: str, sides: dict[str, Callable[[Ids], int]], prompts: Sequence[Ids]) -> None:
        """Print a table of the sides, and record the ratio of the last to the first."""
        memory.start(self.device)
        rates = self.rates(sides, prompts)
        base = next(iter(rates.values()))
        rows, ratio = [], 0.0
        for name, own in rates.items():
            ratios = [a / b for a, b in zip(own, base, strict=True)]
            quarter = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
            ratio = quarter[1]
            rows.append([name, statistics.median(own), ratio, f"{quarter[0]:.2f}-{quarter[2]:.2f}"])
        print(f"\n{title} ({len(prompts)} prompts)")
        print(tabulate(rows, ["side", "median tok/s", "median ratio", "middle half"], floatfmt=".2f"))
        self.found.append((f"{title}, ours / transformers", ratio, self.peak()))

    def peak(self) -> str:
        result = memory.peak(self.device)
        return "" if result is None else f"peak memory {result / 1e9:.2f} GB"

    def copied_per_second(self) -> float:
        """Copy bandwidth of the device in bytes per second, reads plus writes."""
        if self._copied is None:
            source = torch.zeros(2**24 if self.args.tiny else 2**30, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            elapsed = [self.seconds(lambda: target.copy_(source))[0] for _ in range(12)]
            self._copied = 2 * source.nbytes / statistics.median(elapsed[2:])
        return self._copied

    def steps(self, decoder: Decoder, prompts: Sequence[Ids]) -> Iterator[int]:
        """Fill all slots and step until a sequence ends; yields the number of steps after each."""
        for row, prompt in enumerate(prompts):
            decoder.start(row, prompt, index=row, stream=row)
        count = 0
        while decoder.occupied == len(prompts):
            decoder.step()
            count += 1
            yield count
        list(decoder.run([]))  # the other slots
