"""`smp.optimizers`: Adam, LAMB and NovoGrad, with the arguments of Apex's fused
ones and norms over all partitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .job.ranks import tp_size
from .job.state import state
from .job.topology import CommGroup
from .training.gradient_norm import total_norm

Tensor = torch.Tensor


class _Fused(torch.optim.Optimizer):
    """The common part of the three optimizers. The options are those of Apex's classes."""

    def __init__(self, params: Any, *, amsgrad: bool, set_grad_none: bool, **options: Any) -> None:
        if amsgrad:
            raise ValueError(f"{type(self).__name__} has no AMSGrad variant: amsgrad must be False")
        self.set_grad_none = set_grad_none
        super().__init__(params, options)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Set them to None; else to zeros. None: as the option ``set_grad_none``.
        """
        if set_to_none is None:
            set_to_none = self.set_grad_none
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        The parameters and their state are written in place. LAMB and NovoGrad communicate for
        norms: then the call is collective over ranks of the model.

        Args:
            closure: Computes the loss and the gradients, as in torch.

        Returns:
            The closure's result, or None.

        Raises:
            Exception: An error of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                # In float32 at least, also for half-precision parameters.
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                weight, gradient = parameter.to(dtype), parameter.grad.to(dtype)
                update = self._update(group, self.state[parameter], parameter, weight, gradient)
                parameter.copy_(weight - group["lr"] * update)
        return loss

    def _begin(self) -> None:
        """Prepare a step, with all gradients."""

    def _update(
        self,
        group: dict[str, Any],
        parameter_state: dict[str, Any],
        parameter: Tensor,
        weight: Tensor,
        gradient: Tensor,
    ) -> Tensor:
        """Return the update of a weight: times the learning rate it is subtracted.

        Args:
            group: The options.
            parameter_state: The state of the parameter, which is changed.
            parameter: The parameter.
            weight: Its values, in float32 at least.
            gradient: Its gradient, in the same type.

        Raises:
            NotImplementedError: The class has no update.
        """
        raise NotImplementedError


class FusedAdam(_Fused):
    """Adam, or AdamW: the updates of ``torch.optim.Adam`` and ``torch.optim.AdamW``, with the
    options of Apex's class.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: Correct both moments for their start at zero.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        adam_w_mode: Take the weight decay from the weight (AdamW); else add it to the gradient.
        weight_decay: Factor of the parameters in the update.
        amsgrad: Not supported.
        set_grad_none: ``zero_grad`` drops gradients.

    Raises:
        ValueError: ``amsgrad`` is set.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        options: dict[str, Any] = {"lr": lr, "bias_correction": bias_correction, "betas": betas}
        options |= {"eps": eps, "weight_decay": weight_decay}
        super().__init__(params, amsgrad=amsgrad, set_grad_none=set_grad_none, **options)

    def _update(
        self,
        group: dict[str, Any],
        parameter_state: dict[str, Any],
        parameter: Tensor,
        weight: Tensor,
        gradient: Tensor,
    ) -> Tensor:
        """Return the update of Adam, or of AdamW; see the class and ``_Fused._update``.

        The state of the parameter is created or changed.
        """
        del parameter  # no norm over ranks is needed
        decay = group["weight_decay"]
        if not self.adam_w_mode:
            gradient = gradient + decay * weight
        update = _adam_direction(group, parameter_state, gradient, added=1 - group["betas"][0])
        if self.adam_w_mode:
            update = update + decay * weight
        return update


