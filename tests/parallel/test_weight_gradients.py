"""Weight gradients of linear layers come after the gradient of the input, and are the same."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.parallel.graph import capture
from polyrhythm.parallel.micro_batches import GradientSums
from polyrhythm.parallel.partition import split
from polyrhythm.parallel.weight_gradients import WeightGradients


class Layers(nn.Module):
    """A shared weight, one without a bias, a frozen one, one that is not used by itself, three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.frozen, self.part = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x))
        x = self.two(self.frozen(x)) + nn.functional.linear(x, 2 * self.part.weight, self.part.bias)
        return self.one(x.view(-1, 2, 6)).flatten(1) @ torch.cat([self.two.weight, self.one.weight])


@pytest.fixture(scope="module")
def model() -> Layers:
    torch.manual_seed(0)
    return Layers().double()


def captured(model: nn.Module, *shape: int) -> tuple[WeightGradients, nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = torch.randn(*(shape or (8, 6)), dtype=next(model.parameters()).dtype)
        graph = capture(model, (example,), {})
    [segment] = split(graph, []).train
    later = WeightGradients()
    later.defer(segment.module)
    return later, segment.module  # type: ignore[return-value]


def test_gradients_are_those_of_autograd_and_only_the_input_s_comes_at_once(model: Layers) -> None:
    later, module = captured(copy.deepcopy(model))
    parameters = [each for each in module.parameters() if each.requires_grad]
    names = {id(each): name for name, each in module.named_parameters()}
    sums = GradientSums(len(parameters))
    batches = [torch.randn(8, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs = []
    for x in batches:
        [output] = module(x)
        gradient, *found = torch.autograd.grad(
            output, [x, *parameters], torch.ones_like(output), allow_unused=True
        )
        inputs.append(gradient)
        known = {names[id(p)] for p, each in zip(parameters, found, strict=True) if each is not None}
        assert known == {
            "one.weight",
            "two.weight",
            "part.weight",
            "part.bias",
        }  # used by other operations too
        for number, each in enumerate(found):
            sums.add(number, each)
        assert later
        later.take().add_to(sums, parameters)
        assert not later
    for x in batches:
        model(x).sum().backward()
    expected = dict(model.named_parameters())
    for parameter, total in zip(parameters, sums.sums, strict=True):
        torch.testing.assert_close(total, expected[names[id(parameter)]].grad, rtol=1e-13, atol=1e-13)
    for x, gradient in zip(batches, inputs, strict=True):
        torch.testing.assert_close(gradient, x.grad, rtol=1e-13, atol=1e-13)
    assert expected["frozen.weight"].grad is None


def test_gradients_of_convolutions_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2, bias=False),
        nn.Flatten(2),
        nn.Conv1d(6, 2, 3, padding=1),
    ).double()
    later, module = captured(copy.deepcopy(model), 5, 3, 9, 9)
    names, parameters = zip(*module.named_parameters(), strict=True)
    sums = GradientSums(len(parameters))
    x = torch.randn(5, 3, 9, 9, dtype=torch.float64, requires_grad=True)
    for number in range(2):
        [output] = module(x + number)
        gradient, *found = torch.autograd.grad(
            output, [x, *parameters], torch.ones_like(output), allow_unused=True
        )
        assert not any(each is not None for each in found)
        later.take().add_to(sums, parameters)
        model(x + number).sum().backward()
        if not number:
            torch.testing.assert_close(gradient, x.grad, rtol=1e-13, atol=1e-13)
    expected = dict(model.named_parameters())
    for name, total in zip(names, sums.sums, strict=True):
        torch.testing.assert_close(total, expected[name].grad, rtol=1e-12, atol=1e-12)


def test_under_autocast_and_without_gradients_layers_run_as_before(model: Layers) -> None:
    model = copy.deepcopy(model).float()
    later, module = captured(model)
    x = torch.randn(8, 6)
    with torch.no_grad():
        assert torch.equal(module(x)[0], model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [output] = module(x)
        assert torch.equal(output, model(x)) and output.dtype == torch.bfloat16
    torch.autograd.grad(output.sum(), [p for p in module.parameters() if p.requires_grad])
    assert not later
