"""An agent's files on disk: their names and format versions, who owns the folder, and how to remove them.

`agent_store` lists every file. The module that writes a file defines its content.
"""
