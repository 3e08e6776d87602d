"""Kinds of draft: what a verifier may assume about the nodes of a draft.

A drafter declares the kind of its drafts in `DraftTraits.kind`, a verifier the capabilities it relies on in
`VerifierTraits.accepts`. A new kind is a `DraftKind` object with capabilities listed here, or with new ones that its
verifier accepts; it needs no registration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: No node has two children.
SINGLE_CHILD = "single-child"
#: The draft is one or more independently drawn sequences.
INDEPENDENT_SEQUENCES = "independent-sequences"
#: One drawn sequence, the trunk, which independently drawn sequences continue, see `Draft.trunk`.
DELAYED_SEQUENCES = "delayed-sequences"
#: Siblings were drawn in order, each from its own row of ``q``: its distribution given earlier siblings.
CONDITIONAL_SIBLINGS = "conditional-siblings"
#: Every sibling was sampled from the distribution without the tokens of earlier siblings, renormalised.
SAMPLED_SIBLINGS = "sampled-siblings"
#: All siblings but the last are point masses; the last was sampled from the rest.
ONE_SAMPLED_SIBLING = "one-sampled-sibling"
#: Every node is a point mass.
POINT_MASSES = "point-masses"
#: Capabilities that a verifier of arbitrary trees accepts; each built-in kind has one of them.
ANY_TREE = frozenset({INDEPENDENT_SEQUENCES, DELAYED_SEQUENCES, CONDITIONAL_SIBLINGS})


@dataclass(frozen=True)
class DraftKind:
    """Structure of a draft.

    Attributes:
        name: in messages, lists and options.
        capabilities: properties that a verifier may assume.
        merged_sequences: the draft is K sequences merged into a tree, see `Draft.sequences`.
        is_chain: every node is the child of the one before it.
    """

    name: str
    capabilities: frozenset[str]
    merged_sequences: bool = False
    is_chain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_chain", SINGLE_CHILD in self.capabilities)  # read several times a step

    def __str__(self) -> str:
        return self.name


#: One token after the other.
CHAIN = DraftKind("chain", frozenset({SINGLE_CHILD, INDEPENDENT_SEQUENCES, CONDITIONAL_SIBLINGS, ONE_SAMPLED_SIBLING}))
#: K sequences drawn independently from one model; equal prefixes are one node.
IID = DraftKind("iid", frozenset({INDEPENDENT_SEQUENCES}), merged_sequences=True)
#: K such sequences after a common one.
DELAYED_IID = DraftKind("delayed_iid", frozenset({DELAYED_SEQUENCES}), merged_sequences=True)
#: Siblings sampled without replacement.
WITHOUT_REPLACEMENT = DraftKind("without_replacement", frozenset({CONDITIONAL_SIBLINGS, SAMPLED_SIBLINGS}))
#: Siblings are the most probable tokens, except the last, which is sampled from the rest (Hu et al. 2025).
GREEDY_DRAFT = DraftKind("greedy_draft", frozenset({CONDITIONAL_SIBLINGS, ONE_SAMPLED_SIBLING}))
#: No randomness was used.
DETERMINISTIC = DraftKind("deterministic", frozenset({CONDITIONAL_SIBLINGS, POINT_MASSES}))

#: The built-in kinds by name.
DRAFT_KINDS = {kind.name: kind for kind in (CHAIN, IID, DELAYED_IID, WITHOUT_REPLACEMENT, GREEDY_DRAFT, DETERMINISTIC)}
