import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import setup, smallest_config, tiny_config

from hymo import tree
from hymo.checkpoint import (
    META,
    Damaged,
    Provenance,
    candidates,
    check_continues,
    find_latest,
    load_checkpoint,
    load_params,
    read_meta,
    save_checkpoint,
)
from hymo.config import derive_config
from hymo.model import model_spec
from hymo.step import TrainState

CONFIG = smallest_config()
PROVENANCE = Provenance(CONFIG, tokenizer="a" * 64, data="b" * 64)


def state_at(step: int, seed: int = 0) -> TrainState:
    """A state whose every leaf has values of its own."""
    state = setup(CONFIG).state(seed)
    generator = torch.Generator().manual_seed(step)

    def draw(leaf: torch.Tensor) -> torch.Tensor:
        return torch.randn(leaf.shape, generator=generator) if leaf.is_floating_point() else leaf

    drawn = tree.map(draw, state)
    return drawn._replace(step=torch.tensor(step), samples=torch.tensor(8 * step))


def save(folder: Path, step: int, **options: Any) -> Path:
    return save_checkpoint(folder, state_at(step), meta=PROVENANCE, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_loading_gives_back_every_leaf_bit_by_bit(tmp_path: Path) -> None:
    state = state_at(3)
    path = save_checkpoint(tmp_path, state, meta=PROVENANCE)
    blank = setup(CONFIG).state(seed=1)
    kept = tree.map(torch.clone, blank)
    loaded = load_checkpoint(path, blank)
    assert tree.paths(loaded).keys() == tree.paths(state).keys()
    for name, leaf in tree.paths(loaded).items():
        assert torch.equal(leaf, tree.paths(state)[name]), name
        assert leaf.dtype == tree.paths(state)[name].dtype, name
    for leaf, before in zip(tree.leaves(blank), tree.leaves(kept), strict=True):
        assert torch.equal(leaf, before)


def test_weights_load_without_moments(tmp_path: Path) -> None:
    params = load_params(save(tmp_path, 3), model_spec(CONFIG.model))
    for got, expected in zip(tree.leaves(params), tree.leaves(state_at(3).params), strict=True):
        assert torch.equal(got, expected)


def test_meta_tells_where_training_stood_and_what_it_was_made_with(tmp_path: Path) -> None:
    meta = read_meta(save(tmp_path, 3))
    assert (meta.step, meta.samples, meta.rows) == (3, 24, CONFIG.training.rows_per_rank)
    assert meta.provenance == PROVENANCE
    assert meta.versions["torch"] == torch.__version__


def test_the_newest_two_stay_and_latest_names_the_newest(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        assert find_latest(tmp_path) == (None if step == 2 else tmp_path / f"step_{step - 2:08d}")
        save(tmp_path, step)
    assert names(tmp_path) == ["latest", "step_00000004", "step_00000006"]
    assert (tmp_path / "latest").read_text() == "step_00000006\n"
    assert find_latest(tmp_path) == tmp_path / "step_00000006"


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 2)
    state = state_at(2)._replace(samples=torch.tensor(99))
    assert read_meta(save_checkpoint(tmp_path, state, meta=PROVENANCE)).samples == 99
    assert names(tmp_path) == ["latest", "step_00000002"]


def test_milestones_stay_and_so_do_as_many_as_were_asked_for(tmp_path: Path) -> None:
    for step in (2, 3, 4, 5, 6, 7):
        save(tmp_path, step, keep_last=1, keep_every=3)
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000006", "step_00000007"]


def test_a_replaced_one_goes_only_when_its_successor_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 2)
    before, rename, kept = (path / META).read_bytes(), Path.rename, []

    def watched(found: Path, target: Path) -> Path:
        if found.name == ".step_00000002.partial":
            kept.extend(each.read_bytes() for each in tmp_path.glob(f"*step_00000002.removed*/{META}"))
        return rename(found, target)

    monkeypatch.setattr(Path, "rename", watched)
    save(tmp_path, 2)
    assert kept == [before]
    assert names(tmp_path) == ["latest", "step_00000002"]


def test_what_a_run_was_set_back_from_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 2), save(tmp_path, 4)
    content = bytearray((bad / "__0_0.distcp").read_bytes())
    content[-1] ^= 0xFF
    (bad / "__0_0.distcp").write_bytes(content)
    newest = save(tmp_path, 3)
    assert names(tmp_path) == ["latest", good.name, newest.name]


