"""The norm modules as drop-ins for PyTorch's, and what bad input raises."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import memkern
from memkern import functional
from tests.norm_cases import assert_close, dtypes_of, each_kind

MODULES = [
    (memkern.nn.LayerNorm, torch.nn.LayerNorm, (5,), {}),
    (memkern.nn.LayerNorm, torch.nn.LayerNorm, ((3, 5),), {"bias": False}),
    (memkern.nn.LayerNorm, torch.nn.LayerNorm, ([5],), {"elementwise_affine": False, "eps": 0}),
    (memkern.nn.LayerNorm, torch.nn.LayerNorm, (torch.Size([5]), 1e-3, True, True, "cpu", torch.float64), {}),
    (memkern.nn.RMSNorm, torch.nn.RMSNorm, (5,), {}),
    (memkern.nn.RMSNorm, torch.nn.RMSNorm, ((3, 5), 0.0), {}),
    (memkern.nn.RMSNorm, torch.nn.RMSNorm, (5, None, False), {}),
    (memkern.nn.RMSNorm, torch.nn.RMSNorm, (5, 1e-3, True, "cpu", torch.float64), {}),
]


@pytest.mark.parametrize("ours, torchs, arguments, keywords", MODULES)
def test_modules_are_drop_ins(ours, torchs, arguments, keywords) -> None:
    layer, model = ours(*arguments, **keywords), torchs(*arguments, **keywords)
    assert isinstance(layer, torchs) and repr(layer) == repr(model)
    assert list(layer.state_dict()) == list(model.state_dict())
    assert [p.shape for p in layer.parameters()] == [p.shape for p in model.parameters()]
    for name, value in model.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value) and layer.state_dict()[name].dtype == value.dtype
    for attribute in ("normalized_shape", "eps", "elementwise_affine"):
        assert getattr(layer, attribute) == getattr(model, attribute)
    assert all(getattr(layer, name, 0) is None for name in ("weight", "bias") if getattr(model, name, 0) is None)
    x = torch.randn(2, 3, 5, dtype=torch.float64 if torch.float64 in arguments else torch.float32)
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(twin(x), model(x))
    layer.load_state_dict(model.state_dict())
    model.load_state_dict(layer.state_dict())


def test_repr_shows_the_options() -> None:
    for ours, torchs in ((memkern.nn.LayerNorm, torch.nn.LayerNorm), (memkern.nn.RMSNorm, torch.nn.RMSNorm)):
        assert repr(ours(4)) == repr(torchs(4))
        shown = "autocast='torch', memory_efficient=True)"
        assert repr(ours(4, autocast="torch", memory_efficient=True)) == f"{repr(torchs(4))[:-1]}, {shown}"
    assert repr(memkern.nn.AddRMSNorm(4, zero_centred=True)).endswith("elementwise_affine=True, zero_centred=True)")


def test_eps_none_is_the_epsilon_of_the_arithmetic(backend, device) -> None:
    for dtype in dtypes_of(backend):
        x = torch.full((2, 4), 2.0**-12, device=device, dtype=dtype)  # its square is below fp32's epsilon
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        expected = 2.0**-12 / (2.0**-24 + eps) ** 0.5
        assert_close(
            memkern.nn.RMSNorm(4, device=device, dtype=dtype)(x), torch.full((2, 4), expected, dtype=torch.double), 4
        )


def test_modules_with_a_residual(backend, device) -> None:
    x, residual = torch.randn(2, 3, 8, device=device).unbind()
    for ours, torchs in ((memkern.nn.AddLayerNorm, torch.nn.LayerNorm), (memkern.nn.AddRMSNorm, torch.nn.RMSNorm)):
        layer, model = ours(8, device=device), torchs(8, device=device)
        assert list(layer.state_dict()) == list(model.state_dict())
        y, summed = layer(x, residual)
        assert torch.equal(summed, x + residual)
        torch.testing.assert_close(y, model(x + residual))


def test_zero_centred_rms_norm_starts_as_the_identity_scale(backend, device) -> None:
    layer, model = memkern.nn.RMSNorm(8, zero_centred=True, device=device), torch.nn.RMSNorm(8, device=device)
    assert torch.equal(layer.weight, torch.zeros(8, device=device))
    x = torch.randn(3, 8, device=device)
    torch.testing.assert_close(layer(x), model(x))
    memkern.nn.RMSNorm(8, elementwise_affine=False, zero_centred=True, device=device)(x)


@each_kind
def test_bad_input(backend, device, kind) -> None:
    x, weight = torch.randn(3, 4, device=device), torch.ones(4, device=device)
    function, added = getattr(functional, kind), getattr(functional, f"add_{kind}")
    for bad in (torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.complex64), [1.0], None):
        with pytest.raises(TypeError, match="input: got .*needs"):
            function(bad, (4,))
    for shape in ((3,), (5,), (2, 3, 4), (4, 3), 5):
        with pytest.raises(ValueError, match=r"normalized_shape: got .*needs the last dimensions of .*\(3, 4\)"):
            function(x, shape)
    for shape in ((), []):
        with pytest.raises(ValueError, match="normalized_shape: got no dimension"):
            function(x, shape)
    for shape in (4.0, "4", (4.0,), None):
        with pytest.raises(TypeError, match="normalized_shape: got .*needs an int or a sequence"):
            function(x, shape)
    for wrong in (torch.ones(3), torch.ones(4, 1), torch.ones(())):
        with pytest.raises(ValueError, match="weight: got shape .*needs .*4"):
            function(x, (4,), wrong.to(device))
    with pytest.raises(ValueError, match="weight: got device meta, needs that of input"):
        function(x, (4,), weight.to("meta"))
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match="weight: got dtype .*needs torch.float32"):
            function(x, (4,), weight.to(dtype))
    with pytest.raises(TypeError, match="weight: got dtype torch.bfloat16, needs torch.float16 or torch.float32"):
        function(x.half(), (4,), weight.bfloat16())
    for eps in (-1e-5, float("nan")):
        with pytest.raises(ValueError, match="eps: got .*not negative"):
            function(x, (4,), eps=eps)
        with pytest.raises(ValueError, match="eps: got"):
            (memkern.nn.LayerNorm if kind == "layer_norm" else memkern.nn.RMSNorm)(4, eps=eps)
    with pytest.raises(TypeError, match="eps: got str, needs a number"):
        function(x, (4,), eps="1")
    with pytest.raises(ValueError, match="autocast: got 'fp32', needs 'keep' or 'torch'"):
        function(x, (4,), autocast="fp32")
    with pytest.raises(ValueError, match="autocast: got"):
        (memkern.nn.LayerNorm if kind == "layer_norm" else memkern.nn.RMSNorm)(4, autocast="fp32")
    for residual in (torch.ones(4), torch.ones(1, 4), torch.ones(3, 5)):
        with pytest.raises(ValueError, match=r"residual: got shape .*needs \(3, 4\)"):
            added(x, residual.to(device), (4,))
    with pytest.raises(ValueError, match="residual: got device meta"):
        added(x, x.to("meta"), (4,))
    for residual in (None, torch.ones(3, 4, dtype=torch.int32)):
        with pytest.raises(TypeError, match="residual: got"):
            added(x, residual, (4,))


def test_bad_bias(backend, device) -> None:
    x, weight = torch.randn(3, 4, device=device), torch.ones(4, device=device)
    with pytest.raises(ValueError, match="bias: got shape"):
        functional.layer_norm(x, (4,), weight, torch.ones(5, device=device))
    with pytest.raises(TypeError, match="bias: got list"):
        functional.layer_norm(x, (4,), weight, [0.0])
