"""Checkpoints on a store: names, manifest, commit, retention, debris. See README.md in this folder."""

from penstock.checkpoints.debris import SaveMarker
from penstock.checkpoints.directory import CheckpointInfo, Verification, inspect, remove, verify
from penstock.checkpoints.layout import COMMIT_MARKER, STEP_MAX, check_step, step_directory, step_of
from penstock.checkpoints.manifest import CheckpointFile, CheckpointItem, CheckpointManifest, decode_manifest
from penstock.checkpoints.runs import Checkpoints
from penstock.checkpoints.saving import CheckpointSave

__all__ = [
    "COMMIT_MARKER", "STEP_MAX", "CheckpointFile", "CheckpointInfo", "CheckpointItem", "CheckpointManifest",
    "CheckpointSave", "Checkpoints", "SaveMarker", "Verification", "check_step", "decode_manifest", "inspect", "remove",
    "step_directory", "step_of", "verify",
]  # fmt: skip
