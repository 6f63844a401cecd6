"""How the tests run: one thread, derandomised examples, and heavy or GPU tests only where they can or should run."""

from collections.abc import Iterator
from importlib import import_module

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("dev", parent=settings.get_profile("ci"), derandomize=False, max_examples=200)
settings.load_profile("ci")


LONG = ("resume", "pretrain", "step", "trainer", "readme", "accounting", "gated_delta_rule", "triton", "generate")
"""Files that take longest: they come first, so that of two processes none begins one when the rest is done."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-heavy", action="store_true", help="also run the tests marked heavy: full sizes, minutes")


def pytest_configure(config: pytest.Config) -> None:
    # Sums in one order, so that what is bitwise equal once is so always; full sizes want all cores instead.
    if not config.getoption("--run-heavy"):
        torch.set_num_threads(1)


def pytest_collection(session: pytest.Session) -> None:
    # What the type checks' hook imports on the way is compiled anew: the largest of it comes before. Of processes that
    # share the tests out, the one that only hands them out needs none of it.
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        import_module("torch._dynamo")


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests with those of whole steps at even distances: of processes that share them out, none has two."""
    whole = [item for item in items if "whole_step" in item.keywords]
    mixed = [item for item in items if "whole_step" not in item.keywords]
    distance = len(items) // max(len(whole), 1)
    for place, item in enumerate(whole):
        mixed.insert(place * distance, item)
    return mixed


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = spread(sorted(items, key=lambda item: item.path.stem.removeprefix("test_") not in LONG))
    heavy = pytest.mark.skip(reason="heavy: full sizes or minutes of CPU; add --run-heavy")
    gpu = pytest.mark.skip(reason="gpu: needs an NVIDIA GPU with Triton")
    for item in items:
        if "heavy" in item.keywords and not config.getoption("--run-heavy"):
            item.add_marker(heavy)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(gpu)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the tests' type checks, which Dynamo cannot trace where it traces strictly or lengths are symbols."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
