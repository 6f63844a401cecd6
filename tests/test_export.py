"""An exported model is the model: same logits, same ids, readable by others."""

import json
import random
import shutil
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import tiny_config, windows
from safetensors import safe_open
from test_checkpoint import files_of_at_most
from tiny_run import prepare, run_config, text

from hymo import tree
from hymo.config_yaml import to_yaml
from hymo.data import ExtendedTokenizer, train_bpe_tokenizer
from hymo.export import export_model, open_export
from hymo.handle import HyMo, build_hymo, open_run

ROOT = Path(__file__).parents[1]
MODEL = build_hymo(tiny_config(), seed=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ExtendedTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_bpe_tokenizer([text(i) for i in range(9)], vocab_size=256, output_path=path)


@pytest.fixture(scope="module")
def exported(tokenizer: ExtendedTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(tmp_path_factory.mktemp("export") / "model", MODEL, tokenizer=tokenizer, step=7)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_read_back_gives_the_same_logits(tied: bool, tokenizer: ExtendedTokenizer, tmp_path: Path) -> None:
    model = build_hymo(tiny_config(model={"tie_embeddings": tied}), seed=4)
    found = open_export(export_model(tmp_path / "model", model, tokenizer=tokenizer, step=7))
    assert found.step == 7
    assert found.model.config == model.config
    assert found.tokenizer.fingerprint == tokenizer.fingerprint
    assert torch.equal(found.model(windows(0, 2, 33)), model(windows(0, 2, 33)))
    for name, leaf in tree.paths(model.params).items():
        assert torch.equal(tree.paths(found.model.params)[name], leaf), name


def test_the_file_has_every_parameter_once_under_its_name(exported: Path) -> None:
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert names == set(tree.paths(MODEL.params))
    assert "table" in names
    size = (exported / "model.safetensors").stat().st_size
    assert 4 * MODEL.num_parameters() < size < 4 * MODEL.num_parameters() + 100 * len(names) + 4096
    described = json.loads((exported / "config.json").read_text())
    assert (described["model_type"], described["vocab_size"], described["eos_token_id"]) == ("hymo", 512, 0)


def test_half_precision_rounds_matrices_and_nothing_else(tokenizer: ExtendedTokenizer, tmp_path: Path) -> None:
    folder = export_model(tmp_path / "half", MODEL, tokenizer=tokenizer, step=7, dtype=torch.bfloat16)
    found = open_export(folder).model
    assert torch.equal(found.params.table, MODEL.params.table.bfloat16().float())
    assert torch.equal(found.params.norm, MODEL.params.norm)
    torch.testing.assert_close(found(windows(0, 2, 33)), MODEL(windows(0, 2, 33)), atol=0.1, rtol=0)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        kinds = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118 - it is no mapping
    assert kinds == {torch.bfloat16, torch.float32}


def test_transformers_opens_the_tokenizer_and_every_text_comes_back(
    exported: Path, tokenizer: ExtendedTokenizer
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id) == (512, 0, 2)
    draw = random.Random(0)
    atoms = [" ", "\n", "\r\n", "x != y", "the", "naïve", "東京", "\0", "\u2028", "<|endoftext|>", "<0x41>", "▁", "Ġ"]
    texts = ["".join(draw.choices(atoms, k=12)) for _ in range(200)] + [text(1)]
    for each in texts:
        ids = theirs.encode(each, add_special_tokens=False)
        assert ids == tokenizer.encode(each)
        assert theirs.decode(ids) == each


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json there; recipes/export.py writes one"),
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json is none of hymo's"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "model.safetensors cannot be read"),
        (lambda folder: change(folder, n_layers=5), r"blocks\.\d\.[\w.]+ is missing"),
        (lambda folder: change(folder, n_layers=3), r"blocks\.3\.[\w.]+ is unknown"),
        (lambda folder: change(folder, dim=16), r"has shape \[512, 32\], the configuration asks for \[512, 16\]"),
        (lambda folder: change(folder, dim="x"), "config.json does not fit: dim: expected int"),
    ],
)
def test_what_does_not_fit_is_one_line_that_names_it(
    damage: Callable[[Path], Any], line: str, exported: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    damage(folder)
    with pytest.raises(ValueError, match=line) as error:
        open_export(folder)
    assert len(str(error.value).splitlines()) == 1


def change(folder: Path, **keys: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["model"] |= keys
    (folder / "config.json").write_text(json.dumps(content))


def test_a_folder_that_is_there_is_kept(tokenizer: ExtendedTokenizer, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="it is there already; give a new folder"):
        export_model(tmp_path / "model", MODEL, tokenizer=tokenizer, step=0)
    other = HyMo(tiny_config(model={"vocab_size": 600}).model, MODEL.params)
    with pytest.raises(ValueError, match="the tokenizer has 512 ids, the model 600"):
        export_model(tmp_path / "new", other, tokenizer=tokenizer, step=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tokenizer: ExtendedTokenizer, tmp_path: Path) -> None:
    with files_of_at_most(20_000), pytest.raises(OSError, match=r"^export .*model.safetensors cannot be written \("):
        export_model(tmp_path / "model", MODEL, tokenizer=tokenizer, step=7)
    assert not list(tmp_path.iterdir())


def recipe(name: str) -> Any:
    spec = util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipe_exports_what_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_keys = {"output_dir": str(tmp_path / "run")}
    config = run_config(prepare(tmp_path / "data"), scheduler={"total_steps": 1}, run=run_keys)
    pretrain = recipe("pretrain")
    (tmp_path / "trial.yaml").write_text(to_yaml(config))
    assert pretrain.main([str(tmp_path / "trial.yaml")]) == 0
    torch.use_deterministic_algorithms(False)
    capsys.readouterr()
    assert recipe("export").main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "step 1, " in capsys.readouterr().out
    run, found = open_run(tmp_path / "run"), open_export(tmp_path / "out")
    assert torch.equal(run.model(windows(0, 1, 20)), found.model(windows(0, 1, 20)))
    assert recipe("export").main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "give a new folder" in capsys.readouterr().err
