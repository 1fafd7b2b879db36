"""The softmax modules as drop-ins for PyTorch's, what they return under autocast, and what bad input raises."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import memkern
from memkern import functional, memory
from memkern.functional import scaled_masked_softmax
from memkern.functional import softmax as softmax_function
from tests.norm_cases import HALVES
from tests.softmax_cases import random

NAMES = pytest.mark.parametrize("name", ("Softmax", "LogSoftmax"))
FUNCTIONS = pytest.mark.parametrize("name", ("softmax", "log_softmax"))


@NAMES
def test_modules_are_drop_ins(name) -> None:
    for arguments in ((1,), (-1,), (0,), ()):
        layer, model = getattr(memkern.nn, name)(*arguments), getattr(torch.nn, name)(*arguments)
        assert isinstance(layer, getattr(torch.nn, name)) and repr(layer) == repr(model)
        assert layer.state_dict() == model.state_dict() and layer.dim == model.dim
        x = torch.randn(3, 4)
        for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.testing.assert_close(twin(x), model(x))
            places = [(str(warning.message), warning.category) for warning in caught]
            assert places[:1] == places[1:] and len(places) == (2 if arguments == () else 0)


def test_repr_shows_the_options() -> None:
    assert repr(memkern.nn.Softmax(1, autocast="torch")) == "Softmax(dim=1, autocast='torch')"
    assert repr(memkern.nn.LogSoftmax(1, autocast="torch")) == "LogSoftmax(dim=1, autocast='torch')"
    assert repr(memkern.nn.ScaledMaskedSoftmax(np.float32(2))) == "ScaledMaskedSoftmax(scale=2.0)"
    layer = memkern.nn.ScaledMaskedSoftmax(dtype=torch.float32, autocast="torch", inplace_backward=True)
    shown = "scale=1.0, dtype=torch.float32, autocast='torch', inplace_backward=True"
    assert repr(layer) == f"ScaledMaskedSoftmax({shown})"


def test_scaled_masked_softmax_module(backend, device) -> None:
    layer = memkern.nn.ScaledMaskedSoftmax(0.5, causal="square", fully_masked="zero", dropout=0.5)
    assert repr(layer) == "ScaledMaskedSoftmax(scale=0.5, causal='square', fully_masked='zero', dropout=0.5)"
    x, mask = random(2, 6, 6).to(device), (random(6, seed=1) > 1).to(device)
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        trained = twin.train()(x, mask)
        y = twin.eval()(x, mask)
        assert torch.equal(y, scaled_masked_softmax(x, mask, 0.5, causal="square", fully_masked="zero"))
        assert not torch.equal(trained, y)
        torch.testing.assert_close(trained[trained > 0], 2 * y[trained > 0])
    wide = memkern.nn.ScaledMaskedSoftmax(dtype=torch.float32)(x.half())
    assert wide.dtype == torch.float32


@FUNCTIONS
def test_autocast_keep(backend, device, name) -> None:
    x = random(3, 8).to(device, torch.bfloat16).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16), memory.saved_for_backward() as saved:
        y = getattr(functional, name)(x, 1)
        assert y.dtype == torch.bfloat16 and scaled_masked_softmax(x.detach()).dtype == torch.bfloat16
    assert saved.bytes == x.nbytes


@FUNCTIONS
def test_autocast_torch(backend, device, name) -> None:
    """As PyTorch: on a GPU a float32 output, on the CPU the input's dtype."""
    for dtype in (*HALVES, torch.float32):
        x = random(3, 8).to(device, dtype)
        with torch.autocast(device, dtype=torch.bfloat16):
            expected = getattr(F, name)(x, 1).dtype
            assert getattr(functional, name)(x, 1, autocast="torch").dtype == expected
            assert scaled_masked_softmax(x, autocast="torch").dtype == F.softmax(x, 1).dtype
            assert getattr(functional, name)(x, 1, dtype=torch.float16, autocast="torch").dtype == torch.float16
        assert getattr(functional, name)(x, 1, autocast="torch").dtype == dtype  # no autocast here


@FUNCTIONS
def test_autocast_torch_where_torch_returns_float32(backend, device, name, monkeypatch) -> None:
    """What the policy of a GPU does, also where there is none; the 16-bit input is read as it is."""
    module = __import__("sys").modules[softmax_function.__module__]
    monkeypatch.setattr(module, "torch_dtype", lambda function, x, dim: torch.float32)
    x = random(3, 8).to(device).half().requires_grad_()
    with memory.saved_for_backward() as saved:
        y = getattr(functional, name)(x, 1, autocast="torch")
    assert y.dtype == torch.float32 and saved.bytes == y.nbytes
    torch.testing.assert_close(y, getattr(F, name)(x.float(), 1))
    y.sum().backward()
    assert x.grad.dtype == torch.float16


