"""The house (docs/design.md): imports go one way, and one file knows memory kinds and JAX versions."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDER = ("pallas_kernels", "ula_jax", "models", "benchmarks", "experiments")
"""Each imports from itself and from those before it; nothing imports tests."""
FILES = sorted(path.relative_to(ROOT) for package in ORDER for path in (ROOT / package).rglob("*.py"))
MEMORY = Path("ula_jax/memory.py")
KINDS = re.compile(r"pinned_host|device_host|memory_kind|compute_on|(?<!\w)jax\.(_src\.)?memory")


def imported(tree):
    """(line, module) of every import, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def code_words(tree):
    """(line, text) of every string that is no docstring, dotted name, argument and import."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.lineno, node.value
        elif isinstance(node, ast.Attribute | ast.Name):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.keyword | ast.arg):
            yield node.lineno, node.arg or ""
    yield from imported(tree)


def version_checks(tree):
    """Lines that compare a version or branch on one; writing one down is no check."""
    for node in ast.walk(tree):
        test = node if isinstance(node, ast.Compare) else getattr(node, "test", None)
        if test is not None and "__version" in ast.unparse(test):
            yield test.lineno


def complaints(path, source):
    """What is wrong with one file of the product, as `path:line: reason`."""
    tree, package = ast.parse(source), path.parts[0]
    above = {*ORDER[ORDER.index(package) + 1 :], "tests"}
    found = {(line, f"{package} imports {name}") for line, name in imported(tree) if name.split(".")[0] in above}
    if path != MEMORY:
        found |= {(line, f"names {kind[0]}") for line, text in code_words(tree) if (kind := KINDS.search(text))}
        found |= {(line, "checks a version") for line in version_checks(tree)}
    return [f"{path}:{line}: {reason}" for line, reason in sorted(found)]


def test_the_product_keeps_to_it():
    assert {path.parts[0] for path in FILES} == set(ORDER)
    assert MEMORY in FILES
    assert [c for path in FILES for c in complaints(path, (ROOT / path).read_text())] == []


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("pallas_kernels/a.py", "import ula_jax.types", "pallas_kernels imports ula_jax.types"),
        ("pallas_kernels/a/b.py", "def f():\n    from models import mla", "pallas_kernels imports models.mla"),
        ("ula_jax/a.py", "from models.config import ModelConfig", "ula_jax imports models.config.ModelConfig"),
        ("ula_jax/a.py", "import experiments as e", "ula_jax imports experiments"),
        ("models/a.py", "from tests.models import running", "models imports tests.models.running"),
        ("ula_jax/pool.py", "kind = 'pinned_host'", "names pinned_host"),
        ("ula_jax/pool.py", "kind = 'unpinned_host'", "names pinned_host"),
        ("ula_jax/pool.py", "import jax\nx = jax.device_put(y, jax.memory.Space.Host)", "names jax.memory"),
        ("ula_jax/pool.py", "from jax import memory", "names jax.memory"),
        ("ula_jax/pool.py", "s = NamedSharding(m, p, memory_kind=k)", "names memory_kind"),
        ("ula_jax/pool.py", "s = x.sharding.with_memory_kind(k)", "names memory_kind"),
        ("models/a.py", "from jax.experimental.compute_on import compute_on", "names compute_on"),
        ("experiments/a.py", "import jax\nif jax.__version__ > '0.11': pass", "checks a version"),
        ("experiments/a.py", "import jax\nnew = jax.__version_info__ >= (0, 11)", "checks a version"),
        ("models/a.py", "x = 1 if jax.__version__.startswith('0.1') else 2", "checks a version"),
    ],
)
def test_the_check_can_fail(path, source, reason):
    found = complaints(Path(path), source)
    assert found
    assert any(reason in complaint for complaint in found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("experiments/a.py", "import models, ula_jax.engine, pallas_kernels\nversion = jax.__version__"),
        ("models/a.py", "from ula_jax import memory\nfrom models.mla import MLA"),
        ("ula_jax/pool.py", '"""Pools of kind pinned_host."""\nfrom ula_jax import memory\nmemory.to_host(x)'),
        ("ula_jax/memory.py", "HOST = 'pinned_host'\nnew = jax.__version_info__ >= (0, 11)\njax.memory.Space.Host"),
    ],
)
def test_the_check_can_pass(path, source):
    assert complaints(Path(path), source) == []
