"""Tasks on their way to devices: made when they are sent, and written as differences to what devices hold."""