class FusedLAMB(_Fused):
    """LAMB: Adam whose step of each tensor is as long as the tensor's norm allows.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    algorithm 2. Gradients are first scaled down to a global norm of ``max_grad_norm``, which is
    taken over all partitions.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: Correct both moments for their start at zero.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Factor of the parameters in the update.
        amsgrad: Not supported.
        adam_w_mode: Add the decay to the update; else to the gradient.
        grad_averaging: Multiply the gradient by 1 - beta1 in the first moment.
        set_grad_none: ``zero_grad`` drops gradients.
        max_grad_norm: Largest global norm of the gradients; 0 or None for none.
        use_nvlamb: Scale by the norm also where there is no weight decay.

    Raises:
        ValueError: ``amsgrad`` is set.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        self.adam_w_mode, self.use_nvlamb = adam_w_mode, use_nvlamb
        options: dict[str, Any] = {
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        options |= {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, amsgrad=amsgrad, set_grad_none=set_grad_none, **options)

    def _begin(self) -> None:
        """Compute the norm of all gradients, which each update needs."""
        self._norm = _global_norm([p for group in self.param_groups for p in group["params"]])

    def _update(
        self,
        group: dict[str, Any],
        parameter_state: dict[str, Any],
        parameter: Tensor,
        weight: Tensor,
        gradient: Tensor,
    ) -> Tensor:
        """Return the update of LAMB; see the class and ``_Fused._update``.

        The state of the parameter is created or changed. Collective over tensor ranks for a split
        parameter.
        """
        limit, decay = group["max_grad_norm"], group["weight_decay"]
        if limit:
            gradient = gradient * (limit / self._norm).clamp(max=1.0)
        if decay and not self.adam_w_mode:
            gradient = gradient + decay * weight
        added = 1 - group["betas"][0] if group["grad_averaging"] else 1.0
        update = _adam_direction(group, parameter_state, gradient, added=added)
        if decay and self.adam_w_mode:
            update = update + decay * weight
        if decay or self.use_nvlamb:
            # Algorithm 2: the update gets the length of the weight.
            update_norm = _full_norm(update, parameter)
            weight_norm = _full_norm(weight, parameter)
            is_defined = (update_norm > 0) & (weight_norm > 0)
            ones = torch.ones_like(update_norm)
            update = update * torch.where(is_defined, weight_norm / update_norm, ones)
        return update


class FusedNovoGrad(_Fused):
    """NovoGrad: the first moment of gradients that are divided by a running
    norm, one number for each tensor.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for
    Training of Deep Networks", algorithm 1. The paper puts the weight decay into the moment
    (``reg_inside_moment``).

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: Correct the first moment for its start at zero, and the
            second if it starts there.
        betas: Decay of the first and the second moment.
        eps: Added to the norm.
        weight_decay: Factor of the parameters in the update.
        amsgrad: Not supported.
        reg_inside_moment: Add the decay to the normed gradient; else to the update.
        grad_averaging: Multiply the gradient by 1 - beta1 in the first moment.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: Start the second moment at zero; else at the first gradient's.
        set_grad_none: ``zero_grad`` drops gradients.

    Raises:
        ValueError: ``amsgrad`` is set, or ``norm_type`` is neither 0 nor 2.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise ValueError(
                f"FusedNovoGrad: norm_type must be 2, or 0 for the largest value, got {norm_type!r}"
            )
        self.reg_inside_moment = reg_inside_moment
        options: dict[str, Any] = {
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "init_zero": init_zero,
        }
        options |= {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "norm_type": norm_type,
        }
        super().__init__(params, amsgrad=amsgrad, set_grad_none=set_grad_none, **options)

    def _update(
        self,
        group: dict[str, Any],
        parameter_state: dict[str, Any],
        parameter: Tensor,
        weight: Tensor,
        gradient: Tensor,
    ) -> Tensor:
        """Return the update of NovoGrad; see the class and ``_Fused._update``.

        The state of the parameter is created or changed. Collective over tensor ranks for a split
        parameter.
        """
        beta1, beta2 = group["betas"]
        decay, init_zero = group["weight_decay"], group["init_zero"]
        # The second moment is of the largest element, or of the square of the norm.
        uses_maximum = group["norm_type"] == 0
        if uses_maximum:
            size = _full_norm(gradient, parameter, math.inf)
        else:
            size = _full_norm(gradient, parameter) ** 2
        if not parameter_state:
            parameter_state["step"], parameter_state["exp_avg"] = 0, torch.zeros_like(weight)
            parameter_state["exp_avg_sq"] = torch.zeros_like(size) if init_zero else size.clone()
        parameter_state["step"] += 1
        parameter_state["exp_avg_sq"].mul_(beta2).add_(size, alpha=1 - beta2)

        first_correction, second_correction = 1.0, 1.0
        if group["bias_correction"]:
            first_correction = 1 - beta1 ** parameter_state["step"]
            if init_zero:
                second_correction = 1 - beta2 ** parameter_state["step"]
        norm = parameter_state["exp_avg_sq"] / second_correction
        if not uses_maximum:
            norm = norm.sqrt()
        added = gradient / (norm + group["eps"])
        if self.reg_inside_moment:
            added = added + decay * weight
        factor = 1 - beta1 if group["grad_averaging"] else 1.0
        parameter_state["exp_avg"].mul_(beta1).add_(added, alpha=factor)
        update: Tensor = parameter_state["exp_avg"] / first_correction
        if not self.reg_inside_moment:
            update = update + decay * weight
        return update


