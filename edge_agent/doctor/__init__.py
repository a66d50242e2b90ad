"""The command `edge-agent doctor`: checks that this device can join a fleet.

`diagnosis` runs one check after another. Each subject (board, state folder, samples, broker, ...) has a file
of checks. A check yields results (`check_result`) and changes nothing on the device. If a check raises an
error, the others still run. `show` prints the results.
"""
