"""What the norms return and save under autocast, and the rule by which they save y."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import memkern
from memkern import memory
from memkern.functional import norm as norms
from tests.norm_cases import HALVES, assert_close, call, check, each_kind, exact_call, parameters, saved_tensors


@each_kind
def test_autocast_keep(backend, device, kind) -> None:
    """The input's dtype comes out, and the input itself is what is saved."""
    x = torch.randn(3, 8, device=device).bfloat16().requires_grad_()
    weight, _ = parameters((8,), torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16), memory.saved_for_backward(exclude=[weight]) as saved:
        (y,) = call(kind, x, None, weight, None, (8,))
    assert y.dtype == torch.bfloat16
    assert saved.bytes == 2 * x.numel() + 3 * (8 if kind == "layer_norm" else 4)


@each_kind
def test_autocast_torch(backend, device, kind) -> None:
    """As PyTorch: on a GPU a float32 output, on the CPU the input's dtype."""
    x = torch.randn(3, 8, device=device).half()
    weight, _ = parameters((8,), torch.float16, device)
    with torch.autocast(device, dtype=torch.float16):
        (y,) = call(kind, x, None, weight, None, (8,), autocast="torch")
        assert y.dtype == getattr(F, kind)(x, (8,), weight).dtype
    assert call(kind, x, None, weight, None, (8,), autocast="torch")[0].dtype == torch.float16  # no autocast here


@each_kind
def test_autocast_torch_where_torch_returns_float32(backend, device, kind, monkeypatch) -> None:
    """What the policy of a GPU does, also where there is none: all to float32 after the addition."""
    monkeypatch.setattr(norms, "torch_dtype", lambda function, x, shape: torch.float32)
    x, residual = torch.randn(2, 3, 8, device=device).half().unbind()
    weight, bias = parameters((8,), torch.float16, device)
    x.requires_grad_()
    y, summed = call(kind, x, residual, weight, bias, (8,), autocast="torch")
    assert torch.equal(summed, x + residual) and y.dtype == torch.float32
    wide = [t.detach().cpu().double() for t in (summed, weight, bias)]
    (exact,) = exact_call(kind, wide[0], None, wide[1], wide[2] if kind == "layer_norm" else None, (8,))
    assert_close(y.detach(), exact, 4)
    y.sum().backward()
    assert x.grad.dtype == torch.float16


def test_a_pre_norm_block_under_autocast_saves_a_third_of_what_torch_does(backend, device) -> None:
    """Under PyTorch's own autocast policy, which on a GPU is layer_norm of a float32 copy."""
    x = torch.randn(64, 128, device=device).half().requires_grad_()
    ours = memkern.nn.LayerNorm(128).to(device)
    with memory.saved_for_backward(exclude=ours.parameters()) as saved, torch.autocast(device, torch.float16):
        y = ours(x)
    with memory.saved_for_backward(exclude=ours.parameters()) as saved_by_torch:
        z = F.layer_norm(x.float(), (128,), ours.weight, ours.bias).half()
    assert saved.bytes == 2 * x.numel() + 8 * 64
    assert saved_by_torch.bytes >= 4 * x.numel()
    torch.testing.assert_close(y, z)


@each_kind
def test_memory_efficient_saves_y(backend, device, kind) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    weight, bias = parameters((8,), torch.float32, device)
    for w, b in ((weight, bias), (None, None), (-weight, None)):
        y, saved = saved_tensors(lambda w=w, b=b: call(kind, x, None, w, b, (8,), memory_efficient=True))
        assert y.data_ptr() in saved and x.data_ptr() not in saved
    _, saved = saved_tensors(lambda: call(kind, x, None, weight, bias, (8,)))
    assert x.data_ptr() in saved
    layer = (memkern.nn.LayerNorm if kind == "layer_norm" else memkern.nn.RMSNorm)(8, device=device)
    for layer.memory_efficient in (False, True):
        _, saved = saved_tensors(lambda: (layer(x),))
        assert (x.data_ptr() in saved) != layer.memory_efficient


@each_kind
@pytest.mark.parametrize("weight", ([0.0, 1.0, 1.0, 1.0], [1e-6, 1.0, -1.0, 1.0], [torch.nan, 1.0, 1.0, 1.0]), ids=str)
def test_memory_efficient_with_a_weight_that_hides_x(backend, device, kind, weight) -> None:
    """Fast-LLM#220: the gradient of a weight of 0 is sum(dy x_hat), not 0 and not NaN."""
    x = torch.randn(2, 4, device=device, requires_grad=True)
    weight = torch.tensor(weight, device=device, requires_grad=True)
    y, saved = saved_tensors(lambda: call(kind, x, None, weight, None, (4,), memory_efficient=True))
    assert x.data_ptr() in saved
    y.sum().backward()
    x_hat = exact_call(kind, x.detach().cpu().double(), None, None, None, (4,))[0]
    assert_close(weight.grad, x_hat.sum(0), 8)


def test_memory_efficient_with_a_bias_that_hides_x(backend, device) -> None:
    x = torch.randn(2, 4, device=device, requires_grad=True)
    for w, b, ours in ((None, 4.5, True), (None, 3.5, False), (0.1, 0.5, True), (0.1, 0.3, False)):
        weight = None if w is None else torch.full((4,), w, device=device)
        bias = torch.full((4,), b, device=device)

        def layer(weight=weight, bias=bias):
            return call("layer_norm", x, None, weight, bias, (4,), memory_efficient=True)

        _, saved = saved_tensors(layer)
        assert (x.data_ptr() in saved) == ours


@each_kind
def test_memory_efficient_reads_the_weight_once_after_each_change(backend, device, kind, monkeypatch) -> None:
    reads = []
    rule = norms.y_tells_x
    monkeypatch.setattr(norms, "y_tells_x", lambda *a: reads.append(1) or rule(*a))
    x = torch.randn(2, 4, device=device, requires_grad=True)
    weight = torch.ones(4, device=device, requires_grad=True)

    def saves_x() -> bool:
        y, saved = saved_tensors(lambda: call(kind, x, None, weight, None, (4,), memory_efficient=True))
        return x.data_ptr() in saved

    assert [saves_x(), saves_x(), len(reads)] == [False, False, 1]
    with torch.no_grad():
        weight[2] = 0
    assert [saves_x(), saves_x(), len(reads)] == [True, True, 2]
    with torch.no_grad():
        weight[2] = 1
    assert [saves_x(), len(reads)] == [False, 3]


@each_kind
def test_memory_efficient_after_a_change_torch_does_not_count_is_never_silently_wrong(backend, device, kind) -> None:
    x = torch.randn(2, 4, device=device, requires_grad=True)
    weight = torch.ones(4, device=device, requires_grad=True)
    call(kind, x, None, weight, None, (4,), memory_efficient=True)
    weight.data[1] = 0
    call(kind, x, None, weight, None, (4,), memory_efficient=True)[0].sum().backward()
    assert x.grad.isnan().all() and weight.grad.isnan().all()


@each_kind
def test_memory_efficient_at_the_limit_of_its_rule(backend, device, kind) -> None:
    """The accuracy that the documentation states: half an ulp of |x_hat| + |bias / weight| <= 4, in fp16 and bf16."""
    for dtype in HALVES:
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        dy = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        weight = torch.full((256,), 2.0**-7, device=device)
        bias = 4 * weight if kind == "layer_norm" else None
        check(kind, x, None, weight, bias, (256,), dy=dy, ulps=16, memory_efficient=True)
