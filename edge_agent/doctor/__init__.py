"""edge-agent doctor: is this device fit to join a fleet?

`examination` asks one check after another, a file for each thing that is looked at; each yields results
(`result`), and one that fails itself hides none of the others. `show` prints them. A check changes nothing
on the device.
"""
