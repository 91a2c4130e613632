"""Files: `smp.save`, `smp.load`, `smp.save_checkpoint`, `smp.resume_from_checkpoint`."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs import BY_HAND, train_step
from ranks import RankError, finish, run_ranks, start_program

TENSOR = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
ALONE = {"pipeline_parallel_degree": 1, "microbatches": 2}


class Tied(nn.Module):
    """A small language model whose last layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(12, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.body(self.table(ids))
        return self.head(self.norm(hidden))


def place(model: Tied) -> Tied:
    """Put the body on the last partition."""
    import smdistributed.modelparallel.torch as smp

    smp.set_partition(model.body, smp.pp_size() - 1)
    return model


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 12, (2, 8), generator=torch.Generator().manual_seed(number))
    return ids[0], ids[1]


def start(config: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[Any, Any, Any, Any]:
    """Start smp.

    Return model, optimizer, scheduler and a function that trains one step and returns its loss.
    """
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        module = Tied().to(dtype)
    model = smp.DistributedModel(place(module))
    optimizer: Any = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.05),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**6, "scale_window": 2},
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    forward = train_step(
        lambda model, ids, labels: nn.functional.cross_entropy(model(ids).float(), labels)
    )

    def train(number: int) -> float:
        optimizer.zero_grad()
        loss = forward(model, *batch(number + smp.rdp_rank() * 100)).reduce_mean()
        optimizer.clip_master_grads(1.0)
        optimizer.step()
        scheduler.step()
        return float(loss)

    return model, optimizer, scheduler, train


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- One object -----------------------------------------------------------------------------------


def _names(path: str, tensor: bool) -> None:
    import smdistributed.modelparallel.torch as smp

    config = {"tensor_parallel_degree": 2, "ddp": True} if tensor else {**BY_HAND, "ddp": True}
    smp.init(config)
    me = [smp.pp_rank(), smp.tp_rank(), smp.rdp_rank()]
    smp.save(me, f"{path}/plain", partial=True)
    smp.save(me, f"{path}/v3", v3=True)
    if smp.rank() == 0:
        smp.save({"who": Path("object")}, f"{path}/full", partial=False)
    smp.barrier()
    assert smp.load(f"{path}/plain")[:2] == me[:2]
    assert smp.load(f"{path}/v3") == me
    assert smp.load(f"{path}/v3", map_location="cpu", partial=True) == me
    assert smp.load(f"{path}/full", partial=False) == {"who": Path("object")}
    with pytest.raises(FileNotFoundError, match="A full file needs partial=False"):
        smp.load(f"{path}/full")
    with pytest.raises(FileNotFoundError, match="Check the path"):
        smp.load(f"{path}/none")
    with pytest.raises(TypeError, match="must be a string"):
        smp.save(me, Path(path))  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        smp.load(f"{path}/full", partial=False, weights_only=True)


def test_names_of_partial_files(tmp_path: Path) -> None:
    run_ranks(2, _names, str(tmp_path), False)
    assert files(tmp_path) == ["full", "plain_0", "plain_1", "v3_0_0_0", "v3_1_0_0"]


def test_names_with_tensor_parallelism(tmp_path: Path) -> None:
    run_ranks(2, _names, str(tmp_path), True)
    assert files(tmp_path) == ["full", "plain_0_0", "plain_0_1", "v3_0_0_0", "v3_0_1_0"]


# --- Resuming -------------------------------------------------------------------------------------


def _save(path: str, config: dict[str, Any], dtype: torch.dtype) -> tuple[list[float], list[str]]:
    import smdistributed.modelparallel.torch as smp

    model, optimizer, scheduler, train = start(config, dtype)
    for number in range(3):
        train(number)
    content = {"scheduler": scheduler.state_dict(), "where": Path("somewhere")}
    smp.save_checkpoint(
        path, tag="steps3", partial=True, model=model, optimizer=optimizer, user_content=content
    )
    smp.save_checkpoint(path, tag="whole.pt", partial=False, model=model, user_content={"steps": 3})
    # Again.
    smp.save_checkpoint(path, tag="steps3", model=model, optimizer=optimizer, user_content=content)
    owner = [str(value) for value in model.owner.items()]
    return [train(number) for number in range(3, 7)], owner


