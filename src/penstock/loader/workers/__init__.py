"""Worker processes: which rows are whose, what crosses between them and the training process, and who died."""
