"""Which files test the ops of each family. Run, it prints them all, for the Makefile."""

from __future__ import annotations

from pathlib import Path

FAMILIES = sorted(path.stem for path in (Path(__file__).parents[1] / "csrc" / "cuda").glob("*.cu"))
# Besides tests/test_<family>.py.
MORE = {"cross_entropy": ("distillation",), "softmax": ("softmax_masks", "softmax_dropout")}


def op_tests(family: str) -> list[str]:
    """Relative to the repository."""
    return [f"tests/test_{name}.py" for name in (family, *MORE.get(family, ()))]


if __name__ == "__main__":
    print(*(name for family in FAMILIES for name in op_tests(family)))
