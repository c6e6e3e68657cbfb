"""Makes batches of samples: decodes them, fills rows, cuts, pads and masks."""
