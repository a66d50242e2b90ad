"""What an agent keeps on disk, its versions, and removing it."""
