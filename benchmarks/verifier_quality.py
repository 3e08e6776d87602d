"""Expected number of tokens accepted by each verifier, exact by enumeration on small models.

    python benchmarks/verifier_quality.py [--out docs/img]

First E[tau] on the toy G1 (V = 3, gamma = 2) with drafters between the target and G1's drafter, which draw from
(1 - lambda) M_b + lambda M_s. Then Pr(tau >= i), the distribution of the accepted length, on the toy
T0 with longer drafts (compare figure 3 of Z. Sun et al., "Block Verification Accelerates Speculative Decoding",
ICLR 2025). Prints both tables; with ``--out`` (and matplotlib) also draws them.
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from pathlib import Path
from typing import Any

from tabulate import tabulate

from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import Certificate, certify
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.certificate.toys import built_in_toys

#: One sequence, two i.i.d. ones, two siblings at the root: label, draft, verifier, its config.
PANELS: dict[str, list[tuple[str, str, str, dict[str, Any]]]] = {
    "one sequence, or two drawn independently": [
        ("token (one sequence)", "chain", "token", {}),
        ("block (one sequence)", "chain", "block", {}),
        ("greedy-block (one sequence, mean of 3 steps)", "chain", "greedy-block", {}),
        ("sample-match", "iid-2", "sample-match", {}),
        ("specinfer", "iid-2", "specinfer", {}),
        ("spectr", "iid-2", "spectr", {}),
        ("traversal", "iid-2", "traversal", {}),
        ("multipath-block", "iid-2", "multipath-block", {}),
        ("multipath-block, recycle: false", "iid-2", "multipath-block", {"recycle": False}),
    ],
    "a tree: two children of the root, one chain below each": [
        ("sample-match", "tree-wor-2-1", "sample-match", {}),
        ("specinfer", "tree-wor-2-1", "specinfer", {}),
        ("traversal", "tree-wor-2-1", "traversal", {}),
        ("greedy-draft-optimal (greedy)", "tree-greedy-2-1", "greedy-draft-optimal", {}),
        ("traversal (greedy)", "tree-greedy-2-1", "traversal", {}),
    ],
}
CHAIN_RULES = ("token", "block", "greedy-block")
#: The Okabe-Ito colours, distinguishable with any colour vision; the same in both figures.
LOOKS = {
    "token": ("#000000", "o"),
    "block": ("#0072B2", "s"),
    "greedy-block": ("#7B4B2A", "<"),
    "sample-match": ("#999999", "v"),
    "specinfer": ("#E69F00", "^"),
    "spectr": ("#CC79A7", "D"),
    "traversal": ("#009E73", "P"),
    "multipath-block": ("#D55E00", "X"),
    "greedy-draft-optimal": ("#56B4E9", "d"),
}


def enumerate_(toy: Toy, draft: str, verifier: str, config: dict[str, Any], gamma: int, steps: int = 1) -> Certificate:
    rule = plugins.get("verifiers", verifier)
    make = lambda: rule(rule.Config(**config))  # noqa: E731
    certificate = certify(toy, DRAFTS[draft].build, make, steps=steps, gamma=gamma, markov=True)
    # Greedy block verification is lossless only together with the following steps, which certify completes.
    assert certificate.lossless, f"{verifier} on {draft}: TV {certificate.tv}"
    return certificate


def mixture(toy: Toy, share: float) -> Toy:
    """The toy with a mixed drafter: ``share`` of its own, the rest the target."""
    return Toy(toy.name, toy.gamma, toy.target, (1 - share) * toy.target + share * toy.drafter)


def mean_tau(toy: Toy, draft: str, verifier: str, config: dict[str, Any]) -> float:
    """E[tau] of a step; for greedy block verification, which modifies later steps, the mean of three."""
    rule = plugins.get("verifiers", verifier)
    steps = 3 if rule.traits(rule.Config(**config)).stateful else 1
    result = enumerate_(toy, draft, verifier, config, toy.gamma, steps)
    return sum(result.expected_tau) / steps


def by_agreement(toy: Toy, shares: list[float]) -> dict[str, list[tuple[str, list[float]]]]:
    """E[tau] by panel and label, for each share."""
    return {
        panel: [
            (label, [mean_tau(mixture(toy, share), draft, rule, config) for share in shares])
            for label, draft, rule, config in lines
        ]
        for panel, lines in PANELS.items()
    }


def survival(toy: Toy, gamma: int) -> dict[str, list[float]]:
    """Pr(tau >= i) for i = 0 .. gamma in the first step."""
    return {
        rule: list(accumulate(reversed(enumerate_(toy, "chain", rule, {}, gamma).first_tau)))[::-1]
        for rule in CHAIN_RULES
    }


def look(label: str) -> dict[str, Any]:
    colour, marker = LOOKS[label.split()[0].rstrip(",")]
    dashed = "(greedy)" in label or "false" in label
    return dict(color=colour, marker=marker, linestyle="--" if dashed else "-", markersize=5, linewidth=1.6)


def draw_agreement(by_panel: dict[str, list[tuple[str, list[float]]]], shares: list[float], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 6.4), sharey=True, layout="constrained")
    for axis, (panel, lines) in zip(axes, by_panel.items(), strict=True):
        for label, values in lines:
            axis.plot(shares, values, label=label, markevery=2, **look(label))
        axis.set(title=panel, xlabel="λ: drafter = (1 − λ) target + λ own", xlim=(-0.02, 1.02))
        axis.title.set_size(11)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
    axes[0].set_ylabel("E[τ], accepted tokens of 2")
    figure.savefig(path, dpi=130)


def draw_survival(by_rule: dict[str, list[float]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for rule, values in by_rule.items():
        axis.plot(range(len(values)), values, label=rule, **look(rule))
    axis.set(xlabel="i, draft tokens", ylabel="Pr(τ ≥ i)", ylim=(0, 1.02), xlim=(-0.15, len(values) - 0.85))
    axis.grid(alpha=0.25)
    axis.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact acceptance of every verifier on small models.")
    parser.add_argument("--out", type=Path, help="directory for the two figures (needs matplotlib)")
    parser.add_argument("--gamma", type=int, default=8, help="draft length of the second table")
    args = parser.parse_args()
    toys = {toy.name: toy for toy in built_in_toys()}
    shares = [i / 20 for i in range(21)]
    result = by_agreement(toys["G1"], shares)
    shown = [0, 2, 5, 10, 15, 20]
    print("E[tau] on G1, gamma 2, drafter (1 - lambda) M_b + lambda M_s")
    for panel, lines in result.items():
        rows = [[label, *(values[i] for i in shown)] for label, values in lines]
        print(tabulate(rows, [panel, *(f"lambda {shares[i]:g}" for i in shown)], floatfmt=".4f"), end="\n\n")
    lengths = survival(toys["T0"], args.gamma)
    print(f"Pr(tau >= i) on T0, gamma {args.gamma}, first step")
    rows = [[rule, *values[1:], sum(values[1:])] for rule, values in lengths.items()]
    print(tabulate(rows, ["i", *range(1, args.gamma + 1), "E[tau]"], floatfmt=".4f"))
    if args.out:
        import matplotlib

        matplotlib.use("Agg")
        args.out.mkdir(parents=True, exist_ok=True)
        draw_agreement(result, shares, args.out / "verifier_quality.png")
        draw_survival(lengths, args.out / "acceptance_ccdf.png")


if __name__ == "__main__":
    main()
