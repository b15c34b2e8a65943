"""What shardkit raises beyond Python's own exceptions.

Level 0 of the data flow. A caller's mistake is a `ValueError` or `TypeError`, a limit of the library is a
`NotImplementedError`; the classes here are for facts that a program may want to catch by type. Every message
names the parameter or unit, states the fact, and ends with the remedy: "param 'layers.0.wq.weight': expected
X, got Y. Do Z."
"""

from __future__ import annotations


class PaddingError(ValueError):
    """A required block makes a bucket's padding pass its budget."""


class PlanMismatchError(RuntimeError):
    """Ranks of one group planned different layouts, so their collectives would mix different parameters."""


class CollectiveTimeoutError(RuntimeError):
    """A peer did not take part in a unit's collective in time."""


class UnevenUseError(RuntimeError):
    """Some ranks used a parameter in backward and others did not."""


class GatheredParamError(RuntimeError):
    """Something would change a gathered parameter, whose value is thrown away at the next reshard."""
