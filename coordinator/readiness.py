"""Whether a device that says it is ready for a run may be counted on."""

from coordinator.runs import Run
from protocols.errors import PacketCorrupt, PacketForeign, PacketOverclaimed
from protocols.messages import Ready


def check_ready(ready: Ready, device: str, run: Run) -> None:
    """Look at what it says of itself.

    Raises:
        PacketForeign: it speaks for another device, or has another model.
        PacketCorrupt: its ratio is not one of the method's.
        PacketOverclaimed: it says that it holds more samples than a device of this run may.
    """
    report, model, most = ready.report, run.enrolment.spec.hash, run.settings.round.max_samples
    if report.device != device:
        raise PacketForeign(f"ready in the name of {report.device!r}")
    if ready.model_hash != model:
        raise PacketForeign(f"ready with model {ready.model_hash!r}; the run's model is {model}")
    ratios = [choice.ratio for choice in run.method.choices(report)]
    if report.ratio not in ratios:
        raise PacketCorrupt(f"ready with ratio {report.ratio:g}; the method has {ratios}")
    if report.num_samples > most:
        raise PacketOverclaimed(f"ready with {report.num_samples} samples; round.max_samples = {most}")
