"""Which algorithm a parameter should have: groups with reasons, and no silent choice.

Muon, Shampoo and SOAP are for the matrices inside a network; embeddings, output heads, gains and biases are
AdamW's (Jordan et al., 2024). Sending an embedding to Muon is the most common mistake and no error shows it,
so every parameter needs a rule here, and one without raises. Embeddings are known by their module, or by
their own name where a module keeps them as a bare parameter, as `pos_embed` of shape (1, time, dim): its rows
are added to activations and multiply none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

AlgorithmName = Literal["muon", "shampoo", "soap", "adamw8bit", "adamw"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_OF_MATRICES = ("muon", "shampoo", "soap")  # the algorithms that take three dims for a stack
_POSITIONS = {"pos", "position", "positions", "positional"}
_HEADS = ("head", "lm_head", "output", "classifier", "unembed", "unembedding", "score")


class Routed(NamedTuple):
    """Where a parameter goes, and why."""

    algorithm: AlgorithmName
    reason: str


def route_params(
    model: nn.Module,
    overrides: Mapping[str, AlgorithmName] | None = None,
    *,
    algorithm: AlgorithmName = "muon",
) -> dict[str, Routed]:
    """The algorithm of every trainable parameter with its reason, by fqn; tied ones under their first name.

    Args:
        model: sharded or not, on meta or not.
        overrides: fqns, or beginnings of fqns at a dot, that are yours to decide.
        algorithm: of the matrices.

    Raises:
        ValueError: an unknown algorithm; no rule fits a parameter, or an override fits none.
    """
    overrides = overrides or {}
    if wrong := [name for name in (algorithm, *overrides.values()) if name not in get_args(AlgorithmName)]:
        raise ValueError(f"algorithm: expected one of {get_args(AlgorithmName)}, got {wrong[0]!r}.")
    routed: dict[str, Routed] = {}
    seen: dict[Tensor, str] = {}
    used: set[str] = set()
    shared = {name: param for name, param in model.named_parameters(remove_duplicate=False)}
    embedded = dict.fromkeys(_params_of(model, nn.Embedding, nn.EmbeddingBag))
    head = _head(model, list(embedded))
    for name, param in shared.items():
        if not param.requires_grad or param in seen:
            continue
        seen[param] = name
        chosen = next((key for key in overrides if name == key or name.startswith(f"{key}.")), None)
        if chosen is not None:
            used.add(chosen)
            routed[name] = Routed(overrides[chosen], f"override {chosen!r}")
        elif param in embedded:
            routed[name] = Routed("adamw", "an embedding")
        elif param is head:
            routed[name] = Routed("adamw", "an output head: the only layer shaped as the embedding")
        else:
            routed[name] = _route(model, name, param, algorithm)
    if unused := [key for key in overrides if key not in used]:
        raise ValueError(f"overrides: {unused} name no trainable parameter. Use names of named_parameters().")
    return routed


def split_params(
    model: nn.Module,
    *,
    overrides: Mapping[str, AlgorithmName] | None = None,
    algorithm: AlgorithmName = "muon",
) -> list[dict[str, Any]]:
    """Groups of named parameters, matrices for `algorithm` and the rest for AdamW, for any of the optimizers.

        optimizer = Muon(split_params(model), lr=3e-4)
        optimizer = Shampoo(split_params(model, algorithm="shampoo"), lr=3e-4)

    One-dimensional convolutions have a group of their own, with `flatten=True`: their three dims would be
    taken for a stack. Each group has a key `reasons`: why each of its parameters is there, in order.

    Raises:
        ValueError: as `route_params`.
    """
    routed = route_params(model, overrides, algorithm=algorithm)
    params = dict(model.named_parameters())
    long = {p for p in _params_of(model, *_CONVOLUTIONS) if p.ndim == 3}  # three dims, yet no stack
    groups = []
    for chosen, flatten in product(get_args(AlgorithmName), (None, True)):
        names = [
            name
            for name, route in routed.items()
            if route.algorithm == chosen
            and (params[name] in long and chosen in _OF_MATRICES) is (flatten is True)
        ]
        if names:
            reasons = [routed[name].reason for name in names]
            named = [(name, params[name]) for name in names]
            group = {"params": named, "algorithm": chosen, "reasons": reasons}
            groups.append(group if flatten is None else {**group, "flatten": True})
    return groups


def _params_of(model: nn.Module, *kinds: type[nn.Module]) -> list[nn.Parameter]:
    """The own parameters of modules of these kinds."""
    return [
        param for module in model.modules() if isinstance(module, kinds) for param in module.parameters(False)
    ]


def _head(model: nn.Module, embedded: Sequence[Tensor]) -> Tensor | None:
    """The layer that gives a logit for every row of the largest embedding, whatever it is called."""
    if not embedded:
        return None
    shape = max(embedded, key=lambda param: param.shape[0]).shape
    alike = [param for param in _params_of(model, nn.Linear) if param.shape == shape]
    return alike[0] if len(alike) == 1 else None


def _sides(param: Tensor, *, is_kernel: bool) -> tuple[int, ...]:
    """The rows and columns of a parameter's matrices; a kernel of one pixel is a matrix of its channels.

    A kernel that reads one channel keeps its own sides: where each channel has its own, it is no matrix.
    """
    if is_kernel and param.shape[1] > 1:
        return param.shape[0], param.numel() // param.shape[0]
    return tuple(param.shape[-2:])


def _route(model: nn.Module, name: str, param: Tensor, algorithm: AlgorithmName) -> Routed:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    last = path.rpartition(".")[2].lower()
    if param.ndim < 2 or 1 in _sides(param, is_kernel=isinstance(module, _CONVOLUTIONS)):
        return Routed("adamw", "a vector: a bias, a gain, or a matrix of one row or column")
    if last in _HEADS or leaf in _HEADS:
        return Routed("adamw", "an output head, by its name")
    if "embed" in leaf or _POSITIONS.intersection(leaf.split("_")):
        return Routed("adamw", "an embedding, by its name")
    if isinstance(module, _CONVOLUTIONS):
        return Routed(algorithm, "a convolution, taken as (out, rest)")
    if param.ndim == 2:
        return Routed(algorithm, "a matrix")
    if param.ndim == 3:
        return Routed(algorithm, "a stack of matrices, taken one by one")
    raise ValueError(
        f"param {name!r}: no rule fits a parameter of shape {tuple(param.shape)} in a "
        f"{type(module).__name__}. Say where it goes: overrides={{{name!r}: 'adamw'}}."
    )
