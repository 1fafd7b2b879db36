"""How fast the ops are, beside PyTorch's own: ``python -m benchmarks [family ...] [--quick]``.

``timing.py`` runs and times calls, ``harness.py`` compares variants on a case, ``report.py`` prints and
writes the results. A family of ops is one file that ends in ``FAMILY = Family(...)`` and is named in
``__main__.FAMILIES``; ``gelu.py`` is the pattern.
"""
