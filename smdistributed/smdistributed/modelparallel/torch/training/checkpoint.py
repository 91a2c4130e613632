"""Files: `smp.save`, `smp.load`, `smp.save_checkpoint`, `smp.resume_from_checkpoint`.

A file gets its name only when it is complete. A checkpoint that is interrupted
leaves the one before usable.

Loading runs ``pickle`` (``weights_only=False``), because a checkpoint holds objects of the script.
Load only files that you trust.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import uuid
from collections.abc import Callable, Iterator
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
    """Save an object. Each rank that calls it writes a file.

    Args:
        obj: What to save, for example ``{"model": model.local_state_dict()}``.
        f: Path of the file. A partial file has the rank added: ``f_PP``, with
            tensor parallelism ``f_PP_TP``.
        partial: Add the rank. False writes ``f`` itself: let one rank do that.
        pickle_module: Passed to ``torch.save``.
        pickle_protocol: Passed to ``torch.save``.
        v3: Name a partial file ``f_PP_TP_RDP``, so that replicas do not write the same file.

    Raises:
        TypeError: ``f`` is not a string.
    """
    name = Path(_text(f) + (_suffixes(v3)[0] if partial else ""))
    _write(name, obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = pickle,
    partial: bool = True,
    **pickle_load_args: Any,
) -> Any:
    """Load what ``save`` wrote.

    Args:
        f: The path that ``save`` got.
        map_location: Passed to ``torch.load``.
        pickle_module: Passed to ``torch.load``.
        partial: Load this rank's file. All three documented names are tried.
        pickle_load_args: Passed to ``torch.load``. ``weights_only`` is False unless it is given.

    Raises:
        TypeError: ``f`` is not a string.
        FileNotFoundError: No file has one of the names.
    """
    names = [_text(f) + suffix for suffix in _suffixes()] if partial else [_text(f)]
    name = next((name for name in names if Path(name).exists()), None)
    if name is None:
        raise FileNotFoundError(
            f"cannot load {f}: not found: {', '.join(names)}. "
            + (
                "A full file needs partial=False."
                if partial and Path(f).exists()
                else "Check the path."
            )
        )
    pickle_load_args.setdefault("weights_only", False)
    if not pickle_load_args["weights_only"]:
        pickle_load_args["pickle_module"] = pickle_module
    return torch.load(name, map_location=map_location, **pickle_load_args)


def _suffixes(v3: bool = False) -> list[str]:
    """Return the endings of a partial file's name on this rank, the documented one first."""
    pp, tp, rdp = _coordinates()
    names = [f"_{pp}", f"_{pp}_{tp}", f"_{pp}_{tp}_{rdp}"]
    if v3 or mesh.degree() > 1:  # replicas have other parts, and must not write the same file
        return names[::-1]
    return names if tp_size() == 1 else [names[1], names[0], names[2]]


def _coordinates() -> tuple[int, int, int]:
    return pp_rank(), tp_rank(), rdp_rank()


