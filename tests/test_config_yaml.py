"""YAML configurations: numbers are numbers, the whole round trip, and every mistake with its line or argument."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.config import HyMoConfig, derive_config
from hymo.config_yaml import load_config, load_config_from_dict, to_yaml
from hymo.section import ConfigError

CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"
RUNS = sorted({*CONFIGS.glob("*.yaml")} - {CONFIGS / "mixture.yaml"})
V1 = HyMoConfig()


def load(text: str, *overrides: str) -> HyMoConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)


def complaints(text: str, *overrides: str) -> list[str]:
    """The lines of the error, with the file's name for its path."""
    with pytest.raises(ConfigError) as error:
        load(text, *overrides)
    return re.sub(r"[^ (]*/(x\.yaml)", r"\1", str(error.value)).splitlines()


def test_hymo_750m_is_the_default() -> None:
    assert load_config(CONFIGS / "hymo_750m.yaml") == V1


def test_small_heads_differ_in_the_geometry_of_the_memory_only() -> None:
    memory = {"gdn_n_heads": 56, "gdn_n_key_heads": 56, "gdn_key_dim": 32, "gdn_value_dim": 32}
    expected = derive_config(V1, model=memory, run={"name": "hymo_750m_small_heads"})
    assert load_config(CONFIGS / "hymo_750m_small_heads.yaml") == expected


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_shipped_config_spells_out_every_key(path: Path) -> None:
    raw, full = (yaml.safe_load(text) for text in (path.read_text(encoding="utf-8"), to_yaml(V1)))
    assert {name: list(section) for name, section in raw.items()} == {name: list(keys) for name, keys in full.items()}
    assert load_config(path).run.name == path.stem


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_yaml_of_a_config_loads_to_the_same(path: Path) -> None:
    config = load_config(path)
    assert load(to_yaml(config)) == config


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """Keys of every type, with the texts and numbers that YAML likes to mistake for something else."""
    words = st.sampled_from(["no", "1e-4", "12:30", "2024-01-01", "null", "~", "012", "- a", "a: b", "#x", ".inf", "="])
    texts = st.one_of(words, st.text(max_size=30))
    paths = texts.filter(lambda text: text.strip() and text[0] != "~" and "\0" not in text)
    return {
        "model.dim": draw(st.integers(1, 2**16)),
        "model.rope_theta": draw(st.floats(1, 1e30, exclude_min=True)),
        "model.mtp_loss_weights": draw(st.lists(st.floats(0, 1), min_size=2, max_size=2)),
        "optimizer.muon_eps": draw(st.floats(1e-30, 1)),
        "training.grad_clip": draw(st.floats(1e-30, allow_nan=False)),
        "training.global_batch_size": draw(st.none() | st.integers(1, 10**6)),
        "model.tie_embeddings": draw(st.booleans()),
        "data.folder": draw(st.none() | paths),
        "data.sources": [{"name": "no", "weight": 1, "shards": draw(st.none() | paths)}],
        "run.output_dir": draw(st.none() | paths),
        "run.trackers": draw(st.lists(st.sampled_from(["wandb", "tensorboard"]), max_size=2)),
    }


@given(changes())
@settings(max_examples=30)
def test_round_trip_is_exact_for_any_text_and_number(changes: dict[str, Any]) -> None:
    config = derive_config(V1, **changes)
    assert load(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("3E-8", 3e-8), ("1", 1.0), (".5", 0.5), ("1.", 1.0), ("+0.1e+1", 1.0), ("0.000_1", None)],
)
def test_floats_are_numbers_in_any_spelling(text: str, value: float | None) -> None:
    if value is None:
        assert complaints(f"optimizer: {{muon_lr: {text}}}") == [
            f"optimizer.muon_lr: expected float, got str '{text}' (x.yaml:1)"
        ]
    else:
        assert load(f"optimizer: {{muon_lr: {text}}}").optimizer.muon_lr == value


@pytest.mark.parametrize(
    ("text", "value"), [("3e8", 300_000_000), ("1_000_000", 10**6), ("4096.0", 4096), ("007168", 7168)]
)
def test_integral_numbers_are_integers(text: str, value: int) -> None:
    tokens = load(f"data: {{val_tokens: {text}}}").data.val_tokens
    assert tokens == value
    assert isinstance(tokens, int)


