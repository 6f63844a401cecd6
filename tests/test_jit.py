"""`jit`: a pure function of trees stays itself, in every mode, and says what is wrong as itself."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hymo import tree
from hymo.jit import jit
from hymo.region import once, region

MODES: list[Any] = ["none", "aot_eager"]
every_mode = pytest.mark.parametrize("mode", MODES)


class State(NamedTuple):
    """A nested state with a hole."""

    x: Tensor
    parts: tuple[Any, ...]
    count: Tensor


def state(seed: int = 0) -> State:
    draw = torch.Generator().manual_seed(seed)
    x, a, b = (torch.randn(3, generator=draw) for _ in range(3))
    return State(x, ({"a": a}, (), b), torch.tensor(seed))


def moved(before: State, data: Tensor) -> tuple[State, dict[str, Tensor]]:
    """A step: every leaf moves, and the metrics look at old and new."""
    grads = torch.func.grad(lambda x: (x * data).sum().square())(before.x)
    after = State(before.x - grads, tree.map(lambda leaf: leaf * 2 + data, before.parts), before.count + 1)
    return after, {"old": before.x * 1, "new": after.x.sum(), "count": after.count * 1}


def same(first: Any, second: Any) -> bool:
    pairs = zip(tree.leaves(first), tree.leaves(second), strict=True)
    return tree.flatten(first)[1] == tree.flatten(second)[1] and all(torch.equal(a, b) for a, b in pairs)


@every_mode
@pytest.mark.parametrize("donate", [False, True])
def test_results_are_those_of_the_function_itself(mode: Any, donate: bool) -> None:
    step, now = jit(moved, compile=mode, donate=donate), state()
    expected = now
    for i in range(3):
        data = torch.randn(3, generator=torch.Generator().manual_seed(i))
        expected, wanted = moved(expected, data)
        now, metrics = step(now, data)
        tree.map(torch.testing.assert_close, (now, metrics), (expected, wanted))
        assert isinstance(now, State)


@every_mode
def test_donation_keeps_every_storage_and_nothing_else_changes(mode: Any) -> None:
    step, first, data = jit(moved, compile=mode, donate=True), state(), torch.ones(3)
    places = [leaf.data_ptr() for leaf in tree.leaves(first)]
    after, metrics = step(first, data)
    assert [leaf.data_ptr() for leaf in tree.leaves(after)] == places
    assert same(first, after)
    assert torch.equal(data, torch.ones(3))
    kept = metrics["old"].clone()
    step(after, data)
    assert torch.equal(metrics["old"], kept)


@every_mode
def test_without_donation_the_arguments_keep_their_values(mode: Any) -> None:
    first = state()
    jit(moved, compile=mode)(first, torch.ones(3))
    assert same(first, state())


@every_mode
def test_an_old_value_that_is_returned_beside_the_donated_one_stays_old(mode: Any) -> None:
    step = jit(lambda x: (x + 1, x), compile=mode, donate=True)
    new, old = step(torch.zeros(2))
    assert new.tolist() == [1, 1]
    assert old.tolist() == [0, 0]


@every_mode
def test_leaves_may_change_places_while_they_are_donated(mode: Any) -> None:
    step = jit(lambda pair: ((pair[1], pair[0]),), compile=mode, donate=True)
    ((first, second),) = step((torch.zeros(2), torch.ones(2)))
    assert first.tolist() == [1, 1]
    assert second.tolist() == [0, 0]


MATRICES = [lambda: torch.arange(4.0).view(2, 2), lambda: torch.arange(4.0, 8.0).view(2, 2)]
OF_OLD_VALUES: dict[str, Callable[[Any], Any]] = {
    "exchanged": lambda p: ((p[1], p[0]), p[0]),
    "exchanged clones": lambda p: ((p[1].clone(), p[0].clone()), p[1]),
    "exchanged views": lambda p: ((p[1].T, p[0].T), p[0].T),
    "exchanged, as good as": lambda p: ((p[1] * 1, p[0] + 0), p[0] * 1),
    "views of themselves": lambda p: ((p[0].T, p[1].flip(0)), p[0], p[1][0]),
    "one stays": lambda p: ((p[0], p[0] + p[1]), p[1].T, p[0]),
    "parts of themselves": lambda p: ((p[0] + 1, p[1] * 2), p[0].chunk(2)[0], p[1].unbind()[1], p[0].split(1)[0].T),
    "given back too": lambda p: (((new := p[0] + 1), p[1] * 2), new, new.T, p[1]),
}
with_inductor = pytest.mark.parametrize("mode", [*MODES, pytest.param("inductor", marks=pytest.mark.heavy)])


@with_inductor
@pytest.mark.parametrize("case", OF_OLD_VALUES)
def test_old_values_and_their_views_are_read_before_they_are_written_to(mode: Any, case: str) -> None:
    pure, given = OF_OLD_VALUES[case], tuple(make() for make in MATRICES)
    wanted = tree.map(torch.clone, pure(tuple(make() for make in MATRICES)))
    found = jit(pure, compile=mode, donate=True)(given)
    assert same(found, wanted)
    # What is given back beside the state stays when the state moves on.
    beside = tree.map(torch.clone, found[1:])
    for leaf in given:
        leaf.zero_()
    assert same(found[1:], beside)


@with_inductor
def test_arguments_that_share_memory_with_a_donated_one_are_read_before_it_is_written_to(mode: Any) -> None:
    x = torch.arange(4.0)
    step = jit(lambda p, x: ((p[0] + x.sum(), p[1] * 2), x + 1), compile=mode, donate=True)
    (first, second), after = step((x[:2], x[2:]), x)
    assert (first.tolist(), second.tolist(), after.tolist()) == ([6, 7], [4, 6], [1, 2, 3, 4])
    assert x.tolist() == [6, 7, 4, 6]


@with_inductor
@pytest.mark.parametrize("place", ["transposed", "expanded", "misaligned", "again a row"])
def test_arguments_may_lie_in_memory_as_they_like(mode: Any, place: str) -> None:
    def make() -> Tensor:
        return {
            "transposed": lambda: torch.arange(12.0).view(4, 3).T,
            "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 4),
            "misaligned": lambda: torch.arange(13.0)[1:].view(3, 4),
            "again a row": lambda: torch.arange(12.0).view(3, 4),
        }[place]()

    run = jit(lambda x: (x + 1, x.T @ x, x[1:]), compile=mode, donate=place != "expanded")
    run(torch.zeros(3, 4))
    x = make()
    found = run(x)
    tree.map(torch.testing.assert_close, tuple(found), (make() + 1, make().T @ make(), make()[1:]))
    assert torch.equal(x, make() + (place != "expanded"))


@pytest.mark.parametrize("around", [torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.enable_grad()])
def test_what_surrounds_the_first_call_is_not_traced(around: Any) -> None:
    square = jit(lambda x: x @ x, compile="aot_eager")
    with around:
        square(torch.eye(2))
    x = torch.full((2, 2), 1.001)
    found = square(x)
    assert torch.equal(found, x @ x)
    assert not found.is_inference()
    assert not found.requires_grad


@pytest.mark.parametrize("mode", ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)])
def test_tensors_that_are_no_arguments_are_constants(mode: Any) -> None:
    weights = torch.arange(100.0)
    pure = jit(lambda x: (x + weights, torch.tensor([1.0, 2.0]), weights[:1]), compile=mode)
    found = pure(torch.ones(100))
    assert torch.equal(found[0], weights + 1)
    assert (found[1].tolist(), found[2].tolist()) == ([1, 2], [0])


def test_a_function_that_writes_into_an_argument_is_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match=r"writes into its arguments: leaves \[1\]"):
        jit(lambda y, x: x.add_(y), compile="aot_eager")(x, x)
    assert x.tolist() == [1, 1]


def test_a_value_that_decides_what_is_traced_is_an_error() -> None:
    with pytest.raises(Exception, match="_local_scalar_dense"):
        jit(lambda x: x * float(x.sum()), compile="aot_eager")(torch.ones(2))


def test_in_place_operations_on_own_tensors_are_traced() -> None:
    def pure(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: torch.zeros(3).copy_(x).mul_(x).index_fill_(0, torch.tensor([0]), 0).sum())(x)

    assert jit(pure, compile="aot_eager")(torch.arange(1.0, 4.0)).tolist() == [0, 4, 6]


@every_mode
@pytest.mark.parametrize(
    "pure",
    [
        lambda pair: ((pair[0],), pair[1]),
        lambda pair: ((pair[0].sum(), pair[1]),),
        lambda pair: ((pair[0], pair[1].double()),),
        lambda pair: (pair[0], pair[1]),
    ],
    ids=["a leaf less", "another shape", "another dtype", "another tree"],
)
def test_donation_needs_a_first_result_like_the_first_argument(mode: Any, pure: Any) -> None:
    with pytest.raises(ValueError, match=r"jit: the donated argument has .* at .*, the first result, which replaces"):
        jit(pure, compile=mode, donate=True)((torch.zeros(2), torch.ones(2)))


class Tripled(torch.autograd.Function):
    """The identity, with three times its gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> Any:
        return Tripled.apply(x), dims[0]