def _text(f: Any) -> str:
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

    Args:
        path: Folder of all checkpoints. It is made.
        tag: Name of this one.
        partial: What to write. A full checkpoint has no optimizer.
        model: The ``smp.DistributedModel``.
        optimizer: The ``smp.DistributedOptimizer``.
        user_content: Anything that can be pickled.
        translate_if_full: Give a full checkpoint the names of the Hugging Face model, where a
            translation is known.
        num_kept_partial_checkpoints: Delete all but this number of the newest partial checkpoints.

    Raises:
        SMPRuntimeError: A rank could not write, or ranks gave different tags. Raised on all ranks;
            the checkpoint before is untouched.
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
    if partial:
        _save_partial(
            root, tag, token[0], model, optimizer, user_content, num_kept_partial_checkpoints
        )
    else:
        _save_full(root, tag, model, user_content, translate_if_full)


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
    """Load a checkpoint into the model and the optimizer. All ranks call it.

    Before the partition the files are read, and loaded right after it. A partial checkpoint brings
    its partition, which cannot change; a full one can be loaded into any number of partitions, and
    leaves the optimizer as it is.

    Args:
        path: Folder of all checkpoints.
        tag: Which one; None for the newest.
        partial: What to read.
        strict: Refuse missing and unknown names.
        load_optimizer: Also load the optimizer of a partial checkpoint.
        load_sharded_optimizer_state: False loads of the optimizer only the
            master weights and the loss scale.
        translate_function: Translates a full checkpoint's names; else the known
            translation is used.

    Returns:
        The ``user_content`` that was saved, or None.

    Raises:
        FileNotFoundError: The checkpoint is missing.
        SMPRuntimeError: No model is wrapped yet, or a partial checkpoint has another partition.
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
    if partial:
        return _resume_partial(
            model, root, tag, strict, load_optimizer, load_sharded_optimizer_state
        )
    return _resume_full(model, root, tag, strict, translate_function)


# --- Partial --------------------------------------------------------------------------------------


def _save_partial(
    root: Path,
    tag: str,
    token: str,
    model: Any,
    optimizer: Any,
    user_content: Any,
    kept: int | None,
) -> None:
    leads = _leads(root, token)
    folder, final = root / f"{tag}_partial{_SAVING}{token}", root / f"{tag}_partial"
    pp, tp, rdp = _coordinates()
    info = f"{pp}_{tp}_{rdp}"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        first = rdp < mesh.degree()  # of the replicas; those who share parameters have a part each
        if model is not None and first:
            _write(folder / f"model_{info}.pt", model.local_state_dict())
        if optimizer is not None:
            sharded = bool(state.cfg.shard_optimizer_state)
            part = optimizer.local_state_dict(gather_if_shard=False)
            precision = part.pop(PRECISION, None)
            if sharded or first:
                _write(folder / f"optimizer_{info}.pt", part)
                if precision is not None:
                    _write(folder / f"fp16_states_{info}.pt", precision)

    def finish() -> None:
        _write(folder / _USER, user_content)
        _write(
            folder / _PARTITION,
            {
                "pipeline_parallel_degree": state.cfg.pipeline_parallel_degree,
                "tensor_parallel_degree": state.cfg.tensor_parallel_degree,
                "reduced_data_parallel_degree": rdp_size(),
                "shard_optimizer_state": bool(state.cfg.shard_optimizer_state),
                "sharded_data_parallel_degree": mesh.degree(),
                "owner": (
                    dict(wrapped.model.owner)
                    if wrapped.model is not None and wrapped.model.partitioned
                    else None
                ),
            },
        )
        _sync(folder)
        old = root / f"{final.name}{_OLD}{token}"
        if final.exists():
            final.rename(old)
        folder.rename(final)
        _say_newest(root, tag)
        _keep(root, tag, kept)

    try:
        _together("save_checkpoint", write)
        _together("save_checkpoint", lambda: finish() if leads else None)
    except SMPRuntimeError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _resume_partial(
    model: Any, root: Path, tag: str, strict: bool, load_optimizer: bool, load_sharded: bool
) -> Any:
    folder = _partial_folder(root, tag)
    pp, tp, rdp = _coordinates()
    partition = _read(folder / _PARTITION)
    for key in (
        "pipeline_parallel_degree",
        "tensor_parallel_degree",
        "sharded_data_parallel_degree",
    ):
        now, then = getattr(state.cfg, key), partition.get(key, 1)
        if then != now:
            raise SMPRuntimeError(
                f"cannot resume from {folder}: it was saved with {key} {then}, and this job has"
                f" {now}. A partial checkpoint keeps its partition. Use the same degree, or a full"
                " checkpoint (partial=False)."
            )
    if partition["owner"] is not None:
        model.preset_partition(partition["owner"])
    weights = _read(folder / f"model_{pp}_{tp}_{mesh.part()}.pt", optional=True)
    moments: dict[str, Any] | None = None
    optimizer = wrapped.optimizers[0] if load_optimizer and wrapped.optimizers else None
    if optimizer is not None:
        moments = _read_optimizer(folder, f"{pp}_{tp}", rdp, partition)
        if moments is not None and not load_sharded:
            moments["state"] = {}

    def restore() -> None:
        if weights is not None:
            model.load_state_dict(weights, strict=strict, same_partition_load=True)
        if optimizer is not None and moments is not None:
            optimizer.load_state(moments)
        else:
            _reload_masters()

    if optimizer is not None and moments is not None:
        optimizer.load_options(moments)  # a scheduler that the script makes next starts from them
    after_partition(restore)
    return _read(folder / _USER, optional=True)


def _read_optimizer(
    folder: Path, prefix: str, rdp: int, partition: dict[str, Any]
) -> dict[str, Any] | None:
    """Read this rank's optimizer state.

    All shards if there were more or fewer replicas when it was saved.
    """
    shards = partition["reduced_data_parallel_degree"] if partition["shard_optimizer_state"] else 1
    same = shards == 1 or (state.cfg.shard_optimizer_state and shards == rdp_size())
    merged: dict[str, Any] | None = None
    for shard in [rdp if shards > 1 else mesh.part()] if same else range(shards):
        part = _read(folder / f"optimizer_{prefix}_{shard}.pt", optional=True)
        if part is None:
            return None
        precision = _read(folder / f"fp16_states_{prefix}_{shard}.pt", optional=True)
        if precision is not None:
            part[PRECISION] = precision
        merged = part if merged is None else merge_parts([merged, part])
    return merged


def _partial_folder(root: Path, tag: str) -> Path:
    """Return the folder of a partial checkpoint, or of the one that a killed
    save was about to replace.
    """
    folder = root / f"{tag}_partial"
    if folder.is_dir():
        return folder
    for old in sorted(root.glob(f"{folder.name}{_OLD}*")):
        return old
    have = sorted(one.name.removesuffix("_partial") for one in root.glob("*_partial"))
    raise FileNotFoundError(
        f"cannot resume: {folder} is missing. Partial checkpoints there:"
        f" {', '.join(have) or 'none'}. "
        + (
            "A full checkpoint with this tag exists: use partial=False."
            if (root / tag).is_file()
            else "Check the tag."
        )
    )


def _keep(root: Path, tag: str, number: int | None) -> None:
    """Delete what killed saves left, and all but the newest partial checkpoints."""
    for left in root.glob(f"*_partial{_OLD}*"):
        name = left.name.partition(_OLD)[0]
        if (root / name).exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.rename(root / name)
    for left in root.glob(f"*_partial{_SAVING}*"):
        shutil.rmtree(left, ignore_errors=True)
    if number is None:
        return
    others = [
        folder
        for folder in root.glob("*_partial")
        if folder.is_dir() and folder.name != f"{tag}_partial"
    ]
    others.sort(
        key=lambda folder: (
            (folder / _PARTITION).stat().st_mtime_ns if (folder / _PARTITION).exists() else 0
        )
    )
    for folder in others[: max(0, len(others) - (number - 1))]:
        shutil.rmtree(folder, ignore_errors=True)


# --- Full -----------------------------------------------------------------------------------------


def _save_full(root: Path, tag: str, model: Any, user_content: Any, translate: bool) -> None:
    whole = model.state_dict(gather_to_rank0=True) if model is not None else None

    def write() -> None:
        if rank() != 0:
            return
        content = whole
        if content is not None and translate:
            for to_hf, _ in state.module_manager.translate_functions:
                content = to_hf(content)
        root.mkdir(parents=True, exist_ok=True)
        _write(root / f"user_content_{tag}", user_content)
        if content is not None:
            _write(root / tag, content)
        _say_newest(root, tag)

    _together("save_checkpoint", write)


def _resume_full(
    model: Any,
    root: Path,
    tag: str,
    strict: bool,
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None,
) -> Any:
    whole: dict[str, Any]
    if (root / tag).is_file():
        whole = _read(root / tag, lazily=True)
    elif (root / _HF_FILE).is_file():
        # Hugging Face passes the name of its older format, and writes this one.
        from safetensors.torch import load_file

        whole = load_file(root / _HF_FILE)
    else:
        have = (
            sorted(one.name for one in root.glob("*") if one.is_file() and one.name != _NEWEST)
            if root.is_dir()
            else []
        )
        raise FileNotFoundError(
            f"cannot resume: {root / tag} is missing, and so is {_HF_FILE}. Files there:"
            f" {', '.join(have) or 'none'}."
        )
    module = model.get_module()
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if translate is not None:
        whole = translate(whole)
    elif not names <= set(whole):
        for _, from_hf in state.module_manager.translate_functions:
            whole = from_hf(whole)
    whole = _with_tied(module, whole)

    def restore() -> None:
        model.load_state_dict(whole, strict=strict)
        _reload_masters()

    after_partition(restore)
    return _read(root / f"user_content_{tag}", optional=True)


def _with_tied(module: torch.nn.Module, whole: dict[str, Any]) -> dict[str, Any]:
    """Add the names of tied parameters that the file has under another name
    only (safetensors stores each once).
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    out = dict(whole)
    for names in groups.values():
        present = [name for name in names if name in whole]
        if present:
            out.update({name: whole[present[0]] for name in names if name not in whole})
    return out


