"""Ablations: arms of equal size, the same seeds for all, and a table that says how sure it is."""

import json
import os
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
CONFIGS = [RECIPES / "configs" / f"{name}.yaml" for name in ("tiny", "hymo_100m", "hymo_750m")]


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_arm_is_a_model_of_the_base_size(path: Path, name: str) -> None:
    base = load_config(path, [])
    config = variant(base, name)
    assert (config == base) == (name == "base")
    least = 0.75 if name == "no-mtp" else 0.98
    assert least < active(config) / active(base) < 1.02


def test_an_arm_has_all_its_runs_together_and_arms_share_their_seeds() -> None:
    base = load_config(CONFIGS[0], ["run.output_dir=there", "training.seed=7"])
    configs, folder = plan(base, ["base", "delta"], seeds=2)
    assert list(configs) == [("base", 7), ("base", 8), ("delta", 7), ("delta", 8)]
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


def test_no_jobs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate.main(["--jobs", "0", "run.output_dir=there"]) == 2
    assert capsys.readouterr().err == "ablate: --jobs: expected at least 1, got 0\n"


def test_keys_behind_the_arms_are_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate.main(["--arms", "base", "delta", "model.breadth=1"]) == 2
    assert "model.breadth" in (said := capsys.readouterr().err)
    assert "--arms" not in said


def test_an_ablation_needs_a_folder() -> None:
    with pytest.raises(ValueError, match=r"run\.output_dir: expected the folder of the ablation, got null"):
        plan(load_config(CONFIGS[0], []), ["base"], seeds=1)


def test_the_table_compares_seed_by_seed() -> None:
    base = load_config(CONFIGS[0], [])
    scores = {("base", 0): 2.0, ("base", 1): 3.0, ("delta", 0): 2.1, ("delta", 1): 3.1}
    found = {key: Result(score, {"docs": score}, 100.0) for key, score in scores.items()}
    lines = list(table(found, {arm: variant(base, arm) for arm in ("base", "delta")}))
    assert lines[2].split()[:2] == ["base", "2"]
    assert "2.5000 ± 0.7071" in lines[2]
    # The seeds differ by 1 and the arms by 0.1 on each: the difference has no spread.
    assert "2.6000 ± 0.7071" in lines[3]
    assert "+0.1000 ± 0.0000" in lines[3]
    assert [line.split()[0] for line in lines[6:]] == ["base", "delta"]
    assert lines[7].endswith("2.6000 ± 0.7071")


def test_the_table_of_an_ablation_under_way_has_what_is_known() -> None:
    base = load_config(CONFIGS[0], [])
    configs = {arm: variant(base, arm) for arm in ("base", "delta", "value-skip")}
    found = {("base", 0): Result(2.0, {"docs": 1.5}, None), ("delta", 1): Result(2.5, {"docs": 1.25}, 100.0)}
    first, second, third = list(table(found, configs))[2:5]
    assert first.split()[-3:] == ["2.0000", "+0.0000", "-"]
    # Another seed than the base's is compared with nothing.
    assert second.split()[-3:] == ["2.5000", "-", "100"]
    assert third.split()[-3:] == ["-", "-", "-"]
    assert "docs" not in "".join(table({}, configs))


@pytest.mark.heavy
def test_an_ablation_trains_every_arm_once_and_only_once(tmp_path: Path) -> None:
    config = run_config(prepare(tmp_path / "data"), run={"output_dir": str(tmp_path / "runs")})
    (tmp_path / "base.yaml").write_text(to_yaml(config))
    command = [sys.executable, str(RECIPES / "ablate.py"), str(tmp_path / "base.yaml"), "--seeds", "2"]
    command += ["--arms", "base", "value-skip", "--jobs", "2"]
    # One run of the second arm cannot begin: a file is in its place.
    in_the_way = tmp_path / "runs" / f"value-skip-{config.training.seed}"
    in_the_way.parent.mkdir()
    in_the_way.touch()
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 1, first.stderr
    assert first.stderr == f"ablate: value-skip: {in_the_way.name} not done; its process ended with code 2\n"
    log = (tmp_path / "runs" / "value-skip.log").read_text()
    assert f"got {in_the_way}, which is a file" in log
    results = json.loads((tmp_path / "runs" / "ablation.json").read_text())
    begun = config.training.seed
    assert [(each["arm"], each["seed"]) for each in results] == [
        ("base", begun),
        ("base", begun + 1),
        ("value-skip", begun + 1),
    ]
    assert len({each["bits_per_byte"] for each in results}) == 3
    assert all(0.5 < each["bits_per_byte"] < 8 for each in results)

    in_the_way.unlink()
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("done before") == 3
    assert (tmp_path / "runs" / "ablation.txt").read_text() in second.stdout
    whole = json.loads((tmp_path / "runs" / "ablation.json").read_text())
    assert [whole[i] for i in (0, 1, 3)] == results

    # Alone in its process, a run comes to the same.
    apart = derive_config(config, run={"output_dir": str(tmp_path / "apart")}, training={"seed": begun + 1})
    (tmp_path / "apart.yaml").write_text(to_yaml(apart))
    alone = subprocess.run(
        [sys.executable, str(RECIPES / "pretrain.py"), str(tmp_path / "apart.yaml")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert alone.returncode == 0, alone.stderr
    assert ablate.read(tmp_path / "apart").bits_per_byte == results[1]["bits_per_byte"]
