"""Starts child processes, talks to them, and ends them with all descendants, whatever happens to them or to this process."""
