"""Plans what a loader does before it reads. See README.md in this folder."""
