"""`ShardedOptimizer`: torch's Optimizer around the algorithms and the teams.

It owns what torch's surface dictates: parameter groups, state by parameter, closures, hooks. A step has four
lines: which parameters have gradients, the elementwise parts, then each team's pieces. Groups choose their
algorithm by the key `algorithm`, so one object can hold all parameters of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardkit.optim.algorithm import Algorithm, Group, PieceAlgorithm, Target
from shardkit.optim.placed import local, local_grad, placed
from shardkit.optim.planning import Placing
from shardkit.optim.replicas import Replicas
from shardkit.optim.teams import Member, OptimizerPlan, Team, make_teams

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
MissingGrads = Literal["symmetric", "agree"]
DEFAULT_BUCKET_BYTES = 256 << 20


class ShardedOptimizer(Optimizer):
    """Steps parameters in any layout as one process steps them whole.

    Args:
        params: tensors, (name, tensor) pairs as `model.named_parameters()` gives them (errors, plans and
            checkpoints then speak of names), or groups of either.
        algorithm: of groups that name none.
        algorithms: by name.
        settings: of groups that do not say otherwise, beside the algorithm's own defaults. `lr` and
            `weight_decay` hold for groups of other algorithms too.
        placing: how pieces may be placed: "auto", or one mode for all.
        bucket_bytes: most bytes that a rank sends or receives at once.
        missing_grads: "symmetric" trusts that a parameter without gradient has none on any rank, and skips it
            as torch does; "agree" asks the ranks in every step, and takes zeros where only some have one.
        replicas: of hybrid sharding or data parallelism, whose gradients are equal to the bit: "redundant"
            lets each work on all pieces, "shared" on some of them, with results sent to all; "auto" takes
            what is less for the busiest rank (`replicas.py`), and `plan()` says which.
    """

    def __init__(
        self,
        params: Params,
        *,
        algorithm: str,
        algorithms: Mapping[str, Algorithm],
        settings: Mapping[str, object],
        placing: Placing = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        missing_grads: MissingGrads = "symmetric",
        replicas: Replicas = "auto",
    ) -> None:
        if replicas not in get_args(Replicas) or (replicas == "shared" and placing == "local"):
            raise ValueError(
                f"replicas: expected one of {get_args(Replicas)}, and not 'shared' where every piece stays "
                f"with placement='local'; got {replicas!r}, {placing!r}."
            )
        self.algorithm, self.algorithms = algorithm, algorithms
        self.placing, self.bucket_bytes, self.missing_grads = placing, bucket_bytes, missing_grads
        self.replicas = replicas
        self._members: dict[Tensor, Member] = {}
        self._teams: tuple[Team, ...] | None = None
        super().__init__(params, {**algorithms[algorithm].defaults, **settings})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with state for each of its parameters.

        Raises:
            ValueError: a setting or a parameter does not suit the group's algorithm.
        """
        name = param_group.setdefault("algorithm", self.algorithm)
        if name not in self.algorithms:
            raise ValueError(f"algorithm: expected one of {sorted(self.algorithms)}, got {name!r}.")
        own, algorithm = self.defaults, self.algorithms[name]
        if name != self.algorithm:
            shared = {key: own[key] for key in ("lr", "weight_decay")}
            self.defaults = {**algorithm.defaults, **shared}
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults = own
        self._take(self.param_groups[-1], algorithm)
        self._teams = None

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient.

        Collective over the ranks that cut parameters which need exchange, and over replicas that share: all
        of them must call.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        teams = self._made_teams()
        targets = self._targets(teams)
        for team in teams:
            team.prepare(self.bucket_bytes)
        for algorithm in self.algorithms.values():
            own = [
                target
                for target in targets.values()
                if self.algorithms[target.group["algorithm"]] is algorithm
            ]
            if own:
                algorithm.begin(own)
        for team in teams:
            of_team = {m.at.name: targets[m.at.name] for m in team.members if m.at.name in targets}
            if of_team:
                team.run(of_team)
        return loss

    def plan(self) -> OptimizerPlan:
        """Who works on what in a step, and what travels; `print` it. Nothing is communicated.

        Works on meta parameters too.
        """
        teams = self._made_teams()
        elementwise = [member.at.name for member in self._members.values() if not member.pieces]
        return OptimizerPlan(tuple(team.plan for team in teams), tuple(elementwise))

    def _take(self, group: Group, algorithm: Algorithm) -> None:
        """Check a new group and give its parameters their state."""
        algorithm.check_group(group)
        first = len(self._members)
        names = group.get("param_names") or [str(first + i) for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            at = placed(name, param)
            worker = algorithm if isinstance(algorithm, PieceAlgorithm) else None
            pieces = () if worker is None else tuple(worker.pieces(at, group))
            self._members[param] = Member(at, group, worker, pieces)
            self.state[param] = algorithm.init_state(at, param, group)

    def _made_teams(self) -> tuple[Team, ...]:
        if self._teams is None:
            self._teams = make_teams(list(self._members.values()), self.placing, self.replicas)
        return self._teams

    def _targets(self, teams: Iterable[Team]) -> dict[str, Target]:
        """What is stepped, by name: the parameters with a gradient, or with one on another rank."""
        have_grad = {m.at.name: param.grad is not None for param, m in self._members.items()}
        if self.missing_grads == "agree":
            for team in teams:
                have_grad |= team.agree(have_grad)
        return {
            member.at.name: self._target(param, member)
            for param, member in self._members.items()
            if have_grad[member.at.name]
        }

    def _target(self, param: Tensor, member: Member) -> Target:
        group, name = member.group, member.at.name
        own = local(param)
        grad = torch.zeros_like(own) if param.grad is None else local_grad(name, param)
        state = {key: local(value) for key, value in self.state[param].items()}
        return Target(name, own, grad.neg() if group["maximize"] else grad, state, group)
