"""The command line: `memkern demo` and `memkern info`."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import memkern
from memkern import demo
from memkern.__main__ import main
from memkern.functional import linear_cross_entropy_autograd as chunks

CPU = torch.device("cpu")
TINY = replace(demo.ON_CPU, layers=2, width=32, heads=2, context=16, batch=8, steps=30, learning_rate=1e-2)
BOTH = (demo.PYTORCH, demo.MEMKERN)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for a busy core make such small steps many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_memkern(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "memkern", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=120, check=False,
    )


def tiny_training(parts=demo.PYTORCH, dtype=torch.float32, seed=0):
    return demo.Training(parts, TINY, CPU, dtype, seed)


# The whole command, in a terminal that has neither colours nor Unicode.


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "curves [b].png"
    done = run_memkern("demo", "--device", "cpu", "--steps", "12", "--layers", "1", "--out", str(out),
                       NO_COLOR="1", PYTHONIOENCODING="ascii", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    return done.stdout, out


def table_row(text, label):
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {label} "))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_demo_prints_the_table(demo_run):
    text, _ = demo_run
    torch_loss, our_loss, _ = map(float, table_row(text, "Final loss (nats/byte)"))
    assert our_loss == pytest.approx(torch_loss, abs=0.05)
    assert our_loss < 5.0  # a uniform guess costs ln 256 = 5.55
    torch_saved, our_saved, _ = map(float, table_row(text, "Saved for backward per step (MiB)"))
    assert 0 < our_saved <= torch_saved
    assert table_row(text, "Optimizer state (bytes/parameter)") == ["8.00", "8.00", "1.000"]
    assert table_row(text, "Peak GPU memory (MiB)") == ["no GPU", "no GPU", ""]
    torch_ms, our_ms, ratio = map(float, table_row(text, "Step time (ms, median)"))
    assert ratio == pytest.approx(our_ms / torch_ms, rel=0.05)
    assert table_row(text, "Skipped steps") == ["0", "0", ""]


def test_demo_says_which_dtype_and_backend(demo_run):
    text, _ = demo_run
    assert "ms in fp16" in text
    assert "ms in bf16" in text
    assert "ms in fp32" in text
    assert "GradScaler" in text
    assert f"run on the {memkern.backends.choose(torch.empty(0))} backend" in text


def test_demo_output_is_plain(demo_run):
    text, _ = demo_run
    assert "\x1b" not in text
    assert "12/12" in text


def test_demo_writes_the_png(demo_run):
    text, out = demo_run
    assert f"Loss curves and memory bars: {out}\n" in text
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(out)[..., :3]
    assert pixels.shape == (675, 1650, 3)
    for half in (pixels[:, :900], pixels[:, 1100:]):  # curves and bars, below their legends
        for colour in ((0xF2, 0xA6, 0x5A), (0x1D, 0x4E, 0x89)):  # both trainings are drawn
            assert (abs(half[150:] * 255 - colour).max(-1) < 1).sum() > 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: got '0', needs a whole number from 1 to"),
        (["--layers", "two"], "argument --layers: got 'two', needs a whole number from 1 to"),
        (["--seed", "-1"], "argument --seed: got '-1', needs a whole number from 0 to"),
        (["--device", "tpu"], "argument --device: got 'tpu', needs one of those usable here: cpu"),
        (["--device", "cuda:99"], "argument --device: got 'cuda:99', needs one of"),
        (["--out", "no/such/directory/x.png"], "argument --out: got 'no/such/directory/x.png', needs a file name in"),
        (["--out", f"{__file__}/x.png"], "/x.png', needs a file name in"),
        (["--out", "."], "argument --out: got '.', needs a file name in"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_device_that_the_backend_chosen_by_hand_does_not_serve(monkeypatch, capsys):
    def choose(x):
        raise RuntimeError("backend 'cuda' was asked for, but it serves cuda tensors, not cpu")

    monkeypatch.setattr(memkern.backends, "choose", choose)
    with pytest.raises(SystemExit):
        main(["demo", "--device", "cpu"])
    assert "argument --device: backend 'cuda' was asked for" in capsys.readouterr().err


# The two trainings.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_trainings_start_alike_and_learn(dtype):
    trainings = [tiny_training(parts, dtype) for parts in BOTH]
    assert trainings[0].model.state_dict().keys() == trainings[1].model.state_dict().keys()
    for first, second in zip(*(t.model.parameters() for t in trainings), strict=True):
        assert torch.equal(first, second)
    demo.train(trainings, demo.Batches(TINY, CPU, 0), TINY.steps, Console(file=io.StringIO()))
    first, second = (t.losses[0] for t in trainings)
    assert first == pytest.approx(5.545, abs=0.05)  # ln 256
    assert second == pytest.approx(first, abs=1e-3)
    for training in trainings:
        assert len(training.losses) == len(training.seconds) == TINY.steps
        assert training.final_loss < training.losses[0] - 1.5
        assert training.skipped <= (4 if dtype == torch.float16 else 0)  # 65536, the first loss scale, is high for fp16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_has_the_dtype(dtype):
    training, seen = tiny_training(dtype=dtype), []
    training.model.blocks[0].mix.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    training.step(demo.Batches(TINY, CPU, 0).next())
    assert seen == [dtype]
    assert training.scaler.is_enabled()


def test_seed_makes_the_weights():
    first, again, other = (tiny_training(seed=seed).model.logits.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_only_the_parts_differ():
    ours, theirs = tiny_training(demo.MEMKERN), tiny_training(demo.PYTORCH)
    for layer, count in ((memkern.nn.GELU, TINY.layers), (memkern.nn.LayerNorm, 2 * TINY.layers + 1)):
        assert sum(isinstance(m, layer) for m in ours.model.modules()) == count
        assert sum(isinstance(m, layer) for m in theirs.model.modules()) == 0
    assert repr(ours.model) == repr(theirs.model)
    assert (type(ours.optimizer), type(ours.scaler)) == (memkern.optim.AdamW, memkern.amp.GradScaler)
    assert (type(theirs.optimizer), type(theirs.scaler)) == (torch.optim.AdamW, torch.amp.GradScaler)


def test_a_run_takes_its_steps_with_both_optimizers(monkeypatch, tmp_path):
    """Ten of either for the memory, then the training's, in turn; memkern's under memkern's scaler."""
    steps, updates = [], []

    def noted(kind, method, notes):
        original = getattr(kind, method)

        def call(self, *arguments):
            notes.append(kind)
            return original(self, *arguments)

        monkeypatch.setattr(kind, method, call)

    ours, theirs = memkern.optim.AdamW, torch.optim.AdamW
    noted(ours, "step", steps)
    noted(theirs, "step", steps)
    noted(memkern.amp.GradScaler, "step", updates)
    monkeypatch.setattr(demo, "ON_CPU", TINY)
    demo.run(steps=3, layers=1, seed=0, device=CPU, out=tmp_path / "x.png")
    assert steps == [theirs] * 10 + [ours] * 10 + [theirs, ours] * 3
    assert len(updates) == 13


