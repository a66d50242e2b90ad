"""Rules for operators that work entry by entry."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from fleetune.coordinator.export.builder import Builder, NoForm, Value, broadcast, type_of
from fleetune.coordinator.export.torch_trace import Open, Operation, Shape
from fleetune.protocols.bundle.graph import Attribute, Type

Operand = Value | float | Open


def value_of(build: Builder, operand: Operand, type_: Type) -> Value:
    """Return an operand, a value or a number, as a value of the given type."""
    if isinstance(operand, Value):
        return build.cast(operand, type_)
    if isinstance(operand, Open):
        return build.cast(build.scalar(operand), type_)
    return build.cast(build.number(operand, "f4"), type_)


def apply(
    build: Builder,
    op: str,
    operands: Sequence[Value | None],
    shape: Shape,
    type_: Type = "f4",
    **attributes: Attribute,
) -> Value:
    """Add a node that applies one ONNX operator entry by entry, and return its result."""
    given = [operand for operand in operands if operand is not None]
    if _are_turned(build, given, shape):
        turned = [one and _turned(build, one, shape) for one in operands]
        found = apply(build, op, turned, (shape[1], shape[0], *shape[2:]), type_, **attributes)
        return build.samples_first(found)
    held = broadcast([operand.held for operand in given])
    return build.emit(op, operands, shape, type_=type_, held=held, **attributes)


def _are_turned(build: Builder, operands: Sequence[Value], shape: Shape) -> bool:
    """True if at least one operand is turned (`Builder.is_turned`), and no other has as many entries."""
    large = [one for one in operands if one.number is None and one.held == shape]
    return bool(large) and all(map(build.is_turned, large))


def _turned(build: Builder, operand: Value, shape: Shape) -> Value:
    if operand.number is not None:
        return operand
    if len(operand.shape) < len(shape):
        operand = replace(operand, shape=(1,) * (len(shape) - len(operand.shape)) + operand.shape)
    return build.channels_first(operand)


def arithmetic(build: Builder, op: str, a: Value, b: Value, shape: Shape) -> Value:
    """Return the result of Add, Sub, Mul or Div; operations that change nothing, such as adding 0, are
    skipped.
    """
    type_ = a.type
    if a.number is not None and b.number is not None and not (op == "Div" and b.number == 0):
        return build.number(_FOLD[op](a.number, b.number), type_, shape)
    neutral = 0 if op in ("Add", "Sub") else 1
    if b.number == neutral:
        return replace(a, shape=shape)
    if a.number == neutral and op in ("Add", "Mul"):
        return replace(b, shape=shape)
    if op == "Mul" and 0 in (a.number, b.number):
        return build.number(0, type_, shape)
    return _by_number(build, op, a, b, shape) or apply(build, op, [a, b], shape, type_)


def _by_number(build: Builder, op: str, a: Value, b: Value, shape: Shape) -> Value | None:
    """Return the result by a cheaper operator if one operand is a suitable number; None if there is none."""
    if op in ("Mul", "Div") and b.number == -1:
        return apply(build, "Neg", [a], shape, a.type)
    if op == "Mul" and a.number == -1:
        return apply(build, "Neg", [b], shape, a.type)
    if op == "Div" and a.number == 1:
        return apply(build, "Reciprocal", [b], shape, a.type)
    if op == "Div" and b.number is not None and a.type == "f4":
        return apply(build, "Mul", [a, build.number(1 / b.number, a.type)], shape, a.type)
    return None


def _binary(build: Builder, out: Operation, a: Operand, b: Operand, *, op: str, alpha: float = 1) -> Value:
    type_ = build_type(out)
    first, second = value_of(build, a, type_), value_of(build, b, type_)
    if alpha != 1:
        second = arithmetic(build, "Mul", second, value_of(build, alpha, type_), second.shape)
    return arithmetic(build, op, first, second, out.shape)


def _reverse_subtract(build: Builder, out: Operation, a: Operand, b: Operand, alpha: float = 1) -> Value:
    return _binary(build, out, b, a, op="Sub", alpha=alpha)


def _divide(build: Builder, out: Operation, a: Operand, b: Operand, *, rounding_mode: object = None) -> Value:
    if rounding_mode is None:
        return _binary(build, out, a, b, op="Div")
    # a product with the reciprocal, or a division of whole numbers, would round otherwise at whole results
    operands = [build.named(value_of(build, one, "f4")) for one in (a, b)]
    found = apply(build, "Div", operands, out.shape)
    if rounding_mode == "trunc":
        sign = apply(build, "Sign", [found], out.shape)
        size = apply(build, "Floor", [apply(build, "Abs", [found], out.shape)], out.shape)
        found = arithmetic(build, "Mul", sign, size, out.shape)
    else:
        found = apply(build, "Floor", [found], out.shape)
    return build.cast(found, build_type(out))


def build_type(out: Operation) -> Type:
    """Return the type of an operation's first result."""
    return type_of(out.dtypes[0])


