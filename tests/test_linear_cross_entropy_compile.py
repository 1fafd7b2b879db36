"""linear_cross_entropy under torch.compile and torch.export, and the op that these see."""

from __future__ import annotations

import pytest
import torch

from memkern.functional import linear_cross_entropy
from tests.peak import peak_bytes
from tests.test_cross_entropy import classes_of, random
from tests.test_linear_cross_entropy import CLASSES, FEATURES, ROWS, arguments, weighted


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("compiler", ("eager", "aot_eager"))
def test_compile_fullgraph(backend, device, compiler, reduction) -> None:
    torch._dynamo.reset()
    tensors, target = arguments(torch.float32, device)

    def f(hidden, weight, bias):
        return weighted(linear_cross_entropy(2 * hidden, weight, target, bias, reduction=reduction, chunk_tokens=5))

    expected = torch.autograd.grad(f(*tensors), tensors)
    loss = torch.compile(f, fullgraph=True, backend=compiler)(*tensors)
    torch.testing.assert_close(loss, f(*tensors))
    torch.testing.assert_close(torch.autograd.grad(loss, tensors, retain_graph=True), expected)
    torch.testing.assert_close(torch.autograd.grad(loss, tensors), expected)


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_any_number_of_tokens_is_one_graph(backend, device, reduction) -> None:
    """Two at most: PyTorch takes the first number for a constant, and the second one not."""
    torch._dynamo.reset()
    graphs = []
    weight = random(CLASSES, FEATURES, seed=1).to(device).requires_grad_()

    def f(hidden, target):
        return linear_cross_entropy(2 * hidden, weight, target, reduction=reduction, chunk_tokens=5).square().sum()

    compiled = torch.compile(f, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    for tokens in range(3, 13):
        hidden = random(tokens, FEATURES).to(device).requires_grad_()
        target = classes_of(tokens, CLASSES).to(device)
        loss, expected = compiled(hidden, target), f(hidden, target)
        torch.testing.assert_close(loss, expected)
        gradients = (torch.autograd.grad(x, (hidden, weight)) for x in (loss, expected))
        torch.testing.assert_close(*gradients)
    assert len(graphs) <= 2


@pytest.mark.parametrize("strict", (False, True))
def test_export(backend, device, strict) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(random(CLASSES, FEATURES, seed=1))

        def forward(self, hidden, target):
            return linear_cross_entropy(hidden, self.weight, target, chunk_tokens=5)

    model, tokens = Model().to(device), torch.export.Dim.DYNAMIC
    given = [(random(n, FEATURES).to(device), classes_of(n, CLASSES).to(device)) for n in (8, 4, 21)]
    program = torch.export.export(model, given[0], dynamic_shapes=({0: tokens}, {0: tokens}), strict=strict)
    for pair in given:
        torch.testing.assert_close(program.module()(*pair), model(*pair))


def test_opcheck(backend, device) -> None:
    """The op that a compiler sees; backends differ inside it."""
    tensors, target = arguments(torch.float32, device)
    (hidden, weight, bias), dloss = (t.detach() for t in tensors), torch.ones(ROWS, device=device)
    op, options = torch.ops.memkern.linear_cross_entropy, (5, torch.float32, -100, 0.1, 0.01, 3.0, backend)
    _, lse, *_ = op(None, None, hidden, weight, bias, target, None, (False,) * 3, *options)
    for saved, needs in ((None, (True, True, False)), (lse, (False, True, True))):
        torch.library.opcheck(op, (dloss, saved, hidden, weight, bias, target, None, needs, *options))


def test_compiled_it_holds_no_more_memory() -> None:
    weight = (0.02 * random(4096, 64, seed=1)).requires_grad_()
    hidden, target = random(2048, 64).requires_grad_(), classes_of(2048, 4096)

    def f(hidden, weight):
        return linear_cross_entropy(hidden, weight, target, chunk_tokens=64)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    compiled(hidden, weight).backward()
    peaks = []
    for function in (f, compiled):
        hidden.grad = weight.grad = None
        peaks.append(peak_bytes(lambda function=function: function(hidden, weight).backward()))
    assert peaks[1] <= 1.01 * peaks[0] < 0.2 * 4 * 2048 * 4096
