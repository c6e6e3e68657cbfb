"""The kernel's FUSE protocol: its messages, a session, and mounting. Nothing here knows of stores."""
