"""Cross-entropy, distillation and linear + cross-entropy: memkern's, PyTorch's, and liger-kernel's where installed.

16-bit cases are under autocast, where PyTorch's losses are computed in float32.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

import memkern
from benchmarks.harness import Case, Family, Function

FORMS = ("cross-entropy", "distillation", "linear")
DIRECTIONS = ("forward", "backward", "both")
CLASSES = (1000, 32_000, 50_257, 128_256, 262_144)
ELEMENTS = {"cuda": 2**29, "cpu": 2**26}  # logits of a case
TEMPERATURE = 2.0


def bytes_moved(form: str, shape: tuple[int, ...], size: int, direction: str) -> int:
    """Each tensor once, loss and gradients included; of "linear" not the logits, which need not reach memory."""
    rows, classes = shape[:2]
    if form == "linear":
        tensors = size * shape[2] * (rows + classes)
        return 2 * tensors + 8 * rows + 4
    logits, saved = (1, 1) if form == "cross-entropy" else (2, 2)
    target = 8 * rows if form == "cross-entropy" else 0
    forward = size * rows * classes * logits + target + 4 * rows * saved + 4
    backward = size * rows * classes * (logits + 1) + target + 4 * rows * saved + 4
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def case(form: str, shape: tuple[int, ...], dtype: torch.dtype, direction: str) -> Case:
    return Case(form, shape, dtype, direction, bytes_moved(form, shape, dtype.itemsize, direction))


def cases(device: str, quick: bool) -> list[Case]:
    if quick:
        found = [case("cross-entropy", (256, 50_257), torch.bfloat16, direction) for direction in DIRECTIONS]
        found.append(case("distillation", (128, 50_257), torch.bfloat16, "both"))
        return [*found, case("linear", (1024, 16_384, 256), torch.bfloat16, "both")]
    found = []
    for classes in CLASSES:
        shape = (ELEMENTS[device] // classes, classes)
        found += [case("cross-entropy", shape, torch.bfloat16, direction) for direction in DIRECTIONS]
    for dtype in (torch.float16, torch.float32):
        found.append(case("cross-entropy", (ELEMENTS[device] // 50_257, 50_257), dtype, "both"))
    found.append(case("distillation", (ELEMENTS[device] // 50_257, 50_257), torch.bfloat16, "both"))
    # Its backward pass alone, on one graph over and over, is another one from the second time on.
    found += [case("linear", (tokens, 50_257, 768), torch.bfloat16, "both") for tokens in (2048, 8192)]
    return found


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """Logits and target; or logits and the teacher's; or hidden, weight and target; and the gradient of the loss."""
    rows, classes, *features = case.shape
    dloss = torch.ones((), dtype=torch.float32, device=device)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device)

    if case.form == "distillation":
        return randn(rows, classes).requires_grad_(), randn(rows, classes), dloss
    target = torch.randint(classes, (rows,), device=device)
    if case.form == "cross-entropy":
        return randn(rows, classes).requires_grad_(), target, dloss
    weight = (0.02 * randn(classes, *features)).requires_grad_()
    return randn(rows, *features).requires_grad_(), weight, target, dloss


def under_autocast(case: Case, function: Function) -> Function:
    if case.dtype.itemsize != 2:
        return function

    @functools.wraps(function)
    def call(*tensors: Tensor) -> Tensor:
        with torch.autocast(tensors[0].device.type, case.dtype):
            return function(*tensors)

    return call


def _distillation(student: Tensor, teacher: Tensor, kl_div: Function = F.kl_div) -> Tensor:
    student, teacher = (F.log_softmax(t.float() / TEMPERATURE, -1) for t in (student, teacher))
    return TEMPERATURE**2 * kl_div(student, teacher, reduction="batchmean", log_target=True)


def _chain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def baseline(case: Case) -> Function:
    functions = {"cross-entropy": F.cross_entropy, "distillation": _distillation, "linear": _chain}
    return under_autocast(case, functions[case.form])


def fused(case: Case) -> Function:
    functional = memkern.functional
    distillation = functools.partial(functional.distillation_loss, temperature=TEMPERATURE)
    functions = {
        "cross-entropy": functional.cross_entropy,
        "distillation": functools.update_wrapper(distillation, functional.distillation_loss),
        "linear": functional.linear_cross_entropy,
    }
    return under_autocast(case, functions[case.form])


class _OverOwn(torch.autograd.Function):
    """``own``, with the gradient of x."""

    @staticmethod
    def forward(ctx, x: Tensor, own: Tensor) -> Tensor:
        return own.detach()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def liger(case: Case) -> Function:
    """Its cross-entropy writes the gradient over the logits: it has a copy of them, made in its first call."""
    from liger_kernel.transformers import functional

    own: dict[int, Tensor] = {}

    def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        if logits.data_ptr() not in own:
            own[logits.data_ptr()] = logits.detach().clone()
        return functional.liger_cross_entropy(_OverOwn.apply(logits, own[logits.data_ptr()]), target)

    functions = {
        "cross-entropy": cross_entropy,
        # Of log-softmaxes: it has no loss of the logits of a student and a teacher.
        "distillation": functools.partial(_distillation, kl_div=functional.liger_kl_div),
        "linear": functional.liger_fused_linear_cross_entropy,
    }
    return under_autocast(case, functions[case.form])


FAMILY = Family(
    name="cross_entropy",
    formula=(
        "bytes: element size times number of logits, times 1 forward, 2 backward, 3 both (distillation: 2, 3, 5), and "
        "what there is a row; linear: hidden, weight and their gradients once"
    ),
    cases=cases,
    inputs=inputs,
    baseline=baseline,
    fused=fused,
    peers={"liger-kernel": liger} if importlib.util.find_spec("liger_kernel") else {},
)
