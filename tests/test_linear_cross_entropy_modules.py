"""linear_cross_entropy as a module, and what bad input gets."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import memkern
from memkern.functional import linear_cross_entropy
from tests.test_cross_entropy import random
from tests.test_linear_cross_entropy import CLASSES, FEATURES, arguments

needs_torchs = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="this PyTorch has no LinearCrossEntropyLoss"
)


@needs_torchs
def test_modules_are_drop_ins(backend, device) -> None:
    x = random(7, FEATURES).to(device)
    weight = 0.5 + random(CLASSES, seed=2).abs()
    for options in (
        {},
        {"bias": True, "weight": weight, "reduction": "sum"},
        {"ignore_index": 1, "label_smoothing": 0.1},
        {"reduction": "none", "bias": True},
        {"out_features": (2, 3), "bias": True},
        {"options": torch.nn.LinearCrossEntropyOptions()},
    ):
        model = torch.nn.LinearCrossEntropyLoss(FEATURES, CLASSES, **options).to(device)
        layer = memkern.nn.LinearCrossEntropyLoss(FEATURES, CLASSES, **options).to(device)
        layer.load_state_dict(model.state_dict())
        assert isinstance(layer, torch.nn.LinearCrossEntropyLoss) and repr(layer) == repr(model)
        out = options.get("out_features", ())
        target = torch.randint(CLASSES, (7, *out), generator=torch.Generator().manual_seed(0)).to(device)
        for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(twin(x, target), model(x, target))
        if not out:
            torch.testing.assert_close(layer(x[0], target[0]), model(x[0], target[0]), equal_nan=True)
        q = random(7, CLASSES, *out).softmax(1).to(device)
        if "ignore_index" not in options:
            torch.testing.assert_close(layer(x, q), model(x, q))
        for loss in (layer(x, target), model(x, target)):
            loss.sum().backward()
        for ours, torchs in zip(layer.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, torchs.grad, rtol=1e-4, atol=1e-5)


@needs_torchs
def test_more_than_one_loss_a_sample_needs_samples(backend, device) -> None:
    """As PyTorch's: which dimension holds the classes is plain for (N, features) alone."""
    layer = memkern.nn.LinearCrossEntropyLoss(4, 5, out_features=(3,)).to(device)
    for shape in ((2, 6, 4), (4,), (2, 3), ()):
        x = random(*shape).to(device)
        for target in (random(*shape[:-1], 5, 3).softmax(-2).to(device), torch.zeros(2, 3, device=device).long()):
            with pytest.raises(RuntimeError):
                torch.nn.LinearCrossEntropyLoss.forward(layer, x, target)
            with pytest.raises(ValueError, match=r"input: got shape .*, with out_features needs \(N, 4\)"):
                layer(x, target)


@needs_torchs
def test_repr_and_bad_options_of_modules() -> None:
    layer = memkern.nn.LinearCrossEntropyLoss(4, 5, z_loss=0.1, chunk_tokens=7)
    assert repr(layer).splitlines()[1].endswith("options=None, z_loss=0.1, chunk_tokens=7")
    for name, bad in (("chunk_tokens", True), ("ignore_index", True), ("z_loss", "1")):
        with pytest.raises(TypeError, match=f"{name}: got"):
            memkern.nn.LinearCrossEntropyLoss(4, 5, **{name: bad})


def test_bad_input(backend, device) -> None:
    (hidden, weight, bias), target = arguments(torch.float32, device)
    with pytest.raises(TypeError, match="hidden: got list"):
        linear_cross_entropy([1.0], weight, target)
    with pytest.raises(ValueError, match="hidden: got no dimension"):
        linear_cross_entropy(hidden[0, 0], weight, target)
    for wrong in (weight[:, :5], weight[0], weight[None]):
        with pytest.raises(ValueError, match=r"weight: got shape .*, needs \(classes, 12\)"):
            linear_cross_entropy(hidden, wrong, target)
    with pytest.raises(ValueError, match=r"bias: got shape \(30,\), needs \(31,\)"):
        linear_cross_entropy(hidden, weight, target, bias[:30])
    with pytest.raises(ValueError, match="weight: got dtype torch.float16, needs that of hidden"):
        linear_cross_entropy(hidden, weight.half(), target)
    with pytest.raises(ValueError, match="bias: got device meta"):
        linear_cross_entropy(hidden, weight, target, bias.to("meta"))
    with pytest.raises(ValueError, match=r"target: got classes of shape \(12,\)"):
        linear_cross_entropy(hidden, weight, target[:12])
    with pytest.raises(ValueError, match=r"class_weight: got shape \(12,\), needs \(31,\)"):
        linear_cross_entropy(hidden, weight, target, class_weight=hidden[0])
    with pytest.raises(ValueError, match="chunk_tokens: got 0, needs 1 to"):
        linear_cross_entropy(hidden, weight, target, chunk_tokens=0)
    with pytest.raises(TypeError, match="chunk_tokens: got float"):
        linear_cross_entropy(hidden, weight, target, chunk_tokens=1.0)
    with pytest.raises(TypeError, match="chunk_tokens: got bool"):
        linear_cross_entropy(hidden, weight, target, chunk_tokens=True)
    with pytest.raises(TypeError, match="weight: got layout torch.sparse_coo, needs a dense tensor"):
        linear_cross_entropy(hidden, weight.detach().to_sparse(), target)
    for name, value in (("reduction", "max"), ("z_loss", -1), ("softcap", -1), ("label_smoothing", 2)):
        with pytest.raises(ValueError, match=f"{name}: got"):
            linear_cross_entropy(hidden, weight, target, **{name: value})


def test_class_out_of_range(backend, device) -> None:
    (hidden, weight, _), target = arguments(torch.float32, device)
    target[8] = CLASSES
    if backend in ("cpu", "reference") and device == "cpu":
        with pytest.raises(IndexError, match=f"target: got {CLASSES}"):
            linear_cross_entropy(hidden, weight, target, chunk_tokens=5)
    else:
        loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=5, reduction="none")
        assert loss.isnan().nonzero().flatten().tolist() == [8]