def test_missing_keys_and_sections_keep_v1() -> None:
    assert load("model: {dim: 448}") == derive_config(V1, **{"model.dim": 448})
    assert load_config_from_dict({"model": {"dim": 448}}) == derive_config(V1, **{"model.dim": 448})
    assert load_config_from_dict({}) == V1


def test_every_mistake_is_reported_at_once_with_its_line() -> None:
    text = """\
model:
  dim: abc
  n_heads: 12
  n_heads: 16
  n_lyaers: 3
optimizer:
  cautious_wd: no
  adamw_betas:
    - 0.9
    - 1.0
scheduler:
  warmup_frac: 0.1
data:
  sources:
    - {name: a, weight: 0.5}
    - name: b
      wieght: 0.5
trainig: {}
"""
    assert complaints(text) == [
        "model.n_heads: given twice (x.yaml:3, x.yaml:4)",
        "trainig: unknown key (did you mean 'training'?) (x.yaml:18)",
        "model.n_lyaers: unknown key (did you mean 'n_layers'?) (x.yaml:5)",
        "model.dim: expected int, got str 'abc' (x.yaml:2)",
        "optimizer.adamw_betas[1]: expected float in [0, 1), got 1.0 (x.yaml:10)",
        "optimizer.cautious_wd: expected true or false, got str 'no' (x.yaml:7)",
        "scheduler.stable_frac: expected warmup_frac + stable_frac + decay_frac = 1, got 1.08; 0.75 would work"
        " (x.yaml:11)",
        "data.sources[1].wieght: unknown key (did you mean 'weight'?) (x.yaml:17)",
        "data.sources[1].weight: missing; it has no default (x.yaml:16)",
    ]


def test_rule_between_sections_names_the_line() -> None:
    assert complaints("training:\n  seed: 1\n  max_seq_len: 8192") == [
        "training.max_seq_len: expected at most model.max_seq_len (4096), got 8192 (x.yaml:3)"
    ]


def test_key_far_from_all_known_ones_lists_them() -> None:
    assert complaints("run: {colour: red}") == [
        "run.colour: unknown key (known: name, output_dir, trackers, profile) (x.yaml:1)"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "x.yaml: expected sections such as `model:`, got an empty file"),
        ("# nothing", "x.yaml: expected sections such as `model:`, got an empty file"),
        ("model", "x.yaml: expected sections such as `model:`, got str 'model'"),
        ("- 1", "x.yaml: expected sections such as `model:`, got a list of 1"),
        ("model:", "model: expected mapping, got null (x.yaml:1)"),
        ("model: {dim: 3", "x.yaml:1: expected YAML: expected ',' or '}', but got '<stream end>'"),
        ("model:\n\tdim: 3", "x.yaml:2: expected YAML: found character '\\t' that cannot start any token"),
        ("run: {name: a}\n---\nrun: {}", "x.yaml:2: expected YAML: but found another document"),
        ("run: &run {trackers: [*run]}", "x.yaml:1: expected YAML: aliases are not used here"),
        ("model: !!python/object:os.system {dim: 1}", "x.yaml:1: expected YAML: tags are not used here"),
        ("run:\n  name: !!str a", "x.yaml:2: expected YAML: tags are not used here"),
        ("data: {sources: ! []}", "x.yaml:1: expected YAML: tags are not used here"),
        ("model:\n  dim: " + "[" * 900, "x.yaml:2: expected YAML: too deep"),
        ("\n".join("  " * i + "a:" for i in range(900)), "x.yaml:20: expected YAML: too deep"),
        (
            "model: {dim: " + "9" * 400 + "}",
            "model.dim: expected int in [1, 65536], got a number of over 300 digits (x.yaml:1)",
        ),
        (
            "model: {dim: " + "9" * 5000 + "}",
            "model.dim: expected int in [1, 65536], got a number of over 300 digits (x.yaml:1)",
        ),
        ("? [model]\n: 3", "?: unknown key (known: model, optimizer, scheduler, training, data, run) (x.yaml:1)"),
        ("1: 3", "1: unknown key (known: model, optimizer, scheduler, training, data, run) (x.yaml:1)"),
    ],
)
def test_file_that_is_no_configuration_is_one_line(text: str, line: str) -> None:
    assert complaints(text) == [line]


def test_python_tags_are_never_executed() -> None:
    assert complaints("run: {name: !!python/object/apply:os.getcwd ''}") == [
        "x.yaml:1: expected YAML: tags are not used here"
    ]


