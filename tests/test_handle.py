"""The handle is the pure functions and nothing more; a run's folder opens as one, and the recipes that use it."""

import json
import math
import re
import runpy
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from configs import setup, tiny_config, windows
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo import tree
from hymo.checkpoint import Provenance, save_checkpoint
from hymo.config_yaml import to_yaml
from hymo.data import prepare_corpus
from hymo.handle import HyMo, build_hymo, open_run
from hymo.jit import jit
from hymo.layers.embedding import unembed
from hymo.layers.norm import rms_norm
from hymo.model import forward, model_spec
from hymo.params import initialize

RECIPES = Path(__file__).parents[1] / "recipes"
CONFIG = tiny_config()
MODEL = build_hymo(CONFIG, seed=3)


def test_calling_a_model_is_the_forward_pass() -> None:
    tokens = windows(0, 2, 9)
    assert torch.equal(MODEL(tokens), forward(MODEL.params, tokens, cfg=MODEL.config)[0])


def test_logits_are_read_from_the_hidden_states() -> None:
    logits, hidden = MODEL.forward_with_hidden(windows(0, 2, 9))
    normed = rms_norm(hidden, MODEL.params.norm, eps=MODEL.config.norm_eps)
    assert torch.equal(logits, MODEL(windows(0, 2, 9)))
    assert torch.equal(logits, unembed(normed, MODEL.params.table, cap=MODEL.config.logit_softcap))


@pytest.mark.parametrize("id", [-1, 512, 10**12])
def test_an_id_outside_the_vocabulary_is_named(id: int) -> None:
    tokens = windows(0, 2, 9).index_fill(1, torch.tensor([4]), id)
    for call in (MODEL, MODEL.forward_with_hidden):
        with pytest.raises(ValueError, match=rf"^tokens: id {id} is not in 0 to 511$"):
            call(tokens)


def test_a_model_can_be_transformed_like_its_functions() -> None:
    tokens = windows(0, 3, 2, 9)
    expected = torch.stack([MODEL(each) for each in tokens])
    torch.testing.assert_close(torch.func.vmap(MODEL)(tokens), expected, atol=1e-5, rtol=1e-5)
    compiled = jit(MODEL, compile="aot_eager")
    torch.testing.assert_close(compiled(tokens[0]), expected[0], atol=1e-5, rtol=1e-5)


@settings(max_examples=8, deadline=None)
@given(start=st.integers(0, 1000), seed=st.integers(0, 2**16))
def test_positions_are_relative(start: int, seed: int) -> None:
    tokens = windows(seed, 2, 12)
    moved, _ = MODEL.forward_with_hidden(tokens, start_pos=start)
    torch.testing.assert_close(moved, MODEL(tokens), atol=3e-4, rtol=0)


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a start_pos of 0 or more, got -1"):
        MODEL.forward_with_hidden(windows(0, 1, 4), start_pos=-1)


def test_softcap_bounds_logits_and_keeps_small_ones() -> None:
    logits = torch.tensor([-1e4, -0.01, 0.0, 0.01, 1e4])
    torch.testing.assert_close(MODEL.softcap(logits), torch.tensor([-15, -0.01, 0.0, 0.01, 15]), atol=1e-6, rtol=1e-6)


def test_parameters_are_counted_once_and_buffers_only_on_request() -> None:
    leaves = tree.leaves(MODEL.params)
    assert MODEL.num_parameters() == sum(leaf.numel() for leaf in leaves)
    buffers = 2 * MODEL.config.n_routed_experts * len(MODEL.config.mla_layers)
    assert MODEL.num_parameters(only_trainable=True) == MODEL.num_parameters() - buffers
    untied = build_hymo(tiny_config(model={"tie_embeddings": False}))
    table = MODEL.config.vocab_size * MODEL.config.dim
    assert untied.num_parameters() == MODEL.num_parameters() + table


def test_a_model_is_a_function_of_its_seed() -> None:
    assert torch.equal(build_hymo(CONFIG, seed=3).params.table, MODEL.params.table)
    assert torch.equal(build_hymo(CONFIG).params.table, build_hymo(CONFIG, seed=CONFIG.training.seed).params.table)
    assert not torch.equal(build_hymo(CONFIG, seed=4).params.table, MODEL.params.table)


def test_a_model_computes_in_the_configured_precision() -> None:
    narrow = build_hymo(tiny_config(**{"training.precision": "bfloat16"}), seed=3)
    assert narrow.params.table.dtype == torch.float32
    difference = (narrow(windows(0, 2, 9)) - MODEL(windows(0, 2, 9))).abs().max().item()
    assert 0 < difference < 0.1
    moved, hidden = narrow.forward_with_hidden(windows(0, 2, 9), start_pos=7)
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(moved, MODEL(windows(0, 2, 9)), atol=0.1, rtol=0)


def test_a_handle_cannot_be_changed_but_replaced() -> None:
    with pytest.raises(FrozenInstanceError):
        MODEL.params = MODEL.params  # type: ignore[misc]
    other = initialize(model_spec(CONFIG.model), 9)
    assert torch.equal(replace(MODEL, params=other)(windows(0, 1, 5)), HyMo(CONFIG.model, other)(windows(0, 1, 5)))


