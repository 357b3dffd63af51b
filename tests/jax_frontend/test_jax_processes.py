"""An expert-parallel layer over two processes by `jax.distributed`, against the same layer in one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.conftest import ROOT

SECONDS = 60
"""Until processes that wait for each other are ended: a busy machine takes a while to import JAX twice."""

PROGRAM = """
import os, pathlib, sys, time
import jax
import jax.numpy as jnp, numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_grouped
from jax_grouped import parallel
from tests import cases

T, E, K, H, F = 16, 4, 2, 16, 8
shapes = {"x": (T, H), "router": (H, E), "wi": (E, H, 2 * F), "wo": (E, F, H)}
whole = {name: cases.normal(shape, "float32", "processes", name) for name, shape in shapes.items()}

def main(process, port, transport, done):
    timeouts = {"initialization_timeout": 60, "heartbeat_timeout_seconds": 10}
    jax.distributed.initialize(f"localhost:{port}", 2, process, **timeouts)
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))

    def split(name, array):
        sharding = NamedSharding(mesh, P() if name == "router" else P("expert"))
        return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])

    def results(layer, arrays):
        def loss(arrays):
            y, aux = layer(*(arrays[name] for name in shapes), K)
            return (y * y).sum() + aux.aux_loss, (y, aux.dropped)
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)

    def spread(*operands):
        axes = parallel.MeshAxes(expert="expert")
        return parallel.moe(*operands, axes=axes, mesh=mesh, aux_coeff=0.1, transport=transport)

    (_, (y, dropped)), found = results(spread, {name: split(name, array) for name, array in whole.items()})
    alone = jax.tree.map(lambda array: jax.device_put(array, jax.local_devices()[0]), whole)
    (_, (ey, _)), expected = results(lambda *operands: jax_grouped.moe(*operands, aux_coeff=0.1), alone)
    pairs = {"y": (y, ey), **{name: (found[name], expected[name]) for name in ("x", "wi", "wo")}}
    for name, (a, e) in pairs.items():
        np.testing.assert_array_equal(process_allgather(a, tiled=True), np.asarray(e), name)
    assert int(dropped) == 0
    print("the same bits", flush=True)
    if done is None:
        return
    if process == 1:  # the other process has its results and needs this one no more
        while not done.exists():
            time.sleep(0.05)
        os._exit(1)
    done.touch()
    try:
        jax.block_until_ready(results(spread, {name: split(name, array) for name, array in whole.items()}))
    except jax.errors.JaxRuntimeError as error:
        print("an error:", error, flush=True)
        os._exit(3)  # at once; otherwise JAX ends the process when it misses the other's heartbeat

folder = pathlib.Path(sys.argv[1])
for transport, port, dies in zip(sys.argv[2::3], sys.argv[3::3], sys.argv[4::3]):
    started = []
    for process in range(2):  # each has the modules already, and makes its own devices
        if (pid := os.fork()) == 0:
            for stream, name in ((1, "out"), (2, "errors")):
                os.dup2(os.open(folder / f"{transport}.{process}.{name}", os.O_WRONLY | os.O_CREAT), stream)
            main(process, port, transport, folder / "done" if dies == "dies" else None)
            sys.exit()
        started.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    (folder / f"{transport}.codes").write_text(" ".join(map(str, codes)))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str, int]]]:
    """Output, errors and exit code of both processes of each transport, which must end in time.

    With `all_to_all` one dies when both have their results.
    """
    folder, options = tmp_path_factory.mktemp("processes"), []
    with socket.socket() as one, socket.socket() as other:
        for free, transport, end in ((one, "ragged_all_to_all", "lives"), (other, "all_to_all", "dies")):
            free.bind(("localhost", 0))
            options += [transport, str(free.getsockname()[1]), end]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"  # the last one counts
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", PROGRAM, str(folder), *options]
    running = subprocess.Popen(program, cwd=ROOT, env=environment, start_new_session=True)
    try:
        assert running.wait(timeout=SECONDS) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    found = {}
    for transport in options[::3]:
        codes = map(int, (folder / f"{transport}.codes").read_text().split())
        said = [[(folder / f"{transport}.{at}.{name}").read_text() for name in ("out", "errors")] for at in range(2)]
        found[transport] = [(out, errors, code) for (out, errors), code in zip(said, codes, strict=True)]
    return found


@pytest.mark.rule("LYR-9", "LYR-11")
def test_two_processes(ended: dict[str, list[tuple[str, str, int]]]) -> None:
    for out, errors, code in ended["ragged_all_to_all"]:
        assert code == 0, f"a process failed with {code}:\n{errors}"
        assert "the same bits" in out


@pytest.mark.rule("LYR-9", "LYR-11")
def test_a_process_that_dies_is_an_error_and_not_a_hang(ended: dict[str, list[tuple[str, str, int]]]) -> None:
    """Until then both have the results of one process, with the other transport."""
    (out, errors, code), (last, _, dead) = ended["all_to_all"]
    assert "the same bits" in out, errors
    assert "the same bits" in last
    assert dead == 1
    assert code == 3, f"the other process ended with {code}:\n{errors}"
    assert "an error:" in out
