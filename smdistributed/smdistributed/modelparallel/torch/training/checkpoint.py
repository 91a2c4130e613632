"""Save and load files: `smp.save`, `smp.load`, `smp.save_checkpoint`, `smp.resume_from_checkpoint`.

A file gets its name only when it is complete. So an interrupted save leaves the last checkpoint
usable.

Loading runs ``pickle`` (``weights_only=False``), because a checkpoint holds objects of the script.
Load only files that you trust.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import pickle
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from smdistributed.modelparallel.torch.exceptions import PeerError, SMPRuntimeError, summary
from smdistributed.modelparallel.torch.job.collective_calls import calls
from smdistributed.modelparallel.torch.job.communication import allgather
from smdistributed.modelparallel.torch.job.ranks import (
    pp_rank,
    rank,
    rdp_rank,
    rdp_size,
    tp_rank,
    tp_size,
)
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.job.topology import CommGroup
from smdistributed.modelparallel.torch.job.wrapped import wrapped
from smdistributed.modelparallel.torch.sharding import mesh

from .optimizer import PRECISION, after_partition, merge_parts

_LOG = logging.getLogger("smp")
_SAVING = ".saving-"  # a folder that is being written
_OLD = ".old-"  # a complete folder that is being replaced by one of the same tag
_PARTITION = "partition.pt"
_USER = "user_content.pt"
_NEWEST = "newest"
_HF_FILE = "model.safetensors"

# --- One object -----------------------------------------------------------------------------------


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Save an object. Each rank that calls this function writes a file.

    A file that exists is replaced; after an error it stays.

    Args:
        obj: The object, for example ``{"model": model.local_state_dict()}``.
        f: Path of the file. A partial file has the rank added: ``f_PP``, with tensor parallelism
            ``f_PP_TP``. For example ``model.pt`` becomes ``model.pt_0``.
        partial: Add the rank. With False the name is ``f``, and only one rank may call this.
        pickle_module: Passed to ``torch.save``.
        pickle_protocol: Passed to ``torch.save``.
        v3: Name a partial file ``f_PP_TP_RDP``, so that replicas do not write the same file.

    Raises:
        TypeError: ``f`` is not a string.
        OSError: The file cannot be written.
        Exception: The object cannot be pickled.
    """
    name = _check_text(f)
    if partial:
        name += _suffixes(v3)[0]
    _write_file(Path(name), obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = pickle,
    partial: bool = True,
    **pickle_load_args: Any,
) -> Any:
    """Load an object that ``save`` wrote.

    Args:
        f: The same path as for ``save``.
        map_location: Passed to ``torch.load``.
        pickle_module: Passed to ``torch.load``.
        partial: Load this rank's file. All three documented names are tried.
        pickle_load_args: Passed to ``torch.load``. The default of ``weights_only`` is False.

    Returns:
        The object.

    Raises:
        TypeError: ``f`` is not a string.
        FileNotFoundError: No file has one of the names.
        Exception: The file cannot be read or unpickled.
    """
    names = [_check_text(f)]
    if partial:
        names = [f + suffix for suffix in _suffixes()]
    existing = [name for name in names if Path(name).exists()]
    if not existing:
        advice = "Check the path."
        if partial and Path(f).exists():
            advice = "A full file needs partial=False."
        raise FileNotFoundError(f"cannot load {f}: not found: {', '.join(names)}. {advice}")
    name = existing[0]
    pickle_load_args.setdefault("weights_only", False)
    if not pickle_load_args["weights_only"]:
        pickle_load_args["pickle_module"] = pickle_module
    return torch.load(name, map_location=map_location, **pickle_load_args)


def _suffixes(v3: bool = False) -> list[str]:
    """Return the suffixes of a partial file's name on this rank, such as ``_0_1``.

    The first one is for writing, all are tried for reading.

    Args:
        v3: Whether the file is named by all three ranks.
    """
    pp, tp, rdp = _coordinates()
    short, medium, long = f"_{pp}", f"_{pp}_{tp}", f"_{pp}_{tp}_{rdp}"
    if v3 or mesh.degree() > 1:  # replicas have different parts, and must not write the same file
        return [long, medium, short]
    if tp_size() == 1:
        return [short, medium, long]
    return [medium, short, long]