def test_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_bytes(b"run:\n  name: \xff")
    cases = {
        tmp_path / "tiny.yaml:2": "expected UTF-8 text, got byte 0xff",
        tmp_path / "tinny.yaml": f"no such file (did you mean '{tmp_path / 'tiny.yaml'}'?)",
        tmp_path / "nowhere" / "a.yaml": "no such file",
        tmp_path: "expected a YAML file: Is a directory",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigError) as error:
            load_config(str(path).removesuffix(":2"))
        assert str(error.value) == f"{path}: {message}"


@pytest.mark.parametrize(("raw", "found"), [(None, "null"), ([], "a list of 0"), ("x", "str 'x'"), (5, "int 5")])
def test_what_is_no_dictionary_of_sections_is_one_line(raw: object, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config_from_dict(raw)
    assert str(error.value) == f"configuration: expected sections such as `model:`, got {found}"


def test_arguments_come_on_top_of_the_file() -> None:
    overrides = [
        "training.seed=7",
        "optimizer.muon_lr=1e-3",
        "optimizer.adamw_betas=[0.8, 0.9]",
        "run.name=a=b",
        "run.output_dir=",
        "data.sources=[{name: a, weight: 1}]",
    ]
    config = load("training: {seed: 1}\nrun: {output_dir: here}\ndata: {sources: [{name: b, wieght: 1}]}", *overrides)
    assert (config.training.seed, config.optimizer.muon_lr, config.optimizer.adamw_betas) == (7, 1e-3, (0.8, 0.9))
    assert (config.run.name, config.run.output_dir, config.data.sources[0].name) == ("a=b", None, "a")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2024", "2024"),
        ("1e-4", "1e-4"),
        ("true", "true"),
        (" a: b ", "a: b"),
        ("[a", "[a"),
        ("#x", "#x"),
        ("&a", "&a"),
        ("'7'", "7"),
        ('"a\\tb"', "a\tb"),
        ("null", None),
        (" ~ ", None),
        ("", None),
    ],
)
def test_text_in_an_argument_is_taken_as_it_is(text: str, value: str | None) -> None:
    assert load("model: {}", f"run.output_dir={text}").run.output_dir == value
    assert load("model: {}", f"data.folder={text}").data.folder == value


def test_an_argument_given_twice_is_as_wrong_as_a_key_given_twice() -> None:
    assert complaints("training: {seed: 3}", "training.seed=1", "model.dim=8", "training.seed=2") == [
        "training.seed: given twice (argument 'training.seed=1', argument 'training.seed=2')"
    ]


@pytest.mark.parametrize("key", ["run.output_dir", "data.folder", "data.tokenizer", "data.validation"])
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("''", "expected a path, or null, got ''"),
        ("' '", "expected a path, or null, got ' '"),
        ('"a\\0"', r"expected a path, or null, got 'a\x00'"),
        ("~/x", "expected a path without ~, which only shells know, got '~/x'; $HOME would work"),
    ],
)
def test_what_is_no_path_is_refused(key: str, text: str, complaint: str) -> None:
    argument = f"{key}={text}"
    assert complaints("model: {}", argument) == [f"{key}: {complaint} (argument {argument!r})"]


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("training.seed=x", "training.seed: expected int, got str 'x' (argument 'training.seed=x')"),
        ("model.dmi=3", "model.dmi: unknown key (did you mean 'dim'?) (argument 'model.dmi=3')"),
        ("trainig.seed=3", "trainig: unknown key (did you mean 'training'?) (argument 'trainig.seed=3')"),
        (
            "model.n_kv_groups=5",
            "model.n_kv_groups: expected a divisor of n_heads (16), got 5; 1, 2, 4, 8, 16 would work"
            " (argument 'model.n_kv_groups=5')",
        ),
        ("training.seed", "training.seed: expected section.key=value, such as training.seed=7"),
        ("seed=3", "seed=3: expected section.key=value, such as training.seed=7"),
        ("--seed", "--seed: expected section.key=value, such as training.seed=7"),
        ("data.sources=[a", "argument 'data.sources=[a': expected YAML: expected ',' or ']', but got '<stream end>'"),
        (
            "data.sources=[{name: a, wieght: 1, weight: 1}]",
            "data.sources[0].wieght: unknown key (did you mean 'weight'?)"
            " (argument 'data.sources=[{name: a, wieght: 1, weight: 1}]')",
        ),
    ],
)
def test_argument_at_fault_is_named(argument: str, line: str) -> None:
    assert complaints("model:\n  dim: 448", argument) == [line]
