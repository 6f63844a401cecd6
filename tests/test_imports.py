"""Imports go one way, and nothing is imported that is not installed."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "kernels" / "hymo_kernels"
SOURCES = sorted([*(ROOT / "hymo").rglob("*.py"), *KERNELS.rglob("*.py")])

# Each line may import from the lines above it; inside an entry, the modules of a package may import each other.
ORDER = [
    ("hymo_kernels.device", "hymo_kernels.primitive"),
    ("hymo_kernels.host",),
    ("hymo_kernels",),
    ("hymo.tree", "hymo.section", "hymo.chart", "hymo.exact_products", "hymo.replay", "hymo.stacked", "hymo.graph"),
    ("hymo.params", "hymo.config", "hymo.jit", "hymo.footprint", "hymo.distributed", "hymo.interruption"),
    ("hymo.region", "hymo.config_yaml", "hymo.config_reference", "hymo.optim", "hymo.batch", "hymo.run_folder"),
    ("hymo.tracker", "hymo.profiler"),
    ("hymo.backend", "hymo.data"),
    ("hymo.layers.norm", "hymo.layers.rope", "hymo.layers.feedforward"),
    ("hymo.layers.embedding", "hymo.layers.gdn", "hymo.layers.mla", "hymo.layers.moe", "hymo.layers.mtp"),
    ("hymo.layers", "hymo.model"),
    ("hymo.loss", "hymo.generate", "hymo.sharding"),
    ("hymo.step", "hymo.evaluate", "hymo.memory"),
    ("hymo.checkpoint", "hymo.accounting", "hymo.progress", "hymo.run_data"),
    ("hymo.handle", "hymo.report", "hymo.saver"),
    ("hymo.export",),
    ("hymo.trainer",),
    ("hymo",),
]
# Import name of a distribution, where it is not its name.
IMPORT_NAMES = {"pyyaml": "yaml"}


def name_of(path: Path) -> str:
    """Dotted name of a module; a package has that of its folder."""
    parts = path.relative_to(ROOT if path.is_relative_to(ROOT / "hymo") else KERNELS.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a module imports: the module and, for `from`, each name in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit_of(name: str) -> str | None:
    """The entry of ORDER that a dotted name belongs to: its longest prefix."""
    entries = sorted((entry for line in ORDER for entry in line), key=len, reverse=True)
    return next((entry for entry in entries if name == entry or name.startswith(entry + ".")), None)


def rank_of(unit: str) -> int:
    return next(rank for rank, line in enumerate(ORDER) if unit in line)


@pytest.fixture(scope="module", params=SOURCES, ids=[name_of(path) for path in SOURCES])
def source(request: pytest.FixtureRequest) -> tuple[str, ast.Module]:
    """A module's name and syntax tree."""
    return name_of(request.param), ast.parse(request.param.read_text(encoding="utf-8"))


def test_a_module_imports_only_from_what_stands_below_it(source: tuple[str, ast.Module]) -> None:
    name, tree = source
    unit = unit_of(name)
    assert unit is not None
    assert unit not in ("hymo", "hymo.layers") or name == unit, f"{name} has no place in ORDER; give it one"
    for target in imported(tree):
        below = unit_of(target)
        if below is not None and below != unit:
            assert rank_of(below) < rank_of(unit), f"{name} imports {target}, which does not stand below it"


def test_no_import_is_hidden_in_a_function_or_behind_type_checking(source: tuple[str, ast.Module]) -> None:
    name, tree = source
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            ours = [each for each in imported(node) if each.split(".")[0] in ("hymo", "hymo_kernels")]
            # Device code needs Triton, which not everybody has.
            hidden = [each for each in ours if not each.startswith("hymo_kernels.device.")]
            assert not hidden, f"{name} imports {hidden} inside {getattr(node, 'name', 'an if')}"
    assert not any(target.endswith(".TYPE_CHECKING") for target in imported(tree)), name
    assert not any(target.startswith("__future__") for target in imported(tree)), name


def test_what_is_imported_is_installed(source: tuple[str, ast.Module]) -> None:
    name, tree = source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    stated = [*project["dependencies"], *(each for extra in extras if extra != "dev" for each in extras[extra])]
    named = [re.split(r"[^\w-]", each)[0].lower() for each in stated]
    installed = {IMPORT_NAMES.get(each, each) for each in named}
    known = {*sys.stdlib_module_names, *installed, "hymo", "hymo_kernels"}
    for target in imported(tree):
        assert target.split(".")[0] in known, f"{name} imports {target}"


def test_device_code_is_in_the_device_folder_alone(source: tuple[str, ast.Module]) -> None:
    name, tree = source
    if name.startswith("hymo_kernels.device"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "triton":
            assert node.attr not in ("jit", "autotune", "heuristics"), f"{name}:{node.lineno}"
    assert not any(target.startswith("triton.language") for target in imported(tree)), name


def test_configuration_needs_no_torch() -> None:
    for module in ("section", "config", "config_yaml", "config_reference"):
        tree = ast.parse((ROOT / "hymo" / f"{module}.py").read_text(encoding="utf-8"))
        assert not any(target.split(".")[0] == "torch" for target in imported(tree)), module