def _resume(path: str, config: dict[str, Any], dtype: torch.dtype) -> tuple[list[float], list[str]]:
    import smdistributed.modelparallel.torch as smp

    model, optimizer, scheduler, train = start(config, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.3)
    content = smp.resume_from_checkpoint(path, partial=True)
    assert content["where"] == Path("somewhere")
    scheduler.load_state_dict(content["scheduler"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**3)
    losses = [train(number) for number in range(3, 7)]
    return losses, [str(value) for value in model.owner.items()]


@pytest.mark.parametrize(
    ("ranks", "config", "dtype", "more"),
    [
        pytest.param(2, BY_HAND, torch.float64, [], marks=pytest.mark.core),
        (2, TENSOR, torch.float32, []),
        (
            2,
            {**BY_HAND, "fp16": True},
            torch.float16,
            ["fp16_states_0_0_0.pt", "fp16_states_1_0_0.pt"],
        ),
        (
            4,
            {**BY_HAND, "ddp": True, "bf16": True, "shard_optimizer_state": True},
            torch.bfloat16,
            [
                f"{name}_{pp}_0_{rdp}.pt"
                for name in ("fp16_states", "optimizer")
                for pp in (0, 1)
                for rdp in (0, 1)
            ],
        ),
    ],
    ids=["pipeline", "tensor", "fp16", "bf16-sharded"],
)
def test_resumed_training_is_bitwise_the_same(
    ranks: int, config: dict[str, Any], dtype: torch.dtype, more: list[str], tmp_path: Path
) -> None:
    saved = run_ranks(ranks, _save, str(tmp_path), {**config, "auto_partition": True}, dtype)
    second = "0_1_0" if config is TENSOR else "1_0_0"
    parts = {
        *(f"{name}_{info}.pt" for name in ("model", "optimizer") for info in ("0_0_0", second)),
        *more,
    }
    parts |= {"partition.pt", "user_content.pt"}
    assert files(tmp_path) == sorted(
        [
            "newest",
            "user_content_whole.pt",
            "whole.pt",
            *(f"steps3_partial/{part}" for part in parts),
        ]
    )
    assert (tmp_path / "newest").read_text() == "steps3"
    # No class of the library is in a file: its modules may move.
    assert not [
        path.name for path in tmp_path.rglob("*.pt") if b"smdistributed" in path.read_bytes()
    ]
    # Another way to place modules by hand is given: the checkpoint brings its own partition.
    assert run_ranks(ranks, _resume, str(tmp_path), config, dtype) == saved
    # A program without smp reads the full one.
    plain = Tied().to(dtype)
    plain.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
    if ranks == 4:  # fewer replicas: all shards are read
        run_ranks(2, _resume_shards, str(tmp_path), config, dtype)


def _resume_shards(path: str, config: dict[str, Any], dtype: torch.dtype) -> None:
    import smdistributed.modelparallel.torch as smp

    _, optimizer, _, train = start({**config, "shard_optimizer_state": False}, dtype)
    smp.resume_from_checkpoint(path, tag="steps3", load_sharded_optimizer_state=False)
    train(3)  # the master weights only
    assert all(float(parameter_state["step"]) == 1 for parameter_state in optimizer.state.values())
    smp.resume_from_checkpoint(path, tag="steps3")
    train(3)
    assert all(float(parameter_state["step"]) == 4 for parameter_state in optimizer.state.values())
    assert set(optimizer.state_dict()["state"]) == set(range(7))


def _full(path: str, config: dict[str, Any]) -> list[float]:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.exceptions import SMPRuntimeError

    _, optimizer, _, train = start(config)
    if smp.pp_size() != 2:
        with pytest.raises(
            SMPRuntimeError,
            match=r"pipeline_parallel_degree 2, and this job has \d. .*partial=False",
        ):
            smp.resume_from_checkpoint(path, "steps3", partial=True)
    assert smp.resume_from_checkpoint(path, "whole.pt", partial=False) == {"steps": 3}
    assert not optimizer.state
    losses = [train(number) for number in range(3, 5)]
    for missing, partial in (("none", True), ("none", False)):
        with pytest.raises(FileNotFoundError, match="cannot resume"):
            smp.resume_from_checkpoint(path, missing, partial=partial)
    return losses


def test_another_pipeline_degree_needs_a_full_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path), BY_HAND, torch.float64)
    alone = run_ranks(1, _full, str(tmp_path), ALONE)
    for losses in run_ranks(3, _full, str(tmp_path), {**BY_HAND, "pipeline_parallel_degree": 3}):
        assert losses == pytest.approx(alone[0], abs=1e-12)


