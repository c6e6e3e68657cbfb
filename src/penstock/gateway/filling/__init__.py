"""Making results ahead: ``penstock gateway fill``."""