def _unary(build: Builder, out: Operation, x: Value, *_: object, op: str, **__: object) -> Value:
    if x.number is not None:
        x = build.named(x)
    return apply(build, op, [x], out.shape, build_type(out))


def _compare(build: Builder, out: Operation, a: Operand, b: Operand, *, op: str) -> Value:
    types = {operand.type for operand in (a, b) if isinstance(operand, Value)}
    type_: Type = "f4" if "f4" in types else "i8"
    operands = [value_of(build, a, type_), value_of(build, b, type_)]
    if op == "NotEqual":
        equal = apply(build, "Equal", operands, out.shape, "?")
        return apply(build, "Not", [equal], out.shape, "?")
    return apply(build, op, operands, out.shape, "?")


def _logical(build: Builder, out: Operation, *operands: Operand, op: str) -> Value:
    if build_type(out) != "?":
        raise NoForm("it works on the bits of integers")
    return apply(build, op, [value_of(build, one, "?") for one in operands], out.shape, "?")


def _power(build: Builder, out: Operation, base: Operand, exponent: Operand) -> Value:
    shape = out.shape
    if isinstance(base, Value) and base.number is None and isinstance(exponent, (int, float)):
        if exponent in (1, 2, 3, 4):
            powers = [base] * int(exponent)
            return reduce(lambda a, b: arithmetic(build, "Mul", a, b, shape), powers)
        if exponent in (0.5, -0.5):
            root = apply(build, "Sqrt", [base], shape)
            return root if exponent > 0 else apply(build, "Reciprocal", [root], shape)
        if exponent == -1:
            return apply(build, "Reciprocal", [base], shape)
        if exponent == 0:
            return build.number(1, build_type(out), shape)
    operands = [value_of(build, base, "f4"), value_of(build, exponent, "f4")]
    return apply(build, "Pow", operands, shape)


def _reciprocal_root(build: Builder, out: Operation, x: Value) -> Value:
    root = apply(build, "Sqrt", [x], out.shape)
    return apply(build, "Reciprocal", [root], out.shape)


def _clamp(
    build: Builder,
    out: Operation,
    x: Value,
    min: Operand | None = None,  # noqa: A002
    max: Operand | None = None,  # noqa: A002
) -> Value:
    type_ = build_type(out)
    if any(isinstance(bound, Value) and bound.shape for bound in (min, max)):
        found = x
        for bound, op in ((min, "Max"), (max, "Min")):
            if bound is not None:
                found = apply(build, op, [found, value_of(build, bound, type_)], out.shape, type_)
        return found
    bounds = [None if bound is None else value_of(build, bound, type_) for bound in (min, max)]
    return apply(build, "Clip", [x, *bounds], out.shape, type_)


def _extreme(build: Builder, out: Operation, a: Operand, b: Operand, *, op: str) -> Value:
    type_ = build_type(out)
    return apply(build, op, [value_of(build, a, type_), value_of(build, b, type_)], out.shape, type_)


def _where(build: Builder, out: Operation, condition: Value, a: Operand, b: Operand) -> Value:
    type_ = build_type(out)
    operands = [build.cast(condition, "?"), value_of(build, a, type_), value_of(build, b, type_)]
    return apply(build, "Where", operands, out.shape, type_)


def _masked_fill(build: Builder, out: Operation, x: Value, mask: Value, value: Operand) -> Value:
    return _where(build, out, mask, value, x)


def _threshold_backward(build: Builder, out: Operation, gradient: Value, x: Value, threshold: float) -> Value:
    """Return the gradient where x is above the threshold, and 0 elsewhere."""
    shape = out.shape
    above = apply(build, "Greater", [x, build.number(threshold, "f4")], shape, "?")
    return arithmetic(build, "Mul", gradient, build.cast(above, "f4"), shape)


def _hardtanh_backward(
    build: Builder, out: Operation, gradient: Value, x: Value, low: float, high: float
) -> Value:
    """Return the gradient where x is inside the bounds, and 0 elsewhere."""
    bounds = [("Greater", low), ("Less", high)]
    inside = [apply(build, op, [x, build.number(one, "f4")], out.shape, "?") for op, one in bounds]
    both = build.cast(apply(build, "And", inside, out.shape, "?"), "f4")
    return arithmetic(build, "Mul", gradient, both, out.shape)


def _times_log(build: Builder, out: Operation, x: Operand, y: Operand) -> Value:
    """Return x * log(y), which is 0 where x is 0."""
    a, b = value_of(build, x, "f4"), value_of(build, y, "f4")
    product = arithmetic(build, "Mul", a, apply(build, "Log", [build.named(b)], b.shape), out.shape)
    zero = build.number(0, "f4")
    return apply(build, "Where", [apply(build, "Equal", [a, zero], a.shape, "?"), zero, product], out.shape)


def _silu(build: Builder, out: Operation, x: Value) -> Value:
    return arithmetic(build, "Mul", x, apply(build, "Sigmoid", [x], x.shape), out.shape)


def _leaky_relu(build: Builder, out: Operation, x: Value, negative_slope: float = 0.01) -> Value:
    return apply(build, "LeakyRelu", [x], out.shape, alpha=float(negative_slope))