# --- Hugging Face ---------------------------------------------------------------------------------


def _like_the_trainer(path: str) -> list[float]:
    import smdistributed.modelparallel.torch as smp

    model, optimizer, _, train = start(BY_HAND)
    for number in range(2):
        train(number)
    part = optimizer.local_state_dict(gather_if_shard=False)
    smp.barrier()
    if smp.rdp_rank() == 0:
        smp.save(part, f"{path}/optimizer.pt", partial=True, v3=False)
    full_state = model.state_dict()
    if smp.rank() == 0:
        from safetensors.torch import save_file

        del full_state["head.weight"]  # tied: the Trainer writes it once
        save_file(full_state, f"{path}/model.safetensors")
        Path(f"{path}/user_content.pt").touch()
    smp.barrier()
    return [train(number) for number in range(2, 4)]


def _trainer_resumes(path: str) -> list[float]:
    import smdistributed.modelparallel.torch as smp

    model, _, scheduler, train = start(BY_HAND)
    smp.resume_from_checkpoint(path, tag="pytorch_model.bin", partial=False, load_optimizer=False)
    assert len(list(Path(path).glob("optimizer.pt_*"))) == 2
    for _ in range(2):
        scheduler.step()

    def load(module: Any, opt: Any) -> None:
        assert module is model
        opt.load_state_dict(smp.load(f"{path}/optimizer.pt", partial=True))

    model.register_post_step_hook(load)
    losses = [train(2)]
    losses.append(train(3))
    return losses


def test_the_trainers_files(tmp_path: Path) -> None:
    saved = run_ranks(2, _like_the_trainer, str(tmp_path))
    resumed = run_ranks(2, _trainer_resumes, str(tmp_path))
    assert resumed[0] == pytest.approx(saved[0], abs=1e-12)


def _translated(path: str) -> None:
    import smdistributed.modelparallel.torch as smp

    model, _, _, train = start(BY_HAND)
    smp.state.module_manager.translate_functions.append(
        (
            lambda sd: {f"hf.{name}": value for name, value in sd.items()},
            lambda sd: {name.removeprefix("hf."): value for name, value in sd.items()},
        )
    )
    train(0)
    smp.save_checkpoint(path, "hf.pt", partial=False, model=model)
    smp.save_checkpoint(path, "own.pt", partial=False, model=model, translate_if_full=False)
    before = model.state_dict()
    train(1)
    for tag in ("hf.pt", "own.pt"):
        assert smp.resume_from_checkpoint(path, tag, partial=False) is None
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        train(1)
    calls = []

    def translate(entries: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(entries))
        return entries

    smp.resume_from_checkpoint(path, "own.pt", partial=False, translate_function=translate)
    assert calls == [len(before)]


def test_names_are_translated(tmp_path: Path) -> None:
    run_ranks(2, _translated, str(tmp_path))
    assert all(name.startswith("hf.") for name in torch.load(tmp_path / "hf.pt"))
    Tied().double().load_state_dict(torch.load(tmp_path / "own.pt"))


# --- Possible faults ------------------------------------------------------------------------------


def _kept_last(path: str) -> None:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.exceptions import SMPRuntimeError

    model, optimizer, _, train = start(BY_HAND)
    for number in range(5):
        train(number)
        smp.save_checkpoint(
            path, f"t{number}", model=model, optimizer=optimizer, num_kept_partial_checkpoints=2
        )
    with pytest.raises(ValueError, match="at least 1"):
        smp.save_checkpoint(path, "t9", model=model, num_kept_partial_checkpoints=0)
    with pytest.raises(SMPRuntimeError, match="the tag must be the same on all ranks"):
        smp.save_checkpoint(path, f"rank{smp.rank()}", model=model)
    # One rank cannot write: all ranks hear of it, and the checkpoint before stays the newest.
    content = (lambda: None) if smp.rank() == 0 else 1
    with pytest.raises(SMPRuntimeError, match=r"save_checkpoint failed: rank 0: .*lambda"):
        smp.save_checkpoint(path, "t5", model=model, user_content=content)
    assert Path(path, "newest").read_text() == "t4"
    train(6)


