"""An expert-parallel layer over two processes by `jax.distributed`, against the same layer in one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SECONDS = 120
"""Until processes that wait for each other are ended: a busy machine takes a while to import JAX twice."""

PROGRAM = """
import os, pathlib, sys, time
import jax
process, port = int(sys.argv[1]), sys.argv[2]
timeouts = {"initialization_timeout": 60, "heartbeat_timeout_seconds": 10}
jax.distributed.initialize(f"localhost:{port}", 2, process, **timeouts)
import jax.numpy as jnp, numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_grouped
from jax_grouped import parallel
from tests import cases

T, E, K, H, F = 16, 4, 2, 16, 8
shapes = {"x": (T, H), "router": (H, E), "wi": (E, H, 2 * F), "wo": (E, F, H)}
whole = {name: cases.normal(shape, "float32", "processes", name) for name, shape in shapes.items()}
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
    return parallel.moe(*operands, axes=axes, mesh=mesh, aux_coeff=0.1, transport=sys.argv[3])

(_, (y, dropped)), found = results(spread, {name: split(name, array) for name, array in whole.items()})
alone = jax.tree.map(lambda array: jax.device_put(array, jax.local_devices()[0]), whole)
(_, (ey, _)), expected = results(lambda *operands: jax_grouped.moe(*operands, aux_coeff=0.1), alone)
pairs = {"y": (y, ey), **{name: (found[name], expected[name]) for name in ("x", "wi", "wo")}}
for name, (a, e) in pairs.items():
    np.testing.assert_array_equal(process_allgather(a, tiled=True), np.asarray(e), name)
assert int(dropped) == 0
print("the same bits", flush=True)
if sys.argv[4] == "one dies":
    done = pathlib.Path(sys.argv[5])  # the other process has its results and needs this one no more
    if process == 1:
        while not done.exists():
            time.sleep(0.05)
        os._exit(1)
    done.touch()
    try:
        jax.block_until_ready(results(spread, {name: split(name, array) for name, array in whole.items()}))
    except jax.errors.JaxRuntimeError as error:
        print("an error:", error, flush=True)
        os._exit(3)  # at once; otherwise JAX ends the process when it misses the other's heartbeat
"""


def run(transport: str, what: str, folder: Path) -> list[tuple[str, str, int]]:
    """Output, errors and exit code of both processes, which must end in time and may meet in `folder`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"  # the last one counts
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(process), port, transport, what, str(folder / "done")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        return [(*each.communicate(timeout=SECONDS), each.returncode) for each in running]
    finally:
        for each in running:
            each.kill()


@pytest.mark.rule("LYR-9", "LYR-11")
def test_two_processes(tmp_path: Path) -> None:
    for out, errors, code in run("ragged_all_to_all", "both live", tmp_path):
        assert code == 0, f"a process failed with {code}:\n{errors}"
        assert "the same bits" in out


@pytest.mark.rule("LYR-9", "LYR-11")
def test_a_process_that_dies_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    """Until then both have the results of one process, with the other transport."""
    (out, errors, code), (last, _, dead) = run("all_to_all", "one dies", tmp_path)
    assert "the same bits" in out, errors
    assert "the same bits" in last
    assert dead == 1
    assert code == 3, f"the other process ended with {code}:\n{errors}"
    assert "an error:" in out