def test_a_save_that_dies_leaves_the_last_one_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 2)

    rename = Path.rename

    def die(path: Path, target: Path) -> Path:
        if path.name == ".step_00000004.partial":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 4)
    assert names(tmp_path) == [".step_00000004.partial", "latest", "step_00000002"]
    assert find_latest(tmp_path) == good
    save(tmp_path, 4)
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000004"]


@pytest.mark.parametrize("damage", ["cut short", "lost", "no meta", "half a meta", "foreign format"])
def test_what_is_not_complete_does_not_count(tmp_path: Path, damage: str) -> None:
    good, bad = save(tmp_path, 2), save(tmp_path, 4)
    tensors, meta = bad / "__0_0.distcp", bad / META
    match damage:
        case "cut short":
            tensors.write_bytes(tensors.read_bytes()[:-1])
        case "lost":
            tensors.unlink()
        case "no meta":
            meta.unlink()
        case "half a meta":
            meta.write_text(meta.read_text()[:100])
        case "foreign format":
            meta.write_text(json.dumps({"format": 99}))
    assert find_latest(tmp_path) == good
    assert candidates(tmp_path) == [bad, good]
    with pytest.raises(Damaged, match=r"checkpoint .*step_00000004: "):
        load_checkpoint(bad, state_at(4))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"null",
        b"7",
        b'{"format": "1"}',
        b'{"format": 1}',
        b'{"format": 1, "files": {}}',
    ],
)
def test_a_meta_of_any_content_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    good, bad = save(tmp_path, 2), save(tmp_path, 4)
    (bad / META).write_bytes(content)
    assert find_latest(tmp_path) == good
    assert_refused(bad, META)


@pytest.mark.parametrize("value", [None, [], "text", 1.5, {}, {".metadata": "7"}])
def test_a_meta_whose_value_is_of_another_type_is_refused_in_one_line(tmp_path: Path, value: object) -> None:
    path = save(tmp_path, 2)
    record = json.loads((path / META).read_text())
    for key in record.keys() - {"versions"}:
        if type(value) is not type(record[key]) or key in ("files", "sha256"):
            (path / META).write_text(json.dumps({**record, key: value}))
            assert_refused(path, "sha256|bytes" if key == "sha256" else f"{META}|bytes")
        (path / META).write_text(json.dumps({name: each for name, each in record.items() if name != key}))
        assert_refused(path, META)


def test_a_config_that_does_not_fit_is_named_in_one_line(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    record = json.loads((path / META).read_text())
    record["config"] |= {"modle": {}, "training": {"seed": "x"}}
    (path / META).write_text(json.dumps(record))
    assert_refused(path, r"meta.json has a config that does not fit: .*modle.*; .*training.seed")


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_changed_byte_anywhere_is_refused_in_one_line(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, 2)
    content = (path / file).read_bytes()
    for position in (0, 1, len(content) // 3, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[position] ^= 0xFF
        (path / file).write_bytes(changed)
        for load in (lambda: load_checkpoint(path, state_at(2)), lambda: load_params(path, model_spec(CONFIG.model))):
            with pytest.raises(
                ValueError, match=rf"^checkpoint .*{file} is damaged, its sha256 .*; move that folder away"
            ):
                load()


def assert_refused(path: Path, named: str) -> None:
    """Neither its meta nor its state is read; one line says why."""

    def read_all() -> None:
        read_meta(path)
        load_checkpoint(path, state_at(2))

    with pytest.raises(ValueError, match=rf"^checkpoint .*{path.name}: .*({named})") as refused:
        read_all()
    assert "\n" not in str(refused.value)
    assert "Error:" not in str(refused.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"step_00000002\0", b"../step_00000002", b"/", b"step_00000099"])
def test_a_latest_that_says_nothing_is_passed_over(tmp_path: Path, content: bytes) -> None:
    newest = [save(tmp_path, step) for step in (2, 4)][-1]
    (tmp_path / "latest").write_bytes(content)
    assert find_latest(tmp_path) == newest


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 2), save(tmp_path, 3)
    (bad / META).write_text("[]")
    newest = save(tmp_path, 4)
    assert names(tmp_path) == ["latest", good.name, bad.name, newest.name]
    shutil.rmtree(newest)
    assert find_latest(tmp_path) == good


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The disk fails a file that grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 5, 20_000])
def test_a_failing_disk_is_an_os_error_and_leaves_what_there_was(tmp_path: Path, size: int) -> None:
    good = save(tmp_path, 2)
    with files_of_at_most(size), pytest.raises(OSError, match="File too large") as failure:
        save(tmp_path, 4)
    assert "\n" not in str(failure.value)
    assert names(tmp_path) == ["latest", good.name]
    assert find_latest(tmp_path) == good


