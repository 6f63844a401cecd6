"""The benchmarks run, and the twin that hymo's step is timed against is the same step.

A table cannot be made again by a command that has stopped working, nor is a ratio worth anything if the other one
computes something else.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scan import IMPLEMENTATIONS
from torch import Tensor
from torch.autograd import DeviceType
from twin import TwinStep, build_twin, choose_convolution, passes
from where import attributed, kind_of

from hymo import tree
from hymo.backend import EAGER, Backend, choose_backend, with_compute_dtype
from hymo.config import HyMoConfig, ModelConfig, derive_config
from hymo.step import TrainState, gradients
from hymo_kernels import causal_conv1d, gated_delta_rule
from tests.configs import Setup, micro_batches, setup, smallest_config, tiny_config

ROOT = Path(__file__).parents[1]
COMMANDS = [
    ["step.py", "training.gradient_accumulation_steps=1", "--runs", "1", "--compile", "none", "--twin"],
    ["scan.py", "--impl", "chunk", "recurrent", "--shape", "1x64x1x16x16", "--runs", "1"],
    ["loss.py", "--shape", "64x8x100", "--runs", "1"],
    ["layer.py", str(ROOT / "recipes" / "configs" / "tiny.yaml"), "training.compile=none", "--runs", "1"],
    ["attention.py", "--help"],
    ["data.py", "--help"],
    ["tune.py", "--help"],
    ["peers.py", "--help"],
]


@pytest.mark.heavy
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_benchmark_runs(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / command[0]), *command[1:]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


DROPLESS = {"moe_capacity_factor": 4.0}
OTHERS = {
    **DROPLESS,
    "tie_embeddings": False,
    "gdn_ffn_dim": 16,
    "gdn_value_skip": True,
    "gdn_allow_neg_eigval": True,
    "gdn_n_key_heads": 4,
    "n_shared_experts": 0,
}
PLAIN = {"muon_scale": "rms", "cautious_wd": False, "adamw_weight_decay": 0.1}


def twins(cfg: HyMoConfig, compile: Any = "none") -> tuple[Setup, TrainState, TwinStep]:
    """hymo's step and the twin's, at the same parameters."""
    parts = setup(cfg)
    state = parts.state()
    twin = build_twin(state.params, cfg, gated_delta_rule, causal_conv1d, compile)
    return parts, state, TwinStep(twin, cfg, parts.spec, compile)


@pytest.mark.parametrize("model", [DROPLESS, OTHERS], ids=["default", "others"])
def test_the_twin_has_the_same_loss_and_gradients(model: dict[str, Any]) -> None:
    parts, state, step = twins(tiny_config(model=model))
    batch = micro_batches(parts.cfg, 0)
    want, loss, _ = gradients(state.params, batch, cfg=parts.cfg, spec=parts.spec)
    assert float(step.gradients(passes(batch, parts.cfg.model))) == pytest.approx(float(loss), rel=1e-5)
    found = {name: p.grad for name, p in step.twin.named_parameters()}
    assert found.keys() == tree.paths(want).keys()
    for name, grad in tree.paths(want).items():
        assert grad.norm() > 0, name
        assert (found[name] - grad).norm() < 1e-4 * grad.norm(), name


@pytest.mark.parametrize(
    "cfg",
    [tiny_config(model=DROPLESS), tiny_config(model=OTHERS, optimizer=PLAIN)],
    ids=["default", "others"],
)
def test_the_twin_takes_the_same_steps(cfg: HyMoConfig) -> None:
    parts, state, step = twins(cfg)
    start, run = tree.paths(state.params), parts.step()
    for i in range(3):
        batch = micro_batches(cfg, i)
        state, metrics = run(state, batch)
        assert float(step(passes(batch, cfg.model))) == pytest.approx(float(metrics.loss), rel=1e-5)
    found = {**dict(step.twin.named_parameters()), **dict(step.twin.named_buffers())}
    for name, leaf in tree.paths(state.params).items():
        assert (found[name] - leaf).norm() < 1e-3 * (leaf - start[name]).norm(), name


@pytest.mark.heavy
@pytest.mark.parametrize("compile", ["aot_eager", "inductor"])
def test_the_compiled_twin_takes_the_same_steps(compile: str) -> None:
    parts, state, step = twins(smallest_config(model=DROPLESS), compile)
    run = parts.step()
    for i in range(3):
        batch = micro_batches(parts.cfg, i)
        state, metrics = run(state, batch)
        assert float(step(passes(batch, parts.cfg.model))) == pytest.approx(float(metrics.loss), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.whole_step
@pytest.mark.parametrize("scan", ["hymo", "flashqla"])
def test_the_twin_has_the_same_gradients_on_a_gpu(scan: str) -> None:
    if scan == "flashqla":
        pytest.importorskip("flash_qla")
    width = {"gdn_n_heads": 2, "gdn_key_dim": 128, "gdn_value_dim": 128, "qk_nope_head_dim": 24, "v_head_dim": 32}
    model = {**DROPLESS, **width, "dim": 128, "max_seq_len": 256}
    exact = tiny_config(model=model, training={"max_seq_len": 256})
    cfg = derive_config(exact, training={"precision": "bfloat16"})
    parts = setup(exact)
    params, batch = tree.map(lambda x: x.cuda(), (parts.state().params, micro_batches(exact, 0)))

    def of_hymo(cfg: HyMoConfig, backend: Backend) -> dict[str, Tensor]:
        return tree.paths(gradients(params, batch, cfg=cfg, spec=parts.spec, backend=backend)[0])

    twin = build_twin(params, cfg, IMPLEMENTATIONS[scan](), choose_convolution("cuda")[0])
    TwinStep(twin, cfg, parts.spec).gradients(passes(batch, cfg.model))
    want = of_hymo(exact, with_compute_dtype(EAGER, torch.float32))
    usual = of_hymo(cfg, choose_backend(cfg.training, "cuda"))
    for name, p in twin.named_parameters():
        error, bound = ((x - want[name]).norm() / want[name].norm() for x in (p.grad, usual[name]))
        assert error < max(0.1, 2 * bound), name


def test_the_twin_has_one_rule() -> None:
    with pytest.raises(ValueError, match="gdn_rule=delta"):
        twins(tiny_config(model={"gdn_rule": "delta"}))


@pytest.mark.parametrize(
    ("operation", "shapes", "kernel", "kind"),
    [
        ("aten::mm", [[16384, 896], [896, 64256]], "nvjet", "heads"),
        ("aten::mm", [[16384, 896], [896, 7168]], "nvjet", "projections"),
        ("aten::bmm", [[16, 6144, 896], [16, 896, 2304]], "nvjet", "experts"),
        ("aten::bmm", [[96, 896, 1792], [96, 1792, 896]], "nvjet", "optimiser"),
        ("aten::baddbmm", [[96, 896, 896], [96, 896, 896], [96, 896, 896], []], "nvjet", "optimiser"),
        ("aten::bmm", [[64, 4096, 128], [64, 128, 4096]], "nvjet", "other products"),
        ("aten::_grouped_mm", [[32768, 896], [16, 896, 4608]], "cutlass::device_kernel", "experts"),
        ("hymo::causal_conv1d_forward", [], "forward_kernel", "convolution"),
        ("hymo::gated_delta_backward", [], "chain_kernel", "scan"),
        ("", [], "tilelang_fused_chunk_gdr_bwd_kernel_kernel", "scan"),
        ("", [], "triton_poi_fused__to_copy_convert_element_type_add_0", "elementwise, norms"),
        ("", [], "triton_red_fused__log_softmax_tanh_3", "heads"),
        ("", [], "triton_poi_fused_add_addcmul_lerp_sqrt_where_9", "optimiser"),
        ("", [], "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
    ],
)
def test_a_kernel_is_known_by_its_operation_and_shapes(
    operation: str, shapes: list[list[int]], kernel: str, kind: str
) -> None:
    assert kind_of(operation, shapes, kernel, ModelConfig()) == kind


def test_the_time_of_every_kernel_is_counted_once() -> None:
    def event(device: DeviceType, name: str, microseconds: float = 0.0, **more: Any) -> SimpleNamespace:
        span = SimpleNamespace(elapsed_us=lambda: microseconds)
        fields = {"kernels": [], "input_shapes": [], "is_user_annotation": False, **more}
        return SimpleNamespace(device_type=device, name=name, time_range=span, **fields)

    def kernel(name: str, microseconds: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, duration=microseconds)

    head = [[128, 32], [32, 64256]]
    events = [
        event(DeviceType.CPU, "## graph ##", kernels=[kernel("## graph ##", 9000.0)], is_user_annotation=True),
        event(DeviceType.CUDA, "## graph ##", 9000.0, is_user_annotation=True),
        event(DeviceType.CPU, "aten::mm", kernels=[kernel("nvjet", 2000.0)], input_shapes=head),
        event(DeviceType.CPU, "aten::mm", kernels=[kernel("nvjet", 1000.0)], input_shapes=[[128, 32], [32, 8]]),
        event(DeviceType.CUDA, "nvjet", 2000.0),
        event(DeviceType.CUDA, "nvjet", 1000.0),
        event(DeviceType.CUDA, "triton_poi_fused_add_0", 500.0),
    ]
    spent = {kind: milliseconds for kind, milliseconds in attributed(events, ModelConfig()).items() if milliseconds}
    assert spent == {"heads": 2.0, "projections": 1.0, "elementwise, norms": 0.5}