# --- Common ---------------------------------------------------------------------------------------


def _reload_masters() -> None:
    for optimizer in wrapped.optimizers:
        if hasattr(optimizer, "reload_model_params"):
            optimizer.reload_model_params()


def _together(what: str, action: Callable[[], None]) -> None:
    """Do something on all ranks, and fail on all if it fails on one.

    Raises:
        SMPRuntimeError: It names the ranks and their errors. A rank where it
            did not fail gets a PeerError.
    """
    cause: Exception | None = None
    try:
        action()
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        cause = error
    errors = allgather(None if cause is None else summary(cause), CommGroup.WORLD)
    failed = [number for number, error in enumerate(errors) if error is not None]
    told = f"{what} failed: " + "; ".join(f"rank {number}: {errors[number]}" for number in failed)
    if cause is not None:
        raise SMPRuntimeError(told) from cause
    if failed:
        raise PeerError(failed[0], f"rank {failed[0]}", told)


def _leads(root: Path, token: str) -> bool:
    """Return whether this rank is the lowest that sees this folder: hosts may
    share it or have one each.
    """
    mark, me = f".save-{token}-", rank()

    def leave_mark() -> None:
        root.mkdir(parents=True, exist_ok=True)
        (root / f"{mark}{me}").touch()

    _together("save_checkpoint", leave_mark)
    lowest = min(int(one.name.rpartition("-")[2]) for one in root.glob(f"{mark}*"))
    allgather(None, CommGroup.WORLD)  # all have looked
    (root / f"{mark}{me}").unlink()
    return lowest == me


def _write(path: Path, obj: Any, **arguments: Any) -> None:
    with _complete(path) as stream:
        torch.save(obj, stream, **arguments)


def _say_newest(root: Path, tag: str) -> None:
    with _complete(root / _NEWEST) as stream:
        stream.write(tag.encode())
    _sync(root)


@contextlib.contextmanager
def _complete(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name, and rename it when it is complete."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make names in a folder last through a power failure, where the file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        _LOG.debug("cannot sync %s", folder)


def _read(path: Path, *, optional: bool = False, lazily: bool = False) -> Any:
    if (
        not path.exists() or path.stat().st_size == 0
    ):  # older Trainers mark a checkpoint with an empty file
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
