"""Bad input to the optimizers: an error that names the argument or parameter, before anything is written."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from memkern import ops, optim
from tests.optim_steps import ALGORITHMS, DTYPES, Tensors
from tests.optim_tools import parameter, same_bits, set_grad, snapshot


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    (
        (optim.AdamW, {"lr": -1.0}, "lr: got -1.0, needs a number of at least 0"),
        (optim.AdamW, {"lr": math.nan}, "lr: got nan"),
        (optim.AdamW, {"lr": torch.ones(2)}, r"lr: got a tensor of shape \(2,\), needs one element"),
        (optim.AdamW, {"betas": (1.0, 0.9)}, r"betas\[0\]: got 1.0, needs a number of at least 0 and below 1"),
        (optim.Adam, {"betas": (0.9, -0.1)}, r"betas\[1\]: got -0.1"),
        (optim.AdamW, {"betas": (0.9,)}, r"betas: got \(0.9,\), needs two numbers"),
        (optim.Lion, {"betas": (0.9, 0.99, 0.999)}, r"betas: got \(0.9, 0.99, 0.999\)"),
        (optim.AdamW, {"lr": torch.tensor(-1.0)}, "lr: got -1.0, needs a number of at least 0"),
        (optim.Adam, {"eps": -1e-8}, "eps: got -1e-08"),
        (optim.Adam, {"weight_decay": -0.1}, "weight_decay: got -0.1"),
        (optim.LAMB, {"eps": -1.0}, "eps: got -1.0"),
        (optim.LAMB, {"betas": (0.9, 2.0)}, r"betas\[1\]: got 2.0"),
        (optim.Lion, {"betas": (0.9, 1.0)}, r"betas\[1\]: got 1.0"),
        (optim.Lion, {"weight_decay": -1.0}, "weight_decay: got -1.0"),
        (optim.SGD, {"lr": -1.0}, "lr: got -1.0"),
        (optim.SGD, {"momentum": -0.9}, "momentum: got -0.9"),
        (optim.SGD, {"dampening": math.nan}, "dampening: got nan, needs a finite number"),
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
    good = optimizer([parameter("cpu")])
    if arguments.keys() & {"max_grad_norm", "master_weights"}:
        message = "needs to be an argument of the optimizer"
    with pytest.raises(ValueError, match=message):
        good.add_param_group({"params": [parameter("cpu")], **arguments})
    assert len(good.param_groups) == 1


def test_arguments_that_a_group_cannot_have(make_optimizer) -> None:
    for name, value in (("max_grad_norm", 1.0), ("master_weights", torch.float32), ("write_unscaled_grads", False)):
        message = f"{name}: got {value} in a group, needs to be an argument of the optimizer"
        with pytest.raises(ValueError, match=message):
            make_optimizer([{"params": [parameter("cpu")], name: value}])
    for kind in (optim.AdamW, optim.SGD):
        with pytest.raises(RuntimeError, match="foreach: got True with fused=True"):  # torch's error
            kind([parameter("cpu")], foreach=True, fused=True)


def test_parameters_that_share_memory(make_optimizer) -> None:
    for bad in (torch.ones(1).expand(5), torch.ones(6).unfold(0, 2, 1)):
        with pytest.raises(ValueError, match=r"parameter 'b': got strides \(.*\), needs elements that do not share"):
            make_optimizer([("a", parameter("cpu")), ("b", torch.nn.Parameter(bad))])
    make_optimizer([torch.nn.Parameter(torch.ones(1).expand(1, 1)), torch.nn.Parameter(torch.ones(4, 4)[::2, ::3])])


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


def in_state(key: str, value: object):
    return lambda optimizer, p: optimizer.state[p].update({key: value})


def in_group(key: str, value: object):
    return lambda optimizer, p: optimizer.param_groups[1].update({key: value})


def in_grad(value: Tensor):
    return lambda optimizer, p: setattr(p, "grad", value)


def in_data(value: Tensor):
    return lambda optimizer, p: setattr(p, "data", value)


ONES = torch.ones(5)
WRONG = {
    "gradient's shape": (in_data(torch.ones(3)), r"gradient of parameter 'b': got shape \(5,\), needs \(3,\)"),
    "expanded": (in_data(torch.ones(1).expand(5)), r"parameter 'b': got strides \(0,\), needs elements that do not"),
    "expanded gradient": (in_grad(torch.ones(1).expand(5)), r"gradient of parameter 'b': got strides \(0,\), needs"),
    "integer state": (in_state("exp_avg", ONES.long()), "state 'exp_avg' of parameter 'b': got torch.int64"),
    "complex state": (in_state("exp_avg_sq", ONES + 1j), "state 'exp_avg_sq' of parameter 'b': got torch.complex64"),
    "no tensor": (in_state("exp_avg_sq", None), "state 'exp_avg_sq' of parameter 'b': got None"),
    "fp64 step": (in_state("step", ONES[0].double()), "state 'step' of parameter 'b': got torch.float64"),
    "number": (in_state("step", 3), "state 'step' of parameter 'b': got 3, needs torch.float32"),
    "two steps": (in_state("step", ONES[:2]), r"state 'step' of parameter 'b': got shape \(2,\), .* needs one element"),
    "step elsewhere": (in_state("step", torch.ones((), device="meta")), "state 'step' of parameter 'b': .* on meta"),
    "rounded master": (in_state("master", ONES.half()), "state 'master' of parameter 'b': got torch.float16"),
    "two rates": (in_group("lr", torch.ones(2)), r"lr: got a tensor of shape \(2,\)"),
    "no rate": (in_group("lr", math.nan), "lr: got nan"),
    "one beta": (in_group("betas", [0.9]), r"betas: got \[0.9\], needs two numbers"),
    "large beta": (in_group("betas", (0.9, 1.0)), r"betas\[1\]: got 1.0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_come_before_anything_is_written(backend, device, what) -> None:
    """Whatever is wrong with the second parameter, or its group, the first one has not moved, nor a counter."""
    a, b, late = parameter(device), parameter(device), parameter(device)
    groups = [{"params": [("a", a), ("late", late)]}, {"params": [("b", b)]}]
    optimizer = optim.AdamW(groups, max_grad_norm=math.inf, write_unscaled_grads=True)
    for p in (a, b):
        set_grad(p, 1.0)
    optimizer.step()
    set_grad(late, 1.0)  # whose states are still to be made
    change, message = WRONG[what]
    with torch.device(device):
        change(optimizer, b)
    before, norm, gradient = snapshot_of(optimizer, a), float(optimizer.grad_norm), b.grad.clone()
    optimizer.grad_scale = torch.tensor(2.0, device=device)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert same_bits(before, snapshot_of(optimizer, a)) and torch.equal(b.grad, gradient)
    assert late not in optimizer.state and torch.equal(late, torch.ones_like(late))
    assert float(optimizer.grad_norm) == norm and int(optimizer.skipped_steps) == 0


def snapshot_of(optimizer: torch.optim.Optimizer, p: Tensor) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (p, *optimizer.state[p].values())]


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


def test_advance_checks_its_counters(backend, device) -> None:
    """It writes 4 bytes at each."""
    good, skipped = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
    one = torch.ones((), device=device)
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        with pytest.raises((RuntimeError, ValueError), match="steps"):
            ops.op(backend, "advance")([good, torch.zeros((), dtype=dtype, device=device)], skipped, None)
    for bad in (torch.zeros(2, device=device), torch.zeros(0, device=device)):
        with pytest.raises((RuntimeError, ValueError), match="steps"):
            ops.op(backend, "advance")([good, bad], skipped, None)
    for bad in (torch.zeros((), dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int64, device=device)):
        with pytest.raises((RuntimeError, ValueError), match="skipped"):
            ops.op(backend, "advance")([good], bad, one)
    ops.op(backend, "advance")([], None, one)
    assert good == 0 and skipped == 0


def test_steps_have_to_be_given(backend, device) -> None:
    """Where the formula has the number of the step in it."""
    for name in ("adamw", "momentum", "lamb"):
        t = Tensors.random(ALGORITHMS[name], DTYPES[0], device, sizes=(5,))
        t.steps, before = [], copy.deepcopy(t.params)
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            t.run(backend, ALGORITHMS[name])
        assert same_bits(t.params, before)
