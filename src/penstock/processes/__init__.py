"""Child processes: started, talked to, and ended with all that they started, whatever happens to them or to this process."""
