"""The examples, as their users run them: small sizes, one line for each mistake, the same bits after a resume."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import bounds
from tests.conftest import ROOT, quick_compilation
from tests.program_tools import run_program

SCRIPT = ROOT / "examples" / "train_lm.py"
SMALL = ("--width", "64", "--layers", "1", "--batch", "2", "--length", "16", "--steps", "6", "--save-every", "3")
SCALED = (*SMALL, "--recipe", "FP8Delayed")
"""A run whose checkpoints hold the state of delayed scaling, too."""
STRICTNESS = ("XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION")
"""Variables that conftest sets for the library's tests; examples have to run without them."""

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in STRICTNESS}
if quick_compilation() in os.environ["XLA_FLAGS"]:
    ENVIRONMENT["XLA_FLAGS"] = quick_compilation()


@contextmanager
def lax() -> Iterator[None]:
    """JAX as it is without the variables of conftest."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The example's module. Runs of the same settings share their compiled functions, as tracing them takes seconds.

    The model's tables of strings and its samples are small.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        module = importlib.import_module(SCRIPT.stem)
        built = cache(module.build)

        def build(*settings: Any, **options: Any) -> Any:
            program = built(*settings, **options)
            # A copy, as a run donates its state; placed, as a state that is read from a checkpoint is.
            return program._replace(state=jax.device_put(jax.tree.map(jnp.copy, program.state), jax.devices()[0]))

        patch.setattr(module, "build", build)
        patch.setattr(module, "SAMPLE_BYTES", 30)
        patch.setattr(importlib.import_module("lm.model"), "GRAM_ROWS", 256)
        yield module


@pytest.fixture(scope="module")
def train_here(example: Any) -> Callable[..., tuple[int, str, str]]:
    """Runs the example in this interpreter: its status, what it prints, and what it prints as errors."""

    def run(*options: str | Path) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with lax(), redirect_stdout(out), redirect_stderr(err):
            status = example.main([str(option) for option in options])
        return status, out.getvalue(), err.getvalue()

    return run


@pytest.fixture
def mistake(train_here: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """The one line that the example prints before it exits, run in this interpreter."""

    def run(*options: str | Path) -> str:
        status, _, said = train_here(*options)
        assert status == 2, f"status {status}\n{said}"
        lines = [line for line in said.splitlines() if "training:" not in line]
        assert len(lines) == 1, said
        assert lines[0].startswith("train_lm: "), lines[0]
        return lines[0]

    return run


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two files, the second of which is held out."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("abcd" * 500)
    (folder / "b.txt").write_text("abcdabcd" * 50)
    return folder


@pytest.fixture(scope="module")
def finished(
    text: Path, tmp_path_factory: pytest.TempPathFactory, train_here: Callable[..., tuple[int, str, str]]
) -> Path:
    """A whole small run: its results, and its checkpoints of steps 3 and 6 in `saved`."""
    folder = tmp_path_factory.mktemp("finished")
    options = ("--text", text, "--output", folder, "--checkpoint", folder / "saved", "--prompt", "ab", *SCALED)
    status, printed, errors = train_here(*options)
    assert status == 0, errors
    assert "bits per byte on 400 held-out bytes" in printed, printed
    said = (
        *("a model of", "compiling a training step", "predicting held-out text ...", "compressing it ..."),
        *("continuing the prompt ...", "timing 5 more steps with jax_grouped and with jax.lax.ragged_dot"),
        *("this model", "byte frequencies", "zlib", "lzma", "lzma after 0.0 MB", "training step (best of 4)"),
        *("jax_grouped", "jax.lax.ragged_dot", "tokens/s"),
    )
    at = [printed.find(words) for words in said]
    assert -1 not in at, f"{said[at.index(-1)]!r} is missing:\n{printed}"
    assert at[:6] == sorted(at[:6]), printed
    return folder


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_a_run_leaves_its_results(finished: Path) -> None:
    figures = summary(finished)
    assert len(figures["losses"]) == 6
    assert np.isfinite(figures["held_out_bits_per_byte"])
    assert figures["others_bits_per_byte"]["byte frequencies"] == 2.0  # four letters, equally often
    assert set(figures["step_ms"]) == {"jax_grouped", "jax.lax.ragged_dot"}
    assert (finished / "training.png").read_bytes().startswith(b"\x89PNG")
    assert (finished / "sample.txt").read_bytes().startswith(b"ab")
    assert {int(path.name) for path in (finished / "saved").iterdir() if path.name.isdigit()} == {3, 6}


def test_a_resumed_run_equals_an_uninterrupted_one(
    finished: Path, text: Path, tmp_path: Path, train_here: Callable[..., tuple[int, str, str]]
) -> None:
    """As after a crash that follows step 3; the state of delayed scaling goes on too."""
    shutil.copytree(finished / "saved", tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "6")
    options = ("--text", text, "--output", tmp_path, "--prompt", "ab", *SCALED, "--no-compare")
    status, said, progress = train_here("--checkpoint", tmp_path / "saved", "--resume", *options)
    assert status == 0, progress
    assert "3/6 [00:00<?" in progress, f"it was not resumed behind step 3:\n{progress}"
    assert set(summary(tmp_path)["step_ms"]) == {"jax_grouped"}
    assert "not timed, as it may compute every row with each of 8 experts (--compare)" in said
    resumed, whole = summary(tmp_path), summary(finished)
    assert whole["settings"]["recipe"] == "FP8Delayed"
    for name in ("losses", "held_out_bits_per_byte"):
        assert resumed[name] == whole[name], name
    assert (tmp_path / "sample.txt").read_bytes() == (finished / "sample.txt").read_bytes()


def test_a_checkpoint_holds_the_keys_of_stochastic_rounding(
    text: Path,
    tmp_path: Path,
    example: Any,
    train_here: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--text", text, "--prompt", "ab", *SMALL, "--recipe", "NVFP4", "--no-compare", "--output", tmp_path)
    options = (*options, "--checkpoint", tmp_path / "saved")
    notes = tmp_path / "saved" / "6" / "notes" / "metadata"
    monkeypatch.setattr(example, "finish", lambda *_: None)  # the losses are in the checkpoint
    status, _, said = train_here(*options)
    assert status == 0, said
    whole = json.loads(notes.read_text())
    assert whole["settings"]["recipe"] == "NVFP4"
    assert len(whole["losses"]) == 6
    shutil.rmtree(tmp_path / "saved" / "6")
    status, _, said = train_here(*options, "--resume")
    assert status == 0, said
    assert "3/6 [00:00<?" in said, f"it was not resumed behind step 3:\n{said}"
    assert json.loads(notes.read_text())["losses"] == whole["losses"]


def test_ctrl_c_saves_and_leaves(text: Path, tmp_path: Path) -> None:
    """In a process of its own, with the sizes that users have."""
    options = ("--text", text, "--output", tmp_path, "--checkpoint", tmp_path / "saved", *SMALL, "--steps", "1000000")
    command = [sys.executable, str(SCRIPT), *map(str, options), "--save-every", "1000000"]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as run:
        assert run.stderr is not None
        seen = b""
        while b"bits/byte" not in seen:
            part = os.read(run.stderr.fileno(), 4096)
            assert part, f"it ended early:\n{seen.decode()}"
            seen += part
        time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        seen += run.stderr.read()
        assert run.wait() == 130, seen.decode()
    assert b"Traceback" not in seen, seen.decode()
    assert seen.decode().splitlines()[-1].startswith("train_lm: stopped by Ctrl-C")
    assert [path.name for path in (tmp_path / "saved").iterdir() if path.name.isdigit()], "no checkpoint was written"


def test_a_checkpoint_of_another_run_is_refused(
    finished: Path, text: Path, tmp_path: Path, mistake: Callable[..., str]
) -> None:
    saved = ("--checkpoint", finished / "saved", "--output", tmp_path, "--text", text)
    line = mistake(*saved, *SCALED, "--resume", "--experts", "4")
    assert "is of another run: experts 8 there, 4 here" in line
    assert "holds a run; add --resume" in mistake(*saved, *SMALL)


def test_a_broken_checkpoint_is_refused(
    finished: Path, text: Path, tmp_path: Path, mistake: Callable[..., str]
) -> None:
    shutil.copytree(finished / "saved", tmp_path / "saved")
    for path in (tmp_path / "saved" / "6").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    line = mistake("--checkpoint", tmp_path / "saved", "--output", tmp_path, "--text", text, *SCALED, "--resume")
    assert "the checkpoint of step 6" in line
    assert "cannot be read" in line


@pytest.mark.parametrize("damage", [[], {"position": "x"}, {"losses": ["x"]}, {"settings": 1}], ids=str)
def test_notes_of_another_kind_are_refused(
    damage: object, finished: Path, text: Path, tmp_path: Path, mistake: Callable[..., str]
) -> None:
    shutil.copytree(finished / "saved", tmp_path / "saved")
    path = tmp_path / "saved" / "6" / "notes" / "metadata"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage} if isinstance(damage, dict) else damage))
    line = mistake("--checkpoint", tmp_path / "saved", "--output", tmp_path, "--text", text, *SCALED, "--resume")
    assert "the checkpoint of step 6" in line
    assert "cannot be read" in line


def test_results_that_cannot_be_written(
    text: Path, tmp_path: Path, train_here: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "training.png").mkdir()
    status, _, said = train_here("--output", tmp_path, "--text", text, "--prompt", "ab", *SCALED, "--no-compare")
    assert status == 2
    assert f"cannot write the results to {tmp_path}: Is a directory" in said


def test_a_text_is_read_up_to_a_bound_and_from_any_folder(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    data = importlib.import_module("lm.data")
    monkeypatch.setattr(data, "TEXT_BYTES", 100)
    endless = data.load("/dev/zero")
    assert len(endless.train) + len(endless.held_out) == 100
    monkeypatch.chdir(tmp_path)
    found = data.load(os.path.relpath(text))  # whose dots are no hidden folders
    assert found.train.tobytes().startswith(b"abcd")
    library = data.load(None)
    assert len(library.train) + len(library.held_out) == 100


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (("--text", "{tmp}/none"), "no such file or folder"),
        (("--text", "{tmp}/empty"), "there is no text in it"),
        (("--text", "n" * 300), "File name too long"),
        (("--text", "{tmp}/short"), "too few for --length 128"),
        (("--steps", "0"), "argument --steps: '0', wanted a number from 1 to 1e+07"),
        (("--steps", "many"), "argument --steps: 'many', wanted a number"),
        (("--learning-rate", "nan"), "argument --learning-rate: 'nan', wanted a number"),
        (("--experts", "2", "--top-k", "3"), "--top-k 3 is more than --experts 2"),
        (("--width", "100"), "--width 100 is not a multiple of 64"),
        (("--resume",), "--resume needs --checkpoint"),
        (("--recipe", "FP4"), "argument --recipe: invalid choice: 'FP4'"),
        (("--prompt", ""), "--prompt is empty"),
        (("--nonsense",), "unrecognized arguments: --nonsense"),
        (("--output", "{tmp}/short/folder"), "--output {tmp}/short/folder: Not a directory"),
        (("--checkpoint", "{tmp}/short/folder"), "--checkpoint {tmp}/short/folder: Not a directory"),
        (("--checkpoint", "{tmp}/fresh", "--resume", "--output", "{tmp}/out"), "there is no checkpoint in {tmp}/fresh"),
    ],
)
def test_mistakes_get_one_line(
    options: tuple[str, ...],
    fragment: str,
    text: Path,
    tmp_path: Path,
    example: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_text("abc")
    options = tuple(option.format(tmp=tmp_path) for option in options)
    assert example.main(["--output", str(tmp_path / "results"), "--text", str(text), *options]) == 2
    line = capsys.readouterr().err
    assert line.startswith("train_lm: "), line
    assert line.count("\n") == 1, line
    assert fragment.format(tmp=tmp_path) in line


def test_defaults_depend_on_the_device(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for backend, sizes in (("cpu", "cpu"), ("gpu", "gpu"), ("cuda", "gpu")):
        monkeypatch.setattr(example.jax, "default_backend", lambda backend=backend: backend)
        settings, options = example.parse_arguments(["--steps", "5"])
        assert settings.steps == 5
        wanted = example.SIZES[sizes]._replace(steps=5)
        assert {name: getattr(settings, name) for name in wanted._fields} == wanted._asdict()
        found[backend] = options.compare
    assert found == {"cpu": True, "gpu": True, "cuda": True}
    assert not example.parse_arguments(["--experts", "64"])[1].compare
    assert example.parse_arguments(["--experts", "64", "--compare"])[1].compare


@pytest.mark.usefixtures("example")  # for its small tables
def test_the_model_never_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither attention nor the embedded strings read later bytes; the strings read as many earlier ones as stated."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    model = importlib.import_module("lm.model")
    grams = model.Grams(8, nnx.Rngs(0))
    text = np.random.default_rng(0).integers(0, 256, (2, 40), np.uint8)
    changed = text.copy()
    changed[:, 20] ^= 1
    apart = np.any(np.asarray(grams(text)) != np.asarray(grams(changed)), axis=(0, 2))
    assert list(np.flatnonzero(apart)) == list(range(20, 20 + model.LONGEST_GRAM))
    language = model.LanguageModel(64, 1, 2, 1, rngs=nnx.Rngs(0))
    logits = nnx.jit(lambda language, text: language(text)[0])
    with lax():
        before, after = (np.asarray(logits(language, each)) for each in (text, changed))
    assert (before[:, :20] == after[:, :20]).all()
    assert (before[:, 20] != after[:, 20]).any()


@pytest.mark.parametrize(
    ("number", "text"), [(0.123456, "0.123"), (1.999, "2.00"), (2.0449, "2.04"), (45.678, "45.7"), (1416.2, "1416")]
)
def test_times_have_three_digits(number: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    assert importlib.import_module("lm.report").three_digits(number) == text


def test_a_compressor_may_copy_from_the_text_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    data = importlib.import_module("lm.data")
    noise = np.random.default_rng(0).integers(0, 256, 4000, np.uint8)
    bits = data.bits_per_byte_of_others(noise, np.concatenate([noise, noise[:1000]]))
    assert bits["lzma"] > 8
    assert bits["lzma after 0.0 MB"] < 0.2


@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="a tree for releases, without the Makefile")
@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="there is a GPU, and CUDA sources are built")
def test_the_demo_builds_no_cuda_without_a_gpu() -> None:
    def planned(*arguments: str, **variables: str) -> str:
        chosen = ("GROUPED_CUDA", "MAKEFLAGS")  # by whoever runs the tests, the second by `make test GROUPED_CUDA=off`
        environment = {name: value for name, value in ENVIRONMENT.items() if name not in chosen} | variables
        command = ["make", "--dry-run", "--always-make", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    words = "demo: no GPU found, so the kernels for the CPU are built alone"
    demo, native = planned("demo"), planned("native")
    assert words in demo
    assert "-DGROUPED_CUDA=off" in demo
    for chosen in (planned("demo", "GROUPED_CUDA=on"), planned("demo", GROUPED_CUDA="on")):
        assert words not in chosen
        assert "-DGROUPED_CUDA=on" in chosen
    assert words not in native
    assert "-DGROUPED_CUDA=auto" in native


# ---- moe_torch.py ----------------------------------------------------------------------------------------------------

TORCH_SCRIPT = ROOT / "examples" / "moe_torch.py"
TORCH_SMALL = ("--width", "64", "--layers", "1", "--batch", "2", "--length", "16", "--steps", "3", "--device", "cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:cpu_offload. there is no GPU:UserWarning")
def test_every_switch_of_the_torch_example_gives_the_same_losses(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float32 the arithmetic is the same, so the bits are."""
    options = ("--compare", "--text", text, "--output", tmp_path, *TORCH_SMALL)
    with lax():
        run_program([str(TORCH_SCRIPT), *map(str, options)], monkeypatch)
    printed, errors = capsys.readouterr()
    lines = printed.splitlines()
    rows = lines[1:7]
    assert [row[54:66].strip() for row in rows] == ["float32", *["equal"] * 5], printed
    assert lines[7] == "equal: the losses of each step have the bits of the first run, marked float32"
    names = ["none", "main_grad", "delay_wgrad", "offload", "graph", "main_grad + delay_wgrad + offload + graph"]
    assert [row[:44].strip() for row in rows] == names, printed
    assert (tmp_path / "moe_torch.png").read_bytes().startswith(b"\x89PNG")
    assert "no CUDA graph on the CPU" in errors
    assert "3/3" in errors, "there is no progress bar"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:cpu_offload. there is no GPU:UserWarning")
