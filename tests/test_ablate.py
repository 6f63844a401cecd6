"""Ablations: arms of equal size, the same seeds for all, and a table that says how sure it is."""

import json
import subprocess
import sys
from pathlib import Path

import ablate
import pytest
from ablate import ARMS, Result, active, plan, table, variant
from tiny_run import prepare, run_config

from hymo.config import derive_config
from hymo.config_yaml import load_config, to_yaml

RECIPES = Path(ablate.__file__).parent
CONFIGS = [RECIPES / "configs" / f"{name}.yaml" for name in ("tiny", "hymo_750m")]


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_arm_is_a_model_of_the_base_size(path: Path, name: str) -> None:
    base = load_config(path, [])
    config = variant(base, name)
    assert (config == base) == (name == "base")
    least = 0.75 if name == "no-mtp" else 0.98
    assert least < active(config) / active(base) < 1.02


def test_all_arms_have_one_run_before_any_has_two_and_share_their_seeds() -> None:
    base = load_config(CONFIGS[0], ["run.output_dir=there", "training.seed=7"])
    configs, folder = plan(base, ["base", "delta"], seeds=2)
    assert list(configs) == [("base", 7), ("delta", 7), ("base", 8), ("delta", 8)]
    assert {config.run.output_dir for config in configs.values()} == {
        str(folder / name) for name in ("base-7", "delta-7", "base-8", "delta-8")
    }
    one, other = configs["base", 8], configs["delta", 8]
    same = derive_config(other, model={"gdn_rule": one.model.gdn_rule}, run=one.run)
    assert same == one


@pytest.mark.parametrize(
    ("arms", "seeds", "message"),
    [
        (["base", "bigger"], 1, "--arms: there is no 'bigger'; these work: base, all-gdn"),
        (["base", "base"], 1, "--arms: expected each once, got base base"),
        (["base"], 0, "--seeds: expected at least 1, got 0"),
    ],
)
def test_what_is_not_an_ablation_is_refused(arms: list[str], seeds: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(load_config(CONFIGS[0], ["run.output_dir=there"]), arms, seeds=seeds)


def test_an_ablation_needs_a_folder() -> None:
    with pytest.raises(ValueError, match=r"run\.output_dir: expected the folder of the ablation, got null"):
        plan(load_config(CONFIGS[0], []), ["base"], seeds=1)


def test_the_table_compares_seed_by_seed() -> None:
    base = load_config(CONFIGS[0], [])
    scores = {("base", 0): 2.0, ("base", 1): 3.0, ("delta", 0): 2.1, ("delta", 1): 3.1}
    found = {key: Result(score, {"docs": score}, 100.0) for key, score in scores.items()}
    lines = list(table(found, {arm: variant(base, arm) for arm in ("base", "delta")}))
    assert "2 seeds" in lines[0]
    assert lines[2].split()[:1] == ["base"]
    assert "2.5000 ± 0.7071" in lines[2]
    # The seeds differ by 1 and the arms by 0.1 on each: the difference has no spread.
    assert "2.6000 ± 0.7071" in lines[3]
    assert "+0.1000 ± 0.0000" in lines[3]


@pytest.mark.heavy
def test_an_ablation_trains_every_arm_once_and_only_once(tmp_path: Path) -> None:
    config = run_config(prepare(tmp_path / "data"), run={"output_dir": str(tmp_path / "runs")})
    (tmp_path / "base.yaml").write_text(to_yaml(config))
    command = [sys.executable, str(RECIPES / "ablate.py"), str(tmp_path / "base.yaml"), "--seeds", "1"]
    command += ["--arms", "base", "value-skip"]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    results = json.loads((tmp_path / "runs" / "ablation.json").read_text())
    assert [each["arm"] for each in results] == ["base", "value-skip"]
    assert results[0]["bits_per_byte"] != results[1]["bits_per_byte"]
    assert all(0.5 < each["bits_per_byte"] < 8 for each in results)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("done before") == 2
    assert json.loads((tmp_path / "runs" / "ablation.json").read_text()) == results
