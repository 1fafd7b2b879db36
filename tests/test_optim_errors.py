"""Bad input to the optimizers: an error that names the argument or parameter, before anything is written."""

from __future__ import annotations

import math

import pytest
import torch

from memkern import ops, optim
from tests.optim_tools import parameter, same_bits, set_grad, snapshot


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    (
        (optim.AdamW, {"lr": -1.0}, "lr: got -1.0, needs a number of at least 0"),
        (optim.AdamW, {"lr": math.nan}, "lr: got nan"),
        (optim.AdamW, {"lr": torch.ones(2)}, r"lr: got a tensor of shape \(2,\), needs one element"),
        (optim.AdamW, {"betas": (1.0, 0.9)}, r"betas\[0\]: got 1.0, needs a number of at least 0 and below 1"),
        (optim.Adam, {"betas": (0.9, -0.1)}, r"betas\[1\]: got -0.1"),
        (optim.Adam, {"eps": -1e-8}, "eps: got -1e-08"),
        (optim.Adam, {"weight_decay": -0.1}, "weight_decay: got -0.1"),
        (optim.LAMB, {"eps": -1.0}, "eps: got -1.0"),
        (optim.LAMB, {"betas": (0.9, 2.0)}, r"betas\[1\]: got 2.0"),
        (optim.Lion, {"betas": (0.9, 1.0)}, r"betas\[1\]: got 1.0"),
        (optim.Lion, {"weight_decay": -1.0}, "weight_decay: got -1.0"),
        (optim.SGD, {"lr": -1.0}, "lr: got -1.0"),
        (optim.SGD, {"momentum": -0.9}, "momentum: got -0.9"),
        (optim.SGD, {"nesterov": True}, "nesterov: got True with momentum 0 and dampening 0"),
        (optim.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov: got True with momentum 0.9"),
        (optim.SGD, {"differentiable": True}, "differentiable: got True, needs False"),
        (optim.AdamW, {"max_grad_norm": 0.0}, "max_grad_norm: got 0.0, needs None or a number above 0"),
        (optim.AdamW, {"max_grad_norm": math.nan}, "max_grad_norm: got nan"),
        (
            optim.AdamW,
            {"master_weights": torch.float64},
            "master_weights: got torch.float64, needs None or torch.float32",
        ),
    ),
)
def test_bad_numbers(optimizer, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer([parameter("cpu")], **arguments)
    if not arguments.keys() & {"differentiable", "max_grad_norm", "master_weights"}:  # those are the optimizer's
        good = optimizer([parameter("cpu")])
        with pytest.raises(ValueError, match=message):
            good.add_param_group({"params": [parameter("cpu")], **arguments})
        assert len(good.param_groups) == 1


@pytest.mark.parametrize("names", (False, True))
@pytest.mark.parametrize(
    "bad",
    (
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.zeros(3).to_sparse(),
    ),
    ids=("complex", "integer", "float8", "sparse"),
)
def test_bad_parameters(make_optimizer, bad, names) -> None:
    params = [parameter("cpu"), torch.nn.Parameter(bad, requires_grad=False)]
    name = "parameter 'odd one'" if names else "parameter 1 of group 0"
    with pytest.raises(TypeError, match=f"{name}: got {bad.dtype}, {bad.layout}, needs a dense float16"):
        make_optimizer(list(zip(("good", "odd one"), params, strict=True)) if names else params)
    optimizer = make_optimizer([("good", params[0])] if names else params[:1])
    with pytest.raises(TypeError, match="of group 1: got" if not names else "'odd one': got"):
        optimizer.add_param_group({"params": [("odd one", params[1])] if names else params[1:]})
    assert len(optimizer.param_groups) == 1


def test_torchs_own_errors(make_optimizer) -> None:
    for bad, error in (([], ValueError), (torch.zeros(3), TypeError), ([1.0], TypeError)):
        with pytest.raises(error):
            make_optimizer(bad)
    p = parameter("cpu")
    with pytest.raises(ValueError, match="non-leaf"):
        make_optimizer([p * 2])
    with pytest.raises(ValueError, match="more than one parameter group"):
        make_optimizer([{"params": [p]}, {"params": [p]}])


def test_a_gradient_on_another_device(make_optimizer) -> None:
    a, b = parameter("cpu"), parameter("cpu")
    optimizer = make_optimizer([("a", a), ("b", b)])
    set_grad(a, 1.0)
    set_grad(b, 1.0)
    optimizer.step()
    before = snapshot(optimizer)

    class Moved(torch.nn.Parameter):
        grad = torch.empty(5, device="meta")

    b.__class__ = Moved
    with pytest.raises(
        TypeError, match=r"gradient of parameter 'b': got torch.float32, torch.strided on meta, needs .* on cpu"
    ):
        optimizer.step()
    b.__class__ = torch.nn.Parameter
    assert same_bits(before, snapshot(optimizer))


@pytest.mark.parametrize("bad", (torch.zeros(4), torch.zeros(9)[::2], torch.zeros(5, device="meta")), ids=str)
def test_a_state_that_does_not_fit(backend, device, bad) -> None:
    """Set by hand: load_state_dict checks and moves."""
    a, b = parameter(device), parameter(device)
    optimizer = optim.AdamW([("a", a), ("b", b)])
    set_grad(a, 1.0)
    set_grad(b, 1.0)
    optimizer.step()
    before, kept = snapshot(optimizer), optimizer.state[b]["exp_avg_sq"]
    optimizer.state[b]["exp_avg_sq"] = bad if bad.is_meta else bad.to(device)
    with pytest.raises(ValueError, match=r"state 'exp_avg_sq' of parameter 'b': got shape \(.\,\), strides \(.,\) on"):
        optimizer.step()
    optimizer.state[b]["exp_avg_sq"] = kept
    assert same_bits(before, snapshot(optimizer))


def test_the_ops_check_their_lists(backend, device) -> None:
    if backend == "reference":
        pytest.skip("reference does not walk memory by itself")
    errors = (RuntimeError, ValueError)
    x = [torch.ones(4, device=device)]

    def lion(params=x, grads=x, averages=x, masters=(), found_inf=None) -> None:
        ops.op(backend, "lion_step")(
            params, grads, averages, list(masters), None, None, None, found_inf, 0.1, 0.9, 0.9, 0.0, False, False
        )

    for bad in ([torch.ones(5, device=device)], [torch.ones(2, 2, device=device)], []):
        for name in ("grads", "averages"):
            with pytest.raises(errors, match="grads|states"):
                lion(**{name: bad})
    for bad in (torch.ones(2, device=device), torch.ones((), device=device, dtype=torch.float64)):
        with pytest.raises(errors, match="found_inf: needs one fp32 number|found_inf"):
            lion(found_inf=bad)
    with pytest.raises(errors, match="needs float16, bfloat16, float32 or float64"):
        lion(grads=[torch.ones(4, dtype=torch.int32, device=device)])
    with pytest.raises(errors, match="one stretch of memory"):
        lion(params=[torch.ones(8, device=device)[::2]])
    assert torch.equal(x[0], torch.ones(4, device=device))