@FUNCTIONS
def test_bad_input(backend, device, name) -> None:
    function, x = getattr(functional, name), torch.randn(3, 4, device=device)
    for bad in (x.int(), x.bool(), x.to(torch.complex64), [1.0], None):
        with pytest.raises(TypeError, match="input: got .*needs"):
            function(bad, 1)
    for bad in (x.to(torch.complex64), [1.0]):
        with pytest.raises(TypeError, match="input: got .*needs a real Tensor"):
            function(bad, 1, dtype=torch.float32)
    for dtype in (torch.int64, torch.complex64, "float32"):
        with pytest.raises(TypeError, match="dtype: got .*needs float16"):
            function(x, 1, dtype=dtype)
    for dim in (2, -3, 100):
        with pytest.raises(IndexError, match=rf"dim: got {dim}, needs -2 to 1 for shape \(3, 4\)"):
            function(x, dim)
    with pytest.raises(IndexError, match=r"dim: got 1, needs -1 to 0 for shape \(\)"):
        function(x[0, 0], 1)
    for dim in (1.0, "1", (1,), True, torch.tensor(1)):
        with pytest.raises(TypeError, match="dim: got .*needs an int"):
            function(x, dim)
    assert torch.equal(function(x, np.int64(1)), function(x, 1))
    nested = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)
    for bad, kind in ((x.to_sparse(), "layout torch.sparse_coo"), (nested, "a nested tensor")):
        for dtype in (None, torch.float32):
            with pytest.raises(TypeError, match=f"input: got {kind}, needs a dense tensor"):
                function(bad, 1, dtype=dtype)
    with pytest.raises(ValueError, match="autocast: got 'fp32', needs 'keep' or 'torch'"):
        function(x, 1, autocast="fp32")
    with pytest.raises(ValueError, match="autocast: got 'fp32'"):
        getattr(memkern.nn, "Softmax" if name == "softmax" else "LogSoftmax")(1, autocast="fp32")


def test_bad_input_of_scaled_masked_softmax(backend, device) -> None:
    f, x = scaled_masked_softmax, torch.randn(2, 3, 4, device=device)
    for bad in (x.int(), [1.0]):
        with pytest.raises(TypeError, match="input: got"):
            f(bad)
    with pytest.raises(ValueError, match=r"input: got shape \(\), needs 1 dimensions or more"):
        f(x[0, 0, 0])
    with pytest.raises(ValueError, match=r"input: got shape \(4,\), needs 2 dimensions or more"):
        f(x[0, 0], causal="bottom_right")
    with pytest.raises(ValueError, match="causal: got 'square' with 3 queries and 4 keys"):
        f(x, causal="square")
    for shape in ((3,), (2, 4), (2, 1, 3, 4), (2, 3, 5)):
        with pytest.raises(ValueError, match=r"mask: got shape .*needs one that broadcasts to \(2, 3, 4\)"):
            f(x, torch.zeros(shape, dtype=torch.bool, device=device))
    for dtype in (torch.int64, torch.uint8, torch.float64):  # apex read them as bytes
        with pytest.raises(TypeError, match="mask: got dtype .*needs bool, float16, bfloat16 or float32"):
            f(x, torch.zeros(4, dtype=dtype, device=device))
    with pytest.raises(TypeError, match="mask: got list"):
        f(x, [True])
    with pytest.raises(ValueError, match="mask: got device meta"):
        f(x, torch.zeros(4, device="meta"))
    with pytest.raises(TypeError, match="mask: got layout torch.sparse_coo, needs a dense tensor"):
        f(x, (x > 0).to_sparse())
    with pytest.raises(TypeError, match="input: got layout torch.sparse_coo, needs a dense tensor"):
        f(x.to_sparse())
    assert torch.equal(f(x, None, np.float32(0.5)), f(x, None, 0.5))
    assert torch.equal(f(x, None, np.int64(2), dropout=np.float64(0)), f(x, None, 2))
    for make in (lambda **options: f(x, **options), memkern.nn.ScaledMaskedSoftmax):
        for scale in (x, True, "1", 1j, np.bool_(True)):
            with pytest.raises(TypeError, match="scale: got .*, needs a number"):
                make(scale=scale)
        for scale in (float("nan"), float("inf")):
            with pytest.raises(ValueError, match="scale: got (nan|inf), needs a finite number"):
                make(scale=scale)
        with pytest.raises(TypeError, match="dropout: got bool, needs a number"):
            make(dropout=False)
        with pytest.raises(TypeError, match="dtype: got torch.int32, needs float16, bfloat16, float32 or float64"):
            make(dtype=torch.int32)
        for dropout in (-0.1, 1.0, float("nan")):
            with pytest.raises(ValueError, match="dropout: got .*at least 0 and below 1"):
                make(dropout=dropout)
        with pytest.raises(ValueError, match="causal: got True, needs None or 'square' or 'bottom_right'"):
            make(causal=True)
        with pytest.raises(ValueError, match="fully_masked: got 0, needs 'nan' or 'zero'"):
            make(fully_masked=0)
        with pytest.raises(ValueError, match="autocast: got 'fp32'"):
            make(autocast="fp32")
