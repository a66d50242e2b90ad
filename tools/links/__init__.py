"""Links between devices and the coordinator, simulated and emulated.

`link` defines a link, both for the simulator's virtual clock and for emulation. `presets`, `trace_csv` and
`radio_cell` create links; `fleet_links` assigns them to devices. `network_namespaces` and its modules emulate
links with the kernel, `proxy` without root. `verify` measures whether emulated links have their specified
rates.
"""
