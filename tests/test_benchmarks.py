"""The benchmark harness: what it counts, computes and writes. How fast anything is, is never tested."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import io
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memkern
from benchmarks import __main__ as runner
from benchmarks import gelu, harness, report
from benchmarks.harness import COPY, EAGER, Effort, Result, Variant
from benchmarks.timing import Calls, CpuClock, freed_memory_kept

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
TINY = gelu.case("erf", 64, torch.float32, "both")
ONCE = Effort(fewest=1, most=1, seconds=0)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the device clock is not run")


class FakeClock:
    """Runs the calls, and takes the samples from a script: a list for each variant, in their order."""

    cache_bytes = 5000

    def __init__(self, *script: list[harness.Sample]) -> None:
        self.script = list(script)
        self.sampled: list[int] = []

    def context(self):
        return contextlib.nullcontext()

    def ready(self, calls):
        calls.run(len(calls))
        samples = self.script.pop(0)
        number = len(self.script)

        def sample():
            self.sampled.append(number)
            return samples.pop(0)

        return "fake", sample


def test_calls_go_round_and_hold_their_outputs():
    made = []
    calls = Calls([lambda name=name: made.append(name) or name for name in "abc"])
    calls.run(4)
    assert made == ["a", "b", "c", "a"]
    calls.run(1)
    assert made[-1] == "b", "a later run goes on where the last one stopped"
    assert calls.held == ["a", "b", "c"]


def test_outputs_of_a_ring_lie_in_different_memory():
    x = torch.randn(1000)
    calls = Calls([lambda: x + 1] * 5)
    calls.run(5)
    assert len({y.data_ptr() for y in calls.held}) == 5


def test_cpu_clock_runs_the_whole_ring_first_and_times_some_calls():
    made = []
    method, sample = CpuClock().ready(Calls([lambda number=number: made.append(number) for number in range(4)]))
    assert method == "wall clock"
    assert set(made) == {0, 1, 2, 3}
    warm = len(made)
    seconds, host = sample()
    assert seconds > 0 and host is None
    assert 1 <= len(made) - warm <= 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is the one that is told to keep memory")
def test_freed_memory_is_kept_for_the_time_of_a_run():
    def resident():
        torch.ones(64 * 2**20)  # 256 MiB, freed at once
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    before = resident()
    with freed_memory_kept():
        assert resident() > before + 200
    assert resident() < before + 100


@pytest.mark.parametrize("bytes", [1, 1000, 2999, 3000, 10**9])
def test_ring_does_not_fit_in_cache(bytes):
    size = harness.ring_size(harness.Case("erf", (1,), torch.float32, "both", bytes), cache_bytes=1000)
    assert size >= 2
    assert size * bytes >= 3 * 1000
    assert size == 2 or (size - 1) * bytes < 3 * 1000, "no larger than it has to be"


def test_label_of_a_matrix():
    case = harness.Case("causal", (3000, 2048), torch.float16, "forward", 1)
    assert case.label == "causal 3000x2K fp16 forward"


def test_copy_moves_the_bytes_of_the_case():
    ring = [gelu.inputs(TINY, CPU)] * 3
    calls = Calls(harness.copies(TINY, ring))
    calls.run(3)
    assert len({copy.data_ptr() for copy in calls.held}) == 3
    assert all(2 * copy.nbytes == TINY.bytes for copy in calls.held)
    assert calls.held[0].std() > 0.5, "random data, written"


def test_variants():
    names = [variant.name for variant in harness.variants(gelu.FAMILY, CPU, quick=False)]
    assert names[:3] == [COPY, EAGER, "torch.compile"]
    usable = [name for name in memkern.backends.names() if harness.why_not(name, CPU) is None]
    assert "reference" in usable and "cuda" not in usable
    assert names[3:] == [f"memkern {name}" for name in usable]

    names = [variant.name for variant in harness.variants(gelu.FAMILY, CPU, quick=True)]
    assert "torch.compile" not in names
    assert ("memkern reference" in names) == (usable == ["reference"])


def test_variants_of_memkern_run_on_the_backend_they_name():
    tensor = torch.empty(1)
    for variant in harness.variants(gelu.FAMILY, CPU, quick=False):
        if variant.name.startswith("memkern"):
            with variant.context():
                assert f"memkern {memkern.backends.choose(tensor)}" == variant.name


def test_the_triton_interpreter_is_not_timed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter" in harness.why_not("triton", CPU)


def test_peers_are_variants_too():
    family = harness.Family("f", "", gelu.cases, gelu.inputs, gelu.baseline, gelu.fused, peers={"peer": gelu.baseline})
    peer = harness.variants(family, CPU, quick=True)[-1]
    assert peer.name == "peer"
    (call,) = peer.calls(TINY, [gelu.inputs(TINY, CPU)])
    assert call()[0].shape == TINY.shape


def test_measure_takes_turns_and_goes_on_after_a_failure(capsys):
    def broken(case, ring):
        raise RuntimeError("no compiler")

    seen = []

    def work(case, ring):
        seen.append(ring)
        return [lambda: None for _ in ring]

    clock = FakeClock([(1.0, None), (2.0, None)], [(3.0, 0.5), (4.0, 0.25)])
    variants = [Variant("first", work), Variant("broken", broken), Variant("last", work)]
    results = harness.measure(gelu.FAMILY, TINY, variants, clock, CPU, Effort(fewest=2, most=2, seconds=0))

    assert results["first"] == Result("fake", [(1.0, None), (2.0, None)])
    assert results["broken"] == Result("", [], "RuntimeError")
    assert results["last"] == Result("fake", [(3.0, 0.5), (4.0, 0.25)])
    assert clock.sampled == [1, 0, 1, 0], "round robin"
    assert "no compiler" in capsys.readouterr().err

    ring = seen[0]
    assert seen[1] is ring, "the same inputs for all"
    assert len(ring) == math.ceil(3 * 5000 / TINY.bytes)
    assert len({x.data_ptr() for x, _ in ring}) == len(ring)
    assert all(x.requires_grad and x.is_leaf and not dy.requires_grad for x, dy in ring)
    assert ring[0][0].std() > 0.5, "random data"


def test_failure_while_sampling_leaves_no_figures(capsys):
    clock = FakeClock([(1.0, None)] * 3, [(2.0, None)])  # the second runs out after one sample
    variants = [Variant(name, lambda case, ring: [lambda: None]) for name in ("good", "bad")]
    results = harness.measure(gelu.FAMILY, TINY, variants, clock, CPU, Effort(fewest=3, most=3, seconds=0))
    assert len(results["good"].samples) == 3
    assert results["bad"] == Result("fake", [], "IndexError")
    assert capsys.readouterr().err.count("bad, erf 64 fp32 both: IndexError") == 1


def test_measure_has_a_fixed_seed():
    rings = []
    for _ in range(2):
        torch.rand(1)
        variants = [Variant("only", lambda case, ring: rings.append(ring) or [lambda: None])]
        harness.measure(gelu.FAMILY, TINY, variants, FakeClock([(1.0, None)]), CPU, ONCE)
    assert torch.equal(rings[0][0][0], rings[1][0][0])


@pytest.mark.parametrize(("seconds", "rounds"), [(0, 3), (1e9, 7)])
def test_rounds_end_with_the_time_within_bounds(seconds, rounds):
    variants = [Variant("only", lambda case, ring: [lambda: None])]
    clock = FakeClock([(1.0, None)] * 7)
    results = harness.measure(gelu.FAMILY, TINY, variants, clock, CPU, Effort(fewest=3, most=7, seconds=seconds))
    assert len(results["only"].samples) == rounds


RESULTS = {
    COPY: Result("graph", [(2e-6, 1e-6), (1e-6, 1e-6), (9e-6, 1e-6)]),
    EAGER: Result("graph", [(8e-6, 3e-6), (6e-6, 1e-6), (16e-6, 2e-6), (4e-6, 4e-6)]),
    "torch.compile": Result(error="InductorError"),
    "memkern cuda": Result("events", [(4e-6, None)]),
}


def test_summary():
    case = gelu.case("erf", 1000, torch.bfloat16, "forward")
    copy, eager, failed, ours = harness.summarise(gelu.FAMILY, case, RESULTS)

    assert (copy.variant, copy.seconds, copy.percent_of_copy, copy.rounds) == (COPY, 2e-6, 100, 3)
    assert eager.seconds == pytest.approx(7e-6)
    assert eager.spread == pytest.approx((10 - 5.5) / 7)  # quartiles of 4 6 8 16
    assert eager.host_seconds == pytest.approx(2.5e-6)
    assert eager.ratio_to_eager == 1
    assert failed.error == "InductorError"
    assert failed.seconds is failed.gigabytes_per_second is failed.percent_of_copy is failed.ratio_to_eager is None
    assert ours.gigabytes_per_second == pytest.approx(4000 / 4e-6 / 1e9)
    assert ours.percent_of_copy == pytest.approx(50)
    assert ours.ratio_to_eager == pytest.approx(7 / 4), "above 1 is faster than eager"
    assert ours.host_seconds is ours.spread is None
    assert (ours.shape, ours.dtype, ours.direction, ours.bytes) == ("1000", "bfloat16", "forward", 4000)


def test_summary_without_the_yardsticks():
    (row,) = harness.summarise(gelu.FAMILY, TINY, {"memkern cpu": Result("wall clock", [(1.0, None)])})
    assert row.percent_of_copy is row.ratio_to_eager is None
    assert row.seconds == 1.0


def test_json_and_csv_give_the_rows_back(tmp_path):
    rows = harness.summarise(gelu.FAMILY, TINY, RESULTS)
    environment = report.environment(CPU, 1000)
    report.write(tmp_path / "new", gelu.FAMILY, rows, environment)

    document = json.loads((tmp_path / "new" / "gelu.json").read_text())
    assert document["environment"] == environment
    assert [harness.Row(**row) for row in document["rows"]] == rows

    with open(tmp_path / "new" / "gelu.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert read == [
        {name: "" if value is None else str(value) for name, value in dataclasses.asdict(row).items()} for row in rows
    ]


def test_environment_names_no_folder():
    environment = report.environment(CPU, 1000)
    assert environment["torch"] == torch.__version__
    assert environment["memkern"] == memkern.__version__
    assert "reference" in environment["memkern_backends"]
    assert str(ROOT) not in json.dumps(environment)


def test_slug():
    assert report.slug("Intel(R) Xeon(R) CPU @ 2.20GHz ") == "intel-r-xeon-r-cpu-2-20ghz"


@pytest.mark.parametrize("with_rich", [True, False])
def test_table(monkeypatch, capsys, with_rich):
    if with_rich:
        pytest.importorskip("rich.console")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    rows = harness.summarise(gelu.FAMILY, TINY, RESULTS)
    report.show("the title", "the caption", [[report.cells(TINY, row) for row in rows]])
    text = capsys.readouterr().out
    assert "the title" in text and "the caption" in text
    for column in report.COLUMNS:
        assert column in text
    (ours,) = [line for line in text.splitlines() if "memkern cuda" in line]
    expected = ["erf 64 fp32 both", "memkern cuda", "4.0", "-", f"{TINY.bytes / 4e-6 / 1e9:.1f}", "50", "1.75", "-"]
    position = -1
    for cell in expected:
        position = ours.index(cell, position + 1)
    (failed,) = [line for line in text.splitlines() if "torch.compile" in line]
    assert "InductorError" in failed and "failed" in failed


def test_plot(monkeypatch, tmp_path):
    Figure = pytest.importorskip("matplotlib.figure").Figure
    saved = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: saved.update({path: figure}))
    rows = harness.summarise(gelu.FAMILY, TINY, RESULTS)
    report.plot(tmp_path, gelu.FAMILY, ["another", TINY.label], [[], rows], "a device")
    (axes,) = saved[tmp_path / "gelu.png"].axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn.pop(EAGER)[0][0] == 1
    assert drawn == {"memkern cuda": [[pytest.approx(1.75), 1]]}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["another", TINY.label]


def test_no_matplotlib_no_plot(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.plot(tmp_path, gelu.FAMILY, [TINY.label], [[]], "a device")
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def run_quick(device: str, folder: Path) -> tuple[str, list[dict[str, str]]]:
    command = [sys.executable, "-m", "benchmarks", "gelu", "--quick", "--device", device, "--out", str(folder)]
    # One thread: where other processes want the cores too, threads that wait for each other take ages.
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, list(csv.DictReader(io.StringIO((folder / "gelu.csv").read_text())))


def check_quick(device: str, folder: Path) -> list[dict[str, str]]:
    text, rows = run_quick(device, folder)
    cases = gelu.cases(device, quick=True)
    names = {variant.name for variant in harness.variants(gelu.FAMILY, torch.device(device), quick=True)}
    assert {row["variant"] for row in rows} == names
    assert len(rows) == len(cases) * len(names)
    assert all(row["error"] == "" and float(row["seconds"]) > 0 for row in rows)
    assert all(float(row["ratio_to_eager"]) == 1 for row in rows if row["variant"] == EAGER)
    assert all(case.label in text for case in cases)
    assert "above 1 is faster than torch eager" in text
    assert json.loads((folder / "gelu.json").read_text())["environment"]["memkern"] == memkern.__version__
    return rows


def test_runner_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.delitem(memkern.backends._LOADERS, "emulated", raising=False)  # an earlier test may have added it
    rows = check_quick("cpu", tmp_path)
    assert all(row["method"] == "wall clock" and row["host_seconds"] == "" for row in rows)


def test_run_goes_on_where_torch_compile_fails(monkeypatch, tmp_path, capsys):
    def no_compiler(*arguments, **options):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", no_compiler)
    monkeypatch.setattr(harness, "FULL", ONCE)
    case = gelu.case("tanh", 2**18, torch.float32, "both")
    runner.run(dataclasses.replace(gelu.FAMILY, cases=lambda device, quick: [case]), CPU, quick=False, out=tmp_path)
    rows = {row["variant"]: row for row in json.loads((tmp_path / "gelu.json").read_text())["rows"]}
    assert rows.pop("torch.compile")["error"] == "RuntimeError"
    assert {COPY, EAGER, "memkern reference"} <= set(rows)
    assert all(row["error"] == "" and row["seconds"] > 0 for row in rows.values())
    assert "torch.compile: RuntimeError" in capsys.readouterr().out
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "gelu.png").read_bytes().startswith(b"\x89PNG")


@needs_cuda
def test_runner_on_a_cuda_device(tmp_path):
    rows = check_quick("cuda", tmp_path)
    assert all(row["method"] == "graph" and float(row["host_seconds"]) > 0 for row in rows)


@needs_cuda
def test_calls_that_no_graph_can_hold_are_queued():
    # In a process of its own: a broken capture is no state to leave to other tests.
    script = """
import torch
from benchmarks.timing import Calls, CudaClock
clock = CudaClock(torch.device("cuda"))
with clock.context():
    x = torch.randn(1000, device="cuda")
    method, sample = clock.ready(Calls([lambda: x.sum().item()] * 2))
    assert method == "events", method
    seconds, host = sample()
    assert seconds > 0 and host > 0
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=300)


def test_unknown_family(capsys):
    with pytest.raises(SystemExit):
        runner.main(["gelo"])
    assert "got 'gelo', needs one of gelu" in capsys.readouterr().err


def test_cuda_without_a_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        runner.main(["--device", "cuda"])
    assert "torch finds no CUDA device" in capsys.readouterr().err