@every_mode
def test_a_custom_backward_is_used(mode: Any) -> None:
    """Strict tracing would differentiate through forward and give 1."""
    gradient = torch.func.grad(lambda x: Tripled.apply(x).sum())
    assert jit(gradient, compile=mode)(torch.zeros(2)).tolist() == [3, 3]
    both = torch.func.grad_and_value(lambda x: Tripled.apply(x).sum())
    assert jit(torch.func.vmap(both), compile=mode)(torch.zeros(2, 2))[0].tolist() == [[3, 3], [3, 3]]


@every_mode
def test_an_error_inside_comes_out_as_itself(mode: Any) -> None:
    def broken(x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            raise LookupError(f"x is {list(x.shape)}, y is {list(y.shape)}")
        return x + y

    add = jit(broken, compile=mode)
    with pytest.raises(LookupError, match=r"x is \[2\], y is \[3\]"):
        add(torch.ones(2), torch.ones(3))
    assert add(torch.ones(3), torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(LookupError, match=r"x is \[4\], y is \[3\]"):
        add(torch.ones(4), torch.ones(3))


@every_mode
def test_an_error_of_torch_inside_comes_out_as_itself(mode: Any) -> None:
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same reduction dim.* got \[2, 3\] X \[2, 3\]"):
        jit(lambda x, y: x @ y, compile=mode)(torch.ones(2, 3), torch.ones(2, 3))


@every_mode
@pytest.mark.parametrize("wrong", [1.0, None, "text", 3])
def test_what_is_no_tensor_is_refused_and_named(mode: Any, wrong: Any) -> None:
    step = jit(lambda x, y: x["a"], compile=mode)
    with pytest.raises(TypeError, match=rf"argument 0\.a is {wrong!r}; a compiled step takes tensors only"):
        step({"a": wrong}, torch.ones(1))


@every_mode
def test_a_number_is_refused_after_a_tensor_was_taken_too(mode: Any) -> None:
    double = jit(lambda x: x * 2, compile=mode)
    assert double(torch.ones(1)).item() == 2
    with pytest.raises(TypeError, match=r"argument 0 is 2\.0"):
        double(2.0)


@every_mode
def test_each_structure_and_shape_has_a_program(mode: Any) -> None:
    total = jit(lambda x: tree.map(lambda leaf: leaf.sum(), x), compile=mode)
    assert total((torch.ones(2), torch.ones(3)))[1].item() == 3
    assert total({"a": torch.ones(4)})["a"].item() == 4
    assert total((torch.ones(5), torch.ones(6)))[1].item() == 6
    assert total((torch.ones(2), torch.ones(3)))[0].item() == 2


@every_mode
def test_functions_of_one_signature_never_share_a_program_however_many(mode: Any) -> None:
    added = [jit(lambda x, i=i: x + i, compile=mode) for i in range(10)]
    assert [add(torch.zeros(1)).item() for add in added] == list(range(10))
    assert [jit(lambda x, i=i: x * i, compile=mode)(torch.ones(1)).item() for i in range(3)] == [0, 1, 2]


@every_mode
def test_one_function_takes_any_number_of_shapes(mode: Any) -> None:
    total = jit(lambda x: x.sum(), compile=mode)
    assert [total(torch.ones(n)).item() for n in range(1, 11)] == list(range(1, 11))
    assert total(torch.ones(2)).item() == 2


@every_mode
def test_what_a_function_returns_may_depend_on_shapes(mode: Any) -> None:
    parts = jit(lambda x: tuple(x.unbind()), compile=mode)
    assert [len(parts(torch.ones(n))) for n in (2, 3, 2)] == [2, 3, 2]


def test_the_second_call_traces_nothing() -> None:
    traced: list[int] = []

    def pure(x: Tensor, rate: Tensor) -> Tensor:
        traced.append(1)
        return x * rate

    scale = jit(pure, compile="aot_eager")
    scale(torch.ones(3), torch.tensor(2.0))
    assert traced == [1]
    assert scale(torch.ones(3), torch.tensor(5.0)).tolist() == [5, 5, 5]
    assert traced == [1]


@every_mode
def test_results_carry_no_autograd_graph(mode: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    assert not jit(lambda x: x * 2, compile=mode)(x).requires_grad


def test_inductor_without_a_compiler_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("hymo.jit"), "_compiler_error", lambda device: "on a CPU needs a C++ compiler")
    with pytest.raises(ValueError, match=r"training\.compile: inductor .* a C\+\+ compiler; `aot_eager` and `none`"):
        jit(lambda x: x * 2)(torch.ones(1))
    assert jit(lambda x: x * 2, compile="none")(torch.ones(1)).item() == 2


@pytest.mark.heavy
def test_inductor_agrees_with_python() -> None:
    step, data = jit(moved, donate=True), torch.randn(3, generator=torch.Generator().manual_seed(1))
    expected, wanted = moved(state(), data)
    now, metrics = step(state(), data)
    tree.map(torch.testing.assert_close, (now, metrics), (expected, wanted))
    assert jit(torch.func.grad(lambda x: Tripled.apply(x).sum()))(torch.zeros(2)).tolist() == [3, 3]


@pytest.mark.parametrize("compile", ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)])
def test_what_is_traced_knows_that_it_is(compile: Any) -> None:
    """A check that reads a number asks first, in a region and in what is called once too."""
    seen: list[bool] = []

    def checked(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x.sin()

    x = torch.ones(3)
    jit(checked, compile=compile)(x)
    jit(once(checked, compile=compile), compile=compile)(x)
    jit(torch.func.grad(lambda x: region(checked, compile=compile)(x).sum()), compile=compile)(x)
    assert seen
    assert all(seen)
    assert not torch.compiler.is_compiling()
