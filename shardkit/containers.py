"""Tensors inside the containers that a module's forward takes and returns, or that a module keeps.

Level 0 of the data flow. Looks into mappings, lists, tuples, namedtuples and dataclasses, nested; everything
else is a leaf. (Sets have no order that ranks could agree on, so tensors in them are not seen.)
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `fn` applied to every tensor; the same object where `fn` changed none of its tensors."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        items, is_changed = [], False
        for item in value:
            items.append(map_tensors(fn, item))
            is_changed |= items[-1] is not item
        if not is_changed:
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        return _map_mapping(fn, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(fn, value)
    return value


def find_tensors(value: object) -> list[Tensor]:
    """Every tensor in `value`."""
    found: list[Tensor] = []
    _find_tensors(value, found)
    return found


def _find_tensors(value: object, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _find_tensors(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _find_tensors(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _find_tensors(getattr(value, field.name, None), found)


class KeptTensors:
    """Tensors with a graph that modules keep as attributes: a loss may start from them.

    Only what may become one is looked at: attributes that held nothing, zero, a float or a tensor at the
    first look, and all of a module that has got new ones since.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._watched: list[tuple[dict[str, object], int, list[str]]] = []  # by module, once looked at

    def find(self) -> list[Tensor]:
        """Those that are there now."""
        if not self._watched:
            self._watched = [_attributes_to_watch(module) for module in self._modules]
        found = []
        for attributes, num_attributes, names in self._watched:
            for name in names if len(attributes) == num_attributes else list(attributes):
                value = attributes.get(name)
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    found.append(value)
        return found


def _attributes_to_watch(module: nn.Module) -> tuple[dict[str, object], int, list[str]]:
    """A module's attributes, how many there are, and the names of those that may become a tensor."""
    attributes = vars(module)
    own = attributes.keys() - _MODULE_ATTRIBUTES
    names = [name for name in own if _may_become_tensor(attributes[name])]
    return attributes, len(attributes), names


def _map_mapping(fn: Callable[[Tensor], Tensor], value: MutableMapping[Any, Any]) -> Any:
    if not value:
        return value
    items = {key: map_tensors(fn, item) for key, item in value.items()}
    if all(items[key] is value[key] for key in items):
        return value
    if type(value) is dict:
        return items
    if dataclasses.is_dataclass(value):  # an output class that is both, as transformers' ModelOutput
        return type(value)(**items)
    mapped = copy.copy(value)  # keeps a subclass and what it carries, as defaultdict's factory
    mapped.update(items)
    return mapped


def _map_dataclass(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A copy, not `dataclasses.replace`: that loses fields with init=False and runs `__post_init__` again."""
    old = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    new = {name: map_tensors(fn, item) for name, item in old.items()}
    changed = {name: item for name, item in new.items() if item is not old[name]}
    if not changed:
        return value
    mapped = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(mapped, name, item)  # also where it is frozen
    return mapped


def _may_become_tensor(value: object) -> bool:
    is_zero = type(value) is int and value == 0
    return value is None or is_zero or isinstance(value, (float, Tensor))


_MODULE_ATTRIBUTES = vars(nn.Module()).keys()
