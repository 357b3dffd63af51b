"""The code in the documents runs on small problems, and its signatures are those of the functions."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT

pytestmark = [
    # torch's own: Dynamo makes an instance of autograd.Function and looks at `.grad`, inductor imports torch.jit.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:cpu_offload"),
]

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SIGNATURE = re.compile(r"\A(\w+)\.(\w+)(\(.*\)) +# ", re.DOTALL)

JAX = """
import jax, jax.numpy as jnp, jax_grouped, optax
from flax import nnx
from jax_grouped import BF16, FP8Block, FP8Current, FP8Delayed, MXFP8, Recipe
from jax_grouped.nnx import MoE
G, K, F = 4, 64, 32
x, sizes = jnp.ones((40, K), jnp.bfloat16), jnp.array([9, 0, 20, 3], jnp.int32)
w = master = jnp.ones((G, K, K), jnp.bfloat16)
wi, wo = jnp.ones((G, K, 2 * F), jnp.bfloat16), jnp.ones((G, F, K), jnp.bfloat16)
group_sizes, probs, dy = sizes, jnp.ones(40), x
key = jax.random.key_data(jax.random.key(0))
"""
TORCH = """
import torch, torch_bridge
from torch_bridge import nn, offload, params, shards
G = num_experts = 4
hidden, mlp_dim, device = 64, 32, "cpu"
x, dy = torch.randn(40, hidden, dtype=torch.bfloat16), torch.ones(40, hidden, dtype=torch.bfloat16)
sizes = group_sizes = torch.tensor([9, 0, 20, 3], dtype=torch.int32)
weight = torch.ones(G, hidden, hidden, dtype=torch.bfloat16, requires_grad=True)
wi, wo = torch.ones(G, 2 * mlp_dim, hidden).bfloat16(), torch.ones(G, hidden, mlp_dim).bfloat16()
probs, main_grad_wi, main_grad_wo = torch.ones(40), torch.zeros(wi.shape), torch.zeros(wo.shape)
"""
GIVEN = {
    "README.md": {},
    "docs/jax.md": {
        "jax.shard_map": f"""{JAX}
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
""",
        "value_and_accumulate_grad": "loss = None",
        "grouped_mlp_fwd": "accum = (jnp.zeros(wi.shape), jnp.zeros(wo.shape))",
        "route.topk_router": """
from jax_grouped import route
k, E = 2, 8
logits, bias, router, gate = jnp.ones((40, E)), jnp.zeros(E), jnp.ones((K, E)), jnp.ones((K, 1))
shared_wi, shared_wo = wi[:1], wo[:1]
wi, wo = jnp.concatenate([wi, wi]), jnp.concatenate([wo, wo])
""",
    },
    "docs/parallel.md": {},
    "docs/checkpoints.md": {
        "import torch": """
import atexit, os, shutil, tempfile
place = tempfile.mkdtemp()
atexit.register(shutil.rmtree, place, True)
os.chdir(place)
""",
    },
    "docs/hosts_jax.md": {
        "train_step(params, batch)": f"{JAX}\nparams, batch, train_step = {{}}, x, lambda *_: (0, 0)"
    },
    "docs/recipes.md": {
        "import FORMATS": JAX,
        "update_scalings": """
value = jnp.zeros(())
model = MoE(64, 32, 4, 2, rngs=nnx.Rngs(0, rounding=1), recipe=FP8Delayed)
optimizer = optax.adam(1e-3)
moments = optimizer.init(nnx.state(model, nnx.Param))
""",
        "torch_bridge.update_scaling": TORCH,
        "straight_through": JAX,
    },
    "docs/torch.md": {
        "grouped_mlp_fwd": TORCH,
        "topk_router": """
k, loss, router = 2, torch.zeros(()), torch.randn(G, hidden)
logits = torch.randn(40, G)
""",
    },
    "docs/lora.md": {
        "torch_bridge.grouped_linear": f"{TORCH}\nN = K = hidden",
        "jax_grouped.ragged_dot": f"{JAX}\nN = K",
    },
    "docs/hosts.md": {
        "from_pretrained": """
import atexit, shutil, tempfile, torch
from transformers import OlmoeConfig, OlmoeForCausalLM
small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
small |= {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 97, "pad_token_id": 0, "eos_token_id": 1}
name = tempfile.mkdtemp()
atexit.register(shutil.rmtree, name, True)
OlmoeForCausalLM(OlmoeConfig(**small)).bfloat16().save_pretrained(name)
ids = torch.arange(2, 34).reshape(2, 16)
""",
        "update_scaling": "optimizer = torch.optim.SGD(model.parameters(), 1e-3)",
    },
    "docs/torch_nn.md": {
        "backward_dw": TORCH,
        "nn.MoE(": "from torch_bridge import route",
        "is_first_microbatch": "microbatches = [(x, sizes, probs)] * 2",
        "expand_shard": """
weights, shard, start = list(layer.parameters()), torch.cat([each.flatten() for each in masters]), 0
group = torch.distributed.group.WORLD
""",
        "cpu_offload": "blocks = [lambda x: mlp(x, sizes, probs)]",
    },
}
"""Set-up that a document's code assumes: it runs before the block that contains these words."""


RUN_WITH_HOSTS = {"docs/hosts_training.md"}
"""Documents whose code tests/hosts runs, where the hosts are installed."""


def blocks(document: str) -> list[str]:
    return BLOCK.findall((ROOT / document).read_text())


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A process group that has only this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("document", GIVEN)
def test_code_runs(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # undone afterwards, wherever the code goes
    if document == "docs/hosts.md":
        pytest.importorskip("transformers", reason="its code needs transformers, of requirements/dev.txt")
    names: dict[str, Any] = {}
    given = dict(GIVEN[document])
    for block in blocks(document):
        if SIGNATURE.match(block):
            continue
        for words in [words for words in given if words in block]:
            exec(given.pop(words), names)
        exec(compile(block.replace('device="cuda"', "device=device"), document, "exec"), names)
    assert not given, "no block has these words"


def test_no_document_is_left_out() -> None:
    with_code = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.md")} | {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")
    }
    assert {document for document in with_code if blocks(document)} == set(GIVEN) | RUN_WITH_HOSTS


LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("folder", [".", "docs", "benchmarks"])
def test_links_lead_to_files(folder: str) -> None:
    found = [(path, link) for path in (ROOT / folder).glob("*.md") for link in LINK.findall(path.read_text())]
    assert found
    broken = [f"{path.name}: {link}" for path, link in found if "://" not in link and not (path.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize(
    "block",
    [block for document in GIVEN for block in blocks(document) if SIGNATURE.match(block)],
    ids=lambda b: b.split("(")[0],
)
def test_signatures_are_those_of_the_functions(block: str) -> None:
    found = SIGNATURE.match(block)
    assert found is not None
    module, name, arguments = found.groups()
    written = ast.parse(f"def {name}{arguments}: pass").body[0]
    assert isinstance(written, ast.FunctionDef)
    taken = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    found = list(taken.values())
    assert [each.arg for each in (*written.args.args, *written.args.kwonlyargs)] == [each.name for each in found]
    defaults = [each.default for each in found if each.kind != each.KEYWORD_ONLY and each.default is not each.empty]
    assert [ast.literal_eval(each) for each in written.args.defaults] == defaults
    keywords = {each.name: each.default for each in found if each.kind == each.KEYWORD_ONLY}
    assert [ast.literal_eval(each) for each in written.args.kw_defaults] == list(keywords.values())
