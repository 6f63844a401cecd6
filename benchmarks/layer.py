"""Times one Gated DeltaNet layer, forward and backward, and tells what part of it the scan is.

`benchmarks/layer.py [CONFIG] [section.key=value ...]`: the mixer alone, of v1.0 by default, compiled as a step compiles
it, over rows of packed documents. On a GPU a time is the median of CUDA events with the L2 cache overwritten before a
run and launches hidden, and a second table tells where it goes. On a CPU it takes a small CONFIG and
`training.compile=none`.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from scan import environment
from scan import interleaved as on_events
from step import DEVICE, ON_GPU, documents, interleaved, seconds
from torch import Tensor
from where import breakdown

from hymo import jit, load_config
from hymo.backend import choose_backend
from hymo.config import HyMoConfig, derive_config
from hymo.layers.gdn import GdnParams, gdn, gdn_spec
from hymo.layers.rope import Rotary, rotary
from hymo.params import initialize

V1 = Path(__file__).parents[1] / "recipes" / "configs" / "hymo_750m.yaml"

Gradients = tuple[GdnParams, Tensor]


def layer_step(config: HyMoConfig) -> Callable[[], tuple[Tensor, Gradients]]:
    """The mixer's output and the gradients of its parameters and input, for a gradient of the output."""
    model, training = config.model, config.training
    backend, spec = choose_backend(training, DEVICE), gdn_spec(model)
    stored = initialize(spec, 0, device=DEVICE)
    position = documents(derive_config(config, training={"gradient_accumulation_steps": 1})).position[0]
    angles = rotary(position, dims=model.gdn_rope_dim, theta=model.rope_theta)
    x, d_y = torch.randn(2, *position.shape, model.dim, device=DEVICE, dtype=getattr(torch, training.precision))

    def mixer(stored: GdnParams, x: Tensor, position: Tensor, angles: Rotary) -> Tensor:
        p = backend.gather(stored, spec)
        return gdn(p, x, cfg=model, position=position, angles=angles, backend=backend)[0]

    layer = backend.region(mixer)

    def both(stored: GdnParams, x: Tensor, position: Tensor, angles: Rotary, d_y: Tensor) -> tuple[Tensor, Gradients]:
        y, pull_back = torch.func.vjp(lambda stored, x: layer(stored, x, position, angles), stored, x)
        return y, pull_back(d_y)

    step = jit(both, compile=training.compile)
    return lambda: step(stored, x, position, angles, d_y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("values", nargs="*", metavar="[CONFIG] section.key=value")
    parser.add_argument("--runs", type=int, default=20)
    asked = parser.parse_intermixed_args()
    named = bool(asked.values) and "=" not in asked.values[0]
    config = load_config(asked.values[0] if named else V1, asked.values[named:])
    model, training = config.model, config.training
    heads = f"{model.gdn_n_heads} heads of {model.gdn_key_dim} x {model.gdn_value_dim}"
    print("command: benchmarks/layer.py", *sys.argv[1:])
    print(f"{environment()}; {training.precision}, compile={training.compile}, median of {asked.runs} runs")
    print(f"{training.micro_batch_size} rows of {training.max_seq_len} tokens, width {model.dim}, {heads}")

    run = layer_step(config)
    print(f"first call: {seconds(run):.1f} s", flush=True)
    if not ON_GPU:
        spent = interleaved({"layer": run}, asked.runs)["layer"]
        print(f"forward + backward: {statistics.median(spent):.2f} ms")
        return
    print(f"forward + backward: {on_events({'layer': run}, asked.runs, host=False)['layer']:.3f} ms")
    print(f"with the host's launches: {on_events({'layer': run}, asked.runs, host=True)['layer']:.3f} ms")
    parts = breakdown(run, model)
    together = sum(parts.values())
    print(f"{'GPU time':>20} {'ms':>8} {'share':>6}")
    for kind in sorted(parts, key=lambda kind: -parts[kind]):
        print(f"{kind:>20} {parts[kind]:8.3f} {parts[kind] / together:6.1%}")
    print(f"{'together':>20} {together:8.3f}")


if __name__ == "__main__":
    main()