def test_in_bfloat16_losses_are_compared_where_they_should_be_equal(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums of microbatches round in bfloat16, or with main_grad in float32."""
    monkeypatch.syspath_prepend(TORCH_SCRIPT.parent)
    example = importlib.import_module(TORCH_SCRIPT.stem)
    options = ("--compare", "--text", text, "--output", tmp_path, *TORCH_SMALL, "--dtype", "bfloat16")
    assert example.main([str(option) for option in options]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    marks = [row[54:66].strip() for row in lines[1:7]]
    assert marks == ["bfloat16", "float32", "equal", "equal", "equal", "equal"], said
    losses = [row[44:54] for row in lines[1:7]]
    assert losses[0] == losses[2] == losses[3] == losses[4] != losses[1] == losses[5], said
    assert lines[7].endswith("marked bfloat16 or float32")
    assert lines[8].startswith("main_grad adds the gradients of microbatches in float32, the other runs in bfloat16")


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (("--text", "{tmp}/none"), "no such file or folder"),
        (("--steps", "0"), "--steps 0 is less than 1"),
        (("--steps", "many"), "argument --steps: invalid int value: 'many'"),
        (("--experts", "2", "--top-k", "3"), "--top-k 3 is more than --experts 2"),
        (("--width", "100"), "--width 100 is not a multiple of 64"),
        (("--nonsense",), "unrecognized arguments: --nonsense"),
    ],
)
def test_mistakes_of_the_torch_example_get_one_line(
    options: tuple[str, ...],
    fragment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(TORCH_SCRIPT.parent)
    example = importlib.import_module(TORCH_SCRIPT.stem)
    assert example.main([option.format(tmp=tmp_path) for option in options]) == 2
    line = capsys.readouterr().err
    assert line.startswith("moe_torch: "), line
    assert line.count("\n") == 1, line
    assert fragment.format(tmp=tmp_path) in line


# ---- finetune_lora.py ------------------------------------------------------------------------------------------------


@pytest.mark.rule("LOR-2", "LOR-3")
def test_adapters_over_codes_train_as_over_their_values(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both bases hold the same values, so the losses of each step have the same bits."""
    monkeypatch.syspath_prepend(TORCH_SCRIPT.parent)
    example = importlib.import_module("finetune_lora")
    sizes = ("--width", "64", "--mlp-dim", "64", "--layers", "1", "--batch", "2", "--length", "16", "--steps", "6")
    options = ("--compare", "--device", "cpu", "--experts", "4", "--rank", "8", "--text", text, *sizes)
    assert example.main([str(option) for option in options]) == 0
    lines = capsys.readouterr().out.splitlines()
    plain, coded = (line.split() for line in lines[1:3])
    assert (plain[0], coded[0]) == ("bf16", "mxfp4"), lines
    assert plain[1:3] == coded[1:3], lines
    assert float(coded[2]) < float(coded[1]), "it learns"
    assert lines[3].startswith("mxfp4 over bf16: 0.266 of the bytes of the base"), lines
    assert lines[3].endswith("losses differ by at most 0.0000"), lines
    assert example.main(["--rank", "0"]) == 2
    assert capsys.readouterr().err == "finetune_lora: --rank 0 is less than 1\n"


@pytest.mark.parametrize("recipe", [(), ("--recipe", "FP8Block")], ids=["plain", "FP8Block"])
@pytest.mark.parametrize("script", ["transformers_olmoe", "jax_patch"])
def test_switching_a_model_keeps_its_losses(
    script: str, recipe: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a recipe the program itself is run, with one its `main`."""
    if script == "transformers_olmoe" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; requirements/dev.txt has it")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    example = importlib.import_module(script)
    with lax():
        if recipe:
            assert example.main(["--steps", "3", *recipe]) == 0
        else:
            run_program([str(SCRIPT.with_stem(script)), "--steps", "3"], monkeypatch)
    said = capsys.readouterr().out
    steps = [line.split() for line in said.splitlines() if line.split()[0] in ("1", "2", "3")]
    assert len(steps) == 3, said
    largest = float(said.splitlines()[-1].removeprefix("largest difference of the losses: "))
    assert largest <= (bounds.SWITCHED_WITH_RECIPE if recipe else bounds.SWITCHED), said
    if recipe:
        assert largest > 0, "the recipe changed nothing"
    assert example.main(["--steps", "0", *recipe]) == 2
    assert capsys.readouterr().err == f"{script}: --steps 0 is less than 1\n"


@pytest.mark.rule("LYR-9")
def test_experts_over_several_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, str(SCRIPT.with_stem("expert_parallel")), "--steps", "1"]
    done = subprocess.run([*program, "--ranks", "4"], env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("experts per device: 4 4 4 4\n")
    assert done.stdout.endswith("the layer's results have the same bits as on one device\n")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    assert importlib.import_module("expert_parallel").main(["--ranks", "3"]) == 2
    assert capsys.readouterr().err == "expert_parallel: --ranks 3 does not divide the 16 experts\n"
