"""The files that installing a service writes, for a program that exists."""

from fleetune.protocols.systemd import install


def made(service, folder, path, **settings):
    """The content of one of the service's files."""
    wanted = service.files(folder, "/bin/true", dict.fromkeys(service.needed, "x"), **settings)
    (file,) = [file for file in wanted if file.path == path]
    return file.content


def unit(service, folder):
    """Write the service's unit for the systemd of this machine, and return its path."""
    path = folder / service.unit
    path.write_text(made(service, folder, service.unit_file, systemd_version=install.systemd_version()))
    return path