def _softplus(build: Builder, out: Operation, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    # above the threshold torch returns x, which differs from softplus by less than float precision
    del threshold
    if beta == 1:
        return apply(build, "Softplus", [x], out.shape)
    scaled = arithmetic(build, "Mul", x, build.number(beta, "f4"), x.shape)
    soft = apply(build, "Softplus", [scaled], out.shape)
    return arithmetic(build, "Div", soft, build.number(beta, "f4"), out.shape)


def _cast(build: Builder, out: Operation, x: Value, *_: object, **__: object) -> Value:
    return build.cast(x, build_type(out))


def _same(build: Builder, out: Operation, x: Value, *_: object, **__: object) -> Value:
    return replace(x, shape=out.shape)


def _filled(build: Builder, out: Operation, *args: Any, number: float | None = None, **_: object) -> Value:
    """Return an array filled with one number: `full`, `zeros_like` and similar operations."""
    given = number if number is not None else args[1]
    if isinstance(given, Open):
        scalar = build.cast(build.scalar(given), build_type(out))
        return Value(scalar.name, scalar.type, out.shape, (), None)
    return build.cast(build.number(given, "f4", out.shape), build_type(out))


def _scalar_tensor(build: Builder, out: Operation, number: float | Open, **_: object) -> Value:
    return _filled(build, out, None, number)


def _copy(build: Builder, out: Operation, x: Value, source: Value, *_: object) -> Value:
    return replace(build.cast(source, build_type(out)), shape=out.shape)


_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.truediv,
}
_UNARY = {
    name: partial(_unary, op=op)
    for op, names in {
        "Neg": "neg",
        "Exp": "exp",
        "Log": "log",
        "Sqrt": "sqrt",
        "Tanh": "tanh",
        "Sigmoid": "sigmoid",
        "Erf": "erf",
        "Abs": "abs",
        "Sign": "sign sgn",
        "Relu": "relu",
        "Reciprocal": "reciprocal",
        "Sin": "sin",
        "Cos": "cos",
        "Floor": "floor",
    }.items()
    for name in names.split()
}
_COMPARE = {
    "eq": "Equal",
    "ne": "NotEqual",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
}
RULES: dict[str, Callable[..., Any]] = {
    **_UNARY,
    **{name: partial(_compare, op=op) for name, op in _COMPARE.items()},
    "add": partial(_binary, op="Add"),
    "sub": partial(_binary, op="Sub"),
    "rsub": _reverse_subtract,
    "mul": partial(_binary, op="Mul"),
    "div": _divide,
    "true_divide": _divide,
    "floor_divide": partial(_divide, rounding_mode="floor"),
    "pow": _power,
    "rsqrt": _reciprocal_root,
    "maximum": partial(_extreme, op="Max"),
    "minimum": partial(_extreme, op="Min"),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda build, out, x, bound: _clamp(build, out, x, None, bound),
    "hardtanh": lambda build, out, x, low=-1.0, high=1.0: _clamp(build, out, x, low, high),
    "where": _where,
    "masked_fill": _masked_fill,
    "logical_not": partial(_logical, op="Not"),
    "bitwise_not": partial(_logical, op="Not"),
    "logical_and": partial(_logical, op="And"),
    "bitwise_and": partial(_logical, op="And"),
    "logical_or": partial(_logical, op="Or"),
    "bitwise_or": partial(_logical, op="Or"),
    "threshold_backward": _threshold_backward,
    "hardtanh_backward": _hardtanh_backward,
    "silu": _silu,
    "xlogy": _times_log,
    "leaky_relu": _leaky_relu,
    "softplus": _softplus,
    **dict.fromkeys(("_to_copy", "to"), _cast),
    **dict.fromkeys(
        ("detach", "clone", "alias", "lift_fresh_copy", "contiguous", "expand", "view_as"), _same
    ),
    "full": _filled,
    "full_like": _filled,
    "new_full": lambda build, out, _x, _size, number, **_: _filled(build, out, None, number),
    **{
        f"{prefix}{word}{suffix}": partial(_filled, number=number)
        for word, number in (("zeros", 0), ("ones", 1), ("empty", 0))
        for prefix, suffix in (("", ""), ("new_", ""), ("", "_like"))
    },
    "new_empty_strided": partial(_filled, number=0),
    "empty_strided": partial(_filled, number=0),
    "scalar_tensor": _scalar_tensor,
    "fill": lambda build, out, _, number: (
        _filled(build, out, None, number) if not isinstance(number, Value) else _same(build, out, number)
    ),
    "zero": partial(_filled, number=0),
    "copy": _copy,
    "expm1": lambda build, out, x: arithmetic(
        build, "Sub", apply(build, "Exp", [x], x.shape), build.number(1, "f4"), out.shape
    ),
    "log1p": lambda build, out, x: apply(
        build, "Log", [arithmetic(build, "Add", x, build.number(1, "f4"), x.shape)], out.shape
    ),
    "square": lambda build, out, x: arithmetic(build, "Mul", x, x, out.shape),
}
