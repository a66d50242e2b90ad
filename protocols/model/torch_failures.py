"""Finds where in a user's module a forward pass fails, for error messages."""

from torch import Tensor, nn

from fleetune.protocols.user_code import as_line


def failing_part(module: nn.Module, x: Tensor) -> tuple[str, str] | None:
    """Return the innermost module whose forward pass fails on these samples; None if none fails.

    The result is (path and type, error). The function runs the module once.

    Runs the module once.
    """
    entered: list[str] = []
    hooks = []
    for path, part in module.named_modules():
        where = f"{path or 'the model itself'} ({type(part).__name__})"
        hooks.append(part.register_forward_pre_hook(lambda *_, where=where: entered.append(where)))
        hooks.append(part.register_forward_hook(lambda *_: entered.pop() and None))
    try:
        module(x)
    except Exception as problem:  # noqa: BLE001 - a user's module may raise anything
        return entered[-1] if entered else "the model itself", as_line(problem)
    finally:
        for hook in hooks:
            hook.remove()
    return None
