"""Graphs of a bundle in ONNX Runtime: one session for each set of outputs that is asked for."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from fleetune.edge_agent.training.onnx_providers import check_used, providers, version
from fleetune.edge_agent.training.ort_training_package import without_torch
from fleetune.edge_agent.training.step_guard import StepGuard
from fleetune.protocols.bundle.bundle import Bundle
from fleetune.protocols.bundle.graph import Graph
from fleetune.protocols.bundle.graph_cost import cost_of
from fleetune.protocols.bundle.onnx_file import ports_of, write_onnx
from fleetune.protocols.errors import ModelError
from fleetune.protocols.settings.section import PROCESSOR

OLDEST = (1, 16)
# As it is where nobody says it; but then Python finds that out by an exception, 20 to 40 us in each run.
_CAPTURED_GRAPH = "gpu_graph_id", "0"
MAX_SESSIONS = 6  # a method asks for a few sets of layers; each session holds memory of its own

Array = NDArray[Any]


class Sessions:
    """Runs a bundle's graphs.

    Args:
        bundle: of the model.
        threads: processor threads of one run.
        guard: ends runs; None: nothing does.
        room: bytes that a run may take at most; None: whatever the model's description allows.
        kept_bytes: memory of a run that takes no more than so many bytes is kept for the next one.
        dequantised: inputs that are fed as int8 and scales, see `write_onnx`.
        device: that computes, see `onnx_providers`.

    Raises:
        ModelError: ONNX Runtime is not installed, or too old, or cannot compute there.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int = 1,
        *,
        guard: StepGuard | None = None,
        room: int | None = None,
        kept_bytes: int = 0,
        dequantised: frozenset[str] = frozenset(),
        device: str = PROCESSOR,
    ) -> None:
        self._runtime, self._device = runtime(), device
        self._providers = providers(self._runtime, device)
        self._bundle, self._threads, self._dequantised = bundle, threads, dequantised
        self._guard, self._room = guard or StepGuard(lambda: None), room
        self._kept_bytes = kept_bytes
        self._priced: dict[tuple[str, frozenset[str], int], frozenset[str]] = {}
        self._open: OrderedDict[tuple[str, frozenset[str]], _Session] = OrderedDict()

    def run(
        self,
        graph: str,
        outputs: frozenset[str],
        feeds: Mapping[str, Array],
        into: Mapping[str, Array] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """What `graph` makes of `feeds`, of which it takes what it needs.

        Args:
            graph: its name in the bundle.
            outputs: those of its outputs that are wanted; nothing else is computed.
            feeds: contiguous arrays by the name of an input.
            into: where to write an output, by its name, instead of into an array of its own: contiguous, of
                its shape and type, and none of the `feeds`.

        Returns:
            The outputs by name, without those that went `into` an array.

        Raises:
            ModelError: the bundle has no such graph, or the runtime cannot compute it, or it takes too long.
            PacketError: it would take more than the model's description, or this device, allows.
            TrainingStopped: the guard was told so; nothing was changed.
        """
        self.price(graph, outputs, len(feeds["x"]))
        session = self._session(graph, outputs, len(feeds["x"]))
        options = self._runtime.RunOptions()
        options.add_run_config_entry(*_CAPTURED_GRAPH)
        with self._guard.over(options) as run:
            try:
                found = session.run(feeds, into, options)
            except Exception as problem:  # each of the runtime's errors is a type of its own
                reason = f"model {self._bundle.spec.name} cannot compute: {_line(problem)}"
                raise run.problem or ModelError(reason) from problem
        return found

    def price(self, graph: str, outputs: frozenset[str], num_samples: int) -> frozenset[str]:
        """What a run of so many samples would take is looked at once, before anything is made for it.

        Returns:
            The inputs that it takes.

        Raises:
            ModelError: the bundle has no such graph.
            PacketError: it would take more than the model's description, or this device, allows.
        """
        key = graph, outputs, num_samples
        if key in self._priced:
            return self._priced[key]
        most = self._bundle.most(num_samples)
        if self._room is not None:
            most = replace(most, num_bytes=min(most.num_bytes, self._room))
        kept = self._kept(graph, outputs)
        cost_of(graph, kept, num_samples).check(graph, most)
        self._priced[key] = frozenset(port.name for port in kept.inputs)
        return self._priced[key]

    def _kept(self, graph: str, outputs: frozenset[str]) -> Graph:
        name = self._bundle.spec.name
        if graph not in self._bundle.graphs:
            raise ModelError(f"the bundle of model {name} cannot do {graph!r}, which this method needs")
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
        name, kept = self._bundle.spec.name, self._kept(graph, outputs)
        keeps = cost_of(graph, kept, num_samples).num_bytes <= self._kept_bytes
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        options.log_severity_level = 4  # what goes wrong is raised
        options.enable_cpu_mem_arena = keeps  # it never gives back, and may take twice what a run takes
        options.enable_mem_pattern = keeps  # one block for a whole step: more at its peak
        try:
            session = self._runtime.InferenceSession(
                write_onnx(kept, dequantised=self._dequantised), options, providers=self._providers
            )
        except Exception as problem:  # as above
            version = self._runtime.__version__
            raise ModelError(
                f"onnxruntime {version} cannot load model {name}: {_line(problem)}; a newer one may:"
                " pip install -U onnxruntime"
            ) from problem
        check_used(session, self._device)
        inputs = [one.name for port in kept.inputs for one in ports_of(port, self._dequantised)]
        return _Session(session, inputs, list(kept.output_names), reads_in_place=self._device == PROCESSOR)


class _Session:
    """One of the runtime's, and what its inputs and outputs are bound to: most are the same ones each time.

    Args:
        session: the runtime's.
        inputs, outputs: names of what it takes and gives.
        reads_in_place: what is bound is read as it is when it runs; a card has a copy of what it was.
    """

    def __init__(self, session: Any, inputs: list[str], outputs: list[str], *, reads_in_place: bool) -> None:
        self._session, self._inputs, self._outputs = session, inputs, outputs
        self._reads_in_place = reads_in_place
        self._binding = session.io_binding()
        self._bound: dict[str, Array] = {}

    def run(self, feeds: Mapping[str, Array], into: Mapping[str, Array], options: Any) -> dict[str, Array]:
        """See `Sessions.run`."""
        for name in self._inputs:
            if self._is_new(name, feeds[name]) or not self._reads_in_place:
                self._binding.bind_cpu_input(name, feeds[name])
        for name in self._outputs:
            if name not in into:
                self._bound.pop(name, None)
                self._binding.bind_output(name, "cpu")  # anew: its shape may be another one
            elif self._is_new(name, place := into[name]):
                self._binding.bind_output(name, "cpu", 0, place.dtype, place.shape, place.ctypes.data)
        self._session.run_with_iobinding(self._binding, options)
        if len(into) == len(self._outputs):
            return {}
        found = zip(self._outputs, self._binding.get_outputs(), strict=True)
        return {name: value.numpy() for name, value in found if name not in into}

    def _is_new(self, name: str, array: Array) -> bool:
        """Whether this is not bound yet; then it is, and is held on to."""
        if self._bound.get(name) is array:
            return False
        self._bound[name] = array
        return True


def runtime() -> Any:
    """The module `onnxruntime`.

    Raises:
        ModelError: it is not installed, or too old.
    """
    try:
        with without_torch():
            import onnxruntime
    except ImportError:
        raise ModelError("ONNX Runtime is not installed here: pip install onnxruntime") from None
    if version(onnxruntime) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ModelError(
            f"onnxruntime {onnxruntime.__version__} is too old, {oldest} is needed:"
            f" pip install 'onnxruntime>={oldest}'"
        )
    return onnxruntime


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:300]
