"""Training in fp16 and bf16: loss scaling and master weights in float32."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from smdistributed.modelparallel.torch.exceptions import SMPConfigError
from smdistributed.modelparallel.torch.job.collective_calls import calls
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.job.topology import CommGroup
from smdistributed.modelparallel.torch.partitioning import placement
from smdistributed.modelparallel.torch.sharding import mesh

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_FIRST_SCALE = 2.0**32  # documented default of dynamic loss scaling


class LossScaler:
    """Hold the factor that the loss is multiplied by, and change it after each step.

    A dynamic scale is divided by ``scale_factor`` after an overflow, and multiplied by it after
    ``scale_window`` steps without one. ``delayed_shift`` is the number of overflows that lower the
    scale. It counts anew after each growth of the scale, or after each good step with
    ``consecutive_hysteresis``.

    Attributes:
        loss_scale: The present factor. It can be set.
        dynamic: False for a static scale, which never changes.
    """

    def __init__(
        self,
        init_scale: float = _FIRST_SCALE,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        *,
        dynamic: bool = True,
    ) -> None:
        self.loss_scale = float(init_scale)
        self.dynamic = dynamic
        self.scale_factor = float(scale_factor)
        self.scale_window = int(scale_window)
        self.min_scale = float(min_scale)
        self.delayed_shift = int(delayed_shift)
        self.consecutive_hysteresis = bool(consecutive_hysteresis)
        self.good_steps = 0
        self.overflows_left = self.delayed_shift

    @classmethod
    def of(
        cls,
        static_loss_scale: float | None,
        dynamic_loss_scale: bool,
        dynamic_loss_args: Mapping[str, Any] | None,
    ) -> LossScaler:
        """Create a scaler from the arguments of ``smp.DistributedOptimizer``.

        Returns:
            A new scaler. Without ``dynamic_loss_scale`` it is static, with 1 for None.

        Raises:
            SMPConfigError: An argument is unknown or out of range.
        """
        if not dynamic_loss_scale:
            scale = 1.0 if static_loss_scale is None else static_loss_scale
            if scale <= 0:
                raise SMPConfigError(
                    f"static_loss_scale must be greater than 0, got {static_loss_scale!r}"
                )
            return cls(scale, dynamic=False)
        options = dict(dynamic_loss_args or {})
        names = (
            "init_scale",
            "scale_factor",
            "scale_window",
            "min_scale",
            "delayed_shift",
            "consecutive_hysteresis",
        )
        for name in options:
            if name not in names:
                suggestions = difflib.get_close_matches(name, names, 1)
                hint = f" (available: {', '.join(names)})"
                if suggestions:
                    hint = f"; did you mean {suggestions[0]!r}?"
                raise SMPConfigError(f"dynamic_loss_args has no {name!r}{hint}")
        for name, least in (
            ("init_scale", 0),
            ("min_scale", 0),
            ("scale_factor", 1),
            ("scale_window", 0),
        ):
            if name in options and not options[name] > least:
                raise SMPConfigError(
                    f"dynamic_loss_args: {name} must be greater than {least}, got {options[name]!r}"
                )
        if options.get("delayed_shift", 1) < 1:
            raise SMPConfigError(
                "dynamic_loss_args: delayed_shift must be at least 1, got"
                f" {options['delayed_shift']!r}"
            )
        return cls(**options)

    @property
    def cur_scale(self) -> float:
        """The present factor, under the name that scripts for Apex use."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.loss_scale = float(value)

    def update_scale(self, overflow: bool) -> None:
        """Update the scale after a step.

        A static scale stays. Counters of good steps and overflows are changed.

        Args:
            overflow: Whether a gradient of the step was infinite or not a number.
        """
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            # The last of ``delayed_shift`` overflows lowers the scale, and so does each later one.
            if self.overflows_left > 1:
                self.overflows_left -= 1
            else:
                self.loss_scale = max(self.loss_scale / self.scale_factor, self.min_scale)
            return
        self.good_steps += 1
        grows = self.good_steps % self.scale_window == 0
        if grows:
            self.loss_scale *= self.scale_factor
        if grows or self.consecutive_hysteresis:
            self.overflows_left = self.delayed_shift

    def state_dict(self) -> dict[str, float]:
        """Return the scale and its counters, for a resumed job."""
        return {
            "loss_scale": self.loss_scale,
            "good_steps": self.good_steps,
            "overflows_left": self.overflows_left,
        }

    def load_state_dict(self, saved: Mapping[str, float]) -> None:
        """Load a result of ``state_dict``. A static scale stays as the script has set it.

        Raises:
            KeyError: An entry is missing.
        """
        if self.dynamic:
            self.loss_scale = float(saved["loss_scale"])
            self.good_steps = int(saved["good_steps"])
            self.overflows_left = int(saved["overflows_left"])