PROSE = [f"Line {n} says in so many words that {n} times {n} is {n * n}, and no more.\n" for n in range(40)]
CODE = [f"def power_{n}(number_{n}):\n    return number_{n} ** {n} + {n}  # nothing else\n" for n in range(40)]
DATA = {"corpus": "embedded", "sources": [{"name": "prose", "weight": 0.5}, {"name": "code", "weight": 0.5}]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder before its first step: what recipes/pretrain.py leaves behind, metrics and report aside."""
    folder = tmp_path_factory.mktemp("runs") / "tiny-1"
    config = tiny_config(data=DATA, training={"compile": "none"})
    corpus = prepare_corpus(
        folder / "data", {"prose": PROSE, "code": CODE}, vocab_size=config.model.tokenizer_vocab_size, val_bytes=500
    )
    (folder / "config.yaml").write_text(to_yaml(config))
    corpus.tokenizer.save(folder / "tokenizer.json")
    save_checkpoint(
        folder / "checkpoints", setup(config).state(), meta=Provenance(config, corpus.tokenizer.fingerprint, "d")
    )
    return folder


def recipe(name: str, *arguments: str | Path) -> None:
    """Runs a recipe as `python recipes/NAME.py ARGUMENTS` would."""
    path = str(RECIPES / f"{name}.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *map(str, arguments)])
        runpy.run_path(path, run_name="__main__")


def test_a_run_opens_at_its_newest_checkpoint(run: Path) -> None:
    opened = open_run(run)
    assert opened.step == 0
    assert opened.tokenizer.vocab_size == opened.model.config.vocab_size == 512
    assert torch.equal(opened.model(windows(0, 1, 9)), build_hymo(CONFIG, seed=0)(windows(0, 1, 9)))


def test_overrides_stand_above_the_configuration_of_a_run(run: Path) -> None:
    assert open_run(run, ["data.val_tokens=5000"]).config.data.val_tokens == 5000
    with pytest.raises(ValueError, match=r"the configuration asks for \[512, 64\]"):
        open_run(run, ["model.dim=64"])


def test_generating_prints_prompt_and_text_the_same_for_a_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in (1, 1, 2):
        recipe("generate", run, "--prompt", "Line 7 says", "--max-new-tokens", "6", "--seed", str(seed))
        outputs.append(capsys.readouterr().out)
    assert outputs[0].startswith("Line 7 says")
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_streamed_text_is_the_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        run,
        "--prompt",
        "def",
        "--max-new-tokens",
        "12",
        "--top-k",
        "100",
        "--top-p",
        "0.9",
        "--min-p",
        "0.001",
    )
    recipe("generate", *arguments)
    whole = capsys.readouterr().out
    recipe("generate", *arguments, "--stream")
    assert capsys.readouterr().out == whole


def test_every_prompt_gets_its_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe("generate", run, "--prompt", "Line", "--prompt", "def", "--num-samples", "2", "--max-new-tokens", "3")
    texts = capsys.readouterr().out.split("-" * 80 + "\n")
    assert [text[:3] for text in texts] == ["Lin", "Lin", "def", "def", ""]


def test_evaluating_prints_one_line_of_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe("evaluate", run)
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["kind"], found["step"], found["max_seq_len"]) == ("eval", 0, 64)
    assert list(found["sources"]) == list(found["validation"]) == ["prose", "code"]
    assert found["loss"] == pytest.approx(math.log(512), abs=0.1)
    assert found["tokens"] == sum(each["tokens"] for each in found["sources"].values())


def test_other_text_can_be_evaluated(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe("evaluate", run, f"data.validation={run / 'data' / 'code_val*.bin'}")
    found = json.loads(capsys.readouterr().out)
    recipe("evaluate", run)
    assert list(found["sources"]) == ["validation"]
    expected = json.loads(capsys.readouterr().out)["sources"]["code"]
    assert found["sources"]["validation"]["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("generate", ["nowhere"], r"run nowhere: is no folder; give the folder that recipes/pretrain.py printed"),
        ("evaluate", ["nowhere"], r"run nowhere: is no folder"),
        ("generate", ["{run}/data"], r"run .*data: holds no config.yaml"),
        ("generate", [], r"the following arguments are required: run"),
        ("generate", ["{run}", "--temperature", "-1"], r"temperature: expected 0 .* or more, got -1.0"),
        ("generate", ["{run}", "--top-p", "0"], r"top_p: expected a probability in \(0, 1\], .* got 0.0"),
        ("generate", ["{run}", "--top-p", "1.01"], r"top_p: expected a probability in \(0, 1\], .* got 1.01"),
        ("generate", ["{run}", "--top-k", "many"], r"argument --top-k: invalid int value: 'many'"),
        ("generate", ["{run}", "--num-samples", "0"], r"--num-samples: expected at least 1, got 0"),
        (
            "generate",
            ["{run}", "--stream", "--num-samples", "2"],
            r"--stream: expected one prompt and one sample, got 2",
        ),
        ("generate", ["{run}", "--prompt", "Line " * 90], r"prompt 0: \d+ tokens .* exceed max_seq_len 64"),
        ("generate", ["{run}", "--prompt", "a\udcff"], r"encode: lone surrogate '\\udcff' at index 1"),
        ("evaluate", ["{run}", "data.val_tokns=1"], r"data.val_tokns: unknown key \(did you mean 'val_tokens'\?\)"),
        ("evaluate", ["{run}", "data.validation={run}"], r"source validation: no token shards at"),
        ("evaluate", ["{run}", "model.dim=64"], r"params.table has shape \[512, 32\], the configuration asks for"),
    ],
)
def test_what_is_asked_wrongly_is_one_line_and_exit_code_2(
    run: Path, name: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        recipe(name, *(argument.format(run=run) for argument in arguments))
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert re.fullmatch(rf"{name}: .*{message}.*\n", err), err


def test_a_run_without_a_checkpoint_says_so(run: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "tokenizer.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    with pytest.raises(ValueError, match="no complete checkpoint yet"):
        open_run(tmp_path)


def test_a_tokenizer_of_another_vocabulary_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.json has 512 ids, model.vocab_size is 600"):
        open_run(run, ["model.vocab_size=600"])
