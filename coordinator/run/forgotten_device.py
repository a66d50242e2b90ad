"""Removes everything that a stored run holds about one device.

The device's part in the shared model stays: an aggregate cannot be taken apart.
"""

from fleetune.coordinator.run.run_parts import RunParts
from fleetune.coordinator.store.method_state import change_states
from fleetune.coordinator.store.troubles import forget_troubles_of
from fleetune.protocols.method.method import DeviceId


def forget_device(run: RunParts, device: DeviceId) -> dict[str, int]:
    """Remove a device in one step of the store; return the number of removed things by kind.

    A synchronous round that is open starts again with the next attempt if the device has a part in its tasks.
    Tasks that were planned with the device could not be planned again without it.

    Raises:
        StoreError: the store is damaged or cannot be written.
    """
    state, store, ledger = run.state, run.store, run.accounts.ledger
    began = store.get("engine") is not None
    with store.step():
        in_method = began and _forget_in_method(run, device)
        planned = in_method or state.is_listed(device)
        restart = state.stage == "training" and not run.tasks.outlive and planned
        removed = {**store.drop_device(device), "method": int(in_method), "rejection": 0, "held": 0}
        if restart:
            store.drop_replies()
            store.drop_device_rounds(state.round_attempt.number)
        if run.tasks.downlink is not None:
            removed["held"] = int(run.tasks.downlink.held.of(device) is not None)
            run.tasks.downlink.held.forget(device)
        removed["rejection"] = sum(ledger.refusals_by_device.pop(device, {}).values())
        ledger.traffic.pop(device, None)
        forget_troubles_of(store, device)
        if began:
            run.extensions.forget(device)
            state.forget(device, restart=restart)
            run.rows.write(state, ledger, ())
    return {kind: number for kind, number in removed.items() if number}


def _forget_in_method(run: RunParts, device: DeviceId) -> bool:
    """Remove a device from the method's states; return True if the present one held something of it."""
    method = run.method.method
    return change_states(
        run.store, method.state_type, method.spec, lambda state: method.forget(state, device)
    )
