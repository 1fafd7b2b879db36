"""memkern.patch: what it replaces, what it leaves, and that undoing it is exact."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import memkern


class Doubled(nn.LayerNorm):
    def forward(self, input):
        return 2 * super().forward(input)


def a_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.GELU("tanh"),
        nn.Sequential(
            nn.RMSNorm(8), nn.LayerNorm((8,), eps=0.1, bias=False), nn.LayerNorm(8, elementwise_affine=False)
        ),
        nn.Softmax(-1),
        nn.LogSoftmax(dim=0),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


NAMES = ("0", "2", "3.0", "3.1", "3.2", "4", "5")
TORCHS = (nn.LayerNorm, nn.GELU, nn.RMSNorm, nn.LayerNorm, nn.LayerNorm, nn.Softmax, nn.LogSoftmax)
FUSED = tuple(getattr(memkern.nn, kind.__name__) for kind in TORCHS)


def classes(model: nn.Module) -> tuple[type, ...]:
    return tuple(type(model.get_submodule(name)) for name in NAMES)


def state(model: nn.Module) -> list:
    """All that a module holds, by identity."""
    return [(name, type(m), {k: id(v) for k, v in m.__dict__.items()}) for name, m in model.named_modules()]


def test_replaces_and_restores_exactly() -> None:
    model = a_model()
    before, text = state(model), repr(model)
    report = memkern.patch(model)
    assert classes(model) == FUSED
    assert report.replaced == dict(
        zip(NAMES, ("torch.nn." + kind.__name__ for kind in TORCHS), strict=True)
    ) and not report.left  # fmt: skip
    assert str(report).splitlines()[:2] == ["replaced 0: torch.nn.LayerNorm", "replaced 2: torch.nn.GELU"]
    assert repr(model) == text
    memkern.unpatch(model)
    assert state(model) == before


def test_same_values_and_gradients(backend, device) -> None:
    model = a_model().to(device)
    x, dy = torch.randn(2, 5, 8, device=device).unbind()
    wanted = list(model.parameters())
    expected = model(x)
    expected_grads = torch.autograd.grad(expected, wanted, dy)
    memkern.patch(model)
    assert all(a is b for a, b in zip(model.parameters(), wanted, strict=True))
    y = model(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(y, wanted, dy), expected_grads, rtol=1e-4, atol=1e-4)


def test_the_fused_kernels_are_what_runs(monkeypatch) -> None:
    called = []
    for name in ("gelu", "layer_norm", "rms_norm", "softmax", "log_softmax"):
        function = getattr(memkern.functional, name)
        monkeypatch.setattr(
            memkern.functional, name, lambda *a, n=name, f=function, **k: called.append(n) or f(*a, **k)
        )
    model = a_model()
    with memkern.patch(model):
        model(torch.randn(2, 8))
    assert called == ["layer_norm", "gelu", "rms_norm", "layer_norm", "layer_norm", "softmax", "log_softmax"]
    model(torch.randn(2, 8))
    assert len(called) == 7


def test_context_manager_undoes_what_it_did_and_no_more() -> None:
    model = a_model()
    before = state(model)
    with pytest.raises(KeyError), memkern.patch(model) as report:
        assert classes(model) == FUSED and len(report.replaced) == 7
        raise KeyError
    assert state(model) == before
    memkern.patch(model[3])
    with memkern.patch(model) as report:
        assert list(report.replaced) == ["0", "2", "4", "5"]
        assert report.left == dict.fromkeys(("3.0", "3.1", "3.2"), "is memkern's already")
    assert classes(model) == TORCHS[:2] + FUSED[2:5] + TORCHS[5:]


def test_hooks_flags_and_state_stay() -> None:
    model, seen = a_model(), []
    layer = model[0]
    layer.register_forward_hook(lambda module, inputs, output: seen.append("forward"))
    layer.register_full_backward_hook(lambda module, grads, outputs: seen.append("backward"))
    layer.weight.register_hook(lambda grad: seen.append("weight"))
    layer.bias.requires_grad_(False)
    layer.mark = "mine"
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    memkern.patch(model)
    assert not layer.training and layer.mark == "mine" and not layer.bias.requires_grad
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["backward", "forward", "weight"] and layer.bias.grad is None
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert list(before) == list(model.state_dict())
    optimizer.step()
    assert not torch.equal(layer.weight, before["0.weight"])


def test_options_reach_the_norms() -> None:
    model = a_model()
    before = state(model)
    with memkern.patch(model, autocast="torch", memory_efficient=True):
        assert all(model.get_submodule(name).memory_efficient for name in ("0", "3.0", "3.1"))
        assert all(model.get_submodule(name).autocast == "torch" for name in NAMES if name != "2")
        assert not hasattr(model[2], "autocast") and not hasattr(model[4], "memory_efficient")
    assert state(model) == before


LOSSES = {
    "plain": nn.CrossEntropyLoss(),
    "weighted": nn.CrossEntropyLoss(torch.rand(5), ignore_index=1, reduction="sum", label_smoothing=0.1),
}
if hasattr(nn, "LinearCrossEntropyLoss"):
    LOSSES["linear"] = nn.LinearCrossEntropyLoss(5, 5, bias=True)


def test_losses(backend, device) -> None:
    model = nn.ModuleDict(copy.deepcopy(LOSSES)).to(device)
    x, target = torch.randn(4, 5, device=device), torch.tensor([0, 1, 4, 2], device=device)
    expected, before, text = [loss(x, target) for loss in model.values()], state(model), repr(model)
    with memkern.patch(model) as report:
        assert list(report.replaced) == list(LOSSES) and repr(model) == text
        assert all(type(loss).__module__ == "memkern.nn" for loss in model.values())
        torch.testing.assert_close([loss(x, target) for loss in model.values()], expected)
    assert state(model) == before


def test_left_with_a_reason() -> None:
    model = nn.ModuleDict(
        {
            "subclass": Doubled(8),
            "parametrized": nn.LayerNorm(8),
            "replaced": nn.GELU(),
            "ours": memkern.nn.AddRMSNorm(8),
            "other": nn.GroupNorm(2, 8),
            "plain": nn.GELU(),
        }
    )
    nn.utils.parametrize.register_parametrization(model["parametrized"], "weight", nn.Identity())
    model["replaced"].forward = torch.relu
    before = state(model)
    report = memkern.patch(model)
    assert list(report.replaced) == ["plain"]
    assert list(report.left) == ["subclass", "parametrized", "replaced", "ours"]
    assert "Doubled, is a subclass" in report.left["subclass"] and "subclass" in report.left["parametrized"]
    assert "forward was replaced" in report.left["replaced"] and report.left["ours"] == "is memkern's already"
    memkern.unpatch(model)
    assert state(model) == before


def test_only_this_model() -> None:
    model, other = a_model(), a_model()
    memkern.patch(model)
    assert classes(other) == TORCHS
    assert type(nn.LayerNorm(3)) is nn.LayerNorm
    own = nn.Sequential(memkern.nn.LayerNorm(8), nn.LayerNorm(8))
    memkern.patch(own)
    memkern.unpatch(own)
    assert [type(m) for m in own] == [memkern.nn.LayerNorm, nn.LayerNorm]


def test_a_shared_layer_and_a_lone_one() -> None:
    norm = nn.LayerNorm(8)
    report = memkern.patch(nn.ModuleList([norm, norm]))
    assert list(report.replaced) == ["0"]
    memkern.unpatch(norm)
    assert type(norm) is nn.LayerNorm
    assert str(memkern.patch(norm)) == "replaced (the model): torch.nn.LayerNorm"
    assert str(memkern.patch(nn.Linear(2, 2))) == "nothing to replace"


def test_copies_can_be_undone() -> None:
    model = a_model()
    memkern.patch(model, memory_efficient=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert classes(twin) == FUSED and twin[0].memory_efficient
        memkern.unpatch(twin)
        assert classes(twin) == TORCHS
    assert classes(model) == FUSED


def test_a_class_changed_since_stays() -> None:
    model = nn.LayerNorm(8)
    memkern.patch(model)
    nn.utils.parametrize.register_parametrization(model, "weight", nn.Identity())
    changed = type(model)
    memkern.unpatch(model)
    assert type(model) is changed
    nn.utils.parametrize.remove_parametrizations(model, "weight")
    memkern.unpatch(model)
    assert type(model) is nn.LayerNorm


def test_a_compiled_model_follows() -> None:
    torch._dynamo.reset()
    model = a_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8)
    expected = compiled(x)
    with memkern.patch(compiled) as report:
        assert len(report.replaced) == 7
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled(x), expected)


def test_bad_input() -> None:
    for undo in (memkern.patch, memkern.unpatch):
        with pytest.raises(TypeError, match="model: got list, needs a torch.nn.Module"):
            undo([nn.LayerNorm(8)])
    model = a_model()
    with pytest.raises(ValueError, match="autocast: got 'half', needs 'keep' or 'torch'"):
        memkern.patch(model, autocast="half")
    assert classes(model) == TORCHS
