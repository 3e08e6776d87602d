"""Detection rate of crossdraft diagnose on real heads with one deliberate mistake each.

    python benchmarks/diagnose_check.py [--responses 4] [--max-new-tokens 24] [--dtype float32]

Copies the EAGLE-3 and Medusa heads of the SmolLM2 pack, damages each copy, and runs ``crossdraft diagnose`` on it.
Prints for each the first diagnosis, block efficiency as configured and with the mistake undone, and the gain with its
95 % interval over prompts. If it does not report a mistake, it either costs too little compared with the
undamaged heads (see `CLEAR`), or was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from crossdraft_advisor.diagnosis.trials import CLEAR
from safetensors.torch import load_file, save_file
from tabulate import tabulate

from crossdraft.framework.cli import main as cli
from crossdraft.framework.models.resolve import resolve

TARGET = "smollm2-135m-instruct"
Damage = Callable[[Path], None]


@dataclass(frozen=True)
class Mistake:
    """A deliberate mistake in the heads or options of a drafter.

    Attributes:
        description: description of the mistake.
        expected: prefix of the diagnosis; "" = no diagnosis expected.
        drafter: name of the drafter.
        damage: modifies a copy of the heads.
        options: options of the drafter.
    """

    description: str
    expected: str
    drafter: str
    damage: Damage = field(default=lambda path: None)
    options: dict[str, Any] = field(default_factory=dict)


def config(**keys: Any) -> Damage:
    return lambda path: _rewrite(path / "config.json", lambda result: result | keys)


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(path: Path) -> None:
        (file,) = path.glob("*.safetensors")
        result = load_file(file)
        change(result)
        save_file({key: tensor.contiguous() for key, tensor in result.items()}, file)

    return damage


def mistakes() -> Iterator[Mistake]:
    """Mistakes in heads that can be made without training."""
    yield Mistake("none", "", "eagle3")
    for by in (1, -1):
        layers = [2 + by, 15 + by, 27 + by]
        yield Mistake(f"layers {layers}", "ids of hidden layers are off by one", "eagle3", options={"layers": layers})
    order = [15, 2, 27]
    yield Mistake(f"layers {order}", "the inputs of fc are permuted", "eagle3", options={"layers": order})
    yield Mistake("ids in d2t", "d2t holds the target's ids", "eagle3", tensors(_ids_for_offsets))
    for base in (10_000.0, 1_000_000.0):
        yield Mistake(f"rotary base {base:g}", "the rotary base is 100000", "eagle3", config(rope_theta=base))
    after = "the residual of the first layer is taken before"
    yield Mistake("residual after the norm", after, "eagle3", config(norm_before_residual=True))
    fed = "the output before its norm is fed back"
    yield Mistake("the normed output is fed back", fed, "eagle3", config(norm_output=True))
    yield Mistake("the output is not normed", fed, "eagle3", config(norm_output=False))
    yield Mistake("a norm before fc", "features are not normed before fc", "eagle3", tensors(_norm_more))
    yield Mistake("another embedding", "the heads were trained with the target's", "eagle3", tensors(_embedding))
    yield Mistake("another checkpoint", "the heads were trained for other weights", "eagle3", _other_digest)
    yield Mistake("greedy drafts", "drafts are greedy", "eagle3", options={"temperature": 0})
    yield Mistake("none", "", "medusa")
    yield Mistake("heads off by one", "the first head predicts the target", "medusa", _one_head_more)
    yield Mistake("greedy drafts", "drafts are greedy", "medusa", options={"temperature": 0})


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")


def _ids_for_offsets(weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"] += torch.arange(len(weights["d2t"]))


def _norm_more(weights: dict[str, torch.Tensor]) -> None:
    weights["input_norm.weight"] = torch.ones(weights["fc.weight"].shape[1], dtype=weights["fc.weight"].dtype)


def _embedding(weights: dict[str, torch.Tensor]) -> None:
    """Add a random embedding with the norm of the target's."""
    drawn = torch.randn(49_152, weights["fc.weight"].shape[0], generator=torch.Generator().manual_seed(0))
    weights["embed_tokens.weight"] = (0.1 * drawn).to(weights["fc.weight"].dtype)


