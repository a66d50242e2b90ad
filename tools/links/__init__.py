"""Links between devices and the coordinator: what they carry and when, and real traffic behind emulated ones.

`link` defines a link, for the simulator's virtual clock and for emulation alike; `presets`, `trace_csv` and
`radio_cell` make links, `fleet_links` deals them to devices. `network_namespaces` and what it uses emulate
them with the kernel's means, `proxy` without root; `verify` measures whether they carry what they should.
"""
