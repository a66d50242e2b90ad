"""edge-agent doctor: checks that this device can join a fleet.

`diagnosis` runs one check after another, with a file for each subject. Each check yields results
(`check_result`). A check that fails itself hides none of the others. `show` prints the results. A check
changes nothing on the device.
"""