def _other_digest(path: Path) -> None:
    _rewrite(path / "training.json", lambda result: result | {"target_sha256": "0" * 64})


def _one_head_more(path: Path) -> None:
    """Insert a first head that is the identity, so that it predicts the same token as the target."""

    def change(result: dict[str, torch.Tensor]) -> None:
        old = {key: result.pop(key) for key in list(result)}
        for key, tensor in old.items():
            head, rest = key.split(".", 1)
            result[f"{int(head) + 1}.{rest}"] = tensor
            if head == "0":
                result[key] = torch.zeros_like(tensor)

    tensors(change)(path)
    _rewrite(path / "config.json", lambda result: result | {"medusa_num_heads": result["medusa_num_heads"] + 1})


def examined(mistake: Mistake, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Report of ``crossdraft diagnose``."""
    name = {"eagle3": "smollm2-eagle3", "medusa": "smollm2-medusa"}[mistake.drafter]
    path = directory / "heads"
    shutil.copytree(resolve(name, heads=True).path, path)
    try:
        mistake.damage(path)
        drafter = json.dumps({"name": mistake.drafter, "model": str(path), **mistake.options})
        arguments = ["diagnose", "--target", TARGET, "--drafter", drafter, "--json", "--dtype", args.dtype]
        arguments += ["--prompts", args.prompts, "--responses", str(args.responses), "--gamma", str(args.gamma)]
        arguments += ["--max-new-tokens", str(args.max_new_tokens)]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if cli.main(arguments):
                raise SystemExit(f"diagnose failed on: {mistake.description}")
        return json.loads(out.getvalue())
    finally:
        shutil.rmtree(path)


def line(mistake: Mistake, report: dict[str, Any], sound: float) -> list[str]:
    """Row of the table; ``sound``: block efficiency of the undamaged heads."""
    base, likely = report["tried"][0], report["likely"]
    names = [item["mistake"] for item in likely]
    if mistake.description == "another checkpoint":
        fact = next((fact for fact in report["facts"] if fact.startswith(mistake.expected)), "")
        output, verdict, first = fact or "nothing", "named" if fact else "missed", None
    else:
        first = likely[0] if likely else None
        output = first["mistake"] if first else "nothing"
        place = next(
            (i for i, name in enumerate(names) if mistake.expected and name.startswith(mistake.expected)), None
        )
        if not mistake.expected:
            verdict = "right" if not names else "false alarm"
        else:
            costs = sound - base.get("block_efficiency", 1.0) > CLEAR * (base.get("block_efficiency", 1.0) - 1)
            missed = "missed" if costs else "costs too little"
            verdict = missed if place is None else "named" if place == 0 else f"named as number {place + 1}"
    before = f"{base['block_efficiency']:.2f}" if "block_efficiency" in base else "does not draft"
    after, gain = "", ""
    if first is not None:
        after = f"{first['block_efficiency']:.2f}"
        if "gain" in first:
            gain = f"{first['gain']:+.2f}"
            if first["gain_low"] is not None:
                gain += f" [{first['gain_low']:+.2f}, {first['gain_high']:+.2f}]"
    return [mistake.drafter, mistake.description, output[:70], before, after, gain, verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="builtin")
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--dtype", default="float32", help="float32: no lower precision is suspected (float32)")
    args = parser.parse_args()
    rows, sound = [], 0.0
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        for mistake in mistakes():
            result = examined(mistake, Path(directory), args)
            if not mistake.expected:
                sound = result["tried"][0]["block_efficiency"]
            rows.append(line(mistake, result, sound))
            print(f"{time.perf_counter() - start:5.0f} s", *rows[-1], sep="  ", file=sys.stderr, flush=True)
    heads = ["heads", "mistake", "named first", "BE as it is", "undone", "gain [95 %]", ""]
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
