"""Rules for matrix products."""

from collections.abc import Callable
from typing import Any

from fleetune.coordinator.export.builder import Builder, Value
from fleetune.coordinator.export.operators.elementwise import arithmetic
from fleetune.coordinator.export.torch_trace import Operation, Shape


def matrix_product(build: Builder, a: Value, b: Value, shape: Shape, bias: Value | None = None) -> Value:
    """Return the product of two matrices, plus bias; transposed operands are used without a copy."""
    flags: dict[str, Any] = {}
    operands = []
    for flag, operand in (("transA", a), ("transB", b)):
        matrix = build.whole(operand)
        node = build.maker.get(matrix.name)
        if node and node.op == "Transpose":
            flags[flag] = 1
            matrix = build.value(node.inputs[0])
        operands.append(matrix)
    if bias is None and not flags:
        return build.emit("MatMul", operands, shape)
    return build.emit("Gemm", operands if bias is None else [*operands, build.named(bias)], shape, **flags)


def _mm(build: Builder, out: Operation, a: Value, b: Value) -> Value:
    return matrix_product(build, a, b, out.shape)


def _addmm(
    build: Builder, out: Operation, bias: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    if beta == alpha == 1:
        return matrix_product(build, a, b, out.shape, bias)
    found = arithmetic(
        build, "Mul", matrix_product(build, a, b, out.shape), build.number(alpha, "f4"), out.shape
    )
    scaled = arithmetic(build, "Mul", bias, build.number(beta, "f4"), bias.shape)
    return arithmetic(build, "Add", found, scaled, out.shape)


def _bmm(build: Builder, out: Operation, a: Value, b: Value) -> Value:
    return build.emit("MatMul", (build.whole(a), build.whole(b)), out.shape)


def _baddbmm(
    build: Builder, out: Operation, bias: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    found = arithmetic(build, "Mul", _bmm(build, out, a, b), build.number(alpha, "f4"), out.shape)
    scaled = arithmetic(build, "Mul", bias, build.number(beta, "f4"), bias.shape)
    return arithmetic(build, "Add", found, scaled, out.shape)


RULES: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
}
