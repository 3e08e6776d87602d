"""Sampling parameters from ``--temperature``, ``--top-k``, ``--top-p`` and ``--min-p``."""

from __future__ import annotations

from ...contracts.sampling import Sampling


class SamplingOptions(Sampling):
    """``--temperature``, ``--top-k``, ``--top-p`` and ``--min-p``; options of a command that inherits from this."""

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters, with defaults for those not given."""
        return Sampling(**{key: getattr(self, key) for key in self.model_fields_set & Sampling.model_fields.keys()})