class MasterWeights:
    """Keep a float32 copy of each parameter that this rank updates, in the parameter's place in the
    optimizer.

    A parameter of sharded data parallelism is float32 itself. Its master has the same memory, and
    another gradient.

    Args:
        optimizer: The optimizer. Its groups get the copies, and its state for a parameter moves to
            the copy.
        gets_master: Returns whether the parameter with an index (over all groups) gets a copy.

    Attributes:
        pairs: Index of a parameter -> (the parameter, its master).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, gets_master: Callable[[int], bool]
    ) -> None:
        self.pairs: dict[int, tuple[Parameter, Parameter]] = {}
        self._versions: dict[int, int] = {}
        self.add(optimizer, gets_master)

    def add(
        self, optimizer: torch.optim.Optimizer, gets_master: Callable[[int], bool], first: int = 0
    ) -> None:
        """Create copies for the parameters from index ``first`` on, and put them into the groups.

        A master takes memory of its own, except for a sharded parameter's. State that the optimizer
        has of the parameter moves to the master. Parameters that require no gradient, and those of
        integers, get none.

        Args:
            optimizer: As for the class.
            gets_master: As for the class.
            first: Index of a parameter, over all groups.
        """
        index = -1
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                index += 1
                if index < first or not gets_master(index):
                    continue
                if not parameter.requires_grad or not parameter.is_floating_point():
                    continue
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                copies = not mesh.is_sharded(parameter)
                master = Parameter(parameter.detach().to(dtype, copy=copies))
                for tag in ("_smp_distributed", "_smp_axis"):
                    if hasattr(parameter, tag):
                        setattr(master, tag, getattr(parameter, tag))
                group["params"][place] = master
                if parameter in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(parameter)
                self.pairs[index] = (parameter, master)
                self._versions[index] = parameter._version  # noqa: SLF001

    def take_gradients(self, scale: float) -> None:
        """Set the gradients of the masters to those of the parameters, divided by ``scale``.

        A parameter without a gradient takes the gradient of its master off.

        The gradients of the parameters stay. The gradient of a sharded parameter with a scale of 1
        is the same tensor.
        """
        for parameter, master in self.pairs.values():
            if parameter.grad is None:
                master.grad = None
                continue
            copies = scale != 1.0 or not mesh.is_sharded(parameter)
            gradient = parameter.grad.to(master.dtype, copy=copies)
            if scale != 1.0:
                gradient.mul_(1.0 / scale)
            master.grad = gradient

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the masters into the parameters, rounded to their type.

        A shared parameter is its own master.

        The written versions are stored, so that `refresh` does not take them for changes.
        """
        for index, (parameter, master) in self.pairs.items():
            if not mesh.is_sharded(parameter):
                parameter.copy_(master)
            self._versions[index] = parameter._version  # noqa: SLF001

    @torch.no_grad()
    def refresh(self, *, everything: bool = False) -> None:
        """Update the masters of parameters that were changed elsewhere, as by ``load_state_dict``.

        An element that is equal to the rounded master stays, because the master is more exact.

        Sharded parameters are left out. The versions that were seen are stored.

        Args:
            everything: Compare all parameters, also those with an unchanged version: torch does not
                count changes through ``.data``.
        """
        for index, (parameter, master) in self.pairs.items():
            if mesh.is_sharded(parameter):
                continue
            if everything or self._versions[index] != parameter._version:  # noqa: SLF001
                is_same = master.to(parameter.dtype) == parameter
                master.copy_(torch.where(is_same, master, parameter.to(master.dtype)))
                self._versions[index] = parameter._version  # noqa: SLF001


def any_overflow(gradients: Iterable[Tensor], *, all_replicas: bool = False) -> bool:
    """Return whether a gradient on any rank of the model is infinite or not a number. Collective.

    The CPU waits for the gradients. Nothing is changed.

    Args:
        gradients: This rank's gradients.
        all_replicas: Include the ranks of all replicas, and not only of this one.

    Returns:
        The same answer on all ranks of the group.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """
    group = CommGroup.WORLD if all_replicas else CommGroup.MP_GROUP
    # The sum of a gradient is infinite or not a number if one of its elements is.
    sums = []
    for gradient in gradients:
        part = mesh.local(gradient)
        if part.is_sparse:
            part = part.coalesce().values()
        sums.append(part.sum(dtype=torch.float32).detach())
    device = placement.device() or torch.device("cpu")
    if sums:
        device = sums[0].device
    has_overflow = torch.zeros(1, device=device)
    if sums:
        on_device = [value.to(device) for value in sums]
        has_overflow += ~torch.isfinite(torch.stack(on_device)).all()
    if len(state.topo.members(group)) > 1:
        with calls.inside("the look for gradients that are infinite", group):
            dist.all_reduce(has_overflow, op=dist.ReduceOp.MAX, group=state.groups[group])
    return bool(has_overflow)