def test_the_newest_are_kept_and_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    run_ranks(2, _kept_last, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "newest",
        "t3_partial",
        "t4_partial",
    ]


class Bomb:
    """Kills its process when pickled: in the middle of a file."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def killed(path: str, where: str) -> None:
    """Save twice; the second time a rank dies."""
    import smdistributed.modelparallel.torch as smp

    model, optimizer, scheduler, train = start(BY_HAND)
    for number in range(2):
        train(number)
    smp.save_checkpoint(
        path, "good", model=model, optimizer=optimizer, user_content=scheduler.state_dict()
    )
    print([train(number) for number in range(2, 4)], flush=True)
    if where == "optimizer" and smp.rank() == 1:
        next(iter(optimizer.state.values()))["bomb"] = Bomb()
    content = Bomb() if where == "content" and smp.rank() == 0 else None
    tag = "good" if where == "content" else "next"
    smp.save_checkpoint(path, tag, model=model, optimizer=optimizer, user_content=content)


def _after_the_kill(path: str) -> list[float]:
    import smdistributed.modelparallel.torch as smp

    model, optimizer, scheduler, train = start(BY_HAND)
    scheduler.load_state_dict(smp.resume_from_checkpoint(path))
    losses = [train(number) for number in range(2, 4)]
    smp.save_checkpoint(path, "later", model=model, optimizer=optimizer)
    return losses


@pytest.mark.parametrize(("where", "victim"), [("optimizer", 1), ("content", 0)])
def test_a_killed_save_leaves_the_one_before(where: str, victim: int, tmp_path: Path) -> None:
    tests_folder = Path(__file__).parent
    text = (
        f"import sys; sys.path.insert(0, {str(tests_folder)!r}); import test_checkpoint as t;"
        " t.killed(*sys.argv[1:])"
    )
    variables = {"PYTHONPATH": f"{tests_folder.parent}:{os.environ.get('PYTHONPATH', '')}"}
    folder = tmp_path / "checkpoints"
    ends = finish(start_program(2, ["-c", text, str(folder), where], variables=variables))
    assert ends[victim].status == -signal.SIGKILL, ends
    assert all(end.status != 0 for end in ends)
    assert (folder / "newest").read_text() == "good"
    assert any(".saving-" in name for name in files(folder))  # it was killed in the middle
    resumed = run_ranks(2, _after_the_kill, str(folder))
    assert str(resumed[0]) == ends[0].out.splitlines()[-1]
    assert sorted(path.name for path in folder.iterdir()) == [
        "good_partial",
        "later_partial",
        "newest",
    ]


def test_a_job_killed_between_the_two_renames_is_found(tmp_path: Path) -> None:
    saved = run_ranks(2, _save, str(tmp_path), BY_HAND, torch.float64)
    # The folders that a kill leaves after the old folder of the same tag was moved away, and before
    # the new one has its name.
    shutil.copytree(tmp_path / "steps3_partial", tmp_path / "steps3_partial.saving-0")
    (tmp_path / "steps3_partial").rename(tmp_path / "steps3_partial.old-0")
    assert run_ranks(2, _resume, str(tmp_path), BY_HAND, torch.float64) == saved


def _incomplete(path: str) -> None:
    import smdistributed.modelparallel.torch as smp

    start(BY_HAND)
    smp.resume_from_checkpoint(path)


def test_an_incomplete_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "t_partial").mkdir()
    (tmp_path / "newest").write_text("t\n")
    with pytest.raises(
        RankError, match=r"partition.pt is missing or empty. The checkpoint is not complete"
    ):
        run_ranks(2, _incomplete, str(tmp_path))
    (tmp_path / "newest").unlink()
    with pytest.raises(RankError, match=r"newest is missing\. Give a tag"):
        run_ranks(2, _incomplete, str(tmp_path))


def test_a_tag_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    """The folder that a killed save has moved away is found for every tag."""
    (tmp_path / "step[3]_partial.old-0").mkdir()
    (tmp_path / "newest").write_text("step[3]\n")
    with pytest.raises(RankError, match=r"step\[3\]_partial\.old-0/partition\.pt is missing"):
        run_ranks(2, _incomplete, str(tmp_path))
