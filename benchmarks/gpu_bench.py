"""Shared parts of gpu.py: models and prompts, alternating timings, and the report.

Random models are Llamas initialized on the device; with ``--tiny`` all models are tiny.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from tabulate import tabulate
from transformers import __version__ as TRANSFORMERS

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
from crossdraft.framework.lm.vocab_adapter import adapt_vocab
from crossdraft.framework.models.chat import encode
from crossdraft.framework.models.device import pick_device
from crossdraft.framework.models.load import load_model
from crossdraft.framework.recipe.prompts import load_prompts

Ids = list[int]
TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
TINY_VOCAB = 500
LLAMA2_7B = dict(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008, vocab_size=32000
)
SMOLLM2 = dict(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
    tie_word_embeddings=True,
)


class OutOfTime(BaseException):
    """The time of a part is over. Not an Exception, so that nothing in the loop catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after ``seconds``."""

    def expire(*_: Any) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@dataclass
class Table:
    """A table of the report."""

    title: str
    head: list[str]
    rows: list[list[Any]] = field(default_factory=list)

    def markdown(self) -> str:
        return f"{self.title}\n\n" + tabulate(self.rows, self.head, tablefmt="github", floatfmt=".3f")


@dataclass
class Part:
    """A part of the report: ``running``, ``done``, ``out of time`` or the error; seconds; its tables."""

    status: str = "running"
    seconds: float = 0.0
    tables: list[Table] = field(default_factory=list)


class Report:
    """The results as ``report.json`` and ``report.md`` in ``folder``, written after every row.

    Attributes:
        numbers: values with a required bound or of general interest: name, value, remark.
    """

    def __init__(self, folder: Path, heading: str):
        self.folder, self.heading = folder, heading
        self.parts: dict[str, Part] = {}
        self.numbers: list[tuple[str, float, str]] = []
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def part(self, name: str, seconds: float) -> Iterator[None]:
        """Run a part for at most ``seconds``. An error or the limit ends the part only."""
        part = self.parts[name] = Part()
        start = time.monotonic()
        try:
            with time_limit(seconds):
                yield
            part.status = "done"
        except OutOfTime:
            part.status = "out of time"
        except Exception as error:  # the other parts still run
            part.status = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        part.seconds = round(time.monotonic() - start, 1)
        self.write()
        print(f"\n## {self._markdown(name)}", flush=True)

    def table(self, title: str, head: Sequence[str]) -> Table:
        table = Table(title, list(head))
        next(reversed(self.parts.values())).tables.append(table)
        return table

    def add(self, table: Table, *cells: Any) -> None:
        table.rows.append(list(cells))
        self.write()

    def number(self, name: str, value: float, remark: str = "") -> None:
        self.numbers.append((name, value, remark))

    def write(self) -> None:
        data = {
            "heading": self.heading,
            "numbers": self.numbers,
            "parts": {k: asdict(v) for k, v in self.parts.items()},
        }
        (self.folder / "report.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
        sections = [f"# {self.heading}", *(f"## {self._markdown(name)}" for name in self.parts), self.summary()]
        (self.folder / "report.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")

    def _markdown(self, name: str) -> str:
        part = self.parts[name]
        return "\n\n".join([f"{name} ({part.status}, {part.seconds:g} s)", *(t.markdown() for t in part.tables)])

    def summary(self) -> str:
        rows = []
        for name, value, remark in self.numbers:
            bound, limit = BOUNDS.get(name, ("", 0.0))
            reached = value >= limit if bound == "least" else value <= limit
            rows.append(
                [name, value, f"{'reached' if reached else 'MISSED'}: at {bound} {limit:g}" * bool(bound), remark]
            )
        return Table("## Numbers", ["number", "value", "required", ""], rows).markdown()


#: Required values: a "least" is a lower bound, a "most" an upper bound.
BOUNDS: dict[str, tuple[str, float]] = {
    "plain SmolLM2, ours / transformers": ("least", 3.0),
    "plain 7B, share of the memory's limit": ("least", 0.7),
    "assisted, ours / transformers": ("least", 3.0),
    "verify block compiled, share of a step": ("most", 0.02),
    "waits of the host in a step": ("most", 1.0),
}
COMPARED = ["side", "median tok/s", "median ratio", "middle half"]


class GivenContext(TargetContext):
    """A target context without tokenizer checks, because random draft models have no tokenizer."""

    def load_lm(self, name: str, *, extra_tokens: int = 0, **_: Any) -> LM:
        return adapt_vocab(
            make_slots(self.load_model(name), self.batch_size, self.max_length + extra_tokens), self.vocab_size
        )


class Bench:
    """Options, lazily loaded models, and recorded numbers."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = pick_device(args.device)
        cuda = self.device.type == "cuda"
        place = torch.cuda.get_device_name(self.device) if cuda else f"{torch.get_num_threads()} CPU threads"
        remark = ", tiny models: meaningless numbers" if args.tiny else ""
        self.report = Report(args.out, f"torch {torch.__version__}, transformers {TRANSFORMERS}, {place}{remark}")

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

    @cached_property
    def smollm2(self) -> LoadedModel:
        return load_model(self.args.model, device=self.device) if self.args.model else self.random("SmolLM2", SMOLLM2)

    @cached_property
    def small(self) -> LoadedModel:
        """The draft model of `smollm2`; two layers of random weights if that has random weights."""
        if self.args.model:
            return load_model(self.args.drafter, share_with=self.smollm2)
        return self.random("drafter", SMOLLM2 | {"num_hidden_layers": 2}, seed=1)

    @cached_property
    def seven(self) -> LoadedModel:
        return self.random("7B", LLAMA2_7B)

    def prompts(self, target: LoadedModel, count: int) -> list[Ids]:
        if target.tokenizer is None:
            maximum, length = target.model.config.vocab_size, 8 if self.args.tiny else 128
            generator = torch.Generator().manual_seed(0)
            return torch.randint(maximum, (count, length), generator=generator).tolist()
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
        """Report a table of the sides, and the ratio of the last to the first."""
        memory.start(self.device)
        rates = self.rates(sides, prompts)
        base = next(iter(rates.values()))
        table, ratio = self.report.table(f"{title} ({len(prompts)} prompts)", COMPARED), 0.0
        for name, own in rates.items():
            ratios = [a / b for a, b in zip(own, base, strict=True)]
            quarter = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
            ratio = quarter[1]
            self.report.add(table, name, statistics.median(own), ratio, f"{quarter[0]:.2f}-{quarter[2]:.2f}")
        self.report.number(f"{title}, ours / transformers", ratio, self.peak())

    def peak(self) -> str:
        result = memory.peak(self.device)
        return "" if result is None else f"peak memory {result / 1e9:.2f} GB"

    @cached_property
    def copied_per_second(self) -> float:
        """Copy bandwidth of the device in bytes per second, reads plus writes."""
        source = torch.zeros(2**24 if self.args.tiny else 2**30, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        elapsed = [self.seconds(lambda: target.copy_(source))[0] for _ in range(12)]
        return 2 * source.nbytes / statistics.median(elapsed[2:])

    def steps(self, decoder: Decoder, prompts: Sequence[Ids]) -> Iterator[int]:
        """Fill all slots and step until a sequence ends; yields the number of steps after each."""
        for row, prompt in enumerate(prompts):
            decoder.start(row, prompt, index=row, stream=row)
        count = 0
        while decoder.occupied == len(prompts):
            decoder.step()
            count += 1
            yield count
        decoder.abandon()  # the other sequences
