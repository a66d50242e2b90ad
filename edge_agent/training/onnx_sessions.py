"""Runs a bundle's graphs in ONNX Runtime, with one session for each set of outputs."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from fleetune.edge_agent.training.onnx_providers import check_used, check_version, providers
from fleetune.edge_agent.training.ort_training_package import without_torch
from fleetune.edge_agent.training.step_guard import StepGuard
from fleetune.protocols.bundle.bundle import Bundle
from fleetune.protocols.bundle.graph import Graph
from fleetune.protocols.bundle.graph_cost import cost_of
from fleetune.protocols.bundle.onnx_file import ports_of, write_onnx
from fleetune.protocols.errors import ModelError
from fleetune.protocols.settings.section import PROCESSOR

# This is the default. Without it Python finds out by an exception, which takes 20 to 40 us in each run.
_CAPTURED_GRAPH = "gpu_graph_id", "0"
MAX_SESSIONS = 6  # A method uses a few sets of layers, and each session holds its own memory.

Array = NDArray[Any]


class Sessions:
    """Runs a bundle's graphs.

    Args:
        bundle: the model's bundle.
        threads: processor threads of one run.
        guard: ends runs that take too long; None if runs are not limited.
        room: most bytes that a run may take; None for as many as the model's description allows.
        cache_bytes: memory of a run up to this size is kept for the next run.
        dequantised: inputs that are passed as int8 and scales, see `write_onnx`.
        device: device that computes, see `onnx_providers`.

    Raises:
        ModelError: ONNX Runtime is missing or too old, or cannot compute on the device.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int = 1,
        *,
        guard: StepGuard | None = None,
        room: int | None = None,
        cache_bytes: int = 0,
        dequantised: frozenset[str] = frozenset(),
        device: str = PROCESSOR,
    ) -> None:
        self._runtime, self._device = runtime(), device
        self._providers = providers(self._runtime, device)
        self._bundle, self._threads, self._dequantised = bundle, threads, dequantised
        self._guard, self._room = guard or StepGuard(lambda: None), room
        self._cache_bytes = cache_bytes
        self._priced: dict[tuple[str, frozenset[str], int], frozenset[str]] = {}
        self._open: OrderedDict[tuple[str, frozenset[str]], _Session] = OrderedDict()

    def run(
        self,
        graph: str,
        outputs: frozenset[str],
        feeds: Mapping[str, Array],
        into: Mapping[str, Array] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """Run a graph, and return its outputs by name, except those written `into` an array.

        Args:
            graph: name of the graph in the bundle.
            outputs: names of the wanted outputs; no others are computed.
            feeds: contiguous arrays by the name of an input. The graph takes those that it needs.
            into: by the name of an output, a contiguous array of its shape and type to write to, which must
                not be one of the `feeds`.

        Raises:
            ModelError: the bundle has no such graph, the runtime cannot compute it, or it takes too long.
            PacketError: the run would take more than the model's description or this device allows.
            TrainingStopped: the guard was asked to stop; no array was changed.
        """
        self.price(graph, outputs, len(feeds["x"]))
        session = self._session(graph, outputs, len(feeds["x"]))
        options = self._runtime.RunOptions()
        options.add_run_config_entry(*_CAPTURED_GRAPH)
        with self._guard.over(options) as run:
            try:
                found = session.run(feeds, into, options)
            except Exception as problem:  # the runtime's errors have no common type
                reason = f"model {self._bundle.spec.name} cannot compute: {_line(problem)}"
                raise run.problem or ModelError(reason) from problem
        return found

    def forget_arrays(self) -> None:
        """Release all arrays that earlier runs were given; the next run of a session binds its own."""
        for session in self._open.values():
            session.forget_arrays()

    def price(self, graph: str, outputs: frozenset[str], num_samples: int) -> frozenset[str]:
        """Check the predicted cost of a run with this many samples, before memory is allocated for it.

        Returns:
            The inputs that the run takes.

        Raises:
            ModelError: the bundle has no such graph.
            PacketError: the run would take more than the model's description or this device allows.
        """
        key = graph, outputs, num_samples
        if key in self._priced:
            return self._priced[key]
        most = self._bundle.most(num_samples)
        if self._room is not None:
            most = replace(most, num_bytes=min(most.num_bytes, self._room))
        needed = self._needed(graph, outputs)
        cost_of(graph, needed, num_samples).check(graph, most)
        self._priced[key] = frozenset(port.name for port in needed.inputs)
        return self._priced[key]

    def _needed(self, graph: str, outputs: frozenset[str]) -> Graph:
        name = self._bundle.spec.name
        if graph not in self._bundle.graphs:
            raise ModelError(f"the bundle of model {name} has no graph {graph!r}, which this method needs")
        return self._bundle.graphs[graph].keeping(outputs)

    def _session(self, graph: str, outputs: frozenset[str], num_samples: int) -> "_Session":
        key = graph, outputs
        if key not in self._open:
            self._open[key] = self._start(graph, outputs, num_samples)
            while len(self._open) > MAX_SESSIONS:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return self._open[key]

    def _start(self, graph: str, outputs: frozenset[str], num_samples: int) -> "_Session":
        name, needed = self._bundle.spec.name, self._needed(graph, outputs)
        keeps = cost_of(graph, needed, num_samples).num_bytes <= self._cache_bytes
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        options.log_severity_level = 4  # log nothing below errors: failures are raised
        # The arena never returns memory and may take twice what a run needs.
        options.enable_cpu_mem_arena = keeps
        options.enable_mem_pattern = keeps  # One block for a whole step has a higher peak.
        try:
            session = self._runtime.InferenceSession(
                write_onnx(needed, dequantised=self._dequantised), options, providers=self._providers
            )
        except Exception as problem:  # see above
            version = self._runtime.__version__
            raise ModelError(
                f"onnxruntime {version} cannot load model {name}: {_line(problem)}; a newer version may:"
                " pip install -U onnxruntime"
            ) from problem
        check_used(session, self._device)
        inputs = [one.name for port in needed.inputs for one in ports_of(port, self._dequantised)]
        return _Session(session, inputs, list(needed.output_names), reads_in_place=self._device == PROCESSOR)


class _Session:
    """One of the runtime's sessions and its bound inputs and outputs, most of which stay the same.

    Args:
        session: the runtime's session.
        inputs, outputs: names of the session's inputs and outputs.
        reads_in_place: True if a run reads a bound array itself. On a GPU it reads an earlier copy.
    """

    def __init__(self, session: Any, inputs: list[str], outputs: list[str], *, reads_in_place: bool) -> None:
        self._session, self._inputs, self._outputs = session, inputs, outputs
        self._reads_in_place = reads_in_place
        self._binding = session.io_binding()
        self._bound: dict[str, Array] = {}

    def run(self, feeds: Mapping[str, Array], into: Mapping[str, Array], options: Any) -> dict[str, Array]:
        """Bind the arrays that changed and run the session, see `Sessions.run`."""
        for name in self._inputs:
            if self._is_new(name, feeds[name]) or not self._reads_in_place:
                self._binding.bind_cpu_input(name, feeds[name])
        for name in self._outputs:
            if name not in into:
                self._bound.pop(name, None)
                self._binding.bind_output(name, "cpu")  # bind again, as its shape may have changed
            elif self._is_new(name, place := into[name]):
                self._binding.bind_output(name, "cpu", 0, place.dtype, place.shape, place.ctypes.data)
        self._session.run_with_iobinding(self._binding, options)
        if len(into) == len(self._outputs):
            return {}
        found = zip(self._outputs, self._binding.get_outputs(), strict=True)
        return {name: value.numpy() for name, value in found if name not in into}

    def forget_arrays(self) -> None:
        """Release all bound arrays."""
        self._bound.clear()
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()

    def _is_new(self, name: str, array: Array) -> bool:
        """True if this array was not bound yet; it is then bound, and a reference is kept."""
        if self._bound.get(name) is array:
            return False
        self._bound[name] = array
        return True


def runtime() -> Any:
    """Return the module `onnxruntime`.

    Raises:
        ModelError: ONNX Runtime is missing or too old.
    """
    try:
        with without_torch():
            import onnxruntime
    except ImportError:
        raise ModelError("ONNX Runtime is not installed here; pip install onnxruntime") from None
    check_version(onnxruntime.__version__)
    return onnxruntime


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:300]
