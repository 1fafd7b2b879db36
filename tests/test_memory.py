"""memkern.memory against byte counts worked out by hand."""

import pytest
import torch
import torch.nn.functional as F

import memkern
from memkern.memory import optimizer_bytes, saved_for_backward

N = 1000


def saved_by(function, x, exclude=()):
    with saved_for_backward(exclude) as saved:
        y = function(x)
    assert y is not None  # the graph is alive while its bytes are counted
    return saved


@pytest.mark.parametrize("gelu", [F.gelu, memkern.functional.gelu, memkern.nn.GELU("tanh")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gelu_saves_its_input_only(gelu, dtype):
    x = torch.randn(N, dtype=dtype, requires_grad=True)
    saved = saved_by(gelu, x)
    assert (saved.bytes, saved.storages) == (N * dtype.itemsize, 1)


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda x: x + 1, 0),
        (lambda x: x**2, 1),
        (lambda x: x * x, 1),  # saved twice, one storage
        (lambda x: x.exp(), 1),  # saves its output
        (lambda x: x.exp() * x.sin(), 3),  # x, exp(x), sin(x)
        (lambda x: x[:2] ** 2, 1),  # a view keeps the whole of x
        (lambda x: (x * 2).view(2, -1).t().sin().sum(), 1),
    ],
)
def test_counts_each_storage_once(function, tensors):
    saved = saved_by(function, torch.randn(N, requires_grad=True))
    assert (saved.bytes, saved.storages) == (tensors * N * 4, tensors)


def test_counts_storages_that_died_inside_the_block():
    x = torch.randn(N, requires_grad=True)
    with saved_for_backward() as saved:
        for _ in range(3):
            x.exp()  # the output, which is what is saved, is freed or reused at once
    assert (saved.bytes, saved.storages) == (3 * N * 4, 3)


def test_leaves_out_parameters_and_their_views():
    linear = torch.nn.Linear(20, 30)
    x = torch.randn(50, 20, requires_grad=True)
    assert saved_by(linear, x).bytes == (50 * 20 + 30 * 20) * 4
    assert saved_by(linear, x, exclude=linear.parameters()).bytes == 50 * 20 * 4


def test_counts_the_copy_of_a_parameter_that_autocast_makes():
    linear = torch.nn.Linear(20, 30)
    x = torch.randn(50, 20, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert saved_by(linear, x, exclude=linear.parameters()).bytes == (50 * 20 + 30 * 20) * 2


def test_nothing_without_grad():
    with torch.no_grad():
        assert saved_by(torch.exp, torch.randn(N, requires_grad=True)).bytes == 0
    assert saved_by(torch.exp, torch.randn(N)).bytes == 0


def test_counts_on_the_meta_device():
    saved = saved_by(lambda x: x.exp() * x.sin(), torch.empty(N, device="meta", requires_grad=True))
    assert (saved.bytes, saved.storages) == (3 * N * 4, 3)


def test_gradients_do_not_change():
    x = torch.randn(N, dtype=torch.float64, requires_grad=True)
    with saved_for_backward():
        y = (x**3).sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(dx, 3 * x**2)
    torch.testing.assert_close(ddx, 6 * x)


def test_exclude_must_hold_tensors():
    with pytest.raises(TypeError, match="exclude: got an item of type str"), saved_for_backward(["weight"]):
        pass


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.SGD(p), 0),
        (lambda p: torch.optim.SGD(p, momentum=0.9), 4 * 650),
        (lambda p: torch.optim.AdamW(p), 8 * 650 + 2 * 4),  # and one fp32 step count a tensor
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 12 * 650 + 2 * 4),
    ],
)
def test_optimizer_bytes(make, expected):
    linear = torch.nn.Linear(25, 25)
    optimizer = make(linear.parameters())
    assert optimizer_bytes(optimizer) == 0
    linear(torch.randn(2, 25)).sum().backward()
    optimizer.step()
    assert optimizer_bytes(optimizer) == expected


def test_optimizer_bytes_of_nested_and_shared_state():
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([p])
    flat = torch.zeros(100, dtype=torch.bfloat16)
    optimizer.state[p] = {"history": [torch.zeros(3), (torch.zeros(2),)], "m": flat[:50], "v": flat[50:], "step": 1}
    assert optimizer_bytes(optimizer) == 3 * 4 + 2 * 4 + 100 * 2


def test_optimizer_bytes_needs_an_optimizer():
    with pytest.raises(TypeError, match=r"optimizer: got Linear, needs a torch\.optim\.Optimizer"):
        optimizer_bytes(torch.nn.Linear(1, 1))
