"""Which model a device deploys: its record and files, the rules that choose it, and the extension itself."""