def test_both_see_the_same_batches():
    seen = []
    trainings = [SimpleNamespace(step=seen.append, losses=[0.0]) for _ in BOTH]
    demo.train(trainings, demo.Batches(TINY, CPU, 0), 3, Console(file=io.StringIO()))
    assert seen[0] is seen[1]
    assert seen[4] is seen[5]
    assert not torch.equal(seen[0], seen[2])


def test_batches_are_pieces_of_the_text_from_the_seed():
    first, again, other = (demo.Batches(TINY, CPU, seed).next() for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (8, 17)
    text = "\n".join(demo.topics.values()).encode()
    assert all(bytes(row.tolist()) in text for row in first)


def test_step_is_adamw_on_the_mean_loss_of_the_next_byte():
    training, plain = tiny_training(), demo.GPT(TINY, demo.PYTORCH)
    plain.load_state_dict(training.model.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=TINY.learning_rate)
    batches = demo.Batches(TINY, CPU, 0)
    for _ in range(3):
        batch = batches.next()
        training.step(batch)
        logits = plain.logits(plain(batch[:, :-1]))
        loss = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert training.losses[-1] == pytest.approx(loss.item(), rel=1e-4)


def test_memkerns_loss_is_linear_cross_entropy(monkeypatch):
    calls = []
    run = chunks._run
    monkeypatch.setattr(chunks, "_run", lambda *arguments: calls.append(arguments) or run(*arguments))
    for parts, expected in ((demo.PYTORCH, 0), (demo.MEMKERN, 1)):
        tiny_training(parts).step(demo.Batches(TINY, CPU, 0).next())
        assert len(calls) == expected


def test_model_is_causal():
    model = tiny_training().model
    text = torch.randint(256, (1, 16))
    changed = text.clone()
    changed[0, 10] += 1 if text[0, 10] < 255 else -1
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def training_that_overflows(which):
    """A training whose gradients are infinite in the steps that ``which`` has a True for."""
    factors = (torch.inf if overflows else 1.0 for overflows in which)

    def loss(hidden, weight, target):
        return F.cross_entropy(F.linear(hidden, weight), target) * next(factors)

    return tiny_training(replace(demo.PYTORCH, linear_cross_entropy=loss))


def test_skipped_steps_are_counted():
    training = training_that_overflows([False, True, False])
    batches = demo.Batches(TINY, CPU, 0)
    counts = []
    for _ in range(3):
        training.step(batches.next())
        counts.append(training.skipped)
    assert counts == [0, 1, 1]


def test_memory_is_measured_past_the_skipped_steps():
    training = training_that_overflows([True] * 4 + [False] * 7)
    memory = demo.measure_memory(training, demo.Batches(TINY, CPU, 0).next())
    assert training.skipped == 4
    assert memory.optimizer > 8 * memory.parameters


def test_measured_memory():
    memories = [demo.measure_memory(tiny_training(parts), demo.Batches(TINY, CPU, 0).next()) for parts in BOTH]
    tensors = len(list(tiny_training().model.parameters()))
    for memory in memories:
        assert memory.parameters == sum(p.numel() for p in tiny_training().model.parameters())
        assert memory.optimizer == 8 * memory.parameters + 4 * tensors
        assert memory.peak is None
    assert memories[1].saved <= memories[0].saved
    hidden = TINY.batch * TINY.context * TINY.width * 4
    assert memories[0].saved > TINY.layers * 10 * hidden  # GELU's input and output alone are 8


@pytest.mark.parametrize(
    ("fp16", "bf16", "fp32", "chosen"),
    [
        (1.0, 1.0, 1.0, torch.float16),
        (0.5, 0.3, 1.0, torch.float16),
        (90.0, 0.3, 1.0, torch.bfloat16),
        (90.0, 70.0, 1.0, torch.float32),
    ],
)
def test_quick_dtype(fp16, bf16, fp32, chosen):
    assert demo.quick_dtype({torch.float16: fp16, torch.bfloat16: bf16, torch.float32: fp32}) == chosen


def test_without_a_quick_16_bit_type_there_is_no_autocast(monkeypatch):
    monkeypatch.setattr(demo, "matmul_ms", lambda dtype: 100.0 if dtype.itemsize == 2 else 1.0)
    said = io.StringIO()
    assert demo.choose_dtype(CPU, Console(file=said, width=200)) == torch.float32
    assert "100 ms in fp16, 100 ms in bf16, 1 ms in fp32" in said.getvalue()
    assert "no autocast, but GradScaler all the same" in said.getvalue()


def test_results_and_plot_with_a_gpu(tmp_path):
    trainings = [tiny_training(parts) for parts in BOTH]
    for training in trainings:
        training.losses, training.seconds = [5.0, 4.0], [0.010, 0.020]
    trainings[1].seconds, trainings[1].skipped = [0.006, 0.003], 2
    memories = [
        demo.Memory(saved=40 * demo.MIB, optimizer=8000, parameters=1000, peak=300 * demo.MIB),
        demo.Memory(saved=10 * demo.MIB, optimizer=2000, parameters=1000, peak=150 * demo.MIB),
    ]
    said = io.StringIO()
    Console(file=said, width=100).print(demo.results(trainings, memories))
    text = said.getvalue().replace("│", "|")
    assert table_row(text, "Final loss (nats/byte)") == ["4.5000", "4.5000", "1.000"]
    assert table_row(text, "Saved for backward per step (MiB)") == ["40.00", "10.00", "0.250"]
    assert table_row(text, "Optimizer state (bytes/parameter)") == ["8.00", "2.00", "0.250"]
    assert table_row(text, "Peak GPU memory (MiB)") == ["300.0", "150.0", "0.500"]
    assert table_row(text, "Step time (ms, median)") == ["15.0", "4.5", "0.300"]
    assert table_row(text, "Skipped steps") == ["0", "2", ""]
    demo.plot(trainings, memories, "title", tmp_path / "gpu.png")
    assert matplotlib.image.imread(tmp_path / "gpu.png").shape[:2] == (675, 1650)


# memkern info.


def info(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # no row is broken over two lines
    main(["info"])
    return capsys.readouterr().out.replace("│", "|")


def test_info(capsys, monkeypatch):
    text = info(capsys, monkeypatch)
    assert table_row(text, "memkern") == [memkern.__version__]
    assert table_row(text, "PyTorch") == [torch.__version__]
    assert torch.backends.cpu.get_cpu_capability() in text
    on_cpu, on_cuda = memkern.backends.explain("cpu"), memkern.backends.explain("cuda")
    for name in memkern.backends.names():
        assert table_row(text, name) == [on_cpu[name], on_cuda[name]]


def test_info_has_a_column_for_each_device(capsys, monkeypatch):
    monkeypatch.setattr(memkern.backends, "explain", lambda device: dict.fromkeys(memkern.backends.names(), device))
    text = info(capsys, monkeypatch)
    assert table_row(text, "reference") == ["cpu", "cuda"]


def test_info_with_nothing_installed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # import triton raises ImportError
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = info(capsys, monkeypatch)
    assert table_row(text, "Triton")[0].startswith("none (")
    assert table_row(text, "CUDA of PyTorch") == ["none"]
    assert table_row(text, "nvcc") == table_row(text, "g++") == ["not on PATH"]
    assert table_row(text, "GPU") == ["none that this PyTorch sees"]
    assert "CUDA tensors (no GPU here)" in text


def test_info_names_the_gpus(capsys, monkeypatch):
    gpu = SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    text = info(capsys, monkeypatch)
    assert table_row(text, "cuda:0") == table_row(text, "cuda:1") == ["Some GPU, capability 9.0, 80.0 GiB"]


def test_info_as_a_command_with_a_backend_chosen_by_hand():
    done = run_memkern("info", NO_COLOR="1", PYTHONIOENCODING="ascii", COLUMNS="200", MEMKERN_BACKEND="reference")
    assert done.returncode == 0, done.stderr
    assert table_row(done.stdout, "reference") == ["runs: chosen by hand"] * 2


def test_attention_is_the_one_that_saves_fewest_bytes():
    """Of PyTorch's and a product with the fused softmax of the scores in between."""

    def by_softmax(q, k, v, is_causal):
        assert is_causal
        return memkern.functional.scaled_masked_softmax(q @ k.mT, scale=q.shape[-1] ** -0.5, causal="square") @ v

    saved = []
    for attention in (demo.MEMKERN.attention, by_softmax):
        q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 4, 128, 16))
        with memkern.memory.saved_for_backward() as found:
            y = attention(q, k, v, is_causal=True)
        saved.append(found.bytes)
        assert y.shape == v.shape
    assert saved[0] < saved[1]
