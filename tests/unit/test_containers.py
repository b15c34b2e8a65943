"""Tensors are found and mapped in every container that a forward takes or returns."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from shardkit.containers import find_tensors, map_tensors

Pair = namedtuple("Pair", "first second")


class Batch(dict[str, Tensor]):
    """A dict that carries an attribute."""

    size = 0


@dataclass
class Output:
    """Counts how often it was made, and has a field that is filled later."""

    logits: Tensor
    cache: Tensor | None = field(init=False, default=None)
    num_made: int = 0

    def __post_init__(self) -> None:
        self.num_made += 1


@dataclass(frozen=True, slots=True)
class Frozen:
    """Cannot be assigned to."""

    logits: Tensor


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"a": [x, (x, None)], "b": 3},
        lambda x: OrderedDict(a=x),
        lambda x: UserDict(a=x, b="name"),
        lambda x: Pair(x, {"deep": x}),
        Frozen,
    ],
)
def test_every_tensor_that_is_found_is_mapped(make) -> None:
    value = make(torch.ones(1))
    mapped = map_tensors(double, value)
    assert type(mapped) is type(value)
    assert [tensor.item() for tensor in find_tensors(mapped)] == [2.0] * len(find_tensors(value))
    assert all(tensor.item() == 1 for tensor in find_tensors(value)), "the caller's own object has changed"


def test_unchanged_containers_stay_the_same_objects() -> None:
    value = {"a": [torch.ones(1)], "b": Output(torch.ones(1))}
    assert map_tensors(lambda tensor: tensor, value) is value


def test_a_dataclass_keeps_fields_that_its_constructor_does_not_take() -> None:
    value = Output(torch.ones(1))
    value.cache = torch.ones(1)
    mapped = map_tensors(double, value)
    assert mapped.cache.item() == 2
    assert mapped.num_made == 1


def test_a_dict_subclass_keeps_its_class_and_attributes() -> None:
    value = Batch(a=torch.ones(1))
    value.size = 7
    mapped = map_tensors(double, value)
    assert isinstance(mapped, Batch)
    assert mapped.size == 7
    counts = defaultdict(list, a=torch.ones(1))
    assert map_tensors(double, counts).default_factory is list


def test_tensors_in_a_read_only_mapping_are_found() -> None:
    assert len(find_tensors(MappingProxyType({"a": torch.ones(1)}))) == 1
