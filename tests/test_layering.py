"""Imports point one way. A new module is listed here, in the layer it belongs to."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import moesaic

SRC = Path(moesaic.__file__).parent

# A module may import modules of its own layer and of the layers above it in this list. The second field says
# whether the layer may import torch. Packages' __init__ are in the layer of their first module.
LAYERS: tuple[tuple[str, bool, str], ...] = (
    ("values", False, "errors config histogram log"),
    ("state", False, "structured request sequence kv.geometry kv.pool kv.table experts.cache experts.policy"),
    (
        "decisions",
        False,
        "sched.plan sched.ordering sched.queues sched.policy sched.swap sched.whole sched.chunked "
        "sched.counts sched.swapper sched.preempt sched.running sched.siblings sched.forker sched.advance "
        "sched.invariants sched.factory sched.scheduler sched.transaction sched.decisions sched.recording sched.replay "
        "sched.blocked",
    ),
    (
        "talking",
        False,
        "sampling.stopping engine.messages engine.wire engine.detokenizer engine.outputs engine.client",
    ),
    ("tensors", True, "batch kv.store kv.swap"),
    ("built-in models", True, "builtin builtin.cache builtin.tokens builtin.tiny builtin.smol models.files"),
    (
        "backends",
        True,
        "kernels.reference kernels.few_rows kernels.tiles kernels.launch kernels.norm kernels.rope kernels.routing "
        "kernels.experts kernels.gather kernels.select "
        "attention.base attention.reference attention.gathered attention.flashinfer attention.select "
        "experts.base experts.traced experts.resident experts.offloaded experts.transfer "
        "experts.tuning experts.triton experts.select",
    ),
    (
        "models",
        True,
        "models.base models.info models.families models.hf models.native models.compile models.select "
        "models.loading_bar models.loader models.weights experts.tuner",
    ),
    (
        "running",
        True,
        "runner tokenwise graphs segments sampling.draw sampling.filters sampling.grammar sampling.logprobs "
        "sampling.penalties sampling.pending sampling.row sampling.rowwise sampling.sampler "
        "sampling.transfer",
    ),
    (
        "engine",
        True,
        "engine.memory engine.model_plan "
        "engine.deadlines engine.core engine.llm engine.thread_client engine.process "
        "engine.prompt_logprobs engine.routing engine.loop engine.chunk_budget engine.supervisor "
        "engine.meters engine.stages engine.launched engine.step_time engine.stall_bound engine.step_log "
        "engine.garbage",
    ),
    (
        "edges",
        True,
        "server.settings server.tools.base server.tools.call_object server.tools.hermes server.tools.mistral "
        "server.tools.protocol server.tools.formats server.reasoning server.chat_format server.answer "
        "server.structured server.protocol server.errors server.replies server.logprobs server.vocabulary "
        "server.generation server.chat server.completions server.served_model server.app server.main server.sse "
        "server.auth server.connection server.drain server.tokenization server.labels server.limits server.metrics "
        "server.observed server.routing server.request_log server.tracing server.watch server.page "
        "bench.workload bench.client bench.paired bench.report bench.progress bench.timeline bench.peer bench.offline "
        "bench.stall bench.planner bench.pressure bench.run bench.load "
        "bench.paused bench.paced bench.paced_server bench.overhead "
        "bench.events bench.figures bench.arm bench.steps bench.comparison bench.summary bench.svg bench.html "
        "bench.png bench.trace bench.drive bench.engine_load bench.engine_rows bench.engine "
        "demo.scene demo.run demo.show demo.picture",
    ),
    ("command line", True, "terminal cli"),
)
RANK = {f"moesaic.{name}": rank for rank, (_, _, names) in enumerate(LAYERS) for name in names.split()}
WITHOUT_TORCH = [f"moesaic.{name}" for _, may_use_torch, names in LAYERS if not may_use_torch for name in names.split()]
# Docstring-only packages; they hold no code of their own.
PACKAGES = {f"moesaic.{p.parent.relative_to(SRC).as_posix().replace('/', '.')}" for p in SRC.rglob("*/__init__.py")}
STARTED_WITHOUT_TORCH = ["moesaic.cli", "moesaic.engine.process", "moesaic.server.main"]
"""What a server needs before its engine's process begins to load; PyTorch costs seconds there."""
TENSOR_LIBRARIES = {"torch", "transformers", "flashinfer", "triton"}


def _module_files() -> dict[str, Path]:
    files = {".".join(("moesaic", *p.relative_to(SRC).with_suffix("").parts)): p for p in SRC.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


FILES = _module_files()
PRODUCT = {n: p for n, p in FILES.items() if n != "moesaic" and not n.startswith("moesaic.testing")}
EXISTING_WITHOUT_TORCH = [name for name in WITHOUT_TORCH if name in FILES]


def _imported(path: Path) -> set[str]:
    """Every module that ``path`` names in an import, inside functions and for type checkers too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
            names |= submodules or {node.module}
    return names


@pytest.mark.parametrize("name", sorted(PRODUCT))
def test_a_module_has_a_layer_and_imports_none_below_it(name: str) -> None:
    if name not in RANK:
        assert name in PACKAGES, f"{name} is in no layer; list it in LAYERS of this test"
        assert not _imported(PRODUCT[name]), f"{name} is an unlisted package; list it in LAYERS or keep it empty"
        return
    ours = {m for m in _imported(PRODUCT[name]) if m.startswith("moesaic.")}
    unlisted = ours - RANK.keys()
    assert not unlisted, f"{name} imports {sorted(unlisted)}, which are in no layer"
    below = {m for m in ours if RANK[m] > RANK[name]}
    assert not below, f"{name} imports {sorted(below)} from a later layer"


@pytest.mark.parametrize("name", EXISTING_WITHOUT_TORCH)
def test_a_module_that_decides_names_no_tensor_library(name: str) -> None:
    roots = {module.split(".")[0] for module in _imported(FILES[name])}
    assert not roots & TENSOR_LIBRARIES


def test_what_decides_and_the_server_can_be_imported_where_torch_cannot() -> None:
    """One process for all: the point is that nothing reaches torch through a third module."""
    block = (
        "import importlib, sys\n"
        f"blocked = {sorted(TENSOR_LIBRARIES)!r}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in blocked: raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        f"for name in {['moesaic', *EXISTING_WITHOUT_TORCH, *STARTED_WITHOUT_TORCH]!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, env={"PYTHONPATH": str(SRC.parent)}, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nothing_in_the_product_imports_the_testing_package() -> None:
    users = [name for name, path in PRODUCT.items() if any(m.startswith("moesaic.testing") for m in _imported(path))]
    assert users == []


def test_the_layers_name_each_module_once() -> None:
    names = [name for _, _, names in LAYERS for name in names.split()]
    assert len(names) == len(set(names))