FusedLamb = FusedLAMB  # the documented name, and the one that scripts use


def _adam_direction(
    group: dict[str, Any], parameter_state: dict[str, Any], gradient: Tensor, *, added: float
) -> Tensor:
    """Update both moments of a parameter, and return the first one over the root of the second.

    Args:
        group: The options.
        parameter_state: The state of the parameter, which is changed.
        gradient: The gradient.
        added: Factor of the gradient in the first moment.
    """
    beta1, beta2 = group["betas"]
    if not parameter_state:
        parameter_state["step"] = 0
        parameter_state["exp_avg"] = torch.zeros_like(gradient)
        parameter_state["exp_avg_sq"] = torch.zeros_like(gradient)
    parameter_state["step"] += 1
    parameter_state["exp_avg"].mul_(beta1).add_(gradient, alpha=added)
    parameter_state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first_correction, second_correction = 1.0, 1.0
    if group["bias_correction"]:
        first_correction = 1 - beta1 ** parameter_state["step"]
        second_correction = 1 - beta2 ** parameter_state["step"]
    first_moment = parameter_state["exp_avg"] / first_correction
    second_moment = parameter_state["exp_avg_sq"] / second_correction
    direction: Tensor = first_moment / (second_moment.sqrt() + group["eps"])
    return direction


def _global_norm(parameters: list[Tensor]) -> Tensor:
    """Return the norm of all gradients of the model, over all ranks that have a part of them.

    Without ``smp.init`` the norm is over the given parameters alone.

    With ``smp.init`` the call is collective.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """
    if not state.initialized:
        # torch's own get_total_norm is of PyTorch 2.6.
        norms = [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]
        if not norms:
            return torch.zeros(())
        on_device = [norm.to(norms[0].device) for norm in norms]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(on_device))
        return norm
    # With a sharded state the optimizer sees only the gradients of this replica's shard.
    group = CommGroup.WORLD if state.cfg.shard_optimizer_state else CommGroup.MP_GROUP
    return total_norm(parameters, group=group)


def _full_norm(value: Tensor, parameter: Tensor, power: float = 2.0) -> Tensor:
    """Return the norm of a tensor with the shape of a parameter, over all tensor ranks of a split
    parameter.

    Collective for a split parameter.

    Args:
        value: The tensor, on this rank.
        parameter: The parameter.
        power: 2, or infinity for the largest absolute value.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """
    norm: Tensor = torch.linalg.vector_norm(value, power)
    if getattr(parameter, "_smp_distributed", False) and tp_size() > 1:
        group = state.groups[CommGroup.TP_GROUP]
        if power == math.inf:
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        else:
            norm = norm**power
            dist.all_reduce(norm, group=group)
            norm = norm ** (1.0 / power)
    return norm
