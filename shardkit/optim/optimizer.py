"""`ShardedOptimizer`: torch's Optimizer around the algorithms and the teams.

It owns what torch's surface dictates: parameter groups, state by parameter, closures, hooks. A step asks
which parameters have gradients, does the elementwise parts, then each team's pieces. Groups choose their
algorithm by the key `algorithm`, so one object can hold all parameters of a model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.optim.algorithm import Algorithm, Group, PieceAlgorithm, Target
from shardkit.optim.blocks import Dealer
from shardkit.optim.loading import (
    check_saved_settings,
    check_state,
    copy_state,
    plain_settings,
    read_settings,
)
from shardkit.optim.placed import check_contiguous, local, local_grad, placed
from shardkit.optim.planning import Placing
from shardkit.optim.replicas import Replicas
from shardkit.optim.settings import check_settings
from shardkit.optim.teams import Member, OptimizerPlan, Team, agree, make_teams

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
MissingGrads = Literal["symmetric", "agree"]
Planned = tuple[dict[Tensor, Member], Dealer]
DEFAULT_BUCKET_BYTES = 256 << 20


class ShardedOptimizer(Optimizer):
    """Steps parameters in any layout as one process steps them whole.

    Args:
        params: tensors, (name, tensor) pairs as `model.named_parameters()` gives them (errors, plans and
            checkpoints then speak of names), or groups of either.
        algorithm: of groups that name none.
        algorithms: by name.
        settings: of groups that do not say otherwise, beside the algorithm's own defaults. `lr`,
            `weight_decay` and `maximize` hold for groups of other algorithms too.
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
        choices = {"placement": (placing, Placing), "missing_grads": (missing_grads, MissingGrads)}
        for name, (value, known) in choices.items():
            if value not in get_args(known):
                raise ValueError(f"{name}: expected one of {get_args(known)}, got {value!r}.")
        if replicas not in get_args(Replicas) or (replicas == "shared" and placing == "local"):
            raise ValueError(
                f"replicas: expected one of {get_args(Replicas)}, and not 'shared' where every piece stays "
                f"with placement='local'; got {replicas!r}, {placing!r}."
            )
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: expected a whole number of at least 1, got {bucket_bytes!r}.")
        self.algorithm, self.algorithms = algorithm, algorithms
        self.placing, self.bucket_bytes, self.missing_grads = placing, bucket_bytes, missing_grads
        self.replicas = replicas
        self._members: dict[Tensor, Member] = {}
        self._fixed: list[tuple[Group, dict[str, object]]] = []  # settings that a step cannot follow
        self._tried: Planned | None = None  # what a load has found possible, until its groups are there
        self._dealer = Dealer()
        self._teams: tuple[Team, ...] | None = None  # None: to be made
        super().__init__(params, {**algorithms[algorithm].defaults, **settings})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with state for each of its parameters: on meta for those on meta, until they are real.

        Raises:
            TypeError, ValueError: a setting or a parameter does not suit the group's algorithm; the group is
                left out.
        """
        name = param_group.setdefault("algorithm", self.algorithm)
        if name not in self.algorithms:
            raise ValueError(f"algorithm: expected one of {sorted(self.algorithms)}, got {name!r}.")
        own, algorithm = self.defaults, self.algorithms[name]
        if name != self.algorithm:
            shared = {key: own[key] for key in ("lr", "weight_decay", "maximize")}
            self.defaults = {**algorithm.defaults, **shared}
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults = own
        try:
            self._take(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with real state for what is real, and settings as plain values."""
        self._require_fixed()
        self._settle()
        state_dict = super().state_dict()
        groups = [plain_settings(group) for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy what `state_dict` gave into the state that is there, whose dtypes and layouts stay.

        Settings that the saved groups do not have stay as they are; state that was not saved becomes zero.
        Collective over the ranks of state that lies otherwise: all must call.

        Raises:
            ValueError: an algorithm, a setting that its state depends on, or the shape of a state is another
                than this optimizer's, or a parameter is on meta. Nothing has been changed then.
            TypeError: a saved setting is of another kind than it must be; nothing has been changed either.
        """
        own, loaded = self.state, dict[Tensor, Mapping[str, Any]]()

        def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(self._checked_states(given))
            groups = given["param_groups"]
            if len(groups) == len(self.param_groups):
                groups = [read_settings(*pair) for pair in zip(self.param_groups, groups, strict=True)]
                self._tried = self._planned(groups)
            return {"state": {}, "param_groups": groups}

        def put(_: Optimizer) -> None:
            self.state.update(own)
            for param, state in loaded.items():
                copy_state(own[param], state)

        self._require_fixed()
        self._require_real()
        hooks = (  # the last before and the first after, so that hooks of the user see and change all
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        )
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            self._tried = None
            for hook in hooks:
                hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        self._require_fixed()
        self._settle()
        kept = ("algorithm", "algorithms", "placing", "bucket_bytes", "missing_grads", "replicas")
        made_anew: dict[str, object] = {"_members": {}, "_tried": None}
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}, **made_anew}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedOptimizer:
        for param, member in self._members.items():
            if isinstance(param, DTensor) and param.grad is not None:
                raise NotImplementedError(
                    f"param {member.at.name!r}: torch does not copy a DTensor that has a gradient. Call "
                    "zero_grad() before deepcopy."
                )
        memo[id(self)] = twin = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, a pickle or a state dict: the groups are new objects, and the members refer to them."""
        super().__setstate__(state)
        planned, self._dealer = self._tried or self._planned(self.param_groups)
        pairs = [(param, group) for group in self.param_groups for param in group["params"]]
        self._members = {param: replace(planned[param], group=group) for param, group in pairs}
        self._fixed = [(group, self._fixed_settings(group)) for group in self.param_groups]
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

        Raises:
            TypeError, ValueError: a parameter is on meta, a gradient does not suit its parameter, or a group
                has been given a setting that its state or plan cannot follow. Nothing has been stepped then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_fixed()
        self._require_real()
        teams = self._made_teams()
        for team in teams:
            team.prepare(self.bucket_bytes, self.missing_grads)
        targets = self._targets()
        by_algorithm: dict[str, list[Target]] = {}
        for target in targets.values():
            by_algorithm.setdefault(target.group["algorithm"], []).append(target)
        for name, own in by_algorithm.items():
            self.algorithms[name].begin(own)
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

    def _take(self, index: int) -> None:
        """Check a new group and give its parameters their state."""
        dealer = copy.deepcopy(self._dealer)
        members = self._made_members(index, self.param_groups[index], {}, dealer)
        lr = self.param_groups[index]["lr"]
        if not lr >= 0:  # only here: a scheduler that ends a hair below may be saved and loaded
            raise ValueError(f"lr: expected a number >= 0, got {lr}.")
        names = Counter(member.at.name for member in (*self._members.values(), *members.values()))
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"param {twice[0]!r}: two parameters have this name. Give each its own.")
        states = {param: self._new_state(param, member) for param, member in members.items()}
        self._members |= members
        self.state.update(states)
        self._dealer, self._teams = dealer, None
        group = self.param_groups[index]
        self._fixed.append((group, self._fixed_settings(group)))

    def _made_members(
        self, index: int, group: Group, before: Mapping[Tensor, Member], dealer: Dealer
    ) -> dict[Tensor, Member]:
        """The parameters of a group as its settings have them stepped; those in `before` lie as they did."""
        algorithm = self.algorithms[group["algorithm"]]
        check_settings(group, algorithm)
        worker = algorithm if isinstance(algorithm, PieceAlgorithm) else None
        numbers = [f"{i} of group {index}" for i in range(len(group["params"]))]
        members = {}
        for name, param in zip(group.get("param_names") or numbers, group["params"], strict=True):
            at = before[param].at if param in before else placed(name, param)
            pieces = () if worker is None else tuple(worker.pieces(at, group, dealer))
            members[param] = Member(at, group, worker, pieces)
        return members

    def _planned(self, groups: Sequence[Group]) -> Planned:
        """All parameters as the settings of these groups, which may be saved ones, have them stepped."""
        members, dealer = dict[Tensor, Member](), Dealer()
        for index, (own, group) in enumerate(zip(self.param_groups, groups, strict=True)):
            of_group = {**group, "params": own["params"]}
            members |= self._made_members(index, of_group, self._members, dealer)
        return members, dealer

    def _fixed_settings(self, group: Group) -> dict[str, object]:
        """What state and pieces were made by; copies, as a list can be edited in place."""
        algorithm = self.algorithms[group["algorithm"]]
        names = ("algorithm", *algorithm.state_settings, *algorithm.plan_settings)
        return {name: copy.copy(group[name]) for name in names}

    def _require_fixed(self) -> None:
        """Raise ValueError where a group has got another setting than its state and pieces were made by."""
        for index, (group, fixed) in enumerate(self._fixed):
            for name, value in fixed.items():
                if group[name] != value:
                    raise ValueError(
                        f"group {index}: {name} was {value!r} when its state and plan were made, and they do "
                        f"not follow it to {group[name]!r}. Set it back, or build a new optimizer."
                    )

    def _settle(self) -> list[str]:
        """Give real state to parameters that have left meta; returns the names of those still on it."""
        on_meta = [param for param, member in self._members.items() if member.at.device.type == "meta"]
        late = [param for param in on_meta if not param.is_meta]
        for param in late:
            member = self._members[param]
            member = replace(member, at=replace(member.at, device=local(param).device))
            self._members[param], self.state[param] = member, self._new_state(param, member)
        if late:
            self._teams = None
        return [self._members[param].at.name for param in on_meta if param.is_meta]

    def _new_state(self, param: Tensor, member: Member) -> dict[str, Tensor]:
        algorithm = self.algorithms[member.group["algorithm"]]
        return algorithm.init_state(member.at, param, member.group, member.pieces)

    def _require_real(self) -> None:
        if on_meta := self._settle():
            raise ValueError(
                f"param {on_meta[0]!r} is on meta, as are {len(on_meta)} of {len(self._members)}. "
                "Materialise the model first; if that was done by to_empty, which puts new parameters in the "
                "place of plain ones, build the optimizer after it."
            )

    def _checked_states(self, given: Mapping[str, Any]) -> dict[Tensor, Mapping[str, Any]]:
        """The states of a state dict by parameter."""
        for index, (own, saved) in enumerate(zip(self.param_groups, given["param_groups"], strict=False)):
            check_saved_settings(index, own, saved, self.algorithms[own["algorithm"]].state_settings)
        ids = [saved_id for group in given["param_groups"] for saved_id in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        pairs = zip(ids, params, strict=False)  # torch says which numbers differ
        states = {param: given["state"].get(saved_id, {}) for saved_id, param in pairs}
        for param, state in states.items():
            check_state(self._members[param].at.name, state, self.state[param])
        return states

    def _made_teams(self) -> tuple[Team, ...]:
        if self._teams is None:
            self._teams = make_teams(list(self._members.values()), self.placing, self.replicas)
        return self._teams

    def _targets(self) -> dict[str, Target]:
        """What is stepped, by name: the parameters with a gradient, or with one on another rank."""
        have_grad = {m.at.name: param.grad is not None for param, m in self._members.items()}
        if self.missing_grads == "agree":
            have_grad = agree(self._members.values(), have_grad)
        return {
            member.at.name: self._target(param, member)
            for param, member in self._members.items()
            if have_grad[member.at.name]
        }

    def _target(self, param: Tensor, member: Member) -> Target:
        own, group = local(param), member.group
        check_contiguous(member.at.name, own)  # `.to(memory_format=..)` may have come after the optimizer
        state = {key: local(value) for key, value in self.state[param].items()}
        added_to = self.algorithms[group["algorithm"]].adds_grads_to
        dtype = None if added_to is None else state[added_to].dtype
        if param.grad is None:
            grad = torch.zeros_like(own, dtype=dtype)
        else:
            grad = local_grad(member.at.name, param, dtype)
        return Target(member.at, own, grad.neg() if group["maximize"] else grad, state, group)