def _coordinates() -> tuple[int, int, int]:
    """Return this rank's pipeline, tensor and reduced-data-parallel rank."""
    return pp_rank(), tp_rank(), rdp_rank()


def _check_text(f: Any) -> str:
    """Return a path that is a string.

    Raises:
        TypeError: It is no string.
    """
    if not isinstance(f, str):
        raise TypeError(
            f"the path must be a string, because the rank is added to it, got {type(f).__name__}"
        )
    return f


# --- Checkpoints ----------------------------------------------------------------------------------


@calls.part_of("smp.save_checkpoint()")
def save_checkpoint(
    path: str,
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Save a checkpoint. All ranks call it with the same arguments.

    A partial checkpoint is the folder ``path/TAG_partial``. It has one file for each rank,
    ``model_RANKINFO.pt``, ``optimizer_RANKINFO.pt``, and with fp16 or bf16
    ``fp16_states_RANKINFO.pt``, where RANKINFO is ``PP_TP_RDP``, with ``user_content.pt`` and
    ``partition.pt``. A full checkpoint is the file ``path/TAG``, which a program without smp can
    load, and ``path/user_content_TAG``. ``path/newest`` holds the tag.

    Collective over the job. An earlier checkpoint of the tag is replaced. Remains of killed saves
    are deleted.

    Args:
        path: Folder of all checkpoints. It is created.
        tag: Name of this checkpoint.
        partial: Write a partial checkpoint; else a full one, which has no optimizer.
        model: The ``smp.DistributedModel``.
        optimizer: The ``smp.DistributedOptimizer``.
        user_content: Any object that can be pickled.
        translate_if_full: Give a full checkpoint the names of the Hugging Face model, where a
            translation is known.
        num_kept_partial_checkpoints: Number of partial checkpoints that are kept, the newest ones;
            None: all.

    Raises:
        ValueError: ``num_kept_partial_checkpoints`` is below 1.
        SMPRuntimeError: This rank cannot write, or ranks have different tags. Earlier checkpoints
            are untouched.
        PeerError: Another rank cannot write.
        StepError: Ranks have not called it in time.
    """
    tag = str(tag)
    if num_kept_partial_checkpoints is not None and num_kept_partial_checkpoints < 1:
        raise ValueError(
            f"num_kept_partial_checkpoints must be at least 1, got {num_kept_partial_checkpoints}"
        )
    token, tags = zip(*allgather((uuid.uuid4().hex[:8], tag), CommGroup.WORLD), strict=True)
    if len(set(tags)) > 1:
        raise SMPRuntimeError(
            f"save_checkpoint: the tag must be the same on all ranks, got {sorted(set(tags))}"
        )
    root = Path(path)
    if not partial:
        _save_full(root, tag, model, user_content, translate_if_full)
        return
    # The folder gets a name that no other save has, and which all ranks know.
    checkpoint = _PartialCheckpoint(root, tag, token[0], user_content)
    _save_partial(checkpoint, model, optimizer, num_kept_partial_checkpoints)


@calls.part_of("smp.resume_from_checkpoint()")
def resume_from_checkpoint(
    path: str,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Any:
    """Load a checkpoint into the model and the optimizer. All ranks call this function.

    Before the model is partitioned, the files are read, and the state is loaded right after the
    partition. A partial checkpoint sets the partition, which cannot change then. A full checkpoint
    can be loaded into any number of partitions, and does not change the optimizer.

    The first wrapped optimizer is the one that is loaded. Before the partition its options, such as
    the learning rate, are loaded at once.

    Args:
        path: Folder of all checkpoints.
        tag: Name of the checkpoint; None for the newest.
        partial: Read a partial checkpoint; else a full one.
        strict: Refuse missing and unknown names.
        load_optimizer: Also load the optimizer of a partial checkpoint.
        load_sharded_optimizer_state: With False only the master weights and the loss scale of the
            optimizer are loaded.
        translate_function: Translates the names of a full checkpoint; None: the known translation
            is used.

    Returns:
        The ``user_content`` that was saved, or None.

    Raises:
        FileNotFoundError: The checkpoint is missing.
        SMPRuntimeError: No model is wrapped yet, a partial checkpoint has other degrees, or a value
            has another shape.
        RuntimeError: Names or shapes of the model differ, with ``strict`` (torch's own error).
        Exception: A file cannot be read or unpickled, or ``translate_function`` failed.
    """
    model = wrapped.model
    if model is None:
        raise SMPRuntimeError("call smp.DistributedModel before smp.resume_from_checkpoint")
    root = Path(path)
    if tag is None:
        if not (root / _NEWEST).exists():
            raise FileNotFoundError(
                f"cannot resume: {root / _NEWEST} is missing. Give a tag, or check the path."
            )
        tag = (root / _NEWEST).read_text().strip()
    tag = str(tag)
    if not partial:
        return _resume_full(model, root, tag, strict, translate_function)
    optimizer = None
    if load_optimizer and wrapped.optimizers:
        optimizer = wrapped.optimizers[0]
    folder = _partial_folder(root, tag)
    return _resume_partial(folder, model, optimizer, strict, load_sharded_optimizer_state)


# --- Partial --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PartialCheckpoint:
    """A partial checkpoint that is being saved.

    Attributes:
        root: Folder of all checkpoints.
        tag: Name of the checkpoint.
        token: Random text that names the temporary folder, equal on all ranks.
        user_content: The script's own object.
    """

    root: Path
    tag: str
    token: str
    user_content: Any

    @property
    def temporary(self) -> Path:
        """The folder that the ranks write to."""
        return self.root / f"{self.tag}_partial{_SAVING}{self.token}"

    @property
    def final(self) -> Path:
        """The folder of the complete checkpoint."""
        return self.root / f"{self.tag}_partial"


def _save_partial(
    checkpoint: _PartialCheckpoint, model: Any, optimizer: Any, kept: int | None
) -> None:
    """Write a partial checkpoint; each rank its own files, one rank the common files.

    Collective over the job. The folder of an earlier checkpoint with the tag is replaced.

    Args:
        checkpoint: The folders.
        model: The model, or None.
        optimizer: The optimizer, or None.
        kept: Number of partial checkpoints that are kept; None: all.

    Raises:
        SMPRuntimeError: This rank cannot write. The temporary folder is deleted.
        PeerError: Another rank cannot write. The temporary folder is deleted.
    """
    writes_common_files = _is_lowest_rank_of_folder(checkpoint.root, checkpoint.token)

    def write() -> None:
        _write_files_of_rank(checkpoint.temporary, model, optimizer)

    def complete() -> None:
        if writes_common_files:
            _complete_partial(checkpoint, kept)

    try:
        _run_on_all_ranks("save_checkpoint", write)
        # Only now the folder gets its name: all ranks have written their files.
        _run_on_all_ranks("save_checkpoint", complete)
    except SMPRuntimeError:
        shutil.rmtree(checkpoint.temporary, ignore_errors=True)
        raise


def _write_files_of_rank(folder: Path, model: Any, optimizer: Any) -> None:
    """Write the files of this rank: those of the model and the optimizer that no other rank has.

    Args:
        folder: The temporary folder. It is created.
        model: The model, or None.
        optimizer: The optimizer, or None.

    Raises:
        OSError: A file cannot be written.
    """
    pp, tp, rdp = _coordinates()
    rank_info = f"{pp}_{tp}_{rdp}"
    folder.mkdir(parents=True, exist_ok=True)
    # Replicas are equal: the first one writes. Ranks that share parameters have a part each.
    is_first_replica = rdp < mesh.degree()
    if model is not None and is_first_replica:
        _write_file(folder / f"model_{rank_info}.pt", model.local_state_dict())
    if optimizer is None:
        return
    part = optimizer.local_state_dict(gather_if_shard=False)
    precision = part.pop(PRECISION, None)
    if state.cfg.shard_optimizer_state or is_first_replica:
        _write_file(folder / f"optimizer_{rank_info}.pt", part)
        if precision is not None:
            _write_file(folder / f"fp16_states_{rank_info}.pt", precision)


def _complete_partial(checkpoint: _PartialCheckpoint, kept: int | None) -> None:
    """Write the common files, give the folder its name, and delete checkpoints that are too old.

    An earlier checkpoint with the same tag is moved aside first, so that one of both is complete at
    any time.

    The file ``newest`` gets the tag.

    Args:
        checkpoint: The folders.
        kept: Number of partial checkpoints that are kept; None: all.

    Raises:
        OSError: A file or folder cannot be written or renamed.
    """
    folder, final = checkpoint.temporary, checkpoint.final
    owner = None
    if wrapped.model is not None and wrapped.model.partitioned:
        owner = dict(wrapped.model.owner)
    partition = {
        "pipeline_parallel_degree": state.cfg.pipeline_parallel_degree,
        "tensor_parallel_degree": state.cfg.tensor_parallel_degree,
        "reduced_data_parallel_degree": rdp_size(),
        "shard_optimizer_state": bool(state.cfg.shard_optimizer_state),
        "sharded_data_parallel_degree": mesh.degree(),
        "owner": owner,
    }
    _write_file(folder / _USER, checkpoint.user_content)
    _write_file(folder / _PARTITION, partition)
    _sync_folder(folder)
    old = checkpoint.root / f"{final.name}{_OLD}{checkpoint.token}"
    if final.exists():
        final.rename(old)
    folder.rename(final)
    _write_newest(checkpoint.root, checkpoint.tag)
    _delete_old(checkpoint.root, checkpoint.tag, kept)


def _resume_partial(
    folder: Path, model: Any, optimizer: Any, strict: bool, load_sharded: bool
) -> Any:
    """Load this rank's files of a partial checkpoint, and return the user's content.

    The partition of the model is set. Model and optimizer are loaded now, or after the partition.

    Args:
        folder: The folder of the checkpoint.
        model: The model.
        optimizer: The optimizer; None: it is not loaded.
        strict: Refuse missing and unknown names.
        load_sharded: Load the state of the optimizer, and not only master weights and loss scale.

    Returns:
        The user's content; None if there is none.

    Raises:
        SMPRuntimeError: The checkpoint was saved with other degrees.
        FileNotFoundError: The file ``partition.pt`` is missing or empty.
        Exception: A file cannot be unpickled, or the model or optimizer cannot take it.
    """
    pp, tp, rdp = _coordinates()
    partition = _read_file(folder / _PARTITION)
    for key in (
        "pipeline_parallel_degree",
        "tensor_parallel_degree",
        "sharded_data_parallel_degree",
    ):
        degree, saved_degree = getattr(state.cfg, key), partition.get(key, 1)
        if saved_degree != degree:
            raise SMPRuntimeError(
                f"cannot resume from {folder}: it was saved with {key} {saved_degree}, and this job"
                f" has {degree}. A partial checkpoint keeps its partition. Use the same degree, or"
                " a full checkpoint (partial=False)."
            )
    if partition["owner"] is not None:
        model.preset_partition(partition["owner"])
    weights = _read_file(folder / f"model_{pp}_{tp}_{mesh.part()}.pt", optional=True)
    moments: dict[str, Any] | None = None
    if optimizer is not None:
        moments = _read_optimizer(folder, f"{pp}_{tp}", rdp, partition)
        if moments is not None and not load_sharded:
            moments["state"] = {}

    def restore() -> None:
        """Load what was read. Runs once the model is divided."""
        if weights is not None:
            model.load_state_dict(weights, strict=strict, same_partition_load=True)
        if optimizer is not None and moments is not None:
            optimizer.load_state(moments)
        else:
            _reload_masters()

    if optimizer is not None and moments is not None:
        # Now, because a learning-rate scheduler that the script makes next starts from these.
        optimizer.load_options(moments)
    after_partition(restore)
    return _read_file(folder / _USER, optional=True)


def _read_optimizer(
    folder: Path, prefix: str, rdp: int, partition: dict[str, Any]
) -> dict[str, Any] | None:
    """Read this rank's optimizer state; None if it was not saved.

    If the number of replicas has changed, all shards are read and merged.

    Args:
        folder: The folder of the checkpoint.
        prefix: The pipeline and tensor rank, ``PP_TP``.
        rdp: The reduced-data-parallel rank.
        partition: The content of ``partition.pt``.

    Raises:
        Exception: A file cannot be unpickled.
    """
    saved_shards = 1
    if partition["shard_optimizer_state"]:
        saved_shards = partition["reduced_data_parallel_degree"]
    if saved_shards == 1:
        shards: Sequence[int] = [mesh.part()]
    elif state.cfg.shard_optimizer_state and saved_shards == rdp_size():
        shards = [rdp]
    else:
        shards = range(saved_shards)
    merged: dict[str, Any] | None = None
    for shard in shards:
        part = _read_file(folder / f"optimizer_{prefix}_{shard}.pt", optional=True)
        if part is None:
            return None
        precision = _read_file(folder / f"fp16_states_{prefix}_{shard}.pt", optional=True)
        if precision is not None:
            part[PRECISION] = precision
        merged = part if merged is None else merge_parts([merged, part])
    return merged


def _partial_folder(root: Path, tag: str) -> Path:
    """Return the folder of a partial checkpoint.

    After a save that was killed while it replaced the checkpoint, this is the old folder.

    Nothing is written.

    Raises:
        FileNotFoundError: There is no such checkpoint. The text lists the others.
    """
    folder = root / f"{tag}_partial"
    if folder.is_dir():
        return folder
    # A tag may have characters with a meaning in patterns, such as "[".
    for old in sorted(root.glob(f"{glob.escape(folder.name)}{_OLD}*")):
        return old
    tags = sorted(path.name.removesuffix("_partial") for path in root.glob("*_partial"))
    advice = "Check the tag."
    if (root / tag).is_file():
        advice = "A full checkpoint with this tag exists: use partial=False."
    raise FileNotFoundError(
        f"cannot resume: {folder} is missing. Partial checkpoints there:"
        f" {', '.join(tags) or 'none'}. {advice}"
    )


def _delete_old(root: Path, tag: str, kept: int | None) -> None:
    """Delete the remains of killed saves, and all but the newest partial checkpoints.

    Folders of old checkpoints that had lost their name get it back. Errors of a deletion are passed
    over.

    Args:
        root: Folder of all checkpoints.
        tag: The newest checkpoint.
        kept: Number of checkpoints that are kept; None: all.

    Raises:
        OSError: A folder cannot be renamed.
    """
    for replaced in root.glob(f"*_partial{_OLD}*"):
        # A save that was killed between two renames has left the old checkpoint without its name.
        name = replaced.name.partition(_OLD)[0]
        if (root / name).exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(root / name)
    for unfinished in root.glob(f"*_partial{_SAVING}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    if kept is None:
        return
    others = [
        folder
        for folder in root.glob("*_partial")
        if folder.is_dir() and folder.name != f"{tag}_partial"
    ]
    others.sort(key=_time_of)
    for folder in others[: max(0, len(others) - (kept - 1))]:
        shutil.rmtree(folder, ignore_errors=True)


def _time_of(folder: Path) -> int:
    """Return the time at which a partial checkpoint was completed, in nanoseconds; 0: never."""
    partition = folder / _PARTITION
    if not partition.exists():
        return 0
    return partition.stat().st_mtime_ns


# --- Full -----------------------------------------------------------------------------------------


def _save_full(root: Path, tag: str, model: Any, user_content: Any, translate: bool) -> None:
    """Write a full checkpoint from rank 0. Collective.

    The file ``newest`` gets the tag. Files with the tag are replaced.

    Args:
        root: Folder of all checkpoints. It is created.
        tag: Name of the checkpoint.
        model: The model; None: only the user's content is written.
        user_content: The script's own object.
        translate: Give the state the names of the Hugging Face model.

    Raises:
        SMPRuntimeError: Rank 0 cannot write; raised on rank 0.
        PeerError: Rank 0 cannot write; raised on the other ranks.
        StepError: Ranks have not made the call in time.
    """
    full_state = model.state_dict(gather_to_rank0=True) if model is not None else None

    def write() -> None:
        """Write the files, on rank 0."""
        if rank() != 0:
            return
        content = full_state
        if content is not None and translate:
            for to_hf, _ in state.module_manager.translate_functions:
                content = to_hf(content)
        root.mkdir(parents=True, exist_ok=True)
        _write_file(root / f"user_content_{tag}", user_content)
        if content is not None:
            _write_file(root / tag, content)
        _write_newest(root, tag)

    _run_on_all_ranks("save_checkpoint", write)


def _resume_full(
    model: Any,
    root: Path,
    tag: str,
    strict: bool,
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None,
) -> Any:
    """Load a full checkpoint, and return the user's content.

    The model is loaded now, or after the partition, and then the master weights are set from it.
    Names are translated by the known translations only if some are missing.

    Args:
        model: The model. If it is not divided yet, the state is loaded after the partition.
        root: Folder of all checkpoints.
        tag: Name of the checkpoint.
        strict: Refuse missing and unknown names.
        translate: Translates the names of the state; None: the known translation is used, if names
            of the model are missing.

    Returns:
        The user's content; None if there is none.

    Raises:
        FileNotFoundError: The checkpoint is missing. The text lists the files that are there.
        RuntimeError: Names or shapes of the model differ, with ``strict`` (torch's own error).
        Exception: A file cannot be read or unpickled, or ``translate`` failed.
    """
    full_state: dict[str, Any]
    if (root / tag).is_file():
        full_state = _read_file(root / tag, lazily=True)
    elif (root / _HF_FILE).is_file():
        # Hugging Face passes the name of its older format, and writes this one.
        from safetensors.torch import load_file

        full_state = load_file(root / _HF_FILE)
    else:
        files = sorted(path.name for path in root.glob("*") if path.is_file())
        files = [name for name in files if name != _NEWEST]
        raise FileNotFoundError(
            f"cannot resume: {root / tag} is missing, and so is {_HF_FILE}. Files there:"
            f" {', '.join(files) or 'none'}."
        )
    module = model.get_module()
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if translate is not None:
        full_state = translate(full_state)
    elif not names <= set(full_state):
        for _, from_hf in state.module_manager.translate_functions:
            full_state = from_hf(full_state)
    full_state = _with_tied_parameters(module, full_state)

    def restore() -> None:
        model.load_state_dict(full_state, strict=strict)
        _reload_masters()

    after_partition(restore)
    return _read_file(root / f"user_content_{tag}", optional=True)


def _with_tied_parameters(module: torch.nn.Module, full_state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with all names of tied parameters: safetensors stores each parameter once.

    Args:
        module: The model.
        full_state: The state, which has one name of each parameter.

    Returns:
        A new dictionary with the same tensors.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    with_tied = dict(full_state)
    for names in groups.values():
        present = [name for name in names if name in full_state]
        if not present:
            continue
        for name in names:
            with_tied.setdefault(name, full_state[present[0]])
    return with_tied


# --- Common ---------------------------------------------------------------------------------------


def _reload_masters() -> None:
    """Set the master weights of the wrapped optimizers from the loaded parameters."""
    for optimizer in wrapped.optimizers:
        if hasattr(optimizer, "reload_model_params"):
            optimizer.reload_model_params()


def _run_on_all_ranks(call: str, action: Callable[[], None]) -> None:
    """Run an action on this rank, and fail on all ranks if it fails on one. Collective over the
    job.

    Args:
        call: The script's call, for the error.
        action: The action.

    Raises:
        SMPRuntimeError: On a rank with an error, which is the cause. The text has all ranks and
            their errors.
        PeerError: On a rank without an error.
    """
    cause: Exception | None = None
    try:
        action()
    except Exception as error:  # noqa: BLE001  the other ranks must learn of any error
        cause = error
    errors = allgather(None if cause is None else summary(cause), CommGroup.WORLD)
    failed_ranks = [number for number, error in enumerate(errors) if error is not None]
    reasons = [f"rank {number}: {errors[number]}" for number in failed_ranks]
    message = f"{call} failed: {'; '.join(reasons)}"
    if cause is not None:
        raise SMPRuntimeError(message) from cause
    if failed_ranks:
        raise PeerError(failed_ranks[0], f"rank {failed_ranks[0]}", message)


def _is_lowest_rank_of_folder(root: Path, token: str) -> bool:
    """Return whether this rank is the lowest one that sees this folder.

    Hosts may share the folder, or have one each. Each rank creates a file, and the ranks compare
    the names of the files. Collective; the files are deleted.

    Args:
        root: Folder of all checkpoints. It is created.
        token: Random text, equal on all ranks.

    Raises:
        SMPRuntimeError: This rank cannot write to the folder.
        PeerError: Another rank cannot write to it.
        OSError: The file of this rank cannot be deleted.
    """
    prefix, own_rank = f".save-{token}-", rank()

    def create_file() -> None:
        root.mkdir(parents=True, exist_ok=True)
        (root / f"{prefix}{own_rank}").touch()

    _run_on_all_ranks("save_checkpoint", create_file)
    lowest = min(int(path.name.rpartition("-")[2]) for path in root.glob(f"{prefix}*"))
    allgather(None, CommGroup.WORLD)  # all ranks have read the folder
    (root / f"{prefix}{own_rank}").unlink()
    return lowest == own_rank


def _write_file(path: Path, obj: Any, **arguments: Any) -> None:
    """Write an object with ``torch.save``; the file appears when it is complete.

    Args:
        path: The file.
        obj: The object.
        arguments: More arguments of ``torch.save``.

    Raises:
        OSError: The file cannot be written.
        Exception: The object cannot be pickled.
    """
    with _open_until_complete(path) as stream:
        torch.save(obj, stream, **arguments)


def _write_newest(root: Path, tag: str) -> None:
    """Record the tag of the newest checkpoint."""
    with _open_until_complete(root / _NEWEST) as stream:
        stream.write(tag.encode())
    _sync_folder(root)


@contextlib.contextmanager
def _open_until_complete(path: Path) -> Iterator[BinaryIO]:
    """Open a file under a temporary name, and rename it when the block has written it.

    After an error in the block there is no file. The content is on the disk before the rename.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be written or renamed. The former file of that name stays.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, where the file system supports this.

    A refusal of the system is only logged, for debugging.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        _LOG.debug("cannot sync %s", folder)


def _read_file(path: Path, *, optional: bool = False, lazily: bool = False) -> Any:
    """Read a file of a checkpoint.

    Args:
        path: The file.
        optional: Return None for a missing file.
        lazily: Map the file into memory, where its format allows that.

    Raises:
        FileNotFoundError: The file is missing or empty, and not optional.
        Exception: The file cannot be read or unpickled.
    """
    if not path.exists() or path.stat().st_size == 0:
        # Older Trainers mark a checkpoint with an empty file.
        if optional:
            return None
        raise FileNotFoundError(
            f"cannot resume: {path} is missing or empty. The checkpoint is not complete."
        )
    if lazily:
        try:
            return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
        except RuntimeError:  # an older format cannot be mapped
            pass
    return torch.load(path, map_location="cpu", weights_only=False)
