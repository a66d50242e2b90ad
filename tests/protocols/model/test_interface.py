"""Models with several inputs, or with an object as output."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.helpers.errors import raises
from torch import nn

from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.interface import Interface, ModelInput, interface_of_shapes
from fleetune.protocols.model.torch_interface import attach, with_types

SHAPES = {"image": (1, 2, 2), "age": (), "words": (3,), "mask": (3,)}


class FourInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 2), nn.Linear(7, 2)

    def forward(self, image, age, words, mask, *, extra=None):
        assert extra is None
        found = self.embed(words).masked_fill(~mask[..., None], 0).sum(1)
        return self.out(torch.cat([image.flatten(1), age[:, None], found], 1))


class TakesDict(FourInputs):
    def forward(self, batch):
        return super().forward(**batch)


class Offsets(nn.Module):
    """All columns look up one table, as in DeepFM."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 2), nn.Linear(2, 2)
        self.register_buffer("offsets", torch.tensor([0, 10]))

    def forward(self, columns, group):
        return self.out(self.embed(columns + self.offsets + 2 * group[:, None]).mean(1))


def test_whole_numbers_that_are_looked_up_are_no_mask():
    found = with_types("m", Offsets(), interface_of_shapes({"columns": (2,), "group": ()}))
    assert [(one.name, one.type) for one in found.inputs] == [("columns", "int64"), ("group", "int64")]
    assert found.inputs[0].vocabulary == 10


def test_a_given_type_stays():
    interface = interface_of_shapes(SHAPES)
    given = {"mask": "int64"}
    with raises(ModelError, "mask"):
        with_types("m", FourInputs(), interface, given)  # ~mask of whole numbers is no mask
    types = with_types("m", FourInputs(), interface, {"mask": "bool", "age": "float32"})
    assert types == with_types("m", FourInputs(), interface)


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: torch.Tensor


@pytest.mark.parametrize("make", [FourInputs, TakesDict])
def test_a_row_becomes_the_inputs(make):
    module = make()
    interface = with_types("m", module, interface_of_shapes(SHAPES))
    assert [(one.name, one.type, one.vocabulary) for one in interface.inputs] == [
        ("age", "float32", None),
        ("image", "float32", None),
        ("mask", "bool", None),
        ("words", "int64", 7),
    ]
    given = {
        "image": torch.randn(4, 1, 2, 2),
        "age": torch.randn(4),
        "words": torch.randint(7, (4, 3)),
        "mask": torch.rand(4, 3) > 0.5,
    }
    wanted = module(**given) if make is FourInputs else module(given)
    attach("m", module, interface)
    rows = torch.cat([given[one.name].reshape(4, -1).float() for one in interface.inputs], 1)
    assert torch.equal(module(rows), wanted)
    assert list(dict(module.named_parameters())) == ["embed.weight", "out.weight", "out.bias"]


@pytest.mark.parametrize(
    ("output", "returned"),
    [
        ("", lambda logits: logits),
        ("", lambda logits: {"loss": logits.mean(), "logits": logits}),
        ("", lambda logits: Answer(logits, logits + 1)),
        ("hidden", lambda logits: Answer(logits - 1, logits)),
        ("1", lambda logits: (logits - 1, logits)),
    ],
)
def test_the_logits_are_found_in_the_output(output, returned):
    class Returns(nn.Linear):
        def forward(self, x):
            return returned(super().forward(x))

    module, x = Returns(3, 2), torch.randn(5, 3)
    wanted = nn.functional.linear(x, module.weight, module.bias)
    attach("m", module, Interface(output=output))
    assert torch.equal(module(x), wanted)


def test_an_output_without_logits_names_its_entries():
    class Returns(nn.Linear):
        def forward(self, x):
            return {"a": super().forward(x), "b": 1}

    module = Returns(3, 2)
    attach("m", module, Interface())
    with raises(ModelError, "dict with a", "'logits'", "model.output"):
        module(torch.zeros(1, 3))


def test_inputs_that_forward_does_not_take_are_named():
    with raises(ModelError, "age, size", "image, age, words, mask"):
        with_types("m", FourInputs(), interface_of_shapes({"age": (), "size": ()}))


def test_a_model_that_no_type_suits_is_refused_by_its_first_failure():
    with raises(ModelError, "float32, bool or int64"):
        with_types("m", FourInputs(), interface_of_shapes(SHAPES | {"image": (1, 3, 3)}))


INTERFACE = Interface((ModelInput("ids", (2,), "int64", 5), ModelInput("mask", (1,), "bool")))


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ((0, 4, 1), None),
        ((0, 5, 1), "ids has 5"),
        ((-1, 0, 0), "ids has -1"),
        ((0.5, 0, 0), "fractions"),
        ((0, 0, 2), "mask"),
    ],
)
def test_rows_are_checked_against_types_and_vocabulary(row, named):
    problem = INTERFACE.problem(np.array([row], np.float32))
    assert problem is None if named is None else named in problem


def test_any_numbers_become_valid_rows():
    rows = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    valid = INTERFACE.valid(rows)
    assert INTERFACE.problem(valid) is None
    assert len(np.unique(valid[:, 0])) == 5