def test_an_interrupt_of_the_storage_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    assert find_latest(tmp_path) is None


def test_latest_may_point_into_nothing(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 2), save(tmp_path, 4)
    shutil.rmtree(bad)
    assert find_latest(tmp_path) == good
    assert find_latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("part", ["params", "optimizer"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_and_named(tmp_path: Path, part: str, value: float) -> None:
    good = save(tmp_path, 2)
    state = state_at(4)
    name, leaf = next((n, x) for n, x in tree.paths(state).items() if n.startswith(part) and x.numel() > 1)
    leaf.view(-1)[-1] = value
    with pytest.raises(ValueError, match=f"checkpoint of step 4: {name} is not finite"):
        save_checkpoint(tmp_path, state, meta=PROVENANCE)
    assert names(tmp_path) == ["latest", good.name]


def test_the_first_leaf_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    wider = setup(derive_config(CONFIG, model={"q_lora_rank": 24})).state()
    with pytest.raises(ValueError, match=r"params\.blocks\.0\.mixer\.\w+ has shape \[.*\], the configuration asks for"):
        load_checkpoint(path, wider)
    deeper = setup(derive_config(CONFIG, model={"n_layers": 3})).state()
    with pytest.raises(ValueError, match=r"params\.blocks\.2\.\w+ is missing"):
        load_checkpoint(path, deeper)
    shallower = setup(derive_config(CONFIG, model={"n_layers": 1})).state()
    with pytest.raises(ValueError, match=r"params\.blocks\.1\.\S+ is unknown"):
        load_checkpoint(path, shallower)
    halved = tree.map(lambda leaf: leaf.half() if leaf.is_floating_point() else leaf, state_at(2))
    with pytest.raises(ValueError, match=r"is torch\.float32, expected torch\.float16"):
        load_checkpoint(path, halved)
    with pytest.raises(ValueError, match=r"params\.blocks\.1\.\S+ is unknown"):
        load_params(path, model_spec(derive_config(CONFIG, model={"n_layers": 1}).model))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"logit_softcap": 30.0}}, r"made with model.logit_softcap 15.0, this run has 30.0"),
        ({"optimizer": {"muon_lr": 0.01}}, r"made with optimizer.muon_lr 0.02, this run has 0.01"),
        ({"training": {"seed": 7}}, r"made with training.seed 42, this run has 7"),
    ],
)
def test_another_configuration_does_not_continue(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_continues(save(tmp_path, 2), PROVENANCE._replace(config=derive_config(CONFIG, **change)))


@pytest.mark.parametrize("field", ["tokenizer", "data"])
def test_another_fingerprint_does_not_continue(tmp_path: Path, field: str) -> None:
    with pytest.raises(ValueError, match=f"made with {field} {'[ab]' * 64}, this run has {'c' * 64}"):
        check_continues(save(tmp_path, 2), PROVENANCE._replace(**{field: "c" * 64}))


def test_batches_intervals_and_length_may_change(tmp_path: Path) -> None:
    longer = derive_config(
        CONFIG,
        training={"micro_batch_size": 1, "gradient_accumulation_steps": 4, "log_interval": 3},
        scheduler={"total_steps": 7},
        run={"name": "another"},
    )
    assert check_continues(save(tmp_path, 2), PROVENANCE._replace(config=longer)).step == 2


def test_every_default_survives_the_meta(tmp_path: Path) -> None:
    config = tiny_config(training={"grad_clip": float("inf")})
    path = save_checkpoint(tmp_path, state_at(1), meta=PROVENANCE._replace(config=config))
    assert read_meta(path).provenance.config == config
