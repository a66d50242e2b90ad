"""Turns the options of `edge-agent run` into an agent that is ready, for the command and for the library."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO

from msgspec.structs import fields

from fleetune.edge_agent.agent import Agent
from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.owner_policy import Policy, read_policy
from fleetune.edge_agent.joining.membership import BrokerOptions, Membership
from fleetune.edge_agent.probes.board_identity import board_name
from fleetune.edge_agent.probes.board_profile import board_named
from fleetune.edge_agent.probes.channel_rights import find_channel_rights
from fleetune.edge_agent.probes.link_speed import measure_link
from fleetune.edge_agent.probes.memory import attainable_bytes
from fleetune.edge_agent.run.activity import Activity
from fleetune.edge_agent.run.device import Device, DeviceSettings
from fleetune.edge_agent.run.stream_maker import stream_maker
from fleetune.edge_agent.run_options import RunOptions
from fleetune.edge_agent.state.state_folder import device_folder, label
from fleetune.edge_agent.training.device_data import check_source
from fleetune.protocols.errors import SettingError
from fleetune.protocols.freed_memory import give_back, return_large_blocks
from fleetune.protocols.input_files import input_limits
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport import EventSink, Will
from fleetune.protocols.wire.transport.mqtt import MqttTransport


def ready_agent(
    options: RunOptions, *, lock: IO[bytes] | None = None, tell: Callable[[Activity], None] = lambda _: None
) -> Agent:
    """Return an agent that is ready to run. The owner's mistakes are reported here.

    Args:
        options: options of the owner.
        lock: see `Device.opened`.
        tell: see `Agent`.

    Raises:
        FleetuneError: as `Agent`, or an option is wrong.
    """
    return_large_blocks()
    membership = membership_of(options)
    where = membership.present_broker
    settings = _settings(options, membership)
    fleet, device = settings.fleet, settings.device
    memory_bytes = most_memory_bytes(settings.policy, options.root)
    make_stream = stream_maker(options, settings.state, memory_bytes)
    if make_stream is None:
        with input_limits(memory_bytes=memory_bytes):
            check_source(options.data, options.test_fraction)
    give_back()
    if settings.policy.nice and hasattr(os, "nice"):
        os.nice(settings.policy.nice)

    def make_transport(farewell: bytes, events: EventSink) -> MqttTransport:
        return MqttTransport(
            membership.broker,
            topics.client_id(fleet, device, joined=membership.broker.joined),
            subscriptions=topics.device_subscriptions(fleet, device),
            events=events,
            will=Will(topics.topic(fleet, device, "state"), farewell),
            present=where,
        )

    opened = Device.opened(
        settings,
        meter=BoardMeter(options.root),
        measure_link=lambda: measure_link(where(), fleet, device),
        make_stream=make_stream,
        lock=lock,
        credentials=None if membership.joined is None else membership.joined.credentials,
    )
    return Agent(
        opened,
        make_transport,
        find_rights=lambda: find_channel_rights(where(), fleet, device),
        leave_after_run=options.leave_after_run,
        tell=tell,
    )


def most_memory_bytes(policy: Policy, root: Path) -> int | None:
    """Memory limit of this process, from the board and from its owner, in bytes; None if not known."""
    owned = None if policy.max_memory_mb is None else int(policy.max_memory_mb * 1e6)
    return min((one for one in (attainable_bytes(root), owned) if one is not None), default=None)


def _mode(text: str | None) -> int | None:
    """Parse permissions from octal digits, as chmod takes them. Raises SettingError."""
    if text is None:
        return None
    if not re.fullmatch("0?[4-7][0-7]{2}", text):
        raise SettingError(
            f"--publish-mode {text!r}: use three octal digits, with read for the owner, e.g. 0640"
        )
    return int(text, 8)


def membership_of(options: RunOptions) -> Membership:
    """Return the fleet that the options mean. Raises SettingError or StoreError."""
    return BrokerOptions(
        **{one.name: getattr(options, one.name) for one in dataclasses.fields(BrokerOptions)}
    ).membership()


def _settings(options: RunOptions, membership: Membership) -> DeviceSettings:
    """Return the owner's settings. Raises SettingError if an option is wrong."""
    folder = device_folder(options.state, membership.fleet, membership.device, options.name)
    name = options.name
    if name is None and membership.joined is not None and label(folder) == folder.name:
        name = membership.joined.name
    board = board_name(options.root) if options.board == "auto" else options.board
    board_named(board)
    return DeviceSettings(
        fleet=membership.fleet,
        device=folder.name,
        name=name,
        data=options.data,
        state=folder,
        board=board,
        test_fraction=options.test_fraction,
        threads=options.threads,
        trainer=options.trainer,
        train_on=options.train_on,
        trusted=tuple(options.trust),
        publish=options.publish,
        publish_mode=_mode(options.publish_mode),
        policy=read_policy(options.policy, {one.name: getattr(options, one.name) for one in fields(Policy)}),
    )
