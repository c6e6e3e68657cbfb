"""Plans what a loader does before it reads: see README.md in this folder."""
