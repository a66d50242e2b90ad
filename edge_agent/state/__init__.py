"""What an agent keeps on disk: the files by name, their versions, whose the folder is, and removing it.

`agent_store` lists every file. What the bytes in them mean is known by whoever writes them.
"""
