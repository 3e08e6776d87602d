"""Measurements on a GPU that may end at any time: every row is written when it is done, and a rerun resumes.

    timeout 540 python benchmarks/gpu.py [--parts passes strategies ...] [--out gpu-report]
    python benchmarks/gpu.py --device cpu --tiny        # a rehearsal: its numbers mean nothing

Rows go to ``OUT/rows.jsonl``, with the device and the versions, and as tables to ``OUT/report.md``. Rows that are there
are not measured again; one that failed or was not finished is. docs/gpu.md has the order of the parts, what they need
and what to bring back.

    passes      plain passes over one token and a chain of five, with transformers' layers, fused ones
                (CROSSDRAFT_FUSED_LAYERS=1) and FlexAttention: time, share of the memory's bandwidth, kernels a layer
    decoding    transformers' generate against plain decoding, B = 1
    strategies  plain, prompt lookup, and two drafters (a draft model, EAGLE-3) with three verifiers each: tokens per
                second, kernels a layer of the target's pass, launches and waits of a step, share outside of the passes
    cost        cost curves, as files that ``crossdraft cost`` and ``advise`` read

Models have random weights in the shapes of SmolLM2-135M, Qwen2.5-1.5B, Llama 3 8B and OLMoE-1B-7B, and prompts are
random: drafts are accepted by chance, so `strategies` shows times of steps, not speed-ups.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import loop_overhead
import torch
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile, supported_activities
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers import __version__ as TRANSFORMERS

from crossdraft import LoadedModel, Sampling
from crossdraft.framework.bench import memory
from crossdraft.framework.cli.cost.pass_timing import measure_curve
from crossdraft.framework.lm.architectures import FLEX, FLEX_DEVICES
from crossdraft.framework.lm.layer_surgery import own_modules
from crossdraft.heads import Eagle3Head, make_config
from crossdraft.models import Decoder, make_slots, pair_decoder, pick_device

Ids = list[int]
#: Of models with random weights, whose ids have no text.
TOKENIZER: Any = SimpleNamespace(get_vocab=dict)
#: What a part yields: the key of a row, and the function that measures it.
Rows = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]


def _shape(kind: str, hidden: int, layers: int, heads: int, shared: int, inner: int, vocab: int, **more: Any) -> Any:
    return {
        **{"model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads},
        **{"num_key_value_heads": shared, "intermediate_size": inner, "vocab_size": vocab, **more},
    }


SHAPES = {
    "SmolLM2": _shape("llama", 576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True),
    "1.5B": _shape("qwen2", 1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True),
    "8B": _shape("llama", 4096, 32, 32, 8, 14336, 128256),
    "experts": _shape("olmoe", 2048, 16, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8),
}
TINY = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 48, "vocab_size": 500, "num_experts": 4, "num_experts_per_tok": 2}
#: Drafters and the verifiers of each, in `strategies`.
PAIRS = [("none", "token"), ("prompt-lookup", "token")]
PAIRS += list(product(("draft-model", "eagle3"), ("token", "block", "sample-match")))
REPEATS, WARM_UP, STEPS = 5, 2, 16
#: Functions of the CUDA runtime and driver that launch work.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


class Report:
    """Rows in ``rows.jsonl`` and ``report.md`` of ``folder``, written one by one.

    Args:
        heading: device and versions, a part of every row.
    """

    def __init__(self, folder: Path, heading: str):
        self.folder, self.heading = folder, heading
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "rows.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        self.rows = [json.loads(line) for line in lines if line.endswith("\n")]  # not one cut off by a kill
        self._path = path

    def has(self, part: str, key: dict[str, Any]) -> bool:
        return any((row["part"], row["key"]) == (part, key) and "error" not in row for row in self.rows)

    def add(self, part: str, key: dict[str, Any], **values: Any) -> None:
        self.rows = [row for row in self.rows if (row["part"], row["key"]) != (part, key)]
        self.rows.append({"part": part, "key": key, "on": self.heading, **values})
        staged = self._path.with_suffix(".new")
        staged.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        staged.replace(self._path)
        (self.folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        sections = ["# crossdraft on a GPU"]
        for part, heading in dict.fromkeys((row["part"], row["on"]) for row in self.rows):
            rows = [row for row in self.rows if (row["part"], row["on"]) == (part, heading)]
            flat = [{**row["key"], **row.get("values", {}), "error": row.get("error", "")} for row in rows]
            columns = [
                c for c in dict.fromkeys(c for row in flat for c in row) if any(row.get(c, "") != "" for row in flat)
            ]
            table = [[row.get(column) for column in columns] for row in flat]
            sections += [f"## {part}\n\n{heading}", tabulate(table, columns, tablefmt="github", floatfmt=".3f")]
        return "\n\n".join(sections) + "\n"


class Bench:
    """Options, models (one of a size at a time), and what all parts measure with."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, pick_device(args.device)
        self.cuda = self.device.type == "cuda"
        self.new, self.length = (12, 8) if args.tiny else (args.max_new_tokens, 128)
        self._models: dict[str, LoadedModel] = {}

    @property
    def heading(self) -> str:
        place = torch.cuda.get_device_name(self.device) if self.cuda else f"{torch.get_num_threads()} CPU threads"
        tiny = ", tiny models: the numbers mean nothing" if self.args.tiny else ""
        return f"torch {torch.__version__}, transformers {TRANSFORMERS}, {place}{tiny}"

    def model(self, name: str, **changes: Any) -> LoadedModel:
        """A model of random weights without end-of-sequence tokens; frees those of other shapes."""
        key = name + repr(changes)
        if key not in self._models:
            self._models = {k: m for k, m in self._models.items() if k.startswith(name) or "draft" in name}
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()
            shape = SHAPES[name.partition(" ")[0]] | changes | (TINY if self.args.tiny else {})
            attention = shape.pop("attention", None)
            config = CONFIG_MAPPING[shape.pop("model_type")](**shape, max_position_embeddings=4096)
            config.bos_token_id = config.eos_token_id = config.pad_token_id = None
            torch.manual_seed(0)
            dtype = torch.bfloat16 if self.cuda else torch.float32
            with torch.device(self.device):
                model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
            self._models[key] = LoadedModel(model, TOKENIZER, name, "random weights", "", (), 4096)
        return self._models[key]

    def prompts(self, target: LoadedModel, count: int) -> list[Ids]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(target.model.config.vocab_size, (count, self.length), generator=generator).tolist()

    def head(self, target: LoadedModel) -> str:
        """Directory of a random EAGLE-3 head for ``target``."""
        path, config = self.args.out / f"head-{target.name}", target.model.config
        if not path.exists():
            names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
            own = make_config(**{name: getattr(config, name) for name in names}, num_hidden_layers=1)
            embedding: Any = torch.empty(config.vocab_size, config.hidden_size, device="meta")
            ids = torch.arange(min(32000, config.vocab_size))
            Eagle3Head(own, embedding, 3 * config.hidden_size, target_ids=ids).bfloat16().save(path)
        return str(path)

    def decoder(self, target: LoadedModel, size: int, drafter: str, verifier: str) -> Decoder:
        """A decoder of ``size`` rows, with a clock, for `prompts`."""
        options = {} if drafter == "none" else {"gamma": self.args.gamma}
        if drafter in ("draft-model", "eagle3"):
            options["model"] = "draft" if drafter == "draft-model" else self.head(target)
        return pair_decoder(
            target,
            {"name": drafter, **options},
            verifier,
            self.length + self.new,
            sampling=Sampling(temperature=1.0),
            batch_size=size,
            max_new_tokens=self.new,
            load=lambda *_: self.model("SmolLM2 draft", vocab_size=target.model.config.vocab_size),
        )

    def seconds(self, run: Callable[[], Any]) -> float:
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def median(self, run: Callable[[], Any]) -> float:
        """Median seconds of ``run`` after a warm-up, which records its graphs."""
        return statistics.median([self.seconds(run) for _ in range(WARM_UP + REPEATS)][WARM_UP:])

    def profiled(self, run: Callable[[], Any]) -> tuple[int | None, int | None]:
        """Kernels that ran and launches by the host during ``run``; None where PyTorch does not count them."""
        if ProfilerActivity.CUDA not in supported_activities():
            run()
            return None, None
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
            self.wait()
        events = profiler.events() or []
        on_device = [event.name for event in events if str(event.device_type).endswith("CUDA")]
        kernels = sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)
        return kernels, sum(event.name.startswith(LAUNCHES) for event in events)

    def waits(self, run: Callable[[], Any]) -> int:
        """Number of times that the host waited for the device during ``run``."""
        if not self.cuda:
            run()
            return 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in caught)

    @cached_property
    def copied_per_second(self) -> float:
        """Copy bandwidth of the device in bytes per second, reads plus writes."""
        source = torch.zeros(2**24 if self.args.tiny else 2**30, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.median(lambda: target.copy_(source))

    def one_pass(self, target: LoadedModel, size: int, width: int) -> dict[str, Any]:
        """A pass over ``width`` tokens in each of ``size`` rows: time, share of the bandwidth, kernels a layer."""
        lm = make_slots(target, size, self.length + 64)
        lm.lengths[:] = [self.length] * size
        tokens = torch.ones(size, width, dtype=torch.long, device=self.device)

        def run() -> None:
            lm.forward(tokens)
            lm.commit([0] * size)

        seconds = self.median(run)
        kernels, _ = self.profiled(run)
        layers, limit = target.model.config.num_hidden_layers, weights_read(target.model) / self.copied_per_second
        per_layer = None if kernels is None else kernels / layers
        return {"ms": 1e3 * seconds, "share of bandwidth": limit / seconds, "kernels a layer": per_layer}


def weights_read(model: Any) -> int:
    """Bytes of weights that a pass over one token reads: all of them, but only one row of an untied embedding.

    Of experts, those that a token is routed to.
    """
    tensors = {p.data_ptr(): (name, p) for name, p in model.named_parameters()}
    embedding = model.get_input_embeddings().weight
    if embedding.data_ptr() != model.get_output_embeddings().weight.data_ptr():
        tensors.pop(embedding.data_ptr())
    config = model.config
    used = getattr(config, "num_experts_per_tok", 1) / (getattr(config, "num_experts", 0) or 1)
    return round(sum(p.nbytes * (used if ".experts." in name else 1) for name, p in tensors.values()))


# -- parts ----------------------------------------------------------------------------------------------------


def passes(bench: Bench) -> Rows:
    kinds: dict[str, dict[str, Any]] = {"transformers": {}, "fused": {}}
    if bench.device.type in FLEX_DEVICES:
        kinds["flex"] = {"attention": FLEX}

    def run(name: str, kind: str, size: int, width: int) -> dict[str, Any]:
        target = bench.model(name, **kinds[kind])
        modules = own_modules(target.model)
        own = LoadedModel(modules, None, name, "", "", (), 4096)  # type: ignore[arg-type]
        with patch.dict(os.environ, CROSSDRAFT_FUSED_LAYERS="1" if kind == "fused" else "0"):
            return bench.one_pass(own, size, width)

    for name, kind, size, width in product(bench.args.models, kinds, bench.args.batch, (1, 5)):
        if kind == "fused" and (importlib.util.find_spec("liger_kernel") is None or not bench.cuda):
            continue
        key = {"model": name, "layers": kind, "B": size, "W": width}
        yield key, partial(run, name, kind, size, width)


def decoding(bench: Bench) -> Rows:
    def run(name: str) -> dict[str, Any]:
        target = bench.model(name)
        (prompt,) = bench.prompts(target, 1)
        ids = torch.tensor([prompt], device=bench.device)
        options = {"max_new_tokens": bench.new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        decoder = bench.decoder(target, 1, "none", "token")
        theirs, ours = [], []
        for _ in range(WARM_UP + REPEATS):  # alternately
            mask = torch.ones_like(ids)
            theirs.append(bench.seconds(lambda: target.model.generate(ids, attention_mask=mask, **options)))  # type: ignore[operator] # noqa: B023
            ours.append(bench.seconds(lambda: list(decoder.run([prompt]))))
        rates = [bench.new / statistics.median(times[WARM_UP:]) for times in (theirs, ours)]
        return {"transformers tok/s": rates[0], "ours tok/s": rates[1], "ratio": rates[1] / rates[0]}

    for name in bench.args.models:
        yield {"model": name}, partial(run, name)


def strategies(bench: Bench) -> Rows:
    def run(name: str, size: int, drafter: str, verifier: str) -> dict[str, Any]:
        target = bench.model(name)
        prompts = bench.prompts(target, size)
        decoder = bench.decoder(target, size, drafter, verifier)
        memory.start(bench.device)
        responses: list[Any] = []
        seconds = bench.median(lambda: responses.extend(decoder.run(prompts)))
        tokens = sum(len(r.tokens) for r in responses) / sum(len(r.steps) for r in responses)
        peak = memory.peak(bench.device)
        waits = in_a_step(decoder, prompts, bench.waits)
        kernels, launched = in_a_step(decoder, prompts, bench.profiled)
        shares = loop_overhead.measure(decoder, prompts, 3 if bench.args.tiny else STEPS)
        width = 1 if drafter == "none" else bench.args.gamma + 1
        return {
            **{"tok/s": size * bench.new / seconds, "tokens a step": tokens, "ms a step": shares["ms"]},
            **{
                f"% {part}": shares[part]
                for part in ("target pass", "draft pass", "draft", "verify", "rest", "outside")
            },
            "kernels a layer": bench.one_pass(target, size, width)["kernels a layer"],
            "kernels a step": kernels,
            **{"launches a step": launched, "waits a step": waits, "peak GB": peak and peak / 1e9},
        }

    for name, size, (drafter, verifier) in product(bench.args.models, bench.args.batch, PAIRS):
        key = {"model": name, "B": size, "drafter": drafter, "verifier": verifier}
        yield key, partial(run, name, size, drafter, verifier)


def in_a_step(decoder: Decoder, prompts: list[Ids], measure: Callable[[Callable[[], Any]], Any]) -> Any:
    """``measure(step)`` of a step with all slots occupied, the second after the prompts."""
    try:
        for row, prompt in enumerate(prompts):
            decoder.start(row, prompt, index=row, stream=row)
        decoder.step()
        return measure(decoder.step)
    finally:
        decoder.abandon()


def cost(bench: Bench) -> Rows:
    axes = {"batch_sizes": [1, 2], "contexts": [16]} if bench.args.tiny else {"contexts": [128, 512]}
    axes = {"batch_sizes": bench.args.batch} | axes

    def run(name: str, file: str) -> dict[str, Any]:
        curve = measure_curve(
            bench.model(name), widths=[1, 2, 3, 5, 9][: 4 if bench.args.tiny else 5], repeats=REPEATS, **axes
        )
        (bench.args.out / file).write_text(json.dumps(curve.to_json(), indent=1), encoding="utf-8")
        context = curve.contexts[0]
        points = product(curve.batch_sizes, curve.widths)
        return {f"B = {b}, W = {w}": 1e3 * curve.seconds(b, w, context) for b, w in points}

    for name in bench.args.models:
        file = f"cost-{name}.json"
        yield {"model": name, "file": file}, partial(run, name, file)


#: Parts in the order of their importance.
PARTS: dict[str, Callable[[Bench], Rows]] = {part.__name__: part for part in (passes, strategies, cost, decoding)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="use tiny random models and prompts")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=4, help="draft length")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the rows and the cost curves")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    report = Report(args.out, bench.heading)
    complete = run_parts(bench, report, {name: PARTS[name] for name in args.parts})
    print(f"{report.markdown()}\n{args.out / 'report.md'}; " + ("complete" if complete else "run the command again"))


def run_parts(bench: Any, report: Report, parts: dict[str, Callable[[Any], Rows]]) -> bool:
    """Measure the rows that the report lacks; False if some failed."""
    complete = True
    for part, rows in parts.items():
        for key, measure in rows(bench):
            if report.has(part, key):
                continue
            print(f"{part} {' '.join(map(str, key.values()))}", flush=True)
            start = time.monotonic()
            try:
                values = measure()
                report.add(part, key, values=values, seconds=round(time.monotonic() - start, 1))
            except Exception as error:  # the other rows still run
                complete = False
                line = str(error).strip().partition("\n")[0][:300]
                report.add(part, key, error=f"{type(error).__name__}: {line}")
    return complete


if __name__ == "__main__":
    main()
